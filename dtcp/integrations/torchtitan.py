"""torchtitan's language models with attention that every door of dtcp knows.

    config = with_dtcp_attention(llama3_configs["8B"]("varlen"))
    model = config.build()

Shapes, in torchtitan's letters: B batch, L positions held here, N heads, H head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.protocols.module import Module

from dtcp.dtensor import is_dtensor
from dtcp.mask import NO_WINDOW
from dtcp.models.attention import ScaledDotProductAttention as CausalAttention

_CAUSAL = (-1, 0)  # no bound to the left, nothing to the right


class _CausalAttention(CausalAttention, Module):
    """Of the kind that torchtitan wants all modules of its trainer to be."""


class DtcpAttention(Module):
    """Causal inner attention of a torchtitan layer, by ``F.scaled_dot_product_attention``.

    The call is the child module ``sdpa``, (B, N, L, H) in and out, so that it works with ``dtcp.context_parallel``
    around the model, as the plan entry ``{"attention.inner_attention.sdpa": dtcp.ContextParallel()}`` of a block, and
    with DTensors.

    Attention is causal over the whole row, or a window of it. Positions that begin again with each document turn the
    rotary embedding and mask nothing: where documents lie is said by
    ``dtcp.set_sequence(model, layout, documents=...)`` or ``dtcp.context_parallel(..., documents=...)``. The masks that
    torchtitan's own trainer makes of such positions are refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """``window_size`` (left, 0): a token sees the ``left`` ones before it, -1: all. ``has_sinks``: of GPT-OSS.

        A kind of ``VarlenAttention.Config``, because torchtitan's trainer makes a mask of documents for that (one that
        is refused here) and none for what it does not know, which would let documents see each other.
        """

        has_sinks: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        left, right = config.window_size
        if right != 0:
            raise NotImplementedError(
                f"dtcp's attention of a language model is causal, got window_size={(left, right)}; use ({left}, 0), or "
                "torchtitan's own attention for this layer"
            )
        self.has_sinks = config.has_sinks
        self.sdpa = _CausalAttention(window_size=NO_WINDOW if left < 0 else (left, 0))

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **more: Any,
    ) -> Tensor:
        """Attend causally; (B, L, N, H), keys and values with a number of heads that divides N.

        Args:
            attention_masks: None.
            scale: Of the scores; None is 1/√H. Another one is multiplied into the queries.
            enable_gqa: Not read: the numbers of heads say it.
            out_transform: None, or that by which a layer of GPT-OSS adds its sinks.
            more: None of ``score_mod`` and what else a layer may ask its attention for.

        Raises:
            NotImplementedError: For a mask, another transform, or anything in ``more``.
        """
        if attention_masks is not None:
            raise NotImplementedError(
                f"dtcp's attention gets its masks elsewhere, got attention_masks={type(attention_masks).__name__}; "
                "call model(tokens, positions), and say where documents lie by dtcp.set_sequence(model, layout, "
                "documents=...)"
            )
        sinks = None
        if self.has_sinks and out_transform is not None:
            sinks = out_transform.__self__.sinks  # the method of the layer that applies them, and nothing else
            if is_dtensor(sinks):  # and this call is of its rank's heads
                sinks = sinks.to_local(grad_placements=sinks.placements)
        else:
            more["out_transform"] = out_transform
        if asked := [name for name, value in more.items() if value is not None]:
            raise NotImplementedError(
                f"dtcp's attention is causal attention and nothing else, got {', '.join(asked)}; use torchtitan's own "
                "attention for this layer"
            )
        width = q_BLNH.size(-1)
        if scale is not None and abs(scale * width**0.5 - 1) > 1e-6:
            q_BLNH = q_BLNH * (scale * width**0.5)
        learned = {} if sinks is None else {"sinks": sinks}
        out = self.sdpa(*(x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)), **learned)
        return out.transpose(1, 2)


def with_dtcp_attention(config: Decoder.Config) -> Decoder.Config:
    """Return a copy of a torchtitan language model's config, with `DtcpAttention` in all layers.

    Sizes, initial weights and everything else are the config's own; ``.build()`` gives torchtitan's own model. For
    decoders with torchtitan's ``GQAttention`` or GPT-OSS's attention: its ``llama3``, ``qwen3`` and ``gpt_oss`` are
    tested. Experts see each token alone; the counts by which torchtitan's optimizer balances their loads
    (``tokens_per_expert_E``) are of the slots that a rank holds, pad slots too.

    Args:
        config: Of any of torchtitan's attention backends; which one does not matter.

    Raises:
        NotImplementedError: Naming the first layer that would not be the same: softcap, latent or linear attention, a
            window that looks ahead.
    """
    _refuse_what_differs(config)
    config = copy.copy(config)
    config.layers = [copy.copy(layer) for layer in config.layers]
    for layer in config.layers:
        layer.attention = copy.copy(layer.attention)
        has_sinks = isinstance(layer.attention, SinkAttention.Config)
        layer.attention.inner_attention = DtcpAttention.Config(
            window_size=_window(layer.attention), has_sinks=has_sinks
        )
    return config


def _window(attention: Any) -> tuple[int, int]:
    if (size := getattr(attention, "sliding_window_size", None)) is not None:  # GPT-OSS: of any backend
        return (size - 1, 0)
    return tuple(getattr(attention.inner_attention, "window_size", _CAUSAL))


def _refuse_what_differs(config: Decoder.Config) -> None:
    for name, what in _differences(config):
        raise NotImplementedError(
            f"{name} of {type(config).__qualname__} has {what}, which dtcp's attention cannot take the place of; it "
            "can in layers of causal GQAttention, or GPT-OSS's, as torchtitan's llama3, qwen3 and gpt_oss have"
        )


def _differences(config: Decoder.Config) -> Iterator[tuple[str, str]]:
    for index, layer in enumerate(config.layers):
        name, attention = f"layer {index}", layer.attention
        # Not a subclass: what it adds (gates) would be lost on the way.
        if type(attention) not in (GQAttention.Config, SinkAttention.Config):
            yield name, type(attention).__qualname__
            continue
        inner = attention.inner_attention
        if type(inner) not in _SAME_WITHOUT_MASKS:
            yield name, type(inner).__qualname__
        elif isinstance(inner, VarlenAttention.Config) and inner.window_size[1] != 0:
            yield name, f"window_size={tuple(inner.window_size)}"


_SAME_WITHOUT_MASKS = (
    FlexAttention.Config,
    VarlenAttention.Config,
    ScaledDotProductAttention.Config,
    DtcpAttention.Config,
)
