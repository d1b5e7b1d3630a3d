"""Llama 3: RMSNorm, SwiGLU, rotary positions, grouped-query attention (arXiv:2407.21783). No parallel code.

Shapes: B batch, S positions held here, H query heads, Hkv key/value heads, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtcp.dropout import ModelWithDropout, name_dropouts
from dtcp.models.attention import ScaledDotProductAttention
from dtcp.models.config import (
    check_divides,
    check_fraction,
    check_positive,
    check_window,
    training_flops_per_token,
    window_of_layer,
)
from dtcp.models.head import TiedHead
from dtcp.models.init import Init, initialize
from dtcp.models.inputs import check_tokens, is_residual_stream, resolve_positions
from dtcp.models.rope import RopeScaling, RotaryEmbedding


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama.

    Attributes:
        vocab_size: Rows of the embedding; at least the tokenizer's.
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads; head dim is ``dim / num_heads``.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        ffn_dim: Hidden width of SwiGLU.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Llama 3.1's stretch, or None.
        attention_dropout: Probability of dropping an attention weight, see `ScaledDotProductAttention`. The published
            models were trained without.
        norm_eps: Added to the mean square in RMSNorm.
        tie_weights: The head uses the token embedding's weight.
        init_std: Standard deviation of the initial weights, truncated at 3; residual outputs are scaled by depth.
        qk_init_scale: Extra factor on the initial query and key weights; above 1 attention starts peaked.
        window_size: Tokens that a token sees, itself and the last ones before it; None: all before it.
        full_attention_every: With a window, each n-th layer has none: 2 as GPT-OSS, 6 as Gemma 3; 0: no layer.
        sinks: Every query head of every layer has a learned logit that takes part in the softmax and has no value, so
            that a head may attend to nothing (Xiao et al. 2023, arXiv:2309.17453; as in GPT-OSS).
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    tie_weights: bool = False
    init_std: float = 0.02
    qk_init_scale: float = 1.0
    window_size: int | None = None
    full_attention_every: int = 0
    sinks: bool = False

    def __post_init__(self) -> None:
        check_positive(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            ffn_dim=self.ffn_dim,
        )
        check_divides("num_heads", self.num_heads, "dim", self.dim)
        check_window(self.window_size, self.full_attention_every)
        check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        check_fraction(attention_dropout=self.attention_dropout)
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head dim, got dim/num_heads = {self.head_dim}")

    @property
    def has_dropout(self) -> bool:
        """Whether a forward drops anything in training."""
        return self.attention_dropout > 0

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""
        sinks = self.num_layers * self.num_heads if self.sinks else 0
        return self.num_matmul_parameters + (0 if self.tie_weights else self.vocab_size * self.dim) + sinks

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply activations: all but the lookup and sinks; the head counts, tied or not."""
        attention = 2 * self.dim * self.head_dim * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        return self.num_layers * block + self.dim + self.vocab_size * self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward operations per token; the formula is `training_flops_per_token`'s."""
        return training_flops_per_token(
            self.num_matmul_parameters,
            self.num_layers,
            self.dim,
            seq_len,
            window_size=self.window_size,
            full_attention_every=self.full_attention_every,
        )

    def window_of(self, layer: int) -> tuple[int, int]:
        """The window (left, right) of a layer, from 0; (-1, -1) is none."""
        return window_of_layer(layer, self.window_size, self.full_attention_every)

    def check_seq_len(self, seq_len: int) -> None:
        """Raise ``ValueError`` if the model cannot hold ``seq_len`` tokens: rotary positions hold any number."""
        check_positive(seq_len=seq_len)


