"""Charts of a run: torchtitan's names, one writer, and a resumed run that goes on without a step twice."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from dtcp.train.config import TrackingConfig, compose_job_config
from dtcp.train.metrics import StepMetrics
from dtcp.train.tracking import Tracker, WandB, check_tracking, titan_names
from dtcp.train.trainer import Trainer
from parity import JOB, TINY

SMALL = [*TINY["gpt"], *JOB, "training.seq_len=33", "tracking.tensorboard=true"]
EVALUATED = ["data.validation_fraction=0.1", "evaluation.every=2", "evaluation.batches=1"]


def step_metrics(step: int, loss: float) -> StepMetrics:
    return StepMetrics(step, loss, 1.25, 1e-3, 64 * step, 64, 0.5, 1280.0, 640.0, 0.01, None, 1.5, 0.1)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By name, (step, value) as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def track(folder: Path, steps: range, losses: float, *, config: TrackingConfig, step: int) -> None:
    with Tracker(config, folder, settings="a: 1", step=step, device=torch.device("cpu")) as tracker:
        for number in steps:
            tracker.log(step_metrics(number, losses), None)


def test_the_names_are_torchtitans():
    """Those of a GPU's memory aside, which a CPU has none of: torchtitan's own source has each of them."""
    spec = importlib.util.find_spec("torchtitan")
    titan = "".join(
        (Path(spec.submodule_search_locations[0]) / p).read_text() for p in ("components/metrics.py", "trainer.py")
    )
    names = set(titan_names(step_metrics(1, 2.0), torch.device("cpu"))) | {"validation_metrics/loss"}
    names -= {"memory/max_resident(GiB)", "lr"}
    assert {"loss_metrics/global_avg_loss", "grad_norm", "throughput(tps)", "time_metrics/end_to_end(s)"} <= names
    assert not [name for name in names if f'"{name}"' not in titan]


def train_into(rank: int, world: int, overrides: list[str], folder: str) -> list[float]:
    own = Path(folder) if rank == 0 else Path(folder) / "of_another_rank"
    trainer = Trainer(compose_job_config(overrides))
    trainer.train(own)
    return own.exists()


def test_a_job_of_two_ranks_writes_each_step_once_by_one_rank(ranks, tmp_path):
    overrides = [*SMALL, *EVALUATED, "training.steps=3", "mesh.cp=2"]
    assert ranks.run(2, train_into, overrides, str(tmp_path)) == [True, False]
    drawn = scalars(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in drawn["grad_norm"]] == [1, 2, 3]
    for name, key in (("loss_metrics/global_avg_loss", "loss"), ("throughput(tps)", "tokens_per_second_per_device")):
        assert [value for _, value in drawn[name]] == pytest.approx([line[key] for line in lines], rel=1e-6), name
    evaluated = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    assert [step for step, _ in drawn["validation_metrics/loss"]] == [step for step, _ in evaluated] == [2, 3]
    assert drawn["validation_metrics/loss"][0][1] == pytest.approx(evaluated[0][1], rel=1e-6)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_steps_taken_again_replace_those_of_the_killed_job(tmp_path):
    config = TrackingConfig(tensorboard=True, wandb=False, project="dtcp")
    track(tmp_path, range(1, 7), 1.0, config=config, step=0)
    track(tmp_path, range(5, 9), 2.0, config=config, step=4)
    assert scalars(tmp_path)["loss_metrics/global_avg_loss"] == [(s, 1.0 if s <= 4 else 2.0) for s in range(1, 9)]


def test_nothing_is_written_unless_asked_for(tmp_path):
    track(tmp_path, range(1, 3), 1.0, config=TrackingConfig(tensorboard=False, wandb=False, project="x"), step=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_the_cure(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = TrackingConfig(tensorboard=name == "tensorboard", wandb=name == "wandb", project="dtcp")
    with pytest.raises(ValueError, match=rf"tracking.{name}=true needs the package {name}.*dtcp\[track\]"):
        check_tracking(config)


def wandb_records(file: Path) -> list[bytes]:
    """What a .wandb file holds: LevelDB's log, blocks of 32 KiB of (checksum 4, length 2, type 1, data)."""
    data, at, parts, found = file.read_bytes(), 7, b"", []  # 7: the file's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no record begins so near to a block's end
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found


def offline_history(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of all offline runs in the folder, as they would be sent; they are one run."""
    from wandb.proto import wandb_internal_pb2

    found, ids = [], set()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.run.run_id:
                ids.add(record.run.run_id)
            if record.history.item:
                row = {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                found.append((row["_step"], row["loss_metrics/global_avg_loss"]))
    assert len(ids) == 1
    return found


@pytest.mark.slow
def test_weights_and_biases_offline_goes_on_in_the_same_run_without_a_step_twice(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = TrackingConfig(tensorboard=False, wandb=True, project="dtcp")
    track(tmp_path, range(1, 7), 1.0, config=config, step=0)
    track(tmp_path, range(5, 9), 2.0, config=config, step=4)
    assert offline_history(tmp_path) == [(s, 1.0 if s <= 6 else 2.0) for s in range(1, 9)]


@pytest.mark.slow
def test_weights_and_biases_that_cannot_start_says_how_to_stay_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def init(**_: object) -> None:
        raise wandb.errors.UsageError("no API key configured")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ValueError, match="no API key configured.*WANDB_MODE=offline"):
        WandB(tmp_path, "dtcp", {})
