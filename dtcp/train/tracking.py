"""What a run reports, drawn: TensorBoard and Weights & Biases, under torchtitan's names of metrics.

One rank writes. A run that goes on from a checkpoint goes on in the same charts, and no step is in them twice.
"""

import importlib.util
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import OmegaConf

from dtcp.train.config import TrackingConfig
from dtcp.train.evaluation import EvaluationMetrics
from dtcp.train.metrics import StepMetrics

TENSORBOARD_FOLDER = "tensorboard"
WANDB_FILE = "wandb.json"


def check_tracking(config: TrackingConfig) -> None:
    """Refuse what is asked for and not installed.

    Raises:
        ValueError: Naming the package.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"tracking.{name}=true needs the package {name}, which is not installed; pip install 'dtcp[track]', "
                f"or set tracking.{name}=false"
            )


class Sink(Protocol):
    """Where numbers of a step go."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes one run's numbers to every sink that the configuration asks for; to none on ranks without a folder.

    Args:
        folder: Of the run; None: write nothing.
        settings: The whole configuration in YAML, for Weights & Biases.
        step: Steps taken before; what later ones have left is replaced.

    Raises:
        ValueError: If Weights & Biases cannot start a run.
    """

    def __init__(
        self, config: TrackingConfig, folder: Path | None, *, settings: str, step: int, device: torch.device
    ) -> None:
        self._device = device
        self._sinks: list[Sink] = []
        self._stack = ExitStack()
        if folder is None:
            return
        if config.tensorboard:
            self._add(TensorBoard(folder / TENSORBOARD_FOLDER, step))
        if config.wandb:
            self._add(WandB(folder, config.project, OmegaConf.to_container(OmegaConf.create(settings))))

    def log(self, metrics: StepMetrics, evaluated: EvaluationMetrics | None) -> None:
        """Write a step."""
        if not self._sinks:
            return
        values = titan_names(metrics, self._device)
        if evaluated is not None:
            values |= {
                "validation_metrics/loss": evaluated.eval_loss,
                "validation_metrics/perplexity": evaluated.eval_perplexity,
            }
        for sink in self._sinks:
            sink.log(values, metrics.step)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _add(self, sink: Sink) -> None:
        self._sinks.append(sink)
        self._stack.callback(sink.close)


def titan_names(metrics: StepMetrics, device: torch.device) -> dict[str, float]:
    """The numbers of a step by the names that torchtitan gives them, in its units: GiB, percent, seconds."""
    values: dict[str, float] = {
        "loss_metrics/global_avg_loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "lr": metrics.lr,
        "n_tokens_seen": metrics.tokens_seen,
        "throughput(tps)": metrics.tokens_per_second_per_device,
        "tflops": metrics.tflops_per_device,
        "time_metrics/end_to_end(s)": metrics.step_seconds,
        "time_metrics/data_loading(s)": metrics.data_seconds,
        "time_metrics/data_loading(%)": 100 * metrics.data_seconds / metrics.step_seconds,
    }
    if metrics.mfu is not None:
        values["mfu(%)"] = 100 * metrics.mfu
    return values | _memory(metrics, device)


def _memory(metrics: StepMetrics, device: torch.device) -> dict[str, float]:
    if device.type != "cuda":  # nothing is reserved or active there
        return {"memory/max_resident(GiB)": metrics.memory_gib}
    stats, whole = torch.cuda.memory_stats(device), torch.cuda.get_device_properties(device).total_memory
    values: dict[str, float] = {}
    for kind in ("active", "reserved"):
        peak = stats[f"{kind}_bytes.all.peak"]
        values |= {f"memory/max_{kind}(GiB)": peak / 2**30, f"memory/max_{kind}(%)": 100 * peak / whole}
    return values | {f"memory/{name}": stats[name] for name in ("num_alloc_retries", "num_ooms")}


class TensorBoard:
    """Event files in a folder; those of a run that goes on after ``step`` hide what came later before."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a job that is killed keeps what it has told

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run at Weights & Biases, whose id and last step are kept in the run's folder; steps told before are left out.

    Whether it goes over the network is its own setting: ``WANDB_MODE=offline`` keeps it in the folder.
    """

    def __init__(self, folder: Path, project: str, settings: Any) -> None:
        import wandb

        self._file = folder / WANDB_FILE
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._last_step = int(kept.get("step", 0))
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=kept.get("id"),
                resume="allow" if kept else None,
                dir=str(folder),
                config=settings,
            )
        except wandb.Error as error:
            raise ValueError(
                f"tracking.wandb=true could not start a run: {error}; log in with `wandb login`, keep it in the folder "
                "with WANDB_MODE=offline, or set tracking.wandb=false"
            ) from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step <= self._last_step:  # taken again after a resume: a step that it has
            return
        self._run.log(dict(values), step=step)
        self._last_step = step
        replacement = self._file.with_name(f"{self._file.name}.partial")
        replacement.write_text(json.dumps({"id": self._run.id, "step": step}) + "\n")
        replacement.replace(self._file)

    def close(self) -> None:
        self._run.finish()
