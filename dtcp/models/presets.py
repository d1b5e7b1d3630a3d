"""Sizes of the published models and of tiny ones, as data."""

from dtcp.models.gpt import GPTConfig
from dtcp.models.llama import LlamaConfig
from dtcp.models.rope import RopeScaling
from dtcp.models.titan_config import TitanLlama3Config
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


PRESETS: dict[str, GPTConfig | LlamaConfig | TitanLlama3Config | HFConfig] = {
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
    # torchtitan's Llama 3, in the sizes of its own registry.
    "titan_llama3_debug": TitanLlama3Config("debugmodel"),
    "titan_llama3_1b": TitanLlama3Config("1B"),
    "titan_llama3_3b": TitanLlama3Config("3B"),
    "titan_llama3_8b": TitanLlama3Config("8B"),
    "titan_llama3_70b": TitanLlama3Config("70B"),
    "titan_llama3_405b": TitanLlama3Config("405B"),
    # Any causal language model of transformers, by its config.json.
    "hf": HFConfig(),
}
"""Sources: the GPT-2 and Llama 3, 3.1 and 3.2 model cards and configuration files."""
