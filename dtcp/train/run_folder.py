"""The folder of one run: its name, who makes it, and what happens to an earlier run of the same name."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from dtcp.train.checkpoint_files import CHECKPOINTS_FOLDER, find_checkpoint, whole_checkpoints
from dtcp.train.config import RunConfig
from dtcp.train.session import agreed

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job begins.

    Attributes:
        checkpoint: What it goes on from; None: from initial weights.
        continues: Whether that is a checkpoint of the run's own folder, which is then written on.
    """

    checkpoint: Path | None = None
    continues: bool = False


def find_start(config: RunConfig, resume: str) -> Start:
    """Return what ``checkpoint.resume`` means for this run; looked up once, on rank 0.

    Args:
        config: Without a name there is no earlier run.
        resume: "auto" takes the newest checkpoint of the run's own folder, if there is one; "never" none; else the
            folder of a checkpoint, or of a run, whose newest it takes.

    Raises:
        ValueError: If the folder holds no checkpoint, or is an older one of this very run, whose later steps would be
            overwritten; JobError on all ranks of several.
    """
    return _on_rank_0(lambda: _find_start(config, resume))


def _find_start(config: RunConfig, resume: str) -> Start:
    own = None if config.name is None else Path(config.dir).absolute() / config.name / CHECKPOINTS_FOLDER
    newest = whole_checkpoints(own)[-1:] if own is not None else []
    match resume:
        case "never":
            return Start()
        case "auto":
            return Start(newest[0], continues=True) if newest else Start()
    checkpoint = find_checkpoint(Path(resume).expanduser().absolute())
    if own is None or checkpoint.parent.resolve() != own.resolve():
        return Start(checkpoint)
    if checkpoint.name != newest[0].name:
        raise ValueError(
            f"checkpoint.resume={resume} is an older checkpoint of this very run, whose newest is {newest[0].name}; "
            "give the run that goes on from it another run.name"
        )
    return Start(checkpoint, continues=True)


def open_run_folder(config: RunConfig, model_name: str, *, continue_from_step: int | None = None) -> Path:
    """Make ``<dir>/<name>`` on rank 0 and return its path on every rank.

    Without a name it is the model and the time, taken once, on rank 0. A folder that holds an earlier run is kept:
    it is renamed to ``<name>.1``, or the next free number.

    Args:
        continue_from_step: Write on in the folder of the earlier run: lines of ``metrics.jsonl`` past this step are
            dropped, because the steps are going to be taken again.

    Raises:
        ValueError: If the name is not a plain folder name, or the folder holds other things than a run.
        OSError: If it cannot be made or written to.
        JobError: Either of them, on all ranks, in a job of several.
    """

    def make() -> Path:
        name = config.name or f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if name in (".", "..") or os.sep in name:
            raise ValueError(f"run.name has to be a plain folder name, got {name!r}; put the rest into run.dir")
        path = Path(config.dir).absolute() / name
        _make(path, continue_from_step)
        return path

    return _on_rank_0(make)


def _on_rank_0(call: Callable[[], T]) -> T:
    """Return on every rank what ``call`` returns on rank 0; an error of it is every rank's."""
    result: list[T | None] = [None]
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:
            result[0] = call()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(result, src=0)
    return cast(T, result[0])


def _make(path: Path, continue_from_step: int | None) -> None:
    try:
        if continue_from_step is not None:
            keep_steps(path / METRICS_FILE, continue_from_step)
        elif path.is_dir() and any(path.iterdir()):
            _keep_earlier_run(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / METRICS_FILE).touch()
    except OSError as error:
        raise OSError(
            f"cannot write the run folder {path}: {error.strerror or error}; set run.dir to a folder you can write to"
        ) from error


def keep_steps(metrics: Path, last_step: int) -> None:
    """Drop the lines of later steps, and one that a dying job has left unfinished; the file is replaced as a whole."""
    if not metrics.exists():
        return
    whole_lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    kept = [line + "\n" for line in whole_lines if json.loads(line)["step"] <= last_step]
    replacement = metrics.with_name(f"{metrics.name}.partial")
    replacement.write_text("".join(kept), encoding="utf-8")
    replacement.replace(metrics)


def _keep_earlier_run(path: Path) -> None:
    if not (path / METRICS_FILE).exists():
        raise ValueError(f"{path} is not empty and not a run of dtcp; choose another run.name or run.dir")
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
    print(f"kept the earlier run as {kept}", flush=True)
