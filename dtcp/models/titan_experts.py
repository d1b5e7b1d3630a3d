"""torchtitan's grouped experts, computed in the dtype of what comes in.

torchtitan's own always go to bfloat16, so that where a rounding falls decides the last digits, and no two meshes agree
to more than those of bfloat16. In bfloat16 these are the same. One device holds all of a layer's experts.

Shapes, in torchtitan's letters: R rows, a token for each expert that it goes to, sorted by expert; D width, E experts,
F features of an expert, G = 2F.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu


class Experts(GroupedExperts):
    """Gate, up and down projection without biases, as in Qwen 3."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return (R, D)."""
        multiply = _multiply(x_RD, num_tokens_per_expert_E)
        return multiply(F.silu(multiply(x_RD, self.w1_EFD)) * multiply(x_RD, self.w3_EFD), self.w2_EDF)


class BiasedExperts(GptOssGroupedExperts):
    """GPT-OSS's: interleaved gate and up projection, clamped, with biases."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return (R, D)."""
        multiply = _multiply(x_RD, num_tokens_per_expert_E)
        experts = torch.arange(self.num_experts, device=x_RD.device)
        experts_R = experts.repeat_interleave(num_tokens_per_expert_E, output_size=x_RD.size(0))
        h_RG = multiply(x_RD, self.mlp1_weight_EGD) + self.mlp1_bias_EG[experts_R]
        h_RF = swiglu(h_RG, limit=self.swiglu_limit)
        return multiply(h_RF, self.mlp2_weight_EDF) + self.mlp2_bias_ED[experts_R]


def _multiply(x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> functools.partial[Tensor]:
    offsets_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
    return functools.partial(_multiply_by_expert, offsets_E)


def _multiply_by_expert(offsets_E: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """(R, in) by (E, out, in) to (R, out)."""
    if x.dtype != torch.float64:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets_E)
    starts = [0, *offsets_E.tolist()]  # for oracles: that product knows no float64
    return torch.cat([x[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight, strict=False)])


def keep_dtype(routed: RoutedExperts) -> None:
    """Have the experts of ``routed`` compute in the dtype of their input; names and weights stay.

    Raises:
        NotImplementedError: For experts of another kind.
    """
    experts = routed.inner_experts
    if type(experts) not in _IN_ANY_DTYPE:
        raise NotImplementedError(
            f"there are no {type(experts).__qualname__} here that compute in the dtype of their input; use "
            f"config.build(), or a config with {' or '.join(kind.__qualname__ for kind in _IN_ANY_DTYPE)}"
        )
    experts.__class__ = _IN_ANY_DTYPE[type(experts)]


_IN_ANY_DTYPE = {GroupedExperts: Experts, GptOssGroupedExperts: BiasedExperts}
