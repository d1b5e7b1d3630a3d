"""What a job says of itself: two lines at its start, and its configuration as it is."""

import dataclasses

import torch
from omegaconf import OmegaConf

import dtcp
from dtcp.layout import SequenceLayout
from dtcp.mesh import ParallelDims
from dtcp.train.config import JobConfig


def summary(
    config: JobConfig,
    dims: ParallelDims,
    layout: SequenceLayout,
    *,
    model: tuple[str, int],
    num_microbatches: int,
    device: torch.device,
) -> str:
    """The job in two lines: what is trained, and how it is cut.

    Args:
        model: Its name and number of parameters.
    """
    name, num_parameters = model
    training = config.training
    precision = f"{training.param_dtype.name}{', compiled' if training.compile else ''}"
    return (
        f"dtcp {dtcp.__version__}  {name}: {num_parameters:,} parameters, "
        f"{precision}, on {dims.mesh.size()} {device.type} rank(s)\n"
        f"pp {dims.pp} x dp_replicate {dims.dp_replicate} x dp_shard {dims.dp_shard} x cp {dims.cp} x tp {dims.tp}"
        f"{' with sequence parallelism' if dims.tp > 1 and config.tensor_parallel.sequence_parallel else ''}  "
        f"attention: {config.attention.strategy}, {_named(config.attention.layout, layout)}"
        f"{', within documents' if config.data.pack_documents else ''}  "
        f"a step: {training.global_batch_size} rows of {training.seq_len} tokens, {num_microbatches} microbatch(es)"
    )


def _named(asked: str, layout: SequenceLayout) -> str:
    """The layout as the job's header has it: that of a row of one document, where documents decide."""
    if asked != "auto":
        return layout.name
    return f"auto ({layout.name} for one document; chosen for the documents of each step)"


def resolved_config(config: JobConfig, dims: ParallelDims, run_name: str) -> str:
    """The configuration as YAML, with the degrees and the name that -1 and null have become."""
    mesh = dataclasses.replace(config.mesh, **dims.degrees)
    run = dataclasses.replace(config.run, name=run_name)
    return OmegaConf.to_yaml(OmegaConf.structured(dataclasses.replace(config, mesh=mesh, run=run)))
