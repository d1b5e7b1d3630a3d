"""The output head that shares the token embedding's weight."""

import torch.nn.functional as F
from torch import Tensor, nn


class TiedHead(nn.Module):
    """Logits from the token embedding's own weight.

    A module without a parameter, called with the weight: two names for one ``Parameter`` come apart in
    ``Module.to_empty`` (each name gets a tensor of its own), and training would go on untied without an error.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x @ weight.T``: (B, S, dim) and (vocab_size, dim) to (B, S, vocab_size)."""
        return F.linear(x, weight)
