"""GPT-2 with pre-norm blocks (Radford et al. 2019): LayerNorm, GELU, biases, learned positions. No parallel code.

Shapes: B batch, S positions held here, H heads, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtcp.dropout import Dropout, ModelWithDropout, name_dropouts
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
from dtcp.models.inputs import check_position_range, check_tokens, is_residual_stream, position_error, resolve_positions


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        vocab_size: Rows of the embedding; at least the tokenizer's.
        max_seq_len: Rows of the position embedding: the longest global sequence, in tokens.
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Heads; head dim is ``dim / num_heads``.
        ffn_dim: Hidden width of the feed-forward; None is ``4 * dim``.
        dropout: Probability of dropping an element of the embedding and of what each block adds. The published models
            were trained with 0.1.
        attention_dropout: Probability of dropping an attention weight; above 0 attention is slower, since its weights
            are formed, see `ScaledDotProductAttention`.
        norm_eps: Added to the variance in LayerNorm.
        tie_weights: The head uses the token embedding's weight.
        init_std: Standard deviation of the initial weights; residual outputs have it divided by ``sqrt(2 num_layers)``.
        qk_init_scale: Extra factor on the initial query and key weights; above 1 attention starts peaked.
        window_size: Tokens that a token sees, itself and the last ones before it; None: all before it.
        full_attention_every: With a window, each n-th layer has none: 2 as GPT-OSS, 6 as Gemma 3; 0: no layer.
        sinks: Every query head of every layer has a learned logit that takes part in the softmax and has no value, so
            that a head may attend to nothing (Xiao et al. 2023, arXiv:2309.17453; as in GPT-OSS).
    """

    vocab_size: int
    max_seq_len: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    tie_weights: bool = True
    init_std: float = 0.02
    qk_init_scale: float = 1.0
    window_size: int | None = None
    full_attention_every: int = 0
    sinks: bool = False

    def __post_init__(self) -> None:
        check_positive(
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            ffn_dim=self.hidden_dim,
        )
        check_divides("num_heads", self.num_heads, "dim", self.dim)
        check_window(self.window_size, self.full_attention_every)
        check_fraction(dropout=self.dropout, attention_dropout=self.attention_dropout)

    @property
    def has_dropout(self) -> bool:
        """Whether a forward drops anything in training."""
        return self.dropout > 0 or self.attention_dropout > 0

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward, resolved."""
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""
        lookups = self.max_seq_len * self.dim + (0 if self.tie_weights else self.vocab_size * self.dim)
        sinks = self.num_layers * self.num_heads if self.sinks else 0
        return self.num_matmul_parameters + lookups + sinks

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply activations: all but embedding lookups and sinks; the head counts, tied or not."""
        attention = 4 * self.dim * (self.dim + 1)
        feed_forward = 2 * self.dim * self.hidden_dim + self.hidden_dim + self.dim
        return self.num_layers * (attention + feed_forward + 4 * self.dim) + 2 * self.dim + self.vocab_size * self.dim

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
        """Raise ``ValueError`` if a global sequence of ``seq_len`` tokens has no position embedding."""
        check_positive(seq_len=seq_len)
        if seq_len > self.max_seq_len:
            raise position_error(seq_len, self.max_seq_len)


