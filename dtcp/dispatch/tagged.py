"""A distributed tensor whose shards are in the order of a layout that no DTensor placement can name.

Torch's DTensor operations take Shard(dim) for equal parts in their natural order. On a tensor in another order most of
them would be wrong without an error, so ``LayoutTensor`` has those only that do not look along the sequence. It is a
class of its own: Dynamo takes no DTensor that carries a second tensor, and the layout has to be one, or each new length
would compile anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_global_tensor_info

from dtcp.attention.arguments import ResolvedStrategy, check_strategy, resolved_strategy
from dtcp.attention.kernels import KERNEL_NAMES
from dtcp.attention.predict import Rates
from dtcp.layout import SequenceLayout, layout_from_state

_aten = torch.ops.aten
_SAME_ORDER = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default,
    _aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default, _aten.full_like.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tag:
    """What stays the same from step to step.

    Attributes:
        dim: Sequence dim.
        group_name: The cp group.
    """

    dim: int
    group_name: str
    strategy: ResolvedStrategy
    kernel: str


class LayoutTensor(Tensor):
    """Made by ``as_dtensor``; in shape and methods like a DTensor, of the padded length.

    Attributes:
        state: That of its layout.
        device_mesh, placements: As of a DTensor.
    """

    state: Tensor
    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tag: Tag
    _local_tensor: Tensor

    @staticmethod
    def __new__(
        cls, local: Tensor, state: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], tag: Tag
    ) -> LayoutTensor:
        shape, stride = compute_global_tensor_info(local, mesh, placements)
        x: LayoutTensor = Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        x._local_tensor, x.state, x.device_mesh, x.placements, x.tag = local, state, mesh, placements, tag
        return x

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to_local(self) -> Tensor:
        """This rank's slots, in layout order."""
        return _ToLocal.apply(self)

    def with_local(self, local: Tensor, *sources: Tensor) -> LayoutTensor:
        """``local``, which is cut as this is, with a gradient to it; and none if ``sources`` are modified before."""
        return _ToTagged.apply(local, self.state, self.device_mesh, self.placements, self.tag, *sources)

    def full_tensor(self, **_: Any) -> Tensor:
        raise NotImplementedError(_message("full_tensor", self))

    def redistribute(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError(_message("redistribute", self))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LayoutTensor(local_tensor={self._local_tensor}, placements={self.placements}, {self.tag})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _aten.transpose.int:
            return _transposed(*args)
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        tagged = [x for x in inputs if isinstance(x, LayoutTensor)]
        if not tagged or not _is_pointwise(func):
            raise NotImplementedError(_message(func, tagged[0] if tagged else None))
        first = tagged[0]
        for x in inputs:
            _check_cut_alike(func, first, x)
        state = first.state
        for x in tagged[1:]:
            state = same_layout(state, x.state)
        out = func(*map(_local, args), **{name: _local(x) for name, x in kwargs.items()})
        return LayoutTensor(out, state, first.device_mesh, first.placements, first.tag)

    def __tensor_flatten__(self) -> Any:
        return ["_local_tensor", "state"], (self.device_mesh, self.placements, self.tag)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, outer_size: Any, outer_stride: Any) -> LayoutTensor:
        return LayoutTensor(inner["_local_tensor"], inner["state"], *context)

    def _stable_hash_for_caching(self) -> str:
        parts = self.shape, self.stride(), self.dtype, self.requires_grad, self.device_mesh, self.placements, self.tag
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def __coerce_tangent_metadata__(self) -> LayoutTensor:
        return self

    def __coerce_same_metadata_as_tangent__(self, context: Any, expected_type: Any = None) -> LayoutTensor | None:
        is_same = expected_type is None and context == (self.device_mesh, self.placements, self.tag)
        return self if is_same else None


