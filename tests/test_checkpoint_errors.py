"""Checkpoints that are damaged, foreign or of another job, and saves that fail: told in one line on all ranks."""

import json
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest

from dtcp.train.checkpoint_files import (
    AtomicWriter,
    read_description,
    whole_checkpoints,
    write_description,
)
from dtcp.train.config import compose_job_config
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from resuming import JOB_OF, run_job, saved, tensors_of

LLAMA = JOB_OF["llama"]


@pytest.fixture(scope="module")
def finished(ranks, tmp_path_factory) -> Path:
    """The run folder of a job that saved the steps 4 and 6."""
    path = tmp_path_factory.mktemp("finished")
    ranks.run(1, run_job, [*LLAMA, *saved(path)])
    return path / "a"


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it, to damage."""
    shutil.copytree(finished, tmp_path / "a")
    return tmp_path / "a"


def newest(run: Path) -> Path:
    return whole_checkpoints(run / "checkpoints")[-1]


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_a_bit_of_the_index(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"model.final_norm", b"model.final_morn"))


def lose_a_file(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()


def cut_the_description(checkpoint: Path) -> None:
    path = checkpoint / "checkpoint.json"
    path.write_text(path.read_text()[:-10])


def change_the_step(checkpoint: Path) -> None:
    path = checkpoint / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 6', '"step": 7'))


def lose_the_description(checkpoint: Path) -> None:
    (checkpoint / "checkpoint.json").unlink()


def another_format(checkpoint: Path) -> None:
    write_description(checkpoint, read_description(checkpoint) | {"format": 99, "version": "9.9"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"step_00000006 is damaged: __0_0.distcp has \d+ bytes, \d+ were written; delete it to go on from "
                   r"step_00000004"),
        (flip_a_bit, r"is damaged: __0_0.distcp has another checksum than when it was written"),
        (flip_a_bit_of_the_index, r"is damaged: .metadata has another checksum"),
        (lose_a_file, r"is damaged: __0_0.distcp is missing"),
        (cut_the_description, r"is damaged: checkpoint.json cannot be read"),
        (change_the_step, r"is damaged: checkpoint.json has another checksum"),
        (lose_the_description, r"is damaged: it has no checkpoint.json; delete it"),
        (another_format, r"has format 99, written by dtcp 9.9; this version reads format 1"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_and_the_run_left_alone(ranks, run, damage, message):
    damage(newest(run))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    ranks.run_expecting(2, run_job, JobError, message, [*LLAMA, *saved(run.parent), "mesh.cp=2"])
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_layers=3"], r"made by another job: model.num_layers was 2 and is 3; set them back, or start anew"),
        (["training.seq_len=32", "debug.seed=5"], r"training.seq_len was 33 and is 32; debug.seed was 0 and is 5"),
        (["training.global_batch_size=8"], r"training.global_batch_size was 4 and is 8"),
        (["data.validation_fraction=0.1"], r"another dataset: .*validation_fraction was 0.01 and is 0.1"),
        (["data.max_bytes=1000000"], r"made with another dataset: data was '\w+' and is '\w+'"),
        (JOB_OF["gpt"][:4], r"model was LlamaConfig and is GPTConfig"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_by_key(ranks, finished, overrides, message):
    ranks.run_expecting(1, run_job, ValueError, message, [*LLAMA, *saved(finished.parent), *overrides])


def load_other_tensors(rank: int, world: int, overrides: list[str], checkpoint: Path, change: str) -> None:
    """As if two jobs were described alike and had other tensors."""
    from dtcp.train import trainer

    def changed(model, optimizer):
        tensors = tensors_of(job)
        if change == "name":
            tensors["model.new"] = tensors.pop("model.final_norm.weight")
        else:
            tensors["model.final_norm.weight"] = tensors["model.final_norm.weight"][:-1]
        return tensors

    job = Trainer(compose_job_config(overrides))
    with mock.patch.object(trainer, "state_tensors", changed):
        job.load(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", r"of another model: tensors 1 missing, such as model.new and 1 that the job has not, such as "
                 r"model.final_norm.weight"),
        ("shape", r"of another model: model.final_norm.weight is \(64,\) torch.float32, the job has \(63,\)"),
    ],
)  # fmt: skip
def test_other_tensors_are_named(ranks, finished, change, message):
    ranks.run_expecting(2, load_other_tensors, JobError, message, [*LLAMA, "mesh.cp=2"], newest(finished), change)


def load_and_train(rank: int, world: int, overrides: list[str], checkpoint: Path) -> tuple[list[str], list[float]]:
    job = Trainer(compose_job_config(overrides))
    job.load(checkpoint)
    return job.changed_settings, [metrics.lr for metrics in job.steps()]


def test_settings_that_may_differ_are_told_and_hold(ranks, finished):
    overrides = [*LLAMA, "training.steps=7", "optimizer.lr=1e-3", "mesh.cp=2", "attention.layout=striped"]
    told, lrs = ranks.run(2, load_and_train, overrides, newest(finished))[0]
    assert sorted(told) == [
        "optimizer.lr was 0.0003, is 0.001 from here on",
        "training.steps was 6, is 7 from here on",
    ]
    assert lrs == [pytest.approx(1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 6 / 7))))]


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("nowhere", r"nowhere does not exist; name a folder <run>/checkpoints/step_… or <run>"),
        (".", r"is neither a checkpoint nor a run with one"),
        ("a/checkpoints/step_00000004", r"an older checkpoint of this very run, whose newest is step_00000006; give"),
    ],
)
def test_a_folder_that_is_no_place_to_go_on_from_is_refused(ranks, finished, resume, message):
    overrides = [*LLAMA, *saved(finished.parent), f"checkpoint.resume={finished.parent / resume}"]
    ranks.run_expecting(2, run_job, JobError, message, [*overrides, "mesh.cp=2"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint.every=-1", r"checkpoint.every has to be at least 0, got -1"),
        ("checkpoint.keep=-1", r"checkpoint.keep has to be at least 0, got -1; 0 keeps all"),
        ("checkpoint.resume=''", r"checkpoint.resume has to be auto, never or a folder"),
        ("evaluation.every=-1", r"evaluation.every has to be at least 0, got -1"),
        ("evaluation.batches=0", r"evaluation.batches has to be at least 1, got 0; null reads all"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        Trainer(compose_job_config([*LLAMA, override]))


# ---- saves that fail -------------------------------------------------------------------------------------------------


def fail_to_save(rank: int, world: int, overrides: list[str], failing: int, place: str) -> None:
    """The disk of one rank is full from step 4 on."""
    right = getattr(AtomicWriter, place)

    def full(self, *args, **kwargs):
        if rank == failing and "step_00000004" in str(self._folder):
            raise OSError(28, "No space left on device")
        return right(self, *args, **kwargs)

    with mock.patch.object(AtomicWriter, place, full):
        run_job(rank, world, overrides)


@pytest.mark.parametrize(
    ("failing", "place", "asynchronous"), [(1, "write_data", "true"), (0, "finish", "true"), (1, "write_data", "false")]
)
def test_a_full_disk_is_one_line_on_all_ranks_and_the_last_good_one_stays(
    ranks, tmp_path, failing, place, asynchronous
):
    overrides = [*LLAMA, *saved(tmp_path), "mesh.cp=2", f"checkpoint.asynchronous={asynchronous}"]
    message = (
        rf"cannot save a checkpoint in .*No space left on device \(rank {failing}\); make room there or set run.dir"
    )
    messages = ranks.run_expecting(2, fail_to_save, JobError, message, overrides, failing, place)
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert [path.name for path in whole_checkpoints(tmp_path / "a" / "checkpoints")] == ["step_00000002"]
    assert (tmp_path / "a" / "checkpoints" / "step_00000004.partial").exists()
    assert len(ranks.run(1, run_job, overrides[:-2])[0].losses) == 4


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(ranks, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").touch()

    def file_in_the_way(rank: int, world: int, overrides: list[str]) -> None:
        from dtcp.train.checkpoint import Checkpointer

        job = Trainer(compose_job_config(overrides))
        (tmp_path / "a" / "checkpoints").touch()
        Checkpointer(job.config.checkpoint, tmp_path / "a", job.model, job.optimizer)

    overrides = [*LLAMA, *saved(tmp_path), "mesh.cp=2"]
    ranks.run_expecting(2, file_in_the_way, JobError, r"cannot make .*checkpoints: .*; set run.dir", overrides)


def test_an_error_of_all_ranks_lets_the_save_in_flight_end(ranks, tmp_path):
    def diverge(rank: int, world: int, overrides: list[str]) -> None:
        right = Trainer.compute_gradients

        def nan_in_step_3(self, microbatches):
            share, count = right(self, microbatches)
            return (share * float("nan") if self.step == 2 else share), count

        with mock.patch.object(Trainer, "compute_gradients", nan_in_step_3):
            run_job(rank, world, overrides)

    overrides = [*LLAMA, *saved(tmp_path), "mesh.cp=2"]
    ranks.run_expecting(2, diverge, JobError, "step 3 was not taken", overrides)
    assert [path.name for path in whole_checkpoints(tmp_path / "a" / "checkpoints")] == ["step_00000002"]


def test_the_description_can_be_read_by_people(finished):
    body = json.loads((newest(finished) / "checkpoint.json").read_text())["body"]
    assert (body["step"], body["tokens_seen"], body["version"]) == (6, 6 * 4 * 33, "0.1.0")
    assert body["trained"]["training.seq_len"] == 33