class GPTAttention(nn.Module):
    """Projections around the attention call."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.output = nn.Linear(config.dim, config.dim)
        self.sdpa = ScaledDotProductAttention(config.attention_dropout, window_size=config.window_of(layer))
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None

    def forward(self, x: Tensor, *dropout_keys: Tensor | None) -> Tensor:
        """(B, S, dim) to (B, S, dim); keys are (B, S), and given only where attention weights are dropped."""
        # -1: the number of heads is what the projection returns, which may be a share of them.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        # Not otherwise: whoever puts an attention of their own there need not know of sinks.
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return self.output(self.sdpa(query, key, value, *dropout_keys, **sinks).transpose(1, 2).flatten(2))


class GPTFeedForward(nn.Module):
    """``down(gelu(up(x)))`` with the tanh form of GELU, as GPT-2 has it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden_dim)
        self.down = nn.Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, dim) to (B, S, dim)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.attention = GPTAttention(config, layer)
        self.drops_weights = config.attention_dropout > 0
        self.attention_residual_dropout = Dropout(config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.feed_forward = GPTFeedForward(config)
        self.feed_forward_residual_dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """(B, S, dim) to (B, S, dim); keys are (B, S)."""
        # Not otherwise: whoever puts an attention of their own there need not know of keys.
        keys = (dropout_keys,) if self.drops_weights else ()
        x = x + self.attention_residual_dropout(self.attention(self.attention_norm(x), *keys), dropout_keys)
        return x + self.feed_forward_residual_dropout(self.feed_forward(self.feed_forward_norm(x)), dropout_keys)


class GPT(ModelWithDropout):
    """A GPT that returns logits.

    ``layers`` is a ``ModuleDict`` keyed "0", "1", ...: a block keeps its name, and so its initial weights, when others
    are taken out.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.dim)
        self.embedding_dropout = Dropout(config.dropout)
        self.layers = nn.ModuleDict({str(i): GPTBlock(config, i) for i in range(config.num_layers)})
        self.final_norm: nn.Module | None = nn.LayerNorm(config.dim, config.norm_eps)
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
            positions: Global position of each token, int64 (B, S) or (S,), below ``max_seq_len``; pad slots take 0.
                None: ``arange(S)``.
            dropout_keys: `dtcp.dropout_keys` of the tokens, int64 (B, S); read only if dropout acts. None: of the
                step and rows that `set_sequence` told and of ``positions``; drawn if it told none and this is the only
                rank.
            head_fn: Called in place of the head with the last hidden states (B, S, dim) and the head's weight
                (vocab_size, dim), tied or not: a loss that never holds all logits. Here, because only inside this
                forward a weight that FSDP2 has sharded is whole.
            head_inputs: A third argument of ``head_fn``, by rows: what a pipeline splits into microbatches, labels.

        Returns:
            (B, S, vocab_size) in the parameters' dtype; with ``head_fn``, what that returns.

        Raises:
            ValueError: For another shape or dtype, or more than ``max_seq_len`` positions; for ids and positions out of
                range where their values cost no device wait (eager, on the CPU). Elsewhere
                ``config.check_seq_len(seq_len)``, once before the first step, is the check. For dropout on several
                ranks that was told neither keys nor step and rows.
        """
        is_embedded = is_residual_stream(tokens)
        if not is_embedded:
            check_tokens(tokens, self.config.vocab_size)
        positions = resolve_positions(positions, tokens)
        if dropout_keys is None and self.training and self.config.has_dropout:
            dropout_keys = self.keys_of(positions, tokens.size(0))
        x = tokens if is_embedded else self._embed(tokens, positions, dropout_keys)
        for block in self.layers.values():
            x = block(x, dropout_keys)
        if self.final_norm is None:  # other stages hold the layers after
            return x
        x = self.final_norm(x)
        if head_fn is not None:
            weight = self.token_embedding.weight if isinstance(self.head, TiedHead) else self.head.weight
            return head_fn(x, weight) if head_inputs is None else head_fn(x, weight, head_inputs)
        return self.head(x, self.token_embedding.weight) if self.config.tie_weights else self.head(x)

    def _embed(self, tokens: Tensor, positions: Tensor, dropout_keys: Tensor | None) -> Tensor:
        check_position_range(positions, self.config.max_seq_len)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.embedding_dropout(x, dropout_keys)

    def init_weights(self, seed: int) -> None:
        """Draw every parameter from ``seed`` and its name; see `dtcp.models.init.initialize`."""
        initialize(self, seed, self.weight_init)

    def weight_init(self, name: str) -> Init:
        """Return the initial distribution of the parameter called ``name``."""
        module, kind = name.split(".")[-2:]
        std = self.config.init_std
        match module, kind:
            case (("attention_norm" | "feed_forward_norm" | "final_norm"), "weight"):
                return Init(mean=1.0)
            case _, ("bias" | "sinks"):
                return Init()
            case (("query" | "key"), _):
                return Init(std=std * self.config.qk_init_scale)
            case (("output" | "down"), _):  # GPT-2: the sum of 2 num_layers outputs keeps its size
                return Init(std=std / math.sqrt(2 * self.config.num_layers))
            case _:
                return Init(std=std)

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward operations per token at ``seq_len``: 6 N + 6 L dim S, see `training_flops_per_token`."""
        return self.config.flops_per_token(seq_len)
