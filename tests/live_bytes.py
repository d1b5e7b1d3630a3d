"""The peak of bytes that are allocated inside a block, by dispatched ops or by the allocator's own account."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tracker(TorchDispatchMode):
    """Sees every op, but for those inside custom ops, and counts each storage it has not met until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _address(x) not in given:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


@contextlib.contextmanager
def peak_live_bytes() -> Iterator[_Tracker]:
    """Yield an object whose ``.peak`` is the peak of live bytes allocated inside the block."""
    tracker = _Tracker()
    with tracker:
        yield tracker


def peak_allocated_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of what torch's CPU allocator hands out during ``run``, also inside custom ops."""
    return max(_allocated_bytes(run)[0])


def kept_allocated_bytes(run: Callable[[], Any]) -> int:
    """Return how much more than before torch's CPU allocator has handed out after ``run``, whose result lives on."""
    return _allocated_bytes(run)[0][-1]


def _allocated_bytes(run: Callable[[], Any]) -> tuple[list[int], Any]:
    """Live bytes after each change, beginning with 0; and the result."""
    with profile(profile_memory=True) as profiler:
        result = run()
    changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return list(itertools.accumulate((event.nbytes() for event in changes), initial=0)), result
