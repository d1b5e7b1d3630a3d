"""The positions that a transformers model gives to tokens by itself, which `prepare` has to give them before the cut.

Most models count from 0, along the row. Those with the embeddings of RoBERTa count from ``padding_idx + 1`` and leave
out padding, and OPT's count what the attention mask lets through. On a part of a row either would count anew.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dtcp.documents import Documents


def default_positions(base: nn.Module, batch: Mapping[str, Any], documents: Documents | None, seq_len: int) -> Tensor:
    """Return the ``position_ids`` of a batch that has none, int64 (B or 1, S). They restart with each document."""
    tokens, padding = batch.get("input_ids"), batch.get("attention_mask")
    places = torch.atleast_2d(torch.arange(seq_len) if documents is None else documents.positions())
    first = _first_position(base)
    if first is not None and tokens is not None:
        return _counted(tokens.cpu() != first - 1, places, first).to(tokens.device)
    if padding is not None and _counts_attention_mask(base):
        return _counted(padding.cpu() != 0, places, 0).to(padding.device)
    return places + (first or 0)


def refuse_own_positions(base: nn.Module) -> None:
    """Raise if ``position_ids`` that restart at 0 would name rows of the table that the model never trains.

    Raises:
        ValueError: For models that count from another number.
    """
    if first := _first_position(base):
        raise ValueError(
            f"{type(base).__name__} counts positions from {first}, and position_ids that restart at 0 say where "
            "documents lie only; leave them out, and give prepare(..., documents=dtcp.Documents.from_position_ids(...))"
        )


def _counted(is_counted: Tensor, places: Tensor, first: int) -> Tensor:
    """``first``, and one more for each token of the document that counts; the number before for one that does not."""
    places = places.expand(is_counted.shape)
    totals = is_counted.long().cumsum(1)
    begins = (torch.arange(places.size(1)) - places).clamp_min(0)  # where the token's document begins
    before = totals.gather(1, begins) - is_counted.long().gather(1, begins)
    return torch.where(is_counted, totals - before + first - 1, max(first - 1, 0))


def _first_position(base: nn.Module) -> int | None:
    """RoBERTa's, whose table of positions has a row for padding."""
    for path, module in base.named_modules():
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return None


def _counts_attention_mask(base: nn.Module) -> bool:
    return any(
        isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters
        for module in base.modules()
    )
