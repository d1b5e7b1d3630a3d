"""A job's ranks: how they start, agree on errors, stop on a signal, and leave.

The only place that reads what torchrun put into the environment. Without torchrun there is one rank.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from dtcp.train.config import Device, to_job_config
from dtcp.train.meeting import fresh_store
from dtcp.train.submitted import is_submitted, is_sweep, join_tasks

EXPECTED_ERRORS = (ValueError, NotImplementedError, OSError)
"""What a wrong configuration or a full disk raises: told in one line, not by a traceback."""


class JobError(Exception):
    """An error that every rank has agreed on, so that all of them can leave together; the message is one line."""


@dataclass(frozen=True, slots=True)
class Session:
    """What this process is in the job."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store | None = None  # None when nobody else is there to meet


def refuse_sweep() -> None:
    """Refuse hydra's --multirun in this process: a job ends with it."""
    if is_sweep():
        raise NotImplementedError(
            "--multirun of hydra runs all jobs in one process, whose ranks are those of one mesh; use `dtcp train "
            "--multirun …`, which starts one job after the other, or hydra/launcher=slurm on a cluster"
        )


def run_job(config: DictConfig, work: Callable[[Any, Session], int]) -> None:
    """Do ``work`` with the job that hydra's ``config`` describes, then leave the process with its exit code.

    An error is told, and is exit code 1; Ctrl-C is 130. A task of submitit returns, or raises, instead of leaving.
    """
    if is_submitted():
        _run_submitted(config, work)
        return
    full_traceback = OmegaConf.select(config, "debug.full_traceback") is True
    session = Session(0, 1, torch.device("cpu"))
    try:
        refuse_sweep()
        job = to_job_config(config)
        session = start_session(job.device)
        code = work(job, session)
    except KeyboardInterrupt:
        leave(session, 130, together=False)
    except Exception as error:
        report(error, session, full_traceback=full_traceback)
        leave(session, 1, together=isinstance(error, JobError))
    leave(session, code, together=True)


def _run_submitted(config: DictConfig, work: Callable[[Any, Session], int]) -> None:
    job_id = join_tasks()
    job = to_job_config(config)
    if job.run.name is None:  # one that the other tasks take too, and the job when it is queued again
        job.run.name = f"{job.model.name}-{job_id}"
    session = start_session(job.device)
    code = work(job, session)
    assert session.store is not None
    _meet(session.store, session.world_size)
    if code:
        raise JobError(f"the job ended with exit code {code}; see the log of its first task")


def start_session(device: Device) -> Session:
    """Join the other ranks of the job.

    Raises:
        ValueError: If CUDA is asked for and missing, or there are fewer devices than ranks on this machine.
    """
    resolved = _resolve_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if "WORLD_SIZE" not in os.environ:
        return Session(0, 1, resolved)
    backend = "cpu:gloo,cuda:nccl" if resolved.type == "cuda" else "gloo"
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    store = fresh_store(store, rank, world_size)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    return Session(rank, world_size, resolved, store)


def leave(session: Session, code: int, *, together: bool) -> NoReturn:
    """End this process with ``code``, without waiting for the teardown of gloo.

    gloo's ``destroy_process_group`` aborts now and then (SIGABRT), which would turn a finished job into a failed one.
    So ranks meet at the store, which outlives them, and then exit at once.

    Args:
        together: Whether every rank is on its way here; a rank that fails alone must not wait for the others.
    """
    if together and session.store is not None:
        _meet(session.store, session.world_size)
    if dist.is_initialized() and session.device.type == "cuda" and together:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    if session.store is not None or dist.is_initialized():
        os._exit(code)
    sys.exit(code)


@contextmanager
def agreed() -> Iterator[None]:
    """Run a part without collectives; if it fails on one rank, raise its error on all.

    Raises:
        JobError: On every rank, with the first failing rank's message, when other ranks fail or one of several does.
        Exception: The error itself where the job is a single rank.
    """
    error: Exception | None = None
    try:
        yield
    except EXPECTED_ERRORS as caught:
        error = caught
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        if error is not None:
            raise error
        return
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else one_line(error))
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        where = "" if len(failed) == len(messages) else f" (rank {failed[0]})"
        raise JobError(f"{messages[failed[0]]}{where}") from error


def one_line(error: BaseException) -> str:
    """The message in one line; errors of the system keep their name, which is half of the message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}" if isinstance(error, OSError) and error.errno else text


def report(error: BaseException, session: Session, *, full_traceback: bool) -> None:
    """Tell the user on stderr: one line for expected errors, once when all ranks share it; else the traceback."""
    if isinstance(error, JobError) and session.rank != 0:
        return
    prefix = f"[rank {session.rank}] " if session.world_size > 1 and not isinstance(error, JobError) else ""
    if full_traceback or not isinstance(error, (*EXPECTED_ERRORS, JobError)):
        print(prefix + "".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        return
    print(f"{prefix}error: {one_line(error)}", file=sys.stderr)
    print(f"{prefix}(debug.full_traceback=true shows where)", file=sys.stderr, flush=True)


class StopSignal:
    """While entered, the first SIGINT or SIGTERM only sets ``number``; one that comes later acts at once.

    The step loop asks for it between steps and has the ranks agree, so that all stop after the same step. In other
    threads than the main one, where Python delivers no signals, it never fires.
    """

    # On Ctrl-C a terminal signals the ranks, and torchrun does so again: that is one wish, not two.
    REPEAT_SECONDS = 3.0

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number == 0:
            self.number, self._since = number, now
        elif now - self._since > self.REPEAT_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()


def _resolve_device(device: Device, local_rank: int) -> torch.device:
    if device is Device.cpu or (device is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"device={device.name} needs a GPU for each rank of a machine, got local rank {local_rank} and "
            f"{num_devices} GPUs; use device=cpu, or fewer ranks"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _meet(store: dist.Store, world_size: int, timeout_seconds: float = 60.0) -> None:
    """Wait until every rank is here; give up after the timeout, because the work is done either way."""
    deadline = time.monotonic() + timeout_seconds
    try:
        store.add("left", 1)
        while store.add("left", 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.005)
    except RuntimeError:  # the host of the store is gone: everybody has left
        return
