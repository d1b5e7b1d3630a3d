"""The attention call of the models, as a module of its own so that a plan can name it.

Shapes: B batch, H query heads, Hkv key/value heads, S positions, D head dim.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class ScaledDotProductAttention(nn.Module):
    """Causal ``F.scaled_dot_product_attention``: the only place where a model mixes positions.

    Everything else in a model works on each position alone. Cutting the sequence therefore changes this module
    and nothing else, and ``{"attention.sdpa": ...}`` in a parallel plan is enough.
    """

    # A plan entry that takes over the call has to know the mask.
    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally.

        Args:
            query: (B, H, S, D).
            key: (B, Hkv, S, D), ``H`` a multiple of ``Hkv``; not repeated.
            value: (B, Hkv, S, D).

        Returns:
            (B, H, S, D).
        """
        # By attribute, not by imported name: a patch of torch.nn.functional has to see this call.
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, enable_gqa=query.size(1) != key.size(1)
        )
