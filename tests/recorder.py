"""Record what leaves a rank: every point-to-point message and every collective that dtcp starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dtcp import collectives
from dtcp.attention import comm


@dataclass(frozen=True)
class Sent:
    """``num_bytes`` that left this rank for others in one message or collective; copies to itself not counted."""

    kind: str  # send, all_gather, reduce_scatter; all_reduce; "vectors" for collectives of DTensors with one dim
    num_bytes: int
    peer: int | None = None


@contextlib.contextmanager
def count_exchanges() -> Iterator[list[Sent]]:
    """Yield the list of what this rank has sent inside the block."""
    sent: list[Sent] = []

    def batch(operations: list[dist.P2POp], _real=dist.batch_isend_irecv):
        sent.extend(
            Sent("send", op.tensor.numel() * op.tensor.element_size(), op.group_peer)
            for op in operations
            if op.op is dist.isend
        )
        return _real(operations)

    def all_gather(output, inputs, group=None, async_op=False, _real=collectives._all_gather):
        sent.append(Sent("all_gather", inputs.numel() * inputs.element_size() * (group.size() - 1)))
        return _real(output, inputs, group=group, async_op=async_op)

    def reduce_scatter(output, inputs, group=None, async_op=False, _real=collectives._reduce_scatter):
        sent.append(Sent("reduce_scatter", output.numel() * output.element_size() * (group.size() - 1)))
        return _real(output, inputs, group=group, async_op=async_op)

    with (
        mock.patch.object(comm.dist, "batch_isend_irecv", batch),
        mock.patch.object(collectives, "_all_gather", all_gather),
        mock.patch.object(collectives, "_reduce_scatter", reduce_scatter),
    ):
        yield sent


# Of DTensors: what a rank sends of the input of a collective over p ranks.
_PARTS: dict[str, Any] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter_tensor": lambda p: (p - 1) / p,
    "all_gather_into_tensor": lambda p: p - 1,
}


class _DTensorCollectives(TorchDispatchMode):
    def __init__(self, sent: list[Sent], num_ranks: int) -> None:
        super().__init__()
        self.sent, self.num_ranks = sent, num_ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in _PARTS and "c10d_functional" in func.name():
            num_bytes = round(args[0].numel() * args[0].element_size() * _PARTS[name](self.num_ranks))
            kind = name.removesuffix("_tensor").removesuffix("_into") if args[0].ndim > 1 else "vectors"
            self.sent.append(Sent(kind, num_bytes))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def count_collectives(num_ranks: int) -> Iterator[list[Sent]]:
    """Like ``count_exchanges``, with what DTensors over ``num_ranks`` ranks send."""
    with count_exchanges() as sent, _DTensorCollectives(sent, num_ranks):
        yield sent
