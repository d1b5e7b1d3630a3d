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
from torchtitan.protocols.module import Module

from dtcp.mask import NO_WINDOW
from dtcp.models.attention import ScaledDotProductAttention as CausalAttention

_CAUSAL = (-1, 0)  # no bound to the left, nothing to the right


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
        """``window_size`` (left, 0): a token sees the ``left`` ones before it, -1: all.

        A kind of ``VarlenAttention.Config``, because torchtitan's trainer makes a mask of documents for that (one that
        is refused here) and none for what it does not know, which would let documents see each other.
        """

    def __init__(self, config: Config) -> None:
        super().__init__()
        left, right = config.window_size
        if right != 0:
            raise NotImplementedError(
                f"dtcp's attention of a language model is causal, got window_size={(left, right)}; use ({left}, 0), or "
                "torchtitan's own attention for this layer"
            )
        self.sdpa = CausalAttention(window_size=NO_WINDOW if left < 0 else (left, 0))

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **more: Any,
    ) -> Tensor:
        """Attend causally; (B, L, N, H), keys and values with a number of heads that divides N.

        Args:
            attention_masks: None.
            scale: None or 1/√H.
            enable_gqa: Not read: the numbers of heads say it.
            more: None of ``score_mod``, ``out_transform`` and what else a layer may ask its attention for.

        Raises:
            NotImplementedError: For a mask, another scale, or anything in ``more``.
        """
        if attention_masks is not None:
            raise NotImplementedError(
                f"dtcp's attention gets its masks elsewhere, got attention_masks={type(attention_masks).__name__}; "
                "call model(tokens, positions), and say where documents lie by dtcp.set_sequence(model, layout, "
                "documents=...)"
            )
        if scale is not None and abs(scale * q_BLNH.size(-1) ** 0.5 - 1) > 1e-6:
            raise NotImplementedError(
                f"dtcp's attention scales by 1/√H = {q_BLNH.size(-1) ** -0.5}, got scale={scale}; fold the rest into "
                "the query projection"
            )
        if asked := [name for name, value in more.items() if value is not None]:
            raise NotImplementedError(
                f"dtcp's attention is causal attention and nothing else, got {', '.join(asked)}; use torchtitan's own "
                "attention for this layer"
            )
        out = self.sdpa(*(x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)))
        return out.transpose(1, 2)


def with_dtcp_attention(config: Decoder.Config) -> Decoder.Config:
    """Return a copy of a torchtitan language model's config, with `DtcpAttention` in all layers.

    Sizes, initial weights and everything else are the config's own; ``.build()`` gives torchtitan's own model. For
    dense decoders with torchtitan's ``GQAttention``: its ``llama3`` and dense ``qwen3`` are tested.

    Args:
        config: Of any of torchtitan's attention backends; which one does not matter.

    Raises:
        NotImplementedError: Naming the first layer that would not be the same: sinks, softcap, latent or linear
            attention, a window that looks ahead, a mixture of experts.
    """
    _refuse_what_differs(config)
    config = copy.copy(config)
    config.layers = [copy.copy(layer) for layer in config.layers]
    for layer in config.layers:
        layer.attention = copy.copy(layer.attention)
        window = getattr(layer.attention.inner_attention, "window_size", _CAUSAL)
        layer.attention.inner_attention = DtcpAttention.Config(window_size=tuple(window))
    return config


def _refuse_what_differs(config: Decoder.Config) -> None:
    for name, what in _differences(config):
        raise NotImplementedError(
            f"{name} of {type(config).__qualname__} has {what}, which dtcp's attention cannot take the place of; it "
            "can in layers of causal GQAttention with a dense feed-forward, as torchtitan's llama3 and dense qwen3 have"
        )


def _differences(config: Decoder.Config) -> Iterator[tuple[str, str]]:
    for index, layer in enumerate(config.layers):
        name, attention = f"layer {index}", layer.attention
        # Not a subclass: what it adds (sinks, gates) would be lost on the way.
        if type(attention) is not GQAttention.Config:
            yield name, type(attention).__qualname__
            continue
        inner = attention.inner_attention
        if type(inner) not in _SAME_WITHOUT_MASKS:
            yield name, type(inner).__qualname__
        elif isinstance(inner, VarlenAttention.Config) and inner.window_size[1] != 0:
            yield name, f"window_size={tuple(inner.window_size)}"
        elif getattr(layer, "moe", None) is not None:
            yield name, "a mixture of experts"


_SAME_WITHOUT_MASKS = (
    FlexAttention.Config,
    VarlenAttention.Config,
    ScaledDotProductAttention.Config,
    DtcpAttention.Config,
)
