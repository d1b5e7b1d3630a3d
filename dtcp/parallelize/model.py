"""A whole model made parallel in one call: every step of this library in the order in which they compose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtcp.models.titan_config import has_experts
from dtcp.parallelize.blocks import is_used_again, named_blocks
from dtcp.parallelize.shared import refuse_shared_memory
from dtcp.parallelize.watch import watch_planned

if TYPE_CHECKING:  # what a step needs is loaded when the step is taken: `import dtcp` stays light
    from torch.distributed.fsdp import OffloadPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

    from dtcp.attention.predict import Rates
    from dtcp.mesh import ParallelDims
    from dtcp.parallelize.pipeline import Loss, Pipeline


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How ``parallelize`` cuts a model into pipeline stages.

    Attributes:
        schedule: ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ``InterleavedZeroBubble`` or ``ZBVZeroBubble``.
        stages_per_rank: None for what the schedule needs at least: 1, or 2 of the last three.
        width: Of the residual stream; None reads ``model.config.dim``.
        tied: Modules of the first stage whose parameters the last stage needs too, and that stay equal; None:
            ``model.tied_modules``, or the token embedding where ``model.config.tie_weights``. A last stage whose own
            modules share those parameters (``head.weight is token_embedding.weight``) has them by these names only;
            else it keeps the module, and the model's forward must not embed what is no token.
        loss: ``loss(output, labels, num_valid_tokens=…)`` of a microbatch; None is ``token_loss``.
    """

    schedule: str = "1F1B"
    stages_per_rank: int | None = None
    width: int | None = None
    tied: Sequence[str] | None = None
    loss: Loss | None = None


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    *,
    sequence_parallel: bool = True,
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    context_plan: Mapping[str, ParallelStyle] | None = None,
    strategy: str = "ring",
    ulysses_degree: int | None = None,
    ranks_per_node: int | None = None,
    kv_grad_dtype: torch.dtype | None = None,
    rates: Rates | None = None,
    kernel: str = "auto",
    activation_checkpointing: str = "none",
    checkpoint_every: int = 1,
    offload_activations: bool = False,
    compile: bool | Mapping[str, Any] = False,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    offload_policy: OffloadPolicy | None = None,
    pipeline: PipelineOptions | None = None,
    packed_documents: bool = False,
) -> nn.Module | Pipeline:
    """Make ``model`` parallel over all axes of the mesh, in place.

    In this order, each step being a function of its own for those who want only some of them:

    1. tensor and sequence parallelism (``apply_tensor_parallel``), at tp > 1;
    2. context parallel attention in every block (a plan with ``ContextParallel``), at cp > 1 or with
       ``packed_documents``;
    3. activation checkpointing and offload (``apply_activation_checkpointing``);
    4. ``torch.compile`` of every block, fullgraph;
    5. stages of a pipeline, at pp > 1;
    6. FSDP2 over dp_shard × cp, and HSDP with dp_replicate (``apply_fsdp``), with more than one such rank or a
       ``param_dtype``.

    With cp > 1 call ``set_sequence(model, layout)`` before each step, as for any plan (with several stages give
    ``sequences`` to the pipeline instead, if they change from microbatch to microbatch); with sequence parallelism the
    layout needs ``multiple_of=tp``.

    Args:
        model: Has ``layers``, an ``nn.ModuleDict`` or ``nn.ModuleList`` (a dict at pp > 1) of blocks. Best on the meta
            device: ``model.to_empty(device=…)`` and ``model.init_weights(seed)`` come after.
        dims: Built mesh.
        sequence_parallel, tensor_plan: See ``apply_tensor_parallel``; a plan for models that it has none for.
        context_plan: Of a block, where 2. plans attention; None: ``ContextParallel(strategy=…, kernel=…, …)`` for
            the modules that attend as those of `dtcp.models` do (``"attention.sdpa"``), or that
            `dtcp.integrations` have put in. An empty one leaves attention to another door,
            ``with context_parallel(...)``.
        strategy, ulysses_degree, ranks_per_node, kv_grad_dtype, rates, kernel: Of that plan.
        activation_checkpointing: ``none``, ``full`` or ``selective``; of every ``checkpoint_every``-th block.
        offload_activations: Keep what the treated blocks keep on the host.
        compile: True, or options of ``torch.compile`` beside ``fullgraph``.
        param_dtype, reduce_dtype, offload_policy: Of ``apply_fsdp``.
        pipeline: At pp > 1; None for 1F1B.
        packed_documents: Rows hold several documents, of which ``set_sequence(model, layout, documents=…)`` will tell:
            attention is planned at cp=1 too.

    Returns:
        ``model`` itself, or at pp > 1 this rank's `Pipeline`: a module that holds the parameters of its stages, and
        that ``forward_backward(tokens, labels, …)`` and ``evaluate(…)`` run.

    Raises:
        ValueError, NotImplementedError: Of the steps, before anything is sent.
    """
    from dtcp.parallelize.checkpointing import apply_activation_checkpointing
    from dtcp.parallelize.context import ContextParallel

    _blocks(model)
    _check(model, dims, compile, pipeline)
    if dims.tp > 1:
        from dtcp.parallelize.tensor import apply_tensor_parallel

        apply_tensor_parallel(model, dims, sequence_parallel=sequence_parallel, plan=tensor_plan)
    # Checks the names also where cp is 1.
    style = ContextParallel(
        strategy=strategy, ulysses_degree=ulysses_degree, ranks_per_node=ranks_per_node,
        kv_grad_dtype=kv_grad_dtype, rates=rates, kernel=kernel,
    )  # fmt: skip
    planned: dict[str, nn.Module] = {}
    if dims.cp > 1 or packed_documents:
        planned = _apply_context_plan(model, dims, style, context_plan)
    apply_activation_checkpointing(model, activation_checkpointing, every=checkpoint_every, offload=offload_activations)
    if compile:
        for block in _blocks(model):
            # Per block: the hooks of FSDP2 around it break no graph, and equal blocks share their compiled code.
            block.compile(fullgraph=True, **(compile if isinstance(compile, Mapping) else {}))
    elif planned and dims.pp == 1:  # a hook on what is compiled would be traced
        watch_planned(model, planned)
    sharding = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "offload_policy": offload_policy}
    if dims.pp > 1:
        divisor = dims.tp if sequence_parallel else 1
        return _make_pipeline(model, dims, pipeline or PipelineOptions(), divisor, sharding)
    _shard(model, dims, sharding)
    return model


