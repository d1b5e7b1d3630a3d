"""Command line of the training job; see ``python -m dtcp.train --help``."""

import sys

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from dtcp._paths import conf_dir
from dtcp.train.config import register_schemas, to_job_config
from dtcp.train.run_folder import find_start, open_run_folder
from dtcp.train.session import JobError, Session, StopSignal, leave, refuse_sweep, report, start_session
from dtcp.train.trainer import Trainer

register_schemas()


@hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
def run(config: DictConfig) -> None:
    """Train as ``config`` says, then leave the process: 0 done, 1 error, 128 + n stopped by signal n."""
    full_traceback = OmegaConf.select(config, "debug.full_traceback") is True
    session = Session(0, 1, torch.device("cpu"))
    try:
        refuse_sweep()
        job = to_job_config(config)
        session = start_session(job.device)
        trainer = Trainer(job, session.device)
        start = find_start(job.run, job.checkpoint.resume)
        if start.checkpoint is not None:
            trainer.load(start.checkpoint)  # before the folder is touched: a wrong checkpoint leaves it as it is
        last_step = trainer.step if start.continues else None
        folder = open_run_folder(job.run, job.model.name, continue_from_step=last_step)
        with StopSignal() as signal:
            trainer.train(folder, stop_requested=lambda: signal.number != 0)
    except KeyboardInterrupt:
        leave(session, 130, together=False)
    except Exception as error:
        report(error, session, full_traceback=full_traceback)
        leave(session, 1, together=isinstance(error, JobError))
    is_done = trainer.step == job.training.steps
    leave(session, 0 if is_done else 128 + signal.number, together=True)


if __name__ == "__main__":
    sys.exit(run())
