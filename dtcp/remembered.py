"""Keep what follows from documents for as long as they are in use, within a bound on memory.

A step has other documents than the one before, and an entry for each pair of ranks, so a bound on the number of
entries would keep hundreds of steps of a short sequence over few ranks, gigabytes, or not one of a long one.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
P = ParamSpec("P")

_MAX_TOKENS = 1 << 22  # of all that is kept; each costs up to some 64 bytes here: ids, state, bounds of its keys
_MAX_KEPT = 256  # however short they are
_MIN_KEPT = 4  # whatever they cost: a step with microbatches in flight uses some of them in turn


class Recent(Generic[K, V]):
    """What was used last: at least 4 values, and more up to a bound on the tokens that they describe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.RLock()  # backward runs in threads of its own

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: K, value: V, num_tokens: int) -> V:
        """Keep ``value``, and drop what was not used for longest; return it."""
        with self._lock:
            _, before = self._kept.pop(key, (None, 0))
            self._kept[key] = value, num_tokens
            self._num_tokens += num_tokens - before
            while len(self._kept) > _MAX_KEPT or (len(self._kept) > _MIN_KEPT and self._num_tokens > _MAX_TOKENS):
                _, (_, dropped) = self._kept.popitem(last=False)
                self._num_tokens -= dropped
            return value

    def __len__(self) -> int:
        return len(self._kept)


_following: Recent[Any, dict[Any, Any]] = Recent()  # documents → all that was computed from them


def remembered(of: Callable[..., Any], *, maxsize: int = 4096) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Cache a function by value: its results are dropped together with the documents that they follow from.

    Args:
        of: Of the same arguments, the documents, or None where a result does not depend on any.
        maxsize: Results of the latter kind that are kept.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        without_documents = functools.lru_cache(maxsize=maxsize)(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            documents = of(*args, **kwargs)
            if documents is None:
                return without_documents(*args, **kwargs)  # type: ignore[arg-type]
            results = _following.get(documents)
            if results is None:
                results = _following.put(documents, {}, documents.num_rows * documents.seq_len)
            key = (function, args, tuple(kwargs.items()))
            if key not in results:
                results[key] = function(*args, **kwargs)
            found: R = results[key]
            return found

        return call

    return decorate
