"""The explicit attention call.

Shapes: query (B, Hq, S_local, D), key (B, Hkv, S_local, D), value (B, Hkv, S_local, Dv), in layout order; or with
the two middle dims exchanged for ``qkv_format="bshd"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtcp.attention.arguments import (
    check_inputs,
    check_kv_grad_dtype,
    check_layouts,
    check_strategy,
    checked_scale,
    length_error,
    positional_argument,
    resolved_strategy,
)
from dtcp.attention.dropout import checked_dropout
from dtcp.attention.kernels import Kernel, choose_kernel, lse_dtype
from dtcp.attention.masks import check_mask_shapes, checked_masks
from dtcp.attention.ops import attention_forward
from dtcp.attention.scores import CallMasks
from dtcp.collectives import agree, resolve_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from dtcp.attention.predict import Rates
    from dtcp.attention.scores import MaskMod
    from dtcp.documents import Documents
    from dtcp.layout import SequenceLayout

# The function itself, not the attribute of torch.nn.functional that users and libraries replace.
plain_attention = torch._C._nn.scaled_dot_product_attention


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    kv_layout: SequenceLayout | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    documents: Documents | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    head_offset: int = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    dropout_keys: Tensor | None = None,
    dropout_name: str | Tensor | None = None,
    strategy: str = "ring",
    ulysses_degree: int | None = None,
    ranks_per_node: int | None = None,
    kv_grad_dtype: torch.dtype | None = None,
    rates: Rates | None = None,
    kernel: str = "auto",
    qkv_format: str = "bhsd",
    return_lse: bool = False,
) -> Any:
    r"""Return exact attention of this rank's queries over the keys of the whole sequence. Collective over ``mesh``.

    Args:
        query: (B, Hq, S_local, D), this rank's slots in the order of ``layout``.
        key: (B, Hkv, S_local, D); Hkv divides Hq. K and V travel with Hkv heads.
        value: (B, Hkv, S_local, Dv).
        mesh: 1-D mesh of the cp axis. With one rank this is plain ``scaled_dot_product_attention``.
        layout: Who holds which tokens, of the queries and, without ``kv_layout``, of the keys.
        kv_layout: Layout of the keys where their length is another one (cross attention, not causal).
        is_causal: Token i sees token j iff j ≤ i, by global position.
        window_size: (left, right): token i sees j iff i − left ≤ j ≤ i + right, by global position; −1 is no bound.
            (W − 1, 0) are the last W tokens. Work grows with the window, not with S.
        documents: A token sees those of its own document only, whichever rank holds them; padding between documents
            sees nothing. Work grows with the documents' squares.
        key_lengths: (B,), row b's keys from there on are padding and seen by nobody. A host tensor is not waited for.
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool`` as in flex_attention, of 0-d integer tensors: the caller's row, the
            global head (``head_offset``) and global positions. Evaluated block by block, never S×S; keys travel and
            blocks are looked at as the masks above allow. The 1024 that were used last are kept for their backwards.
        sinks: (Hq,), a logit for each query head here: one more column of the softmax, without a value. Its gradient
            is this rank's share: the sum over cp is the whole. It counts in lse.
        attn_bias: (B or 1, Hq or 1, S_local, S), added to the scores: this rank's queries by all keys in natural
            order. May need a gradient, this rank's share.
        alibi_slopes: (Hq,) or (B, Hq): −slope·\|i − j\| is added (Press et al., arXiv:2108.12409). Gradient as above.
        softcap: c: scores become c·tanh(score/c) before anything is added (Gemma 2, arXiv:2408.00118). ``math`` only.
        scale: Of the scores; None is 1/√D.
        enable_gqa: Allow Hkv < Hq.
        strategy: ``ring`` (two kv shards per rank; keys and values sent once in the forward, once in the
            backward, float32 key gradients back to their owner), ``exchange`` (the same memory; each key goes from its
            owner to just the ranks whose queries see it, so that messages follow windows and documents),
            ``all_gather`` (the whole K and V on every rank), ``ulysses`` (each rank attends some heads of the whole
            sequence, brought there and back by all-to-all; Hq >= cp), ``hybrid`` (that among ``ulysses_degree``
            adjacent ranks, and a ring over the rest), or ``auto``: the one that ``rates`` predict to take least for
            these heads, lengths and masks, decided at the first call of a kind and logged. A compiled graph knows no
            layout and no documents: it decides for a balanced layout without documents, of a power of two tokens.
        ulysses_degree: For ``hybrid``: a divisor of cp, at most Hq. 1 is ``ring``, cp is ``ulysses``.
        ranks_per_node: For ``ring``, ``all_gather`` and ``hybrid``: adjacent ranks of the cp axis that share a node, a
            divisor of cp (and, for ``hybrid``, a multiple of ``ulysses_degree``). Keys and key gradients then cross to
            another node once for each of its ranks' network cards, and go on inside it. A ring of two levels has up to
            four kv shards per rank. None, and cp or more: one level.
        kv_grad_dtype: In which gradients of keys and values travel: ``torch.bfloat16`` halves their bytes, and rounds
            each rank's part once (sums on their way once more: between nodes, and from ``hybrid``'s ring back to
            tokens). Ranks add up in float32, but the reduce-scatter of ``all_gather`` on one level sums in this dtype.
            None: float32 (float64 for float64). What ``ulysses`` brings back of a key head that only one rank reads is
            no sum of ranks' parts, and never travels in a wider dtype than the result's.
        rates: For ``auto``, equal on every rank; None for those of data sheets. ``measure_rates`` makes some.
        head_offset: Global index of the first query head, where heads are cut (tensor parallelism), for ``mask_mod``
            and dropout.
        dropout_p: Probability of dropping an attention weight, below 1. The mask is a function of the query's key,
            ``dropout_name``, the global head and the key's position: the same on any mesh. Only the ``math`` kernel
            knows it: ``auto`` takes that one, and the others are refused.
        dropout_keys: ``dtcp.dropout_keys(seed, step, rows, positions)`` of the queries, int64 (B, S_local).
        dropout_name: What tells this call from the others of a forward: ``"layers.0"``. An int64 tensor of no dims
            does too, and costs layers that share compiled code no recompilation.
        kernel: ``auto``, or one of ``flash``, ``efficient``, ``cudnn``, ``math``; an explicit one never falls back.
            ``mask_mod``, biases and slopes run in ``math`` and, on CPU, in ``flash``; a gradient of biases or slopes in
            ``math`` alone.
        qkv_format: ``bhsd`` or ``bshd``, of inputs and output.
        return_lse: Also return lse, without gradient.

    All masks combine: a pair is seen if every one of them allows it. A token that sees nothing has out 0 and lse −inf
    (its sink, if there are sinks).

    Returns:
        out in the format and dtype of ``query``; with ``return_lse`` (out, lse), lse (B, Hq, S_local) natural
        log, float32 (float64 for float64). Pad slots have out 0, lse −inf and gradient 0, whatever they hold.

    Raises:
        ValueError: If inputs, mesh, layouts or ranks do not fit together.
        RuntimeError: If ranks are in different calls, or the backward of one meets that of another or none.
        NotImplementedError: For what is not available yet; also a gradient into lse, and a double backward.
    """
    try:
        masks = checked_masks(
            is_causal=is_causal, window_size=window_size, documents=documents, key_lengths=key_lengths,
            mask_mod=mask_mod, sinks=sinks, attn_bias=attn_bias, alibi_slopes=alibi_slopes, softcap=softcap,
            head_offset=head_offset,
        )  # fmt: skip
        check_strategy(strategy, ulysses_degree, rates, ranks_per_node, kv_grad_dtype)
        query, key, value, scale = prepare_inputs(
            query, key, value, scale=scale, enable_gqa=enable_gqa, qkv_format=qkv_format
        )
        check_kv_grad_dtype(kv_grad_dtype, lse_dtype(query.dtype))
        check_layouts(mesh, layout, kv_layout, positional_argument(is_causal, masks))
        how = resolved_strategy(
            strategy, ulysses_degree, layout.cp, query.size(2), rates, ranks_per_node=ranks_per_node,
            kv_grad_dtype=kv_grad_dtype,
        )  # fmt: skip
        check_mask_shapes(masks, query.size(0), query.size(2), query.size(1), (kv_layout or layout).seq_len)
        check_kernel(kernel, query, value, scale, dropout_p, masks)
        rows = query.size(0), query.size(1)
        dropout = checked_dropout(dropout_p, dropout_keys, dropout_name, head_offset, rows)
    except (ValueError, NotImplementedError) as error:
        if mesh.ndim == 1:
            report_refusal(error, mesh.get_group().group_name, query)
        raise
    kv_layout = kv_layout or layout
    is_torchs = kernel == "auto" and query.size(-1) == value.size(-1) and scale > 0 and not return_lse
    if is_plain(layout, kv_layout) and is_torchs and dropout is None and masks.are_none:
        refusal = length_error(query.size(1), key.size(1), layout, kv_layout)
        if refusal is not None:
            raise refusal
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.size(1) != key.size(1)
        out = plain_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped)
        return out if qkv_format == "bhsd" else out.transpose(1, 2)
    group_name = mesh.get_group().group_name
    out, lse = attention_forward(
        query, key, value, layout.state, kv_layout.state, group_name, is_causal, scale, how, kernel, dropout, masks,
        needs_lse=return_lse,
    )  # fmt: skip
    if qkv_format == "bhsd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def is_plain(layout: SequenceLayout, kv_layout: SequenceLayout) -> bool:
    """Whether nothing is cut and nothing is padded."""
    return layout.cp == 1 and all(of.padded_seq_len == of.seq_len for of in (layout, kv_layout))


def check_kernel(kernel: str, query: Tensor, value: Tensor, scale: float, dropout_p: float, masks: CallMasks) -> Kernel:
    """Return the kernel that a call takes, or raise ValueError if the one asked for cannot do what it asks."""
    learned = (("attn_bias", masks.attn_bias), ("alibi_slopes", masks.alibi_slopes))
    gradient_of = next((name for name, x in learned if x is not None and x.requires_grad), "")
    is_explicit = kernel not in ("auto", "math")
    if is_explicit and gradient_of and torch.is_grad_enabled():
        raise ValueError(
            f"kernel={kernel!r} has no gradient of {gradient_of}; use kernel='math' or 'auto', or pass "
            f"{gradient_of}.detach()"
        )
    head_dim = max(query.size(-1), value.size(-1))
    only_math = "softcap" if masks.softcap else ""
    return choose_kernel(kernel, query, head_dim, scale, dropout_p, masked_by=masks.masked_by, only_math=only_math)


def prepare_inputs(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, enable_gqa: bool, qkv_format: str
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return what the attention op takes: checked inputs as (B, S_local, H, D), cast by autocast, and the scale."""
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, enable_gqa=enable_gqa, qkv_format=qkv_format)
    if qkv_format == "bhsd":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return query, key, value, checked_scale(scale, query.size(-1))


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for scaled_dot_product_attention, which a custom op would miss."""
    if not isinstance(query, Tensor) or not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (x.to(dtype) if x.dtype != torch.float64 else x for x in (query, key, value))
    return query, key, value


def report_refusal(error: Exception, group_name: str, query: Any) -> None:
    """Let the other ranks of a CPU group know, so that they raise too instead of waiting for this one."""
    if torch.compiler.is_compiling() or not isinstance(query, Tensor) or query.device.type != "cpu":
        return
    group = resolve_group(group_name)
    if group.size() > 1:
        agree("context_parallel_attention", {}, group, torch.device("cpu"), error=error)
