"""Sizes of the published models and of tiny ones, as data."""

from dtcp.models.gpt import GPTConfig
from dtcp.models.llama import LlamaConfig
from dtcp.models.rope import RopeScaling
from dtcp.models.titan_config import TitanConfig
from dtcp.models.transformers_config import HFConfig

BYTES_VOCAB_SIZE = 264  # the byte tokenizer's 257 ids, rounded up so that 2, 4 and 8 ranks can share the head
GPT2_VOCAB_SIZE = 50_257
LLAMA3_VOCAB_SIZE = 128_256


def _gpt2(dim: int, num_layers: int, num_heads: int) -> GPTConfig:
    return GPTConfig(GPT2_VOCAB_SIZE, 1024, dim, num_layers, num_heads)


def _llama3(dim: int, num_layers: int, num_heads: int, ffn_dim: int, stretch: float | None, tied: bool) -> LlamaConfig:
    scaling = None if stretch is None else RopeScaling(stretch)
    return LlamaConfig(
        LLAMA3_VOCAB_SIZE, dim, num_layers, num_heads, 8, ffn_dim, rope_scaling=scaling, tie_weights=tied
    )


PRESETS: dict[str, GPTConfig | LlamaConfig | TitanConfig | HFConfig] = {
    "gpt_tiny": GPTConfig(BYTES_VOCAB_SIZE, 4096, 128, 4, 4),
    "gpt_tiny_window": GPTConfig(
        BYTES_VOCAB_SIZE, 4096, 128, 4, 4, window_size=128, full_attention_every=2, sinks=True
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2_medium": _gpt2(1024, 24, 16),
    "gpt2_large": _gpt2(1280, 36, 20),
    "gpt2_xl": _gpt2(1600, 48, 25),
    "llama_tiny": LlamaConfig(BYTES_VOCAB_SIZE, 128, 4, 4, 2, 352, rope_theta=10_000.0),
    "llama_tiny_window": LlamaConfig(
        BYTES_VOCAB_SIZE, 128, 4, 4, 2, 352, rope_theta=10_000.0, window_size=128, full_attention_every=2, sinks=True
    ),
    "llama3_8b": _llama3(4096, 32, 32, 14_336, None, False),
    "llama3_70b": _llama3(8192, 80, 64, 28_672, None, False),
    "llama3_1_8b": _llama3(4096, 32, 32, 14_336, 8.0, False),
    "llama3_1_70b": _llama3(8192, 80, 64, 28_672, 8.0, False),
    "llama3_405b": _llama3(16_384, 126, 128, 53_248, 8.0, False),  # published as Llama 3.1 only
    "llama3_2_1b": _llama3(2048, 16, 32, 8192, 32.0, True),
    "llama3_2_3b": _llama3(3072, 28, 24, 8192, 32.0, True),
    # torchtitan's, in the sizes of its own registries.
    "titan_llama3_debug": TitanConfig("llama3", "debugmodel"),
    **{f"titan_llama3_{size.lower()}": TitanConfig("llama3", size) for size in ("1B", "3B", "8B", "70B", "405B")},
    "titan_qwen3_debug": TitanConfig("qwen3", "debugmodel"),
    "titan_qwen3_moe_debug": TitanConfig("qwen3", "debugmodel_moe"),
    **{
        f"titan_qwen3_{size.lower().replace('.', '_').replace('-', '_')}": TitanConfig("qwen3", size)
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    },
    "titan_gpt_oss_debug": TitanConfig("gpt_oss", "debugmodel"),
    **{f"titan_gpt_oss_{size}": TitanConfig("gpt_oss", size) for size in ("20b", "120b")},
    # Any causal language model of transformers, by its config.json.
    "hf": HFConfig(),
}
"""Sources: the GPT-2 and Llama 3, 3.1 and 3.2 model cards and configuration files."""
