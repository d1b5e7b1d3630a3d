"""The folder of one run: its name, who makes it, who writes to it, and what happens to an earlier run of that name."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from dtcp.train.checkpoint_files import CHECKPOINTS_FOLDER, find_checkpoint, step_of, whole_checkpoints
from dtcp.train.config import RunConfig
from dtcp.train.session import agreed

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"

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


@contextmanager
def open_run_folder(config: RunConfig, model_name: str, *, continue_from_step: int | None = None) -> Iterator[Path]:
    """Make ``<dir>/<name>`` on rank 0, give its path on every rank, and keep other jobs from writing to it inside.

    Without a name it is the model and the time, taken once, on rank 0. A folder that holds an earlier run is kept:
    it is renamed to ``<name>.1``, or the next free number.

    Args:
        continue_from_step: Write on in the folder of the earlier run: lines of ``metrics.jsonl`` past this step are
            dropped, because the steps are going to be taken again.

    Raises:
        ValueError: If the name is not a plain folder name, the folder holds other things than a run, or another job
            writes to it.
        OSError: If it cannot be made or written to.
        JobError: Either of them, on all ranks, in a job of several.
    """

    def make() -> Path:
        name = config.name or f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if name in (".", "..") or os.sep in name:
            raise ValueError(f"run.name has to be a plain folder name, got {name!r}; put the rest into run.dir")
        path = Path(config.dir).absolute() / name
        locks.append(_make(path, continue_from_step))
        return path

    locks: list[_Lock] = []
    try:
        yield _on_rank_0(make)
    finally:
        for lock in locks:
            lock.release()


def _on_rank_0(call: Callable[[], T]) -> T:
    """Return on every rank what ``call`` returns on rank 0; an error of it is every rank's."""
    result: list[T | None] = [None]
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:
            result[0] = call()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(result, src=0)
    return cast(T, result[0])


def _make(path: Path, continue_from_step: int | None) -> "_Lock":
    lock: _Lock | None = None
    try:
        if path.is_dir() and any(path.iterdir()):
            _refuse_other_things(path)
            lock = _Lock(path)
            if continue_from_step is None:
                _keep_earlier_run(path)
                lock.release()
                lock = None
        if continue_from_step is not None:
            _refuse_gone_on(path, continue_from_step)
            keep_steps(path / METRICS_FILE, continue_from_step)
        path.mkdir(parents=True, exist_ok=True)
        lock = _Lock(path) if lock is None else lock
        (path / METRICS_FILE).touch()
        return lock
    except OSError as error:
        raise OSError(
            f"cannot write the run folder {path}: {error.strerror or error}; set run.dir to a folder you can write to"
        ) from error
    except ValueError:
        if lock is not None:
            lock.release()
        raise


class _Lock:
    """The right to write to a run's folder: one job has it, until it ends in whatever way.

    A file system without locks grants it to everybody.

    Raises:
        ValueError: If another job has it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        while True:
            self._file = self._path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._file.seek(0)
                holder = self._file.read().strip()
                self._file.close()
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return
                raise ValueError(
                    f"another job ({holder or 'just started'}) writes to the run folder {folder}; wait until it has "
                    "ended, or give this one another run.name"
                ) from error
            if self._is_there():
                break
            self._file.close()  # of a job that has ended meanwhile and took the file with it
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let others write; the file goes."""
        if not self._file.closed:
            if self._is_there():
                self._path.unlink()
            self._file.close()

    def _is_there(self) -> bool:
        """Whether the open file is the one in the folder."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _refuse_gone_on(path: Path, step: int) -> None:
    """Refuse to go on from a checkpoint that another job has left behind since it was looked for."""
    newest = whole_checkpoints(path / CHECKPOINTS_FOLDER)[-1:]
    if newest and step_of(newest[0]) > step:
        raise ValueError(
            f"another job has gone on in {path} to {newest[0].name} meanwhile; start this one again, or give it "
            "another run.name"
        )


def keep_steps(metrics: Path, last_step: int) -> None:
    """Drop the lines of later steps, and one that a dying job has left unfinished; the file is replaced as a whole."""
    if not metrics.exists():
        return
    whole_lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
    kept = [line + "\n" for line in whole_lines if json.loads(line)["step"] <= last_step]
    replacement = metrics.with_name(f"{metrics.name}.partial")
    replacement.write_text("".join(kept), encoding="utf-8")
    replacement.replace(metrics)


def _refuse_other_things(path: Path) -> None:
    if not (path / METRICS_FILE).exists() and any(entry.name != LOCK_FILE for entry in path.iterdir()):
        raise ValueError(f"{path} is not empty and not a run of dtcp; choose another run.name or run.dir")


def _keep_earlier_run(path: Path) -> None:
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
    print(f"kept the earlier run as {kept}", flush=True)
