"""Warn, once, when ranks that share one model step with gradients that were never added up over the sequence.

Every rank's gradient is its share of a sum, and nothing fails without that sum: the replicas just drift apart. So the
first steps of an optimizer after a context parallel backward are compared between the ranks: parameters that are equal
and have gradients that differ. Nothing waits for another rank: each writes the norms into the store of the group, and
reads those of the others before its next step, which they have then begun too.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtcp.collectives import resolve_group
from dtcp.own_group import own_group

_MAX_OPTIMIZERS = 4  # in a group; programs that make one in each step are not followed for long
_MAX_STEPS = 3  # of an optimizer, to find gradients, and then the others' norms
_EQUAL = 1e-6  # relative, of the norms of a parameter on two machines
_DIFFERENT = 1e-3  # relative, of the norms of a gradient; sums that every rank has are equal to the last bit

# What norms are taken in, without a copy; tensors of other dtypes are not looked at.
_NORM_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

_KEY = "dtcp/gradients"

_groups: dict[str, _Group] = {}
_remove_hook: Callable[[], None] | None = None


def expect_equal_gradients(group: dist.ProcessGroup) -> None:
    """Tell that a backward has left shares of gradients on the ranks of ``group``. Costs a look-up after the first."""
    global _remove_hook
    if group.group_name in _groups or own_group(group) is not None:  # whose ranks have one model
        return
    _groups[group.group_name] = _Group(group.group_name, is_done=group.size() == 1)
    if _remove_hook is None and group.size() > 1:
        _remove_hook = register_optimizer_step_pre_hook(_before_step).remove


def refuse_ddp(group_name: str) -> None:
    """Raise inside the forward of a DistributedDataParallel that spans ranks of the group.

    It would have given every rank the buffers of one, cut ones too, and is going to average what are shares of a sum.
    """
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None:
        return
    shared = {*dist.get_process_group_ranks(ddp.process_group)} & {
        *dist.get_process_group_ranks(resolve_group(group_name))
    }
    if len(shared) > 1:
        raise NotImplementedError(
            f"DistributedDataParallel over the context parallel ranks {sorted(shared)} would give each of them the "
            "buffers of the first, and average gradients that have to be added; use dtcp.apply_fsdp(model, dims) or "
            "dtcp.reduce_gradients(model, dims), or DDP over data parallel ranks only (process_group=)"
        )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _remove_hook
    if torch.compiler.is_compiling():
        return
    for group in _groups.values():
        if not group.is_done:
            group.look_at(optimizer)
    if all(group.is_done for group in _groups.values()) and _remove_hook is not None:
        _remove_hook()
        _remove_hook = None


class _Group:
    """What is known of the optimizers of the ranks that share a sequence."""

    def __init__(self, name: str, is_done: bool) -> None:
        self.is_done = is_done
        self._name = name
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._num_optimizers = self._num_judged = 0

    def look_at(self, optimizer: Optimizer) -> None:
        steps = self._optimizers.get(optimizer)
        if steps is None:
            if self._num_optimizers == _MAX_OPTIMIZERS:
                return
            steps = self._optimizers[optimizer] = _Steps(f"{_KEY}/{self._num_optimizers}")
            self._num_optimizers += 1
        if steps.is_judged:
            return
        try:
            sharing = resolve_group(self._name)
            ranks = dist.get_process_group_ranks(sharing)
            own = [] if steps.has_written else _norms(_whole_parameters(optimizer, ranks))
            of_ranks = steps.exchange(own, sharing)
        except (RuntimeError, ValueError):  # the group has ended, or its store cannot be asked
            self.is_done = True
            return
        if of_ranks is not None and (differing := _differing(of_ranks)) is not None:
            for group in _groups.values():
                group.is_done = True
            _warn(differing)
        self._num_judged += steps.is_judged
        self.is_done |= self._num_judged == _MAX_OPTIMIZERS


class _Steps:
    """The first steps of one optimizer; ``key`` is the same on every rank."""

    def __init__(self, key: str) -> None:
        self.is_judged = self.has_written = False
        self._key, self._num_steps = key, 0

    def exchange(self, own: list[list[Any]], group: dist.ProcessGroup) -> list[list[list[Any]]] | None:
        """Before a step: write what there is to compare, or return what each rank has written, if all have."""
        self._num_steps += 1
        store, keys = group.get_group_store(), [f"{self._key}/{rank}" for rank in range(group.size())]
        if not self.has_written:
            if own:
                store.set(keys[group.rank()], json.dumps(own))
                self.has_written, self._num_steps = True, 0
        elif store.check(keys):
            self.is_judged = True
            return [json.loads(store.get(key)) for key in keys]
        self.is_judged = self._num_steps == _MAX_STEPS
        return None


def _whole_parameters(optimizer: Optimizer, ranks: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Parameters that each of the ranks holds whole, as far as one can see, and their gradients. FSDP's are not.

    Of a DTensor over other ranks only, those of tensor parallelism, each of these ranks holds the same part.
    """
    pairs = [
        (_local(parameter, ranks), _local(parameter.grad, ranks))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and not getattr(parameter, "_fsdp_flattened", False)
    ]
    return [pair for pair in pairs if all(_can_measure(x) for x in pair)]