class LlamaAttention(nn.Module):
    """Projections and rotation around the attention call."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        self.sdpa = ScaledDotProductAttention(config.attention_dropout, window_size=config.window_of(layer))
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None

    def forward(self, x: Tensor, positions: Tensor, *dropout_keys: Tensor | None) -> Tensor:
        """(B, S, dim) to (B, S, dim); keys are (B, S), and given only where attention weights are dropped."""
        # -1: the number of heads is what the projection returns, which may be a share of them.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = self.rotary(query, key, positions)
        # Not otherwise: whoever puts an attention of their own there need not know of sinks.
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return self.output(self.sdpa(query, key, value, *dropout_keys, **sinks).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, dim) to (B, S, dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = LlamaAttention(config, layer)
        self.feed_forward_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, positions: Tensor, *dropout_keys: Tensor | None) -> Tensor:
        """(B, S, dim) to (B, S, dim); positions are int64 (B, S) or (S,)."""
        x = x + self.attention(self.attention_norm(x), positions, *dropout_keys)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(ModelWithDropout):
    """A Llama that returns logits.

    ``layers`` is a ``ModuleDict`` keyed "0", "1", ...: a block keeps its name, and so its initial weights, when others
    are taken out.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): LlamaBlock(config, i) for i in range(config.num_layers)})
        self.final_norm: nn.Module | None = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = TiedHead() if config.tie_weights else nn.Linear(config.dim, config.vocab_size, bias=False)
        name_dropouts(self)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        *,
        head_fn: Callable[..., Tensor] | None = None,
        head_inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token, or what ``head_fn`` makes instead.

        Args:
            tokens: int64 (B, S); or, where other stages of a pipeline hold the layers before, their (B, S, dim).
            positions: Global position of each token, int64 (B, S) or (S,); pad slots take 0. None: ``arange(S)``.
            dropout_keys: As of a `GPT`; read only if attention weights are dropped.
            head_fn: Called in place of the head with the last hidden states (B, S, dim) and the head's weight
                (vocab_size, dim), tied or not: a loss that never holds all logits. Here, because only inside this
                forward a weight that FSDP2 has sharded is whole.
            head_inputs: A third argument of ``head_fn``, by rows: what a pipeline splits into microbatches, labels.

        Returns:
            (B, S, vocab_size) in the parameters' dtype; with ``head_fn``, what that returns.

        Raises:
            ValueError: For another shape or dtype; for token ids out of range where `check_tokens` can see them. For
                dropout on several ranks that was told neither keys nor step and rows.
        """
        is_embedded = is_residual_stream(tokens)
        if not is_embedded:
            check_tokens(tokens, self.config.vocab_size)
        positions = resolve_positions(positions, tokens)
        keys: tuple[Tensor | None, ...] = ()
        if self.config.has_dropout:
            if dropout_keys is None and self.training:
                dropout_keys = self.keys_of(positions, tokens.size(0))
            keys = (dropout_keys,)
        x = tokens if is_embedded else self.token_embedding(tokens)
        for block in self.layers.values():
            x = block(x, positions, *keys)
        if self.final_norm is None:  # other stages hold the layers after
            return x
        x = self.final_norm(x)
        if head_fn is not None:
            weight = self.token_embedding.weight if isinstance(self.head, TiedHead) else self.head.weight
            return head_fn(x, weight) if head_inputs is None else head_fn(x, weight, head_inputs)
        return self.head(x, self.token_embedding.weight) if self.config.tie_weights else self.head(x)

    def init_weights(self, seed: int) -> None:
        """Draw every parameter from ``seed`` and its name; see `dtcp.models.init.initialize`."""
        initialize(self, seed, self.weight_init)

    def weight_init(self, name: str) -> Init:
        """Return the initial distribution of the parameter called ``name``."""
        module, std = name.split(".")[-2], self.config.init_std
        match module:
            case "attention_norm" | "feed_forward_norm" | "final_norm":
                return Init(mean=1.0)
            case "attention":  # its sinks
                return Init()
            case "query" | "key":
                return Init(std=std * self.config.qk_init_scale, cutoff=3.0)
            case "output" | "down":  # a sum of 2(i + 1) such outputs keeps its size
                return Init(std=std / math.sqrt(2 * (int(name.split(".")[1]) + 1)), cutoff=3.0)
            case _:
                return Init(std=std, cutoff=3.0)

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward operations per token at ``seq_len``: 6 N + 6 L dim S, see `training_flops_per_token`."""
        return self.config.flops_per_token(seq_len)
