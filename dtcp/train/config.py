"""The job's configuration: one dataclass per section, the schema that hydra checks ``conf/`` and overrides against.

Values live in ``conf/``, types and meanings here. hydra refuses Literal types and frozen schemas, and matches enums
by member name, which is why the members are lower case.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, get_args, get_type_hints

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf

from dtcp._paths import conf_dir
from dtcp.mesh import AXES
from dtcp.models import PRESETS, GPTConfig, HFConfig, LlamaConfig, ModelConfig, TitanConfig, model_config
from dtcp.train.data import DataConfig


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self is DType.float32 else torch.bfloat16


class Decay(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class CheckpointingMode(Enum):
    none = "none"
    full = "full"
    selective = "selective"


@dataclass(slots=True)
class MeshConfig:
    """Degrees; their product is the world size, -1 takes what is left."""

    pp: int = MISSING
    dp_replicate: int = MISSING
    dp_shard: int = MISSING
    cp: int = MISSING
    tp: int = MISSING
    ranks_per_node: int | None = MISSING  # of the world; null: all links alike

    def degrees(self) -> dict[str, int]:
        """By the names of ``ParallelDims``."""
        return {axis: getattr(self, axis) for axis in AXES}


@dataclass(slots=True)
class AttentionConfig:
    """How attention runs when cp > 1; names as in ``make_layout`` and ``ContextParallel``, which check them."""

    strategy: str = MISSING
    ulysses_degree: int | None = MISSING
    kv_grad_dtype: DType | None = MISSING
    rates: str | None = MISSING
    layout: str = MISSING
    kernel: str = MISSING

    @property
    def torch_kv_grad_dtype(self) -> torch.dtype | None:
        return None if self.kv_grad_dtype is None else self.kv_grad_dtype.torch_dtype


@dataclass(slots=True)
class TensorParallelConfig:
    """How the model is cut when tp > 1."""

    sequence_parallel: bool = MISSING  # norms and the residual stream work on a share of the positions


@dataclass(slots=True)
class PipelineConfig:
    """How the layers are cut when pp > 1; see ``dtcp.parallelize.stages``."""

    schedule: str = MISSING
    stages_per_rank: int | None = MISSING  # null: as few as the schedule can have


@dataclass(slots=True)
class CheckpointingConfig:
    """What blocks keep for their backward, as in ``apply_activation_checkpointing``."""

    mode: CheckpointingMode = MISSING
    every: int = MISSING  # only blocks 0, every, 2 * every, ...
    offload: bool = MISSING  # to the host


@dataclass(slots=True)
class OptimizerConfig:
    lr: float = MISSING  # peak
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING
    weight_decay: float = MISSING


@dataclass(slots=True)
class LRSchedulerConfig:
    warmup_steps: int = MISSING
    decay: Decay = MISSING
    min_ratio: float = MISSING  # of the peak, at the end of the decay


@dataclass(slots=True)
class TrainingConfig:
    seq_len: int = MISSING  # tokens a row, global
    global_batch_size: int = MISSING  # rows an optimizer step, global
    local_batch_size: int | None = MISSING  # rows a rank's microbatch; null: the whole batch at once
    steps: int = MISSING
    max_norm: float = MISSING  # of the global gradient; inf: measure only
    param_dtype: DType = MISSING  # of forward and backward; master weights stay float32
    reduce_dtype: DType = MISSING  # gradients are summed over ranks in it
    compile: bool = MISSING  # every block, fullgraph
    loss_chunk_tokens: int | None = MISSING  # tokens whose logits exist at a time; null: all


@dataclass(slots=True)
class EvaluationConfig:
    every: int = MISSING  # steps; 0: never
    batches: int | None = MISSING  # of global_batch_size held-out rows; null: all of them


@dataclass(slots=True)
class CheckpointConfig:
    every: int = MISSING  # steps; 0: never
    keep: int = MISSING  # newest ones; 0: all
    asynchronous: bool = MISSING  # files are written while training goes on
    resume: str = MISSING  # auto, never, or the folder of a checkpoint or of a run


@dataclass(slots=True)
class RunConfig:
    name: str | None = MISSING  # null: model and time
    dir: str = MISSING  # folder of all runs


@dataclass(slots=True)
class TrackingConfig:
    """Charts of a run, under torchtitan's names; written by one rank."""

    tensorboard: bool = MISSING  # event files in the run's folder
    wandb: bool = MISSING  # a run at Weights & Biases; WANDB_MODE=offline keeps it in the run's folder
    project: str = MISSING  # of Weights & Biases


@dataclass(slots=True)
class ProfileConfig:
    """Traces of some steps, of each rank, with a summary: compute, exposed communication, traffic by axis."""

    steps: list[int] | None = MISSING  # the first and the last; null: none
    memory: bool = MISSING  # on CUDA a snapshot of each rank's memory; on CPU allocations are in the trace


