"""Training on packed documents: on any mesh as on one rank, and as on each document alone.

And the comparison is worth something: where documents are not told to attention, it reports a difference far above the
tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from dtcp.documents import Documents
from dtcp.train.batch import Rows
from dtcp.train.config import compose_job_config
from dtcp.train.data import TextDataset
from dtcp.train.trainer import Trainer
from parity import JOB, PEAKED, TINY, TOLERANCE, Record, RecordingTrainer, compare, merge, nothing, scattered
from ranks import Ranks

SEQ_LEN = 97
SIZES = TINY | {
    "titan": ("model=titan_llama3_debug", "model.num_layers=2", "model.vocab_size=264"),
    "titan_qwen3": ("model=titan_qwen3_debug", "model.flavor=small_qwen3", "optimizer.eps=1e-5"),
    "titan_gpt_oss": ("model=titan_gpt_oss_debug", "model.flavor=small_gpt_oss"),
}
WINDOW = ("model.window_size=20", "model.full_attention_every=2", "model.sinks=true")
PACKED = ("data.pack_documents=true",)


class PackedTrainer(RecordingTrainer):
    """Rows of many short documents, other ones in each row and step; sinks that are not their initial 0."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.endswith("sinks"):
                    parameter.add_(0.5)  # the same on all heads: every rank can

    def read_rows(self, step, row_indices) -> Rows:
        rows = super().read_rows(step, row_indices)
        assert rows.documents is not None
        ids = torch.stack([short_documents(step, row, rows.tokens.size(1)) for row in row_indices])
        documents = Documents.from_ids(ids)
        positions = documents.positions(restart=self.dataset.reset_positions).expand_as(rows.tokens)
        is_last = F.pad(ids[:, 1:] != ids[:, :-1], (0, 1))
        return Rows(rows.tokens, rows.labels.masked_fill(is_last, -100), documents, positions.contiguous())


def short_documents(step: int, row: int, seq_len: int) -> torch.Tensor:
    """Ids of a row: documents of 1 to some 30 tokens, and one that is longer than a rank's part."""
    lengths = [1 + (step * 7 + row * 5 + i * i * 3) % (40 if i == 2 else 13) for i in range(seq_len)]
    lengths[1] = 50
    return torch.repeat_interleave(torch.arange(seq_len), torch.tensor(lengths))[:seq_len]


def record_packed(rank: int, world: int, overrides, ignored=nothing, record_steps=(1, 3)) -> Record:
    """Train as ``overrides`` say on this rank; call it on every rank of the world."""
    if any("flavor=small" in override for override in overrides):
        import titans

        titans.register()
    trainer = PackedTrainer(overrides, ignored, record_steps)
    history = list(trainer.steps())
    return Record([m.loss for m in history], [m.grad_norm for m in history], trainer.gradients)


