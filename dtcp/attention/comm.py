"""Point-to-point exchange between the ranks of one group. Ranks are numbered within the group."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtcp.own_group import own_group
from dtcp.ranges import named_range


class Message(NamedTuple):
    """``rows`` go to, or come from, ``peer``; contiguous."""

    peer: int
    rows: Tensor


class Exchange:
    """Messages in flight. The tensors belong to the exchange until ``wait`` has returned."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        if self._works:
            wait_for(*self._works)


def wait_for(*works: dist.Work) -> None:
    """Wait until all of them have finished."""
    with named_range("exchange wait"):
        for work in works:
            work.wait()


def start_exchange(sends: list[Message], receives: list[Message], group: dist.ProcessGroup) -> Exchange:
    """Start sending and receiving; returns at once. Every rank must list its messages in the same order.

    Sizes must match between sender and receiver (both come from one schedule): gloo aborts the process if
    they do not. A message without rows is not sent.
    """
    with named_range("exchange"):
        return _start(sends, receives, group)


def _start(sends: list[Message], receives: list[Message], group: dist.ProcessGroup) -> Exchange:
    if (own := own_group(group)) is not None:
        sent, received = [m for m in sends if m.rows.size(0)], [m for m in receives if m.rows.size(0)]
        return Exchange(own.start_messages(sent, received))
    operations = [dist.P2POp(dist.isend, m.rows, group=group, group_peer=m.peer) for m in sends if m.rows.size(0)]
    operations += [dist.P2POp(dist.irecv, m.rows, group=group, group_peer=m.peer) for m in receives if m.rows.size(0)]
    return Exchange(dist.batch_isend_irecv(operations) if operations else [])
