"""Attention of DTensors: context parallel if cut along the sequence; if over heads or rows, each rank does its own.

Shapes: query (B, Hq, S, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), global. A plain DTensor with Shard(2) has the
sequence in equal parts, the last ones shorter if need be (layout ``contiguous``); ``as_dtensor`` makes others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_global_tensor_info

from dtcp.attention.api import prepare_inputs
from dtcp.attention.arguments import RING, ResolvedStrategy
from dtcp.attention.dropout import CallDropout
from dtcp.attention.ops import attention_forward
from dtcp.attention.scores import CallMasks
from dtcp.attention.single import contiguous_state
from dtcp.collectives import describe_axis
from dtcp.dispatch.attend import attend_with, check_options
from dtcp.dispatch.frames import Frame, current, is_traced
from dtcp.dispatch.tagged import LayoutTensor, same_layout

_BATCH, _HEADS, _SEQUENCE = 0, 1, 2
_NAMES = ("query", "key", "value")
Distributed = DTensor | LayoutTensor
_TORCHS_OWN = torch.ops.aten._scaled_dot_product_flash_attention.default


def attend_dtensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Return attention with the arguments of ``scaled_dot_product_attention``, some of query, key, value DTensors.

    None if it is torch's own to do: nothing is cut along the sequence, and the ranks cannot each do their own part.
    """
    tensors = (query, key, value)
    frame = current.frame
    if _TORCHS_OWN in DTensor._op_dispatcher._custom_op_handlers:  # torch's context_parallel, whose shards are its own
        return None
    if frame is not None and not frame.is_torchs(dropout_p):
        return attend_in_context(frame, *tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    is_cut, refusal = any(_is_cut_along_sequence(x) for x in tensors), _refusal(tensors)
    if not is_cut and (attn_mask is not None or dropout_p or refusal is not None):
        return None
    if refusal is not None:
        raise refusal
    if not query.device_mesh._is_current_rank_part_of_mesh():  # type: ignore[attr-defined]
        return _empty_part(query, value)
    if not is_cut:
        q, k, v = (x.to_local() for x in tensors)  # type: ignore[attr-defined]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return _from_part(out, tensors)
    where, cure = (
        "with DTensors cut along the sequence",
        ("give local tensors and keys to dtcp.context_parallel_attention(..., dropout_p=, dropout_keys=), or use 0.0"),
    )
    if attn_mask is not None:
        raise NotImplementedError(
            f"attn_mask of shape {tuple(attn_mask.shape)} {where}; give it to dtcp.context_parallel_attention(..., "
            "attn_bias=) with local tensors, or use is_causal"
        )
    check_options(query, key, dropout_p, is_causal, where, cure)
    call: Callable[..., Tensor] = _attend_tagged if isinstance(query, LayoutTensor) else _attend_plain
    return call(*tensors, is_causal, scale, enable_gqa)


def _empty_part(query: Any, value: Any) -> Tensor:
    """What a rank that is not in the mesh has of the result."""
    shape = torch.Size((*query.shape[:-1], value.size(-1)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(query.to_local(), query.device_mesh, query.placements, shape=shape, stride=stride)


def attend_in_context(
    frame: Frame,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Inside ``context_parallel``, which says how the sequence is cut, DTensors may be cut over heads and rows."""
    names = frame.group_name, frame.strategy, frame.kernel, frame.attn_mask_queries
    dropout, undone_p = frame.take_dropout(dropout_p)
    return attend_over_group(
        names, frame.state, frame.masks, dropout, query, key, value, attn_mask, is_causal, scale, enable_gqa, undone_p
    )


class _Settings(NamedTuple):
    group_name: str
    strategy: ResolvedStrategy
    kernel: str
    attn_mask_queries: str
    state: Tensor
    masks: CallMasks


@torch.compiler.allow_in_graph  # Dynamo cannot compare placements; what it has to guard is read from the frame above
def attend_over_group(
    names: tuple[str, ResolvedStrategy, str, str],
    state: Tensor,
    masks: tuple[Any, ...],
    dropout: tuple[float, Tensor, int, str] | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *options: Any,
) -> Tensor:
    """``attend_with`` with DTensors: names, layout and masks come from a context or a plan.

    ``options`` are what follows in ``attend_with``; keys of dropout are those of the rows and queries held here.
    """
    tensors = (query, key, value)
    refusal = _refusal(tensors, names[0])
    if refusal is not None:
        raise refusal
    call_masks = CallMasks(*masks)
    if dropout is not None:
        dropout = CallDropout(*dropout[:3], _head_axis(query))
    elif call_masks.mask_mod is not None:
        call_masks = call_masks._replace(head_axis=_head_axis(query))
    parts = (x.to_local() for x in tensors)  # type: ignore[attr-defined]
    out, _ = attend_with(_Settings(*names, state, call_masks), dropout, *parts, *options)
    return _from_part(out, tensors)


def _head_axis(query: Any) -> str:
    """The mesh axis over which heads are cut, for dropout and mask_mod; "" if they are not."""
    mesh = query.device_mesh
    axes = [axis for axis, p in enumerate(query.placements) if p.is_shard(_HEADS) and mesh.size(axis) > 1]
    if len(axes) > 1:
        names = " and ".join(_axis_name(mesh, axis) for axis in axes)
        raise NotImplementedError(
            f"dropout_p or mask_mod with heads cut over {len(axes)} mesh axes, {names}; cut them over one"
        )
    return describe_axis(mesh, axes[0]) if axes else ""


def _attend_plain(
    query: DTensor, key: DTensor, value: DTensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    axis = _sequence_axes(query)[0]
    mesh, cp = query.device_mesh, query.device_mesh.size(axis)
    inputs = query, key, value
    parts_here = [x.to_local() for x in inputs]
    is_compiled = is_traced(parts_here[0])
    group_name = describe_axis(mesh, axis) if is_compiled else mesh.get_group(axis).group_name
    parts = []
    for name, x, local in zip(_NAMES, inputs, parts_here, strict=True):
        seq_len = int(x.size(_SEQUENCE))
        if seq_len % cp and is_compiled:
            raise NotImplementedError(
                f"{name}: {seq_len} tokens cut unevenly over {cp} ranks under torch.compile, whose cache would give "
                "one rank the graph of another; use as_dtensor, which has as many slots on each rank, or pad"
            )
        # The op wants as many slots on each rank. The last ranks of an uneven DTensor have fewer tokens, or none.
        slots = -(-seq_len // cp)
        parts.append(F.pad(local, (0, 0, 0, slots - local.size(_SEQUENCE))) if seq_len % cp else local)
    q_state, kv_state = (contiguous_state(int(x.size(_SEQUENCE)), cp, is_traced=is_compiled) for x in (query, key))
    q, k, v, scale = prepare_inputs(*parts, scale=scale, enable_gqa=enable_gqa, qkv_format="bhsd")
    out, _ = attention_forward(q, k, v, q_state, kv_state, group_name, is_causal, scale, RING, "auto")
    out, seq_len = out.transpose(1, 2), int(query.size(_SEQUENCE))
    if seq_len % cp == 0:
        return _from_part(out, inputs)
    return _from_part(out[:, :, : parts_here[0].size(_SEQUENCE)], inputs, seq_len=seq_len)


def _attend_tagged(
    query: LayoutTensor, key: LayoutTensor, value: LayoutTensor, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    tag = query.tag
    kv_state = same_layout(key.state, value.state)
    q, k, v, scale = prepare_inputs(
        *(x.to_local() for x in (query, key, value)), scale=scale, enable_gqa=enable_gqa, qkv_format="bhsd"
    )
    out, _ = attention_forward(
        q, k, v, query.state, kv_state, tag.group_name, is_causal, scale, tag.strategy, tag.kernel
    )
    return query.with_local(out.transpose(1, 2), query, key, value)


def _from_part(part: Tensor, inputs: Sequence[Any], *, seq_len: int | None = None) -> Tensor:
    """This rank's part (B, H, S_local, Dv) of the result as a DTensor that is cut as the query is.

    Args:
        seq_len: That of the whole, where parts are uneven; ``part`` is then a view of (B, S_local, H, Dv).
    """
    mesh, placements = inputs[0].device_mesh, inputs[0].placements
    if seq_len is None:
        shape, stride = compute_global_tensor_info(part, mesh, placements)
    else:
        (batch, heads), width = inputs[0].shape[:2], part.size(-1)
        shape, stride = [batch, heads, seq_len, width], [seq_len * heads * width, width, heads * width, 1]
    # Numbers, also while a graph is traced: torch loses the sizes of a dynamic DTensor on the way to the backward.
    return _Joined.apply(part, torch.Size(map(int, shape)), tuple(map(int, stride)), *inputs)


class _Joined(torch.autograd.Function):
    """Holds the DTensors, so that autograd sees if one of them is modified in place before its backward.

    The attention op has saved their local parts, whose versions do not count what is done to a DTensor.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: torch.Size, stride: tuple[int, ...], *inputs: DTensor) -> DTensor:
        mesh, placements = inputs[0].device_mesh, inputs[0].placements
        out = DTensor.from_local(part.view_as(part), mesh, placements, shape=shape, stride=stride)
        ctx.save_for_backward(*inputs, out)
        ctx.mesh, ctx.placements = mesh, placements
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if one was modified
        if grad is not None and grad.placements != ctx.placements:
            grad = grad.redistribute(ctx.mesh, ctx.placements)
        return None if grad is None else grad.to_local(), *[None] * 5


def _sequence_axes(x: Distributed) -> list[int]:
    """Mesh axes over which the sequence is cut. An axis of one rank cuts nothing."""
    return [
        axis
        for axis, placement in enumerate(x.placements)
        if placement.is_shard(_SEQUENCE) and x.device_mesh.size(axis) > 1
    ]


def _is_cut_along_sequence(x: Tensor) -> bool:
    if isinstance(x, LayoutTensor):
        return True
    return isinstance(x, DTensor) and x.ndim == 4 and bool(_sequence_axes(x))


def _refusal(tensors: Sequence[Tensor], group_name: str | None = None) -> Exception | None:
    """Why query, key and value cannot be attended to rank by rank, alike on every rank; None if they can.

    Args:
        group_name: That of the cp group, if a context or a plan says how the sequence is cut: the DTensors must not
            say anything about it themselves.
    """
    for name, x in zip(_NAMES, tensors, strict=True):
        if not isinstance(x, Distributed):
            return ValueError(
                f"{name} is a plain tensor beside DTensors; pass query, key and value all as DTensors, or all as "
                "local tensors (x.to_local())"
            )
        if x.ndim != 4:
            return ValueError(f"{name} must be a 4-D DTensor (B, H, S, D), got shape {tuple(x.shape)}")
    query, key, value = tensors
    assert isinstance(query, Distributed) and isinstance(key, Distributed) and isinstance(value, Distributed)
    if not query.device_mesh == key.device_mesh == value.device_mesh:
        return ValueError(
            f"query, key and value must be on one mesh, got {[x.device_mesh for x in (query, key, value)]}"
        )
    mesh = query.device_mesh
    for axis, placements in enumerate(zip(query.placements, key.placements, value.placements, strict=True)):
        if mesh.size(axis) > 1:
            error = _axis_refusal(mesh, axis, placements, (query, key), group_name)
            if error is not None:
                return error
    return _layout_refusal(query, key, value)


def _axis_refusal(
    mesh: DeviceMesh, axis: int, placements: tuple[Placement, ...], of: tuple[Distributed, ...], group_name: str | None
) -> Exception | None:
    named = ", ".join(f"{name} {placement!r}" for name, placement in zip(_NAMES, placements, strict=True))
    where = f"on mesh axis {_axis_name(mesh, axis)} attention got {named}"
    placement = placements[0]
    if group_name is not None and mesh.get_group(axis).group_name == group_name:
        return ValueError(
            f"{where}, but that is the axis over which a context or plan has cut the sequence; there, give DTensors "
            "over other axes only (x.to_local() of these)"
        )
    if any(p != placement for p in placements):
        return ValueError(f"{where}; all three must be placed alike: redistribute the others")
    if type(placement) not in (Replicate, Shard):
        return ValueError(f"{where}; only Replicate and Shard can be attended to: redistribute first")
    if not isinstance(placement, Shard):
        return None
    if placement.dim not in (_BATCH, _HEADS, _SEQUENCE):
        return ValueError(f"{where}: the head dim cannot be cut; redistribute to Shard({_HEADS}), the heads")
    if placement.dim == _SEQUENCE:
        if group_name is not None:
            return ValueError(
                f"{where}, but a context or plan has cut the sequence already; do without it, or pass x.to_local()"
            )
        return None
    for x in of:
        if x.size(placement.dim) % mesh.size(axis):
            what = "batch rows" if placement.dim == _BATCH else "heads"
            return ValueError(
                f"{where}: {x.size(placement.dim)} {what} cannot be cut evenly over {mesh.size(axis)} ranks; "
                "redistribute to Replicate()"
            )
    return None


def _axis_name(mesh: DeviceMesh, axis: int) -> str:
    return repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)


def _layout_refusal(query: Distributed, key: Distributed, value: Distributed) -> Exception | None:
    axes = _sequence_axes(query)
    if len(axes) > 1:
        names = " and ".join(_axis_name(query.device_mesh, axis) for axis in axes)
        return ValueError(f"the sequence is cut over {len(axes)} mesh axes, {names}; flatten them into one cp axis")
    tags: list[Any] = [x.tag if isinstance(x, LayoutTensor) else None for x in (query, key, value)]
    if any(tag != tags[0] for tag in tags):
        named = ", ".join(f"{name} {tag or 'without a layout'}" for name, tag in zip(_NAMES, tags, strict=True))
        return ValueError(f"attention got {named}; make all three by as_dtensor with the same options")
    if tags[0] is not None and tags[0].dim != _SEQUENCE:
        return ValueError(
            f"the sequence of query, key and value (B, H, S, D) is dim {_SEQUENCE}, but as_dtensor was told "
            f"dim={tags[0].dim}"
        )
    return None
