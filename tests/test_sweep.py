"""``dtcp train --multirun``: which jobs a sweep has, how each starts, and what is told of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtcp import cli, sweep
from dtcp.sweep import SweptJob, plan_sweep, run_sweep
from dtcp.train.config import compose_job_config


def test_a_job_for_each_choice_with_the_ranks_of_its_mesh():
    jobs = plan_sweep(["mesh.cp=1,2", "mesh.tp=range(1,3)", "model=gpt_tiny", "run.name=s", "run.dir=out"], None)
    assert [(job.name, job.num_ranks) for job in jobs] == [
        ("mesh.cp=1,mesh.tp=1", 1), ("mesh.cp=1,mesh.tp=2", 2), ("mesh.cp=2,mesh.tp=1", 2), ("mesh.cp=2,mesh.tp=2", 4),
    ]  # fmt: skip
    for job in jobs:
        config = compose_job_config(job.overrides)
        assert (config.run.name, config.run.dir) == (job.name, "out/s")
        assert job.folder == Path("out/s").absolute() / job.name
        assert f"mesh.cp={config.mesh.cp},mesh.tp={config.mesh.tp}" == job.name
    assert jobs[0].command[1:3] == ["-m", "dtcp.train"]
    assert jobs[3].command[1:7] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]


def test_with_nproc_every_job_has_as_many_ranks_and_dp_shard_what_is_left():
    assert [job.num_ranks for job in plan_sweep(["mesh.cp=1,2,4"], 4)] == [4, 4, 4]
    with pytest.raises(ValueError, match=r"mesh.cp=3: .*4"):
        plan_sweep(["mesh.cp=1,3"], 4)


def test_names_are_folder_names_and_differ():
    jobs = plan_sweep(["data.paths=[a/b.txt],[c.txt]", "data=text", "run.name=s"], None)
    assert [job.name for job in jobs] == ["data.paths=_a_b.txt_", "data.paths=_c.txt_"]
    assert [compose_job_config(job.overrides).data.paths for job in jobs] == [["a/b.txt"], ["c.txt"]]
    alike = plan_sweep(["data.paths=[a b],[a/b]", "data=text"], None)
    assert [job.name for job in alike] == ["0-data.paths=_a_b_", "1-data.paths=_a_b_"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["mesh.cp=2"], "nothing is swept.*mesh.cp=1,2"),
        (["mesh.cp=1,2", "--cfg", "job"], "got --cfg"),
        (["mesh.cp=1,2", "run.name=a,b"], "run.name"),
        (["optimizer.lr=interval(0,1)"], "interval"),
        (["mesh.cp=1,2", "trainning.steps=3"], "trainning"),
        (["mesh.cp=1,two"], "two"),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_job_starts(options, message, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_: pytest.fail("a job was started"))
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--multirun", *options])
    assert re.search(message, str(left.value.code), flags=re.DOTALL)


def test_a_failed_job_is_told_and_the_others_run(monkeypatch, tmp_path):
    ran: list[str] = []

    def run(job: SweptJob) -> tuple[int, int]:
        ran.append(job.name)
        job.folder.mkdir(parents=True)
        lines = [{"step": step, "loss": 9.0 / step, "tokens_per_second": 100.0 * step} for step in (1, 2, 3)]
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return int(job.name == "mesh.cp=2"), 0

    monkeypatch.setattr(sweep, "_run", run)
    said: list[str] = []
    code = run_sweep(["mesh.cp=1,2,4", f"run.dir={tmp_path}", "run.name=s"], None, say=said.append)
    assert code == 1 and ran == ["mesh.cp=1", "mesh.cp=2", "mesh.cp=4"]
    rows = [line.split() for line in said[-4:-1]]
    assert [row[:3] for row in rows] == [
        ["mesh.cp=1", "1", "done"],
        ["mesh.cp=2", "2", "failed"],
        ["mesh.cp=4", "4", "done"],
    ]
    assert all(row[-3:] == ["3", "3.00000", "200"] for row in rows)
    monkeypatch.setattr(sweep, "_run", lambda job: (143, 15))
    assert run_sweep(["mesh.cp=1,2", f"run.dir={tmp_path}"], None, say=said.append) == 128 + 15
    assert "not started" in said[-2]


def test_a_launcher_of_hydra_gets_the_sweep(monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr(cli.os, "execv", lambda path, words: started.append(words) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["train", "-m", "mesh.cp=1,2", "hydra/launcher=slurm"])
    assert started[0][1:] == ["-m", "dtcp.train", "--multirun", "mesh.cp=1,2", "hydra/launcher=slurm"]


@pytest.mark.slow
def test_a_sweep_over_meshes_trains_to_one_loss(tmp_path):
    words = ["mesh.cp=1,2", "model=gpt_tiny", "training.seq_len=64", "training.steps=2", "run.name=s"]
    done = subprocess.run(
        [sys.executable, "-m", "dtcp", "train", "--multirun", *words], cwd=tmp_path, capture_output=True, text=True,
        timeout=400, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [tmp_path / "outputs" / "s" / name / "metrics.jsonl" for name in ("mesh.cp=1", "mesh.cp=2")]
    losses = [[json.loads(line)["loss"] for line in run.read_text().splitlines()] for run in runs]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert re.search(r"^mesh.cp=2 +2 +done +2 ", done.stdout, flags=re.MULTILINE), done.stdout
