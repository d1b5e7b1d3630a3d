"""Context parallel attention as two custom ops, so that it is opaque to Dynamo, AOTAutograd and DTensor.

Shapes: query (B, S_q, Hq, D), key (B, S_kv, Hkv, D), value (B, S_kv, Hkv, Dv), any strides; out (B, S_q, Hq, Dv)
and the gradients contiguous; lse (B, Hq, S_q); number int64 (3,), on the host; dropout_keys int64 (B, S_q), None where
nothing is dropped; masks as in ``CallMasks``. Only constants, a group name and tensors travel: layouts and documents as
int64 tensors of constant shape, so that the next step's cost no recompilation and the backward, also a recomputed or
delayed one, uses those of its own forward. So do the keys of dropout, the handle of a ``mask_mod``, and the number of
the call in its group, by which the ranks compare their backwards, with what the ``mask_mod`` was like.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dtcp.attention.agreement import CHANGES, STRATEGY, agreement, check_mask_mod_is_as_before, strategy_of
from dtcp.attention.arguments import ResolvedStrategy
from dtcp.attention.auto import choose_in_graph, choose_strategy, rates_of
from dtcp.attention.call import Call, without_padding
from dtcp.attention.calls import count_call
from dtcp.attention.dropout import CallDropout, check_call_keys
from dtcp.attention.heads import are_heads_even, cut_heads, whole_of
from dtcp.attention.kernels import choose_kernel, lse_dtype
from dtcp.attention.merge import add_sinks, grad_sinks
from dtcp.attention.predict import Shape
from dtcp.attention.scores import NO_MASKS, CallMasks, Modifiers, mask_mod_of
from dtcp.attention.two_level import core_of
from dtcp.attention.ulysses import Kept, Ulysses, kept_shapes
from dtcp.collectives import agree, agree_on_backward, resolve_group
from dtcp.documents import Documents
from dtcp.layout import layout_from_state
from dtcp.mask import Mask
from dtcp.replicas import expect_equal_gradients

_NAME = "context_parallel_attention"
logger = logging.getLogger(__name__)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_state: Tensor,
    kv_state: Tensor,
    group_name: str,
    is_causal: bool,
    scale: float,
    strategy: ResolvedStrategy,
    kernel: str,
    dropout: CallDropout | None = None,
    masks: CallMasks = NO_MASKS,
    *,
    needs_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries over the whole sequence's keys. Collective.

    Args:
        strategy: What ``resolved_strategy`` gave.
        needs_lse: Whether lse is looked at; else it may be empty.
    """
    core, ulysses_degree, ranks_per_node, kv_grad_dtype = strategy[:4]
    if core == "auto":
        core, ulysses_degree = _decided(query, key, value, q_state, kv_state, is_causal, masks, strategy)
    # Inside the op nothing requires grad. A backward that only some ranks run would wait for the others.
    learned = (query, key, value, masks.sinks, masks.attn_bias, masks.alibi_slopes)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)
    p, keys, head_offset, head_axis = dropout or (0.0, None, masks.head_offset, masks.head_axis)
    out, lse, *_ = forward_op(
        query, key, value, q_state, kv_state, masks.documents, masks.key_lengths, masks.mask_mod, masks.sinks,
        masks.attn_bias, masks.alibi_slopes, keys, group_name, is_causal, *masks.window_size, masks.softcap, scale,
        core, ulysses_degree, ranks_per_node, kv_grad_dtype, kernel, p, head_offset, head_axis, needs_lse, needs_grad,
    )  # fmt: skip
    return out, lse


