"""Small models of torchtitan's own config classes, with what its debug models lack: grouped keys, tied heads, sizes."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.gpt_oss import GptOssModel, _build_gptoss_layers, gptoss_configs
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
    llama3_configs,
)
from torchtitan.models.qwen3 import (
    Qwen3Model,
    _build_qwen3_layers,
    _build_qwen3_moe_layers,
    qwen3_configs,
)

VOCAB_SIZE = 257  # never divides evenly; 256 bytes and the end of a document


def small_llama3(
    attn_backend: str = "varlen", tp_gemm_backend: str = "default", *, tied: bool = False, fused: bool = True
) -> Llama3Model.Config:
    """Width 64, 2 layers, 8 heads of which 2 share a key; the signature of torchtitan's registry, and more."""
    return Llama3Model.Config(
        **_ends(tied),
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


def _ends(tied: bool = False) -> dict[str, Any]:
    embedding_init: dict[str, Any] = {"weight": skip_param_init} if tied else _EMBEDDING_INIT
    return {
        "dim": 64,
        "vocab_size": VOCAB_SIZE,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(num_embeddings=VOCAB_SIZE, embedding_dim=64, param_init=embedding_init),
        "norm": RMSNorm.Config(normalized_shape=64, param_init=_NORM_INIT),
        "lm_head": Linear.Config(in_features=64, out_features=VOCAB_SIZE, param_init=_output_linear_init(64)),
    }


def small_qwen3(attn_backend: str = "varlen") -> Qwen3Model.Config:
    """As `small_llama3`, with norms of queries and keys, heads wider than dim / heads, and a tied head."""
    rope = CosSinRoPE.Config(dim=16, max_seq_len=256, theta=1e6)
    sizes: dict[str, Any] = {"n_layers": 2, "dim": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 16}
    layers = _build_qwen3_layers(**sizes, hidden_dim=96, attn_backend=attn_backend, rope=rope)
    return Qwen3Model.Config(**_ends(tied=True), layers=layers)


def small_qwen3_moe(attn_backend: str = "varlen", moe_comm_backend: str = "standard") -> Qwen3Model.Config:
    """`small_qwen3` with 8 experts, of which a token goes to 3; separate projections, an untied head."""
    rope = CosSinRoPE.Config(dim=16, max_seq_len=256, theta=1e6)
    sizes: dict[str, Any] = {"n_layers": 2, "dim": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 16}
    layers = _build_qwen3_moe_layers(
        **sizes, moe_hidden_dim=32, num_experts=8, top_k=3, fuse_qkv=False, attn_backend=attn_backend,
        moe_comm_backend=moe_comm_backend, rope=rope,
    )  # fmt: skip
    return Qwen3Model.Config(**_ends(), layers=layers)


def small_gpt_oss(moe_comm_backend: str = "standard", attn_backend: str = "varlen") -> GptOssModel.Config:
    """Width 64, 2 layers: a window of 20 and none; sinks, biases, a stretched rotary table, 4 experts of which 2."""
    rope = CosSinRoPE.Config(
        dim=64, max_seq_len=256, theta=150000.0, scaling="yarn", rope_factor=4, truncate=False, original_seq_len=64
    )
    layers = _build_gptoss_layers(
        dim=64, n_layers=2, hidden_dim=32, num_experts=4, top_k=2, load_balance_coeff=1e-3, attn_backend=attn_backend,
        moe_comm_backend=moe_comm_backend, rope=rope,
    )  # fmt: skip
    layers[0].attention.sliding_window_size = 20
    return GptOssModel.Config(**_ends(), layers=layers)


def register() -> None:
    """Put them into torchtitan's registries: ``model=titan_llama3_debug model.flavor=small``."""
    llama3_configs["small"] = small_llama3
    llama3_configs["small_tied"] = lambda **options: small_llama3(**options, tied=True)
    llama3_configs["small_separate"] = lambda **options: small_llama3(**options, fused=False)
    qwen3_configs["small_qwen3"] = small_qwen3
    qwen3_configs["small_qwen3_moe"] = small_qwen3_moe
    gptoss_configs["small_gpt_oss"] = small_gpt_oss
