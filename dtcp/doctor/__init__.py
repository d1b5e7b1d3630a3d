"""Is a configuration right? A step of it on all ranks, beside the uncut model on one: ``python -m dtcp.doctor``."""

from dtcp.doctor.config import DoctorJobConfig, compose_doctor_config
from dtcp.doctor.examine import examine
from dtcp.doctor.report import Report

__all__ = ["DoctorJobConfig", "Report", "compose_doctor_config", "examine"]
