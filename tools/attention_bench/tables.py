"""Tables for people, made of the records."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    """Print the machine and the problem, then times, work and bytes."""
    r, e = records[0], records[0]["environment"]
    n, cores = r["num_ranks"], e["num_usable_cores"]
    console.print(
        f"{e['processor']}, {cores} usable cores, load {e['load_average_1_minute']} · torch {e['torch_version']} · "
        f"{r['device']}\n{r['dtype']}, batch {r['batch_size']}, heads {r['num_heads']}:{r['num_kv_heads']}, head dim "
        f"{r['head_dim']} · {n} rank(s) of 1 thread beside one process of {n} thread(s) · median of "
        f"{r['num_repeats']} interleaved repeat(s)",
        soft_wrap=True,
    )
    if r["device"] == "cpu" and cores < n:
        console.print(f"{n} ranks share {cores} cores: times say little, bytes are right")
    console.print(_time_table(records), _work_table(records), _bytes_table(records))
    if any(len(windows) > 1 for windows in _windows(records).values()):
        console.print(_window_table(records))


def make_table(title: str, *heads: str) -> Table:
    """A table without lines, numbers to the right."""
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for head in heads:
        is_text = head in ("mask", "layout", "strategy", "way", "source", "what", "passes", "role")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != "way")
    return table


def _main(record: dict[str, Any]) -> str:
    return "forward_backward" if record["with_backward"] else "forward"


def _time_table(records: list[dict[str, Any]]) -> Table:
    main = _main(records[0])
    forward = ("forward", "ratio") if main != "forward" else ()
    numbers = (*forward, main.replace("_", "+"), "min..max", "ratio", "limit", "to limit", "error")
    table = make_table("Time, ms", "tokens", "mask", "layout", "strategy", *numbers)
    for r in records:
        is_single = r["layout"] is None
        first = [_ms(r["forward_seconds_median"]), _number(r["forward_ratio_to_single_process"])] if forward else []
        table.add_row(
            *_names(r), *first, _ms(r[f"{main}_seconds_median"]),
            f"{_ms(r[f'{main}_seconds_min'])}..{_ms(r[f'{main}_seconds_max'])}",
            _number(r[f"{main}_ratio_to_single_process"]), "" if is_single else _ms(r[f"{main}_limit_seconds"]),
            _number(r.get(f"{main}_ratio_to_limit")), f"{r['max_relative_error']:.0e}",
            style="bold" if is_single else None,
        )  # fmt: skip
    return table


def _names(record: dict[str, Any]) -> list[str]:
    """Cells that say which row it is."""
    layout = record["layout"] or "–"
    if layout == "auto":
        layout += f":{record['layout_taken']}"
    strategy = record["strategy"].replace("single_process_", "1 process: ")
    return [str(record["seq_len_tokens"]), record["mask"], layout, strategy]


def _work_table(records: list[dict[str, Any]]) -> Table:
    """One row for each layout of a case: the strategy does not change its pairs."""
    table = make_table(
        "Pairs of (query, key), millions, of one head", "tokens", "mask", "layout", "allowed", "computed",
        "computed/allowed", "allowed/causal", "imbalance",
    )  # fmt: skip
    seen = set()
    for r in records:
        names = tuple(_names(r)[:3])
        if r["layout"] is None or names in seen:
            continue
        seen.add(names)
        table.add_row(
            *names, _millions(sum(r["allowed_pairs_by_rank"])), _millions(r["computed_pairs"]),
            f"{r['computed_to_allowed_pairs']:.3f}", f"{r['allowed_to_causal_pairs']:.3f}", f"{r['imbalance']:.3f}",
        )  # fmt: skip
    ways = {(r["seq_len_tokens"], r["mask"]): r["way"] for r in records if r["strategy"] == "single_process_torch"}
    shown = "; ".join(f"{seq_len} {mask}: {way}" for (seq_len, mask), way in ways.items())
    table.caption, table.caption_justify = f"torch in the single process, its fastest way — {shown}", "left"
    return table


def _windows(records: list[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Rows that differ in their window alone, narrow windows first."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in sorted((r for r in records if r["window_tokens"]), key=lambda r: r["window_tokens"]):
        tokens, _, layout, strategy = _names(r)
        found.setdefault((tokens, r["mask_name"], layout, strategy), []).append(r)
    return found


def _window_table(records: list[dict[str, Any]]) -> Table:
    table = make_table(
        "Work follows the window", "tokens", "mask", "layout", "strategy", "window", "computed, millions", "time, ms",
        "ns per pair and head",
    )  # fmt: skip
    for (tokens, mask, layout, strategy), of_windows in _windows(records).items():
        for r in of_windows:
            seconds = r[f"{_main(r)}_seconds_median"]
            pairs = r.get("computed_pairs")
            each = "" if pairs is None else f"{seconds * 1e9 * r['num_ranks'] / pairs / r['num_heads']:.3f}"
            table.add_row(
                tokens, mask, layout, strategy, str(r["window_tokens"]), "" if pairs is None else _millions(pairs),
                _ms(seconds), each,
            )  # fmt: skip
        table.add_section()
    return table


def _millions(pairs: int) -> str:
    return f"{pairs / 1e6:.4g}"


def _bytes_table(records: list[dict[str, Any]]) -> Table:
    passes = ("forward", "backward") if records[0]["with_backward"] else ("forward",)
    heads = [head for name in passes for head in (name, "closed form")]
    table = make_table("Sent by a rank, MiB: mean / max over ranks", "tokens", "mask", "layout", "strategy", *heads)
    for r in records:
        if r["layout"] is None:
            continue
        cells = []
        for name in passes:
            sent, formula = r[f"{name}_sent_bytes_by_rank"], r[f"{name}_closed_form_bytes_by_rank"]
            cells += [_mean_and_max(sent), _mean_and_max(formula) + ("" if formula in (sent, None) else " ≠")]
        table.add_row(*_names(r), *cells)
    return table


def _mean_and_max(num_bytes: list[int] | None) -> str:
    if num_bytes is None:
        return "–"
    return f"{statistics.mean(num_bytes) / 2**20:.4g} / {max(num_bytes) / 2**20:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
