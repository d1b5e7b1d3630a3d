"""The counterpart of torch's ``context_parallel_unshard``, for code that was written for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtcp.collectives import check_mesh
from dtcp.dispatch.frames import current
from dtcp.layout import SequenceLayout
from dtcp.shard import unshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: None = None,
    *,
    layout: SequenceLayout | None = None,
) -> list[Tensor]:
    """Return the whole of each tensor in natural order, pads dropped, without gradient. Collective over ``mesh``.

    What code written for ``torch.distributed.tensor.experimental`` calls. New code has ``cp.unshard(x, dim=2)``, which
    is differentiable.

    Args:
        mesh: 1-D mesh of the cp axis.
        buffers: This rank's parts.
        seq_dims: Sequence dim of each; may be negative.
        load_balancer: Torch's; None only.
        layout: Who holds which tokens, ``cp.layout`` of the context that the tensors come from. None is that of the
            context around this call; torch's takes what the last call of anybody has set.

    Raises:
        ValueError: If there is no layout, no context of ``mesh`` around, or a tensor does not fit.
    """
    check_mesh(mesh, "context_parallel_unshard")
    if load_balancer is not None:
        raise NotImplementedError(
            f"context_parallel_unshard takes no load balancer, got {type(load_balancer).__name__}; pass "
            "layout=cp.layout of `with dtcp.context_parallel(...) as cp`"
        )
    if len(buffers) != len(seq_dims):
        raise ValueError(f"seq_dims must name the sequence dim of each of {len(buffers)} buffers, got {list(seq_dims)}")
    layout = layout or _layout_of_context(mesh)
    return [unshard(x, mesh, layout, dim=dim) for x, dim in zip(buffers, seq_dims, strict=True)]


def _layout_of_context(mesh: DeviceMesh) -> SequenceLayout:
    frame: Any = current.frame
    if frame is None or frame.group_name != mesh.get_group().group_name:
        raise ValueError(
            "context_parallel_unshard is called outside the context of its mesh and cannot know the layout; pass "
            "layout=cp.layout of `with dtcp.context_parallel(...) as cp`"
        )
    return frame.layout
