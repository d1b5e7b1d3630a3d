"""Train a tiny model on some mesh with the trainer's own step, record it, and compare the record with one rank's.

Tolerances are those of the design: the loss and the gradient norm to 1e-5, relative; each parameter's gradient to
``1e-5 |reference| + 1e-8 global norm`` (a key bias has gradient 0 up to noise).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtcp.models.init import plain_name
from dtcp.train.batch import Microbatch, Rows, masked_labels
from dtcp.train.config import compose_job_config
from dtcp.train.trainer import Trainer

TOLERANCE = 1e-5
NOISE = 1e-8  # of the global norm, for gradients that are 0

# Two layers are enough for an error of attention to pass through another attention. qk_init_scale makes the softmax
# peaked: with the usual initialisation, attention is so flat that dropping all of it across ranks moves the first
# loss by 4e-5 only.
TINY = {
    "gpt": ("model=gpt_tiny", "model.num_layers=2", "model.dim=64", "model.max_seq_len=128"),
    "llama": ("model=llama_tiny", "model.num_layers=2", "model.dim=64", "model.ffn_dim=160"),
}
JOB = ("training.global_batch_size=4", "optimizer.lr=3e-4", "lr_scheduler=constant", "lr_scheduler.warmup_steps=0")
PEAKED = "model.qk_init_scale=8"
# Where dropout leaves a weight without a gradient but for rounding, Adam's usual epsilon (1e-8) makes a whole step of
# that: 4e-7 in step 1 becomes 5e-5 in step 2 on four ranks, 7e-6 on one rank with microbatches.
DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1", "optimizer.eps=1e-5")

# A head for each of four ranks, and keys shared by two query heads; the vocabulary of 257 ids never divides evenly.
MODELS = {
    "gpt": ("model.vocab_size=257", *DROPOUT),
    "gpt_untied": ("model.vocab_size=257", "model.tie_weights=false"),
    "llama": ("model.vocab_size=257", "model.num_heads=8", "model.num_kv_heads=4"),
    "llama_tied": ("model.tie_weights=true", "model.num_heads=8", "model.num_kv_heads=4"),
}
STEPS = 10

Ignored = Callable[[Tensor, Tensor], Tensor]


def nothing(rows: Tensor, positions: Tensor) -> Tensor:
    """Which labels do not count, by row of the global batch (B, 1) and position (1, S): none."""
    return (rows + positions) < 0


def scattered(rows: Tensor, positions: Tensor) -> Tensor:
    """A third of the labels at random places, more in some rows, and all of the rows 2 and 3: all of dp rank 1 of 2."""
    return ((rows * 31 + positions * 17) % 7 < 2 + rows) | (rows >= 2)


def tail(rows: Tensor, positions: Tensor) -> Tensor:
    """Everything from position 48 on: all of cp rank 1 of 2 in the contiguous layout, 2 and 3 of 4."""
    return (positions >= 48) & (rows >= 0)


def job(model: str, seq_len: int, steps: int = STEPS) -> list[str]:
    """Overrides of a job that trains one of ``MODELS``, with peaked attention."""
    sizes = [*TINY[model.split("_")[0]], *MODELS[model]]
    return [*sizes, *JOB, PEAKED, f"training.seq_len={seq_len}", f"training.steps={steps}"]


@dataclass(frozen=True)
class Record:
    """What a run did."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[int, dict[str, Tensor]]  # by step from 1, by parameter, unclipped


class RecordingTrainer(Trainer):
    """The trainer, with some labels ignored, that keeps the whole gradients of some steps."""

    def __init__(self, overrides: Sequence[str], ignored: Ignored, record_steps: Sequence[int] = ()) -> None:
        super().__init__(compose_job_config([*overrides]))
        self.ignored = ignored
        self.record_steps = record_steps
        self.gradients: dict[int, dict[str, Tensor]] = {}

    def read_rows(self, step: int, row_indices: Sequence[int]) -> Rows:
        read = super().read_rows(step, row_indices)
        rows, positions = torch.tensor(row_indices)[:, None], torch.arange(read.labels.size(1))[None]
        return masked_labels(read, self.ignored(rows, positions))

    def compute_gradients(self, microbatches: list[Microbatch]) -> tuple[Tensor, Tensor]:
        result = super().compute_gradients(microbatches)
        if self.step + 1 in self.record_steps:
            self.gradients[self.step + 1] = {
                plain_name(name): whole(p.grad).clone() for name, p in self.model.named_parameters()
            }
        return result


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def record_run(
    rank: int, world: int, overrides: Sequence[str], ignored: Ignored = nothing, record_steps: Sequence[int] = (1, 20)
) -> Record:
    """Train as ``overrides`` say on this rank; call it on every rank of the world."""
    trainer = RecordingTrainer(overrides, ignored, record_steps)
    history = list(trainer.steps())
    return Record([m.loss for m in history], [m.grad_norm for m in history], trainer.gradients)


def merge(records: list[Record]) -> Record:
    """All stages' gradients in one record; ranks that hold a parameter too have the same."""
    gradients = {step: {k: v for r in records for k, v in r.gradients[step].items()} for step in records[0].gradients}
    return dataclasses.replace(records[0], gradients=gradients)


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a run from its reference; a gradient's is in units where 1e-5 is the limit."""

    loss: float
    grad_norm: float
    gradient: float
    worst_parameter: str

    @property
    def is_within(self) -> bool:
        return max(self.loss, self.grad_norm, self.gradient) <= TOLERANCE


def compare(run: Record, reference: Record) -> Difference:
    """Compare everything that both recorded; they have to have recorded the same."""
    assert run.gradients.keys() == reference.gradients.keys()
    gradient, worst = 0.0, "none"
    for step, expected in reference.gradients.items():
        assert run.gradients[step].keys() == expected.keys()
        noise = NOISE / TOLERANCE * reference.grad_norms[step - 1]
        for name, wanted in expected.items():
            error = float((run.gradients[step][name] - wanted).norm() / (wanted.norm() + noise))
            if not error <= gradient:  # NaN too
                gradient, worst = error, f"{name} in step {step}"
    return Difference(
        _largest(run.losses, reference.losses), _largest(run.grad_norms, reference.grad_norms), gradient, worst
    )


def _largest(values: list[float], references: list[float]) -> float:
    errors = [abs(a - b) / abs(b) for a, b in zip(values, references, strict=True)]
    return float("nan") if any(error != error for error in errors) else max(errors)
