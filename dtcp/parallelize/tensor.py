"""Tensor parallelism, and with it sequence parallelism, of the models here: a plan as data, and a verb that applies it.

Heads, features and the vocabulary are cut over the ``tp`` axis. Between them, in the residual stream, sequence
parallelism cuts the positions over the same ranks: norms work on a share of them, and an all-gather and a
reduce-scatter take the place of each all-reduce. Korthikanti et al. 2022, arXiv:2205.05198.

Shapes: B batch, S positions of a cp rank, S/T of them on each of T tp ranks, D width of the residual stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from dtcp.dropout import AttentionDropout
from dtcp.mesh import ParallelDims
from dtcp.models import GPT, Llama
from dtcp.models.head import TiedHead
from dtcp.models.titan_config import is_titan
from dtcp.parallelize.dropout import HeadParallelDropout, SequenceParallelDropout
from dtcp.parallelize.shared import keep_shared, shared_parameters
from dtcp.parallelize.sinks import HeadParallelSinks
from dtcp.parallelize.styles import ReplicatedParameters, SharedInputColumns, VocabularyParallelEmbedding
from dtcp.parallelize.unmatched import refuse_parametrized, refuse_unmatched_keys, visit_once

Plan = dict[str, ParallelStyle]


def tensor_parallel_plan(model: nn.Module, *, sequence_parallel: bool = True, loss_parallel: bool = True) -> Plan:
    """Return what ``parallelize_module(model, dims.view("tp"), plan)`` makes tensor parallel, to print and to change.

    Attention and feed-forward are column parallel, then row parallel, and their modules in between see plain tensors of
    a share of the heads or features. The residual stream is plain too: (B, S/T, D) of each rank's own positions, or
    (B, S, D) without sequence parallelism. Embeddings and head are cut by vocabulary, which need not divide by T.

    Args:
        model: A ``GPT``, ``Llama`` or ``TitanDecoder``, on any device. For another model write one in the same way.
        sequence_parallel: Cut the residual stream over positions. S has to be a multiple of T:
            ``make_layout(..., multiple_of=T)``.
        loss_parallel: Leave the logits a DTensor, ``Shard(-1)``, as ``token_loss`` takes them. False gathers them:
            plain (B, S, V) on each rank.

    Raises:
        ValueError: If there is no plan for this kind of model, as for a mixture of experts.
    """
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    if is_titan(model):
        _refuse_experts(model.config)
        return _titan_plan(model, stream, loss_parallel)
    if not isinstance(model, GPT | Llama):
        raise ValueError(
            f"there is a tensor parallel plan for GPT, Llama and TitanDecoder, got {type(model).__name__}; write one "
            "for its modules in the same way and give it to dtcp.parallelize(tensor_plan=...), or "
            "apply_tensor_parallel(plan=...); the doctor takes it as doctor.tensor_plan=module:name"
        )
    plan: Plan = {"token_embedding": VocabularyParallelEmbedding(output_layout=stream)}
    if isinstance(model, GPT):
        # Positions are (B, S) or (S,): the last dim is what is cut.
        cut = Shard(-1) if sequence_parallel else Replicate()
        plan["position_embedding"] = ReplicatedParameters(input_layout=Replicate(), desired_input_layout=cut)
    norm = ReplicatedParameters(input_layout=stream)
    drops_weights = model.config.attention_dropout > 0
    # A Llama's attention is also given the positions, and where it drops the keys, of which every rank needs all.
    more = (None,) * (isinstance(model, Llama) + drops_weights)
    plan |= {
        "layers.*.attention_norm": norm,
        **_columns("layers.*.attention", ("query", "key", "value"), sequence_parallel, *more),
        "layers.*.attention.output": RowwiseParallel(output_layouts=stream),
        "layers.*.feed_forward_norm": norm,
        **_columns("layers.*.feed_forward", ("up",) if isinstance(model, GPT) else ("gate", "up"), sequence_parallel),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=stream),
        "final_norm": norm,
        "head": _head(model.head, stream, loss_parallel),
    }
    if isinstance(model, GPT) and sequence_parallel:  # else every rank drops elements of all positions, the same ones
        names = ("embedding_dropout", "layers.*.attention_residual_dropout", "layers.*.feed_forward_residual_dropout")
        plan |= {name: SequenceParallelDropout() for name in names}
    if model.config.sinks:
        plan["layers.*.attention"] = HeadParallelSinks(plan["layers.*.attention"])
    if drops_weights:
        plan["layers.*.attention.sdpa"] = HeadParallelDropout()
    return plan


def apply_tensor_parallel(
    model: nn.Module,
    dims: ParallelDims,
    *,
    sequence_parallel: bool = True,
    plan: Mapping[str, ParallelStyle] | None = None,
) -> None:
    """Make ``model`` tensor parallel over ``dims.view("tp")``, in place; nothing at tp=1.

    Comes before context parallelism, ``torch.compile`` and FSDP2. Gradients of parameters that every rank holds whole
    are added over the tp ranks in the backward; nothing is left to call.

    Args:
        model: On any device; parameters that are not on "meta" have to be equal on all tp ranks.
        dims: Built mesh.
        sequence_parallel: As in ``tensor_parallel_plan``; without it every rank computes all norms.
        plan: Instead of ``tensor_parallel_plan(model, ...)``: that plan changed, or one for a model of your own.

    Raises:
        ValueError: If heads or features do not divide by tp, a key of the plan matches no module, ``model`` is
            parallel already, or the plan cuts a parameter in one way and another that is the same one in another, or
            one that is parametrized.
        NotImplementedError: If ``model`` has an ``nn.Dropout`` that acts: each rank would draw a mask of its own.
    """
    if dims.tp == 1:
        return
    if plan is None:
        plan = tensor_parallel_plan(model, sequence_parallel=sequence_parallel)
    _check_model(model, dims.tp)
    refuse_unmatched_keys(model, plan)
    refuse_parametrized(model, plan, (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput))
    shared = shared_parameters(model)
    parallelize_module(model, dims.view("tp"), visit_once(model, plan))
    keep_shared(shared)
    _check_heads_are_told(model, dims)
    _complete_gradients(model)


def _columns(module: str, names: tuple[str, ...], sequence_parallel: bool, *more: None) -> Plan:
    """Cut the layers called ``names``, which share the first input of ``module``; the rest, if any, stays as it is.

    One all-gather, or none, for all that the input goes to, and so one reduction of the gradient.
    """
    if sequence_parallel:
        return {module: SharedInputColumns(*names)}
    entry: Plan = {module: _enter(Replicate(), *more)}
    return entry | {f"{module}.{name}": ColwiseParallel() for name in names}


def _enter(stream: Placement, *more: None) -> PrepareModuleInput:
    """Make the first input whole on every rank, as a DTensor; the rest, if any, stays as it is."""
    return PrepareModuleInput(input_layouts=(stream, *more), desired_input_layouts=(Replicate(), *more))


def _titan_plan(model: Any, stream: Placement, loss_parallel: bool) -> Plan:
    """The same by torchtitan's names, of models with a dense feed-forward.

    Fused rows are key heads with their queries and values, so a cut keeps these. torchtitan's modules read the shape of
    their input, so that stays a tensor: gathered once, and kept whole.
    """
    norm = ReplicatedParameters(input_layout=stream)
    attention = next(iter(model.layers.values())).attention
    projections = [name for name, _ in attention.qkv_linear.named_children()]
    heads = [name for name in ("q_norm", "k_norm") if getattr(attention, name, None) is not None]
    return {
        "tok_embeddings": VocabularyParallelEmbedding(output_layout=stream),
        "layers.*.attention_norm": norm,
        "layers.*.attention": _enter(stream, None, None),  # masks and positions stay as they are
        **{f"layers.*.attention.qkv_linear.{name}": ColwiseParallel() for name in projections},
        # Of each head alone, (B, S, H, D): the weight is whole, its gradient a share of each rank's heads.
        **{f"layers.*.attention.{name}": ReplicatedParameters(input_layout=Shard(2)) for name in heads},
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
        "layers.*.ffn_norm": norm,
        "layers.*.feed_forward": _enter(stream),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w3": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "norm": norm,
        "lm_head": _head(model.lm_head, stream, loss_parallel),
    }


def _head(head: nn.Module, stream: Placement, loss_parallel: bool) -> ParallelStyle:
    output = Shard(-1) if loss_parallel else Replicate()
    if not isinstance(head, TiedHead):
        return ColwiseParallel(input_layouts=stream, output_layouts=output, use_local_output=not loss_parallel)
    # The weight comes with the call: the embedding's own, cut by vocabulary already. Its gradients of both uses meet.
    return PrepareModuleInputOutput(
        input_layouts=(stream, None),
        desired_input_layouts=(Replicate(), None),
        output_layouts=Shard(-1),
        desired_output_layouts=output,
        use_local_output=not loss_parallel,
    )


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_tensor_parallel(model: nn.Module, tp: int) -> None:
    """Raise ``ValueError`` naming the first size of one of our models that ``tp`` ranks cannot share."""
    config: Any = model.config
    sizes = _shared_sizes(model)
    common = math.gcd(*sizes.values())
    allowed = [str(degree) for degree in range(1, common + 1) if common % degree == 0]
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"tensor parallelism needs {name} divisible by tp, got {name}={size} and tp={tp}; use tp="
                f"{' or '.join(allowed)}, and cp or dp_shard for the other ranks"
            )
    if config.vocab_size < tp:
        raise ValueError(f"tensor parallelism needs vocab_size >= tp, got {config.vocab_size} and tp={tp}")


def _shared_sizes(model: nn.Module) -> dict[str, int]:
    config: Any = model.config
    if is_titan(model):
        _refuse_experts(config)
        attentions = [layer.attention for layer in config.layers]
        return {
            "num_heads": math.gcd(*(a.n_heads for a in attentions)),
            "num_kv_heads": math.gcd(*(a.n_kv_heads or a.n_heads for a in attentions)),
            "ffn_dim": math.gcd(*(layer.feed_forward.w1.out_features for layer in config.layers)),
        }
    if isinstance(model, Llama):
        return {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "ffn_dim": config.ffn_dim}
    return {"num_heads": config.num_heads, "ffn_dim": config.hidden_dim}


def _refuse_experts(config: Any) -> None:
    for index, layer in enumerate(config.layers):
        if layer.moe is not None:
            raise ValueError(
                f"there is no tensor parallel plan for a mixture of experts, which layer {index} has; use tp=1, and cp "
                "or dp_shard for the other ranks"
            )


def _check_model(model: nn.Module, tp: int) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"apply_tensor_parallel needs plain parameters, got {name} as a DTensor over "
                f"{parameter.device_mesh.mesh_dim_names}; call it once, and before apply_fsdp"
            )
    if isinstance(model, GPT | Llama) or is_titan(model):
        check_tensor_parallel(model, tp)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise NotImplementedError(
                f"tensor parallelism cannot take nn.Dropout, got p={module.p} in {name}: each rank would draw a mask "
                "of its own; use dtcp.Dropout, whose mask does not depend on the mesh, or p=0"
            )


def _check_heads_are_told(model: nn.Module, dims: ParallelDims) -> None:
    for name, module in model.named_modules():
        is_told = not isinstance(module, AttentionDropout) or "head_shard" in vars(module)
        if not is_told and module.p > 0:
            raise ValueError(
                f"attention dropout at tp={dims.tp} has to know which heads a rank has, got p={module.p} in {name} and "
                f"no HeadParallelDropout for it in the plan; add {{'{name}': dtcp.HeadParallelDropout()}}"
            )


# ---- gradients -------------------------------------------------------------------------------------------------------

_HAS_HOOK = "_dtcp_gradient_takes_placements"


def _complete_gradients(model: nn.Module) -> None:
    """Have gradients arrive with the placements of their parameters.

    # Note [Hooks that follow the parameters]
    Where ranks see different positions, the gradient of a whole parameter is Partial: right as a value, wrong as
    ``to_local()``; that of an embedding comes whole where the parameter is cut. FSDP2 mends both itself, on parameters
    that it puts in place of these. Without it a hook of each parameter does. ``to_empty`` and ``to`` put another tensor
    into a parameter, without its hooks: so the model looks before each forward. In a graph it does not, but hooks that
    are there run.
    """
    model.register_forward_pre_hook(_before_forward)


def _before_forward(module: nn.Module, inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) or not parameter.requires_grad:
            continue
        # A copy has the mark without the hooks, a parameter with another tensor in it the hooks without the mark.
        if not (hasattr(parameter, _HAS_HOOK) and parameter._backward_hooks):
            # The list of hooks has stayed when another tensor came: set again, it holds for that tensor.
            parameter._backward_hooks = parameter._backward_hooks
            parameter.register_hook(functools.partial(_take_placements, parameter.placements))
            setattr(parameter, _HAS_HOOK, True)


def _take_placements(placements: tuple[Placement, ...], gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.redistribute(placements=placements)
