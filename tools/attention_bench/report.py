"""Records for programs and tables for people."""

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
from rich import box
from rich.console import Console
from rich.table import Table

import dtcp
from attention_bench.problem import Configuration, Measurement, Problem
from attention_bench.sent import closed_form_bytes

# ---- records ---------------------------------------------------------------------------------------------------------


def make_records(problem: Problem, rows: list[Measurement], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat record for each row, units in the key names. The single process comes first of its length."""
    records: list[dict[str, Any]] = []
    single: dict[str, Any] = {}
    for row in rows:
        record = asdict(problem) | {
            "strategy": row.configuration.strategy if row.configuration else "single_process",
            "layout": row.configuration.layout if row.configuration else None,
            "seq_len_tokens": row.seq_len,
            "num_repeats": len(row.samples),
        }
        for name, seconds in _samples(problem, row).items():
            record |= {
                f"{name}_seconds_median": statistics.median(seconds),
                f"{name}_seconds_min": min(seconds),
                f"{name}_seconds_max": max(seconds),
                f"{name}_seconds": seconds,
            }
        if row.configuration is None:
            single = record
        else:
            record |= _compared(problem, row.configuration, record, single) | _bytes(problem, row.configuration, row)
        records.append(record | {"environment": environment})
    return records


def _samples(problem: Problem, row: Measurement) -> dict[str, list[float]]:
    samples = {"forward": [s.forward for s in row.samples]}
    return samples | ({"forward_backward": [s.total for s in row.samples]} if problem.with_backward else {})


def _compared(
    problem: Problem, configuration: Configuration, record: dict[str, Any], single: dict[str, Any]
) -> dict[str, Any]:
    """Ratios to the single process, and to what the layout allows."""
    layout = dtcp.make_layout(configuration.layout, seq_len=configuration.seq_len, cp=problem.num_ranks)
    imbalance = layout.imbalance(is_causal=problem.is_causal)
    devices_of_single = 1 if problem.device == "cuda" else problem.num_ranks
    compared: dict[str, Any] = {"local_seq_len_tokens": layout.local_seq_len, "imbalance": imbalance}
    for name in ("forward", "forward_backward") if problem.with_backward else ("forward",):
        own, of_single = (r[f"{name}_seconds_median"] for r in (record, single))
        limit = of_single * imbalance * devices_of_single / problem.num_ranks
        compared |= {
            f"{name}_ratio_to_single_process": own / of_single,
            f"{name}_limit_seconds": limit,
            f"{name}_ratio_to_limit": own / limit,
        }
    return compared


def _bytes(problem: Problem, configuration: Configuration, row: Measurement) -> dict[str, Any]:
    forward, backward = closed_form_bytes(problem, configuration) or (None, None)
    return {
        "max_relative_error": max(check.error for check in row.checks),
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


# ---- tables ----------------------------------------------------------------------------------------------------------


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    """Print the machine and the problem, times, and bytes."""
    r, e = records[0], records[0]["environment"]
    n, cores = r["num_ranks"], e["num_usable_cores"]
    console.print(
        f"{e['processor']}, {cores} usable cores, load {e['load_average_1_minute']} · torch {e['torch_version']} · "
        f"{r['device']}\n{r['dtype']}, batch {r['batch_size']}, heads {r['num_heads']}:{r['num_kv_heads']}, head dim "
        f"{r['head_dim']}, {'causal' if r['is_causal'] else 'full'} attention · {n} rank(s) of 1 thread beside one "
        f"process of {n} thread(s) · median of {r['num_repeats']} interleaved repeat(s)", soft_wrap=True
    )
    if r["device"] == "cpu" and cores < n:
        console.print(f"{n} ranks share {cores} cores: times say little, bytes are right")
    console.print(_time_table(records), _bytes_table(records))


def _time_table(records: list[dict[str, Any]]) -> Table:
    main = "forward_backward" if records[0]["with_backward"] else "forward"
    table = Table(title="Time, ms", box=box.SIMPLE, title_justify="left", pad_edge=False)
    for head in ("tokens", "layout", "strategy"):
        table.add_column(head, justify="right" if head == "tokens" else "left", no_wrap=True)
    forward = ("forward", "ratio") if main != "forward" else ()
    for head in (*forward, main.replace("_", "+"), "min..max", "ratio", "limit", "to limit", "error"):
        table.add_column(head, justify="right", no_wrap=True)
    for r in records:
        ratio, is_single = f"{main}_ratio_to_single_process", r["layout"] is None
        first = [_ms(r["forward_seconds_median"]), _number(r.get("forward_ratio_to_single_process"))] if forward else []
        table.add_row(
            str(r["seq_len_tokens"]), "–" if is_single else r["layout"], r["strategy"].replace("_process", " process"),
            *first, _ms(r[f"{main}_seconds_median"]),
            f"{_ms(r[f'{main}_seconds_min'])}..{_ms(r[f'{main}_seconds_max'])}", _number(r.get(ratio)),
            "" if is_single else _ms(r[f"{main}_limit_seconds"]), _number(r.get(f"{main}_ratio_to_limit")),
            "" if is_single else f"{r['max_relative_error']:.0e}", style="bold" if is_single else None,
        )  # fmt: skip
    return table


def _bytes_table(records: list[dict[str, Any]]) -> Table:
    title = "Sent by a rank, MiB: mean / max over ranks"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    passes = ("forward", "backward") if records[0]["with_backward"] else ("forward",)
    for head in ("tokens", "layout", "strategy", *(h for name in passes for h in (name, "closed form"))):
        table.add_column(head, justify="left" if head in ("layout", "strategy") else "right", no_wrap=True)
    for r in records:
        if r["layout"] is None:
            continue
        cells = []
        for name in passes:
            sent, formula = r[f"{name}_sent_bytes_by_rank"], r[f"{name}_closed_form_bytes_by_rank"]
            cells += [_mean_and_max(sent), _mean_and_max(formula) + ("" if formula in (sent, None) else " ≠")]
        table.add_row(str(r["seq_len_tokens"]), r["layout"], r["strategy"], *cells)
    return table


def _mean_and_max(num_bytes: list[int] | None) -> str:
    if num_bytes is None:
        return "–"
    return f"{statistics.mean(num_bytes) / 2**20:.4g} / {max(num_bytes) / 2**20:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
