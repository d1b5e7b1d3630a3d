"""Training on every kind of mesh beside one rank: the rows of a table, and the run of one of them.

Two layers with peaked attention and grouped queries (llama) or dropout 0.1 (gpt); 97 positions, which no mesh divides;
a third of the labels ignored, and all of two rows of four. Layout, strategy, activation checkpointing, compilation and
pipeline schedule go around the meshes. Where blocks are checkpointed, forwards are counted.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtcp.models.gpt import GPTBlock
from dtcp.models.llama import LlamaBlock
from dtcp.parallelize.checkpointing import ATTENTION_OPS
from dtcp.train.batch import Microbatch
from parity import STEPS, Difference, Record, RecordingTrainer, compare, job, merge, scattered
from ranks import Ranks

SEQ_LEN = 97


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on a mesh, and what goes with it; ``schedule`` where there are stages."""

    mesh: str  # as the table has it, "cp2 tp2"; "+SP" with sequence parallelism, where there is tp without cp and pp
    model: str  # gpt, llama
    layout: str = "head_tail"
    strategy: str = "ring"
    checkpointing: str = "none"
    compile: bool = False
    schedule: str = "1F1B"

    @property
    def degrees(self) -> dict[str, int]:
        """By axis."""
        parts = re.findall(r"([a-z_]+)(\d+)", self.mesh)
        return {"dp_shard" if axis == "dp" else axis: int(degree) for axis, degree in parts}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.degrees.values())

    def overrides(self) -> list[str]:
        """Of the job."""
        found = [f"mesh.{axis}={degree}" for axis, degree in self.degrees.items()]
        found += [f"attention.layout={self.layout}", f"attention.strategy={self.strategy}"]
        if self.strategy == "hybrid":
            found.append(f"attention.ulysses_degree={self.degrees['cp']}")
        found += [
            f"activation_checkpointing.mode={self.checkpointing}",
            f"training.compile={str(self.compile).lower()}",
        ]
        if "tp" in self.degrees and "+SP" not in self.mesh:
            found.append("tensor_parallel.sequence_parallel=false")
        if "pp" in self.degrees:
            found += [f"pipeline.schedule={self.schedule}", "training.local_batch_size=1"]
        return found


# fmt: off
ROWS = [
    Row("tp2", "gpt", checkpointing="full"),
    Row("tp2", "llama"),
    Row("tp2+SP", "gpt", checkpointing="selective"),
    Row("tp2+SP", "llama", compile=True),
    Row("tp4+SP", "gpt"),
    Row("tp4+SP", "llama", checkpointing="full"),
    Row("cp2 tp2+SP", "gpt", "striped", "ulysses", compile=True),
    Row("cp2 tp2+SP", "llama", "head_tail", "all_gather", "selective"),
    Row("cp3 tp2+SP", "gpt", "contiguous", "all_gather", "full"),
    Row("cp3 tp2+SP", "llama", "head_tail", "exchange"),
    Row("dp_replicate2 cp2 tp2+SP", "gpt", "head_tail", "ring"),
    Row("dp_replicate2 cp2 tp2+SP", "llama", "striped", "exchange", "full"),
    Row("pp2", "gpt", checkpointing="selective", schedule="GPipe"),
    Row("pp2", "llama", checkpointing="full"),
    Row("pp2 cp2", "gpt", "head_tail", "ulysses", "full"),
    Row("pp2 cp2", "llama", "contiguous", "exchange", compile=True),
    Row("pp2 tp2+SP", "gpt"),
    Row("pp2 tp2+SP", "llama", checkpointing="selective", schedule="GPipe"),
    Row("pp2 cp2 tp2+SP", "gpt", "striped", "ring", "selective"),
    Row("pp2 cp2 tp2+SP", "llama", "head_tail", "ulysses"),
    Row("dp2 cp2 tp2+SP", "gpt", "contiguous", "hybrid"),
    Row("dp2 cp2 tp2+SP", "llama", "striped", "ring", "selective"),
]
# fmt: on


class _Forwards(TorchDispatchMode):
    """Counts the ops of attention's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in ATTENTION_OPS
        return func(*args, **(kwargs or {}))


class CountingTrainer(RecordingTrainer):
    """Asserts how often blocks and attention run forward in a step, where blocks are checkpointed in eager mode."""

    def compute_gradients(self, microbatches: list[Microbatch]) -> tuple[Tensor, Tensor]:
        mode = self.config.activation_checkpointing.mode.name
        # A first step of a pipeline runs the model once more, to see its shapes.
        if mode == "none" or self.config.training.compile or self.step == 0:
            return super().compute_gradients(microbatches)
        blocks = [module for module in self.model.modules() if isinstance(module, GPTBlock | LlamaBlock)]
        runs: list[int] = []
        hooks = [block.register_forward_pre_hook(lambda *_: runs.append(1)) for block in blocks]
        with _Forwards() as attention:
            result = super().compute_gradients(microbatches)
        for hook in hooks:
            hook.remove()
        calls = len(blocks) * len(microbatches)
        assert len(runs) == 2 * calls, f"blocks ran {len(runs)} times, {calls} calls with {mode} checkpointing"
        expected = calls * (2 if mode == "full" else 1)
        assert attention.count == expected, f"attention ran {attention.count} times, {mode} checkpointing: {expected}"
        return result


def record_row(rank: int, world: int, overrides: list[str], steps: Sequence[int]) -> Record:
    """Train on this rank, gradients of some ``steps`` recorded."""
    trainer = CountingTrainer(overrides, scattered, steps)
    history = list(trainer.steps())
    return Record([m.loss for m in history], [m.grad_norm for m in history], trainer.gradients)


def reference_of(ranks: Ranks, model: str, num_steps: int = STEPS) -> Record:
    """One rank's run, for all rows of the model."""
    return ranks.run(1, record_row, job(model, SEQ_LEN, num_steps), (1, num_steps), timeout=600)[0]


def run_row(ranks: Ranks, row: Row, reference: Record, num_steps: int = STEPS) -> Difference:
    """Return how far the row's run is from ``reference``, all ranks and all parameters.

    Raises:
        RanksError: If a rank fails, or counts other forwards than it should.
    """
    overrides = [*job(row.model, SEQ_LEN, num_steps), *row.overrides()]
    runs = ranks.run(row.num_ranks, record_row, overrides, (1, num_steps), timeout=900)
    assert all(run.losses == runs[0].losses and run.grad_norms == runs[0].grad_norms for run in runs)
    return compare(merge(runs), reference)
