"""One cell of the matrix of doors: a small model on ranks in one way of compiling, checkpointing and calling attention.

In every cell each block also reads a cut RoPE cache, which is a buffer, and two steps with different layouts are in
flight, with their backwards in reverse order. Everything is compared with the whole model on one rank.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention as imported_by_name  # before dtcp, as in users' models
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dtcp
from oracle import STRATEGIES, options_of

NUM_BLOCKS = 2
SEQUENCES = [(13, "head_tail"), (9, "striped")]  # lengths and layouts of the two steps in flight
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Cell:
    """A combination; the names are those of the table."""

    compile: str = "eager"  # eager, block, model
    checkpointing: str = "none"  # none, non_reentrant, reentrant, selective_saved, selective_recomputed
    backward: str = "outside"  # inside, outside
    call: str = "F"  # F, by_name, attribute
    door: str = "context"  # context, plan, dtensor
    strategy: str = "ring"
    world: int = 2
    backend: str = "aot_eager"

    @property
    def calls_per_block(self) -> int:
        """Forward calls of the attention op in one step."""
        return 1 if self.checkpointing in ("none", "selective_saved") else 2


AXES: dict[str, list[Any]] = {
    "compile": ["eager", "block", "model"],
    "checkpointing": ["none", "non_reentrant", "reentrant", "selective_saved", "selective_recomputed"],
    "backward": ["outside", "inside"],
    "call": ["F", "by_name", "attribute"],
    "door": ["context", "plan", "dtensor"],
    "strategy": list(STRATEGIES),
    "world": [2, 3, 4],
}


INDUCTOR_CELLS = [
    Cell(
        compile=compiled,
        checkpointing=checkpointing,
        backward=AXES["backward"][index % 2],
        call=AXES["call"][index % 3],
        door=door,
        strategy=STRATEGIES[index % 5],
        backend="inductor",
    )
    for index, (compiled, checkpointing, door) in enumerate(
        itertools.product(
            ["block", "model"],
            ["none", "non_reentrant", "selective_saved", "selective_recomputed"],
            AXES["door"],
        )
    )
]


class Attention(nn.Module):
    """Causal attention by one of the names that models know it by."""

    is_causal = True
    as_dtensor: Any = None  # the door of DTensors: what makes one of a part and its layout

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.attention_function = F.scaled_dot_product_attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layout: Any = None) -> Tensor:
        if layout is not None:
            return self.attend(*(self.as_dtensor(x, layout=layout) for x in (query, key, value))).to_local()
        return self.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.call == "by_name":
            return imported_by_name(query, key, value, is_causal=True, enable_gqa=True)
        if self.call == "attribute":
            return self.attention_function(query, key, value, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(32, 32), nn.Linear(32, 32)
        self.key, self.value = nn.Linear(32, 16), nn.Linear(32, 16)
        self.sdpa = Attention(call)

    def forward(self, x: Tensor, rope: Tensor, *layout: Any) -> Tensor:
        query, key, value = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.query, self.key, self.value))
        cosines, sines = rope[:, None, :, :4], rope[:, None, :, 4:]  # slices of a cache that is cut
        query, key = (_rotate(y, cosines, sines) for y in (query * 4, key))
        return x + self.output(self.sdpa(query, key, value, *layout).transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x[..., :4], x[..., 4:]
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


def _policy(saved: bool, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if saved and op == torch.ops.dtcp.attention_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _selective(saved: bool) -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_policy, saved))


def forward(blocks: list[Callable[..., Tensor]], checkpointing: str, x: Tensor, rope: Tensor, *layout: Any) -> Tensor:
    """Through the blocks, checkpointed each. ``layout`` goes with the call where DTensors have it."""
    options: dict[str, Any] = {"use_reentrant": checkpointing == "reentrant"}
    if checkpointing.startswith("selective"):
        options["context_fn"] = functools.partial(_selective, checkpointing == "selective_saved")
    x = x * rope.mean(-1, keepdim=True)  # autograd saves something made of the buffer
    for block in blocks:
        x = block(x, rope, *layout) if checkpointing == "none" else checkpoint(block, x, rope, *layout, **options)
    return x


def make_data(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, the RoPE cache (cosines and sines), and the upstream gradient of the whole sequence."""
    generator = torch.Generator().manual_seed(seq_len)
    angles = torch.arange(seq_len)[:, None] / torch.tensor([1.0, 3.0, 10.0, 30.0])
    rope = torch.cat([angles.cos(), angles.sin()], dim=-1).expand(2, -1, -1).contiguous()
    x, weight = (torch.randn(2, seq_len, 32, generator=generator) for _ in range(2))
    return x, rope, weight


