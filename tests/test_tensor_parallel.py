"""Tensor and sequence parallelism of the models: training on every mesh equals one rank's."""

import dataclasses
import functools
from collections.abc import Callable

import pytest

from parity import DROPOUT, JOB, PEAKED, TINY, Ignored, Record, compare, nothing, record_run, scattered, tail
from ranks import Ranks

STEPS = 10
PLAIN = "tensor_parallel.sequence_parallel=false"
COMPILED = "training.compile=true"
# A head for each of four ranks, and keys shared by two query heads; the vocabulary of 257 ids never divides evenly.
MODELS = {
    "gpt": ("model.vocab_size=257", *DROPOUT),
    "gpt_untied": ("model.vocab_size=257", "model.tie_weights=false"),
    "llama": ("model.vocab_size=257", "model.num_heads=8", "model.num_kv_heads=4"),
    "llama_tied": ("model.tie_weights=true", "model.num_heads=8", "model.num_kv_heads=4"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh with a way to attend, and what is trained on it."""

    mesh: str
    world: int
    model: str
    ignored: Ignored
    options: tuple[str, ...] = ()
    seq_len: int = 97

    @property
    def overrides(self) -> list[str]:
        return [*self.mesh.split(), *self.options, *job(self.model, self.seq_len)]

    def __str__(self) -> str:
        names = [self.model, self.mesh.replace("mesh.", "").replace(" ", ","), *self.options, self.ignored.__name__]
        return "-".join([*names, str(self.seq_len)])


def job(model: str, seq_len: int, steps: int = STEPS) -> list[str]:
    sizes = [*TINY[model.split("_")[0]], *MODELS[model]]
    return [*sizes, *JOB, PEAKED, f"training.seq_len={seq_len}", f"training.steps={steps}"]


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
    Case("mesh.tp=4", 4, "gpt", tail, ("activation_checkpointing.mode=full",)),
    slow(Case("mesh.tp=4", 4, "llama", scattered, (COMPILED,))),
    Case("mesh.cp=2 mesh.tp=2", 4, "llama", scattered, (*attend("ring", "head_tail"), "training.local_batch_size=1")),
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