@dataclass(slots=True)
class StragglersConfig:
    """Who is slow: the time that each rank needs by itself, without waiting for the others."""

    every: int = MISSING  # steps between; 0: never
    tolerance: float = MISSING  # above the median of the others, from which on a rank is told to be slow


@dataclass(slots=True)
class DebugConfig:
    seed: int = MISSING
    check_same_batch_every: int = MISSING  # steps; 0: never
    deterministic: bool = MISSING
    full_traceback: bool = MISSING


@dataclass(slots=True)
class JobConfig:
    model: Any = MISSING  # fields of a preset's config (GPTConfig, LlamaConfig, …), and its name
    data: Any = field(default_factory=lambda: _data_schema())  # fields of dtcp.train.data.DataConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    activation_checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    device: Device = MISSING


def register_schemas() -> None:
    """Tell hydra's ConfigStore the schema and the model group: a choice for each preset, with all of its values."""
    store = ConfigStore.instance()
    store.store(name="schema", node=JobConfig)
    more = {"name": str, "weights": str | None}  # weights: a folder in Hugging Face's form; null: drawn from the seed
    schemas = {kind: _open_twin(kind, **more) for kind in (GPTConfig, LlamaConfig, TitanConfig, HFConfig)}
    for name, preset in PRESETS.items():
        store.store(group="model", name=name, node=_fill(schemas[type(preset)], preset, name=name, weights=None))


def to_job_config(config: DictConfig) -> JobConfig:
    """Return hydra's result as dataclasses, interpolations resolved.

    Raises:
        ValueError: If the model section does not build on a preset, or a key was added that nothing reads.
    """
    refuse_added_keys(config)
    job = OmegaConf.to_object(config)
    assert isinstance(job, JobConfig), type(job)
    if not dataclasses.is_dataclass(job.model):
        raise ValueError(
            f"the model section has to build on a preset, got {sorted(job.model)}; begin conf/model/<yours>.yaml with "
            "`defaults: [gpt_tiny]`, or another of " + ", ".join(PRESETS)
        )
    return job


def refuse_added_keys(config: DictConfig, prefix: str = "") -> None:
    """Refuse ``+key=value``: hydra adds it past the schema, and it would be dropped without a word.

    Raises:
        ValueError: Naming the key and those there are.
    """
    kind = OmegaConf.get_type(config)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return
    names = [f.name for f in dataclasses.fields(kind)]
    for key in map(str, config):
        if key not in names:
            raise ValueError(f"there is no key {prefix}{key}; the keys beside it are {', '.join(names)}")
        if isinstance(child := config._get_node(key), DictConfig) and not child._is_none():
            refuse_added_keys(child, f"{prefix}{key}.")


def compose_job_config(overrides: list[str], name: str = "config") -> JobConfig:
    """Return the configuration that ``python -m dtcp.train <overrides>`` would run with.

    Args:
        name: Of the file in ``conf/`` to begin with.
    """
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="dtcp.train"):
        return to_job_config(compose(name, overrides=overrides))


def to_model_config(model: Any) -> ModelConfig:
    """Return the model's own config, checked, from the model section.

    Raises:
        ValueError: If the sizes do not fit each other.
    """
    values = dataclasses.asdict(model)
    del values["weights"]
    return model_config(values.pop("name"), **values)


def to_data_config(data: Any) -> DataConfig:
    """Return the data section as its own config, checked.

    Raises:
        ValueError: If a value is not allowed.
    """
    return DataConfig(**dataclasses.asdict(data))


def _data_schema() -> Any:
    return _open_twin(DataConfig)()


@functools.cache  # a schema that extends this one has the same types in it
def _open_twin(kind: type, **more: Any) -> type[Any]:
    """The dataclass ``kind`` without ``frozen``, which hydra would refuse to override; a value comes from outside.

    Args:
        more: Further fields, first; name and type.
    """
    hints = get_type_hints(kind)  # of modules whose annotations are strings too
    types = more | {f.name: _open_type(hints[f.name]) for f in dataclasses.fields(kind)}
    # No defaults: a schema that is composed after the values, as the doctor's is, would put them in their place.
    fields = [(name, annotation, field(default=MISSING)) for name, annotation in types.items()]
    return dataclasses.make_dataclass(f"{kind.__name__}Schema", fields)


def _open_type(annotation: Any) -> Any:
    """The same for a field's type: ``X | None`` of a dataclass X becomes that of its twin."""
    for member in get_args(annotation):
        if dataclasses.is_dataclass(member):
            assert isinstance(member, type)
            return _open_twin(member) | None
    return annotation


def _fill(schema: type, preset: Any, **more: Any) -> Any:
    """An instance of the twin ``schema`` with the values of ``preset``."""
    values = {f.name: getattr(preset, f.name) for f in dataclasses.fields(preset)}
    for f in dataclasses.fields(schema):
        for member in get_args(f.type):
            if dataclasses.is_dataclass(member) and values.get(f.name) is not None:
                assert isinstance(member, type)
                values[f.name] = _fill(member, values[f.name])
    return schema(**values, **more)
