"""Attention problems that are the same on every device, their right answers in float64, and what is right enough.

Shapes: query (B, Hq, S, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtcp.attention.reference import reference_attention
from dtcp.documents import Documents

RESULTS = ("out", "lse", "grad_query", "grad_key", "grad_value")
# Relative, ‖Δ‖ / ‖right‖, of results whose inputs are exactly those of the right answer. Half precision: a rounding of
# weights and of score gradients to 8 (11) bits each, and one of what is returned.
TOLERANCES = {
    torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3,
}  # fmt: skip
LSE_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}


def prefix_lm(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A mask that no interval of keys describes, and that looks at heads."""
    return (kv < 11 + h) | (kv <= q)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What to attend to. Two rows, so that batches are cut too.

    Attributes:
        heads: (Hq, Hkv, D, Dv).
        mask: One of ``MASKS``.
        num_keys: Where there are others than queries.
    """

    mask: str
    heads: tuple[int, int, int, int] = (8, 2, 64, 64)
    seq_len: int = 333
    dtype: torch.dtype = torch.float32
    num_keys: int = 0

    def __str__(self) -> str:
        hq, hkv, d, dv = self.heads
        lengths = f"{self.seq_len}x{self.num_keys}" if self.num_keys else str(self.seq_len)
        return f"{self.mask} {str(self.dtype).removeprefix('torch.')} heads {hq}:{hkv} D {d}:{dv} S {lengths}"


def _cuts(seq_len: int) -> list[int]:
    """Lengths of documents, odd ones and one of a single token, for any sequence of 8 tokens or more."""
    first, second = seq_len // 3, seq_len // 7
    return [first, 1, second, seq_len - first - second - 1]


def _documents(seq_len: int) -> Documents:
    """Documents of two rows that differ; a third of the second row is padding."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(_cuts(seq_len)))
    other = (torch.arange(seq_len) >= seq_len // 2).long()
    other[seq_len - seq_len // 3 :] = -1
    return Documents.from_ids(torch.stack([ids, other]))


MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "causal": lambda s: {"is_causal": True},
    "full": lambda s: {},
    "documents": lambda s: {"is_causal": True, "documents": _documents(s)},
    "window": lambda s: {"is_causal": True, "window_size": (s // 5, 0)},
    "documents+window": lambda s: {"documents": _documents(s), "window_size": (s // 6, 5)},
    "padding": lambda s: {"key_lengths": [s, s // 3]},
    "sinks": lambda s: {"is_causal": True, "sinks": True},
    "mask_mod": lambda s: {"mask_mod": prefix_lm},
}


@dataclasses.dataclass
class Posed:
    """A problem's tensors on a device, in its dtype; ``masks`` are arguments of ``reference_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    masks: dict[str, Any]

    @property
    def documents(self) -> Documents | None:
        return self.masks.get("documents")


def pose(problem: Problem, device: torch.device, seed: int = 0) -> Posed:
    """The tensors of a problem. Peaked scores: flat ones would hide a key that is missing."""
    generator = torch.Generator().manual_seed(seed)
    hq, hkv, head_dim, value_dim = problem.heads
    num_keys = problem.num_keys or problem.seq_len

    def draw(heads: int, length: int, dim: int, factor: float = 1.0) -> Tensor:
        x = factor * torch.randn(2, heads, length, dim, generator=generator)
        return x.to(device, problem.dtype)

    masks = MASKS[problem.mask](problem.seq_len)
    if masks.pop("sinks", False):
        wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
        masks["sinks"] = torch.randn(hq, generator=generator).to(device, wide)
    return Posed(
        draw(hq, problem.seq_len, head_dim, 2.0), draw(hkv, num_keys, head_dim), draw(hkv, num_keys, value_dim),
        draw(hq, problem.seq_len, value_dim), masks,
    )  # fmt: skip


def right_answer(posed: Posed) -> dict[str, Tensor]:
    """Every result in float64; the gradient of sinks too, where there are some."""
    inputs = [x.double().clone().requires_grad_() for x in (posed.query, posed.key, posed.value)]
    masks, names = dict(posed.masks), list(RESULTS[2:])
    if "sinks" in masks:
        masks["sinks"] = masks["sinks"].double().clone().requires_grad_()
        inputs.append(masks["sinks"])
        names.append("grad_sinks")
    out, lse = reference_attention(
        *inputs[:3], **masks, enable_gqa=posed.query.size(1) != posed.key.size(1), return_lse=True
    )
    grads = torch.autograd.grad(out, inputs, posed.grad_out.double())
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """‖Δ‖ / ‖right‖ of each result; infinite for a NaN, or where lse is −inf on one side alone."""
    by_name = {}
    for name, expected in right.items():
        mine = found[name].double()
        if name == "lse":
            nothing = expected == float("-inf")
            if not torch.equal(mine == float("-inf"), nothing):
                by_name[name] = float("inf")
                continue
            mine, expected = mine.masked_fill(nothing, 0), expected.masked_fill(nothing, 0)
        difference = float((mine - expected).norm() / (expected.norm() or 1.0))
        by_name[name] = float("inf") if difference != difference else difference
    return by_name


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Of one result; of the gradient of sinks, a sum over queries in float32, that of the others."""
    return (LSE_TOLERANCES if name == "lse" else TOLERANCES)[dtype]
