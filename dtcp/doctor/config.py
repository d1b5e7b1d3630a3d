"""The doctor's configuration: that of the training job and a section of its own; and the small job that it examines."""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dtcp.mesh import ParallelDims
from dtcp.models import ResolvedHFConfig
from dtcp.parallelize.stages import check_num_microbatches
from dtcp.train.batch import layout_of
from dtcp.train.config import JobConfig, compose_job_config, register_schemas, to_model_config

SHORT = 256  # tokens: enough for several tiles a rank, and a second on a laptop
TITAN_INIT_STD = 0.02  # what torchtitan draws a Llama's query and key weights with
PEAKED = 2.0  # standard deviation of a query's and a key's elements after the norm: attention logits of about +-4


class ReferenceDType(Enum):
    float32 = "float32"
    float64 = "float64"


class Door(Enum):
    plan = "plan"
    context = "context"


@dataclass(slots=True)
class DoctorConfig:
    """How to examine the job; import paths are ``package.module:name``."""

    seq_len: int | None = MISSING  # null: short, padded as the job's
    rows: int | None = MISSING  # of the whole batch; null: as few as the mesh and the schedule need
    reference_dtype: ReferenceDType = MISSING
    model: str | None = MISSING  # a function without arguments
    tensor_plan: str | None = MISSING  # a mapping, or a function of the model
    context_plan: str | None = MISSING
    door: Door = MISSING
    json: str | None = MISSING


@dataclass(slots=True)
class DoctorJobConfig(JobConfig):
    doctor: DoctorConfig = field(default_factory=DoctorConfig)


def register_doctor_schema() -> None:
    """Tell hydra's ConfigStore the job's schemas and this one."""
    register_schemas()
    ConfigStore.instance().store(name="doctor_schema", node=DoctorJobConfig)


def compose_doctor_config(overrides: list[str]) -> DoctorJobConfig:
    """Return the configuration that ``python -m dtcp.doctor <overrides>`` would examine."""
    register_doctor_schema()
    config = compose_job_config(overrides, "doctor")
    assert isinstance(config, DoctorJobConfig)
    return config


def load(path: str, key: str) -> Any:
    """Return what the import path ``package.module:name`` stands for.

    Args:
        key: That holds the path, for the message.

    Raises:
        ValueError: If it is no such path, or there is nothing under it.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{key} has to be package.module:name, got {path!r}")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{key}={path} cannot be loaded ({error}); the module has to be on PYTHONPATH, or in the folder where the "
            "command starts"
        ) from error
    return found


def load_function(path: str, key: str) -> Callable[..., Any]:
    """`load` of something to call."""
    found = load(path, key)
    if not callable(found):
        raise ValueError(f"{key}={path} has to be a function or a class, got {type(found).__name__}")
    return found


def small_job(config: DoctorJobConfig) -> DoctorJobConfig:
    """Return the job with a small batch, nothing written, and weights that let every fault show.

    Raises:
        ValueError: If the degrees do not fit the world, or a number of the section makes no sense.
    """
    doctor, training = config.doctor, config.training
    for name in ("seq_len", "rows"):
        if (value := getattr(doctor, name)) is not None and value < 1:
            raise ValueError(f"doctor.{name} has to be at least 1, got {value}; null chooses one")
    if doctor.json is not None and not Path(doctor.json).parent.is_dir():
        raise ValueError(f"doctor.json={doctor.json} is in a folder that does not exist; make it first")
    dims = ParallelDims(**config.mesh.degrees())
    num_readers, num_microbatches = dims.dp_replicate * dims.dp_shard, _num_microbatches(config, dims.pp)
    # Two rows side by side in each forward, where a model may mix them; dtcp's own do not.
    rows_of_one = 2 if num_readers * num_microbatches == 1 or doctor.model is not None else 1
    rows = doctor.rows or num_readers * num_microbatches * rows_of_one
    is_split = num_microbatches > 1
    small = dataclasses.replace(
        training,
        seq_len=doctor.seq_len or _short(training.seq_len, dims, config),
        global_batch_size=rows,
        local_batch_size=max(1, rows // (num_readers * num_microbatches)) if is_split else None,
        steps=max(1, training.steps),
    )
    return dataclasses.replace(
        config,
        training=small,
        model=_peaked(config.model),
        evaluation=dataclasses.replace(config.evaluation, every=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0),
        debug=dataclasses.replace(config.debug, check_same_batch_every=1),
    )


def _num_microbatches(config: DoctorJobConfig, pp: int) -> int:
    """As few as the schedule can run; two where the job accumulates gradients over several."""
    if pp == 1:
        return 1 if config.training.local_batch_size is None else 2
    check_num_microbatches(config.pipeline.schedule, pp, pp)
    return pp


def _short(seq_len: int, dims: ParallelDims, config: DoctorJobConfig) -> int:
    """A length that leaves as many pads as ``seq_len`` does."""
    num_pads = layout_of(config, dims, seq_len).padded_seq_len - seq_len
    unit = layout_of(config, dims, 1).padded_seq_len
    return min(seq_len, -(-SHORT // unit) * unit - num_pads)


def _peaked(model: Any) -> Any:
    """The model section with query and key weights that make attention peaked, where it draws its own weights."""
    if model.weights is not None:
        return model
    config = to_model_config(model)
    if isinstance(config, ResolvedHFConfig):
        return dataclasses.replace(model, overrides=(model.overrides or {}) | config.peaked(PEAKED))
    if not hasattr(model, "qk_init_scale"):
        return model
    width = config.dim
    scale = PEAKED / (getattr(model, "init_std", TITAN_INIT_STD) * width**0.5)
    return dataclasses.replace(model, qk_init_scale=max(model.qk_init_scale, scale))
