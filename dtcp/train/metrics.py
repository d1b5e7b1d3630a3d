"""What one step reports: a line for people, a line of ``metrics.jsonl`` for programs, a bar on a terminal.

The line has torchtitan's form; ``tps`` and ``tflops`` are per device, as there, and what has no meaning on a device
says so.
"""

import json
import resource
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PEAK_BFLOAT16_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Dense peak per second by a part of the device's name; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step; the names are the keys of ``metrics.jsonl``."""

    step: int  # from 1
    loss: float  # mean over the valid tokens of the global batch, nats
    grad_norm: float  # global, before clipping
    lr: float  # that this step used
    tokens_seen: int  # real tokens of all global batches so far
    num_valid_tokens: int  # labels of this step's global batch that count
    step_seconds: float
    tokens_per_second: float  # of the whole job
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None  # share of the device's peak; None where that is unknown
    memory_gib: float  # peak of this rank: of the device, or the process's resident memory on CPU
    data_seconds: float  # of the step, until this rank had its rows


def speed(
    num_tokens: int, seconds: float, num_devices: int, flops_per_token: int, device: torch.device
) -> dict[str, Any]:
    """Return those fields of `StepMetrics` that say how fast a step was, and the memory of this rank.

    Args:
        num_tokens: Of the step, over all ranks.
        device: This rank's.
    """
    per_device = num_tokens / seconds / num_devices
    peak = peak_flops(device)
    return {
        "step_seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_second_per_device": per_device,
        "tflops_per_device": per_device * flops_per_token / 1e12,
        "mfu": None if peak is None else per_device * flops_per_token / peak,
        "memory_gib": peak_memory_gib(device),
    }


class MetricsLog:
    """Writes one rank's metrics; on ranks without a file it does nothing.

    Args:
        path: metrics.jsonl on rank 0, appended to; None elsewhere.
        num_steps: Length of the progress bar.
        device: Decides what ``memory`` and ``mfu`` mean.
    """

    def __init__(self, path: Path | None, *, num_steps: int, device: torch.device) -> None:
        self._path = path
        self._num_steps = num_steps
        self._device = device
        self._stack = ExitStack()
        self._file: IO[str] | None = None
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> "MetricsLog":
        if self._path is not None:
            self._file = self._stack.enter_context(self._path.open("a", encoding="utf-8"))
            if sys.stdout.isatty():
                self._progress = self._stack.enter_context(_progress_bar())
                self._bar = self._progress.add_task("training", total=self._num_steps)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._file = self._progress = None

    def write(self, metrics: StepMetrics, more: Mapping[str, float] = MappingProxyType({})) -> None:
        """Append to the file, flushed, and print.

        Args:
            more: Further keys of the step's line.
        """
        if self._file is None:
            return
        self._file.write(json.dumps(asdict(metrics) | dict(more)) + "\n")
        self._file.flush()
        self.say(format_step(metrics, self._device))
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=metrics.step)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._file is not None:
            print(line, flush=True)


def format_step(metrics: StepMetrics, device: torch.device) -> str:
    """The log line of a step."""
    if metrics.mfu is None:
        mfu = f"n/a ({device.type if device.type == 'cpu' else torch.cuda.get_device_name(device)})"
    else:
        mfu = f"{metrics.mfu:.2%}"
    memory = f"{metrics.memory_gib:.2f}GiB" + (" (resident)" if device.type == "cpu" else "")
    return (
        f"step: {metrics.step:2d}  loss: {metrics.loss:8.5f}  grad_norm: {metrics.grad_norm:7.4f}  "
        f"memory: {memory}  tps: {metrics.tokens_per_second_per_device:,.0f}  "
        f"tflops: {metrics.tflops_per_device:,.2f}  mfu: {mfu}"
    )


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 floating point operations a second; None for a CPU or a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_BFLOAT16_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak bytes reserved on the GPU, or the peak resident bytes of this process, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB elsewhere


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(),
        transient=True,
    )
