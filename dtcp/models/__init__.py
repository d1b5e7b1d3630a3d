"""Models that call ``F.scaled_dot_product_attention`` and know nothing of parallelism.

``model(tokens, positions)`` with explicit global positions, so the sequence may be cut in any order; everything but
``layers.*.attention.sdpa`` (``attention.inner_attention.sdpa`` in torchtitan's) works on each position alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from dtcp.models.gpt import GPT, GPTConfig
from dtcp.models.llama import Llama, LlamaConfig
from dtcp.models.presets import PRESETS
from dtcp.models.rope import RopeScaling
from dtcp.models.titan_config import TitanConfig, build_titan
from dtcp.models.transformers_config import HFConfig, ResolvedHFConfig, build_transformers

if TYPE_CHECKING:
    from dtcp.models.titan import TitanDecoder
    from dtcp.models.transformers_model import TransformersModel

__all__ = [
    "GPT",
    "PRESETS",
    "GPTConfig",
    "HFConfig",
    "Llama",
    "LlamaConfig",
    "ModelConfig",
    "ResolvedHFConfig",
    "RopeScaling",
    "TitanConfig",
    "build_model",
    "model_config",
]

ModelConfig = GPTConfig | LlamaConfig | TitanConfig | ResolvedHFConfig


def model_config(config_or_name: ModelConfig | HFConfig | str, **overrides: Any) -> ModelConfig:
    """Return a config with fields replaced.

    Args:
        config_or_name: A config, or the name of one in ``PRESETS``.
        overrides: Fields of the config; ``rope_scaling`` may be a mapping.

    Returns:
        The config; of a ``titan_*`` model with torchtitan's numbers in place of None, which loads torchtitan; of ``hf``
        what its ``config.json`` says, which loads transformers.

    Raises:
        ValueError: If the name or a field does not exist, or the sizes do not fit each other.
    """
    config: ModelConfig | HFConfig | str = config_or_name
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"there is no model {config!r}{_nearest(config, PRESETS)}; models: {', '.join(PRESETS)}")
        config = PRESETS[config]
    names = [field.name for field in fields(config)]
    for name in overrides:
        if name not in names:
            raise ValueError(
                f"{type(config).__name__} has no field {name!r}{_nearest(name, names)}; fields: {', '.join(names)}"
            )
    scaling = overrides.get("rope_scaling")
    if isinstance(scaling, Mapping):
        overrides["rope_scaling"] = RopeScaling(**scaling)
    config = replace(config, **overrides)
    return config.resolved() if isinstance(config, TitanConfig | HFConfig) else config


def build_model(
    config_or_name: ModelConfig | HFConfig | str,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> GPT | Llama | TitanDecoder | TransformersModel:
    """Build a model with initial weights, or on "meta" without any.

    Args:
        config_or_name: A config, or the name of one in ``PRESETS``.
        device: Where the parameters live; None is torch's current default device. On "meta", shard first, then
            ``to_empty`` and ``init_weights(seed)``: the values are the same as without sharding.
        seed: Of the initial weights.
        overrides: See `model_config`.

    Returns:
        Model in training mode, parameters in torch's default dtype.

    Raises:
        ValueError: See `model_config`.
    """
    config = model_config(config_or_name, **overrides)
    with torch.device("meta"):
        model = _build(config)
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed)
    return model


def _build(config: ModelConfig) -> GPT | Llama | TitanDecoder | TransformersModel:
    match config:
        case GPTConfig():
            return GPT(config)
        case LlamaConfig():
            return Llama(config)
        case TitanConfig():
            return build_titan(config)
        case ResolvedHFConfig():
            return build_transformers(config)


def _nearest(name: str, names: Any) -> str:
    match = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
