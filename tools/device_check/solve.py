"""A problem solved by the attention ops on all ranks of a loopback, and joined again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_check.problems import RESULTS, Posed
from dtcp.attention.arguments import ResolvedStrategy, resolved_strategy
from dtcp.attention.loopback import Loopback
from dtcp.attention.masks import checked_masks
from dtcp.attention.ops import backward_op, forward_op
from dtcp.layout import SequenceLayout

STRATEGIES = ("ring", "exchange", "all_gather", "ulysses", "hybrid")


def strategy_of(name: str, cp: int) -> ResolvedStrategy:
    """``hybrid`` with two ranks in each of its groups, so that both of its halves have something to do from cp=4 on."""
    return resolved_strategy(name, (2 if cp % 2 == 0 else 1) if name == "hybrid" else None, cp)


def solve(
    posed: Posed, layout: SequenceLayout, how: ResolvedStrategy, loopback: Loopback, kernel: str = "auto"
) -> dict[str, Tensor]:
    """out, lse and gradients of the whole sequence; what pad slots hold is NaN."""
    by_rank = loopback.run(lambda group: on_rank(posed, layout, how, group, kernel))
    rows = posed.query.size(0)
    whole: dict[str, Tensor] = {}
    for name in RESULTS:
        parts = [_slots_first(result[name]) for result in by_rank]  # (B, S_local, …)
        joined = parts[0].new_empty(rows, layout.padded_seq_len, *parts[0].shape[2:])
        for rank, part in enumerate(parts):
            for row in range(rows):
                joined[row, _positions(layout, rank, row).to(joined.device)] = part[row]
        joined = joined[:, : layout.seq_len]
        whole[name] = joined.transpose(1, 2)
    if "sinks" in posed.masks:
        whole["grad_sinks"] = sum(result["grad_sinks"] for result in by_rank)
    return whole


def on_rank(
    posed: Posed, layout: SequenceLayout, how: ResolvedStrategy, group: dist.ProcessGroup, kernel: str
) -> dict[str, Tensor]:
    query, key, value, grad_out = (
        _cut(x, layout, group.rank()) for x in (posed.query, posed.key, posed.value, posed.grad_out)
    )
    masks = checked_masks(**{"is_causal": False, **posed.masks})
    constants: tuple[Any, ...] = (
        layout.state, layout.state, masks.documents, masks.key_lengths, masks.mask_mod, masks.sinks, None, None, None,
        group.group_name, posed.masks.get("is_causal", False), *masks.window_size, 0.0, query.size(-1) ** -0.5,
        *how[:4], kernel, 0.0, 0, "",
    )  # fmt: skip
    # The ops and not autograd: on an accelerator it would run all ranks' backwards in one thread.
    out, lse, number, *kept = forward_op(query, key, value, *constants, True, True)
    saved = kept if how.ulysses_degree > 1 else (query, key, value, out, lse)
    *grads, of_sinks, _, _ = backward_op(grad_out, *saved, number, *constants, key.size(2), False, False)
    results = dict(zip(RESULTS, (out, lse, *grads), strict=True))
    return results | {"grad_sinks": of_sinks}


def _cut(x: Tensor, layout: SequenceLayout, rank: int) -> Tensor:
    """This rank's (B, S_local, H, D) of (B, H, S, D)."""
    padded = x.new_full((x.size(0), layout.padded_seq_len, x.size(1), x.size(3)), float("nan"))
    padded[:, : layout.seq_len] = x.transpose(1, 2)
    return torch.stack([padded[row, _positions(layout, rank, row).to(x.device)] for row in range(x.size(0))])


def _positions(layout: SequenceLayout, rank: int, row: int) -> Tensor:
    positions = layout.positions(rank)
    return positions[row] if positions.ndim == 2 else positions


def _slots_first(x: Tensor) -> Tensor:
    """lse (B, H, S_local) as (B, S_local, H); others are (B, S_local, H, D)."""
    return x.transpose(1, 2) if x.ndim == 3 else x
