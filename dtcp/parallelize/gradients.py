"""Add gradient shares up, and clip them by their true global norm.

Every rank's loss is its share (sum of its token losses / valid tokens of the whole batch), so a parameter's true
gradient is the plain sum over every rank that holds part of the batch or of the sequence. FSDP2 adds in its own
reduce-scatter; a loop without FSDP2 calls ``reduce_gradients``. Both then clip with ``clip_grad_norm_``.
"""

import math
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtcp.collectives import all_gather_ints
from dtcp.dtensor import local_part
from dtcp.mesh import ParallelDims
from dtcp.parallelize.pipeline import Pipeline

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

_BUCKET_BYTES = 64 * 2**20  # gradients travel in buckets: few messages, and the copy stays small beside the model


_same_weights: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose weights have been compared between the ranks."""


def reduce_gradients(model: nn.Module, dims: ParallelDims) -> None:
    """Replace every gradient by its sum over the data and context parallel ranks, in place: once per optimizer step.

    For models whose parameters are plain tensors, or DTensors over ``tp``, equal on all of these ranks. A parameter
    that has a gradient on some ranks only counts as zero on the others; one that has none anywhere stays without.

    Args:
        model: Its ``requires_grad`` parameters are visited in ``named_parameters`` order, equal on every rank.
        dims: The degrees; the sum runs over ``dp_replicate``, ``dp_shard`` and ``cp``. Cost: one all-reduce of the
            gradients' bytes, in buckets of 64 MiB, and one of a byte per parameter.

    Raises:
        ValueError: If a parameter is a DTensor over more than the ``tp`` axis: FSDP2 has reduced it already; if
            gradients are those that the last call left; if the ranks do not hold the same weights, at the first call.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if dims.dp_replicate * dims.dp_shard * dims.cp > 1:
        for name, parameter in parameters:
            _refuse_sharded(name, parameter)
        _refuse_reduced(parameters)
    _take_placements(parameter for _, parameter in parameters)
    if dims.dp_replicate * dims.dp_shard * dims.cp == 1 or not parameters:
        return
    group = dims.view("loss").get_group()
    if model not in _same_weights:
        _check_same_weights(parameters, group)
        _same_weights.add(model)
    has_gradient_here = [parameter.grad is not None for _, parameter in parameters]
    anywhere = torch.tensor(has_gradient_here, dtype=torch.uint8, device=parameters[0][1].device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for (_, parameter), has_gradient in zip(parameters, anywhere.tolist(), strict=True):
        if has_gradient:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_part(parameter.grad))
    for bucket in _buckets(gradients):
        _all_reduce_bucket(bucket, group)
    for _, parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):  # whose version stays
            parameter.grad._dtcp_reduced_version = parameter.grad._version  # type: ignore[attr-defined]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, dims: ParallelDims) -> Tensor:
    """Scale the gradients in place so that their global 2-norm is at most ``max_norm``.

    The norm is that of the whole gradient, each element counted once, whatever mesh it is spread over; what ranks of
    ``tp`` have not added yet (Partial) is added here. A norm that is not finite leaves every gradient as it is, so that
    a caller can still find the one at fault.

    Args:
        model: Gradients may be DTensors over several meshes, plain tensors that are equal on every rank, or missing.
        max_norm: Upper bound; ``math.inf`` only measures.
        dims: The degrees the model was parallelised with.

    Returns:
        The norm before clipping, 0-d float32, equal on every rank. Cost: one all-reduce of one number per mesh axis
        that gradients are sharded over, and one over ``pp``; no copy from the device.

    Raises:
        ValueError: If ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm has to be positive, got {max_norm}; use max_norm=inf to measure without clipping")
    _take_placements(model.parameters())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    copies = model.tied_copies() if isinstance(model, Pipeline) else set()
    norm = _global_norm(p.grad for p in model.parameters() if p.grad is not None and p not in copies)
    if dims.pp > 1:
        square = norm.double().square()
        dist.all_reduce(square, group=dims.view("pp").get_group())
        norm = square.sqrt().float()
    if gradients and not math.isinf(max_norm):
        scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        for gradient in gradients:
            local = local_part(gradient)
            local.mul_(scale.to(local.device))
    return norm


def _global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, 0-d float32; squares are added in float64."""
    by_mesh: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(_sharded_over(gradient), []).append(local_part(gradient))
    total = torch.zeros((), dtype=torch.float64)
    for sharded_over, local_gradients in by_mesh.items():
        square = _sum_of_squares(local_gradients)
        if sharded_over is not None:
            mesh, mesh_dims = sharded_over
            for mesh_dim in mesh_dims:
                dist.all_reduce(square, group=mesh.get_group(mesh_dim))
        total = total.to(square.device) + square
    return total.sqrt().float()


