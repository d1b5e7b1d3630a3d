"""Which parameters a backward will reach, on every rank the same: FSDP2 sums what has a gradient, and asks nobody.

A parameter that only some ranks have a gradient of, say of an expert that got no token on one of them, makes their
messages differ in size: gloo aborts, NCCL waits or adds up what does not belong together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtcp.models.init import plain_name
from dtcp.train.session import JobError


@contextmanager
def names_of_leaves(model: nn.Module) -> Iterator[dict[int, tuple[str, Tensor]]]:
    """Collect name and tensor of each parameter as the forward sees it, by ``id``: FSDP2 puts others in place."""
    leaves: dict[int, tuple[str, Tensor]] = {}
    handles = []

    def collect(prefix: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(prefix=prefix):
            leaves.setdefault(id(parameter), (plain_name(name), parameter))

    module: nn.Module
    for name, module in model.named_modules():
        if module is model or isinstance(module, FSDPModule):
            # Before FSDP2's own hook after the forward, which puts the sharded parameters back.
            handles.append(
                nn.Module.register_forward_hook(module, lambda m, *_, name=name: collect(name, m), prepend=True)
            )
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def reached_leaves(loss: Tensor, leaves: dict[int, tuple[str, Tensor]]) -> set[str]:
    """Names of the parameters that the graph of ``loss`` ends in."""
    reached: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) in leaves:
            reached.add(leaves[id(variable)][0])
        waiting.extend(following for following, _ in node.next_functions)
    return reached


def check_all_reach_the_same(reached: set[str], group: dist.ProcessGroup | None) -> None:
    """Compare over ``group`` what ranks are going to have gradients of. Collective.

    Raises:
        JobError: On all of these ranks, if one parameter is reached by some of them only.
    """
    size = dist.get_world_size(group)
    by_rank: list[set[str]] = [set()] * size
    dist.all_gather_object(by_rank, reached, group=group)
    anywhere = set().union(*by_rank)
    some = sorted(name for name in anywhere if any(name not in names for names in by_rank))
    if not some:
        return
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(size))
    with_it = [rank for rank, names in zip(ranks, by_rank, strict=True) if some[0] in names]
    without = [rank for rank, names in zip(ranks, by_rank, strict=True) if some[0] not in names]
    more = f" (and {len(some) - 1} more like it)" if len(some) > 1 else ""
    raise JobError(
        f"parameter {some[0]} got a gradient on rank {with_it[0]} and none on rank {without[0]}{more}: FSDP2 would add "
        "up tensors that do not belong together, or wait for ever; have every rank's forward use every parameter, "
        "for instance an expert without tokens by 0 * parameter.sum()"
    )


def any_requires_gradient(model: nn.Module) -> bool:
    """Whether there is something to train."""
    return any(parameter.requires_grad for parameter in model.parameters())


def unexamined(model: nn.Module, gradients: dict[str, Tensor], grad_norm: float, noise: float) -> list[str]:
    """Names of trainable parameters whose gradient is nothing beside the whole: whatever went wrong did not show."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (name not in gradients or not float(torch.linalg.vector_norm(gradients[name].double())) > noise * grad_norm)
    ]