def _apply_context_plan(
    model: nn.Module, dims: ParallelDims, style: ParallelStyle, context_plan: Mapping[str, ParallelStyle] | None
) -> dict[str, nn.Module]:
    """Apply the plan to every block, and return the modules by name that are context parallel then."""
    from torch.distributed.tensor.parallel import parallelize_module

    from dtcp.parallelize.context import _ContextParallelModule
    from dtcp.parallelize.unmatched import visit_once

    done: set[int] = set()
    for block in _blocks(model):
        plan = visit_once(block, _context_plan(block, style) if context_plan is None else context_plan)
        # Attention that blocks share has been visited with the first of them.
        shared = {name for name, module in block.named_modules() if id(module) in done}
        plan = {name: entry for name, entry in plan.items() if name not in shared}
        if plan:
            parallelize_module(block, dims.view("cp"), plan)
        done |= {id(module) for module in block.modules() if isinstance(module, _ContextParallelModule)}
    return {name: module for name, module in model.named_modules() if id(module) in done}


def _context_plan(block: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    from dtcp.models.attention import ScaledDotProductAttention

    names = [name for name, module in block.named_modules() if isinstance(module, ScaledDotProductAttention)]
    return dict.fromkeys(names or ["attention.sdpa"], style)  # which is refused by name where there is none


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for _, block in named_blocks(model, "parallelize", "take the steps one by one")]


