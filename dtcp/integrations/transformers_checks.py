"""What of a transformers model would come out wrong, without an error, on a part of a sequence."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dtcp.mesh import ParallelDims

_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# What layers pass on to every attention, and what changes nothing in it: windows are in the mask already.
_HARMLESS = {
    "position_ids", "cache_position", "sliding_window", "is_causal", "use_cache", "output_attentions", "cache",
    "output_hidden_states", "output_router_logits", "num_items_in_batch", "return_dict", "position_embeddings",
    "past_key_values", "layer_idx", "attention_chunk_size", "deterministic", "training",
}  # fmt: skip
# Compared with transformers' own attention by dtcp's tests.
TESTED = {
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo2", "phi3", "gpt2", "opt", "bert",
    "llama4_text",
}  # fmt: skip
# Models that mix the tokens of a row by plain operations, which no module shows.
_MIX_BY_OPERATIONS = {"mobilebert": "puts the embeddings of neighbouring tokens side by side (trigram_input)"}
# Heads that look at one token of the row, its first or last.
_ONE_TOKEN_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.BatchNorm1d)


def configs_of(config: Any) -> Iterator[Any]:
    """The config, and those inside of it."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        inner = getattr(config, name, None)
        if inner is not None and inner is not config:
            yield from configs_of(inner)


def check_config(base: Any, implementation: str, dims: ParallelDims) -> None:
    """Raise unless every part of the model attends by dtcp, and all of it can be computed on a cut sequence."""
    name = type(base).__name__
    if dims.tp * dims.pp > 1:
        raise NotImplementedError(
            f"transformers' models have cp and dp here, got tp={dims.tp} and pp={dims.pp}; use tp=1 and pp=1"
        )
    for config in configs_of(base.config):
        if config._attn_implementation != implementation:
            raise ValueError(
                f"{name} attends by {config._attn_implementation!r}, which would see this rank's tokens only; call "
                f"model.set_attn_implementation({implementation!r}), or load it with that attn_implementation"
            )
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            raise NotImplementedError(f"{name} attends to another sequence (encoder-decoder), which is not available")
        others = {*(getattr(config, "layer_types", None) or ())} - {*_ATTENTION_TYPES}
        if others:
            raise NotImplementedError(
                f"{name} has layers of the type {sorted(others)[0]!r}, which dtcp does not know; it knows "
                f"{', '.join(_ATTENTION_TYPES)}"
            )
        if getattr(config, "output_router_logits", False):
            raise NotImplementedError(
                f"{name} adds a loss of its router, a mean over this rank's tokens; set output_router_logits=False"
            )
        if base.training and any(getattr(config, key, None) for key in ("layerdrop", "encoder_layerdrop")):
            raise NotImplementedError(f"{name} skips layers at random, others on each rank; set layerdrop=0.0")
        if getattr(config, "token_dropout", False):
            raise NotImplementedError(
                f"{name} scales embeddings by the masked tokens of the row, of which a rank has some only; set "
                "token_dropout=False"
            )


def check_modules(base: nn.Module) -> None:
    """Raise if a module mixes the tokens of a row otherwise than by attention, or looks at one of them."""
    name = type(base).__name__
    if why := _MIX_BY_OPERATIONS.get(getattr(getattr(base, "config", None), "model_type", "")):
        raise NotImplementedError(f"{name} {why}, of which a rank has some only; such models are not available")
    if name.endswith(_ONE_TOKEN_HEADS):
        raise NotImplementedError(
            f"{name} looks at the first or last token of a row, which is on one rank; take the hidden states of the "
            "model inside of it, and dtcp.unshard"
        )
    for path, module in base.named_modules():
        if path.rpartition(".")[2] == "pooler":
            raise NotImplementedError(
                f"{path} of {name} looks at the first token of a row, which is on one rank; build the model with "
                "add_pooling_layer=False"
            )
        if isinstance(module, _MIXERS):
            raise NotImplementedError(
                f"{path} ({type(module).__name__}) of {name} mixes neighbouring tokens, of which a rank "
                "has some only; such models are not available"
            )


def check_rotary(base: Any, num_positions: int) -> None:
    """Raise if rotary angles depend on the longest position in the batch, of which each rank would see another."""
    for config in configs_of(base.config):
        for rope in _rope_parameters(config):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in ("dynamic", "longrope"):
                continue
            trained = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = int(trained or config.max_position_embeddings)
            if num_positions > limit:
                raise NotImplementedError(
                    f"rotary angles of the kind {kind!r} change beyond {limit} positions, got {num_positions}, by the "
                    "longest position that each rank has of its own; use shorter sequences, or another kind (yarn, "
                    "llama3, linear)"
                )


def check_temperature(base: Any, seq_len: int) -> None:
    """Raise if queries are scaled by their place in the row, which Llama 4 counts anew in each part of it."""
    for config in configs_of(base.config):
        scale = getattr(config, "floor_scale", None)
        if getattr(config, "attn_temperature_tuning", False) and scale and seq_len >= scale:
            raise NotImplementedError(
                f"{type(base).__name__} scales attention by the place of a token in the row from {int(scale)} tokens "
                f"on, got {seq_len}, and counts places in a rank's part; use shorter rows, or a model with "
                "attn_temperature_tuning=False"
            )


def _rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Of each kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    inner = [x for x in found.values() if isinstance(x, Mapping)]
    return inner or [found]


def shifts_labels(base: nn.Module) -> bool:
    """Whether the model predicts the next token.

    Raises:
        ValueError: If its name does not tell.
    """
    name = type(base).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return True
    if name.endswith(("ForMaskedLM", "ForTokenClassification")):
        return False
    raise ValueError(
        f"does {name} predict the next token? Say shift_labels=True (then labels are shifted before the cut) or "
        "shift_labels=False (they are of the tokens themselves)"
    )


def has_shifted_labels(tokens: Tensor, labels: Tensor) -> bool:
    """Whether the label of every token is the next one, and not the token itself."""
    here, following = labels[:, :-1], tokens[:, 1:]
    is_valid = here >= 0
    if int(is_valid.sum()) < 2:
        return False
    is_next = bool(((here == following) | ~is_valid).all())
    is_itself = bool(((here == tokens[:, :-1]) | ~is_valid).all())
    return is_next and not is_itself


def refuse_kwargs(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise if an attention is asked for something that is not known here."""
    if kwargs.get("output_attentions"):
        raise NotImplementedError(f"{name}: attention weights are never made; use output_attentions=False")
    for key, given in kwargs.items():
        if given is None or key in _HARMLESS:
            continue
        if isinstance(given, (bool, int, float)) and not given:
            continue
        shown = tuple(given.shape) if isinstance(given, torch.Tensor) else repr(given)
        raise NotImplementedError(
            f"{name} gives its attention {key}={shown}, which dtcp's does not know; it knows sinks (s_aux) and softcap"
        )


def warn_of_untested(model_type: str) -> None:
    """Warn, once for each kind of model, that nobody has compared it."""
    if model_type not in TESTED:
        _warn(model_type)


@functools.cache
def _warn(model_type: str) -> None:
    warnings.warn(
        f"dtcp's tests have not compared models of the type {model_type!r} with transformers' own attention: what they "
        "mask is read as for others, but compare the loss of a short batch with one rank's before a long run",
        stacklevel=5,
    )