def _decided(
    query: Tensor, key: Tensor, value: Tensor, q_state: Tensor, kv_state: Tensor, is_causal: bool, masks: CallMasks,
    strategy: ResolvedStrategy,
) -> tuple[str, int]:  # fmt: skip
    """What ``auto`` takes for this call: (core, ulysses_degree)."""
    if strategy.cp == 1:
        return "ring", 1
    batch_size, length, num_heads, head_dim = query.shape
    sent_in = strategy.kv_grad_dtype or lse_dtype(query.dtype)
    sizes = num_heads, key.size(2), head_dim, value.size(3), query.element_size(), sent_in.itemsize
    if torch.compiler.is_compiling() or isinstance(q_state, FakeTensor):
        # In a graph of any length they are known to lie in a range, no more.
        rows, *lengths = (_next_power_of_two(n) for n in (batch_size, length, key.size(1)))
        return choose_in_graph(
            (rows, *sizes), lengths, strategy.cp, is_causal, masks.window_size, strategy.rates, query.device.type
        )
    key_lengths = None if masks.key_lengths is None else tuple(masks.key_lengths.tolist())
    documents = None if masks.documents is None else Documents.from_state(masks.documents)
    mask = Mask(is_causal, masks.window_size, documents, key_lengths)
    layout, kv_layout = layout_from_state(q_state), layout_from_state(kv_state)
    if layout.cp != strategy.cp:  # refused by the op
        return "ring", 1
    return choose_strategy(
        Shape(batch_size, *sizes), layout, kv_layout, mask, strategy.rates or rates_of(query.device.type)
    )


def _next_power_of_two(number: int) -> int:
    found = 1
    while found < number:
        found *= 2
    return found


