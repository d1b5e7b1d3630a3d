"""One layer of a model on the ranks of a mesh, and what its forward and backward keep and send. Runs on the ranks.

Shapes: B rows, S positions of the whole sequence, S/P of them on a cp rank, S/(P·T) where sequence parallelism cuts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from dtcp.dtensor import local_part
from dtcp.models import build_model
from recorder import count_collectives


@dataclasses.dataclass(frozen=True)
class Layer:
    """A block of ``gpt`` (dropout 0.1) or ``llama`` and the mesh that it is cut over; sizes in elements."""

    model: str
    dim: int
    num_heads: int
    num_kv_heads: int  # of a llama; a gpt has as many as heads
    ffn_dim: int
    seq_len: int
    rows: int = 1
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    dtype: str = "float32"

    @property
    def way(self) -> str:
        """What the degree counts."""
        return "CP" if self.cp > 1 else "TP+SP" if self.sequence_parallel else "TP"

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp


def make_layer(layer: Layer) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return this rank's part of the block, and what runs its forward on an input that requires a gradient."""
    dims = dtcp.ParallelDims(tp=layer.tp, cp=layer.cp)
    mesh = dims.build_mesh("cpu")
    sizes: dict[str, Any] = {"num_heads": layer.num_heads, "dim": layer.dim, "ffn_dim": layer.ffn_dim}
    if layer.model == "gpt":
        sizes |= {"dropout": 0.1, "max_seq_len": layer.seq_len}
    else:
        sizes |= {"num_kv_heads": layer.num_kv_heads}
    model = build_model(f"{layer.model}_tiny", num_layers=1, **sizes, seed=0)
    dtcp.apply_tensor_parallel(model, dims, sequence_parallel=layer.sequence_parallel)
    dtype = getattr(torch, layer.dtype)
    block: Any = next(iter(model.layers.values())).to(dtype)
    multiple_of = layer.tp if layer.sequence_parallel else 1
    layout = dtcp.make_layout("head_tail", seq_len=layer.seq_len, cp=layer.cp, multiple_of=multiple_of)
    if layer.cp > 1:
        parallelize_module(block, dims.view("cp"), {"attention.sdpa": dtcp.ContextParallel()})
        dtcp.set_sequence(block, layout)
    positions = layout.positions(mesh["cp"].get_local_rank()).expand(layer.rows, -1)
    second = dtcp.dropout_keys(0, 0, range(layer.rows), positions) if layer.model == "gpt" else positions
    num_positions = layout.local_seq_len // multiple_of
    x = torch.randn(layer.rows, num_positions, layer.dim, dtype=dtype, requires_grad=True)
    return block, lambda: block(x, second)


def kept_bytes(rank: int, world: int, layer: Layer) -> int:
    """Bytes that autograd saves of a layer's forward on this rank: each storage once, parameters not."""
    block, forward = make_layer(layer)
    parameters = {_storage(parameter)._cdata for parameter in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, else the address of one could be another's later

    def keep(x: Tensor) -> Tensor:
        storage = _storage(x)
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


def _storage(x: Tensor) -> torch.UntypedStorage:
    return local_part(x.detach()).untyped_storage()


def sent_bytes(rank: int, world: int, layer: Layer) -> list[dict[str, tuple[int, int]]]:
    """What this rank sends in a layer's forward, and in its backward: by kind of collective how many, and bytes."""
    _, forward = make_layer(layer)
    with count_collectives(world) as of_forward:
        out = forward()
    with count_collectives(world) as of_backward:
        out.sum().backward()
    return [_by_kind(of_forward), _by_kind(of_backward)]


def _by_kind(sent: list[Any]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for exchange in sent:
        count, num_bytes = found.get(exchange.kind, (0, 0))
        found[exchange.kind] = count + 1, num_bytes + exchange.num_bytes
    return found
