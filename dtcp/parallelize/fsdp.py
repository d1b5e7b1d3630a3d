"""Shard parameters with FSDP2 so that gradients are sums of shares, never means.

The ``fsdp`` view contains the cp ranks: the reduce-scatter of FSDP2 is also the sum over the sequence.
"""

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dtcp.mesh import ParallelDims
from dtcp.parallelize.blocks import named_blocks


def apply_fsdp(
    model: nn.Module,
    dims: ParallelDims,
    *,
    blocks: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard ``model`` in place, a unit per block and one for the rest.

    Args:
        model: May be on the meta device.
        dims: Built mesh. Parameters are sharded over ``dims.view("fsdp")``, and with ``dp_replicate > 1`` also
            replicated: ``dims.view("hsdp")``.
        blocks: Modules of the model, ``model.model.layers`` say; None for those of ``model.layers``, an
            ``nn.ModuleList`` or ``nn.ModuleDict``.
        param_dtype: What parameters and activations are cast to in forward and backward; None keeps them.
        reduce_dtype: What gradients are added up in.
        reshard_after_forward: Free a block's full parameters between its forward and backward. The root keeps its
            own: its backward comes first.
        offload_policy: Where sharded parameters, gradients and optimizer states live; torch's ``CPUOffloadPolicy()``
            keeps them in CPU memory. None leaves them on the device.

    Raises:
        ValueError: If ``model.layers`` does not hold the blocks, or rows that tp cut unevenly can be cut no further.
    """
    mesh = dims.view("hsdp") if dims.dp_replicate > 1 else dims.view("fsdp")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    if blocks is None:
        blocks = [block for _, block in named_blocks(model, "apply_fsdp", "name them, blocks=model.model.layers say")]
    offload_policy = OffloadPolicy() if offload_policy is None else offload_policy
    placement = functools.partial(_placement, num_shards=dims.view("fsdp").size())
    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload_policy, shard_placement_fn=placement
    )
    for block in _together(model, list(blocks)):
        shard(block, reshard_after_forward=reshard_after_forward)
    shard(model, reshard_after_forward=False)
    for unit in _units(model):
        # Gradients are shares. gloo has no PREMUL_SUM, which a divide factor alone would ask for.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _together(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module | list[nn.Module]]:
    """Blocks in order; those that share parameters, as several layers with one attention do, in one unit.

    Raises:
        ValueError: If a block shares a parameter with what is outside of the blocks: the root gathers that one.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {
        id(parameter): f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        if id(module) not in inside
        for leaf, parameter in module.named_parameters(recurse=False)
    }
    units: list[tuple[list[nn.Module], set[int]]] = []
    for block in blocks:
        held = {id(parameter) for parameter in block.parameters()}
        if common := sorted(outside[i] for i in held & outside.keys()):
            raise ValueError(
                f"apply_fsdp cannot shard a block that shares {common[0]} with the rest of the model; give that weight "
                "to the block's forward as an argument, as dtcp.models do with a tied head's"
            )
        modules = [block]
        for others, theirs in [unit for unit in units if unit[1] & held]:
            modules, held = others + modules, held | theirs
        units = [unit for unit in units if not unit[1] & held] + [(modules, held)]
    return [modules[0] if len(modules) == 1 else modules for modules, _ in units]


def _placement(parameter: nn.Parameter, *, num_shards: int) -> Shard | None:
    """Which dim FSDP2 cuts: the rows (None), or the columns where a DTensor could not say which rows a rank holds.

    # Note [Uneven rows over tp and fsdp]
    FSDP2 cuts the rows that tp has left on a rank. The placements of the result read the other way round: rows over
    fsdp first, then those of a rank over tp. For 257 rows over 2 and 4 ranks the last ones hold 30 and 32, and read as
    31 and 31: initial weights, full tensors and checkpoints would be wrong.
    """
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        return None
    num_rows, tp = parameter.size(0), parameter.device_mesh.size()
    held = [_chunk_sizes(rows, num_shards) for rows in _chunk_sizes(num_rows, tp)]
    if all(list(of_ranks) == _chunk_sizes(sum(of_ranks), tp) for of_ranks in zip(*held, strict=True)):
        return None
    if parameter.ndim > 1 and parameter.size(1) % num_shards == 0:
        return Shard(1)
    raise ValueError(
        f"apply_fsdp cannot cut a parameter of shape {tuple(parameter.shape)} over tp={tp} and {num_shards} ranks of "
        f"fsdp; use rows, for instance vocab_size={-(-num_rows // tp) * tp}, that are a multiple of tp, or columns "
        f"that are a multiple of {num_shards}"
    )


def _chunk_sizes(size: int, num_chunks: int) -> list[int]:
    """Sizes of the parts as ``torch.chunk`` deals them, with those that are empty."""
    chunk = -(-size // num_chunks)
    return [max(0, min(chunk, size - i * chunk)) for i in range(num_chunks)]


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
