"""Small transformers models with peaked attention, and what they give by transformers' own eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dtcp

VOCAB = 61
_BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def _decoder(kind: str, text: str = "", **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        config = getattr(transformers, f"{kind}{text}Config")(**_BASE | more)
        return config, getattr(transformers, f"{kind}ForCausalLM")

    return make


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0,
    )  # fmt: skip
    return config, GPT2LMHeadModel


def _opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=128, word_embed_proj_dim=32,
    )  # fmt: skip
    return config, OPTForCausalLM


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return config, BertForMaskedLM


def _roberta() -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1,
    )  # fmt: skip
    return config, RobertaForMaskedLM


def _llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_BASE, attention_chunk_size=7, layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        intermediate_size_mlp=48, num_local_experts=2, attn_temperature_tuning=False,
    )  # fmt: skip
    return config, Llama4ForCausalLM


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _decoder("Llama"),
    "qwen3": _decoder("Qwen3"),
    "mistral with a window": _decoder("Mistral", sliding_window=6),
    "gemma2": _decoder("Gemma2", attn_logit_softcapping=3.0, **_ALTERNATING),
    "gemma3": _decoder("Gemma3", "Text", **_ALTERNATING),
    "gpt_oss": _decoder("GptOss", num_local_experts=4, num_experts_per_tok=2, **_ALTERNATING),
    "olmo2": _decoder("Olmo2"),
    "phi3": _decoder("Phi3", sliding_window=9),
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "llama4": _llama4,
}
# Which do not take positions that restart at 0, and so are compared by tests of their own.
OTHERS: dict[str, Callable[[], Any]] = {"roberta": _roberta}


def build(name: str, attn_implementation: str) -> Any:
    """The model ``name``, the same on every rank, with queries and keys so large that attention is peaked."""
    dtype = torch.float32 if name == "gpt_oss" else torch.float64  # whose experts know no float64
    config, kind = (MODELS | OTHERS)[name]()
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=attn_implementation).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.15)
            if "norm" in path or "ln_" in path or "LayerNorm" in path:
                parameter += 1.0
            if any(part in path for part in ("q_proj", "k_proj", "qkv_proj", "c_attn", "query", "key")):
                parameter *= 4
    return model


def make_batch(lengths: list[int], rows: int = 2) -> dict[str, Tensor]:
    """Tokens, labels without a few, and positions that restart with each document."""
    seq_len = sum(lengths)
    generator = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(3, VOCAB, (rows, seq_len), generator=generator)
    labels = torch.where(torch.rand(tokens.shape, generator=generator) < 0.2, -100, tokens)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": tokens, "labels": labels, "position_ids": positions.expand(rows, -1).contiguous()}


def is_encoder(model: nn.Module) -> bool:
    return type(model).__name__.startswith("Bert")


def eager_outcome(model: Any, batch: dict[str, Tensor], lengths: list[int]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits, loss, gradients) of one rank, by transformers' eager attention.

    Models that do not look at positions for documents, as OPT and BERT, run once for each document: what one sees of
    itself alone is what packing has to give.
    """
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pieces = []
    for start, length in zip(starts, lengths, strict=True):
        part = slice(start, start + length)
        pieces.append(model(input_ids=batch["input_ids"][:, part], position_ids=batch["position_ids"][:, part]).logits)
    logits = torch.cat(pieces, dim=1)
    documents = dtcp.Documents.from_lengths(lengths)
    labels = batch["labels"]
    if not is_encoder(model):
        labels = dtcp.shift_labels(labels, labels, documents)
    loss = dtcp.token_loss(logits, labels)
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), gradients
