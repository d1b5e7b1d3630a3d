"""Rotary position embedding from explicit positions (Su et al. 2021, arXiv:2104.09864).

Shapes: B batch, H heads, S positions held here, D head dim. Dim d is paired with d + D/2, as in Hugging Face's weights.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretch of the slow frequencies beyond the trained context.

    Attributes:
        factor: Frequencies whose wavelength exceeds ``original_max_seq_len / low_freq_factor`` are divided by this.
        low_freq_factor: Turns within the trained context below which a frequency is fully stretched.
        high_freq_factor: Turns within the trained context above which a frequency is kept; linear between the two.
        original_max_seq_len: Trained context in tokens.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.factor <= 0 or self.original_max_seq_len < 1:
            raise ValueError(
                "rope_scaling needs factor > 0 and original_max_seq_len >= 1, got "
                f"factor={self.factor} and original_max_seq_len={self.original_max_seq_len}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope_scaling needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}; Llama 3.1 has 1 and 4"
            )


class RotaryEmbedding(nn.Module):
    """Rotate queries and keys by their global positions.

    # Note [Angles from positions, in float64, in every layer]
    No table: its length would tie the model to a sequence length, a buffer would be garbage after ``to_empty``, and
    local positions would read the wrong rows. float64: in float32 an angle near position 10^6 is off by up to 0.06 rad.
    Positions, not cos and sin, travel from layer to layer: mixed precision casts floating-point arguments of a
    wrapped block to bfloat16, and checkpointing would keep them.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated (B, H, S, D) query and (B, Hkv, S, D) key; positions are int64 (B, S) or (S,)."""
        angles = positions.to(torch.float64)[..., None] * self.frequencies(positions.device)
        dtype = torch.promote_types(query.dtype, torch.float32)
        cos, sin = angles.cos().to(dtype).unsqueeze(-3), angles.sin().to(dtype).unsqueeze(-3)
        return rotate(query, cos, sin), rotate(key, cos, sin)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of every pair of dims: float64 (D/2,), radians."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        frequency = self.theta**-exponent
        if self.scaling is None:
            return frequency
        s = self.scaling
        turns = s.original_max_seq_len * frequency / (2 * math.pi)
        kept = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
        return kept * frequency + (1 - kept) * frequency / s.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D/2) of ``x``, at least in float32; the dtype of ``x`` comes back.

    Args:
        x: (B, H, S, D).
        cos: (B, 1, S, D/2) or (1, S, D/2), float32 or float64.
        sin: Like ``cos``.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
