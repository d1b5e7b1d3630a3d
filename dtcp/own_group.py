"""What stands in the place of a process group where there is none: a rank alone, or ranks that move rows themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class _Alone:
    """In the place of a group for a rank that exchanges nothing."""

    group_name = ""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


ALONE: dist.ProcessGroup = _Alone()  # type: ignore[assignment]

_OWN = "own:"
_own_groups: weakref.WeakValueDictionary[str, OwnGroup] = weakref.WeakValueDictionary()


class OwnGroup:
    """In the place of a process group for ranks that move rows themselves, as threads of one process do.

    ``resolve_group`` finds it by its name for as long as somebody holds it. What the methods that start something
    return has a ``wait``; until that has returned, the tensors belong to the exchange.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.group_name = f"{_OWN}{name}:{rank}"
        self._rank, self._size = rank, size
        _own_groups[self.group_name] = self

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def start_messages(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[dist.Work]:
        """Start sending (peer, rows), and filling rows from a peer, in order."""
        raise NotImplementedError

    def start_all_gather(self, gathered: Tensor, rows: Tensor) -> dist.Work:
        """Start filling ``gathered`` with the ``rows`` of every rank, 1-D."""
        raise NotImplementedError

    def start_reduce_scatter(self, scattered: Tensor, rows: Tensor) -> dist.Work:
        """Start filling ``scattered`` with this rank's part of the sum of all ranks' ``rows``, 1-D."""
        raise NotImplementedError


def own_group(group: object) -> OwnGroup | None:
    """Return ``group`` if it is an ``OwnGroup``; one stands where process groups do, which have no class in common."""
    return group if isinstance(group, OwnGroup) else None


def find_own_group(group_name: str) -> dist.ProcessGroup | None:
    """Return the one of that name, in the place of a process group; None for names of process groups.

    Raises:
        KeyError: If nobody holds it any more.
    """
    return _own_groups[group_name] if group_name.startswith(_OWN) else None  # type: ignore[return-value]
