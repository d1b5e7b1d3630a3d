"""Command line of the training job; see ``python -m dtcp.train --help``."""

import sys

import hydra
from omegaconf import DictConfig, OmegaConf

from dtcp._paths import conf_dir
from dtcp.train.config import JobConfig, register_schemas
from dtcp.train.run_folder import find_start, open_run_folder
from dtcp.train.session import Session, StopSignal, run_job
from dtcp.train.traffic import switch_flight_recorder_on
from dtcp.train.trainer import Trainer

register_schemas()


@hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
def run(config: DictConfig) -> None:
    """Train as ``config`` says, then leave the process: 0 done, 1 error, 128 + n stopped by signal n."""
    if any(OmegaConf.select(config, key) for key in ("profile.steps", "stragglers.every")):
        switch_flight_recorder_on()
    run_job(config, train)


def train(job: JobConfig, session: Session) -> int:
    """Train on this rank; return the exit code."""
    trainer = Trainer(job, session.device)
    start = find_start(job.run, job.checkpoint.resume)
    if start.checkpoint is not None:
        trainer.load(start.checkpoint)  # before the folder is touched: a wrong checkpoint leaves it as it is
    last_step = trainer.step if start.continues else None
    with open_run_folder(job.run, job.model.name, continue_from_step=last_step) as folder, StopSignal() as signal:
        trainer.train(folder, stop_requested=lambda: signal.number != 0)
    is_done = trainer.step >= job.training.steps
    return 0 if is_done else 128 + signal.number


if __name__ == "__main__":
    sys.exit(run())
