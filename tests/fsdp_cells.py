"""One cell of the matrix of FSDP2 and the doors: a GPT or Llama trained a few steps by ranks, and by one process alone.

The ranks shard parameters over dp_shard × cp. The process alone has the whole batch, torch's own attention, loss and
gradient norm, and nothing of dtcp but the model; each rank is such a process too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from cells import _selective, count_op_calls
from dtcp.attention import ops
from dtcp.models import build_model
from dtcp.models.init import plain_name
from dtcp.parallelize.fsdp import set_last_microbatch
from oracle import STRATEGIES, options_of
from parity import Record, whole

NUM_BLOCKS = 2
NUM_ROWS = 4  # of the whole batch
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"max_seq_len": 40},
    "llama": {"num_kv_heads": 2, "ffn_dim": 80},
}
MESHES: dict[str, tuple[int, dict[str, int]]] = {  # world, degrees
    "cp2": (2, {"cp": 2}),
    "cp3": (3, {"cp": 3}),
    "dp2_cp2": (4, {"cp": 2, "dp_shard": 2}),
    "replicate2_cp2": (4, {"cp": 2, "dp_replicate": 2}),
}


@dataclass(frozen=True)
class FsdpCell:
    """A combination; the names are those of the table."""

    door: str = "context"  # context, plan
    compile: str = "eager"  # eager, a block inside the checkpoint, around it, the sharded model
    checkpointing: str = "none"  # none, non_reentrant, selective, around_unit
    backward: str = "inside"  # inside, outside
    mesh: str = "cp2"
    model: str = "gpt"  # gpt, llama
    reshard: bool = True
    strategy: str = "ring"
    backend: str = "aot_eager"
    param_dtype: torch.dtype | None = None
    microbatches: tuple[tuple[int, str], ...] = ((29, "head_tail"),)  # length and layout of each
    adapters: tuple[str, ...] = ()  # blocks or modules in blocks that have some; then nothing else is trained
    cpu_offload: bool = False
    num_steps: int = 1
    optimizer: str = "AdamW"  # with lr 3e-4; "SGD" with lr 0.05; "none"

    @property
    def world(self) -> int:
        return MESHES[self.mesh][0]

    @property
    def num_op_calls(self) -> tuple[int, int]:
        """Forward and backward calls of the attention op: none is recomputed or differentiated that need not be."""
        adapters = self.adapters or tuple(map(str, range(NUM_BLOCKS)))
        first = min(int(name[0]) for name in adapters)  # blocks before it get no gradient
        num_recomputed = 0 if self.checkpointing in ("none", "selective") else NUM_BLOCKS - first
        num_backward = NUM_BLOCKS - first - (f"{first}.attention.output" in adapters)  # of what comes after attention
        num_passes = len(self.microbatches) * self.num_steps
        return (NUM_BLOCKS + num_recomputed) * num_passes, num_backward * num_passes


AXES: dict[str, list[Any]] = {
    "compile": ["eager", "inside", "around"],
    "checkpointing": ["none", "non_reentrant", "selective", "around_unit"],
    "mesh": ["cp2", "dp2_cp2", "cp3"],
    "door": ["context", "plan"],
    "backward": ["inside", "outside"],
    "model": ["gpt", "llama"],
    "strategy": list(STRATEGIES),
    "reshard": [True, False],
}


Microbatch = tuple[Tensor, Tensor, str]
"""Tokens, labels, and the layout that they are cut by."""


@dataclass(frozen=True)
class Run:
    """What a cell did, alike on ranks and alone."""

    record: Record
    parameters: dict[str, Tensor]  # after the last step
    untrained: set[str]  # parameters without a gradient
    num_op_calls: tuple[int, int] = (0, 0)  # forward, backward


class Adapted(nn.Module):
    """A frozen Linear plus a product of two small matrices, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base.out_features)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.2)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def make_model(cell: FsdpCell) -> nn.Module:
    """The same weights on every rank, with attention that is peaked and matters: scores have a deviation of about 3.

    Larger weights would push the noise of a key bias, whose gradient is 0, beyond the tolerance in one process already.
    """
    model = build_model(
        f"{cell.model}_tiny", num_layers=NUM_BLOCKS, dim=32, num_heads=4, vocab_size=61, init_std=0.06, qk_init_scale=5,
        **SIZES[cell.model],
    )  # fmt: skip
    if cell.adapters:
        model.requires_grad_(False)
        for name, module in list(model.layers.named_modules()):
            if isinstance(module, nn.Linear) and name.startswith(cell.adapters):
                parent, _, child = name.rpartition(".")
                setattr(model.layers.get_submodule(parent), child, Adapted(module))
    return model