def _shard(model: nn.Module, dims: ParallelDims, options: dict[str, Any], **more: Any) -> None:
    from dtcp.parallelize.fsdp import apply_fsdp

    if dims.dp_replicate * dims.dp_shard * dims.cp > 1 or options["param_dtype"] is not None:
        apply_fsdp(model, dims, **options, **more)


def _make_pipeline(
    model: nn.Module, dims: ParallelDims, options: PipelineOptions, seq_len_divisor: int, sharding: dict[str, Any]
) -> Pipeline:
    from dtcp.loss import token_loss
    from dtcp.parallelize.pipeline import Pipeline
    from dtcp.parallelize.shared import shared_buffers, tied_parameters
    from dtcp.parallelize.stages import all_stages, split_into_stages

    tied = _tied_modules(model, options)
    # What stages share is known before FSDP2 puts other parameters in place.
    every = all_stages(model, dims.pp, schedule=options.schedule, stages_per_rank=options.stages_per_rank, tied=tied)
    names, constant_buffers = tied_parameters(every[0], every[-1], tied), shared_buffers(every)
    stages, num_stages = split_into_stages(
        model, dims, schedule=options.schedule, stages_per_rank=options.stages_per_rank, tied=tied
    )
    for stage in stages.values():
        # Gathered once for all microbatches of a step, not for each.
        _shard(stage, dims, sharding, reshard_after_forward=False)
    config: Any = getattr(model, "config", None)
    return Pipeline(
        stages,
        dims,
        num_stages=num_stages,
        width=config.dim if options.width is None else options.width,
        seq_len_divisor=seq_len_divisor,
        schedule=options.schedule,
        dtype=sharding["param_dtype"] or next(model.parameters()).dtype,
        loss=options.loss or token_loss,
        tied=names,
        constant_buffers=constant_buffers,
    )


def _tied_modules(model: nn.Module, options: PipelineOptions) -> Sequence[str]:
    if options.tied is not None:
        return options.tied
    config: Any = getattr(model, "config", None)
    default = ("token_embedding",) if getattr(config, "tie_weights", False) else ()
    return getattr(model, "tied_modules", default)


def _check(
    model: nn.Module, dims: ParallelDims, compile: bool | Mapping[str, Any], pipeline: PipelineOptions | None
) -> None:
    refuse_shared_memory(model)
    if compile and has_experts(model):
        raise NotImplementedError(
            f"compile={compile} for a mixture of experts of torchtitan's: torch traces its grouped product in bfloat16 "
            "only; use compile=False (training.compile=false)"
        )
    if isinstance(compile, Mapping) and "fullgraph" in compile:
        raise ValueError("parallelize compiles every block with fullgraph=True; leave fullgraph out of compile=")
    if dims.pp == 1 and pipeline is not None:
        raise ValueError("pipeline= is for pp > 1, got pp=1; leave it out, or make the mesh with pp=2 or more")
    if (
        dims.pp > 1
        and (pipeline is None or pipeline.width is None)
        and not hasattr(getattr(model, "config", None), "dim")
    ):
        raise ValueError(
            f"a pipeline needs the width of the residual stream of {type(model).__name__}, which has no config.dim; "
            "give the model config.dim, or give parallelize pipeline=PipelineOptions(width=…)"
        )
    if dims.pp > 1 and is_used_again(model):
        raise ValueError(
            f"{type(model).__name__} has a block in model.layers several times, which stages on different ranks cannot "
            f"share, got pp={dims.pp}; use pp=1"
        )
    if dims.pp > 1 and isinstance(model.layers, nn.ModuleDict):
        from dtcp.parallelize.stages import all_stages

        # Before anything is cut: what a stage shares with another is refused while the model is whole.
        options = pipeline or PipelineOptions()
        tied = _tied_modules(model, options)
        all_stages(model, dims.pp, schedule=options.schedule, stages_per_rank=options.stages_per_rank, tied=tied)
