"""What steps send over which axis of the mesh.

Taken from torch's profiler, which also sees inside compiled graphs and the library's own ops, and for the axes from
gloo's flight recorder, which knows the process group of each collective and has to be switched on before the first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcp.mesh import ParallelDims

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

Span = tuple[int, int]
"""From when to when, ns."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends in one step over one axis by one kind of collective."""

    axis: str
    kind: str
    count: int
    num_bytes: int  # that leave this rank, by the ring algorithms


def switch_flight_recorder_on() -> None:
    """Before the first process group: have torch remember the group of each collective, and its profiler be quiet."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "20000")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True, slots=True)
class _Call:
    kind: str
    group_name: str | None  # None: a message between two ranks, whose group the recorder of gloo does not know
    start: int
    num_bytes: int  # of the message, or of what all ranks' parts make together


def flight_entries() -> list[dict[str, Any]]:
    """What the flight recorder of gloo remembers, in order; nothing where it is off."""
    c10d: Any = torch._C._distributed_c10d
    dump = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    return sorted(dump.get("entries", []), key=lambda entry: entry["record_id"])


def _calls(events: list[Any], entries: list[dict[str, Any]]) -> list[_Call]:
    """Every collective and message of the step. gloo makes a reduce-scatter of an all-reduce: torch's op names it."""
    ops = [event for event in events if event.name().startswith("c10d::") and _kind(event.name()) not in ("", "send")]
    names = [entry["profiling_name"].split(":", 1)[1].split(" ")[0] for entry in entries]
    is_zipped = len(ops) == len(names) and all(map(_is_same, (op.name() for op in ops), names))
    calls = []
    for index, (entry, name) in enumerate(zip(entries, names, strict=True)):
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


def traffic(
    events: list[Any], entries: list[dict[str, Any]], dims: ParallelDims, windows: Sequence[Span] | None = None
) -> list[Traffic] | None:
    """Return what this rank sent.

    Args:
        events: Of the profiler, with shapes.
        entries: `flight_entries` made meanwhile.
        dims: Built mesh.
        windows: Only what began in one of them, ns; None: all of it.

    Returns:
        None if what began when is not known, because other threads of this process communicated too.
    """
    calls = _calls(events, entries)
    if windows is not None:
        if any(call.start == 0 for call in calls):
            return None
        calls = [call for call in calls if any(start <= call.start <= end for start, end in windows)]
    axis_of: dict[str, str] = {dims.view(axis).get_group().group_name: axis for axis in reversed(_AXES)}
    attending = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith("dtcp::attention")
    ]
    sums: dict[tuple[str, str], list[int]] = {}
    for call in calls:
        if call.group_name is None:  # rings turn inside the attention ops, stages hand on outside
            axis = "cp" if any(start <= call.start <= end for start, end in attending) else "pp"
        else:
            axis = axis_of.get(call.group_name, "world")
        num_ranks = dims.mesh.size() if axis == "world" else dims.view(axis).size()
        total = sums.setdefault((axis, call.kind), [0, 0])
        total[0] += 1
        total[1] += _sent_bytes(call.kind, call.num_bytes, num_ranks)
    return [Traffic(axis, kind, *total) for (axis, kind), total in sorted(sums.items())]


def most_of_ranks(ranks: Iterable[Sequence[Traffic]]) -> list[Traffic]:
    """For each axis and kind, that of the rank which sends most."""
    most: dict[tuple[str, str], Traffic] = {}
    for one in (one for of_rank in ranks for one in of_rank):
        key = one.axis, one.kind
        if key not in most or one.num_bytes > most[key].num_bytes:
            most[key] = one
    return [most[key] for key in sorted(most)]


def traffic_lines(found: Sequence[Traffic], *, num_steps: int = 1) -> list[str]:
    """A table of what was sent in a step, of ``num_steps`` that were recorded."""
    if not found:
        return []
    lines = [f"{'axis':<14}{'what is sent in a step':<24}{'calls':>7}{'KiB from a rank':>17}"]
    for one in found:
        calls, kib = f"{one.count / num_steps:g}", kib_of(one.num_bytes / num_steps)
        lines.append(f"{one.axis:<14}{one.kind:<24}{calls:>7}{kib:>17}")
    return lines


def kib_of(num_bytes: float) -> str:
    """Bytes in KiB, to a tenth."""
    return f"{num_bytes / 1024:,.1f}"


def _kind(name: str) -> str:
    plain = name.removeprefix("c10d::").strip("_").replace("_base", "")
    return next((kind for prefix, kind in _KINDS.items() if plain.replace("_", "").startswith(prefix)), "")


def _is_same(op: str, name: str) -> bool:
    """Whether torch's op and the name of gloo's recorder are of one kind."""
    return _kind(op) == _kind(name) or (_kind(op), _kind(name)) == ("reduce_scatter", "all_reduce")


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
