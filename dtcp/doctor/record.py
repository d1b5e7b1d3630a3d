"""What one step sends over which axis, what its blocks keep for the backward, and which of them attend.

Taken from torch's profiler, which also sees inside compiled graphs and the library's own ops, and for the axes from
its flight recorder, which knows the process group of each collective and has to be switched on before the first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile, record_function

from dtcp.mesh import ParallelDims

_BLOCK = "dtcp.doctor.block."
_AXES = ("tp", "cp", "pp", "dp_shard", "dp_replicate", "fsdp", "batch", "loss")
_CHECK_BYTES = 4096  # gathers of plain bytes up to this size compare the ranks' shapes, and move no data
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends in one step over one axis by one kind of collective."""

    axis: str
    kind: str
    count: int
    num_bytes: int  # that leave this rank, by the ring algorithms


@dataclass(slots=True)
class Recording:
    """What one rank did in a step; blocks by name."""

    traffic: list[Traffic] = field(default_factory=list)
    attention_calls: dict[str, int] = field(default_factory=dict)  # in the forward of a microbatch
    kept_bytes: dict[str, int] = field(default_factory=dict)  # by the forward of a microbatch, until the backward


def switch_flight_recorder_on() -> None:
    """Before the first process group: have torch remember the group of each collective, and its profiler be quiet."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def record(run: Callable[[], Any], blocks: dict[str, nn.Module], dims: ParallelDims | None) -> tuple[Any, Recording]:
    """Run a step and return its result and what it did on this rank.

    Args:
        blocks: By name; their first call counts.
        dims: Built mesh; None where nothing is sent.
    """
    seen = {entry["record_id"] for entry in _flight_entries()}
    with _marked(blocks), profile(record_shapes=True, profile_memory=True) as profiler:
        result = run()
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    entries = [entry for entry in _flight_entries() if entry["record_id"] not in seen]
    recording = Recording(traffic=_traffic(events, entries, dims) if dims is not None else [])
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


# ---- collectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    kind: str
    group_name: str | None  # None: a message between two ranks, whose group the recorder of gloo does not know
    start: int
    num_bytes: int  # of the message, or of what all ranks' parts make together


def _flight_entries() -> list[dict[str, Any]]:
    c10d: Any = torch._C._distributed_c10d
    dump = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    return sorted(dump.get("entries", []), key=lambda entry: entry["record_id"])


def _calls(events: list[Any], entries: list[dict[str, Any]]) -> list[_Call]:
    """Every collective and message of the step. gloo makes a reduce-scatter of an all-reduce: torch's op names it."""
    ops = [event for event in events if event.name().startswith("c10d::") and _kind(event.name()) not in ("", "send")]
    calls = []
    for index, entry in enumerate(entries):
        name = entry["profiling_name"].split(":", 1)[1].split(" ")[0]
        is_zipped = len(ops) == len(entries)
        start = ops[index].start_ns() if is_zipped else 0
        sizes = [_num_bytes(entry[f"{side}_sizes"], entry[f"{side}_dtypes"]) for side in ("input", "output")]
        is_comparison = max(sizes) <= _CHECK_BYTES and "Byte" in entry["input_dtypes"] and "gather" in name
        kind = "comparison of ranks" if is_comparison else _kind(ops[index].name() if is_zipped else name)
        calls.append(_Call(kind or name, entry["process_group"][0], start, max(sizes)))
    for event in events:
        if event.name() == "gloo:send":
            width = _WIDTHS.get(event.dtypes()[0], 4)
            calls.append(_Call("send", None, event.start_ns(), width * math.prod(event.shapes()[0])))
    return calls


def _traffic(events: list[Any], entries: list[dict[str, Any]], dims: ParallelDims) -> list[Traffic]:
    axis_of: dict[str, str] = {dims.view(axis).get_group().group_name: axis for axis in reversed(_AXES)}
    attending = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith("dtcp::attention")
    ]
    sums: dict[tuple[str, str], list[int]] = {}
    for call in _calls(events, entries):
        if call.group_name is None:  # rings turn inside the attention ops, stages hand on outside
            axis = "cp" if any(start <= call.start <= end for start, end in attending) else "pp"
        else:
            axis = axis_of.get(call.group_name, "world")
        num_ranks = dims.mesh.size() if axis == "world" else dims.view(axis).size()
        total = sums.setdefault((axis, call.kind), [0, 0])
        total[0] += 1
        total[1] += _sent_bytes(call.kind, call.num_bytes, num_ranks)
    return [Traffic(axis, kind, *total) for (axis, kind), total in sorted(sums.items())]


def _kind(name: str) -> str:
    plain = name.removeprefix("c10d::").strip("_").replace("_base", "")
    return next((kind for prefix, kind in _KINDS.items() if plain.replace("_", "").startswith(prefix)), "")


def _num_bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    return sum(_WIDTHS.get(dtype, 4) * math.prod(size) for size, dtype in zip(sizes, dtypes, strict=False))


_WIDTHS = {"Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1} | {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8
}  # fmt: skip


def _sent_bytes(kind: str, whole: int, num_ranks: int) -> int:
    """Bytes that leave a rank, by the ring algorithms."""
    match kind:
        case "all_reduce":
            return 2 * whole * (num_ranks - 1) // num_ranks
        case "all_gather" | "reduce_scatter" | "all_to_all" | "comparison of ranks":
            return whole * (num_ranks - 1) // num_ranks
        case _:
            return whole