@torch.library.custom_op("dtcp::attention_forward", mutates_args=())
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_state: Tensor,
    kv_state: Tensor,
    documents: Tensor | None,
    key_lengths: Tensor | None,
    mask_mod: Tensor | None,
    sinks: Tensor | None,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_keys: Tensor | None,
    group_name: str,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    scale: float,
    strategy: str,
    ulysses_degree: int,
    ranks_per_node: int,
    kv_grad_dtype: torch.dtype | None,
    kernel: str,
    dropout_p: float,
    head_offset: int,
    head_axis: str,
    needs_lse: bool,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (out, lse, number, *what the backward takes in the place of query, key, value, out and lse).

    The latter five are empty but for ``ulysses_degree`` > 1, and lse is empty where it is not needed then.
    ``needs_grad`` is compared between the ranks and not used otherwise.
    """
    masks = CallMasks(
        (window_left, window_right), documents, key_lengths, mask_mod, sinks, attn_bias, alibi_slopes, softcap
    )
    dropout = _dropout(query, dropout_keys, dropout_p, head_offset, head_axis)
    call = _call(
        query, value, q_state, kv_state, masks, group_name, is_causal, scale, kernel, dropout, head_offset, head_axis
    )
    how = ResolvedStrategy(strategy, ulysses_degree, ranks_per_node, kv_grad_dtype)
    fields, refusal, mask_mod_state = agreement(query, key, value, call, sinks, how, needs_grad)
    readable = {STRATEGY: functools.partial(strategy_of, cp=call.layout.cp)}
    number = agree(_NAME, fields, call.group, query.device, error=refusal, readable=readable)
    count_call(q_state)
    numbers = torch.tensor([number, *mask_mod_state])
    query_, key_, value_ = _by_head(query, key, value)
    query_, key_, value_ = *without_padding(call, 0, query_), *without_padding(call, 1, key_, value_)
    core = core_of(strategy, ulysses_degree, ranks_per_node)
    if ulysses_degree > 1:
        kept = _new_kept(query, key, value, ulysses_degree)
        whole = Ulysses(call, core, ulysses_degree, query.size(2), key.size(2))
        by_head = kept._replace(**dict(zip(Kept._fields, _by_head(*kept[:4]), strict=False)))
        out, given_lse = whole.forward(query_, key_, value_, by_head, sinks, needs_lse=needs_lse)
        lse = kept[4].new_empty(0) if given_lse is None else given_lse
        return out.transpose(1, 2).contiguous(), lse.contiguous(), numbers, *kept
    out, lse = core.forward(call, query_, key_, value_)
    if sinks is not None:
        add_sinks(out, lse, sinks, call.layout.num_valid(call.rank))
    kept = Kept._make([*(query.new_empty(0) for _ in range(4)), lse.new_empty(0)])
    return out.to(query.dtype).transpose(1, 2).contiguous(), lse.contiguous(), numbers, *kept


def _new_kept(query: Tensor, key: Tensor, value: Tensor, degree: int) -> Kept:
    """Where the backward finds what it needs, (B, S, h, D), and lse (B, h, S); equally large on every rank."""
    *by_token, of_lse = kept_shapes(query.shape, key.shape, value.shape, degree)
    lse = query.new_empty(of_lse, dtype=lse_dtype(query.dtype))
    kept = Kept._make([*(query.new_empty(shape) for shape in by_token), lse])
    if not are_heads_even(query.size(2), key.size(2), degree):  # what no head of this rank fills
        for x in kept:
            x.zero_()
    return kept


@torch.library.custom_op("dtcp::attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    q_state: Tensor,
    kv_state: Tensor,
    documents: Tensor | None,
    key_lengths: Tensor | None,
    mask_mod: Tensor | None,
    sinks: Tensor | None,
    attn_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_keys: Tensor | None,
    group_name: str,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    scale: float,
    strategy: str,
    ulysses_degree: int,
    ranks_per_node: int,
    kv_grad_dtype: torch.dtype | None,
    kernel: str,
    dropout_p: float,
    head_offset: int,
    head_axis: str,
    num_kv_heads: int,
    needs_bias: bool,
    needs_slopes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, sinks, attn_bias and alibi_slopes. Collective.

    The first three are made, whichever are needed; the others are empty if they are not.

    Args:
        query, key, value, out, lse: For ``ulysses_degree`` > 1 what the forward gave for their place.
    """
    masks = CallMasks(
        (window_left, window_right), documents, key_lengths, mask_mod, sinks, attn_bias, alibi_slopes, softcap
    )
    dropout = _dropout(grad_out, dropout_keys, dropout_p, head_offset, head_axis)
    call = _call(
        grad_out, query, q_state, kv_state, masks, group_name, is_causal, scale, kernel, dropout, head_offset,
        head_axis, needs_bias, needs_slopes, kv_grad_dtype,
    )  # fmt: skip
    agree_on_backward(_NAME, number[:1], call.group, query.device)
    check_mask_mod_is_as_before(number, grad_out, call)
    if group_name:
        expect_equal_gradients(call.group)
    num_heads = grad_out.size(2)
    grad_out, query_, key_, value_, out = _by_head(grad_out, query, key, value, out)
    (grad_out,) = without_padding(call, 0, grad_out)
    # A weight is exp(score − lse): 0 for a query that saw nothing, pads among them.
    lse = lse.masked_fill(lse == float("-inf"), float("inf")) if call.may_see_nothing or sinks is not None else lse
    core = core_of(strategy, ulysses_degree, ranks_per_node)
    if ulysses_degree > 1:
        whole = Ulysses(call, core, ulysses_degree, num_heads, num_kv_heads)
        grads, given = whole.backward(grad_out, Kept(query_, key_, value_, out, lse), sinks)
    else:
        query_, key_, value_ = *without_padding(call, 0, query_), *without_padding(call, 1, key_, value_)
        grads = core.backward(call, grad_out, query_, key_, value_, out, lse)
        given = None if sinks is None else grad_sinks(grad_out, out, lse, sinks)
    grad_query, grad_key, grad_value = (g.to(query.dtype).transpose(1, 2).contiguous() for g in grads)
    of_sinks = query.new_empty(0) if given is None else given
    summed = call.modifiers.grad_bias, call.modifiers.grad_slopes
    of_bias, of_slopes = (
        query.new_empty(0) if grad is None or x is None else grad.to(x.dtype)
        for grad, x in zip(summed, (attn_bias, alibi_slopes), strict=True)
    )
    return grad_query, grad_key, grad_value, of_sinks, of_bias, of_slopes