def _sum_of_squares(local_gradients: list[Tensor]) -> Tensor:
    held = [gradient for gradient in local_gradients if gradient.numel() > 0]
    if not held:  # small parameters leave some FSDP ranks without a row
        return torch.zeros((), dtype=torch.float64, device=local_gradients[0].device)
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in held) else torch.float32
    if held[0].device.type == "cpu":
        return torch.stack([_norms_of_parts(gradient, dtype).double().square().sum() for gradient in held]).sum()
    norms = torch._foreach_norm(held, 2, dtype=dtype)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _norms_of_parts(gradient: Tensor, dtype: torch.dtype, size: int = 1024) -> Tensor:
    """Norms of ``size`` elements each.

    Because torch's norm of float32 on CPU adds the squares up one after the other: of half a million elements it is off
    by 4e-6, of an embedding's gradient, where few rows are large, by 1e-4, of 30 million elements by 2e-3. And by
    another amount where ranks hold a part.
    """
    whole, rest = gradient.reshape(-1).tensor_split([gradient.numel() // size * size])
    norms = torch.linalg.vector_norm(whole.view(-1, size), dim=1, dtype=dtype)
    return torch.cat([norms, torch.linalg.vector_norm(rest, dtype=dtype)[None]])


def _sharded_over(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh axes over which the elements are spread; None when this rank holds them all."""
    if not isinstance(gradient, DTensor):
        return None
    assert not any(p.is_partial() for p in gradient.placements), f"a gradient was left unreduced: {gradient.placements}"
    # Not is_shard(): what FSDP2 cuts on the dim that tp has cut is a _StridedShard, which denies it.
    mesh_dims = tuple(
        i for i, p in enumerate(gradient.placements) if not p.is_replicate() and gradient.device_mesh.size(i) > 1
    )
    return (gradient.device_mesh, mesh_dims) if mesh_dims else None


def _take_placements(parameters: Iterable[nn.Parameter]) -> None:
    """Spread every gradient as its parameter is: what is Partial is added up."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _refuse_reduced(parameters: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and getattr(gradient, "_dtcp_reduced_version", None) == gradient._version:
            raise ValueError(
                f"reduce_gradients found the gradient of {name} as its last call left it, added up over the ranks "
                "already; call it once per optimizer step, after the backward of the last microbatch, and "
                "optimizer.zero_grad() before the next"
            )


def _check_same_weights(parameters: list[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Replicas that start from different weights would be pulled about by each other's gradients, without an error."""
    checksums = []
    for _, parameter in parameters:
        local = local_part(parameter.detach())
        if local.element_size() in _INTEGERS and not local.is_complex():
            checksums.append(local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64))
    if not checksums:
        return
    by_rank = all_gather_ints([int(torch.stack(checksums).sum())], group, checksums[0].device)
    if len({numbers[0] for numbers in by_rank}) > 1:
        raise ValueError(
            f"reduce_gradients: the ranks hold different weights, checksums by rank {[n[0] for n in by_rank]}; seed "
            "them alike (torch.manual_seed), or broadcast the first rank's before the first step"
        )


def _refuse_sharded(name: str, parameter: Tensor) -> None:
    if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != ("tp",):
        raise ValueError(
            f"reduce_gradients is for plain parameters, got {name} as a DTensor over "
            f"{parameter.device_mesh.mesh_dim_names}; FSDP2 reduces it in backward, so leave the call out"
        )


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Consecutive gradients of one dtype, up to the bucket size (at least one each)."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if bucket and (num_bytes + size > _BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(gradient)
        num_bytes += size
    if bucket:
        yield bucket


def _all_reduce_bucket(bucket: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))
