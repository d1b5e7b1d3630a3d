"""Which causal language model of transformers to build; transformers itself is loaded when a size is asked for."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtcp.models.config import check_positive, training_flops_per_token
from dtcp.models.safetensors_files import CONFIG_FILE

if TYPE_CHECKING:
    from dtcp.models.transformers_model import TransformersModel

# What a config.json says beside what the model is; a job that goes on may have others.
_NOT_THE_MODEL = {
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "output_attentions", "output_hidden_states",
    "_attn_implementation", "attn_implementation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A causal language model of transformers, by its ``config.json``.

    Attributes:
        path: A folder with a ``config.json``, or that file.
        vocab_size: Rows of the embedding; None is the file's.
        num_layers: The first so many of its blocks; None is all.
        overrides: Keys of ``config.json`` with other values, ``{sliding_window:128}`` say; None is no others.
    """

    path: str | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    overrides: Any = None  # a mapping: hydra would take no new keys for one of its types

    def resolved(self) -> ResolvedHFConfig:
        """Return what the file says, with the changes. Loads transformers.

        Raises:
            ValueError: If there is no such file, it is of no model of transformers, or a number makes no sense.
            NotImplementedError: If the model predicts no next token.
        """
        if self.path is None:
            raise ValueError(
                "model=hf needs the folder or config.json of a model of transformers, got model.path=null; set "
                "model.path=FOLDER"
            )
        if not isinstance(self.overrides, Mapping | None):
            raise ValueError(
                f"model.overrides has to be keys of {CONFIG_FILE} with values, got {self.overrides!r}; write "
                "model.overrides={key:value}"
            )
        content = read_config(self.path)
        kind = _kind_of(content, self.path)
        changes = dict(self.overrides or {})
        names = getattr(kind, "attribute_map", {})
        for name, value in (("vocab_size", self.vocab_size), ("num_hidden_layers", self.num_layers)):
            if value is not None:
                check_positive(**{name: value})
                changes[names.get(name, name)] = value
        if self.num_layers is not None:
            depth = content.get(names.get("num_hidden_layers", "num_hidden_layers"))
            if depth is not None and self.num_layers > depth:
                raise ValueError(f"{self.path} has {depth} layers, got model.num_layers={self.num_layers}")
            by_layer = {name: x for name, x in content.items() if isinstance(x, list) and len(x) == depth}
            changes = {name: x[: self.num_layers] for name, x in by_layer.items()} | changes
        text = json.dumps(content | changes, sort_keys=True)
        if json.loads(text).get("quantization_config") is not None:
            raise NotImplementedError(
                f"{self.path} is of a quantized model, which is not trained here; set "
                "+model.overrides.quantization_config=null, and give weights that are not quantized"
            )
        return ResolvedHFConfig(text, tuple(sorted(changes)))


@dataclass(frozen=True, slots=True)
class ResolvedHFConfig:
    """The whole content of a ``config.json``.

    Attributes:
        text: As JSON, keys sorted.
        changed: Keys that are not as in the file.
    """

    text: str
    changed: tuple[str, ...] = ()

    @property
    def content(self) -> dict[str, Any]:
        """By key."""
        return dict(json.loads(self.text))

    @property
    def description(self) -> dict[str, Any]:
        """The keys that say what is trained; others may differ where a job goes on."""
        return describe_content(self.content)

    @property
    def title(self) -> str:
        """What a job calls it."""
        return f"hf {type(on_meta(self).hf).__name__}"

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._text_config.vocab_size)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return int(self._text_config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return int(getattr(self._text_config, "num_key_value_heads", None) or self.num_heads)

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""
        return sum(parameter.numel() for parameter in on_meta(self).parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward operations per token; the formula is `training_flops_per_token`'s.

        Of experts those count that a token goes to.
        """
        return _flops_per_token(self, seq_len)

    def check_seq_len(self, seq_len: int) -> None:
        """Raise if the model cannot take, or not cut, a global sequence of ``seq_len`` tokens."""
        check_positive(seq_len=seq_len)
        on_meta(self).check_seq_len(seq_len)

    def peaked(self, spread: float) -> dict[str, float]:
        """Return the key of ``config.json`` that makes attention of initial weights peaked, and its value.

        Args:
            spread: Standard deviation of a query's elements after the norm.
        """
        text = self._text_config
        key = "initializer_range" if hasattr(text, "initializer_range") else "init_std"
        return {key: spread / text.hidden_size**0.5}

    @property
    def _text_config(self) -> Any:
        return transformers_config(self).get_text_config()


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the content of a ``config.json``.

    Args:
        path: The file, or its folder.

    Raises:
        ValueError: If it is not there or no JSON object.
    """
    file = Path(path).expanduser()
    file = file / CONFIG_FILE if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"there is no {file}; model.path has to be the folder of a model of transformers, or its file")
    try:
        content = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}; give the {CONFIG_FILE} of a model of transformers") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__} and no object; give the {CONFIG_FILE} of a model")
    return dict(content)


