"""Jobs that hydra submits: to a Slurm that is not there, whose script is read, and to processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from dtcp.train.session import refuse_sweep

TINY = ["model=gpt_tiny", "training.seq_len=64", "training.steps=2"]


def sweep(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtcp.train", "--multirun", *words], cwd=folder, capture_output=True, text=True,
        timeout=400, stdin=subprocess.DEVNULL, env=os.environ | environment,
    )  # fmt: skip


def test_hydras_own_launcher_is_refused_with_the_one_that_works(monkeypatch):
    monkeypatch.setattr(HydraConfig, "initialized", staticmethod(lambda: True))
    config = OmegaConf.create({"mode": "MULTIRUN"})
    from hydra.types import RunMode

    config.mode = RunMode.MULTIRUN
    monkeypatch.setattr(HydraConfig, "get", staticmethod(lambda: config))
    with pytest.raises(NotImplementedError, match=r"dtcp train --multirun.*hydra/launcher=slurm"):
        refuse_sweep()


# Stand in for Slurm's commands: the script is kept, and the jobs have failed at once.
SBATCH = '#!/bin/sh\ncat "$1" > "$SEEN"\necho Submitted batch job 77\n'
SACCT = '#!/bin/sh\nprintf "JobID|State|NodeList\\n77_0|FAILED|n0\\n77_1|FAILED|n0\\n"\n'


@pytest.mark.slow
def test_slurm_is_asked_for_a_task_for_each_gpu(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", "#!/bin/sh\n"), ("sacct", SACCT)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    options = ["hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.partition=gpu", "mesh.cp=8,16"]
    path = f"{commands}:{os.environ['PATH']}"
    done = sweep(tmp_path, *options, *TINY, PATH=path, SEEN=str(tmp_path / "script"))
    assert done.returncode != 0  # the jobs have failed
    script = (tmp_path / "script").read_text()
    options = ["nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=8", "partition=gpu", "array=0-1%2"]
    for line in options:
        assert f"#SBATCH --{line}\n" in script, script
    assert "#SBATCH --job-name=dtcp\n" in script and "#SBATCH --time=1440\n" in script
    assert "srun" in script and "submitit.core._submit" in script


@pytest.mark.slow
def test_tasks_of_submitit_are_the_ranks_of_a_job(tmp_path):
    """By submitit's processes on this machine, which differ from Slurm's in who starts them."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "mesh.cp=1,2", *TINY]
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = sorted((tmp_path / "outputs").iterdir())
    configs = [OmegaConf.load(run / "config.yaml") for run in runs]
    assert sorted((c.mesh.cp, c.mesh.dp_shard) for c in configs) == [(1, 2), (2, 1)]
    losses = [[json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    wrong = sweep(tmp_path, "hydra/launcher=submitit_local", "mesh.tp=3", *TINY)
    assert wrong.returncode != 0 and "mesh" in wrong.stderr  # an error of a task is one of the sweep
