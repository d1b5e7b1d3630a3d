"""Record what leaves a rank: every point-to-point message and every collective that dtcp starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch.distributed as dist

from dtcp import collectives
from dtcp.attention import comm


@dataclass(frozen=True)
class Sent:
    """``num_bytes`` that left this rank for others in one message or collective; copies to itself not counted."""

    kind: str  # send, all_gather, reduce_scatter
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
