"""torchtitan's decoders, for the training job and `dtcp.parallelize`. No parallel code; loading this loads torchtitan.

Shapes: B batch, S positions held here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import BaseQKVLinear, FusedQKVLinear, QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.rope import RoPE

from dtcp.integrations.torchtitan import with_dtcp_attention
from dtcp.models.config import training_flops_per_token
from dtcp.models.head import TiedHead
from dtcp.models.init import Fill, initialize
from dtcp.models.inputs import can_read, check_tokens, is_residual_stream, resolve_positions, table_error
from dtcp.models.titan_experts import keep_dtype


class _Embedding(Embedding):
    """torchtitan's embedding with torch's forward, of which DTensor knows how to cut the vocabulary."""

    forward = nn.Embedding.forward


class TitanDecoder(Decoder):
    """A decoder of torchtitan's, with what the models here have: a loss in place of the head, weights from a seed.

    For configs of its Llama 3, Qwen 3 and GPT-OSS. Blocks, parameter names and numerics are torchtitan's own, but for
    experts, which compute in the dtype of their input. Two things differ from ``config.build()``: a tied head
    has no weight of its own (two names for one parameter come apart in ``to_empty``), and ``state_dict`` has fused
    query, key and value weights as the one parameter that they are, so that loading in place reaches it;
    ``load_state_dict`` takes torchtitan's form too.
    """

    # What a pipeline gives to its first and to its last stage only.
    first_modules = ("tok_embeddings",)
    last_modules = ("norm", "lm_head")

    def __init__(self, config: Decoder.Config, *, qk_init_scale: float = 1.0) -> None:
        """Build on the current default device; call ``init_weights`` before use.

        Args:
            config: torchtitan's, with any inner attention; sizes, initial distributions, fused or separate
                projections and tied or untied head are taken as they are.
            qk_init_scale: Extra factor on the initial query and key weights; on the gain of the queries' norm if they
                have one.

        Raises:
            NotImplementedError: See `with_dtcp_attention`; for modules that a plan would cut in another way: those that
                communicate themselves, low rank adapters, quantized weights; for experts whose loads the optimizer is
                to balance.
            ValueError: If a parameter has no initial distribution in ``config``.
        """
        _refuse_other_modules(config)
        super().__init__(with_dtcp_attention(config))
        embedding = _Embedding(config.tok_embeddings)
        embedding._param_init = (config.lm_head if self.enable_weight_tying else config.tok_embeddings).param_init
        self.tok_embeddings = embedding
        if self.enable_weight_tying:
            self.lm_head = TiedHead()
        self.register_load_state_dict_pre_hook(_drop_tied_head)
        for module in self.modules():
            if isinstance(module, FusedQKVLinear):
                module._state_dict_hooks.clear()
            if isinstance(module, MoE):
                keep_dtype(module.routed_experts)
        self._fills = _initial_distributions(self, qk_init_scale)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        lookups = 0 if self.enable_weight_tying else self.tok_embeddings.weight.numel()
        self._num_matmul_parameters = self.num_parameters - lookups - sum(map(_num_idle, self.modules()))

    @property
    def tied_modules(self) -> tuple[str, ...]:
        """Modules of a pipeline's first stage whose weights the last one needs too."""
        return ("tok_embeddings",) if self.enable_weight_tying else ()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: None = None,
        *,
        head_fn: Callable[..., Tensor] | None = None,
        head_inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token, or what ``head_fn`` makes instead.

        Args:
            tokens: int64 (B, S); or, where other stages of a pipeline hold the layers before, their (B, S, dim).
            positions: Global position of each token, int64 (B, S) or (S,), below the rotary table's ``max_seq_len``;
                pad slots take 0. None: ``arange(S)``.
            attention_masks: None: attention is causal over the row.
            head_fn: As in `dtcp.models.Llama`.
            head_inputs: A third argument of ``head_fn``, by rows.

        Returns:
            (B, S, vocab_size) in the parameters' dtype; with ``head_fn``, what that returns.

        Raises:
            ValueError: For another shape or dtype; for ids and positions out of range, where their values cost no
                device wait.
            NotImplementedError: For attention masks.
        """
        is_embedded = is_residual_stream(tokens)
        if not is_embedded:
            check_tokens(tokens, self.config.vocab_size)
        positions = self._checked(resolve_positions(positions, tokens))
        x = tokens if is_embedded else self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, attention_masks, positions)
        if self.norm is None:  # other stages hold the layers after
            return x
        x = self.norm(x)
        is_tied = self.enable_weight_tying
        if head_fn is not None:
            weight = self.tok_embeddings.weight if is_tied else self.lm_head.weight
            return head_fn(x, weight) if head_inputs is None else head_fn(x, weight, head_inputs)
        return self.lm_head(x, self.tok_embeddings.weight) if is_tied else self.lm_head(x)

    def _checked(self, positions: Tensor) -> Tensor:
        """Positions as torchtitan takes them, (1 or B, S)."""
        if can_read(positions):
            rows = min(layer.attention.rope.max_seq_len for layer in self.config.layers)
            low, high = (int(x) for x in torch.aminmax(positions))
            if low < 0:
                raise ValueError(f"positions must be >= 0, got {low}; pad slots take position 0")
            if high >= rows:
                raise table_error(high + 1, rows)
        return positions if positions.ndim == 2 else positions[None]

    # ---- initial weights ----

    def init_weights(self, seed: int) -> None:
        """Draw every parameter from ``seed`` and its name, by torchtitan's own distributions; fill the rotary tables.

        See `dtcp.models.init.initialize`: the values do not depend on the mesh.
        """
        initialize(self, seed, self.weight_init)

    def weight_init(self, name: str) -> Fill:
        """Return what draws the initial values of the parameter called ``name``."""
        return self._fills[name]

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Fill the rotary tables, which ``to_empty`` leaves as they come; layers with equal ones share a tensor."""
        tables: dict[str, Tensor] = {}
        for module in self.modules():
            if isinstance(module, MoE) and not module.tokens_per_expert_E.is_meta:
                module.tokens_per_expert_E.zero_()
            if isinstance(module, RoPE) and not module.cache.is_meta:
                key = f"{module.config} {module.cache.device}"
                if key not in tables:
                    module._init_self_buffers()
                    tables[key] = module.cache
                module.cache = tables[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TitanDecoder:
        tables = {id(module.cache) for module in self.modules() if isinstance(module, RoPE)}
        return super()._apply(functools.partial(_move_only, tables, fn), recurse=recurse)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Raise: torchtitan's initial weights come from the global random state, and so depend on the mesh."""
        raise NotImplementedError("init_states draws weights that depend on the mesh; call init_weights(seed) instead")

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward operations per token at ``seq_len``; the formula is `training_flops_per_token`'s."""
        flops = 6 * self._num_matmul_parameters
        for attention in (layer.attention for layer in self.config.layers):
            width = attention.n_heads * (attention.head_dim or attention.dim // attention.n_heads)
            left, _ = attention.inner_attention.window_size
            window = None if left < 0 else left + 1
            flops += training_flops_per_token(0, 1, width, seq_len, window_size=window)
        return flops


def _refuse_other_modules(config: Decoder.Config) -> None:
    """Subclasses do something else with their weights."""
    for base, *allowed in (
        (BaseQKVLinear.Config, FusedQKVLinear.Config, QKVLinear.Config),
        (FeedForward.Config, FeedForward.Config),
        (Linear.Config, Linear.Config, ScaledBiasRowwiseLinear.Config),
    ):
        for name, found, *_ in config.traverse(base):
            if type(found) not in allowed:
                raise NotImplementedError(
                    f"{name} of the config is {type(found).__qualname__}; TitanDecoder takes "
                    f"{' or '.join(kind.__qualname__ for kind in allowed)}: use tp_gemm_backend='default' and no "
                    "converters, or config.build()"
                )
    for name, moe, *_ in config.traverse(MoE.Config):
        if moe.load_balance_coeff is not None:
            raise NotImplementedError(
                f"{name} of the config has load_balance_coeff={moe.load_balance_coeff}: a bias of experts that only "
                "torchtitan's own optimizer moves, by counts with pad slots in them; set load_balance_coeff=None"
            )


def _move_only(tables: set[int], fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What ``to`` and ``to_empty`` make of a tensor; rotary tables only move, and keep their digits."""
    if id(x) not in tables:
        return fn(x)
    device = fn(torch.empty(0, device=x.device)).device
    return torch.empty_like(x, device=device) if x.is_meta else x.to(device)


def _num_idle(module: nn.Module) -> int:
    """Parameters of experts that a token does not go to."""
    if not isinstance(module, MoE):
        return 0
    experts = module.routed_experts.inner_experts
    held = sum(parameter.numel() for parameter in experts.parameters())
    return held - held * module.router.top_k // experts.num_experts


def _drop_tied_head(model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    if model.enable_weight_tying:
        state_dict.pop(f"{prefix}lm_head.weight", None)


def _initial_distributions(model: nn.Module, qk_init_scale: float) -> dict[str, Fill]:
    """What the config says of each parameter, by name; taken before wrappers change the names."""
    fills: dict[str, Fill] = {}
    for prefix, module in model.named_modules():
        given = getattr(module, "_param_init", None) or {}
        for name, _ in module.named_parameters(recurse=False):
            if name not in given:
                raise ValueError(
                    f"the config has no initial distribution of {prefix}.{name}; give it there: param_init="
                    f"{{{name!r}: …}}"
                )
            fills[f"{prefix}.{name}"] = given[name]
    for prefix, module in model.named_modules():
        match module:
            case FusedQKVLinear():
                rows: tuple[int, int] | None = (module.r_dim, module.head_dim)
                names = ["wqkv"]
            case QKVLinear():
                rows, names = None, ["wq", "wk"]
            case _:
                continue
        attention = prefix.removesuffix(".qkv_linear")
        if f"{attention}.q_norm.weight" in fills:  # what comes before a norm has no scale, and after it a large one
            rows, prefix, names = None, attention, ["q_norm"]
        for name in (f"{prefix}.{name}.weight" for name in names):
            fills[name] = functools.partial(_fill_scaled, fills[name], qk_init_scale, rows)
    return fills


def _fill_scaled(fill: Fill, factor: float, fused: tuple[int, int] | None, values: Tensor) -> None:
    """Draw, then multiply by ``factor``; but for the rows of value heads in fused projections.

    Those are (Hkv · R · D, dim) with ``fused`` (R, D): the R = H / Hkv + 2 heads of a group, its value head last.
    """
    fill(values)
    (values if fused is None else values.unflatten(0, (-1, *fused))[:, :-1]).mul_(factor)
