"""Where the time of steps went on one rank, by what a profiler saw: computing, communicating, neither.

Times are those of the device on CUDA and of the thread that takes the steps on CPU. Communication lasts from when it
can begin to when it has ended: a rank that is ahead of the others communicates for as long as it waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

from dtcp.train.traffic import Span

STEP_RANGE = "dtcp:step"
_CPU_COMPUTE = ("aten::", "Torch-Compiled Region", "torchtitan::", "CompiledFunction")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, the mean of several, on one rank."""

    step: float
    compute: float  # kernels, or torch's operations on CPU
    communication: float  # in flight, whatever else runs
    exposed: float  # communication with no compute at the same time
    waiting: float  # neither: for the host, for data, for a disk

    @property
    def own(self) -> float:
        """What the rank needs by itself. Whoever is ahead waits in its communication, which is not counted."""
        return self.compute + self.waiting


def step_windows(events: Iterable[Any]) -> list[Span]:
    """When each step began and ended, ns."""
    return sorted((e.start_ns(), e.end_ns()) for e in events if _is_step(e))


def step_times(events: Sequence[Any]) -> StepTimes:
    """Return the mean of the recorded steps, of which there is one at least."""
    windows = step_windows(events)
    compute, communication = _spans(events)
    num_steps, length = len(windows), 1e9 * len(windows)
    computing, communicating = covered(compute, windows), covered(communication, windows)
    busy = covered([*compute, *communication], windows)
    total = sum(end - start for start, end in windows)
    assert num_steps
    return StepTimes(
        step=total / length,
        compute=computing / length,
        communication=communicating / length,
        exposed=(busy - computing) / length,
        waiting=(total - busy) / length,
    )


def covered(spans: Iterable[Span], windows: Sequence[Span]) -> int:
    """How long at least one of the spans lasts, within windows that are apart from each other."""
    return sum(_union((max(a, start), min(b, end)) for a, b in spans) for start, end in windows)


def _union(spans: Iterable[Span]) -> int:
    total, until = 0, 0
    for start, end in sorted(spans):
        if end > max(start, until):
            total += end - max(start, until)
            until = end
    return total


def _is_step(event: Any) -> bool:
    return event.name().startswith(STEP_RANGE) and event.device_type() == DeviceType.CPU


def _spans(events: Sequence[Any]) -> tuple[list[Span], list[Span]]:
    """(compute, communication)."""
    compute: list[Span] = []
    communication: list[Span] = []
    on_device = [e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()]
    if on_device:
        for event in on_device:
            (communication if "nccl" in event.name().lower() else compute).append((event.start_ns(), event.end_ns()))
        return compute, communication
    threads = {e.start_thread_id() for e in events if _is_step(e)}
    for event in events:
        if event.name().startswith("gloo:"):
            communication.append((event.start_ns(), event.end_ns()))
        elif event.start_thread_id() in threads and event.name().startswith(_CPU_COMPUTE):
            compute.append((event.start_ns(), event.end_ns()))
    return compute, communication
