"""Configs of torchtitan's registries, by the name of a family and a flavor."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.qwen3 import qwen3_configs

from dtcp.integrations.torchtitan import with_dtcp_attention

REGISTRIES = {
    "llama3": ("Llama 3", llama3_configs),
    "qwen3": ("Qwen 3", qwen3_configs),
    "gpt_oss": ("GPT-OSS", gptoss_configs),
}


def make_titan_config(
    family: str,
    flavor: str,
    *,
    vocab_size: int | None = None,
    num_layers: int | None = None,
    max_seq_len: int | None = None,
) -> Decoder.Config:
    """Return torchtitan's own config of a flavor, with dtcp's attention and the numbers given here.

    A mixture of experts comes without the bias by which torchtitan's optimizer balances their loads:
    ``load_balance_coeff=None``. Pad slots and recomputed blocks would be counted, and other ones on each mesh.

    Raises:
        ValueError: If torchtitan has no such family or flavor, or fewer layers than asked for.
    """
    if family not in REGISTRIES:
        raise ValueError(
            f"there is no family {family!r} of torchtitan's models here; families: {', '.join(REGISTRIES)}"
        )
    title, registry = REGISTRIES[family]
    if flavor not in registry:
        raise ValueError(f"torchtitan has no {title} flavor {flavor!r}; flavors: {', '.join(registry)}")
    build = registry[flavor]
    # Of the backends, those that a CPU can make a config of; the attention is replaced.
    backends = {"attn_backend": "varlen", "moe_comm_backend": "standard"}
    if "moe_comm_backend" not in inspect.signature(build).parameters:
        del backends["moe_comm_backend"]
    titan = with_dtcp_attention(build(**backends))
    if num_layers is not None:
        if num_layers > len(titan.layers):
            raise ValueError(
                f"torchtitan's {title} {flavor} has {len(titan.layers)} layers, got num_layers={num_layers}; use at "
                f"most those, or another flavor: {', '.join(registry)}"
            )
        titan.layers = titan.layers[:num_layers]
    for layer in titan.layers:  # which are copies already, and so are their attentions
        if max_seq_len is not None:
            layer.attention.rope = replace(layer.attention.rope, max_seq_len=max_seq_len)
        if layer.moe is not None:
            layer.moe = copy.copy(layer.moe)
            layer.moe.load_balance_coeff = None
    if vocab_size is not None:
        titan.vocab_size = vocab_size
        titan.tok_embeddings = replace(titan.tok_embeddings, num_embeddings=vocab_size)
        titan.lm_head = replace(titan.lm_head, out_features=vocab_size)
    return titan