def _prepare(cell: Cell, blocks: nn.ModuleList) -> Callable[..., Tensor]:
    if cell.compile == "model":
        return torch.compile(lambda *inputs: forward(list(blocks), cell.checkpointing, *inputs), backend=cell.backend)
    units: list[Any] = list(blocks)
    if cell.compile == "block":
        # Selective checkpointing wants a recomputation to run the very ops of its forward; a graph that became dynamic
        # in between (the second length) has others, and torch says so. With static graphs each length keeps its own.
        dynamic = False if cell.checkpointing.startswith("selective") else None
        units = [torch.compile(block, fullgraph=True, dynamic=dynamic, backend=cell.backend) for block in blocks]
    return lambda *inputs: forward(units, cell.checkpointing, *inputs)


def _step(
    cell: Cell, mesh: Any, run: Callable[..., Tensor], blocks: nn.Module, seq_len: int, layout_name: str
) -> dict[str, Any]:
    """Forward of one step, and its backward if that comes inside."""
    x, rope, weight = make_data(seq_len)
    layout = dtcp.make_layout(layout_name, seq_len=seq_len, cp=cell.world)
    step: dict[str, Any] = {"layout": layout, "calls": None}
    if cell.door != "context":
        if cell.door == "plan":
            dtcp.set_sequence(blocks, layout)
        x, rope, weight = (dtcp.shard(t, mesh, layout) for t in (x, rope, weight))
        step["x"] = x.requires_grad_()
        step["out"] = run(x, rope, *[layout] * (cell.door == "dtensor"))
        step["loss"] = (step["out"] * weight).sum()
        if cell.backward == "inside":
            step["loss"].backward()
        return step
    with dtcp.context_parallel(
        mesh,
        buffers=[rope, weight],
        buffer_seq_dims=[1, -2],
        layout=layout_name,
        **options_of(cell.strategy, cell.world),
    ) as cp:
        step["x"] = cp.shard(x).requires_grad_()
        step["out"] = run(step["x"], rope)
        step["loss"] = (step["out"] * weight).sum()
        if cell.backward == "inside":
            step["loss"].backward()
    assert rope.size(1) == weight.size(1) == seq_len
    step["calls"] = cp
    return step


def check_cell(rank: int, world: int, cell: Cell) -> int:
    """Raise unless the cell equals the whole model; return the attention calls of one step."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(cell.call) for _ in range(NUM_BLOCKS))
    whole = copy.deepcopy(blocks)
    for block in blocks:
        if cell.door == "plan":
            from torch.distributed.tensor.parallel import parallelize_module

            how = options_of(cell.strategy, cell.world)
            parallelize_module(block, mesh, {"sdpa": dtcp.ContextParallel(**how)})
        elif cell.door == "dtensor":
            block.sdpa.as_dtensor = functools.partial(
                dtcp.as_dtensor, mesh=mesh, **options_of(cell.strategy, cell.world)
            )
    run = _prepare(cell, blocks)
    with count_op_calls() as count:
        steps = [_step(cell, mesh, run, blocks, *sequence) for sequence in SEQUENCES]
        if cell.backward == "outside":
            for step in reversed(steps):
                step["loss"].backward()
    for step, (seq_len, _) in zip(steps, SEQUENCES, strict=True):
        x, rope, weight = make_data(seq_len)
        out = forward(list(whole), "none", x.requires_grad_(), rope)
        (out * weight).sum().backward()
        layout = step["layout"]
        _assert_close("out", dtcp.unshard(step["out"].detach(), mesh, layout), out.detach())
        _assert_close("grad_x", dtcp.unshard(step["x"].grad, mesh, layout), x.grad)
        if step["calls"] is not None:
            assert step["calls"].num_attention_calls == cell.calls_per_block * NUM_BLOCKS, "by the context"
    total = torch.cat([p.grad.flatten() for p in whole.parameters()]).norm()
    for (name, own), (_, right) in zip(blocks.named_parameters(), whole.named_parameters(), strict=True):
        dist.all_reduce(own.grad)
        error = (own.grad - right.grad).norm()
        assert error <= TOLERANCE * right.grad.norm() + 1e-8 * total, f"{name}: {error / right.grad.norm():.1e}"
    assert count[0] == cell.calls_per_block * NUM_BLOCKS * len(SEQUENCES), f"attention op ran {count[0]} times"
    return count[0]


def _assert_close(name: str, actual: Tensor, right: Tensor) -> None:
    error = float((actual - right).norm() / right.norm())
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


class count_op_calls:
    """Count the runs of the forward op on this rank, also those in compiled graphs."""

    def __enter__(self) -> list[int]:
        from dtcp.attention import ops

        self._original, count = ops.count_call, [0]

        def counting(state: Tensor) -> None:
            count[0] += 1
            self._original(state)

        ops.count_call = counting
        return count

    def __exit__(self, *exc: object) -> None:
        from dtcp.attention import ops

        ops.count_call = self._original