def _call(
    query: Tensor, value: Tensor, q_state: Tensor, kv_state: Tensor, masks: CallMasks, group_name: str,
    is_causal: bool, scale: float, kernel: str, dropout: CallDropout | None, head_offset: int, head_axis: str,
    needs_bias: bool = False, needs_slopes: bool = False, kv_grad_dtype: torch.dtype | None = None,
) -> Call:  # fmt: skip
    summed_in = lse_dtype(query.dtype)
    bias, slopes = masks.attn_bias, masks.alibi_slopes
    rank_of_axis = resolve_group(head_axis).rank() if head_axis else 0
    modifiers = Modifiers(
        mask_mod=mask_mod_of(masks.mask_mod),
        attn_bias=bias,
        alibi_slopes=slopes,
        softcap=masks.softcap,
        head_offset=head_offset + rank_of_axis * query.size(2),
        grad_bias=torch.zeros_like(bias, dtype=summed_in) if needs_bias and bias is not None else None,
        grad_slopes=torch.zeros_like(slopes, dtype=summed_in) if needs_slopes and slopes is not None else None,
    )
    lengths = None if masks.key_lengths is None else tuple(masks.key_lengths.tolist())
    documents = None if masks.documents is None else Documents.from_state(masks.documents)
    only_math = "softcap" if masks.softcap else ""
    if needs_bias or needs_slopes:
        kernel, only_math = "math", ""  # what the forward took gives the same lse
    return Call(
        group=resolve_group(group_name),
        layout=layout_from_state(q_state),
        kv_layout=layout_from_state(kv_state),
        mask=Mask(is_causal, masks.window_size, documents, lengths),
        scale=scale,
        kernel=choose_kernel(
            kernel, query, max(query.size(-1), value.size(-1)), scale, 0.0 if dropout is None else dropout.p,
            masked_by=masks.masked_by, only_math=only_math,
        ),
        dropout=dropout,
        modifiers=modifiers,
        kv_grad_dtype=kv_grad_dtype,
    )  # fmt: skip


