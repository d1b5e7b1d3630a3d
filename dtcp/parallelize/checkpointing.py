"""What blocks keep for their backward: everything, their inputs only, or that and attention; on the device or the host.

Recomputation runs a block's forward again in the backward, in the context and with the layout that its own forward
found (`dtcp.recompute`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import dtcp.attention.ops  # defines attention_forward
import dtcp.parallelize.columns_op  # noqa: F401  # defines gathered_linears
from dtcp.dtensor import is_dtensor
from dtcp.parallelize.blocks import named_blocks

MODES = ("none", "full", "selective")

ATTENTION_OPS = (
    torch.ops.dtcp.attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
)
"""What ``selective`` saves the results of: the costliest ops of a long sequence, and small results."""

MATMUL_OPS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.dtcp.gathered_linears.default,
)
"""What ``selective`` saves too with ``save_matmuls``: linear layers."""


def apply_activation_checkpointing(
    model: nn.Module, mode: str, *, every: int = 1, save_matmuls: bool = False, offload: bool = False
) -> None:
    """Wrap blocks of ``model.layers`` in place. After the context parallel plan, before compile per block and FSDP2.

    ``state_dict`` has the names that it had before, and loads into a model without wrappers; from the names of
    ``model.named_parameters()``, ``dtcp.models.init.plain_name`` takes out what the wrappers insert.

    Args:
        model: Has ``layers``, an ``nn.ModuleList`` or ``nn.ModuleDict``.
        mode: ``full`` keeps a block's inputs and runs its forward again in the backward. ``selective`` keeps the
            results of attention (`ATTENTION_OPS`) too, so that attention, with all it sends, runs once. ``none`` keeps
            everything.
        every: Only blocks 0, every, 2·every, … are treated; the others keep everything, on the device.
        save_matmuls: Of ``selective``: keep the results of matrix products as well.
        offload: Move what the treated blocks keep to the host (pinned, where it is not the device), and back for the
            backward: with ``none`` everything floating-point but parameters, else the inputs of blocks. What
            ``selective`` keeps beside them stays on the device.

    Raises:
        ValueError: If a name or number is unknown, ``model.layers`` does not hold the blocks, or one of them is wrapped
            already.
    """
    blocks = _checked_blocks(model, mode, every)
    if save_matmuls and mode != "selective":
        raise ValueError(f"save_matmuls is an option of mode='selective', got mode={mode!r}; leave it out")
    options: dict[str, Any] = {}
    if mode == "selective":
        saved = ATTENTION_OPS + (MATMUL_OPS if save_matmuls else ())
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, functools.partial(_policy, saved)
        )
    for _, original in blocks[::every]:
        block = original
        if mode == "full":
            block = RecomputedBlock(block)
        elif mode == "selective":
            block = checkpoint_wrapper(block, **options)
        if offload:
            block = OffloadWrapper(block)
        layers = cast(Any, model.layers)
        for key, other in list(layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)):
            if other is original:
                layers[key] = block


def _checked_blocks(model: nn.Module, mode: str, every: int) -> list[tuple[Any, nn.Module]]:
    """Each block with its key in ``model.layers``."""
    if mode not in MODES:
        raise ValueError(f"activation checkpointing mode must be one of {', '.join(MODES)}, got {mode!r}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be an integer of at least 1, got {every!r}; 1 treats every block")
    blocks = named_blocks(model, "apply_activation_checkpointing", "wrap blocks by torch's checkpoint_wrapper")
    for name, block in blocks:
        for inner_name, module in block.named_modules():
            if isinstance(module, ActivationWrapper):
                where = f"model.layers[{name!r}]" + (f".{inner_name}" if inner_name else "")
                raise ValueError(
                    f"{where} is wrapped for checkpointing or offload already ({type(module).__name__}); call "
                    "apply_activation_checkpointing once, or leave that wrapper out"
                )
    return blocks


def _policy(saved: tuple[Any, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


class RecomputedBlock(CheckpointWrapper):
    """A block that keeps its inputs and runs again in the backward."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the block inside. With the checkpoint in a graph of DTensors, torch 2.13 saves their mesh and fails.

        A selective one has to be in the graph: outside, it could not tell the graph's ops apart.
        """
        self._checkpoint_wrapped_module.compile(*args, **kwargs)


class OffloadWrapper(ActivationWrapper):
    """Keep what autograd saves of a block's floating-point tensors on the host; parameters stay where they are.

    Only the innermost hooks are asked about a saved tensor. What is copied here holds its contents for good, also when
    it is a buffer that a context has cut; about everything else the hooks around are asked.
    """

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own. Never in a graph; what it calls may be."""
        around: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        kept = {storage for x in self.parameters() for storage in _storages(x)}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(_to_host, kept, around and around[0]), functools.partial(_from_host, around and around[1])
        )
        with hooks:
            return self._checkpoint_wrapped_module(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the block inside: the hooks stay out of the graph, and see what the graph saves."""
        self._checkpoint_wrapped_module.compile(*args, **kwargs)


def _to_host(kept: set[int], pack_around: Callable[[Tensor], Any] | None, x: Tensor) -> tuple[str, Any]:
    if x.is_floating_point() and x.layout == torch.strided and kept.isdisjoint(_storages(x)):
        if type(x) is Tensor:
            return "host", (_host_copy(x), x.device)
        if is_dtensor(x) and hasattr(x, "redistribute"):
            spec = x.device_mesh, x.placements, x.shape, x.stride()  # type: ignore[attr-defined]
            return "dtensor", (_host_copy(x._local_tensor), x.device, *spec)  # type: ignore[attr-defined]
    return "device", x if pack_around is None else pack_around(x)


def _from_host(unpack_around: Callable[[Any], Tensor] | None, packed: tuple[str, Any]) -> Tensor:
    kind, content = packed
    match kind:
        case "host":
            copy, device = content
            return copy.to(device, non_blocking=True)
        case "dtensor":
            from torch.distributed.tensor import DTensor

            copy, device, mesh, placements, shape, stride = content
            local = copy.to(device, non_blocking=True)
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        case _:
            return content if unpack_around is None else unpack_around(content)


def _host_copy(x: Tensor) -> Tensor:
    """A copy on the host; by the device's own stream where that is another, so nothing waits."""
    if x.device.type == "cpu":
        return x.detach().clone()
    copy = torch.empty_like(x, device="cpu", pin_memory=True)
    return copy.copy_(x.detach(), non_blocking=True)


def _storages(x: Tensor) -> Iterable[int]:
    local = x._local_tensor if is_dtensor(x) else x  # type: ignore[attr-defined]
    return (local.untyped_storage()._cdata,)
