"""Attention problems with masks, solved on cut sequences and by the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dtcp
from oracle import GRADIENT_NAMES, options_of, relative_error

PADDING = -1  # stands before a length: so many tokens in no document


@dataclass(frozen=True)
class MaskedCase:
    """What to attend to; everything is made from it, the same on every rank.

    Attributes:
        lengths: Of the documents, negative for padding between them; one tuple per row, or one for all rows.
        mask_mod: Name of one of ``MASK_MODS``.
        bias: "" or the sizes of its first two dims: "11", "1h", "b1", "bh".
        slopes: "" or "h" or "bh".
    """

    layout: str = "head_tail"
    strategy: str = "ring"
    is_causal: bool = True
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)  # Hq, Hkv, D, Dv
    seq_len: int = 41
    batch: int = 2
    lengths: tuple[tuple[int, ...], ...] = ()
    window: tuple[int, int] = (-1, -1)
    key_lengths: tuple[int, ...] = ()
    mask_mod: str = ""
    sinks: bool = False
    bias: str = ""
    slopes: str = ""
    softcap: float | None = None
    kernel: str = "auto"
    ranks_per_node: int | None = None
    needs_mask_gradients: bool = True

    def documents(self) -> dtcp.Documents | None:
        if not self.lengths:
            return None
        rows = []
        for lengths in self.lengths:
            ids = [i if length > 0 else PADDING for i, length in enumerate(lengths) for _ in range(abs(length))]
            assert len(ids) == self.seq_len, (lengths, self.seq_len)
            rows.append(ids)
        return dtcp.Documents.from_ids(torch.tensor(rows if len(rows) > 1 else rows[0]))


def prefix_lm(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv < 11) | (kv <= q)


def chunked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q // 7 == kv // 7


def by_head_and_row(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q + kv + h) % (2 + b + h) != 0


def nothing_for_some(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q % 5 != 0) & (kv % 3 != 1)


MASK_MODS = {f.__name__: f for f in (prefix_lm, chunked, by_head_and_row, nothing_for_some)}
MASK_GRADIENTS = ("grad_sinks", "grad_attn_bias", "grad_alibi_slopes")


class MaskedProblem:
    """Whole inputs of a case in float64, and the right answer."""

    def __init__(self, case: MaskedCase, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        hq, hkv, head_dim, value_dim = case.heads

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        batch, seq_len = case.batch, case.seq_len
        self.query, self.key = 2 * draw(batch, hq, seq_len, head_dim), draw(batch, hkv, seq_len, head_dim)
        self.value, self.grad_out = draw(batch, hkv, seq_len, value_dim), draw(batch, hq, seq_len, value_dim)
        self.sinks = draw(hq) if case.sinks else None
        self.attn_bias = self.alibi_slopes = None
        if case.bias:
            sizes = {"1": 1, "b": batch, "h": hq}
            self.attn_bias = draw(*(sizes[letter] for letter in case.bias), seq_len, seq_len)
        if case.slopes:
            self.alibi_slopes = draw(hq).abs() if case.slopes == "h" else draw(batch, hq).abs()
        self.documents = case.documents()

    def masks(self) -> dict[str, Any]:
        """Arguments of both attentions that are no tensors with gradients."""
        case = self.case
        return {
            "is_causal": case.is_causal,
            "window_size": case.window,
            "documents": self.documents,
            "key_lengths": case.key_lengths or None,
            "mask_mod": MASK_MODS[case.mask_mod] if case.mask_mod else None,
            "softcap": case.softcap,
            "enable_gqa": True,
            "return_lse": True,
        }

    def learned(self) -> dict[str, Tensor]:
        named = {"sinks": self.sinks, "attn_bias": self.attn_bias, "alibi_slopes": self.alibi_slopes}
        return {name: x for name, x in named.items() if x is not None}

    def answer(self) -> dict[str, Tensor]:
        inputs = [x.clone().requires_grad_() for x in (self.query, self.key, self.value)]
        learned = {name: x.clone().requires_grad_() for name, x in self.learned().items()}
        out, lse = dtcp.reference_attention(*inputs, **self.masks(), **learned)
        grads = torch.autograd.grad(out, [*inputs, *learned.values()], self.grad_out)
        names = [*GRADIENT_NAMES, *(f"grad_{name}" for name in learned)]
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def solve_masked(
    problem: MaskedProblem, mesh: Any, layout: dtcp.SequenceLayout, *, poison: float | None = None, **overrides: Any
) -> dict[str, Tensor]:
    """out, lse and every gradient on the whole sequence: parts joined, shares of learned masks summed."""
    case = problem.case

    def local(x: Tensor) -> Tensor:
        pad = 0.0 if poison is None else poison
        return dtcp.shard(_poisoned(x, problem, poison), mesh, layout, dim=2, pad_value=pad)

    inputs = [local(x).requires_grad_() for x in (problem.query, problem.key, problem.value)]
    learned = {name: x.clone() for name, x in problem.learned().items()}
    if "attn_bias" in learned:  # where rows have orders of their own, each needs a bias of its own
        num_rows = max(layout.num_rows, learned["attn_bias"].size(0))
        learned["attn_bias"] = dtcp.shard(learned["attn_bias"].expand(num_rows, -1, -1, -1), mesh, layout, dim=2)
    learned = {name: x.requires_grad_(case.needs_mask_gradients) for name, x in learned.items()}
    how = options_of(case.strategy, layout.cp) | {"ranks_per_node": case.ranks_per_node}
    options = problem.masks() | {"mesh": mesh, "layout": layout, "kernel": case.kernel} | how
    out, lse = dtcp.context_parallel_attention(*inputs, **learned, **(options | overrides))
    needed = [*inputs, *(x for x in learned.values() if x.requires_grad)]
    grads = torch.autograd.grad(out, needed, local(problem.grad_out))
    results = {"out": out.detach(), "lse": lse, **dict(zip(GRADIENT_NAMES, grads[:3], strict=True))}
    whole = {name: dtcp.unshard(x.contiguous(), mesh, layout, dim=2) for name, x in results.items()}
    for name, grad in zip(learned, grads[3:], strict=False):
        if name == "attn_bias":
            joined = dtcp.unshard(grad.contiguous(), mesh, layout, dim=2)
            whole["grad_attn_bias"] = joined.sum_to_size(problem.learned()[name].shape)
        else:
            torch.distributed.all_reduce(grad, group=mesh.get_group())
            whole[f"grad_{name}"] = grad
    return whole


def _poisoned(x: Tensor, problem: MaskedProblem, poison: float | None) -> Tensor:
    """``x`` (B, H, S, D) with ``poison`` in every token that is in no document."""
    if poison is None or problem.documents is None or not problem.documents.has_padding:
        return x
    ids = problem.documents.ids.reshape(problem.documents.num_rows, -1)
    return x.masked_fill((ids < 0)[:, None, :, None], poison)


def layout_of(case: MaskedCase, cp: int, multiple_of: int = 1) -> dtcp.SequenceLayout:
    return dtcp.make_layout(
        case.layout, seq_len=case.seq_len, cp=cp, documents=case.documents(), multiple_of=multiple_of
    )


def errors(solved: dict[str, Tensor], answer: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of each result; lse is compared where it is finite, and has to be −inf where the answer is."""
    found = {}
    for name, right in answer.items():
        if name not in solved:
            continue
        mine = solved[name]
        if name == "lse":
            nothing = right == float("-inf")
            if not torch.equal(mine == float("-inf"), nothing):
                found[name] = float("inf")
                continue
            mine, right = mine.masked_fill(nothing, 0), right.masked_fill(nothing, 0)
        found[name] = relative_error(mine, right)
    return found
