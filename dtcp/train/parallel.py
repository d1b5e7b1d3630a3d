"""From a model on the meta device to one that is cut, compiled, sharded and has its weights, in this order."""

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from dtcp.mesh import ParallelDims
from dtcp.models import GPT, Llama
from dtcp.parallelize.checkpointing import apply_activation_checkpointing
from dtcp.parallelize.context import ContextParallel
from dtcp.parallelize.fsdp import apply_fsdp
from dtcp.train.config import AttentionConfig, DType, JobConfig


def parallelize_for_training(model: GPT | Llama, dims: ParallelDims, config: JobConfig, device: torch.device) -> None:
    """Make ``model`` ready for its first step, in place.

    Context parallel attention in every block, then activation checkpointing, compile per block, FSDP2, and the initial
    weights, which do not depend on the mesh. Without another rank and with float32 the model stays plain.

    Args:
        model: On the meta device.
        dims: Built mesh.
        device: Where the parameters are going to live.

    Raises:
        ValueError: If a name in the attention section is unknown, also when cp is 1 and it is not used.
    """
    _cut_attention(model, dims, config.attention)
    checkpointing = config.activation_checkpointing
    apply_activation_checkpointing(
        model, checkpointing.mode.value, every=checkpointing.every, offload=checkpointing.offload
    )
    if config.training.compile:
        for block in model.layers.values():
            # Per block: the hooks of FSDP2 around it break no graph, and equal blocks share their compiled code.
            block.compile(fullgraph=True)
    if dims.dp_replicate * dims.dp_shard * dims.cp > 1 or config.training.param_dtype is not DType.float32:
        apply_fsdp(
            model,
            dims,
            param_dtype=config.training.param_dtype.torch_dtype,
            reduce_dtype=config.training.reduce_dtype.torch_dtype,
        )
    model.to_empty(device=device)
    model.init_weights(config.debug.seed)


def _cut_attention(model: GPT | Llama, dims: ParallelDims, config: AttentionConfig) -> None:
    style = ContextParallel(strategy=config.strategy, kernel=config.kernel)
    if dims.cp == 1:
        return
    for block in model.layers.values():
        assert isinstance(block, nn.Module)
        parallelize_module(block, dims.view("cp"), {"attention.sdpa": style})
