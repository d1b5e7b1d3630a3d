"""The masks of the benchmark: what attention is told of each, and which pairs it allows.

Shapes: S tokens, B rows, Hq query heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from balance_table import file_lengths, packed_rows
from torch import Tensor

import dtcp
from attention_bench.problem import Case, Configuration, Problem
from dtcp.mask import checked_mask

Integers = npt.NDArray[np.int64]

MASK_NAMES = (
    "causal", "full", "documents", "documents_stdlib", "window", "documents_window", "sinks", "key_padding",
    "prefix_lm", "bias", "alibi", "softcap",
)  # fmt: skip
WITH_DOCUMENTS = ("documents", "documents_stdlib", "documents_window")
WITH_LENGTHS = ("documents", "documents_window")
WITH_WINDOW = ("window", "documents_window")
DEFAULT_WINDOW = 512
SOFTCAP = 20.0
BYTES_PER_TOKEN = 4  # of a file of the library; with a token for each byte most rows would be one document


def documents_of(problem: Problem, case: Case) -> dtcp.Documents | None:
    """Where documents lie, where the mask has any."""
    if case.mask.name not in WITH_DOCUMENTS:
        return None
    if case.mask.name == "documents_stdlib":
        return dtcp.Documents.from_lengths(packed_rows(_file_lengths(), problem.batch_size, case.seq_len))
    quarter = case.seq_len // 4
    lengths = case.mask.lengths or (case.seq_len - 2 * quarter, quarter, quarter)
    return dtcp.Documents.from_lengths(list(lengths), seq_len=case.seq_len)


@functools.cache
def _file_lengths() -> list[int]:
    """Tokens of the .py files of Python's own library."""
    return [-(-num_bytes // BYTES_PER_TOKEN) for num_bytes in file_lengths()]


def layout_of(problem: Problem, configuration: Configuration) -> dtcp.SequenceLayout:
    """The layout; its name is that of the one that was taken where ``auto`` is asked for."""
    told = positional(problem, configuration.case)
    return dtcp.make_layout(
        configuration.layout, seq_len=configuration.case.seq_len, cp=problem.num_ranks, documents=told.get("documents"),
        is_causal=told["is_causal"], window_size=told.get("window_size", (-1, -1)),
    )  # fmt: skip


# ---- what attention is told ------------------------------------------------------------------------------------------


def positional(problem: Problem, case: Case) -> dict[str, Any]:
    """Arguments that say which positions are seen, as far as they do so by intervals."""
    mask = case.mask
    told: dict[str, Any] = {"is_causal": mask.name not in ("full", "prefix_lm")}
    if mask.window is not None:
        told["window_size"] = (mask.window - 1, 0)
    if (documents := documents_of(problem, case)) is not None:
        told["documents"] = documents
    if mask.name == "key_padding":
        told["key_lengths"] = [case.seq_len] * (problem.batch_size - 1) + [max(1, case.seq_len // 2)]
    return told


def others(case: Case) -> dict[str, Any]:
    """The other arguments that are not tensors."""
    match case.mask.name:
        case "prefix_lm":
            return {"mask_mod": _prefix_lm(_num_prefix(case))}
        case "softcap":
            return {"softcap": SOFTCAP}
        case _:
            return {}


def make_tensors(problem: Problem, case: Case) -> dict[str, Tensor]:
    """Arguments that are tensors, of the whole sequence; only sinks are learned."""
    generator = torch.Generator().manual_seed(case.seq_len + 1)
    match case.mask.name:
        case "sinks":
            return {"sinks": torch.randn(problem.num_heads, generator=generator)}
        case "bias":
            bias = torch.randn(1, 1, case.seq_len, case.seq_len, generator=generator)
            return {"attn_bias": bias.to(getattr(torch, problem.dtype))}
        case "alibi":
            return {"alibi_slopes": 2.0 ** (-8 * torch.arange(1, problem.num_heads + 1) / problem.num_heads)}
        case _:
            return {}


def _num_prefix(case: Case) -> int:
    return max(1, case.seq_len // 4)


@functools.cache  # one function for all calls, as attention wants it
def _prefix_lm(num_prefix: int) -> Any:
    def prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) | (kv_idx < num_prefix)

    return prefix_lm


# ---- which pairs -----------------------------------------------------------------------------------------------------


def intervals(problem: Problem, case: Case) -> list[tuple[Integers, Integers]]:
    """(first key, last key + 1) of each query, of each row: exactly what is seen, a ``mask_mod`` included."""
    told = positional(problem, case)
    mask = checked_mask(**told)
    rows = [mask.intervals(case.seq_len, case.seq_len, row) for row in range(problem.batch_size)]
    if case.mask.name == "prefix_lm":
        stop = np.maximum(np.arange(case.seq_len) + 1, _num_prefix(case))
        rows = [(first, stop) for first, _ in rows]
    return rows


@dataclass(frozen=True, slots=True)
class Work:
    """(query, key) pairs, summed over rows; of one head.

    Attributes:
        allowed_by_rank: What each rank's queries see.
        computed: What all ranks compute: their tiles, of which one under a mask counts whole.
        causal: What a causal mask alone would allow.
        crosses: Whether a rank needs keys of another.
    """

    allowed_by_rank: list[int]
    computed: int
    causal: int
    crosses: bool

    @property
    def allowed(self) -> int:
        return sum(self.allowed_by_rank)

    @property
    def imbalance(self) -> float:
        return max(self.allowed_by_rank) * len(self.allowed_by_rank) / self.allowed


def work_of(problem: Problem, configuration: Configuration) -> Work:
    """Count pairs, of the tiles that attention walks."""
    case, layout = configuration.case, layout_of(problem, configuration)
    counts = [stop - first for first, stop in intervals(problem, case)]
    allowed = []
    for rank in range(layout.cp):
        held = layout.positions(rank).expand(problem.batch_size, -1).numpy()
        rows = zip(counts, held, strict=True)
        allowed.append(sum(int(count[row[row < case.seq_len]].sum()) for count, row in rows))
    told = positional(problem, case)
    may_mask = problem.device == "cpu" or case.mask.name in ("prefix_lm", "bias", "alibi", "softcap")
    computed, crosses = 0, False
    for q_rank in range(layout.cp):
        for kv_rank in range(layout.cp):
            tiles = layout.tiles(q_rank, kv_rank, checked_mask(**told), may_mask=may_mask)
            crosses |= q_rank != kv_rank and bool(tiles)
            for tile in tiles:
                start, stop = tile.rows or (0, problem.batch_size)
                computed += tile.num_computed * (stop - start)
    causal = problem.batch_size * case.seq_len * (case.seq_len + 1) // 2
    return Work(allowed, computed, causal, crosses)


def mask_tensor(bounds: tuple[Integers, Integers], queries: slice, keys: slice) -> Tensor:
    """bool (queries, keys): which of these pairs are seen."""
    first, stop = (torch.from_numpy(bound[queries, None]) for bound in bounds)
    index = torch.arange(keys.start, keys.stop)
    return (index >= first) & (index < stop)
