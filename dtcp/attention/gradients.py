"""What one rank adds up in a backward: gradients of its own query, key and value, and its parts of other ranks' keys.

Shapes: query (B, Hq, S_q, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv); lse (B, Hq, S_q).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dtcp.attention.call import Call, backward_tile
from dtcp.attention.held import HeldKeys, unpack, whole_shard
from dtcp.attention.kernels import lse_dtype
from dtcp.attention.merge import Sum
from dtcp.needed import NeededKeys
from dtcp.ranges import named_range
from dtcp.tiles import Tile


class Gradients:
    """Sums in the accumulation dtype.

    Attributes:
        query, key, value: Of this rank.
        sent_in: In which gradients of keys and values travel.
    """

    def __init__(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self.dtype = lse_dtype(query.dtype)
        self.sent_in = call.kv_grad_dtype or self.dtype
        self._call, self._own = call, (key, value)
        self._rows = (grad_out, query, out, lse)
        self.query, self.key, self.value = (Sum(x.shape, self.dtype, x.device) for x in (query, key, value))

    @property
    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """(grad_query, grad_key, grad_value)."""
        return self.query.total, self.key.total, self.value.total

    def add_own(self, tiles: tuple[Tile, ...], heads: slice) -> None:
        """Add the gradients of this rank's own tiles, for the key heads ``heads``."""
        if heads.start == heads.stop:
            return
        key, value = (x[:, heads] for x in self._own)
        for tile, grad_key, grad_value in self._backward(whole_shard(self._call.rank, key, value), tiles, heads):
            keys = slice(tile.kv_start, tile.kv_stop)
            self.key.add(keys, grad_key, heads, tile.batch_rows)
            self.value.add(keys, grad_value, heads, tile.batch_rows)

    def add_part(self, held: HeldKeys, tiles: tuple[Tile, ...], part: HeldKeys) -> None:
        """Add the gradients of another rank's keys to ``part``, and those of the queries that read them."""
        for tile, grad_key, grad_value in self._backward(held, tiles, slice(0, self._own[0].size(1))):
            part_key, part_value = part.of(tile)
            with named_range("merge"):
                part_key.add_(grad_key)
                part_value.add_(grad_value)

    def add_returned(self, entries: Tensor, keys: NeededKeys) -> None:
        """Add what another rank computed for this rank's ``keys``: (entries, Hkv, D+Dv)."""
        start, batch_size, head_dim = 0, self._own[0].size(0), self._own[0].size(-1)
        for rows, runs in keys.groups:
            num_rows = batch_size if rows is None else rows[1] - rows[0]
            for first, last in runs:
                stop = start + (last - first) * num_rows
                part = entries[start:stop].view(last - first, num_rows, *entries.shape[1:])
                of_batch = slice(None) if rows is None else slice(*rows)
                for total, returned in zip((self.key, self.value), unpack(part, head_dim), strict=True):
                    total.add(slice(first, last), returned, rows=of_batch)
                start = stop

    def _backward(self, held: HeldKeys, tiles: tuple[Tile, ...], heads: slice) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """Add each tile's query gradient; yield it, its key gradient and its value gradient."""
        group_size = self.query.total.size(1) // self.key.total.size(1)
        query_heads = slice(heads.start * group_size, heads.stop * group_size)
        of_queries = tuple(x[:, query_heads] for x in self._rows)
        head_range = range(query_heads.start, query_heads.stop)
        for tile in tiles:
            grad_query, grad_key, grad_value = backward_tile(self._call, held, tile, head_range, of_queries)
            self.query.add(slice(tile.q_start, tile.q_stop), grad_query, query_heads, tile.batch_rows)
            yield tile, grad_key, grad_value


def halves_of_heads(key: Tensor, *, is_one: bool = False) -> tuple[slice, slice]:
    """Key heads to do before and after the exchange that the second half hides; one head stays whole.

    Args:
        is_one: There is nothing to hide: all of them at once.
    """
    middle = key.size(1) if is_one else -(-key.size(1) // 2)
    return slice(0, middle), slice(middle, key.size(1))


def thirds_of_heads(key: Tensor) -> tuple[slice, slice, slice]:
    """The same before, between and after two exchanges; of two heads, the second waits for the last."""
    first = -(-key.size(1) // 3)
    second = first + (key.size(1) - first) // 2
    return slice(0, first), slice(first, second), slice(second, key.size(1))
