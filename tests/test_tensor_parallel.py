"""Tensor and sequence parallelism of the models: training on every mesh equals one rank's."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from dtcp.train.config import compose_job_config
from dtcp.train.nonfinite import NonFiniteError
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from parity import STEPS, Ignored, Record, compare, job, nothing, record_run, scattered, tail
from ranks import Ranks

PLAIN = "tensor_parallel.sequence_parallel=false"
COMPILED = "training.compile=true"


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh with a way to attend, and what is trained on it."""

    mesh: str
    world: int
    model: str
    ignored: Ignored
    options: tuple[str, ...] = ()
    seq_len: int = 97

    def __str__(self) -> str:
        names = [self.model, self.mesh.replace("mesh.", "").replace(" ", ","), *self.options, self.ignored.__name__]
        return "-".join([*names, str(self.seq_len)])


def attend(strategy: str, layout: str) -> tuple[str, ...]:
    return f"attention.strategy={strategy}", f"attention.layout={layout}"


def slow(case: Case) -> object:
    return pytest.param(case, marks=pytest.mark.slow)


# 97 is prime: padded to a multiple of tp, and of cp. `scattered` leaves the second data parallel rank without a label.
CASES = [
    Case("mesh.tp=2", 2, "gpt", scattered, (PLAIN,)),
    slow(Case("mesh.tp=2", 2, "llama", tail, (PLAIN, COMPILED))),
    Case("mesh.tp=2", 2, "llama", scattered, ("training.loss_chunk_tokens=32",)),
    slow(Case("mesh.tp=2", 2, "gpt", scattered, ("training.loss_chunk_tokens=32", PLAIN))),
    slow(Case("mesh.tp=2", 2, "llama_tied", tail, (COMPILED,))),
    slow(Case("mesh.tp=2", 2, "gpt_untied", nothing, ("training.local_batch_size=1",))),
    slow(Case("mesh.tp=2", 2, "gpt", scattered, (COMPILED,), 96)),
    slow(Case("mesh.tp=3", 3, "gpt", tail, ("model.num_heads=6", "model.dim=48"))),
    slow(Case("mesh.tp=4", 4, "gpt", tail, ("activation_checkpointing.mode=full",))),
    slow(Case("mesh.tp=4", 4, "llama", scattered, (COMPILED,))),
    Case("mesh.cp=2 mesh.tp=2", 4, "llama", scattered, attend("ring", "head_tail")),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "llama", nothing, ("training.local_batch_size=1",))),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "gpt", tail, (*attend("all_gather", "contiguous"), COMPILED), 96)),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "gpt_untied", scattered, (*attend("ring", "striped"), PLAIN))),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "llama_tied", nothing, (*attend("all_gather", "head_tail"), PLAIN))),
    slow(Case("mesh.dp_shard=2 mesh.tp=2", 4, "gpt", scattered)),
    slow(Case("mesh.dp_replicate=2 mesh.tp=2", 4, "llama", scattered, (COMPILED,))),
    slow(Case("mesh.cp=3 mesh.tp=2", 6, "gpt", scattered, attend("ring", "striped"))),
    slow(Case("mesh.cp=3 mesh.tp=2", 6, "llama", tail, (*attend("ring", "head_tail"), COMPILED))),
    slow(Case("mesh.dp_replicate=2 mesh.cp=2 mesh.tp=2", 8, "gpt", scattered, attend("ring", "head_tail"))),
    slow(Case("mesh.dp_replicate=2 mesh.cp=2 mesh.tp=2", 8, "llama", tail, attend("all_gather", "striped"))),
    slow(Case("mesh.dp_shard=2 mesh.cp=2 mesh.tp=2", 8, "llama", scattered, attend("ring", "contiguous"))),
    slow(Case("mesh.dp_shard=2 mesh.cp=2 mesh.tp=2", 8, "gpt", tail, (*attend("all_gather", "head_tail"), PLAIN))),
]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[..., Record]:
    """Train on one rank, once for all cases with the same data and model."""

    @functools.cache
    def reference(overrides: tuple[str, ...], ignored: Ignored, record: tuple[int, ...]) -> Record:
        return ranks.run(1, record_run, list(overrides), ignored, record)[0]

    return reference


