"""Training with pipeline stages, alone and with all other axes, is training on one rank."""

from __future__ import annotations

import dataclasses

import pytest

from parity import DROPOUT, JOB, PEAKED, STEPS, TINY, compare, merge, record_run, scattered


def job(model: str, num_layers: int, steps: int = STEPS) -> list[str]:
    sizes = [*TINY[model], f"model.num_layers={num_layers}", "model.tie_weights=true"]
    sizes += DROPOUT if model == "gpt" else ()
    return [*sizes, *JOB, PEAKED, "training.seq_len=97", f"training.steps={steps}"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh and a schedule; ``options`` go beside them."""

    mesh: str
    world: int
    schedule: str
    model: str
    num_layers: int = 2
    options: tuple[str, ...] = ()
    steps: int = STEPS

    def __str__(self) -> str:
        mesh = self.mesh.replace("mesh.", "").replace(" ", ",")
        return "-".join([self.model, mesh, self.schedule, *(o.partition(".")[2] for o in self.options)])


EXCHANGE = "attention.strategy=exchange"

CASES = [
    Case("mesh.pp=2", 2, "1F1B", "gpt"),
    Case("mesh.pp=2 mesh.cp=2", 4, "Interleaved1F1B", "llama", 4, steps=4),
    Case(
        "mesh.pp=2 mesh.tp=2",
        4,
        "1F1B",
        "gpt",
        2,
        ("activation_checkpointing.mode=selective", "training.loss_chunk_tokens=16"),
        steps=4,
    ),
    Case("mesh.pp=2 mesh.dp_shard=2", 4, "InterleavedZeroBubble", "gpt", 4),
    Case("mesh.pp=2 mesh.tp=2", 4, "InterleavedZeroBubble", "gpt", 4),
    Case("mesh.pp=2 mesh.tp=2", 4, "ZBVZeroBubble", "llama", 4, ("model.tie_weights=false",)),
    Case("mesh.pp=2 mesh.tp=2", 4, "GPipe", "llama", 2, ("tensor_parallel.sequence_parallel=false",)),
    Case("mesh.pp=2 mesh.tp=2", 4, "1F1B", "gpt", 2, ("activation_checkpointing.mode=selective",)),
    Case(
        "mesh.pp=2 mesh.cp=2",
        4,
        "Interleaved1F1B",
        "llama",
        4,
        ("training.compile=true", "attention.strategy=ulysses"),
    ),
    Case("mesh.pp=4", 4, "GPipe", "llama", 4, ("activation_checkpointing.mode=full",)),
    Case("mesh.pp=2 mesh.cp=2 mesh.tp=2", 8, "1F1B", "gpt", 2, ("attention.layout=striped", EXCHANGE)),
    Case("mesh.pp=2 mesh.dp_replicate=2 mesh.cp=2", 8, "1F1B", "llama", 2, ("attention.strategy=all_gather",)),
]
IN_QUICK_RUN = CASES[1:3]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in IN_QUICK_RUN)) for case in CASES], ids=str
)
def test_training_in_stages_equals_one_rank(ranks, case):
    base = job(case.model, case.num_layers, case.steps)
    overrides = [*base, *case.mesh.split(), f"pipeline.schedule={case.schedule}", "training.local_batch_size=1"]
    if "dp_" in case.mesh:
        overrides += ["training.global_batch_size=4"]
    of_model = [option for option in case.options if option.startswith("model.")]
    reference = ranks.run(1, record_run, [*base, *of_model], scattered, (1, case.steps))[0]
    records = ranks.run(case.world, record_run, [*overrides, *case.options], scattered, (1, case.steps), timeout=200)
    for record in records:
        assert record.losses == records[0].losses
        assert record.grad_norms == records[0].grad_norms
    difference = compare(merge(records), reference)
    assert difference.is_within, difference


def test_what_a_pipeline_cannot_do_is_refused(ranks):
    def refuse(rank: int, world: int, overrides: list[str]) -> None:
        record_run(rank, world, [*job("gpt", 2), "mesh.pp=2", *overrides])

    from dtcp.train.session import JobError

    for overrides, pattern in [
        (["training.local_batch_size=4"], "cannot run 1 microbatches; use 2"),
        (["training.local_batch_size=1", "pipeline.schedule=Interleaved1F1B"], "2 layers are too few for 4"),
        (["training.local_batch_size=1", "pipeline.schedule=nothing"], "no pipeline schedule 'nothing'"),
    ]:
        ranks.run_expecting(2, refuse, JobError, pattern, overrides)
