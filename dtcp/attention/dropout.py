"""Which attention weights a call drops: a function of the query's key, the global head and the key's global position.

Dropout comes after the softmax: out = (mask / (1 − p) · softmax(scores)) · value. The log-sum-exp does not know of it,
so tiles merge as without. Srivastava et al. 2014; Vaswani et al. 2017, arXiv:1706.03762 §5.4.

Shapes: keys (B, S_q), this rank's queries; mask (B, Hq, Sq, Skv) of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dtcp.dropout_hash import index_words, kept, keys_of_place, place_salt
from dtcp.dtensor import local_part


class CallDropout(NamedTuple):
    """What one call drops, as it travels through the attention ops.

    Attributes:
        p: Probability, above 0 and below 1.
        keys: int64 (B, S_q), of this rank's queries and of this call alone.
        head_offset: Global index of the first head here.
        head_axis: Mesh axis over which heads are cut (``describe_axis``), whose ranks have equal parts; or "". For
            graphs that torch may give to another rank.
    """

    p: float
    keys: Tensor
    head_offset: int = 0
    head_axis: str = ""


@dataclass(frozen=True, slots=True)
class TileDropout:
    """The mask of one tile, made a block of queries at a time."""

    p: float
    mixed: Tensor  # int64 (B, Hq, Sq)
    words: Tensor  # int32 (Skv,)

    def keep(self, queries: slice, keys: slice) -> Tensor:
        """Return which weights of these queries to these keys stay: bool (B, Hq, n, k)."""
        return kept(self.mixed[:, :, queries, None], self.words[keys], self.p)

    def drop(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Return ``weights`` (B, Hkv, Hq/Hkv, n, keys) with what ``keep`` says, scaled to the same mean."""
        return torch.where(keep.view(weights.shape), weights, 0.0).mul_(1 / (1 - self.p))


def tile_dropout(p: float, keys: Tensor, heads: range, positions: Tensor) -> TileDropout:
    """Return the mask of a tile.

    Args:
        keys: int64 (B, Sq) of the tile's queries.
        heads: Global indices of its query heads.
        positions: int64 (Skv,), global position of each of its keys.
    """
    indices = torch.arange(heads.start, heads.stop, device=keys.device)
    return TileDropout(p, keys_of_place(keys[:, None], indices[:, None]), index_words(positions.to(keys.device)))


def checked_dropout(
    dropout_p: float, keys: Tensor | None, name: str | Tensor | None, head_offset: int, rows: tuple[int, int]
) -> CallDropout | None:
    """Return what a call drops, None for ``dropout_p = 0``.

    Args:
        rows: (B, S_q) of its query.

    Raises:
        ValueError: If p is no probability below 1, keys or name are missing, or keys do not fit.
    """
    check_probability(dropout_p)
    if dropout_p == 0:
        return None
    if keys is None or name is None:
        raise ValueError(
            f"attention with dropout_p={dropout_p} needs dropout_keys and a dropout_name, or its mask would depend on "
            f"the mesh; got dropout_keys={'None' if keys is None else 'a tensor'} and dropout_name={name!r}; pass "
            "dropout_keys=dtcp.dropout_keys(seed, step, rows, positions) of this rank's queries and dropout_name="
            "'layers.0', another one for each call of a forward"
        )
    check_call_keys(keys, rows)
    salt = place_salt(name) if isinstance(name, str) else name
    return CallDropout(dropout_p, keys_of_place(local_part(keys), salt), head_offset)


def check_call_dropout(dropout: CallDropout, rows: tuple[int, int]) -> None:
    """Raise ValueError unless this is something that a call with the queries ``rows`` (B, S_q) can drop."""
    check_probability(dropout.p)
    check_call_keys(dropout.keys, rows)


def check_probability(dropout_p: float) -> None:
    """Raise ValueError unless attention weights can be dropped with probability ``dropout_p``."""
    if not 0 <= dropout_p < 1:
        raise ValueError(
            f"dropout_p must be at least 0 and below 1, got {dropout_p}; 0 drops nothing, and 1 would drop everything"
        )


def check_call_keys(keys: Tensor, rows: tuple[int, int]) -> None:
    """Raise ValueError unless ``keys`` are those of the queries (B, S_q)."""
    if not isinstance(keys, Tensor) or keys.dtype != torch.int64 or tuple(keys.shape) != tuple(rows):
        got = f"{keys.dtype} {tuple(keys.shape)}" if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(
            f"dropout keys must be int64 (B, S_local) = {tuple(rows)}, one for each query held here, got {got}; pass "
            "dtcp.dropout_keys(seed, step, rows, positions) with the rows and global positions of exactly these queries"
        )
