"""The exact ways that torch offers to compute a mask in one process; the fastest one is what ranks are compared with.

Shapes: query (B, Hq, S, D), key and value (B, Hkv, S, D); blocks of n queries and k keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_bench.masks import SOFTCAP, Integers, documents_of, intervals, mask_tensor
from attention_bench.problem import Case, Problem
from dtcp.attention.masks import checked_masks
from dtcp.attention.single import single_rank_attention

Attention = Callable[..., Tensor]
BLOCK_SIZES = (128, 256, 512)
_DENSE_TOKENS = 16384  # no S×S mask of more


def torch_ways(problem: Problem, case: Case, tensors: dict[str, Tensor]) -> dict[str, Attention]:
    """Return functions of query, key, value (and sinks) by their names. Masks are made here, once."""
    if case.mask.name in ("causal", "full"):
        return {"scaled_dot_product_attention": _Plain(is_causal=case.mask.name == "causal")}
    if case.mask.name == "sinks":
        return {f"causal, one key more, {more} dims more": _ExtraKey(more) for more in (1, 16)}
    groups, additive = _groups(problem, case), _additive(case, tensors, getattr(torch, problem.dtype))
    sizes = [size for size in BLOCK_SIZES if size < case.seq_len] or [case.seq_len]
    if case.mask.name == "softcap":
        return {
            f"softmax written out, blocks of {size}": _Blocks(groups, size, None, _capped, problem.device)
            for size in sizes
        }
    ways: dict[str, Attention] = {
        f"masked blocks of {size}": _Blocks(groups, size, additive, _attend, problem.device) for size in sizes
    }
    if case.seq_len <= _DENSE_TOKENS:
        ways["one mask"] = _Blocks(groups, case.seq_len, additive, _attend, problem.device)
    if case.mask.name in ("documents", "documents_stdlib"):
        ways["causal, document by document"] = _Documents(problem, case)
    if case.mask.name == "key_padding":
        ways["causal, padding apart"] = _Padding(case.seq_len // 2 or 1)
    return ways


def dtcp_way(told: dict[str, Any]) -> Attention:
    """Return dtcp's own attention of one rank, a function of query, key, value (and sinks)."""
    told = dict(told)
    is_causal = told.pop("is_causal")

    def attention(query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        masks = checked_masks(is_causal=is_causal, **told, **({"sinks": sinks[0]} if sinks else {}))
        grouped = query.size(1) != key.size(1)
        return single_rank_attention(query, key, value, masks=masks, is_causal=is_causal, enable_gqa=grouped)

    return attention


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    grouped = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped, **options)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    scores = query @ key.mT * (1 / (SOFTCAP * math.sqrt(query.size(-1))))
    scores = SOFTCAP * scores.tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value


class _Plain:
    def __init__(self, *, is_causal: bool) -> None:
        self._is_causal = is_causal

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(query, key, value, is_causal=self._is_causal)


class _ExtraKey:
    """A sink is a key before all others that has no value; its logit is a product of head dims that others leave 0."""

    def __init__(self, num_dims: int) -> None:
        self._num_dims = num_dims

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        head_dim = query.size(-1)
        # A key head may serve several query heads, each with a sink of its own: so the queries hold the logits.
        logits = (sinks * math.sqrt(head_dim)).to(query.dtype)[None, :, None, None]
        query = torch.cat([query, logits.expand(query.size(0), -1, query.size(2), -1)], -1)
        query = F.pad(query, (0, self._num_dims - 1, 1, 0))
        key = F.pad(key, (0, self._num_dims, 1, 0))
        one = torch.zeros_like(key[:, :, :1])
        one[..., head_dim] = 1
        key = torch.cat([one, key[:, :, 1:]], 2)
        value = F.pad(value, (0, self._num_dims, 1, 0))
        out = _attend(query, key, value, is_causal=True, scale=1 / math.sqrt(head_dim))
        return out[:, :, 1:, :head_dim]