def make_batch(cell: FsdpCell, step: int) -> Iterator[Microbatch]:
    """Tokens and labels (NUM_ROWS, S) of each microbatch, fewer of them in later rows, and its layout."""
    for index, (seq_len, layout) in enumerate(cell.microbatches):
        generator = torch.Generator().manual_seed(100 * step + index)
        tokens = torch.randint(61, (NUM_ROWS, seq_len + 1), generator=generator)
        rows, positions = torch.arange(NUM_ROWS)[:, None], torch.arange(seq_len)[None]
        ignored = ((rows * 31 + positions * 17) % 7 < 2 + rows) | (positions >= seq_len - rows * seq_len // 5)
        yield tokens[:, :-1], tokens[:, 1:].masked_fill(ignored, -100), layout


# ---- alone -----------------------------------------------------------------------------------------------------------


def train_alone(cell: FsdpCell) -> Run:
    """The cell with the whole batch in this process, without dtcp."""
    model = make_model(cell)
    log = _Log(model, cell)
    for step in range(cell.num_steps):
        batch = list(make_batch(cell, step))
        num_valid = sum(int((labels != -100).sum()) for _, labels, _ in batch)
        loss = torch.zeros(())
        for tokens, labels, _ in batch:
            logits = model(tokens, torch.arange(tokens.size(1)).expand_as(tokens)).flatten(0, 1)
            part = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / num_valid
            part.backward()
            loss += part.detach()
        log.gradients(loss)
        log.step(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return log.run()


# ---- on ranks --------------------------------------------------------------------------------------------------------


def parallelize(model: nn.Module, dims: dtcp.ParallelDims, cell: FsdpCell) -> None:
    """Plan, compile, checkpoint and shard ``model``, in the order of the cell."""
    options: dict[str, Any] = {}
    if cell.checkpointing == "selective":
        options["context_fn"] = functools.partial(_selective, True)
    # See cells._prepare: a recomputation has to run the very ops of its forward.
    compile_options = {"fullgraph": True, "backend": cell.backend}
    if cell.checkpointing == "selective" and cell.compile == "inside":
        compile_options["dynamic"] = False
    for name, block in model.layers.items():
        if cell.door == "plan":
            style = dtcp.ContextParallel(**options_of(cell.strategy, dims.cp))
            parallelize_module(block, dims.view("cp"), {"attention.sdpa": style})
        if cell.compile == "inside":
            block.compile(**compile_options)
        if cell.checkpointing in ("non_reentrant", "selective"):
            model.layers[name] = checkpoint_wrapper(block, **options)
        if cell.compile == "around":
            model.layers[name].compile(**compile_options)
    dtcp.apply_fsdp(
        model,
        dims,
        param_dtype=cell.param_dtype,
        reshard_after_forward=cell.reshard,
        offload_policy=CPUOffloadPolicy(pin_memory=False) if cell.cpu_offload else None,
    )
    if cell.checkpointing == "around_unit":
        for name, block in model.layers.items():
            model.layers[name] = checkpoint_wrapper(block)
    if cell.compile == "model":
        model.compile(backend=cell.backend)  # the hooks of FSDP2 break it into several graphs


def train_on_ranks(cell: FsdpCell, dims: dtcp.ParallelDims) -> Run:
    """The cell on this rank's rows and its part of their sequence."""
    model = make_model(cell)
    parallelize(model, dims, cell)
    log = _Log(model, cell)
    with count_op_calls() as num_forwards, count_backwards() as num_backwards:
        for step in range(cell.num_steps):
            loss = _accumulate(model, dims, cell, step)
            dist.all_reduce(loss, group=dims.view("loss").get_group())
            log.gradients(loss)
            log.step(dtcp.clip_grad_norm_(model, 1.0, dims))
    return dataclasses.replace(log.run(), num_op_calls=(num_forwards[0], num_backwards[0]))


def _accumulate(model: nn.Module, dims: dtcp.ParallelDims, cell: FsdpCell, step: int) -> Tensor:
    """Leave the gradient of the step's batch in the model; return this rank's share of the loss."""
    readers = dims.view("batch")
    batch = [
        (*(x.chunk(readers.size())[readers.get_local_rank()].clone() for x in (tokens, labels)), layout)
        for tokens, labels, layout in make_batch(cell, step)
    ]
    labels = torch.cat([labels.flatten() for _, labels, _ in batch])
    num_valid = dtcp.count_valid_tokens(labels, mesh=readers)  # labels are not cut yet
    total = torch.zeros(())
    run = _by_context if cell.door == "context" else _by_plan
    for index, microbatch in enumerate(batch):
        set_last_microbatch(model, index == len(batch) - 1)
        total += run(model, dims, cell, microbatch, num_valid)
    return total


def _by_context(
    model: nn.Module, dims: dtcp.ParallelDims, cell: FsdpCell, microbatch: Microbatch, count: Tensor
) -> Tensor:
    tokens, labels, layout = microbatch
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with dtcp.context_parallel(
        dims.view("cp"), buffers=[tokens, labels, positions], buffer_seq_dims=1, buffer_pad_values=[0, -100, 0],
        layout=layout, **options_of(cell.strategy, dims.cp),
    ):  # fmt: skip
        loss = dtcp.token_loss(model(tokens, positions), labels, num_valid_tokens=count)
        if cell.backward == "inside":
            loss.backward()
    if cell.backward == "outside":
        loss.backward()
    return loss.detach()


def _by_plan(
    model: nn.Module, dims: dtcp.ParallelDims, cell: FsdpCell, microbatch: Microbatch, count: Tensor
) -> Tensor:
    tokens, labels, layout = microbatch
    mesh, positions = dims.view("cp"), torch.arange(tokens.size(1)).expand_as(tokens)
    cut = dtcp.make_layout(layout, seq_len=tokens.size(1), cp=dims.cp)
    dtcp.set_sequence(model, cut)
    logits = model(dtcp.shard(tokens, mesh, cut), dtcp.shard(positions, mesh, cut))
    loss = dtcp.token_loss(logits, dtcp.shard(labels, mesh, cut, pad_value=-100), num_valid_tokens=count)
    if cell.backward == "outside":
        dtcp.set_sequence(model, dtcp.make_layout("striped", seq_len=7, cp=dims.cp))  # of a step that comes later
    loss.backward()
    return loss.detach()


class _Log:
    """What a run did, and its optimizer."""

    def __init__(self, model: nn.Module, cell: FsdpCell) -> None:
        self._model = model
        self._record = Record([], [], {})
        trained = [p for p in model.parameters() if p.requires_grad]
        make, lr = {"AdamW": (torch.optim.AdamW, 3e-4), "SGD": (torch.optim.SGD, 0.05), "none": (torch.optim.SGD, 0.0)}[
            cell.optimizer
        ]
        self._optimizer = make(trained, lr=lr)
        self._untrained: set[str] = set()

    def gradients(self, loss: Tensor) -> None:
        self._record.losses.append(float(loss))
        parameters = {plain_name(name): p for name, p in self._model.named_parameters()}
        self._untrained = {name for name, p in parameters.items() if p.grad is None}
        self._record.gradients[len(self._record.losses)] = {
            name: whole(p.grad).clone() for name, p in parameters.items() if p.grad is not None
        }

    def step(self, grad_norm: Tensor) -> None:
        self._record.grad_norms.append(float(grad_norm))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self) -> Run:
        parameters = {plain_name(name): whole(p.detach()) for name, p in self._model.named_parameters()}
        return Run(self._record, parameters, self._untrained)


@contextlib.contextmanager
def count_backwards() -> Iterator[list[int]]:
    """Count the runs of the backward op on this rank, also those in compiled graphs."""
    count = [0]

    def counting(*args: Any, _real: Any = ops.agree_on_backward) -> None:
        count[0] += 1
        _real(*args)

    with mock.patch.object(ops, "agree_on_backward", counting):
        yield count
