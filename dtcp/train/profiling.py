"""Traces of some steps, what they say in short, and who is slow.

Both come from torch's profiler. A trace is written by each rank for a viewer (Perfetto, chrome://tracing); a sample for
`stragglers.every` is only read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from dtcp.mesh import ParallelDims
from dtcp.train.config import JobConfig
from dtcp.train.timeline import STEP_RANGE, StepTimes, step_times, step_windows
from dtcp.train.traffic import Traffic, flight_entries, most_of_ranks, traffic, traffic_lines

TRACES_FOLDER = "traces"
_MAX_MEMORY_EVENTS = 1_000_000


def check_profile(config: JobConfig) -> None:
    """Refuse steps that are not steps of the job.

    Raises:
        ValueError: Naming the value and what is allowed.
    """
    steps, last = config.profile.steps, config.training.steps
    if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= last):
        raise ValueError(
            f"profile.steps has to be the first and the last step to trace, [3,5] say, of 1 to training.steps={last}, "
            f"got {list(steps)}; null traces nothing"
        )
    if config.profile.memory and steps is None:
        raise ValueError("profile.memory=true needs profile.steps, got null; profile.steps=[3,5] traces steps 3 to 5")
    if config.stragglers.every < 0:
        raise ValueError(f"stragglers.every has to be at least 0, got {config.stragglers.every}; 0 never measures")
    if not config.stragglers.tolerance > 0:
        raise ValueError(f"stragglers.tolerance has to be positive, got {config.stragglers.tolerance}; 0.1 is 10 %")


class StepProfiler:
    """Profiles the steps that the configuration names; every rank has one and goes around the same steps.

    Args:
        folder: Of the run, which every rank can write to.
        say: What rank 0 prints a line by; on other ranks it does nothing.
        step: Steps taken before.
    """

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        dims: ParallelDims,
        device: torch.device,
        *,
        say: Callable[[str], None],
        step: int,
    ) -> None:
        self._folder, self._dims, self._device, self._say = folder / TRACES_FOLDER, dims, device, say
        self._memory, self._stragglers = config.profile.memory, config.stragglers
        self._first, self._last = config.profile.steps or (0, 0)
        self._profiler: profile | None = None
        self._profiled: list[int] = []
        self._last_entry = -1
        if self._last and step >= self._last:
            say(f"profile.steps={config.profile.steps} are over: the run goes on after step {step}")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile what runs inside, if ``step`` is one of those; tells of them after the last."""
        is_traced = self._first <= step <= self._last
        is_sample = not is_traced and self._stragglers.every > 0 and step % self._stragglers.every == 0
        if not is_traced and not is_sample:
            yield
            return
        if self._profiler is None:
            self._start(is_traced)
        with record_function(f"{STEP_RANGE} {step}"):
            yield
            self._synchronize()
        self._profiled.append(step)
        if is_sample or step == self._last:
            self._finish(is_traced)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Write what there is of a trace that the job did not finish; after an error, nothing."""
        if self._profiler is None:
            return
        if kind is None:
            self._finish(is_traced=True)
        else:
            self._profiler.__exit__(None, None, None)

    def _start(self, is_traced: bool) -> None:
        self._profiled = []
        is_cuda = self._device.type == "cuda"
        if is_traced and self._memory and is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        entries = flight_entries() if is_traced and not is_cuda else []
        self._last_entry = entries[-1]["record_id"] if entries else -1
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_cuda else [])
        self._synchronize()
        self._profiler = profile(
            activities=activities, record_shapes=is_traced, profile_memory=is_traced and self._memory
        )
        self._profiler.__enter__()

    def _finish(self, is_traced: bool) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None and profiler.profiler is not None
        profiler.__exit__(None, None, None)
        recorded = profiler.profiler.kineto_results
        assert recorded is not None
        events: list[Any] = sorted(recorded.events(), key=lambda event: event.start_ns())
        sent = self._sent(events) if is_traced else None  # before anything more is sent
        times = gathered(step_times(events))
        which = f"step {self._profiled[0]}" + (f" to {self._profiled[-1]}" if len(self._profiled) > 1 else "")
        if is_traced:
            self._write(profiler, which)
        for line in [f"{which}, seconds a step:", *time_lines(times)]:
            self._say(line)
        if warning := straggler(times, self._stragglers.tolerance):
            self._say(f"{which}: {warning}")
        if is_traced:
            for line in self._traffic_lines(gathered(sent)):
                self._say(line)

    def _write(self, profiler: profile, which: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._profiled[0]}-{self._profiled[-1]}-rank{rank}"
        profiler.export_chrome_trace(str(self._folder / f"{name}.json"))
        self._say(f"{which}: a trace of each rank is in {self._folder}, for ui.perfetto.dev or chrome://tracing")
        if self._memory and self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._say(f"{which}: *-memory.pickle beside it are for pytorch.org/memory_viz")
        elif self._memory:
            self._say(f"{which}: allocations are in the traces, as events [memory]")

    def _sent(self, events: list[Any]) -> list[Traffic] | None:
        """What this rank sent over which axis; None if that is not known."""
        if self._device.type != "cpu":
            return None
        entries = [entry for entry in flight_entries() if entry["record_id"] > self._last_entry]
        return traffic(events, entries, self._dims, step_windows(events)) if entries else None

    def _traffic_lines(self, found: list[list[Traffic] | None]) -> list[str]:
        if self._dims.mesh.size() == 1:
            return []
        if all(one is not None for one in found):
            return traffic_lines(most_of_ranks(one or [] for one in found), num_steps=len(self._profiled))
        if self._device.type != "cpu":
            return ["traffic by axis is counted with gloo: device=cpu sends as much over the same mesh"]
        return [
            "traffic by axis is not known: a checkpoint was being written, or torch's flight recorder was off "
            "(TORCH_FR_BUFFER_SIZE=20000 has to be set before the first process group, as python -m dtcp.train does)"
        ]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def gathered(own: Any) -> list[Any]:
    """Every rank's object, in rank order. Collective."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def time_lines(ranks: Sequence[StepTimes]) -> list[str]:
    """A table of the ranks' times."""
    lines = [f"{'rank':<6}{'step':>9}{'compute':>9}{'exposed communication':>23}{'waiting':>9}{'own work':>10}"]
    return lines + [
        f"{rank:<6}{t.step:>9.4f}{t.compute:>9.4f}{t.exposed:>23.4f}{t.waiting:>9.4f}{t.own:>10.4f}"
        for rank, t in enumerate(ranks)
    ]


def straggler(ranks: Sequence[StepTimes], tolerance: float) -> str | None:
    """Say which rank needs longest by itself, if that is more than ``tolerance`` above the median of the others.

    Step times are alike on all ranks, since each waits for the slowest in its communication.
    """
    if len(ranks) < 2:
        return None
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].own)
    median = statistics.median(t.own for rank, t in enumerate(ranks) if rank != slowest)
    if ranks[slowest].own <= (1 + tolerance) * median:
        return None
    more = f"{ranks[slowest].own / median - 1:.0%}" if median > 0 else "much"
    of = "waiting for its host" if ranks[slowest].waiting > ranks[slowest].compute else "computing"
    return (
        f"warning: rank {slowest} is slow: {ranks[slowest].own:.4f} s of its own work in a step, {more} more than the "
        f"median {median:.4f} s of the others, most of it {of}"
    )
