"""The blocks of a model: what activation checkpointing, compilation and FSDP2 take one by one."""

from __future__ import annotations

from typing import Any

from torch import nn


def named_blocks(model: nn.Module, caller: str, instead: str) -> list[tuple[Any, nn.Module]]:
    """Return each block with its key in ``model.layers``.

    Args:
        caller: Who asks, for the message.
        instead: What to do if the blocks cannot be put into ``model.layers``, for the message.

    Raises:
        ValueError: If ``model.layers`` is no ``nn.ModuleList`` or ``nn.ModuleDict``.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"{caller} wants the blocks of {type(model).__name__} in model.layers, a ModuleList or ModuleDict, "
            f"got {type(layers).__name__}; rename it, or {instead}"
        )
    return list(layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers))
