"""Count attention calls for whoever wants to know that they took place, and tell our own from others'.

A compiled graph runs no Python of its caller, so the op itself counts: the number of the counter travels with the
layout's state tensor.
"""

from __future__ import annotations

import itertools
import threading
import weakref

from torch import Tensor

from dtcp.layout import COUNTER, SequenceLayout

_numbers = itertools.count(1)
_counters: weakref.WeakValueDictionary[int, CallCounter] = weakref.WeakValueDictionary()


class CallCounter:
    """Counts the calls whose state came from ``state_of``; forgotten when nobody holds it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._number = next(_numbers)
        _counters[self._number] = self

    def state_of(self, layout: SequenceLayout) -> Tensor:
        """``layout.state`` with this counter's number in it."""
        state = layout.state.clone()
        state[COUNTER] = self._number
        return state


def count_call(state: Tensor) -> None:
    """Add one to the counter that ``state`` names, if it is still there."""
    counter = _counters.get(int(state[COUNTER]))
    if counter is not None:
        counter.num_calls += 1


class _OwnTiles(threading.local):
    """``with own_tiles:`` while this thread computes tiles, which call the operators that others are refused."""

    is_running = False

    def __enter__(self) -> None:
        self.is_running = True

    def __exit__(self, *exc: object) -> None:
        self.is_running = False


own_tiles = _OwnTiles()