def _local(x: Tensor, ranks: list[int]) -> Tensor:
    mesh = getattr(x, "device_mesh", None)  # of a DTensor, told without loading its module
    if mesh is None or len(set(mesh.mesh.flatten().tolist()).intersection(ranks)) > 1:
        return x
    return x.to_local()  # type: ignore[attr-defined]


def _can_measure(x: Tensor) -> bool:
    return (
        x.layout == torch.strided
        and x.dtype in _NORM_DTYPES
        and not x.is_meta
        and type(x).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


@torch.no_grad()
def _norms(parameters: list[tuple[Tensor, Tensor]]) -> list[list[Any]]:
    """(shape, norm of the parameter, norm of its gradient) of each."""
    if not parameters:
        return []
    both = [x.norm(dtype=_NORM_DTYPES[x.dtype]) for pair in parameters for x in pair]
    dtype = max((x.dtype for x in both), key=lambda dtype: dtype.itemsize)
    norms = torch.stack([x.to(both[0].device, dtype) for x in both]).view(-1, 2).tolist()  # one copy from the device
    return [[list(p.shape), *norm] for (p, _), norm in zip(parameters, norms, strict=True)]


def _differing(of_ranks: list[list[list[Any]]]) -> str | None:
    """The first parameter that is equal on all ranks and has a gradient that is not."""
    if len({len(norms) for norms in of_ranks}) > 1:
        return None
    largest = max(gradient for norms in of_ranks for _, _, gradient in norms)
    for entries in zip(*of_ranks, strict=True):
        shapes, parameters, gradients = zip(*entries, strict=True)
        is_one = all(shape == shapes[0] for shape in shapes) and _spread(parameters) <= _EQUAL
        if is_one and max(gradients) > 1e-6 * largest and _spread(gradients) > _DIFFERENT:
            return f"the gradient of a parameter of shape {tuple(shapes[0])} has norm " + ", ".join(
                f"{norm:.4g} on rank {rank}" for rank, norm in enumerate(gradients)
            )
    return None


def _spread(values: tuple[float, ...]) -> float:
    return (max(values) - min(values)) / max(abs(value) for value in values) if any(values) else 0.0


def _warn(differing: str) -> None:
    warnings.warn(
        f"dtcp: an optimizer has stepped with gradients that were not added up over the ranks of context parallelism: "
        f"{differing}, so the ranks' models drift apart. Call dtcp.reduce_gradients(model, dims) after the backward, "
        "or shard the model by dtcp.apply_fsdp, whose backward adds them up. Sums that the optimizer's own step or a "
        "hook of it makes come after this check, which does not see them. If this is meant, "
        "warnings.filterwarnings('ignore', message='dtcp: an optimizer')",
        UserWarning,
        stacklevel=6,
    )
