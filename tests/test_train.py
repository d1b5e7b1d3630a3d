"""The training job: what it logs, when it stops, where it writes, and its command line under torchrun."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dtcp._paths import conf_dir
from dtcp.train.config import RunConfig, compose_job_config
from dtcp.train.metrics import StepMetrics, format_step
from dtcp.train.nonfinite import NonFiniteError
from dtcp.train.run_folder import open_run_folder
from dtcp.train.session import JobError, Session, StopSignal, agreed
from dtcp.train.trainer import Trainer
from parity import JOB, TINY, RecordingTrainer, compare, nothing, record_run, scattered

GPT = [*TINY["gpt"], *JOB, "training.seq_len=33", "training.steps=3"]
LLAMA = [*TINY["llama"], *JOB, "training.seq_len=33", "training.steps=3"]


# ---- what is logged --------------------------------------------------------------------------------------------------


def train_into(rank: int, world: int, overrides: list[str], folder: str) -> list[StepMetrics]:
    trainer = Trainer(compose_job_config(overrides))
    history = list(trainer.steps())
    again = Trainer(compose_job_config(overrides))
    again.train(Path(folder))
    assert again.tokens_seen == trainer.tokens_seen
    return history


def test_tokens_seen_counts_real_tokens_of_the_global_batch(ranks, tmp_path):
    """At dp=2 cp=2, 5 steps of 32 x 2048 tokens are 327,680; here 4 x 33, padded to 36, and no pad is counted."""
    overrides = [*GPT, "training.steps=5", "mesh.cp=2", "mesh.dp_shard=2"]
    histories = ranks.run(4, train_into, overrides, str(tmp_path))
    for history in histories:
        assert [m.tokens_seen for m in history] == [4 * 33 * step for step in range(1, 6)]
        assert [m.num_valid_tokens for m in history] == [4 * 33] * 5
        assert [(m.loss, m.grad_norm, m.lr) for m in history] == [(m.loss, m.grad_norm, m.lr) for m in histories[0]]


def test_metrics_file_has_one_line_per_step_written_by_one_rank(ranks, tmp_path):
    history = ranks.run(2, train_into, [*GPT, "mesh.cp=2"], str(tmp_path))[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [m.loss for m in history]
    wanted = {"step", "loss", "grad_norm", "tokens_seen", "lr", "tokens_per_second"}
    assert all(wanted <= line.keys() for line in lines)
    saved = OmegaConf.load(tmp_path / "config.yaml")
    assert (saved.model.name, saved.mesh.cp, saved.mesh.dp_shard) == ("gpt_tiny", 2, 1)  # -1 before
    assert saved.run.name == tmp_path.name  # null before


def uniform_logits(rank: int, world: int, overrides: list[str]) -> float:
    trainer = RecordingTrainer(overrides, scattered)
    with torch.no_grad():
        trainer.model.head.weight.zero_()
    return trainer.train_step()[0].loss


def test_loss_of_uniform_logits_is_the_log_of_the_vocabulary(ranks):
    for loss in ranks.run(4, uniform_logits, [*LLAMA, "mesh.cp=2"]):
        assert loss == pytest.approx(math.log(264), abs=1e-6)


def test_the_log_line_has_torchtitans_form_and_says_what_a_cpu_has_not():
    metrics = StepMetrics(7, 2.5, 1.25, 1e-3, 640, 640, 0.5, 1280.0, 640.0, 0.01, None, 1.5, 0.1)
    assert format_step(metrics, torch.device("cpu")) == (
        "step:  7  loss:  2.50000  grad_norm:  1.2500  memory: 1.50GiB (resident)  "
        "tps: 640  tflops: 0.01  mfu: n/a (cpu)"
    )


# ---- data ------------------------------------------------------------------------------------------------------------


def rows_read(rank: int, world: int, overrides: list[str], step: int) -> list[tuple[int, list, list, list]]:
    """(row, positions, tokens, labels) of every row that this rank holds a part of; pads left out."""
    trainer = Trainer(compose_job_config(overrides))
    trainer.step = step
    found = []
    for microbatch in trainer.read_microbatches():
        valid = microbatch.labels[0] != -100
        for i, row in enumerate(microbatch.row_indices):
            parts = (microbatch.positions[i], microbatch.tokens[i], microbatch.labels[i])
            found.append((row, *(part[valid].tolist() for part in parts)))
    return found


@pytest.mark.parametrize(("world", "mesh"), [(1, ""), (2, "mesh.cp=2"), (4, "mesh.cp=2"), (4, "mesh.dp_replicate=2")])
def test_every_mesh_reads_the_same_rows_and_a_step_needs_no_history(ranks, world, mesh):
    overrides = [*GPT, *mesh.split(), "training.local_batch_size=1"]
    dataset = Trainer(compose_job_config(GPT)).dataset
    tokens: dict[tuple[int, int], set] = {}
    for found in ranks.run(world, rows_read, overrides, 5):
        for row, positions, row_tokens, labels in found:
            for position, token, label in zip(positions, row_tokens, labels, strict=True):
                tokens.setdefault((row, position), set()).add((token, label))
    expected = [dataset.row(5, row, 4).tolist() for row in range(4)]
    assert tokens == {(r, p): {(expected[r][p], expected[r][p + 1])} for r in range(4) for p in range(33)}


def different_rows(rank: int, world: int) -> None:
    trainer = Trainer(compose_job_config([*GPT, "mesh.cp=2"]))
    right = trainer.read_rows
    trainer.read_rows = lambda step, rows: right(step + rank, rows)
    trainer.train_step()


def test_cp_ranks_that_read_different_rows_are_found_in_the_first_step(ranks):
    ranks.run_expecting(2, different_rows, ValueError, r"hold different data: .*ranks \[0\] \| ranks \[1\]")


# ---- stopping --------------------------------------------------------------------------------------------------------


class FaultyTrainer(RecordingTrainer):
    """Makes a number that is not finite in step 2, and knows whether the weights moved in it."""

    def __init__(self, overrides: list[str], fault: str) -> None:
        super().__init__(overrides, nothing)
        self.fault = fault

    def forward(self, microbatch):
        logits = super().forward(microbatch)
        if self.fault == "token" and self.step == 1:
            row = torch.tensor(microbatch.row_indices)[:, None]
            here = ((row == 2) & (microbatch.positions == 30)) | ((row == 3) & (microbatch.positions == 1))
            logits = logits.masked_fill(here[..., None], float("nan"))
        return logits

    def compute_gradients(self, microbatches):
        result = super().compute_gradients(microbatches)
        if self.fault == "gradient" and self.step == 1:
            gradient = self.model.token_embedding.weight.grad
            local = getattr(gradient, "to_local", lambda: gradient)()
            if local.numel() and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                local.view(-1)[0] = float("inf")
        return result


def stop_on_fault(rank: int, world: int, overrides: list[str], fault: str) -> tuple[str, int, bool]:
    trainer = FaultyTrainer(overrides, fault)
    trainer.train_step()
    if fault == "weight":
        with torch.no_grad():
            trainer.model.layers["0"].feed_forward.up.weight.mul_(float("nan"))
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteError) as caught:
        trainer.train_step()
    same = all(
        torch.equal(*(getattr(x, "to_local", lambda x=x: x)().nan_to_num() for x in pair))
        for pair in zip(weights, trainer.model.parameters(), strict=True)
    )
    return str(caught.value), trainer.step, same


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("token", r"step 2 was not taken: loss nan.*first bad token: row 2, position 30;"),
        ("gradient", r"first bad gradient: token_embedding\.weight;"),
        ("weight", r"first bad weight: layers\.0\.feed_forward\.up\.weight; first bad token: row 0, position 0"),
    ],
)
def test_a_loss_or_norm_that_is_not_finite_stops_all_ranks_before_the_step(ranks, world, fault, message):
    mesh = [] if world == 1 else ["mesh.cp=2"]
    results = ranks.run(world, stop_on_fault, [*LLAMA, *mesh, "training.local_batch_size=1"], fault)
    for said, step, weights_are_those_before in results:
        assert re.search(message, said), said
        assert step == 1
        assert weights_are_those_before
    assert len({said for said, _, _ in results}) == 1


def stop_one(rank: int, world: int) -> int:
    trainer = Trainer(compose_job_config([*GPT, "mesh.cp=2"]))
    return len(list(trainer.steps(stop_requested=lambda: rank == 1 and trainer.step == 1)))


def test_all_ranks_stop_after_the_same_step_when_one_is_asked_to(ranks):
    assert ranks.run(2, stop_one) == [2, 2]


def test_a_repeated_signal_is_one_wish_and_a_late_one_acts_at_once():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT
        stop.REPEAT_SECONDS = -1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- options ---------------------------------------------------------------------------------------------------------


def test_bfloat16_trains_with_float32_master_weights(ranks):
    float32 = ranks.run(1, record_run, LLAMA, scattered)[0]
    for world, mesh in ((1, []), (2, ["mesh.cp=2"]), (4, ["mesh.cp=2", "mesh.dp_replicate=2"])):
        overrides = [*LLAMA, *mesh, "training.param_dtype=bfloat16"]
        run = ranks.run(world, record_run, overrides, scattered)[0]
        assert all(gradient.dtype == torch.float32 for gradient in run.gradients[1].values())
        difference = compare(run, float32)
        # bfloat16 has 8 bits: 4e-3 a value. The loss is a mean of hundreds of them.
        assert 1e-6 < difference.loss < 5e-3, difference
        assert difference.gradient < 0.1, difference


@pytest.mark.slow
def test_compiled_blocks_train_like_eager_ones_and_compile_once(ranks):
    def count_graphs(rank: int, world: int, overrides: list[str]) -> tuple:
        from torch._dynamo.utils import counters

        counters.clear()
        run = record_run(rank, world, overrides, scattered)
        return run, counters["stats"]["unique_graphs"], dict(counters["graph_break"])

    eager = ranks.run(1, record_run, GPT, scattered)[0]
    run, num_graphs, breaks = ranks.run(2, count_graphs, [*GPT, "mesh.cp=2", "training.compile=true"], timeout=300)[0]
    assert compare(run, eager).is_within
    assert num_graphs == 1  # both blocks, all three steps
    assert not breaks


def test_weight_decay_spares_biases_and_norms():
    trainer = Trainer(compose_job_config([*GPT, "optimizer.weight_decay=0.3"]))
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        assert decay[id(parameter)] == (0.0 if name.endswith("bias") or "norm" in name else 0.3), name


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.tp=2"], r"world size = tp·cp·pp·dp.*nearest that works"),
        (["mesh.cp=0"], r"cp must be >= 1"),
        (["training.seq_len=0"], r"seq_len must be"),
        (["training.seq_len=129"], r"model\.max_seq_len=129"),
        (["model.max_seq_len=99999999", "training.seq_len=99999999"], r"Use seq_len <= \d+"),
        (["data=text", "data.paths=[/nowhere/*.txt]"], r"/nowhere/\*\.txt matches no file"),
        (["training.global_batch_size=3", "training.local_batch_size=2"], r"got 3; nearest that work: 2 or 4"),
        (["training.global_batch_size=0"], r"training\.global_batch_size has to be at least 1, got 0"),
        (["training.local_batch_size=0"], r"training\.local_batch_size has to be at least 1, got 0; null takes"),
        (["training.steps=0"], r"training\.steps has to be at least 1, got 0"),
        (["debug.check_same_batch_every=-1"], r"debug\.check_same_batch_every has to be at least 0, got -1"),
        (["pipeline.stages_per_rank=0"], r"pipeline\.stages_per_rank has to be at least 1, got 0"),
        (["training.max_norm=-1"], r"training\.max_norm has to be positive"),
        (["optimizer.lr=0"], r"optimizer\.lr has to be positive"),
        (["model.vocab_size=100"], r"use model\.vocab_size=257"),
        (["attention.strategy=zigzag"], r"strategy must be one of ring"),
        (["attention.layout=zigzag"], r"layout must be one of contiguous"),
        (["attention.kernel=fast"], r"kernel must be one of"),
    ],
)
def test_bad_values_are_refused_with_a_cure(overrides, message):
    with pytest.raises(ValueError, match=message):
        Trainer(compose_job_config([*GPT, *overrides]))


def make_trainer(rank: int, world: int, overrides: list[str]) -> None:
    Trainer(compose_job_config(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.pp=2"], "schedule 1F1B with pp=2 cannot run 1 microbatches; use 2 or a multiple of it"),
        (["mesh.cp=3"], "world size is 2; nearest that works"),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused_on_all_ranks(ranks, overrides, message):
    ranks.run_expecting(2, make_trainer, JobError, message, [*GPT, *overrides])


def fail_on(rank: int, world: int, failing: int) -> None:
    with agreed():
        if rank == failing:
            raise FileNotFoundError(2, "No such file", "x.txt")


def test_an_error_of_one_rank_ends_all_and_names_it(ranks):
    ranks.run_expecting(3, fail_on, JobError, r"FileNotFoundError: .*'x\.txt' \(rank 1\)", 1)


def test_an_earlier_run_is_kept_and_other_folders_are_left_alone(tmp_path, capsys):
    config = RunConfig(name="a", dir=str(tmp_path))
    with open_run_folder(config, "gpt_tiny") as first:
        (first / "metrics.jsonl").write_text("first")
    with open_run_folder(config, "gpt_tiny"):
        assert (tmp_path / "a.1" / "metrics.jsonl").read_text() == "first"
        assert "kept the earlier run" in capsys.readouterr().out
        (tmp_path / "a" / "metrics.jsonl").write_text("second")
    with open_run_folder(config, "gpt_tiny"):
        assert (tmp_path / "a.2" / "metrics.jsonl").read_text() == "second"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name, folder, error, message in (
        ("mine", tmp_path, ValueError, r"not empty and not a run of dtcp; choose another run\.name"),
        ("../a", tmp_path, ValueError, "plain folder name"),
        ("a", tmp_path / "file", OSError, r"cannot write the run folder .*; set run\.dir"),
    ):
        with pytest.raises(error, match=message), open_run_folder(RunConfig(name=name, dir=str(folder)), "gpt_tiny"):
            pass


def try_to_open(rank: int, world: int, path: Path, step: int | None) -> None:
    with open_run_folder(RunConfig(name="a", dir=str(path)), "gpt_tiny", continue_from_step=step):
        pass


def test_a_folder_that_another_job_writes_to_is_refused_and_stays_as_it_is(ranks, tmp_path):
    with open_run_folder(RunConfig(name="a", dir=str(tmp_path)), "gpt_tiny") as folder:
        (folder / "metrics.jsonl").write_text('{"step": 5}\n')
        for step in (None, 3):
            message = rf"another job \(process {os.getpid()} on .*\) writes to the run folder .*another run.name"
            ranks.run_expecting(1, try_to_open, ValueError, message, tmp_path, step)
        assert (folder / "metrics.jsonl").read_text() == '{"step": 5}\n' and not (tmp_path / "a.1").exists()
    assert not (folder / ".lock").exists()
    (folder / "checkpoints" / "step_00000004").mkdir(parents=True)
    message = "another job has gone on in .* to step_00000004 meanwhile; start this one again"
    ranks.run_expecting(1, try_to_open, ValueError, message, tmp_path, 3)
    ranks.run(1, try_to_open, tmp_path, 4)
    assert (folder / "metrics.jsonl").read_text() == ""
    (folder / ".lock").write_text("process 1 on a host that has died")
    ranks.run(1, try_to_open, tmp_path, None)
    assert (tmp_path / "a.1").exists()


def run_to_the_end(rank: int, world: int, overrides: list[str]) -> list[int]:
    """Exit codes of a job, and of the same for fewer steps than it has taken."""
    from dtcp.train.__main__ import train

    session = Session(0, 1, torch.device("cpu"))
    return [train(compose_job_config([*overrides, f"training.steps={steps}"]), session) for steps in (2, 2, 1)]


def test_a_job_that_has_no_step_left_is_done(ranks, tmp_path):
    small = ["model.num_layers=1", "model.dim=16", "training.seq_len=16", "training.global_batch_size=1"]
    overrides = [*small, f"run.dir={tmp_path}", "run.name=a", "checkpoint.every=1", "lr_scheduler.warmup_steps=0"]
    assert ranks.run(1, run_to_the_end, overrides) == [[0, 0, 0]]


def test_a_run_without_a_name_is_called_like_its_model(ranks, tmp_path):
    def open_folder(rank: int, world: int) -> str:
        with open_run_folder(RunConfig(name=None, dir=str(tmp_path)), "gpt_tiny") as folder:
            return str(folder)

    paths = ranks.run(2, open_folder)
    assert paths[0] == paths[1]
    assert re.fullmatch(r"gpt_tiny-\d{8}-\d{6}", Path(paths[0]).name)


# ---- the command line ------------------------------------------------------------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dtcp.train"]
ALONE = [sys.executable, "-m", "dtcp.train"]


def command(launcher: list[str], overrides: list[str], cwd: Path, **options) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(conf_dir()).parent)}
    return subprocess.Popen(
        [*launcher, *overrides], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_torchrun_and_one_process_train_alike_and_write_only_their_folder(tmp_path):
    jobs = [
        command(TORCHRUN, [*GPT, "mesh.cp=2", "run.name=two"], tmp_path),
        command(ALONE, [*GPT, "run.name=one"], tmp_path),
    ]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert outputs[0][0].count("step:  3  loss:") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]
    assert sorted(path.name for path in (tmp_path / "outputs" / "two").iterdir()) == ["config.yaml", "metrics.jsonl"]
    table = compare_runs(tmp_path / "outputs" / "two", tmp_path / "outputs" / "one")
    assert table.returncode == 0, table.stdout + table.stderr
    assert "(tolerance 1e-05): equal" in table.stdout


def compare_runs(*arguments: str | Path) -> subprocess.CompletedProcess:
    script = Path(conf_dir()).parent / "tools" / "compare_runs.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def test_compare_runs_tells_different_runs_from_equal_ones(tmp_path):
    runs = {"a": [5.0, 4.0], "close": [5.0, 4.00001], "far": [5.0, 4.01], "nan": [5.0, math.nan], "short": [5.0]}
    for name, losses in runs.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    a = tmp_path / "a"
    assert {name: compare_runs(tmp_path / name, a).returncode for name in [*runs, "missing"]} == {
        "a": 0, "close": 0, "far": 1, "nan": 1, "short": 2, "missing": 2
    }  # fmt: skip
    assert compare_runs(tmp_path / "far", a, "--tolerance", "0.01").returncode == 0
    assert json.loads(compare_runs(tmp_path / "far", a, "--json").stdout)["largest"] == pytest.approx(0.0025)


def test_errors_under_torchrun_are_one_line_and_end_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    job = command(TORCHRUN, [*GPT, "mesh.cp=2", "run.dir=file"], tmp_path)
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 1
    assert errors.count("error: cannot write the run folder") == 1
    assert "dtcp/train" not in errors.replace("dtcp/train/__main__", "")  # no traceback of ours
    assert "step:" not in output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["training.stepz=3"], "Key 'stepz' not in 'TrainingConfig'"), (["mesh.cp=2"], "torchrun --nproc-per-node 2")],
)
def test_errors_of_one_process_are_short(tmp_path, overrides, message):
    job = command(ALONE, overrides, tmp_path)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    assert message in errors
    assert "Traceback" not in errors


def test_sigterm_ends_all_ranks_after_a_whole_step(tmp_path):
    job = command(TORCHRUN, [*GPT, "mesh.cp=2", "training.steps=100000", "run.name=long"], tmp_path)
    metrics = tmp_path / "outputs" / "long" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 3
    assert f"stopped by a signal after step {len(steps)}" in output
