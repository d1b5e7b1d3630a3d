"""What a job's configuration is checked for before anything is built; every message names the cure."""

import math

from dtcp.mesh import ParallelDims
from dtcp.train.config import JobConfig
from dtcp.train.data import DataConfig


def check_numbers(config: JobConfig) -> None:
    """Refuse numbers that make no sense on any mesh."""
    training = config.training
    if training.steps < 1:
        raise ValueError(f"training.steps has to be at least 1, got {training.steps}")
    if training.global_batch_size < 1:
        raise ValueError(f"training.global_batch_size has to be at least 1, got {training.global_batch_size}")
    if training.local_batch_size is not None and training.local_batch_size < 1:
        raise ValueError(
            f"training.local_batch_size has to be at least 1, got {training.local_batch_size}; null takes "
            "all rows at once"
        )
    if training.loss_chunk_tokens is not None and training.loss_chunk_tokens < 1:
        raise ValueError(
            f"training.loss_chunk_tokens has to be at least 1, got {training.loss_chunk_tokens}; null takes the logits "
            "of all tokens at once"
        )
    if config.debug.check_same_batch_every < 0:
        raise ValueError(
            f"debug.check_same_batch_every has to be at least 0, got {config.debug.check_same_batch_every}; 0 never "
            "compares"
        )
    if config.pipeline.stages_per_rank is not None and config.pipeline.stages_per_rank < 1:
        raise ValueError(
            f"pipeline.stages_per_rank has to be at least 1, got {config.pipeline.stages_per_rank}; null takes what "
            "the schedule needs"
        )
    if not training.max_norm > 0:
        raise ValueError(f"training.max_norm has to be positive, got {training.max_norm}; inf only measures")
    if not (math.isfinite(config.optimizer.lr) and config.optimizer.lr > 0):
        raise ValueError(f"optimizer.lr has to be positive, got {config.optimizer.lr}")


def check_documents_are_packed(config: JobConfig, data: DataConfig) -> None:
    """Refuse a layout that places tokens by documents where rows are one text."""
    if config.attention.layout == "per_document" and not data.pack_documents:
        raise ValueError(
            "attention.layout=per_document deals the documents of a row to the cp ranks, got "
            "data.pack_documents=false: a row is one text; set data.pack_documents=true, or attention.layout=head_tail"
        )


def check_vocabulary(num_ids: int, vocab_size: int, model_name: str) -> None:
    """Refuse a tokenizer whose ids the model has no rows for."""
    if num_ids > vocab_size:
        raise ValueError(
            f"the tokenizer has {num_ids} ids, model {model_name} only {vocab_size}; use model.vocab_size={num_ids}"
        )


def check_transformers(config: JobConfig, dims: ParallelDims) -> None:
    """Refuse what models of transformers have not: other axes of the mesh, and compilation."""
    if dims.tp * dims.pp > 1:
        raise NotImplementedError(
            f"model=hf has cp and dp, got tp={dims.tp} and pp={dims.pp}; use mesh.tp=1 mesh.pp=1, or a model=llama_* "
            "of the same weights"
        )
    if config.training.compile:
        raise NotImplementedError(
            "model=hf is not compiled: attention of transformers' models over a cut sequence is no part of a graph; "
            "use training.compile=false"
        )
