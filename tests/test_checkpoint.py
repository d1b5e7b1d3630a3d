"""A resumed job is the job that nobody stopped: bitwise on the same mesh, to rounding on another one."""

import functools
import json

import pytest
import torch

from dtcp.train.checkpoint_files import whole_checkpoints
from parity import TOLERANCE
from resuming import JOB_OF, Run, run_job, saved, train


@pytest.fixture(scope="module")
def never_stopped(ranks):
    @functools.cache
    def reference(model: str, mesh: str, world: int) -> Run:
        return ranks.run(world, train, [*JOB_OF[model], *mesh.split()])[0]

    return reference


def names_of(path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


SAME_MESH = [
    ("llama", 1, ""),
    ("gpt", 2, "mesh.cp=2"),
    pytest.param("llama", 4, "mesh.cp=2 mesh.dp_shard=2", marks=pytest.mark.slow),
    pytest.param("gpt", 4, "mesh.pp=2 mesh.tp=2 training.local_batch_size=1", marks=pytest.mark.slow),
    pytest.param("llama", 4, "mesh.pp=2 mesh.dp_shard=2 training.local_batch_size=1", marks=pytest.mark.slow),
    pytest.param("gpt", 4, "mesh.cp=2 mesh.dp_replicate=2", marks=pytest.mark.slow),
    pytest.param("gpt", 1, "training.param_dtype=bfloat16", marks=pytest.mark.slow),
    pytest.param("llama", 2, "mesh.cp=2 training.compile=true training.local_batch_size=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "world", "mesh"), SAME_MESH)
def test_a_resumed_job_is_bitwise_the_one_that_was_not_stopped(
    ranks, never_stopped, tmp_path, model, world, mesh, asynchronous
):
    """The first job goes on for a step after the save, so a save that shared memory with training would show."""
    overrides = [*JOB_OF[model], *mesh.split(), *saved(tmp_path), f"checkpoint.asynchronous={asynchronous}"]
    first = ranks.run(world, run_job, overrides, 3)[0]
    checkpoints = tmp_path / "a" / "checkpoints"
    assert names_of(checkpoints) == ["step_00000002", "step_00000003"]
    (checkpoints / "step_00000003").rename(checkpoints / "step_00000003.partial")  # as if it had died while saving
    second = ranks.run(world, run_job, overrides)[0]
    whole = never_stopped(model, mesh, world)
    assert first.losses[:2] + second.losses == whole.losses
    assert first.grad_norms[:2] + second.grad_norms == whole.grad_norms
    assert first.lrs[:2] + second.lrs == whole.lrs
    assert second.tokens_seen == whole.tokens_seen
    assert second.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(second.tensors[name], tensor), name
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == whole.losses
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert names_of(checkpoints) == ["step_00000004", "step_00000006"]
    assert names_of(tmp_path) == ["a"]


OTHER_MESH = [
    ("llama", 1, "", 2, "mesh.cp=2"),
    ("llama", 2, "mesh.dp_shard=2", 3, "mesh.cp=3 attention.layout=striped attention.strategy=all_gather"),
    pytest.param("gpt", 2, "mesh.cp=2", 4, "mesh.cp=2 mesh.dp_shard=2", marks=pytest.mark.slow),
    pytest.param(
        "gpt", 4, "mesh.pp=2 mesh.tp=2 training.local_batch_size=1", 4, "mesh.cp=2 mesh.tp=2", marks=pytest.mark.slow
    ),
    pytest.param("llama", 2, "mesh.tp=2", 2, "mesh.pp=2 training.local_batch_size=1", marks=pytest.mark.slow),
    pytest.param("llama", 4, "mesh.cp=2 mesh.dp_replicate=2", 1, "training.local_batch_size=1", marks=pytest.mark.slow),
    pytest.param("gpt", 3, "mesh.cp=3", 2, "mesh.dp_replicate=2", marks=pytest.mark.slow),
    pytest.param("gpt", 4, "mesh.cp=2 mesh.dp_shard=2", 1, "", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "world", "mesh", "new_world", "new_mesh"), OTHER_MESH)
def test_a_job_resumed_on_another_mesh_continues_the_same_curve(
    ranks, never_stopped, tmp_path, model, world, mesh, new_world, new_mesh
):
    overrides = [*JOB_OF[model], *saved(tmp_path)]
    ranks.run(world, run_job, [*overrides, *mesh.split()], 3)
    runs = ranks.run(new_world, run_job, [*overrides, *new_mesh.split()])
    second, tensors = runs[0], {name: x for run in runs for name, x in run.tensors.items()}  # a stage has its own
    whole = never_stopped(model, "", 1)
    assert second.losses == pytest.approx(whole.losses[3:], rel=TOLERANCE)
    assert second.grad_norms == pytest.approx(whole.grad_norms[3:], rel=TOLERANCE)
    assert second.lrs == whole.lrs[3:]
    for name, tensor in whole.tensors.items():
        if name.startswith("model.") and not name.endswith("key.bias"):  # whose gradient is 0 up to noise
            error = (tensors[name] - tensor).norm() / tensor.norm()
            assert error < 10 * TOLERANCE, name  # Adam divides by roots of tiny squares


def load_without(rank: int, world: int, overrides: list[str], forgotten: str) -> Run:
    from unittest import mock

    from dtcp.train import checkpoint, trainer

    def some(model, optimizer):
        state = checkpoint.state_tensors(model, optimizer)
        return {name: value.clone() if forgotten in name else value for name, value in state.items()}

    with mock.patch.object(trainer, "state_tensors", some):
        return run_job(rank, world, overrides)


@pytest.mark.parametrize("forgotten", ["exp_avg_sq", "token_embedding", ".step"])
def test_the_comparison_sees_a_tensor_that_was_not_restored(ranks, never_stopped, tmp_path, forgotten):
    overrides = [*JOB_OF["llama"], *saved(tmp_path)]
    ranks.run(1, run_job, overrides, 3)
    second = ranks.run(1, load_without, overrides, forgotten)[0]
    assert second.losses != pytest.approx(never_stopped("llama", "", 1).losses[3:], rel=10 * TOLERANCE)


def test_the_oldest_checkpoints_go_when_a_new_one_is_whole(ranks, tmp_path):
    overrides = [*JOB_OF["llama"], *saved(tmp_path), "checkpoint.every=1", "mesh.cp=2"]
    ranks.run(2, run_job, [*overrides, "checkpoint.keep=3"])
    assert [path.name for path in whole_checkpoints(tmp_path / "a" / "checkpoints")] == [
        "step_00000004", "step_00000005", "step_00000006"
    ]  # fmt: skip
    ranks.run(1, run_job, [*JOB_OF["llama"], *saved(tmp_path, "b"), "checkpoint.keep=0"])
    assert len(whole_checkpoints(tmp_path / "b" / "checkpoints")) == 3


def test_left_overs_of_a_job_that_died_are_ignored_and_deleted(ranks, tmp_path):
    overrides = [*JOB_OF["llama"], *saved(tmp_path)]
    ranks.run(1, run_job, overrides, 2)
    checkpoints = tmp_path / "a" / "checkpoints"
    for name in ("step_00000004.partial", "step_00000001.removed"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "__0_0.distcp").touch()
    with (tmp_path / "a" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert len(ranks.run(1, run_job, overrides)[0].losses) == 4
    assert names_of(checkpoints) == ["step_00000004", "step_00000006"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_finished_job_has_nothing_left_to_do_and_can_be_prolonged(ranks, tmp_path):
    overrides = [*JOB_OF["llama"], *saved(tmp_path)]
    ranks.run(1, run_job, overrides)
    assert ranks.run(1, run_job, overrides)[0].losses == []
    assert len(ranks.run(1, run_job, [*overrides, "training.steps=8"])[0].losses) == 2
    assert names_of(tmp_path) == ["a"]


def test_without_resume_an_earlier_run_is_kept_with_its_checkpoints(ranks, tmp_path):
    overrides = [*JOB_OF["llama"], *saved(tmp_path)]
    ranks.run(1, run_job, overrides, 2)
    assert len(ranks.run(1, run_job, [*overrides, "checkpoint.resume=never"])[0].losses) == 6
    assert names_of(tmp_path) == ["a", "a.1"]
    assert names_of(tmp_path / "a.1" / "checkpoints") == ["step_00000002"]


def test_a_new_run_goes_on_from_a_checkpoint_of_another(ranks, never_stopped, tmp_path):
    ranks.run(1, run_job, [*JOB_OF["llama"], *saved(tmp_path)], 5)
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    older = tmp_path / "a" / "checkpoints" / "step_00000004"
    expected = never_stopped("llama", "", 1).losses
    for source, name, num_steps in ((older, "b", 2), (tmp_path / "a", "c", 1)):
        overrides = [*JOB_OF["llama"], *saved(tmp_path, name), f"checkpoint.resume={source}"]
        assert ranks.run(1, run_job, overrides)[0].losses == expected[-num_steps:]
        steps = [json.loads(line)["step"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(7 - num_steps, 7))
    assert {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()} == before
