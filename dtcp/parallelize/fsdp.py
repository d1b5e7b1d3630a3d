"""Shard parameters with FSDP2 so that gradients are sums of shares, never means.

The ``fsdp`` view contains the cp ranks: the reduce-scatter of FSDP2 is also the sum over the sequence.
"""

import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dtcp.mesh import ParallelDims


def apply_fsdp(
    model: nn.Module,
    dims: ParallelDims,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard ``model`` in place, a unit per block of ``model.layers`` and one for the rest.

    Args:
        model: Has ``layers``, an ``nn.ModuleList`` or ``nn.ModuleDict``; may be on the meta device.
        dims: Built mesh. Parameters are sharded over ``dims.view("fsdp")``, and with ``dp_replicate > 1`` also
            replicated: ``dims.view("hsdp")``.
        param_dtype: What parameters and activations are cast to in forward and backward; None keeps them.
        reduce_dtype: What gradients are added up in.
        reshard_after_forward: Free a block's full parameters between its forward and backward. The root keeps its
            own: its backward comes first.
        offload_policy: Where sharded parameters, gradients and optimizer states live; torch's ``CPUOffloadPolicy()``
            keeps them in CPU memory. None leaves them on the device.

    Raises:
        ValueError: If ``model.layers`` does not hold the blocks.
    """
    mesh = dims.view("hsdp") if dims.dp_replicate > 1 else dims.view("fsdp")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"apply_fsdp wants the blocks of {type(model).__name__} in model.layers, a ModuleList or ModuleDict, "
            f"got {type(layers).__name__}; rename it, or call torch's fully_shard with dims.view('fsdp')"
        )
    offload_policy = OffloadPolicy() if offload_policy is None else offload_policy
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload_policy)
    for block in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        shard(block, reshard_after_forward=reshard_after_forward)
    shard(model, reshard_after_forward=False)
    for unit in _units(model):
        # Gradients are shares. gloo has no PREMUL_SUM, which a divide factor alone would ask for.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def set_last_microbatch(model: nn.Module, is_last: bool) -> None:
    """Reduce gradients only in the last backward of an optimizer step; earlier ones add up locally, unsharded.

    Does nothing for a model without FSDP2.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)


def free_full_parameters(model: nn.Module) -> None:
    """Put sharded parameters back in place after a forward that no backward follows; nothing without FSDP2.

    The root keeps its full parameters for its backward. Until they are freed, ``model.parameters()`` holds plain
    tensors without gradients in their place.
    """
    for unit in _units(model):
        unit.reshard()


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
