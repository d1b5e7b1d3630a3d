"""Training with chunks of the loss, recomputation and offload is training without: on meshes too, with FSDP2."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from parity import JOB, PEAKED, TINY, TOLERANCE, compare, record_run, scattered

STEPS = 3


def job(model: str, *more: str) -> list[str]:
    return [*TINY[model], *JOB, PEAKED, "training.seq_len=61", f"training.steps={STEPS}", *more]


CHUNKS = "training.loss_chunk_tokens=7"
FULL, SELECTIVE = ("activation_checkpointing.mode=" + mode for mode in ("full", "selective"))
OFFLOAD, EVERY = "activation_checkpointing.offload=true", "activation_checkpointing.every=2"


@pytest.mark.parametrize(
    ("world", "model", "overrides"),
    [
        (1, "gpt", (CHUNKS, FULL, OFFLOAD)),
        (2, "gpt", ("mesh.cp=2", CHUNKS)),  # tied head
        (2, "llama", ("mesh.cp=2", CHUNKS, SELECTIVE, OFFLOAD, "training.local_batch_size=1")),
        (3, "llama", ("mesh.cp=3", CHUNKS, FULL, EVERY, "attention.layout=striped")),
        (4, "llama", ("mesh.cp=2", "mesh.dp_shard=2", "training.loss_chunk_tokens=1000", OFFLOAD, EVERY)),
        (4, "gpt", ("mesh.cp=2", "mesh.dp_replicate=2", CHUNKS, SELECTIVE)),
        pytest.param(
            *(2, "llama", ("mesh.cp=2", CHUNKS, SELECTIVE, OFFLOAD, "training.compile=true")), marks=pytest.mark.slow
        ),
        pytest.param(
            *(4, "gpt", ("mesh.cp=2", "mesh.dp_shard=2", CHUNKS, FULL, "training.compile=true")), marks=pytest.mark.slow
        ),
    ],
)
def test_a_job_that_saves_memory_equals_one_that_does_not(ranks, world, model, overrides):
    reference = ranks.run(1, record_run, job(model), scattered, (1, STEPS))[0]
    for rank, run in enumerate(
        ranks.run(world, record_run, job(model, *overrides), scattered, (1, STEPS), timeout=200)
    ):
        difference = compare(run, reference)
        assert difference.is_within, f"rank {rank}: {difference}"


def record_with_fault(rank: int, world: int, overrides: list[str]) -> Any:
    """Each rank divides by its own count."""
    from dtcp.train import trainer

    def own_count(hidden: Any, weight: Any, labels: Any, *, num_valid_tokens: Any, chunk_tokens: int) -> Any:
        count = (labels != -100).sum() * world
        return right(hidden, weight, labels, num_valid_tokens=count, chunk_tokens=chunk_tokens)

    right = trainer.linear_token_loss
    with mock.patch.object(trainer, "linear_token_loss", own_count):
        return record_run(rank, world, overrides, scattered, (1,))


def test_the_comparison_sees_a_planted_fault(ranks):
    reference = ranks.run(1, record_run, job("gpt"), scattered, (1,))[0]
    overrides = job("gpt", "mesh.cp=2", "attention.layout=contiguous", CHUNKS)
    difference = compare(ranks.run(2, record_with_fault, overrides)[0], reference)
    assert difference.gradient > 100 * TOLERANCE, difference


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.loss_chunk_tokens=0", "training.loss_chunk_tokens has to be at least 1, got 0; null takes"),
        ("activation_checkpointing.every=0", "every must be an integer of at least 1, got 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(ranks, override, message):
    ranks.run_expecting(1, record_run, ValueError, message, job("gpt", override))
