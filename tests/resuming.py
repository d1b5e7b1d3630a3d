"""Train a tiny model with checkpoints, on some mesh, and collect what a resumed job has to reproduce."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dtcp.models.init import plain_name
from dtcp.train.checkpoint import state_tensors
from dtcp.train.config import compose_job_config
from dtcp.train.run_folder import find_start, open_run_folder
from dtcp.train.trainer import Trainer
from parity import JOB, PEAKED, TINY, whole

JOB_OF = {
    model: [
        *sizes,
        *JOB,
        PEAKED,
        "training.seq_len=33",
        "training.steps=6",
        "lr_scheduler=cosine",
        "lr_scheduler.warmup_steps=0",
    ]
    for model, sizes in TINY.items()
}


@dataclass
class Run:
    """What one job did, from where it began."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    tokens_seen: int
    tensors: dict[str, Tensor]  # whole weights and optimizer states, after the last step


def record(trainer: Trainer, metrics: Sequence) -> Run:
    """The run of a trainer that has just taken some steps."""
    tensors = {plain_name(name): whole(value).clone() for name, value in tensors_of(trainer).items()}
    return Run(
        [m.loss for m in metrics], [m.grad_norm for m in metrics], [m.lr for m in metrics], trainer.tokens_seen, tensors
    )


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    return state_tensors(trainer.model, trainer.optimizer)


def train(rank: int, world: int, overrides: Sequence[str]) -> Run:
    """Train without a folder."""
    trainer = Trainer(compose_job_config([*overrides]))
    return record(trainer, list(trainer.steps()))


def run_job(rank: int, world: int, overrides: Sequence[str], stop_after: int | None = None) -> Run:
    """What the command line does, less the process: look where to begin, load, train in the run's folder."""
    job = compose_job_config([*overrides])
    trainer = Trainer(job)
    start = find_start(job.run, job.checkpoint.resume)
    if start.checkpoint is not None:
        trainer.load(start.checkpoint)
    steps = []
    take_step = trainer.train_step

    def noted_step(**options):
        metrics, stop = take_step(**options)
        steps.append(metrics)
        return metrics, stop

    trainer.train_step = noted_step
    last_step = trainer.step if start.continues else None
    with open_run_folder(job.run, job.model.name, continue_from_step=last_step) as folder:
        trainer.train(folder, stop_requested=lambda: stop_after is not None and trainer.step + 1 >= stop_after)
    return record(trainer, steps)


def saved(path: Path, name: str = "a") -> list[str]:
    """Overrides of a job whose run folder is below ``path``."""
    return [f"run.dir={path}", f"run.name={name}", "checkpoint.every=2"]
