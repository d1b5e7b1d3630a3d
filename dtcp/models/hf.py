"""Weights of a Llama as Hugging Face has them: safetensors files with its names, and ``config.json``.

Hugging Face's Llama has no windows and no sinks: one that has is written as another ``model_type``, which transformers
refuses by name instead of leaving them out. Names and keys are those of its GPT-OSS.

No tensor changes on the way: both pair rotary dims d and d + D/2, and both keep linear weights as (out, in). No
parallel code: a sharded parameter is asked for its whole value, or keeps its part of one.
"""

import json
import re
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtcp.models.gpt import GPTConfig
from dtcp.models.init import assign, plain_name
from dtcp.models.llama import LlamaConfig
from dtcp.models.rope import RopeScaling
from dtcp.models.safetensors_files import CONFIG_FILE, MAX_FILE_BYTES, open_tensors, write_tensors

_OUTSIDE_BLOCKS = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",  # not there when tied
}
_IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_weights": "tie_word_embeddings",
}
_SCALING_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
# What is written beside, where a model has any of it; other keys of a Llama's own ``config.json`` mean nothing.
_MASKED_FIELDS = {
    "window_size": "sliding_window",
    "full_attention_every": "full_attention_every",
    "sinks": "attention_sinks",
}
_MASKED_MODEL_TYPE = "dtcp_llama"
# What Hugging Face's Llama can be and ours is not: the only value that means the same.
_ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}


def hf_name(name: str) -> str:
    """Return Hugging Face's name of the parameter called ``name``."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    if match := re.fullmatch(r"layers\.(\d+)\.attention\.sinks", name):
        return f"model.layers.{match[1]}.self_attn.sinks"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    assert match and match[2] in _IN_BLOCK, name
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def to_hf_config(config: LlamaConfig | GPTConfig, *, max_seq_len: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Args:
        config: Of a Llama.
        max_seq_len: Tokens that the model is meant for; ours knows no such bound.
        dtype: Of the weights.

    Raises:
        NotImplementedError: For another model than a Llama.
    """
    config = _as_llama(config)
    values = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    scaling = None
    if config.rope_scaling is not None:
        given = asdict(config.rope_scaling)
        scaling = {"rope_type": "llama3"} | {theirs: given[ours] for ours, theirs in _SCALING_FIELDS.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        **_ONLY,
        **values,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "initializer_range": config.init_std,
        "attention_dropout": config.attention_dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_masked_content(config),
    }


def _masked_content(config: LlamaConfig) -> dict[str, Any]:
    """What ``config.json`` says of windows and sinks; nothing without."""
    if config.window_size is None and not config.sinks:
        return {}
    windows = [config.window_of(layer)[0] for layer in range(config.num_layers)]
    return {
        "model_type": _MASKED_MODEL_TYPE,
        "architectures": ["DtcpLlama"],
        "layer_types": ["full_attention" if left < 0 else "sliding_attention" for left in windows],
        **{theirs: getattr(config, ours) for ours, theirs in _MASKED_FIELDS.items()},
    }


def from_hf_config(content: dict[str, Any]) -> LlamaConfig:
    """Return the sizes that a ``config.json`` of a Llama stands for.

    Raises:
        ValueError: If a key is missing, or asks for what our Llama is not; names key, value and what is allowed.
    """
    masked: dict[str, Any] = {}
    if content.get("model_type") == _MASKED_MODEL_TYPE:
        masked = {ours: content[theirs] for ours, theirs in _MASKED_FIELDS.items() if theirs in content}
        content = {**content, "model_type": "llama"}
    for key, only in _ONLY.items():
        if content.get(key, only) != only or (key == "model_type" and key not in content):
            raise ValueError(f"{CONFIG_FILE} has {key}={content.get(key)!r}; only {key}={only!r} can be read")
    content = {"num_key_value_heads": content.get("num_attention_heads"), "tie_word_embeddings": False, **content}
    missing = [theirs for theirs in _FIELDS.values() if theirs not in content]
    if missing:
        raise ValueError(f"{CONFIG_FILE} has no {', '.join(missing)}; it is not that of a Llama")
    rope = content.get("rope_parameters") or {}  # where transformers 5 keeps both
    theta = rope.get("rope_theta", content.get("rope_theta", 10_000.0))
    scaling = _rope_scaling(rope or content.get("rope_scaling") or {})
    values = {ours: content[theirs] for ours, theirs in _FIELDS.items()}
    config = LlamaConfig(**values, rope_theta=float(theta), rope_scaling=scaling, **masked)
    if content.get("head_dim") not in (None, config.head_dim):
        raise ValueError(
            f"{CONFIG_FILE} has head_dim={content['head_dim']}; only hidden_size / num_attention_heads = "
            f"{config.head_dim} can be read"
        )
    return config


