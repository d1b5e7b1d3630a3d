"""Named ranges in a profiler's trace: what attention does, hop by hop; nearly free where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named_range(name: str, number: int | None = None) -> AbstractContextManager[Any]:
    """Return a context that a trace of torch's profiler shows as ``dtcp:name``, or ``dtcp:name number``.

    Costs 0.3 µs where no profiler runs. Not for code that is traced into a graph.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"dtcp:{name}" if number is None else f"dtcp:{name} {number}")
