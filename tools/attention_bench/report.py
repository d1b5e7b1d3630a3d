"""Records for programs, of which tables are made for people."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import dtcp
from attention_bench.masks import documents_of, layout_of, work_of
from attention_bench.passes import has_reference
from attention_bench.problem import Configuration, Measurement, Problem
from attention_bench.sent import closed_form_bytes


def make_records(problem: Problem, rows: list[Measurement], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat record for each row, units in the key names. The single process comes first of its case."""
    records: list[dict[str, Any]] = []
    for row in rows:
        ours = row.computed_by if isinstance(row.computed_by, Configuration) else None
        mask = row.case.mask
        documents = documents_of(problem, row.case)
        record = asdict(problem) | {
            "strategy": ours.strategy if ours else f"single_process_{row.computed_by}",
            "way": row.way[0] if row.way else None,
            "layout": ours.layout if ours else None,
            "seq_len_tokens": row.case.seq_len,
            "mask": str(mask),
            "mask_name": mask.name,
            "window_tokens": mask.window,
            "document_lengths_tokens": documents and [r.lengths.tolist() for r in documents.rows()],
            "num_repeats": len(row.samples),
            "max_relative_error": max(check.error for check in row.checks),
            "error_relative_to": "reference_attention" if has_reference(row.case) else "scaled_dot_product_attention",
        }
        for name, seconds in _samples(problem, row).items():
            record |= {
                f"{name}_seconds_median": statistics.median(seconds),
                f"{name}_seconds_min": min(seconds),
                f"{name}_seconds_max": max(seconds),
                f"{name}_seconds": seconds,
            }
        if ours:
            singles = [r for r in records if r["layout"] is None and _case(r) == _case(record)]
            record |= _compared(problem, ours, record, singles) | _bytes(problem, ours, row)
        records.append(record | {"environment": environment})
    for single in [r for r in records if r["layout"] is None]:
        both = [r for r in records if r["layout"] is None and _case(r) == _case(single)]
        for name in _passes(problem):
            faster = min(r[f"{name}_seconds_median"] for r in both)
            single[f"{name}_ratio_to_single_process"] = single[f"{name}_seconds_median"] / faster
    return records


def _case(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["seq_len_tokens"], record["mask"]


def _passes(problem: Problem) -> tuple[str, ...]:
    return ("forward", "forward_backward") if problem.with_backward else ("forward",)


def _samples(problem: Problem, row: Measurement) -> dict[str, list[float]]:
    samples = {"forward": [s.forward for s in row.samples]}
    return samples | ({"forward_backward": [s.total for s in row.samples]} if problem.with_backward else {})


def _compared(
    problem: Problem, configuration: Configuration, record: dict[str, Any], singles: list[dict[str, Any]]
) -> dict[str, Any]:
    """Pairs, and ratios to the faster single process and to what the layout allows."""
    layout, work = layout_of(problem, configuration), work_of(problem, configuration)
    devices_of_single = 1 if problem.device == "cuda" else problem.num_ranks
    compared: dict[str, Any] = {
        "layout_taken": layout.name,
        "local_seq_len_tokens": layout.local_seq_len,
        "imbalance": work.imbalance,
        "allowed_pairs_by_rank": work.allowed_by_rank,
        "computed_pairs": work.computed,
        "computed_to_allowed_pairs": work.computed / work.allowed,
        "allowed_to_causal_pairs": work.allowed / work.causal,
    }
    for name in _passes(problem):
        own, of_single = record[f"{name}_seconds_median"], min(r[f"{name}_seconds_median"] for r in singles)
        limit = of_single * work.imbalance * devices_of_single / problem.num_ranks
        compared |= {
            f"{name}_ratio_to_single_process": own / of_single,
            f"{name}_limit_seconds": limit,
            f"{name}_ratio_to_limit": own / limit,
        }
    return compared


def _bytes(problem: Problem, configuration: Configuration, row: Measurement) -> dict[str, Any]:
    forward, backward = closed_form_bytes(problem, configuration) or (None, None)
    return {
        "forward_sent_bytes_by_rank": [check.forward_bytes for check in row.checks],
        "forward_closed_form_bytes_by_rank": forward,
        "backward_sent_bytes_by_rank": [check.backward_bytes for check in row.checks],
        "backward_closed_form_bytes_by_rank": backward,
        "agreement_sent_bytes_by_rank": [check.agreement_bytes for check in row.checks],
    }


def describe_environment(problem: Problem) -> dict[str, Any]:
    """What the numbers depend on besides the problem."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "processor": _processor(problem.device),
        "num_usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "load_average_1_minute": round(os.getloadavg()[0], 2),
        "threads_per_rank": 1,
        "threads_of_single_process": problem.num_ranks,
        "torch_version": torch.__version__,
        "dtcp_version": dtcp.__version__,
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "command": shlex.join(sys.argv),
    }


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
