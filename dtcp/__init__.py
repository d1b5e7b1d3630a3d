"""dtcp: exact, load-balanced context and sequence parallelism for PyTorch, never silently wrong."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, unlike the names below: loading the submodule `dtcp.shard`, or `dtcp.parallelize`, binds that name in this
# package, and only an import that comes first and rebinds it makes it the function for good.
from dtcp.parallelize.model import PipelineOptions, parallelize
from dtcp.shard import check_same_batch, shard, shift_labels, unshard

# At once too: where dtcp is imported, attention of DTensors that are cut along the sequence is context parallel.
import dtcp.dispatch.door  # noqa: F401  # isort: skip

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dtcp.attention.api import context_parallel_attention
    from dtcp.attention.measure import measure_rates
    from dtcp.attention.predict import Rates
    from dtcp.attention.reference import reference_attention
    from dtcp.dispatch.context import context_parallel
    from dtcp.dispatch.tagged import as_dtensor
    from dtcp.dispatch.unshard import context_parallel_unshard
    from dtcp.documents import Documents
    from dtcp.dropout import AttentionDropout, Dropout, ModelWithDropout, dropout_keys, name_dropouts
    from dtcp.halo import Halo, halo_exchange
    from dtcp.layout import SequenceLayout, make_layout
    from dtcp.linear_loss import linear_token_loss
    from dtcp.loss import count_valid_tokens, token_loss
    from dtcp.mesh import ParallelDims
    from dtcp.models.hf import load_safetensors, save_safetensors
    from dtcp.parallelize.checkpointing import apply_activation_checkpointing
    from dtcp.parallelize.context import ContextParallel, set_sequence
    from dtcp.parallelize.dropout import HeadParallelDropout, SequenceParallelDropout
    from dtcp.parallelize.fsdp import apply_fsdp
    from dtcp.parallelize.gradients import clip_grad_norm_, reduce_gradients
    from dtcp.parallelize.pipeline import Pipeline
    from dtcp.parallelize.sinks import HeadParallelSinks
    from dtcp.parallelize.styles import ReplicatedParameters, SharedInputColumns, VocabularyParallelEmbedding
    from dtcp.parallelize.tensor import apply_tensor_parallel, tensor_parallel_plan
    from dtcp.tiles import Tile

# Public name -> module that defines it. Loaded on first use, so that `import dtcp` stays light
# (importing tensor parallelism, FSDP and the models costs seconds that a layout does not need).
_HOME = {
    "AttentionDropout": "dtcp.dropout",
    "ContextParallel": "dtcp.parallelize.context",
    "Documents": "dtcp.documents",
    "Dropout": "dtcp.dropout",
    "Halo": "dtcp.halo",
    "HeadParallelDropout": "dtcp.parallelize.dropout",
    "HeadParallelSinks": "dtcp.parallelize.sinks",
    "ModelWithDropout": "dtcp.dropout",
    "ParallelDims": "dtcp.mesh",
    "Pipeline": "dtcp.parallelize.pipeline",
    "Rates": "dtcp.attention.predict",
    "ReplicatedParameters": "dtcp.parallelize.styles",
    "SequenceLayout": "dtcp.layout",
    "SequenceParallelDropout": "dtcp.parallelize.dropout",
    "SharedInputColumns": "dtcp.parallelize.styles",
    "Tile": "dtcp.tiles",
    "VocabularyParallelEmbedding": "dtcp.parallelize.styles",
    "apply_activation_checkpointing": "dtcp.parallelize.checkpointing",
    "apply_fsdp": "dtcp.parallelize.fsdp",
    "apply_tensor_parallel": "dtcp.parallelize.tensor",
    "as_dtensor": "dtcp.dispatch.tagged",
    "clip_grad_norm_": "dtcp.parallelize.gradients",
    "context_parallel": "dtcp.dispatch.context",
    "context_parallel_attention": "dtcp.attention.api",
    "context_parallel_unshard": "dtcp.dispatch.unshard",
    "count_valid_tokens": "dtcp.loss",
    "dropout_keys": "dtcp.dropout",
    "halo_exchange": "dtcp.halo",
    "linear_token_loss": "dtcp.linear_loss",
    "load_safetensors": "dtcp.models.hf",
    "make_layout": "dtcp.layout",
    "measure_rates": "dtcp.attention.measure",
    "name_dropouts": "dtcp.dropout",
    "reduce_gradients": "dtcp.parallelize.gradients",
    "reference_attention": "dtcp.attention.reference",
    "save_safetensors": "dtcp.models.hf",
    "set_sequence": "dtcp.parallelize.context",
    "tensor_parallel_plan": "dtcp.parallelize.tensor",
    "token_loss": "dtcp.loss",
}

__all__ = [
    "AttentionDropout",
    "ContextParallel",
    "Documents",
    "Dropout",
    "Halo",
    "HeadParallelDropout",
    "HeadParallelSinks",
    "ModelWithDropout",
    "ParallelDims",
    "Pipeline",
    "PipelineOptions",
    "Rates",
    "ReplicatedParameters",
    "SequenceLayout",
    "SequenceParallelDropout",
    "SharedInputColumns",
    "Tile",
    "VocabularyParallelEmbedding",
    "__version__",
    "apply_activation_checkpointing",
    "apply_fsdp",
    "apply_tensor_parallel",
    "as_dtensor",
    "check_same_batch",
    "clip_grad_norm_",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_unshard",
    "count_valid_tokens",
    "dropout_keys",
    "halo_exchange",
    "linear_token_loss",
    "load_safetensors",
    "make_layout",
    "measure_rates",
    "name_dropouts",
    "parallelize",
    "reduce_gradients",
    "reference_attention",
    "save_safetensors",
    "set_sequence",
    "shard",
    "shift_labels",
    "tensor_parallel_plan",
    "token_loss",
    "unshard",
]


# Names of torch.distributed.tensor.experimental that have no counterpart of their own -> what to write instead.
_INSTEAD = {
    "set_rotate_method": (
        "say it where it applies: context_parallel(..., strategy='all_gather') for set_rotate_method('allgather'), "
        "strategy='ring' (the default) for 'alltoall'"
    ),
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        # Not AttributeError, for which `from dtcp import ...` has words of its own.
        raise ImportError(f"dtcp has no {name}; {_INSTEAD[name]}", name=__name__)
    if name not in _HOME:
        raise AttributeError(f"module 'dtcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
