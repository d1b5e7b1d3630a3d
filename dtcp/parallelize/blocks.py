"""The blocks of a model: what activation checkpointing, compilation and FSDP2 take one by one."""

from __future__ import annotations

from typing import Any

from torch import nn


def named_blocks(model: nn.Module, caller: str, instead: str) -> list[tuple[Any, nn.Module]]:
    """Return each block with its key in ``model.layers``; one that is there several times, once.

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
    found: dict[int, tuple[Any, nn.Module]] = {}
    for key, block in layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers):
        found.setdefault(id(block), (key, block))
    return list(found.values())


def is_used_again(model: nn.Module) -> bool:
    """Whether a block is in ``model.layers`` several times, as those of an ALBERT are."""
    layers: Any = model.layers
    blocks = list(layers.values() if isinstance(layers, nn.ModuleDict) else layers)
    return len({id(block) for block in blocks}) < len(blocks)
