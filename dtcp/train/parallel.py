"""From a model on the meta device to one that is cut, compiled, sharded and has its weights, in this order."""

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from dtcp.mesh import ParallelDims
from dtcp.models import GPT, Llama
from dtcp.parallelize.context import ContextParallel
from dtcp.parallelize.fsdp import apply_fsdp
from dtcp.parallelize.tensor import apply_tensor_parallel
from dtcp.train.config import AttentionConfig, DType, JobConfig


def parallelize_for_training(model: GPT | Llama, dims: ParallelDims, config: JobConfig, device: torch.device) -> None:
    """Make ``model`` ready for its first step, in place.

    Tensor and sequence parallelism, then context parallel attention in every block, then compile per block, then FSDP2,
    then the initial weights, which do not depend on the mesh. Without another rank and with float32 the model stays
    plain.

    Args:
        model: On the meta device.
        dims: Built mesh.
        device: Where the parameters are going to live.

    Raises:
        ValueError: If a name in the attention section is unknown, also when cp is 1 and it is not used; if tp ranks
            cannot share the heads or features.
    """
    apply_tensor_parallel(model, dims, sequence_parallel=config.tensor_parallel.sequence_parallel)
    _cut_attention(model, dims, config.attention)
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
