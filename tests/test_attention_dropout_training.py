"""Training with attention dropout on any mesh is training on one rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import pytest

from parity import DROPOUT, JOB, PEAKED, TINY, TOLERANCE, Record, compare, nothing, record_run, scattered
from ranks import Ranks


def job(steps: int, *more: str) -> list[str]:
    return [*TINY["gpt"], *JOB, PEAKED, "training.seq_len=97", f"training.steps={steps}", *DROPOUT, *more]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[..., Record]:
    @functools.cache
    def reference(steps: int, record: tuple[int, ...], *more: str) -> Record:
        return ranks.run(1, record_run, job(steps, *more), scattered, record)[0]

    return reference


MESHES = [
    ("mesh.cp=2", 2),
    ("mesh.cp=3 attention.layout=striped attention.strategy=all_gather", 3),
    ("mesh.tp=2", 2),
    ("mesh.tp=2 tensor_parallel.sequence_parallel=false", 2),
    ("mesh.pp=2 training.local_batch_size=2", 2),
    ("mesh.cp=2 mesh.dp_shard=2 attention.kernel=math", 4),
    ("mesh.cp=2 mesh.pp=2 training.local_batch_size=2", 4),
    ("mesh.cp=2 mesh.tp=2", 4),
    ("mesh.cp=2 mesh.tp=2 activation_checkpointing.mode=full", 4),
    ("mesh.cp=2 mesh.tp=2 activation_checkpointing.mode=selective training.compile=true", 4),
    ("mesh.cp=2 training.local_batch_size=1 training.compile=true", 2),
    ("mesh.tp=2 training.compile=true", 2),
]


def check_training(ranks: Ranks, reference: Record, mesh: str, world: int, steps: int, record: tuple[int, ...]) -> None:
    overrides = [*job(steps), *mesh.split()]
    runs = ranks.run(world, record_run, overrides, scattered, record, timeout=300)
    if "mesh.pp" in mesh:  # a rank has the gradients of its stages
        gradients = {step: {k: v for run in runs for k, v in run.gradients[step].items()} for step in record}
        runs = [dataclasses.replace(run, gradients=gradients) for run in runs]
    for rank, run in enumerate(runs):
        difference = compare(run, reference)
        assert difference.is_within, f"rank {rank}: {difference}"


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "world"), MESHES)
def test_training_with_attention_dropout_equals_one_rank(ranks, one_rank, mesh, world):
    check_training(ranks, one_rank(10, (1, 10)), mesh, world, 10, (1, 10))


@pytest.mark.slow
def test_a_llama_trains_so_too(ranks):
    sizes = [*TINY["llama"], *JOB, PEAKED, "training.seq_len=97", "training.steps=2"]
    dropped = [*sizes, "model.attention_dropout=0.1", "optimizer.eps=1e-5"]
    reference, without = (ranks.run(1, record_run, of, scattered, (1, 2))[0] for of in (dropped, sizes))
    assert compare(without, reference).gradient > 1000 * TOLERANCE
    for mesh, world in (("mesh.cp=2 mesh.tp=2", 4), ("mesh.cp=2 training.local_batch_size=2", 2)):
        for run in ranks.run(world, record_run, [*dropped, *mesh.split()], scattered, (1, 2)):
            assert compare(run, reference).is_within, (mesh, compare(run, reference))


@pytest.mark.slow
def test_attention_dropout_does_something_to_training(one_rank):
    without = one_rank(2, (1, 2), "model.attention_dropout=0")
    assert compare(without, one_rank(2, (1, 2))).gradient > 1000 * TOLERANCE


def record_with_local_heads(rank: int, world: int, overrides: list[str]) -> Record:
    """Each tensor parallel rank counts its heads from 0."""
    from dtcp.parallelize.dropout import HeadParallelDropout

    def wrong(self, module, device_mesh):
        module.head_shard = 0
        return module

    with mock.patch.object(HeadParallelDropout, "_apply", wrong):
        return record_run(rank, world, overrides, scattered, (1, 2))


@pytest.mark.slow
def test_the_comparison_sees_heads_that_are_counted_on_each_rank(ranks, one_rank):
    run = ranks.run(2, record_with_local_heads, [*job(2), "mesh.tp=2"])[0]
    assert compare(run, one_rank(2, (1, 2))).gradient > 100 * TOLERANCE


def refuse_fused(rank: int, world: int) -> None:
    record_run(rank, world, [*job(1), "mesh.cp=2", "attention.kernel=flash"], nothing, ())


def test_a_fused_kernel_is_refused_before_the_first_step(ranks):
    ranks.run_expecting(2, refuse_fused, Exception, "kernel='flash'.*with dropout 0.1.*use kernel='auto' or 'math'")


def refuse_untold_heads(rank: int, world: int) -> None:
    import dtcp
    from dtcp.models import build_model

    dims = dtcp.ParallelDims(tp=2)
    dims.build_mesh("cpu")
    model = build_model("gpt_tiny", num_layers=1, attention_dropout=0.1)
    plan = dtcp.tensor_parallel_plan(model)
    del plan["layers.*.attention.sdpa"]
    dtcp.apply_tensor_parallel(model, dims, plan=plan)


def test_a_tensor_plan_that_does_not_tell_the_heads_is_refused(ranks):
    message = r"p=0.1 in layers.0.attention.sdpa and no HeadParallelDropout.*add \{'layers.0.attention.sdpa'"
    ranks.run_expecting(2, refuse_untold_heads, ValueError, message)
