"""The folder of one run: its name, who makes it, and what happens to an earlier run of the same name."""

import os
import time
from pathlib import Path

import torch.distributed as dist

from dtcp.train.config import RunConfig
from dtcp.train.session import agreed

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"


def open_run_folder(config: RunConfig, model_name: str) -> Path:
    """Make ``<dir>/<name>`` on rank 0 and return its path on every rank.

    Without a name it is the model and the time, taken once, on rank 0. A folder that holds an earlier run is kept:
    it is renamed to ``<name>.1``, or the next free number.

    Raises:
        ValueError: If the name is not a plain folder name, or the folder holds other things than a run.
        OSError: If it cannot be made or written to.
        JobError: Either of them, on all ranks, in a job of several.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = [Path()]
    with agreed():
        if rank == 0:
            name = config.name or f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
            if name in (".", "..") or os.sep in name:
                raise ValueError(f"run.name has to be a plain folder name, got {name!r}; put the rest into run.dir")
            path[0] = Path(config.dir).absolute() / name
            _make(path[0])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(path, src=0)
    return path[0]


def _make(path: Path) -> None:
    try:
        if path.is_dir() and any(path.iterdir()):
            _keep_earlier_run(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / METRICS_FILE).touch()
    except OSError as error:
        raise OSError(
            f"cannot write the run folder {path}: {error.strerror or error}; set run.dir to a folder you can write to"
        ) from error


def _keep_earlier_run(path: Path) -> None:
    if not (path / METRICS_FILE).exists():
        raise ValueError(f"{path} is not empty and not a run of dtcp; choose another run.name or run.dir")
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
    print(f"kept the earlier run as {kept}", flush=True)
