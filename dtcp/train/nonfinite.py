"""Find what is at fault when a loss or a gradient norm is not finite, so that a job can stop before the step.

Shapes: B rows, S_local slots of this rank, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtcp.dtensor import local_part
from dtcp.models.init import plain_name
from dtcp.parallelize.fsdp import free_full_parameters
from dtcp.parallelize.pipeline import Pipeline
from dtcp.train.batch import Microbatch
from dtcp.train.session import JobError

_NOWHERE = 2**62


class NonFiniteError(JobError):
    """The loss or the gradient norm is not finite; raised on every rank before the optimizer step."""


def refuse_non_finite(
    step: int,
    loss: float,
    grad_norm: float,
    *,
    model: nn.Module,
    microbatches: Iterable[Microbatch],
    forward: Callable[[Microbatch], Tensor] | None,
) -> None:
    """Return if both numbers are finite; else find the first value at fault and raise.

    Costs nothing in the good case. In the bad one: a forward of every microbatch, and a few all-reduces.

    Args:
        step: Optimizer step, from 1, for the message.
        loss: Summed over all ranks.
        grad_norm: Global.
        forward: Logits (B, S_local, V) of a microbatch; may communicate, so every rank comes here. None: tokens are
            not looked for (no rank of a pipeline has both).

    Raises:
        NonFiniteError: With the first bad weight, the first bad token (row of the global batch, position in the
            sequence) and the first bad gradient, in the order of ``named_parameters``; with those that there are.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    faults = [
        _first_parameter(model, "weight", lambda parameter: parameter),
        None if forward is None else _first_token(model, microbatches, forward),
        _first_parameter(model, "gradient", lambda parameter: parameter.grad),
    ]
    found = "; ".join(fault for fault in faults if fault) or "no single value is at fault: the sum overflowed"
    raise NonFiniteError(
        f"step {step} was not taken: loss {loss}, grad_norm {grad_norm}; {found}; "
        "lower optimizer.lr or check the data (the weights are those after the step before)"
    )


def _first_parameter(model: nn.Module, what: str, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> str | None:
    stage = model.stage_indices[0] if isinstance(model, Pipeline) else 0
    bad = (
        (stage, i, plain_name(name))
        for i, (name, parameter) in enumerate(model.named_parameters())
        if not _all_finite(tensor_of(parameter))
    )
    first = next(bad, (_NOWHERE, 0, ""))
    if dist.is_initialized() and dist.get_world_size() > 1:  # stages have other parameters: no index means the same
        all_first: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_first, first)
        first = min(all_first)
    return None if first[0] == _NOWHERE else f"first bad {what}: {first[2]}"


@torch.no_grad()
def _first_token(
    model: nn.Module, microbatches: Iterable[Microbatch], forward: Callable[[Microbatch], Tensor]
) -> str | None:
    """First (row, position), in row-major order of the global batch, whose loss is not finite."""
    first, stride = _NOWHERE, 2**31
    device = torch.device("cpu")
    for microbatch in microbatches:
        logits = forward(microbatch)
        if isinstance(logits, DTensor):  # vocabulary-parallel
            logits = logits.full_tensor()
        device = logits.device
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), microbatch.labels.flatten(), ignore_index=-100, reduction="none"
        ).view_as(microbatch.labels)
        for row, slot in (~losses.isfinite()).nonzero().tolist():
            position = int(microbatch.token_indices[row, slot])
            first = min(first, microbatch.row_indices[row] * stride + position)
    free_full_parameters(model)
    first = _lowest(first, device)
    return None if first == _NOWHERE else f"first bad token: row {first // stride}, position {first % stride}"


def _all_finite(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    return bool(local_part(tensor).isfinite().all())


def _lowest(index: int, device: torch.device) -> int:
    """The least ``index`` of all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return index
    lowest = torch.tensor(index, dtype=torch.int64, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return int(lowest)
