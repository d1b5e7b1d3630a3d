"""What a checkpoint says about the job that made it, and which differences a job that goes on from it may have.

Two kinds of settings: what is trained (sizes, data, seed, batch), where a difference would be another loss curve and is
refused; and how it goes on (learning rate, number of steps, precision), where the new value holds and is told. The
mesh, the way to attend, compilation and intervals change nothing but rounding, and are not compared.
"""

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dtcp.models import ModelConfig, ResolvedHFConfig
from dtcp.train.config import JobConfig
from dtcp.train.data import TextDataset

_ONLY_INITIAL = ("init_std", "qk_init_scale")  # of the model's fields: without meaning once weights are loaded


def describe_job(
    config: JobConfig, model: ModelConfig, dataset: TextDataset, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the settings of a job in JSON types: "trained", "how", and the parts that say what they are for.

    Costs a hash of all tokens the first time.
    """
    values = model.description if isinstance(model, ResolvedHFConfig) else dataclasses.asdict(model)
    fields = {f"model.{name}": value for name, value in values.items() if name not in _ONLY_INITIAL}
    saved = {"content": model.content} if isinstance(model, ResolvedHFConfig) else values
    training = config.training
    trained = {
        "model": type(model).__name__,
        **fields,
        "training.seq_len": training.seq_len,
        "training.global_batch_size": training.global_batch_size,
        "debug.seed": config.debug.seed,
        "optimizer": type(optimizer).__name__,
    }
    how = {f"optimizer.{name}": value for name, value in dataclasses.asdict(config.optimizer).items()}
    how |= {f"lr_scheduler.{name}": value for name, value in dataclasses.asdict(config.lr_scheduler).items()}
    how |= {f"training.{name}": getattr(training, name) for name in ("steps", "max_norm", "param_dtype")}
    return {
        "trained": trained,
        "how": {key: value.name if isinstance(value, Enum) else value for key, value in how.items()},
        "data": dataset.state_dict(),
        "model_config": {"kind": type(model).__name__, "name": config.model.name, **saved},
    }


def check_description(checkpoint: Path, saved: dict[str, Any], mine: dict[str, Any], dataset: TextDataset) -> None:
    """Refuse to go on from a checkpoint whose loss curve this job would leave.

    Raises:
        ValueError: Naming every key that differs, both values and the cure.
    """
    differences = [f"{key} was {old} and is {new}" for key, old, new in _differences(saved["trained"], mine["trained"])]
    if differences:
        raise ValueError(
            f"the checkpoint {checkpoint} was made by another job: {'; '.join(differences)}; set them back, or start "
            "anew with checkpoint.resume=never (the earlier run is kept) or another run.name"
        )
    dataset.load_state_dict(saved["data"])


def changed_settings(saved: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """Return a line for each setting that differs and may; the new value holds."""
    return [f"{key} was {old}, is {new} from here on" for key, old, new in _differences(saved["how"], mine["how"])]


def _differences(saved: dict[str, Any], mine: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    keys = [*mine, *sorted(set(saved) - set(mine))]
    return [
        (key, saved.get(key, "not there"), mine.get(key, "not there"))
        for key in keys
        if saved.get(key, "not there") != mine.get(key, "not there")
    ]