def job(model: str, *more: str, steps: int = 3) -> list[str]:
    return [*SIZES[model], *JOB, PEAKED, *PACKED, f"training.seq_len={SEQ_LEN}", f"training.steps={steps}", *more]


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh with a way to attend, and what is trained on it."""

    mesh: str
    world: int
    model: str
    options: tuple[str, ...] = ()  # of the mesh's run alone
    both: tuple[str, ...] = ()  # of the reference too

    def __str__(self) -> str:
        parts = (self.mesh.replace("mesh.", "").replace(" ", ","), *self.options, *self.both)
        return "-".join([self.model, *(part.split(".")[-1] for part in parts)])


EXCHANGE, ULYSSES = "attention.strategy=exchange", "attention.strategy=ulysses"
HYBRID = ("attention.strategy=hybrid", "attention.ulysses_degree=2")

CASES = [
    Case("mesh.cp=2", 2, "llama", ("attention.layout=per_document",), WINDOW),
    Case("mesh.cp=2", 2, "gpt", ("attention.layout=head_tail", "training.local_batch_size=1")),
    Case("mesh.cp=2", 2, "gpt", ("attention.layout=striped", EXCHANGE), ("data.reset_positions=false",)),
    Case("mesh.cp=2", 2, "gpt", ("attention.layout=per_document",), ("model.dropout=0.1", "optimizer.eps=1e-5")),
    Case("mesh.cp=4", 4, "llama", ("attention.layout=per_document", "attention.strategy=all_gather")),
    Case("mesh.cp=4", 4, "gpt", ("attention.layout=contiguous", EXCHANGE), WINDOW),
    Case("mesh.cp=4", 4, "llama", ("attention.layout=per_document", *HYBRID), WINDOW),
    Case("mesh.cp=2", 2, "llama", ("attention.layout=per_document", ULYSSES), WINDOW),
    Case("mesh.cp=2 mesh.tp=2", 4, "llama", ("attention.layout=per_document", EXCHANGE), WINDOW),
    Case("mesh.cp=2 mesh.tp=2", 4, "gpt", ("tensor_parallel.sequence_parallel=false", ULYSSES), WINDOW),
    Case(
        "mesh.pp=2 mesh.cp=2",
        4,
        "llama",
        ("attention.layout=per_document", "training.local_batch_size=1", EXCHANGE),
        WINDOW,
    ),
    Case("mesh.pp=2 mesh.cp=2", 4, "gpt", ("training.local_batch_size=2", "activation_checkpointing.mode=full")),
    Case("mesh.pp=2", 2, "llama", ("training.local_batch_size=1",)),
    Case("mesh.tp=2", 2, "llama", ("attention.layout=per_document",), WINDOW),
    Case("mesh.cp=2 mesh.dp_shard=2", 4, "llama", ("attention.layout=per_document", "training.local_batch_size=1")),
    Case("mesh.cp=2", 2, "llama", ("training.local_batch_size=2", "training.compile=true"), WINDOW),
    Case("mesh.cp=2", 2, "llama", ("attention.layout=auto",), WINDOW),
    Case("mesh.cp=2", 2, "titan", ("attention.layout=per_document",)),
    Case("mesh.cp=2 mesh.tp=2", 4, "titan_qwen3", ("attention.layout=per_document",)),
    Case("mesh.cp=2", 2, "titan_gpt_oss", ("attention.layout=per_document",)),
    Case("mesh.cp=2 mesh.dp_shard=2", 4, "titan_gpt_oss", ("training.local_batch_size=1",)),
]
IN_QUICK_RUN = (CASES[0], CASES[8])


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[..., Record]:
    """Train on one rank, once for all cases of the same job."""

    @functools.cache
    def reference(model: str, *more: str) -> Record:
        return ranks.run(1, record_packed, job(model, *more), scattered)[0]

    return reference


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in IN_QUICK_RUN)) for case in CASES], ids=str
)
def test_training_on_packed_documents_on_a_mesh_equals_one_rank(ranks, one_rank, case):
    overrides = [*job(case.model, *case.both), *case.mesh.split(), *case.options]
    records = ranks.run(case.world, record_packed, overrides, scattered, timeout=300)
    assert all(r.losses == records[0].losses and r.grad_norms == records[0].grad_norms for r in records)
    difference = compare(merge(records), one_rank(case.model, *case.both))
    assert difference.is_within, difference


# ---- what one rank does ----------------------------------------------------------------------------------------------


def each_document_alone(overrides: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step's documents, each in a row of its own; nothing here knows of packing."""
    trainer = PackedTrainer(overrides, scattered)
    rows = trainer.read_rows(0, range(4))
    assert rows.documents is not None and rows.positions is not None
    num_valid = int((rows.labels != -100).sum())
    loss = 0.0
    from dtcp.models import build_model

    model = build_model(trainer.model_config, seed=trainer.config.debug.seed)
    model.load_state_dict(dict(trainer.model.state_dict()))
    start = 0
    for part in rows.documents.cu_seqlens[1:].tolist():
        row, first = divmod(start, SEQ_LEN)
        here = slice(first, first + part - start)
        start = part
        tokens, labels, positions = (x[row : row + 1, here] for x in (rows.tokens, rows.labels, rows.positions))
        logits = model(tokens, positions)
        share = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / num_valid
        share.backward()
        loss += share.item()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("model", "more"),
    [("gpt", ()), ("llama", WINDOW), ("gpt", ("data.reset_positions=false",))],
    ids=["gpt", "llama-window-sinks", "gpt-absolute-positions"],
)
def test_training_on_packed_documents_equals_each_document_alone(model, more):
    overrides = job(model, *more, steps=1)
    loss, gradients = each_document_alone(overrides)
    record = record_packed_here(overrides)
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    difference = compare(record, Record([loss], [norm], {1: gradients}))
    assert difference.is_within, difference


