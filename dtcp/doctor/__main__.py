"""Command line of the doctor; see ``python -m dtcp.doctor --help``."""

import json
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dtcp._paths import conf_dir
from dtcp.doctor.config import DoctorJobConfig, register_doctor_schema
from dtcp.doctor.examine import examine
from dtcp.train.session import Session, run_job
from dtcp.train.traffic import switch_flight_recorder_on

register_doctor_schema()


@hydra.main(config_path=str(conf_dir()), config_name="doctor", version_base="1.3")
def run(config: DictConfig) -> None:
    """Examine the job that ``config`` describes, then leave the process: 0 right, 1 wrong or refused."""
    switch_flight_recorder_on()
    sys.path.insert(0, "")  # a model of the user's may lie where the command starts
    run_job(config, diagnose)


def diagnose(job: DoctorJobConfig, session: Session) -> int:
    """Examine on all ranks, tell on the first; return the exit code."""
    findings = examine(job, session.device)
    if session.rank == 0:
        print(findings, flush=True)
        if job.doctor.json is not None:
            Path(job.doctor.json).write_text(json.dumps(findings.as_json(), indent=1) + "\n")
    return findings.exit_code


if __name__ == "__main__":
    sys.exit(run())
