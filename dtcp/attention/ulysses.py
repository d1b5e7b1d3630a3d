"""Heads for tokens: a few heads of many ranks' tokens on each rank, and a strategy over what is still cut.

DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509) where the heads are cut over all ranks of the cp axis, which leaves
one attention in natural order; USP (Fang and Zhao, arXiv 2405.07719) where they are cut over adjacent ranks, with a
ring over the rest. Both over any layout: what a rank gets lies in increasing order of position.

Shapes: query (B, Hq, S_local, D), key (B, Hkv, S_local, D), value (B, Hkv, S_local, Dv); after the exchange h heads and
S_merged slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from dtcp.attention.call import Call
from dtcp.attention.head_exchange import HeadExchange, Moved, Pending
from dtcp.attention.heads import HeadPart, are_keys_shared, cut_heads, whole_of
from dtcp.attention.kernels import lse_dtype
from dtcp.attention.merge import add_sinks, grad_sinks
from dtcp.attention.strategies import Strategy


class Kept(NamedTuple):
    """What the backward needs of a rank's heads: (B, h, S_merged, …), and lse (B, h, S_merged)."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


def kept_shapes(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], degree: int
) -> tuple[tuple[int, ...], ...]:
    """Shapes of ``Kept`` as (B, S, h, D), lse (B, h, S), of inputs (B, S, H, D): those of the rank with most heads."""
    heads, kv_heads = _most_heads(int(query[2]), int(key[2]), degree)  # numbers of heads are never symbolic
    of_queries, of_keys = (query[0], query[1] * degree), (key[0], key[1] * degree)
    return (
        (*of_queries, heads, query[3]),
        (*of_keys, kv_heads, key[3]),
        (*of_keys, kv_heads, value[3]),
        (*of_queries, heads, value[3]),
        (query[0], heads, of_queries[1]),
    )


@functools.lru_cache(maxsize=256)
def _most_heads(num_heads: int, num_kv_heads: int, degree: int) -> tuple[int, int]:
    parts = cut_heads(num_heads, num_kv_heads, degree)
    spans = [whole_of(parts, member) for member in range(degree)]
    return max(len(queries) for queries, _ in spans), max(len(keys) for _, keys in spans)