def record_packed_here(overrides: list[str]) -> Record:
    trainer = PackedTrainer([*overrides, "mesh.dp_shard=1"], scattered, (1,))
    (metrics,) = trainer.steps()
    return Record([metrics.loss], [metrics.grad_norm], trainer.gradients)


def record_without(rank: int, world: int, fault: str, overrides: list[str]) -> Record:
    """A run in which attention is told of no documents, or of those of another microbatch."""
    from dtcp.parallelize.context import set_sequence

    told: list[Documents] = []

    def tell(model, layout, documents=None, **more):
        told.append(documents)
        wrong = Documents.from_lengths([SEQ_LEN]) if fault == "none" else told[max(0, len(told) - 2)]
        set_sequence(model, layout, documents=wrong, **more)

    with mock.patch("dtcp.train.trainer.set_sequence", tell):
        return record_packed(rank, world, overrides, scattered)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "those of the microbatch before"])
def test_the_comparison_sees_documents_that_are_not_told(ranks, one_rank, fault):
    overrides = [*job("llama"), "mesh.cp=2", "training.local_batch_size=1"]
    run = ranks.run(2, record_without, fault, overrides)[0]
    difference = compare(run, one_rank("llama"))
    assert difference.gradient > 100 * TOLERANCE, difference


def train_rows_of_one_document(rank: int, world: int, overrides: list[str]) -> list[float]:
    def whole(self: TextDataset, step: int, index: int, _: int) -> torch.Tensor:
        return torch.zeros(self.seq_len + 1, dtype=torch.int64)

    with mock.patch.object(TextDataset, "_document_ids", whole):
        return [metrics.loss for metrics in Trainer(compose_job_config(overrides)).steps()]


def test_rows_that_happen_to_hold_the_same_documents_are_microbatches_too(ranks):
    """All rows of a step inside one long file each: their places are shared, and documents are told all the same."""
    overrides = [*job("llama", steps=1), "training.local_batch_size=1"]
    (right,) = ranks.run(1, train_rows_of_one_document, overrides)
    for losses in ranks.run(2, train_rows_of_one_document, [*overrides, "mesh.cp=2", "attention.layout=per_document"]):
        assert abs(losses[0] - right[0]) < TOLERANCE * right[0]


@pytest.mark.slow
def test_evaluation_looks_at_documents_on_any_mesh(ranks):
    overrides = [*job("llama", *WINDOW), "evaluation.every=1", "evaluation.batches=1"]
    (whole,) = ranks.run(1, evaluate, overrides)
    for mesh, world in (("mesh.cp=2 attention.layout=per_document", 2), ("mesh.pp=2 training.local_batch_size=1", 2)):
        for loss in ranks.run(world, evaluate, [*overrides, *mesh.split()]):
            assert abs(loss - whole) < TOLERANCE * whole, mesh
    (one_text,) = ranks.run(1, evaluate, [*overrides, "data.pack_documents=false"])
    assert abs(one_text - whole) > 20 * TOLERANCE * whole


def evaluate(rank: int, world: int, overrides: list[str]) -> float:
    def short(self: TextDataset, step: int, index: int, _: int) -> torch.Tensor:
        return short_documents(step, index, self.seq_len + 1)

    with mock.patch.object(TextDataset, "_document_ids", short):
        return Trainer(compose_job_config([*overrides])).evaluate().eval_loss


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["attention.layout=per_document", "data.pack_documents=false"],
            "set data.pack_documents=true, or attention.la",
        ),
        (["data.reset_positions=true", "data.pack_documents=false"], "restarts positions where documents begin"),
    ],
)
def test_what_makes_no_sense_without_packed_documents_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        Trainer(compose_job_config([*job("gpt"), *overrides]))
