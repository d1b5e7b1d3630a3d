"""Every parameter's gradient on every rank, beside one rank's.

A gradient that ranks hold a part of is gathered; one that they all hold whole is looked at on each of them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtcp.doctor.subject import Subject, named_as_whole, whole_tensor
from dtcp.models.init import plain_name

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
TOLERANCE = 1e-5
NOISE = 1e-3  # of the global norm, in the denominator: a key bias has gradient 0 up to rounding
CLEAR = 1e-3  # a suspicion that explains a gradient up to this, relative, is right


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a parameter's gradient is from the reference, on the rank where it is farthest."""

    name: str
    error: float  # |gradient - reference| / (|reference| + NOISE * global norm)
    limit: float  # that error may be
    factor: float  # that the reference times it comes closest
    residual: float  # relative distance that is left then
    differs_over: tuple[str, ...] = ()  # axes whose ranks hold the parameter whole, but different gradients
    complete_over: tuple[str, ...] = ()  # axes over which they would have to be added to be right

    @property
    def is_wrong(self) -> bool:
        """Whether the error is over its limit, or no number."""
        return not self.error <= self.limit


def gather_weights(subject: Subject) -> tuple[dict[str, Tensor], list[str]]:
    """Return every weight, whole, by plain name (empty but on rank 0), and those that replicas hold differently."""
    weights, different = {}, []
    for name, weight in _whole(subject, {n: p.detach() for n, p in named_as_whole(subject.model)}):
        if _axes_that_differ(subject, weight, tolerance=0.0):
            different.append(name)
        if dist.get_rank() == 0:
            weights[name] = weight.clone()
    return weights, different


def digests_of_buffers(model: nn.Module) -> dict[str, str]:
    """Return a digest of each buffer, whole, by plain name. Collective if the model is cut."""
    digests = {}
    for name, buffer in model.named_buffers():
        held = whole_tensor(buffer.detach()).cpu().contiguous()
        numbers = held.flatten().view(torch.uint8).numpy()
        digests[plain_name(name)] = hashlib.sha256(numbers.tobytes()).hexdigest()
    return digests


def different_buffers(subject: Subject) -> tuple[dict[str, str], list[str]]:
    """Return the digests of buffers over all stages, and the names of those that ranks hold differently. Collective."""
    by_rank: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, digests_of_buffers(subject.model))
    merged: dict[str, str] = {}
    different: dict[str, None] = {}
    for digests in by_rank:
        for name, digest in digests.items():
            if merged.setdefault(name, digest) != digest:
                different[name] = None
    return merged, list(different)


def gather_gradients(
    subject: Subject, reference: Mapping[str, Tensor], grad_norm: float, limits: Mapping[str, float]
) -> tuple[dict[str, Tensor], list[Deviation]]:
    """Compare the gradients that the job has left with the reference. Collective.

    Args:
        reference: On rank 0; not read on others.
        grad_norm: Of the whole reference, on every rank.
        limits: Of each parameter's error, on every rank; TOLERANCE for those that it does not name.

    Returns:
        Gradients as rank 0 sees them (empty on others), added up where the ranks hold shares that make the reference;
        and the deviations, equal on every rank, the worst first.
    """
    mine = {n: p.grad for n, p in named_as_whole(subject.model) if p.grad is not None}
    gathered, deviations = {}, []
    for name, gradient in _whole(subject, mine):
        wanted = _broadcast(reference.get(name) if dist.get_rank() == 0 else None, gradient)
        limit = limits.get(name, TOLERANCE)
        deviation, summed = _deviation(subject, name, gradient, wanted, grad_norm, limit)
        deviations.append(deviation)
        if dist.get_rank() == 0:
            gathered[name] = summed.clone()
    deviations.sort(key=lambda d: d.error / d.limit if d.error == d.error else float("inf"), reverse=True)
    return gathered, deviations


def _deviation(
    subject: Subject, name: str, gradient: Tensor, wanted: Tensor, grad_norm: float, limit: float
) -> tuple[Deviation, Tensor]:
    worst = _maximum(error_of(gradient, wanted, grad_norm), gradient.device)
    if worst <= limit:
        return Deviation(name, worst, limit, 1.0, worst), gradient
    differs_over = _axes_that_differ(subject, gradient, tolerance=0.1 * CLEAR)
    complete_over: tuple[str, ...] = ()
    best = gradient
    for count in range(1, len(differs_over) + 1):
        for axes in itertools.combinations(differs_over, count):
            summed = gradient.clone()
            for axis in axes:
                dist.all_reduce(summed, group=subject.dims.view(axis).get_group())
            if not complete_over and _maximum(error_of(summed, wanted, grad_norm), summed.device) <= CLEAR:
                complete_over, best = axes, summed
    factor, residual = fit(gradient, wanted)
    return Deviation(name, worst, limit, factor, residual, differs_over, complete_over), best


def fit(gradient: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the factor f that makes |gradient - f wanted| least, and that over |gradient|."""
    g, w = gradient.double(), wanted.double()
    square = float((w * w).sum())
    factor = float((g * w).sum()) / square if square > 0 else 0.0
    size = float(g.norm())
    return factor, float((g - factor * w).norm()) / size if size > 0 else 0.0


def error_of(gradient: Tensor, wanted: Tensor, grad_norm: float) -> float:
    """Return the relative error, 2-norm; gradients near 0 are measured by the global norm."""
    wanted = wanted.double()
    return float((gradient.double() - wanted).norm() / (wanted.norm() + NOISE * grad_norm + 1e-30))


def _maximum(value: float, device: torch.device) -> float:
    """Over all ranks; infinite where it is no number on one of them."""
    found = torch.tensor(value if value == value else float("inf"), dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _axes_that_differ(subject: Subject, x: Tensor, *, tolerance: float) -> tuple[str, ...]:
    """Axes whose ranks hold different values of ``x``: by more than ``tolerance``, relative."""
    axes = []
    for axis in AXES:
        mesh = subject.dims.view(axis)
        if mesh.size() == 1:
            continue
        first = x.contiguous().clone()
        dist.broadcast(first, group=mesh.get_group(), group_src=0)
        distance = float((x.double() - first.double()).norm()) - tolerance * float(x.double().norm())
        if _maximum(distance, x.device) > 0:
            axes.append(axis)
    return tuple(axes)


def _whole(subject: Subject, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every parameter of the model, in one order on every rank, also of other stages."""
    mesh = subject.dims.view("pp")
    names: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * mesh.size()
    own = {name: (x.shape, x.dtype) for name, x in held.items()}
    if mesh.size() > 1:
        dist.all_gather_object(names, own, group=mesh.get_group())
    else:
        names = [own]
    for name in dict.fromkeys(name for stage in names for name in stage):
        owner = next(stage for stage in range(mesh.size()) if name in names[stage])
        x = whole_tensor(held[name]) if name in held else None
        if mesh.size() > 1:
            shape, dtype = names[owner][name]
            if mesh.get_local_rank() != owner or x is None:
                x = torch.empty(shape, dtype=dtype, device=subject.device)
            x = x.contiguous()
            dist.broadcast(x, group=mesh.get_group(), group_src=owner)
        assert x is not None
        yield name, x


def _broadcast(x: Tensor | None, like: Tensor) -> Tensor:
    """Rank 0's ``x`` on every rank, in float64; zeros where it has none."""
    whole = torch.zeros_like(like, dtype=torch.float64, memory_format=torch.contiguous_format)
    if x is not None:
        whole.copy_(x)
    dist.broadcast(whole, src=0)
    return whole