def as_dtensor(
    local: Tensor,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    *,
    dim: int = 2,
    placements: Sequence[Placement] | None = None,
    strategy: str = "ring",
    ulysses_degree: int | None = None,
    ranks_per_node: int | None = None,
    kv_grad_dtype: torch.dtype | None = None,
    rates: Rates | None = None,
    kernel: str = "auto",
) -> LayoutTensor:
    """Return ``local``, this rank's slots in the order of ``layout``, as a distributed tensor that attention takes.

    ``F.scaled_dot_product_attention`` of three of them is context parallel and gives one of the same kind. Between
    there are pointwise operations (with numbers, or with another of the same layout), ``transpose`` and
    ``to_local``; every other operation raises, since it would take the shards for parts in their natural order. A
    plain ``DTensor`` with ``Shard(2)`` is the layout ``contiguous`` and needs no call of this.

    Args:
        local: As ``shard`` gives it, ``size(dim) == layout.local_seq_len``; differentiable. A view, no copy.
        mesh: 1-D mesh of the cp axis, or a mesh of more axes together with ``placements``.
        layout: Who holds which tokens.
        dim: Sequence dim; 2 for (B, H, S, D).
        placements: One for each axis of ``mesh``: ``Shard(dim)`` on the cp axis, on the others ``Shard`` of the heads
            or rows, or ``Replicate()``.
        strategy, ulysses_degree, ranks_per_node, kv_grad_dtype, rates, kernel: As in ``context_parallel_attention``.

    Returns:
        Tensor of the global shape, whose sequence dim has ``layout.padded_seq_len``. ``to_local()`` gives the slots
        back, and ``dtcp.unshard`` of them the sequence. Not an instance of ``DTensor``, whose operations would take
        its shards for parts in their natural order.

    Raises:
        ValueError: If mesh, placements, layout and ``local`` do not fit together.
    """
    check_strategy(strategy, ulysses_degree, rates, ranks_per_node, kv_grad_dtype)
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {kernel!r}")
    if not -local.ndim <= dim < local.ndim:
        raise ValueError(f"as_dtensor: dim={dim} is out of range for a tensor of shape {tuple(local.shape)}")
    dim = dim % local.ndim
    if placements is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"as_dtensor on a mesh with axes {mesh.mesh_dim_names} needs placements, one for each axis, for "
                f"instance [Shard({dim}), Shard(1)]; or pass mesh['cp']"
            )
        placements = (Shard(dim),)
    placements = tuple(placements)
    axes = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
    if len(placements) != mesh.ndim or len(axes) != 1 or any(p.is_partial() for p in placements):
        raise ValueError(
            f"as_dtensor needs a placement for each of the {mesh.ndim} mesh axes, Shard({dim}) on one of them (the cp "
            f"axis) and none Partial, got {list(placements)}"
        )
    if not torch.compiler.is_compiling():  # in a compiled graph lengths are compared by the attention op
        _check_slots(local, dim, layout, mesh.size(axes[0]))
    group_name = mesh.get_group(axes[0]).group_name
    how = resolved_strategy(
        strategy, ulysses_degree, mesh.size(axes[0]), rates=rates, ranks_per_node=ranks_per_node,
        kv_grad_dtype=kv_grad_dtype,
    )  # fmt: skip
    return _tagged(local, layout.state, mesh, placements, dim, group_name, how, kernel)


def _check_slots(local: Tensor, dim: int, layout: SequenceLayout, cp: int) -> None:
    if layout.cp != cp:
        raise ValueError(f"as_dtensor: the layout is for cp={layout.cp} but the mesh axis has {cp} ranks")
    if local.size(dim) != layout.local_seq_len:
        raise ValueError(
            f"as_dtensor: dim {dim} of a tensor of shape {tuple(local.shape)} must have "
            f"layout.local_seq_len={layout.local_seq_len} slots; cut it by shard(x, mesh, layout, dim={dim})"
        )


@torch.compiler.allow_in_graph  # Dynamo cannot construct tensor subclasses that it does not know
def _tagged(
    local: Tensor, state: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, group_name: str,
    strategy: ResolvedStrategy, kernel: str,
) -> LayoutTensor:  # fmt: skip
    tag = Tag(dim, group_name, strategy, kernel)
    return _ToTagged.apply(local, state, mesh, placements, tag)


