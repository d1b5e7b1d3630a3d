"""What one step sends over which axis, what its blocks keep for the backward, and which of them attend.

Taken from torch's profiler, which also sees inside compiled graphs and the library's own ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.profiler import profile, record_function

from dtcp.mesh import ParallelDims
from dtcp.train.traffic import Traffic, flight_entries, traffic

_BLOCK = "dtcp.doctor.block."


@dataclass(slots=True)
class Recording:
    """What one rank did in a step; blocks by name."""

    traffic: list[Traffic] = field(default_factory=list)
    attention_calls: dict[str, int] = field(default_factory=dict)  # in the forward of a microbatch
    kept_bytes: dict[str, int] = field(default_factory=dict)  # by the forward of a microbatch, until the backward


def record(run: Callable[[], Any], blocks: dict[str, nn.Module], dims: ParallelDims | None) -> tuple[Any, Recording]:
    """Run a step and return its result and what it did on this rank.

    Args:
        blocks: By name; their first call counts.
        dims: Built mesh; None where nothing is sent.
    """
    seen = {entry["record_id"] for entry in flight_entries()}
    with _marked(blocks), profile(record_shapes=True, profile_memory=True) as profiler:
        result = run()
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    entries = [entry for entry in flight_entries() if entry["record_id"] not in seen]
    sent = None if dims is None else traffic(events, entries, dims)
    recording = Recording(traffic=sent or [])
    for name in blocks:
        inside = _inside_first(events, _BLOCK + name)
        recording.attention_calls[name] = sum(event.name() == "dtcp::attention_forward" for event in inside)
        recording.kept_bytes[name] = _allocated(inside)
    return result, recording


# ---- blocks ----------------------------------------------------------------------------------------------------------


@contextmanager
def _marked(blocks: dict[str, nn.Module]) -> Iterator[None]:
    """Put a range around each call of a block."""
    before = {name: block._compiled_call_impl for name, block in blocks.items()}
    for name, block in blocks.items():
        # Around hooks and compiled code alike, where a hook of the block would be traced into its graph.
        block._compiled_call_impl = _with_range(name, block._compiled_call_impl or block._call_impl)
    try:
        yield
    finally:
        for name, block in blocks.items():
            block._compiled_call_impl = before[name]


def _with_range(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(_BLOCK + name):
            return call(*args, **kwargs)

    return run


def _allocated(events: list[Any]) -> int:
    """Bytes that were allocated and not freed; but what FSDP2 gathers and frees is parameters."""
    total, sharding_until = 0, 0
    for event in events:
        if event.name().startswith("FSDP::"):
            sharding_until = max(sharding_until, event.start_ns() + event.duration_ns())
        elif event.name() == "[memory]" and event.start_ns() > sharding_until:
            total += event.nbytes()
    return total


def _inside_first(events: list[Any], name: str) -> list[Any]:
    for event in events:
        if event.name() == name:
            start, end = event.start_ns(), event.start_ns() + event.duration_ns()
            return [other for other in events if start <= other.start_ns() <= end]
    return []