def _rope_scaling(given: dict[str, Any]) -> RopeScaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{CONFIG_FILE} has rope_type={kind!r}; only 'llama3' and 'default' can be read")
    return RopeScaling(**{ours: given[theirs] for ours, theirs in _SCALING_FIELDS.items() if theirs in given})


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    max_seq_len: int,
    dtype: torch.dtype | None = None,
    is_writer: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the weights of a Llama and its ``config.json``, for Hugging Face. Collective if parameters are sharded.

    Args:
        model: A `Llama`; its parameters may be DTensors and have wrappers around them.
        folder: Made if missing; files of the same names are overwritten.
        max_seq_len: See `to_hf_config`.
        dtype: What the weights are rounded to; None keeps theirs.
        is_writer: Whether this rank writes; all ranks call, one is the writer.
        max_file_bytes: The weights go into several files where they are more; memory holds one file's.

    Raises:
        NotImplementedError: For another model than a Llama.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    dtype = next(iter(parameters.values())).dtype if dtype is None else dtype
    content = to_hf_config(model.config, max_seq_len=max_seq_len, dtype=dtype)  # type: ignore[arg-type]
    by_name = {hf_name(name): parameter for name, parameter in parameters.items()}

    def read(names: list[str]) -> dict[str, Tensor]:
        return {name: _whole(by_name[name]) for name in names}  # on every rank, in the same order

    shapes = {name: parameter.shape for name, parameter in by_name.items()}
    write_tensors(folder, shapes, read, content, dtype=dtype, is_writer=is_writer, max_file_bytes=max_file_bytes)


@torch.no_grad()
def load_safetensors(model: nn.Module, folder: str | Path, *, whole: nn.Module | None = None) -> None:
    """Fill the parameters of a Llama, sharded or not, from a folder that Hugging Face or `save_safetensors` wrote.

    Each rank reads one whole tensor after the other and keeps its part; no communication. Values are rounded to the
    parameters' dtype.

    Args:
        model: A `Llama` with storage: not on the meta device.
        whole: The Llama whose stages ``model`` holds some of, where that is a `Pipeline`; its values are not read.
        folder: With ``config.json`` and ``model.safetensors``, or ``model.safetensors.index.json`` and its files.

    Raises:
        NotImplementedError: For another model than a Llama.
        ValueError: If files or tensors are missing, unknown or of another shape, or the configuration says another
            model than this one; names them.
    """
    folder = Path(folder).expanduser()
    whole = model if whole is None else whole
    check_hf_config(whole.config, folder)
    parameters = {hf_name(plain_name(name)): parameter for name, parameter in model.named_parameters()}
    with ExitStack() as stack:
        found = dict(open_tensors(folder, stack))
        _check_names(folder, {hf_name(plain_name(name)) for name, _ in whole.named_parameters()}, found)
        for name, parameter in parameters.items():
            value = found[name].get_tensor(name)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{folder}: {name} is {tuple(value.shape)}, the model has {tuple(parameter.shape)}; set the "
                    "model's sizes to those of the folder"
                )
            assign(parameter, value.to(parameter.dtype))


def check_hf_config(config: object, folder: Path) -> None:
    """Raise ``ValueError`` if the ``config.json`` in ``folder`` is missing or describes another model than ours."""
    config = _as_llama(config)
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}; give a folder with a model in Hugging Face's form")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; get the file again") from error
    theirs, ours = asdict(from_hf_config(content)), asdict(config)
    differing = [
        f"{key} is {theirs[key]} there and {ours[key]} here"
        for key in theirs
        if key not in ("init_std", "qk_init_scale", "attention_dropout") and theirs[key] != ours[key]
    ]
    if differing:
        raise ValueError(f"{folder} holds another model: {'; '.join(differing)}; set the model's fields to those there")


def _as_llama(config: object) -> LlamaConfig:
    if not isinstance(config, LlamaConfig):
        raise NotImplementedError(
            f"weights in Hugging Face's form exist for llama models only, got {type(config).__name__}; use a llama_* "
            "model, or a checkpoint of the job"
        )
    return config


def _check_names(folder: Path, wanted: set[str], found: dict[str, Any]) -> None:
    unknown = {name for name in found if name not in wanted and not name.endswith("rotary_emb.inv_freq")}
    if "lm_head.weight" in unknown:  # written by some although the head is tied
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        if embedding in found and torch.equal(found[embedding].get_tensor(embedding), found[head].get_tensor(head)):
            unknown.remove(head)
    missing = wanted - set(found)
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise ValueError(
                f"{folder} {what} {len(names)} tensors, such as {min(names)}; give the files of the model that "
                f"{CONFIG_FILE} describes"
            )


def _whole(parameter: Tensor) -> Tensor:
    """The whole value of a parameter; of a DTensor too, whose class is not imported here."""
    full_tensor = getattr(parameter, "full_tensor", None)
    return parameter.detach() if full_tensor is None else full_tensor().detach()