def describe_content(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say what the model is."""
    return {name: value for name, value in content.items() if name not in _NOT_THE_MODEL}


@functools.lru_cache
def transformers_config(config: ResolvedHFConfig) -> Any:
    """transformers' own config object."""
    content = config.content
    try:
        return _kind_of(content, CONFIG_FILE).from_dict(content)
    except Exception as error:  # validation of transformers raises its own kinds
        raise ValueError(f"transformers cannot read this {CONFIG_FILE}: {error}") from error


@functools.lru_cache
def on_meta(config: ResolvedHFConfig) -> TransformersModel:
    """The model without weights, to ask for its sizes."""
    with torch.device("meta"):
        return build_transformers(config)


def build_transformers(config: ResolvedHFConfig) -> TransformersModel:
    """Return the model that ``config`` describes, on the current default device."""
    from dtcp.models.transformers_model import TransformersModel

    return TransformersModel(config, transformers_config(config))


def is_transformers_model(model: nn.Module) -> bool:
    """Whether ``model`` is a `TransformersModel`, without loading transformers to find out."""
    module = sys.modules.get("dtcp.models.transformers_model")
    return module is not None and isinstance(model, module.TransformersModel)


def _kind_of(content: Mapping[str, Any], path: str) -> Any:
    """The class of its config."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError as error:
        raise ValueError("model=hf needs transformers; pip install 'dtcp[hf]'") from error
    name = content.get("model_type")
    if name not in CONFIG_MAPPING:
        raise ValueError(
            f"{path} has model_type={name!r}, which transformers does not know; give the {CONFIG_FILE} of one of its "
            "models, or a newer transformers (code that comes with a model is not run)"
        )
    kind = CONFIG_MAPPING[name]
    heads = content.get("architectures") or []
    others = [head for head in heads if not head.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))]
    # A folder of the model without a head (LlamaModel) is that of the one with a head.
    others = [head for head in others if not head.endswith("Model") or kind not in MODEL_FOR_CAUSAL_LM_MAPPING]
    if content.get("is_encoder_decoder") or kind not in MODEL_FOR_CAUSAL_LM_MAPPING or others:
        raise NotImplementedError(
            f"{path} is of {', '.join(heads) or name}, and the job trains models that predict the next token "
            "(…ForCausalLM); encoders and encoder-decoders are for dtcp.integrations.transformers.prepare in a loop of "
            "your own"
        )
    return kind


@functools.lru_cache
def _flops_per_token(config: ResolvedHFConfig, seq_len: int) -> int:
    text, model = config._text_config, on_meta(config)
    num_experts = next((x for n in ("num_local_experts", "num_experts") if (x := getattr(text, n, None))), 1)
    share = (getattr(text, "num_experts_per_tok", None) or 1) / num_experts
    matmuls = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not model.is_lookup(name):
            matmuls += parameter.numel() * (share if "experts" in name.split(".") and num_experts > 1 else 1.0)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // config.num_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    windows = {
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    per_layer = (
        training_flops_per_token(0, 1, config.num_heads * head_dim, seq_len, window_size=windows.get(kind))
        for kind in kinds
    )
    return training_flops_per_token(int(matmuls), 0, 0, seq_len) + sum(per_layer)