class _Blocks:
    """Blocks of queries with the keys that they see, as whole blocks, and a mask where one of them is seen in part.

    Keys are cut once and put together again: the gradient of a slice would be as long as the sequence.
    """

    def __init__(
        self, groups: list[tuple[int, tuple[Integers, Integers]]], size: int, additive: Tensor | None,
        attend: Callable[..., Tensor], device: str,
    ) -> None:  # fmt: skip
        self._size, self._attend = size, attend
        self._num_rows = [num_rows for num_rows, _ in groups]
        self._plans = [_plan(bounds, size, additive, device) for _, bounds in groups]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        by_row = zip(self._plans, *(x.split(self._num_rows) for x in (query, key, value)), strict=True)
        return _joined([self._of_rows(plan, *tensors) for plan, *tensors in by_row], 0)

    def _of_rows(self, plan: list[tuple[slice, Tensor | None]], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys, values = (x.split(self._size, dim=2) for x in (query, key, value))
        outs = [
            self._attend(block, _joined(keys[seen], 2), _joined(values[seen], 2), mask)
            for block, (seen, mask) in zip(queries, plan, strict=True)
        ]
        return _joined(outs, 2)


def _plan(
    bounds: tuple[Integers, Integers], size: int, additive: Tensor | None, device: str
) -> list[tuple[slice, Tensor | None]]:
    """Of each block of queries: the blocks of keys that it needs, and the mask of these pairs, None if all are seen."""
    seq_len, plan = len(bounds[0]), []
    for start in range(0, seq_len, size):
        queries = slice(start, min(start + size, seq_len))
        first, last = int(bounds[0][queries].min()) // size, -(-int(bounds[1][queries].max()) // size)
        keys = slice(first * size, min(last * size, seq_len))
        seen = mask_tensor(bounds, queries, keys)
        mask = None if bool(seen.all()) else seen
        if additive is not None:
            mask = additive[..., queries, keys].masked_fill(~seen, -math.inf)
        plan.append((slice(first, last), None if mask is None else mask.to(device)))
    return plan


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class _Documents:
    """A call for each document."""

    def __init__(self, problem: Problem, case: Case) -> None:
        documents = documents_of(problem, case)
        assert documents is not None
        rows = [[int(length) for length in row.lengths if length] for row in documents.rows()]
        self._lengths = [(len(list(same)), lengths) for lengths, same in itertools.groupby(rows)]
        if documents.is_shared:
            self._lengths = [(problem.batch_size, rows[0])]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_rows = [count for count, _ in self._lengths]
        outs = []
        for (_, lengths), *of_rows in zip(
            self._lengths, *(x.split(num_rows) for x in (query, key, value)), strict=True
        ):
            parts = zip(*(x.split(lengths, dim=2) for x in of_rows), strict=True)
            outs.append(_joined([_attend(*part, is_causal=True) for part in parts], 2))
        return _joined(outs, 0)


class _Padding:
    """In the last row nobody sees the keys from ``length`` on; the queries there see all before."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes, cut = [query.size(0) - 1, 1], [self._length, query.size(2) - self._length]
        (rows_q, q), (rows_k, k), (rows_v, v) = (x.split(sizes) for x in (query, key, value))
        k, v = k.split(cut, dim=2)[0], v.split(cut, dim=2)[0]
        early, late = q.split(cut, dim=2)
        out = _joined([_attend(early, k, v, is_causal=True), _attend(late, k, v)], 2)
        return out if not sizes[0] else _joined([_attend(rows_q, rows_k, rows_v, is_causal=True), out], 0)


def _groups(problem: Problem, case: Case) -> list[tuple[int, tuple[Integers, Integers]]]:
    """Neighbouring rows that see the same: how many they are, and what."""
    groups: list[tuple[int, tuple[Integers, Integers]]] = []
    for bounds in intervals(problem, case):
        if groups and all(np.array_equal(a, b) for a, b in zip(groups[-1][1], bounds, strict=True)):
            groups[-1] = groups[-1][0] + 1, bounds
        else:
            groups.append((1, bounds))
    return groups


def _additive(case: Case, tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, (1, Hq or 1, S, S)."""
    if (slopes := tensors.get("alibi_slopes")) is not None:
        index = torch.arange(case.seq_len)
        return (-slopes[None, :, None, None] * (index[:, None] - index).abs()).to(dtype)
    return tensors.get("attn_bias")
