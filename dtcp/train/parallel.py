"""From a model on the meta device to one that is cut, compiled, sharded and has its weights."""

from typing import Any

import torch
from torch import Tensor, nn

from dtcp.attention.measure import measure_rates
from dtcp.attention.predict import Rates
from dtcp.mesh import ParallelDims
from dtcp.models.init import initialize
from dtcp.models.transformers_config import is_transformers_model
from dtcp.parallelize.model import PipelineOptions, parallelize
from dtcp.train.checks import check_transformers
from dtcp.train.config import DType, JobConfig


def parallelize_for_training(
    model: Any, dims: ParallelDims, config: JobConfig, device: torch.device, **plans: Any
) -> nn.Module:
    """Return ``model`` ready for its first step: `parallelize` as the configuration says, and the initial weights.

    Weights do not depend on the mesh. Without another rank and with float32 the model stays plain.

    Args:
        model: On the meta device.
        dims: Built mesh.
        device: Where the parameters are going to live.
        plans: As in `cut_model`.

    Raises:
        ValueError: If a name in the attention section is unknown, also when cp is 1 and it is not used; if ranks
            cannot share heads, features or layers.
    """
    parallel = cut_model(model, dims, config, **plans)
    parallel.to_empty(device=device)
    initialize(parallel, config.debug.seed, model.weight_init)
    return parallel


def attention_rates(model: Any, dims: ParallelDims, config: JobConfig) -> Rates | None:
    """What ``attention.strategy=auto`` decides by, None for the rates of data sheets. Collective if they are measured.

    Raises:
        ValueError: If the configuration asks for rates that there are none of, or that nothing looks at.
    """
    rates = config.attention.rates
    if rates is None:
        return None
    if rates != "measured" or config.attention.strategy != "auto":
        raise ValueError(
            f"attention.rates must be null or measured, and is for attention.strategy=auto; got {rates!r} for "
            f"{config.attention.strategy!r}"
        )
    if dims.cp == 1:
        return None
    of_model = getattr(model, "config", None)
    heads, kv_heads = (getattr(of_model, name, None) for name in ("num_heads", "num_kv_heads"))
    sizes = {} if heads is None else {"num_heads": -(-heads // dims.tp)}
    if heads is not None and kv_heads is not None and kv_heads % dims.tp == 0:
        sizes["num_kv_heads"] = kv_heads // dims.tp
    return measure_rates(
        dims.view("cp"), dtype=config.training.param_dtype.torch_dtype, kernel=config.attention.kernel, **sizes
    )


def cut_model(model: nn.Module, dims: ParallelDims, config: JobConfig, **plans: Any) -> nn.Module:
    """Return `parallelize` of any model as the configuration says.

    Args:
        plans: ``tensor_plan`` and ``context_plan`` of `parallelize`, for models that dtcp has no plan for.
    """
    training, checkpointing = config.training, config.activation_checkpointing
    how: dict[str, Any] = {
        "strategy": config.attention.strategy,
        "ulysses_degree": config.attention.ulysses_degree,
        "ranks_per_node": dims.cp_ranks_per_node(config.mesh.ranks_per_node),
        "kv_grad_dtype": config.attention.torch_kv_grad_dtype,
        "rates": attention_rates(model, dims, config),
        "kernel": config.attention.kernel,
    }
    if is_transformers_model(model):
        check_transformers(config, dims)
        # Loads transformers, as the model did.
        from dtcp.integrations.transformers_job import attend_over

        attend_over(model, dims, **how)  # type: ignore[arg-type]
        plans = {"context_plan": {}} | plans  # its attention is reached by its own interface
    return parallelize(
        model,
        dims,
        sequence_parallel=config.tensor_parallel.sequence_parallel,
        **how,
        activation_checkpointing=checkpointing.mode.value,
        checkpoint_every=checkpointing.every,
        offload_activations=checkpointing.offload,
        compile=training.compile,
        param_dtype=None if training.param_dtype is DType.float32 else training.param_dtype.torch_dtype,
        reduce_dtype=training.reduce_dtype.torch_dtype,
        pipeline=_pipeline_options(config) if dims.pp > 1 else None,
        packed_documents=config.data.pack_documents,
        **plans,
    )


def _pipeline_options(config: JobConfig) -> PipelineOptions:
    pipeline = config.pipeline
    loss = None if config.training.loss_chunk_tokens is None else _loss_of_head
    return PipelineOptions(pipeline.schedule, pipeline.stages_per_rank, loss=loss)


def _loss_of_head(output: Tensor, labels: Tensor, *, num_valid_tokens: Tensor | int) -> Tensor:
    """The last stage's head gives the loss itself, see `Trainer.head_loss`."""
    return output
