"""Fine-tuning by transformers' Trainer over a cut sequence, beside its own on one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = Path(__file__).parent / "hf_finetune.py"
TEXT = "Documents of many lengths are packed into rows that a rank holds in part, and each sees itself only."


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps({"text": TEXT[i % 60 : i % 60 + 5 + 7 * i % 33] + f" {i}"}) for i in range(80)]
    path.write_text("\n".join(lines))
    return path


def train(rows, out, *options, nproc=1):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), str(rows), str(out), *options], capture_output=True, text=True,
        timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    steps = [(entry["loss"], entry["grad_norm"]) for entry in found["log"] if "grad_norm" in entry]
    assert len(steps) == 4
    return steps, found["eval_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora",)], ids=["full", "lora"])
def test_four_ranks_have_the_loss_gradient_norm_and_evaluation_of_one(rows, tmp_path, options):
    steps, evaluated = train(rows, tmp_path / "one.json", "--eager", *options)
    of_four, evaluated_of_four = train(rows, tmp_path / "four.json", *options, nproc=4)
    for one, four in zip(steps, of_four, strict=True):
        assert four == pytest.approx(one, rel=1e-5)
    assert evaluated_of_four == pytest.approx(evaluated, rel=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_an_epoch_as_if_nothing_had_been(rows, tmp_path):
    out = tmp_path / "run.json"
    whole = train(rows, out, "--save", nproc=4)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    assert train(rows, out, "--resume", nproc=4) == whole


def test_options_that_would_be_left_out_are_refused():
    from transformers import TrainingArguments

    import dtcp
    from dtcp.integrations.trainer import ContextParallelTrainer
    from hf_models import build

    arguments = {"output_dir": "unused", "use_cpu": True, "report_to": []}
    for args, more, name in (
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor"),
        ({}, {"compute_loss_func": lambda *args, **kwargs: 0}, "compute_loss_func"),
        ({}, {"compute_metrics": lambda predictions: {}}, "compute_metrics"),
    ):
        with pytest.raises(NotImplementedError, match=f"does not know {name}; leave it out"):
            ContextParallelTrainer(
                build("llama", "dtcp"), TrainingArguments(**arguments | args), dims=dtcp.ParallelDims(), **more
            )


def test_sizes_of_accelerate_are_degrees_of_the_mesh(monkeypatch):
    from accelerate import ParallelismConfig

    from dtcp.integrations import trainer

    monkeypatch.setattr(trainer, "ParallelDims", dict)  # of a world of four, which is not here
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert trainer.dims_of(ParallelismConfig(cp_size=2, dp_shard_size=2)) == {"cp": 2, "dp_replicate": 2, "dp_shard": 1}
    with pytest.raises(NotImplementedError, match="has cp and dp, got tp_size=2"):
        trainer.dims_of(ParallelismConfig(tp_size=2, dp_shard_size=2))