def reference_of(case: Case) -> tuple[str, ...]:
    return *job(case.model, case.seq_len), *(o for o in case.options if o.startswith("model."))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_on_a_mesh_with_tp_equals_one_rank(ranks, one_rank, case):
    reference = one_rank(reference_of(case), case.ignored, (1, STEPS))
    overrides = [*job(case.model, case.seq_len), *case.mesh.split(), *case.options]
    runs = ranks.run(case.world, record_run, overrides, case.ignored, (1, STEPS), timeout=400)
    for rank, run in enumerate(runs):
        difference = compare(run, reference)
        assert difference.is_within, f"rank {rank}: {difference}"
    assert reference.losses[-1] < reference.losses[0] - 0.2  # it does learn


# ---- the trainer around it -------------------------------------------------------------------------------------------

SHORT = [*job("llama", 33, 3), "mesh.tp=2"]


def two_lines(rank: int, world: int, overrides: list[str]) -> str:
    trainer = Trainer(compose_job_config(overrides))
    assert trainer.layout.local_seq_len % 2 == 0
    return trainer.describe()


def test_the_job_says_how_it_is_cut(ranks):
    assert "x cp 1 x tp 2 with sequence parallelism  attention" in ranks.run(2, two_lines, SHORT)[0]
    plain = [*SHORT, PLAIN, "training.seq_len=34"]
    assert "x cp 1 x tp 2  attention" in ranks.run(2, two_lines, plain)[0]


def refuse_heads(rank: int, world: int) -> None:
    Trainer(compose_job_config([*job("llama", 33), "mesh.tp=2", "model.num_kv_heads=1"]))


def test_heads_that_ranks_cannot_share_end_the_job_on_all_ranks(ranks):
    ranks.run_expecting(2, refuse_heads, JobError, r"num_kv_heads=1 and tp=2; use tp=1, and cp or dp_shard")


def stop_one(rank: int, world: int) -> int:
    trainer = Trainer(compose_job_config(SHORT))
    return len(list(trainer.steps(stop_requested=lambda: rank == 1 and trainer.step == 1)))


def test_all_ranks_stop_when_one_of_tp_is_asked_to(ranks):
    assert ranks.run(2, stop_one) == [2, 2]


def bad_weight(rank: int, world: int) -> str:
    trainer = Trainer(compose_job_config([*SHORT, "mesh.cp=2"]))
    trainer.train_step()
    with torch.no_grad():
        trainer.model.layers["0"].feed_forward.up.weight.mul_(float("nan"))
    with pytest.raises(NonFiniteError) as caught:
        trainer.train_step()
    return str(caught.value)


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_found_on_all_ranks(ranks):
    said = set(ranks.run(4, bad_weight))
    assert len(said) == 1
    assert "first bad weight: layers.0.feed_forward.up.weight; first bad token: row 0, position 0" in said.pop()


def different_rows(rank: int, world: int) -> None:
    trainer = Trainer(compose_job_config(SHORT))
    read = trainer.read_rows
    trainer.read_rows = lambda step, rows: read(step + rank, rows)
    trainer.train_step()


def test_tp_ranks_that_read_different_rows_are_found_in_the_first_step(ranks):
    ranks.run_expecting(2, different_rows, ValueError, r"hold different data: .*ranks \[0\] \| ranks \[1\]")


def half_precision(rank: int, world: int) -> Record:
    return record_run(rank, world, [*SHORT, "training.param_dtype=bfloat16"], nothing, (1,))


@pytest.mark.slow
def test_bfloat16_under_tp_is_bfloat16_of_one_rank(ranks, one_rank):
    """To the rounding of bfloat16: 2^-9 of each number, and sums of many."""
    reference = one_rank((*job("llama", 33, 3), "training.param_dtype=bfloat16"), nothing, (1,))
    difference = compare(ranks.run(2, half_precision)[0], reference)
    assert difference.loss < 1e-3
    assert difference.grad_norm < 0.05
