"""Which of torchtitan's language models to build; torchtitan itself is loaded when a size is asked for."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtcp.models.config import check_positive
from dtcp.models.inputs import table_error

if TYPE_CHECKING:
    from dtcp.models.titan import TitanDecoder


@dataclass(frozen=True, slots=True)
class TitanConfig:
    """A model of torchtitan's registries.

    Attributes:
        family: "llama3", "qwen3" or "gpt_oss".
        flavor: Its name in the family's registry, as ``torchtitan.models.llama3.llama3_configs``, where the sizes are.
        vocab_size: Rows of the embedding; None is the registry's.
        num_layers: The first so many of its blocks; None is all.
        max_seq_len: Rows of the rotary table, the longest global sequence in tokens; None is the registry's.
        qk_init_scale: Extra factor on the initial query and key weights; above 1 attention starts peaked. Where queries
            and keys are normed (Qwen 3), on the gain of the queries' norm alone.
    """

    family: str
    flavor: str
    vocab_size: int | None = None
    num_layers: int | None = None
    max_seq_len: int | None = None
    qk_init_scale: float = 1.0

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("vocab_size", "num_layers", "max_seq_len")}
        check_positive(**{name: number for name, number in numbers.items() if number is not None})

    def resolved(self) -> TitanConfig:
        """Return the same with torchtitan's own numbers for those that are None.

        Raises:
            ValueError: If torchtitan has no such flavor, or fewer layers than asked for.
        """
        titan = self.to_titan()
        return replace(self, vocab_size=titan.vocab_size, num_layers=len(titan.layers), max_seq_len=titan.max_seq_len)

    def to_titan(self) -> Any:
        """Return torchtitan's own config, with dtcp's attention as inner attention; see `resolved`."""
        from dtcp.models.titan_registry import make_titan_config

        return make_titan_config(
            self.family,
            self.flavor,
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            max_seq_len=self.max_seq_len,
        )

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return int(self.to_titan().dim)

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""
        return _on_meta(self).num_parameters

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward operations per token; the formula is `training_flops_per_token`'s."""
        return _on_meta(self).flops_per_token(seq_len)

    def check_seq_len(self, seq_len: int) -> None:
        """Raise ``ValueError`` if the rotary table has fewer rows than a global sequence of ``seq_len`` tokens."""
        check_positive(seq_len=seq_len)
        rows = self.to_titan().max_seq_len
        if seq_len > rows:
            raise table_error(seq_len, rows)


def is_titan(model: nn.Module) -> bool:
    """Whether ``model`` is a `TitanDecoder`, without loading torchtitan to find out."""
    module = sys.modules.get("dtcp.models.titan")
    return module is not None and isinstance(model, module.TitanDecoder)


def has_experts(model: nn.Module) -> bool:
    """Whether ``model`` is a `TitanDecoder` with a mixture of experts in a layer."""
    config: Any = model.config if is_titan(model) else None
    return config is not None and any(layer.moe is not None for layer in config.layers)


def build_titan(config: TitanConfig) -> TitanDecoder:
    """Return the model that ``config`` describes, on the current default device."""
    from dtcp.models.titan import TitanDecoder

    return TitanDecoder(config.to_titan(), qk_init_scale=config.qk_init_scale)


@functools.lru_cache
def _on_meta(config: TitanConfig) -> TitanDecoder:
    """The model without weights, to ask for its sizes."""
    with torch.device("meta"):
        return build_titan(config)
