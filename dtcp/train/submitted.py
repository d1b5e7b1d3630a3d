"""Jobs that submitit has submitted for hydra: Slurm starts a task for each rank, and torchrun is not there.

submitit reports what a task returned, so a task ends by returning instead of leaving its process.
"""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

_PLUGIN = "hydra_plugins.hydra_submitit_launcher."


def is_sweep() -> bool:
    """Whether hydra runs this job as one of several."""
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def is_submitted() -> bool:
    """Whether this process is a task of submitit."""
    return is_sweep() and str(HydraConfig.get().launcher._target_).startswith(_PLUGIN)


def join_tasks() -> str:
    """Tell torch who the other tasks are, as torchrun does by the environment; return the job's id.

    The id stays when the job is queued again after its time was over.
    """
    import submitit

    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    return str(submitit.JobEnvironment().job_id)
