"""What has to be equal on every rank of an attention call before anything is exchanged, and what a rank refuses."""

from __future__ import annotations

import functools
import struct
import zlib

from torch import Tensor

from dtcp.attention.arguments import ResolvedStrategy, check_heads_of_ranks, check_kv_grad_dtype, length_error
from dtcp.attention.call import Call
from dtcp.attention.kernels import lse_dtype
from dtcp.attention.masks import check_bias
from dtcp.attention.predict import name_of
from dtcp.attention.scores import checksum_of_mask_mod, versions_of_captures
from dtcp.attention.strategies import CORES
from dtcp.collectives import DTYPES
from dtcp.layout import LAYOUT_NAMES, SequenceLayout


def agreement(
    query: Tensor, key: Tensor, value: Tensor, call: Call, sinks: Tensor | None, how: ResolvedStrategy, needs_grad: bool
) -> tuple[dict[str, int], ValueError | None, list[int]]:
    """Return by name what the ranks compare, why this rank refuses the call, and the state of its ``mask_mod``.

    Args:
        query, key, value: (B, S, H, D).
        how: What the strategy is.
    """
    fields = _fields(query, key, value, call, sinks, how, needs_grad)
    refusal = _refusal(query, key, call, how)
    state = [0] * CHANGES
    if refusal is None:
        try:
            state = _state_of_mask_mod(query, call)
        except ValueError as error:
            refusal = error
    return fields | {"mask_mod (checksum of some of its values)": state[0]}, refusal, state


CHANGES = 2  # numbers that follow that of a call: what its mask_mod was like


def _state_of_mask_mod(query: Tensor, call: Call) -> list[int]:
    """What the backward compares with its forward: values and captured tensors of the ``mask_mod``; 0 for none."""
    mask_mod, offset = call.modifiers.mask_mod, call.modifiers.head_offset
    if mask_mod is None or query.device.type != "cpu":
        return [0] * CHANGES
    heads = range(offset, offset + query.size(2))
    values = checksum_of_mask_mod(mask_mod, query.size(0), heads, call.layout.seq_len, call.kv_layout.seq_len)
    return [values, versions_of_captures(mask_mod)]


def check_mask_mod_is_as_before(number: Tensor, query: Tensor, call: Call) -> None:
    """Raise unless the ``mask_mod`` of a backward, which evaluates it again, is what it was in the forward.

    Args:
        number: int64 (1 + CHANGES,), of the forward.
    """
    if number[1:].tolist() != _state_of_mask_mod(query, call):
        raise RuntimeError(
            "the mask_mod of this call is not what it was in the forward: a tensor or number that it reads has changed "
            "since, and the backward would be that of another mask; let each mask_mod read a tensor of its own "
            "(ids.clone()), or run the backward before the change"
        )


def _fields(
    query: Tensor, key: Tensor, value: Tensor, call: Call, sinks: Tensor | None, how: ResolvedStrategy, needs_grad: bool
) -> dict[str, int]:
    cores, has_nodes = tuple(CORES), how.ranks_per_node > 1
    mask, modifiers = call.mask, call.modifiers
    given = (modifiers.mask_mod, sinks, modifiers.attn_bias, modifiers.alibi_slopes)
    return {
        "dtype": DTYPES.index(query.dtype),
        "batch size": query.size(0),
        "query heads": query.size(2),
        "key heads": key.size(2),
        "head dim": query.size(3),
        "value head dim": value.size(3),
        **_layout_fields("query", call.layout),
        **_layout_fields("key", call.kv_layout),
        "is_causal": int(mask.is_causal),
        "window_size, left": mask.window_size[0],
        "window_size, right": mask.window_size[1],
        "documents (their hash, 0 for none)": 0 if mask.documents is None else hash(mask.documents),
        "key_lengths (their checksum, 0 for none)": zlib.crc32(repr(mask.key_lengths).encode())
        if mask.key_lengths
        else 0,
        "which of mask_mod, sinks, attn_bias, alibi_slopes are given (bits)": sum(
            1 << index for index, x in enumerate(given) if x is not None
        ),
        "softcap (its float64 bits)": _bits(modifiers.softcap),
        "scale (its float64 bits)": _bits(call.scale),
        "dropout_p (its float64 bits)": _bits(0.0 if call.dropout is None else call.dropout.p),
        # One number, since only so many are compared.
        STRATEGY: cores.index(how.core) + 10 * how.ulysses_degree + 10**6 * (how.ranks_per_node if has_nodes else 0),
        "kv_grad_dtype": DTYPES.index(how.kv_grad_dtype or lse_dtype(query.dtype)),
        "requires_grad": int(needs_grad),
    }


STRATEGY = "strategy (for auto every rank needs the same rates)"


def strategy_of(code: int, cp: int) -> str:
    """What the ranks' number for a strategy stands for."""
    name = name_of(tuple(CORES)[code % 10], code // 10 % 10**5, cp)
    return f"{name} with ranks_per_node={code // 10**6}" if code >= 10**6 else name


def _refusal(query: Tensor, key: Tensor, call: Call, how: ResolvedStrategy) -> ValueError | None:
    """What only the op can find: in a compiled graph layouts and documents are known when it runs."""
    layout, kv_layout, mask = call.layout, call.kv_layout, call.mask
    if layout.cp != call.group.size():
        return ValueError(f"the layout is for cp={layout.cp} but the group has {call.group.size()} ranks")
    error = length_error(query.size(1), key.size(1), layout, kv_layout)
    if error is not None:
        return error
    if layout.placed_by is not None and mask.documents is None:
        return ValueError(
            "a per_document layout says where documents lie, and the call does not know of them; pass "
            "documents=layout.documents (set_sequence(model, layout, documents=layout.documents))"
        )
    if mask.key_lengths is not None and len(mask.key_lengths) != query.size(0):
        return ValueError(
            f"key_lengths must have one length per row, got {len(mask.key_lengths)} for {query.size(0)} rows"
        )
    if mask.key_lengths is not None and not all(0 <= length <= kv_layout.seq_len for length in mask.key_lengths):
        return ValueError(
            f"key_lengths must be in 0..{kv_layout.seq_len}, the keys of the sequence, got {list(mask.key_lengths)}"
        )
    try:
        check_heads_of_ranks(query.size(2), layout.cp, how.ulysses_degree)
        check_kv_grad_dtype(how.kv_grad_dtype, lse_dtype(query.dtype))
        if call.modifiers.attn_bias is not None:
            check_bias(call.modifiers.attn_bias, query.size(0), query.size(2), query.size(1), kv_layout.seq_len)
        for documents in (mask.documents, layout.placed_by):
            if documents is not None:
                documents.check_fits(layout.seq_len, query.size(0))
    except ValueError as refusal:
        return refusal
    return None


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return bits


def _layout_fields(of: str, layout: SequenceLayout) -> dict[str, int]:
    return {
        f"{of} layout ({_choices(LAYOUT_NAMES)})": LAYOUT_NAMES.index(layout.name),
        f"{of} seq_len": layout.seq_len,
        f"{of} multiple_of": layout.multiple_of,
    }


@functools.cache
def _choices(names: tuple[str, ...]) -> str:
    return ", ".join(f"{index} {name}" for index, name in enumerate(names))
