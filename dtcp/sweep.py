"""``dtcp train --multirun``: one job after another, each with as many ranks as its mesh has, each in its own folder.

hydra runs the jobs of a sweep in one process; the ranks of a job are processes of its own. So the sweep is expanded
here, by hydra's parser, and checked as a whole before its first job starts.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra.core.override_parser.overrides_parser import OverridesParser

from dtcp.mesh import ParallelDims
from dtcp.train.config import compose_job_config
from dtcp.train.run_folder import METRICS_FILE

_MAX_NAME = 120  # characters


@dataclass(frozen=True, slots=True)
class SweptJob:
    """One job of a sweep."""

    name: str  # of its run
    folder: Path  # of its run
    num_ranks: int
    overrides: list[str]

    @property
    def command(self) -> list[str]:
        """What starts it."""
        launch = [sys.executable, "-m"]
        if self.num_ranks > 1:
            launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_ranks), "-m"]
        return [*launch, "dtcp.train", *self.overrides]


def expand(options: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return (overrides of all jobs, for each job those that are its own)."""
    parsed = OverridesParser.create().parse_overrides(list(options))
    common, swept = [], []
    for option, override in zip(options, parsed, strict=True):
        if not override.is_sweep_override():
            common.append(option)
        elif override.is_discrete_sweep():
            swept.append([f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()])
        else:
            raise ValueError(f"{option} has no list of values; give some, as in key=1,2 or key=range(1,5)")
    return common, [list(choice) for choice in itertools.product(*swept)] if swept else []


def plan_sweep(options: Sequence[str], num_ranks: int | None) -> list[SweptJob]:
    """Return the jobs of a sweep, checked as far as that goes without starting them.

    Args:
        options: hydra's overrides; ``key=a,b``, ``range(…)`` and ``choice(…)`` are swept.
        num_ranks: Of every job; None: as many as its mesh has, with ``dp_shard`` 1 where that is -1.

    Raises:
        ValueError: If an option is none, nothing is swept, or a job's mesh does not fit its ranks.
    """
    if flags := [option for option in options if option.startswith("-")]:
        raise ValueError(f"a sweep takes overrides only (key=value), got {flags[0]}; leave it out, or --multirun")
    common, choices = expand(options)
    if not choices:
        raise ValueError("nothing is swept: give a key several values, as in mesh.cp=1,2; or leave out --multirun")
    if swept := [key for key in ("run.name", "run.dir") if any(c.startswith(f"{key}=") for c in choices[0])]:
        raise ValueError(f"{swept[0]} tells the runs of a sweep apart by itself; give one value")
    first = compose_job_config(common)
    folder = Path(first.run.dir) / (first.run.name or f"sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    common = [option for option in common if not option.startswith(("run.name=", "run.dir="))]
    names = [_name(swept) for swept in choices]
    if len(set(names)) < len(names):
        names = [f"{number}-{name}" for number, name in enumerate(names)]
    jobs = []
    for name, swept in zip(names, choices, strict=True):
        overrides = [*common, *swept, f"run.dir={_quoted(str(folder))}", f"run.name={_quoted(name)}"]
        degrees = compose_job_config(overrides).mesh.degrees()
        if num_ranks is None:
            world_size = math.prod(1 if degree == -1 else degree for degree in degrees.values())
        else:
            world_size = num_ranks
        try:
            ParallelDims(**degrees, world_size=world_size)
        except ValueError as error:
            raise ValueError(f"{', '.join(swept)}: {error}") from error
        jobs.append(SweptJob(name, folder.absolute() / name, world_size, overrides))
    return jobs


def run_sweep(options: Sequence[str], num_ranks: int | None, *, say: Callable[[str], None] = print) -> int:
    """Run the jobs one after the other and tell of all of them; return 0 if all of them did what they should.

    A job that fails does not keep the next from running; Ctrl-C and SIGTERM end the sweep.
    """
    jobs = plan_sweep(options, num_ranks)
    results: list[int | None] = [None] * len(jobs)
    stop = 0
    for index, job in enumerate(jobs):
        say(f"== {index + 1}/{len(jobs)}: {job.name} on {job.num_ranks} rank(s)")
        sys.stdout.flush()
        results[index], stop = _run(job)
        if stop:
            break
    for line in table(jobs, results):
        say(line)
    return 128 + stop if stop else int(any(results))


def table(jobs: Sequence[SweptJob], results: Sequence[int | None]) -> list[str]:
    """The runs beside each other.

    Args:
        results: Exit codes; None of a job that was not started.
    """
    width = max(len("run"), *(len(job.name) for job in jobs))
    lines = [f"{'run':<{width}}  {'ranks':>5}  {'result':<12}{'steps':>7}{'loss':>11}{'tokens/s':>12}"]
    for job, code in zip(jobs, results, strict=True):
        result = "not started" if code is None else "done" if code == 0 else f"failed ({code})"
        steps, loss, speed = _reached(job.folder) if code is not None else (0, math.nan, math.nan)
        lines.append(f"{job.name:<{width}}  {job.num_ranks:>5}  {result:<12}{steps:>7}{loss:>11.5f}{speed:>12,.0f}")
    return [*lines, f"in {jobs[0].folder.parent}"]


def _name(swept: Sequence[str]) -> str:
    return re.sub(r"[^\w.=,+-]+", "_", ",".join(swept))[:_MAX_NAME]


def _quoted(text: str) -> str:
    """A value of hydra's grammar that is this text, whatever is in it."""
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def _run(job: SweptJob) -> tuple[int, int]:
    """Return (exit code, the signal that ended the sweep meanwhile or 0)."""
    # From a terminal Ctrl-C reaches the job too, which saves and ends; SIGTERM is handed on.
    stopped: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if process is not None and number == signal.SIGTERM:
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(job.command)
        return process.wait(), stopped[0] if stopped else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reached(folder: Path) -> tuple[int, float, float]:
    """(steps, last loss, median tokens per second) of a run."""
    file = folder / METRICS_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not lines:
        return 0, math.nan, math.nan
    return lines[-1]["step"], lines[-1]["loss"], statistics.median(line["tokens_per_second"] for line in lines)
