"""The attention call of the models, as a module of its own so that a plan can name it.

Shapes: B batch, H query heads, Hkv key/value heads, S positions, D head dim.
"""

import torch.nn.functional as F
from torch import Tensor

from dtcp.dispatch.masked import masked_attention
from dtcp.dropout import AttentionDropout
from dtcp.mask import NO_WINDOW


class ScaledDotProductAttention(AttentionDropout):
    """Causal attention, ``F.scaled_dot_product_attention`` or more: the only place where a model mixes positions.

    Everything else in a model works on each position alone. Cutting the sequence therefore changes this module
    and nothing else, and ``{"attention.sdpa": ...}`` in a parallel plan is enough.

    Args:
        dropout: Probability of dropping an attention weight in training; below 1. Above 0 the weights are formed, a
            block of queries at a time, which is slower than fused attention.
        name: As of a `Dropout`.
        window_size: (left, right): a token sees the ``left`` ones before it, -1: all. ``right`` is 0, or -1.

    Attributes:
        is_causal, window_size: The mask, which a plan entry that takes over the call has to know.
    """

    is_causal: bool = True

    def __init__(
        self, dropout: float = 0.0, *, name: str | None = None, window_size: tuple[int, int] = NO_WINDOW
    ) -> None:
        super().__init__(dropout, name=name)
        self.window_size = window_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_keys: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend causally.

        Args:
            query: (B, H, S, D).
            key: (B, Hkv, S, D), ``H`` a multiple of ``Hkv``; not repeated.
            value: (B, Hkv, S, D).
            dropout_keys: `dtcp.dropout_keys` of the tokens, int64 (B, S); None as for a `Dropout`. The mask is a
                function of them, of the module's name, the global head and the key's position.
            sinks: (H,), a logit of each head beside those of the keys, without a value.

        Returns:
            (B, H, S, D).
        """
        enable_gqa = query.size(1) != key.size(1)
        keys = self.call_keys(dropout_keys, query.transpose(1, 2))
        if keys is not None or sinks is not None or self.window_size != NO_WINDOW:
            return masked_attention(
                query, key, value, is_causal=self.is_causal, window_size=self.window_size, sinks=sinks, p=self.p,
                keys=keys, head_offset=self.head_shard * query.size(1), enable_gqa=enable_gqa,
            )  # fmt: skip
        # By attribute, not by imported name: a patch of torch.nn.functional has to see this call.
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, enable_gqa=enable_gqa)