def _dropout(query: Tensor, keys: Tensor | None, p: float, head_offset: int, head_axis: str) -> CallDropout | None:
    """What the call drops; the offset of its heads is found here, where the rank is known."""
    if keys is None:
        return None
    check_call_keys(keys, (query.size(0), query.size(1)))
    _log_math_kernel(p)
    rank_of_axis = resolve_group(head_axis).rank() if head_axis else 0
    return CallDropout(p, keys, head_offset + rank_of_axis * query.size(2))


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) → (B, H, S, D), the order of the kernels; a view wherever the last dim is contiguous.

    Torch's fused CPU kernels read other last dims wrongly without an error, for instance the expanded gradient
    that ``out.sum().backward()`` hands over.
    """
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors]


@functools.cache
def _log_math_kernel(p: float) -> None:
    logger.info("attention with dropout_p=%s takes the math kernel, the only one whose mask is the same on any mesh", p)


@forward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, ...]:
    batch, seq_len, heads, _ = query.shape
    out = query.new_empty(batch, seq_len, heads, value.size(-1))
    degree, needs_lse = args[_DEGREE], args[-2]
    shapes: tuple[tuple[int, ...], ...] = ((0,),) * 5
    if degree > 1:
        shapes = kept_shapes(tuple(query.shape), tuple(key.shape), tuple(value.shape), degree)
    kept = (query.new_empty(shape) for shape in shapes[:4])
    in_float = lse_dtype(query.dtype)
    lse = query.new_empty((batch, heads, seq_len) if degree == 1 or needs_lse else (0,), dtype=in_float)
    number = torch.empty(1 + CHANGES, dtype=torch.int64, device="cpu")
    return out, lse, number, *kept, query.new_empty(shapes[4], dtype=in_float)


@backward_op.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor,
    q_state: Tensor, kv_state: Tensor, documents: Tensor | None, key_lengths: Tensor | None, mask_mod: Tensor | None,
    sinks: Tensor | None, attn_bias: Tensor | None, alibi_slopes: Tensor | None, dropout_keys: Tensor | None,
    *constants: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    needed = sinks, attn_bias if constants[-2] else None, alibi_slopes if constants[-1] else None
    of_masks = (query.new_empty(0) if x is None else x.new_empty(x.shape) for x in needed)
    degree, num_kv_heads = constants[7], constants[-3]
    of_keys = key.size(0), key.size(1) // degree, num_kv_heads
    return (
        query.new_empty(*grad_out.shape[:3], query.size(3)),
        key.new_empty(*of_keys, key.size(3)),
        value.new_empty(*of_keys, value.size(3)),
        *of_masks,
    )


_NUM_TENSORS = 12  # of the forward
_NUM_CONSTANTS = 14  # besides needs_lse and needs_grad
_DEGREE = 16  # place of ulysses_degree among what follows query, key and value


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, *more = inputs[:_NUM_TENSORS]
    ctx.constants = inputs[_NUM_TENSORS:-2]
    ctx.num_kv_heads, ctx.out_shape = key.size(2), output[0].shape
    out, lse, number, *kept = output
    saved = (query, key, value, out, lse) if inputs[3 + _DEGREE] == 1 else kept
    ctx.save_for_backward(*saved, number, *more)
    # Zeros for an unused output would hide whether a gradient came into lse.
    ctx.set_materialize_grads(False)


_SINKS, _BIAS, _SLOPES = 8, 9, 10  # places among the inputs


def _autograd(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *of_others: None
) -> tuple[Tensor | None, ...]:
    if grad_lse is not None:
        raise NotImplementedError(
            "context_parallel_attention has no gradient with respect to lse; use lse.detach(), or "
            "reference_attention(…, return_lse=True) for a loss that reads it"
        )
    query, key, value, out, lse, number, *more = ctx.saved_tensors
    if grad_out is None:  # a gradient of zero, which other ranks may not have: the exchange takes place all the same
        grad_out = out.new_zeros(ctx.out_shape)
    needs = ctx.needs_input_grad
    grads = backward_op(
        grad_out, query, key, value, out, lse, number, *more, *ctx.constants, ctx.num_kv_heads, needs[_BIAS],
        needs[_SLOPES],
    )  # fmt: skip
    of_masks = [grad if needs[place] else None for grad, place in zip(grads[3:], (_SINKS, _BIAS, _SLOPES), strict=True)]
    return *grads[:3], *(None,) * 5, *of_masks, *(None,) * (1 + _NUM_CONSTANTS + 2)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise NotImplementedError(
        "context_parallel_attention has no second derivative (double backward); use reference_attention on one rank"
    )


forward_op.register_autograd(_autograd, setup_context=_save_for_backward)
backward_op.register_autograd(_no_double_backward)


def _pairs(query_shape: torch.Size, num_kv_heads: int, args: tuple[Any, ...]) -> float:
    """Allowed (query, key) pairs of this rank, over batch and query heads; without data, whole rectangles.

    Args:
        query_shape: (B, S_local, Hq, D).
        args: What follows lse and number in the backward, query, key and value in the forward.
    """
    q_state, kv_state, documents, key_lengths = args[:4]
    group_name, is_causal, *window = args[9:13]
    degree, group = args[_DEGREE], resolve_group(group_name)
    batch_size, seq_len, num_heads, _ = query_shape
    if isinstance(q_state, FakeTensor):
        return batch_size * num_heads * seq_len * seq_len * group.size()
    layout, kv_layout = (layout_from_state(state).merge(degree) for state in (q_state, kv_state))
    lengths = None if key_lengths is None else tuple(key_lengths.tolist())
    mask = Mask(is_causal, tuple(window), None if documents is None else Documents.from_state(documents), lengths)
    rank = group.rank() // degree
    tiles = (t for s in range(layout.cp) for t in layout.tiles(rank, s, mask, kv_layout=kv_layout))
    pairs = sum(t.num_pairs * (batch_size if t.rows is None else t.rows[1] - t.rows[0]) for t in tiles)
    return pairs * len(whole_of(cut_heads(num_heads, num_kv_heads, degree), group.rank() % degree)[0])


@register_flop_formula(torch.ops.dtcp.attention_forward, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """2 FLOPs × pairs × (D for scores + Dv for out), of this rank; a ``mask_mod`` is not looked into."""
    return int(2 * _pairs(query.shape, key.size(2), args) * (query.size(3) + value.size(3)))


@register_flop_formula(torch.ops.dtcp.attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor, *args: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    """2 FLOPs × pairs × (3·D + 2·Dv): scores again, their gradient, and those of query, key and value."""
    num_kv_heads = args[-3]
    return int(2 * _pairs(grad_out.shape, num_kv_heads, args) * (3 * query.size(3) + 2 * value.size(3)))