class _ToTagged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        state: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        tag: Tag,
        *sources: Tensor,
    ) -> LayoutTensor:
        ctx.tag, ctx.num_sources = tag, len(sources)
        ctx.set_materialize_grads(False)
        # Autograd saves tensors of this class further on, whose versions do not count what is done to ``local``.
        ctx.save_for_backward(local, *sources)
        return LayoutTensor(local.view_as(local), state, mesh, placements, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # raises if one was modified
        if grad is None:
            return (None,) * (5 + ctx.num_sources)
        if not isinstance(grad, LayoutTensor) or grad.tag != ctx.tag:
            raise RuntimeError(
                f"the gradient of a tensor with {ctx.tag} must be cut like it, got a {type(grad).__name__}; take the "
                "loss of x.to_local()"
            )
        return grad._local_tensor, *[None] * (4 + ctx.num_sources)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: LayoutTensor) -> Tensor:
        ctx.save_for_backward(x.state)
        ctx.constants = x.device_mesh, x.placements, x.tag
        ctx.set_materialize_grads(False)
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        return LayoutTensor(grad, *ctx.saved_tensors, *ctx.constants)


def _transposed(x: LayoutTensor, first: int, second: int) -> LayoutTensor:
    first, second = first % x.ndim, second % x.ndim
    moved = {first: second, second: first}
    placements = tuple(Shard(moved.get(p.dim, p.dim)) if isinstance(p, Shard) else p for p in x.placements)
    tag = replace(x.tag, dim=moved.get(x.tag.dim, x.tag.dim))
    return LayoutTensor(x._local_tensor.transpose(first, second), x.state, x.device_mesh, placements, tag)


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, LayoutTensor) else x


def _is_pointwise(func: Any) -> bool:
    """Whether slot i of the result comes from slot i of the inputs, on any rank alike."""
    is_one = func in _SAME_ORDER or torch.Tag.pointwise in func.tags
    has_tensor = [str(returned.type) for returned in func._schema.returns] == ["Tensor"]
    return is_one and has_tensor and torch.Tag.nondeterministic_seeded not in func.tags and not func._schema.is_mutable


def _check_cut_alike(func: Any, first: LayoutTensor, x: Tensor) -> None:
    if isinstance(x, LayoutTensor):
        if (x.tag, x.placements, x.shape) != (first.tag, first.placements, first.shape):
            raise ValueError(
                f"{func} of tensors that are cut differently: {first.tag}, {first.placements}, shape "
                f"{tuple(first.shape)} and {x.tag}, {x.placements}, shape {tuple(x.shape)}"
            )
    elif isinstance(x, DTensor) or x.ndim:
        raise NotImplementedError(
            f"{func} of a tensor in the order of a layout with one that is not ({type(x).__name__}, shape "
            f"{tuple(x.shape)}); cut both by shard and as_dtensor, or use x.to_local() of both"
        )


def same_layout(first: Tensor, second: Tensor) -> Tensor:
    """Return the state that both have, or raise: in a compiled graph, where states have no data yet, when it runs."""
    return first if first is second else _same_layout(first, second)


@torch.library.custom_op("dtcp::same_layout", mutates_args=())
def _same_layout(first: Tensor, second: Tensor) -> Tensor:
    if not torch.equal(first, second):
        raise ValueError(
            f"tensors in two layouts, {layout_from_state(first)} and {layout_from_state(second)}, in one operation; "
            "cut both in the same"
        )
    return first.clone()


@_same_layout.register_fake
def _(first: Tensor, second: Tensor) -> Tensor:
    return torch.empty_like(first)


def _message(what: Any, x: LayoutTensor | None) -> str:
    if what is _aten.new_empty_strided.default:
        return (
            "as_dtensor gives no leaf that needs a gradient, and no input of a reentrant checkpoint; let the local "
            "tensor need it, and call as_dtensor in the checkpointed function"
        )
    if isinstance(what, torch._ops.OpOverload) and what._schema.is_mutable:
        return f"{what} changes a tensor of as_dtensor in place, which has the memory of another; use a copy (x * 2)"
    layout = "" if x is None or type(x.state) is not Tensor else f" ({layout_from_state(x.state).name})"
    return (
        f"{what} would read the shards of this tensor in natural order, but they are in that of its layout{layout}; "
        "use x.to_local() and dtcp.unshard(local, mesh, layout, dim=...), or an operation along another dim of it"
    )