class Ulysses:
    """One call whose heads are cut over ``degree`` adjacent ranks, and whose ``core`` runs over the rest.

    Args:
        call: Over the layouts of all ranks.
        num_heads, num_kv_heads: Of the call.
    """

    def __init__(self, call: Call, core: Strategy, degree: int, num_heads: int, num_kv_heads: int) -> None:
        self._call, self._core = call, core
        self._exchange = HeadExchange(call, degree)
        self._parts = cut_heads(num_heads, num_kv_heads, degree)
        self._own = [part[self._exchange.member] for part in self._parts]
        self._heads, self._kv_heads = whole_of(self._parts, self._exchange.member)
        self._degree, self._num_heads, self._num_kv_heads = degree, num_heads, num_kv_heads
        self._are_keys_shared = are_keys_shared(self._parts)
        self._merged = self._merged_call()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kept: Kept, sinks: Tensor | None, *, needs_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Fill ``kept``; return (out, lse) of this rank's tokens, lse if it is needed."""
        out = _by_token(query, query.shape[:3], value.size(-1), query.dtype)
        lse = query.new_empty(*query.shape[:3], 1, dtype=kept.lse.dtype) if needs_lse else None
        arriving = [self._start_inputs(index, query, key, value, kept) for index in range(len(self._parts))]
        leaving = []
        for index, part in enumerate(self._own):
            self._exchange.finish_to_heads(arriving[index])
            heads, _ = self._places(part)
            of_queries, *of_keys = (moved.target for moved in arriving[index].moved)
            part_out, part_lse = self._core.forward(self._of(part), of_queries, *self._repeated(part, *of_keys))
            if sinks is not None:
                num_valid = self._merged.layout.num_valid(self._merged.rank)
                add_sinks(part_out, part_lse, sinks[part.queries.start : part.queries.stop], num_valid)
            own_out = kept.out[:, heads]
            own_out.copy_(part_out)
            kept.lse[:, heads] = part_lse
            cut = tuple(p.queries for p in self._parts[index])
            moved = [Moved(own_out, out, cut, self._exchange.of_queries)]
            if lse is not None:
                moved.append(Moved(part_lse.unsqueeze(-1), lse, cut, self._exchange.of_queries))
            leaving.append(self._exchange.start_to_tokens(moved))
        for pending in leaving:
            self._exchange.finish_to_tokens(pending)
        return out, None if lse is None else lse.squeeze(-1)

    def backward(
        self, grad_out: Tensor, kept: Kept, sinks: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Return the gradients of query, key and value (of this rank's tokens), and this rank's share of the sinks'.

        Args:
            kept: With lse +inf for a query that saw nothing.
        """
        # Shares of a gradient are summed in the dtype of the accumulation.
        summed_in = lse_dtype(grad_out.dtype) if self._are_keys_shared else grad_out.dtype
        grads = self._new_gradients(grad_out, kept, summed_in)
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        whole = kept.out.new_empty(kept.out.shape)
        arriving = []
        for index, part in enumerate(self._own):
            heads, _ = self._places(part)
            cut = tuple(p.queries for p in self._parts[index])
            moved = Moved(grad_out, whole[:, heads], cut, self._exchange.of_queries)
            arriving.append(self._exchange.start_to_heads([moved]))
        leaving = []
        for index, part in enumerate(self._own):
            self._exchange.finish_to_heads(arriving[index])
            heads, keys = self._places(part)
            own = whole[:, heads], kept.out[:, heads], kept.lse[:, heads]
            if sinks is not None and of_sinks is not None:
                cut_sinks = slice(part.queries.start, part.queries.stop)
                of_sinks[cut_sinks] = grad_sinks(*own, sinks[cut_sinks])
            key, value = self._repeated(part, kept.key[:, keys], kept.value[:, keys])
            grad_query, grad_key, grad_value = self._core.backward(
                self._of(part), own[0], kept.query[:, heads], key, value, *own[1:]
            )
            grad_key, grad_value = self._summed(part, grad_key, grad_value)
            leaving.append(self._start_gradients(index, (grad_query, grad_key, grad_value), grads))
        for pending in leaving:
            self._exchange.finish_to_tokens(pending)
        self._return_bias()
        return grads, of_sinks

    def _start_inputs(self, index: int, query: Tensor, key: Tensor, value: Tensor, kept: Kept) -> Pending:
        heads, keys = self._places(self._own[index])
        of_queries = tuple(part.queries for part in self._parts[index])
        of_keys = tuple(part.keys for part in self._parts[index])
        places, key_places = self._exchange.of_queries, self._exchange.of_keys
        return self._exchange.start_to_heads([
            Moved(query, kept.query[:, heads], of_queries, places),
            Moved(key, kept.key[:, keys], of_keys, key_places),
            Moved(value, kept.value[:, keys], of_keys, key_places),
        ])  # fmt: skip

    def _start_gradients(
        self, index: int, grads: tuple[Tensor, ...], targets: tuple[Tensor, Tensor, Tensor]
    ) -> Pending:
        of_queries = tuple(part.queries for part in self._parts[index])
        of_keys = tuple(part.keys for part in self._parts[index])
        # What is no sum of several ranks' shares travels as the result is, if that is narrower.
        summed_in, asked = targets[1].dtype, self._call.kv_grad_dtype or targets[1].dtype
        sent_in = asked if asked.itemsize < summed_in.itemsize else summed_in
        places, key_places, shared = self._exchange.of_queries, self._exchange.of_keys, self._are_keys_shared
        query, key, value = (grad.to(x.dtype) for grad, x in zip(grads, targets, strict=True))
        return self._exchange.start_to_tokens([
            Moved(query, targets[0], of_queries, places),
            Moved(key, targets[1], of_keys, key_places, shared, sent_in),
            Moved(value, targets[2], of_keys, key_places, shared, sent_in),
        ])  # fmt: skip

    def _new_gradients(self, grad_out: Tensor, kept: Kept, summed_in: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        batch, length = grad_out.size(0), self._call.kv_layout.local_seq_len
        of_keys = torch.Size((batch, self._num_kv_heads, length))
        grads = (
            _by_token(grad_out, grad_out.shape[:3], kept.query.size(-1), grad_out.dtype),
            _by_token(grad_out, of_keys, kept.key.size(-1), summed_in),
            _by_token(grad_out, of_keys, kept.value.size(-1), summed_in),
        )
        if self._are_keys_shared:
            for grad in grads[1:]:
                grad.zero_()
        return grads

    def _places(self, part: HeadPart) -> tuple[slice, slice]:
        """Of its query heads and of its key heads among those of this rank."""
        heads, keys = self._heads.start, self._kv_heads.start
        return (
            slice(part.queries.start - heads, part.queries.stop - heads),
            slice(part.keys.start - keys, part.keys.stop - keys),
        )

    @staticmethod
    def _repeated(part: HeadPart, *tensors: Tensor) -> tuple[Tensor, ...]:
        if part.repeated is None:
            return tensors
        return tuple(x[:, list(part.repeated)] for x in tensors)

    @staticmethod
    def _summed(part: HeadPart, *grads: Tensor) -> tuple[Tensor, ...]:
        if part.repeated is None:
            return grads
        index = torch.tensor(part.repeated, device=grads[0].device)
        return tuple(
            grad.new_zeros(grad.size(0), len(part.keys), *grad.shape[2:]).index_add_(1, index, grad) for grad in grads
        )

    # ---- what the call says of heads and of this rank's queries ------------------------------------------------------

    def _merged_call(self) -> Call:
        """The call over the merged ranks' tokens, with what it says of queries in their order."""
        call, degree = self._call, self._degree
        modifiers, dropout = call.modifiers, call.dropout
        everyone = (range(1),) * degree
        if dropout is not None:
            keys = self._to_heads(dropout.keys[:, None, :, None], everyone)
            dropout = dropout._replace(keys=keys[:, 0, :, 0].contiguous())
        if modifiers.attn_bias is not None:
            bias, grad = self._whole_bias(modifiers.attn_bias), modifiers.grad_bias
            modifiers = dataclasses.replace(
                modifiers, attn_bias=bias, grad_bias=None if grad is None else torch.zeros_like(bias, dtype=grad.dtype)
            )
        layout = call.layout.merge(degree)
        kv_layout = layout if call.kv_layout is call.layout else call.kv_layout.merge(degree)
        return dataclasses.replace(
            call, layout=layout, kv_layout=kv_layout, merged=degree, modifiers=modifiers, dropout=dropout
        )

    def _to_heads(self, x: Tensor, heads: tuple[range, ...]) -> Tensor:
        """(B, H, S_local, E) of queries as (B, h, S_merged, E)."""
        own, places = len(heads[self._exchange.member]), self._exchange.of_queries
        target = x.new_empty(x.size(0), own, places.num_slots * self._degree, x.size(3))
        self._exchange.finish_to_heads(self._exchange.start_to_heads([Moved(x, target, heads, places)]))
        return target

    def _bias_heads(self, bias: Tensor) -> tuple[range, ...]:
        if bias.size(1) == 1:
            return (range(1),) * self._degree
        return tuple(whole_of(self._parts, member)[0] for member in range(self._degree))

    def _whole_bias(self, bias: Tensor) -> Tensor:
        """(B or 1, h or 1, S_merged, S)."""
        rows = self._call.layout.num_rows
        if rows > 1 and bias.size(0) == 1:  # a slot is another token in another row
            bias = bias.expand(rows, -1, -1, -1)
        return self._to_heads(bias, self._bias_heads(bias))

    def _of(self, part: HeadPart) -> Call:
        """The merged call for some heads."""
        call, modifiers, dropout = self._merged, self._merged.modifiers, self._merged.dropout
        if modifiers.are_none and dropout is None:
            return call  # in which nothing tells one head from another
        heads, _ = self._places(part)
        every = slice(part.queries.start, part.queries.stop)
        if dropout is not None:
            dropout = dropout._replace(head_offset=dropout.head_offset + part.queries.start)
        modifiers = dataclasses.replace(
            modifiers,
            head_offset=modifiers.head_offset + part.queries.start,
            attn_bias=_of_heads(modifiers.attn_bias, 1, heads),
            grad_bias=_of_heads(modifiers.grad_bias, 1, heads),
            alibi_slopes=_of_heads(modifiers.alibi_slopes, -1, every),
            grad_slopes=_of_heads(modifiers.grad_slopes, -1, every),
        )
        return dataclasses.replace(call, modifiers=modifiers, dropout=dropout)

    def _return_bias(self) -> None:
        """Bring the gradient of the bias back to the ranks of its queries."""
        own, whole = self._call.modifiers.grad_bias, self._merged.modifiers.grad_bias
        if own is None or whole is None:
            return
        target = own.new_zeros(whole.size(0), *own.shape[1:])
        moved = Moved(whole, target, self._bias_heads(own), self._exchange.of_queries, is_sum=True)
        self._exchange.finish_to_tokens(self._exchange.start_to_tokens([moved]))
        own += target if target.size(0) == own.size(0) else target.sum(0, keepdim=True)


def _by_token(like: Tensor, shape: torch.Size, width: int, dtype: torch.dtype) -> Tensor:
    """Room for (B, H, S, E) in the memory order (B, S, H, E), which the op gives to its caller."""
    batch, heads, slots = shape
    return like.new_empty(batch, slots, heads, width, dtype=dtype).transpose(1, 2)


def _of_heads(x: Tensor | None, dim: int, heads: slice) -> Tensor | None:
    """Some heads of ``x``, all of one that is broadcast."""
    if x is None or (dim == 1 and x.size(1) == 1):
        return x
    return x[:, heads] if dim == 1 else x[..., heads]
