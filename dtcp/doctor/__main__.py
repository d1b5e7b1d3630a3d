"""Command line of the doctor; see ``python -m dtcp.doctor --help``."""

import json
import sys
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from dtcp._paths import conf_dir
from dtcp.doctor.config import DoctorJobConfig, register_doctor_schema
from dtcp.doctor.examine import examine
from dtcp.doctor.record import switch_flight_recorder_on
from dtcp.train.config import to_job_config
from dtcp.train.session import JobError, Session, leave, refuse_sweep, report, start_session

register_doctor_schema()


@hydra.main(config_path=str(conf_dir()), config_name="doctor", version_base="1.3")
def run(config: DictConfig) -> None:
    """Examine the job that ``config`` describes, then leave the process: 0 right, 1 wrong or refused."""
    full_traceback = OmegaConf.select(config, "debug.full_traceback") is True
    session = Session(0, 1, torch.device("cpu"))
    try:
        refuse_sweep()
        job = to_job_config(config)
        assert isinstance(job, DoctorJobConfig)
        switch_flight_recorder_on()
        session = start_session(job.device)
        sys.path.insert(0, "")  # a model of the user's lies where the command starts
        findings = examine(job, session.device)
        if session.rank == 0:
            print(findings, flush=True)
            if job.doctor.json is not None:
                Path(job.doctor.json).write_text(json.dumps(findings.as_json(), indent=1) + "\n")
    except KeyboardInterrupt:
        leave(session, 130, together=False)
    except Exception as error:
        report(error, session, full_traceback=full_traceback)
        leave(session, 1, together=isinstance(error, JobError))
    leave(session, findings.exit_code, together=True)


if __name__ == "__main__":
    sys.exit(run())
