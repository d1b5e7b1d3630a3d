"""Small Llama 3s of torchtitan's own config classes, with what its debug model lacks: grouped keys, a tied head."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
    llama3_configs,
)

VOCAB_SIZE = 257  # never divides evenly; 256 bytes and the end of a document


def small_llama3(
    attn_backend: str = "varlen", tp_gemm_backend: str = "default", *, tied: bool = False, fused: bool = True
) -> Llama3Model.Config:
    """Width 64, 2 layers, 8 heads of which 2 share a key; the signature of torchtitan's registry, and more."""
    embedding_init: dict[str, Any] = {"weight": skip_param_init} if tied else _EMBEDDING_INIT
    return Llama3Model.Config(
        dim=64,
        vocab_size=VOCAB_SIZE,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB_SIZE, embedding_dim=64, param_init=embedding_init),
        norm=RMSNorm.Config(normalized_shape=64, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=64, out_features=VOCAB_SIZE, param_init=_output_linear_init(64)),
        layers=_build_llama3_layers(
            n_layers=2,
            dim=64,
            n_heads=8,
            n_kv_heads=4,
            hidden_dim=160,
            rope=ComplexRoPE.Config(dim=8, max_seq_len=256, theta=500000, scaling="llama"),
            fuse_qkv=fused,
            attn_backend=attn_backend,
        ),
    )


def register() -> None:
    """Put them into torchtitan's registry: ``model=titan_llama3_debug model.flavor=small``."""
    llama3_configs["small"] = small_llama3
    llama3_configs["small_tied"] = lambda **options: small_llama3(**options, tied=True)
    llama3_configs["small_separate"] = lambda **options: small_llama3(**options, fused=False)
