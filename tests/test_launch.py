"""Ways to start a job: two torchruns that are two nodes, and a torchrun that starts its ranks again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
JOB = ["-m", "dtcp.train", "model=gpt_tiny", "training.seq_len=64", "training.global_batch_size=2", "run.name=a"]


def start(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(launch: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str]:
    try:
        said, _ = launch.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        launch.terminate()
        said, _ = launch.communicate()
    return launch.returncode, said


def steps(folder: Path) -> list[int]:
    file = folder / "outputs" / "a" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(condition: Callable[[], bool], launch: subprocess.Popen[str], timeout: float = 180) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert launch.poll() is None and time.monotonic() < end, launch.communicate()[0][-2000:]
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_two_torchruns_are_two_nodes_of_one_job(tmp_path):
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "a"]
    meeting += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    launches = [start(tmp_path, [*meeting, *JOB, "mesh.cp=2", "training.steps=2"]) for _ in range(2)]
    done = [finish(launch) for launch in launches]
    assert [code for code, _ in done] == [0, 0], done
    said = [sum(line.startswith("step: ") for line in text.splitlines()) for _, text in done]
    assert sorted(said) == [0, 2], "rank 0 alone tells"
    assert steps(tmp_path) == [1, 2]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_and_the_job_goes_on_from_its_newest_checkpoint(tmp_path):
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *JOB, "mesh.cp=2"]
    launch = start(tmp_path, [*words, "training.steps=40", "checkpoint.every=2"])
    checkpoints = tmp_path / "outputs" / "a" / "checkpoints"
    wait_until(lambda: len(steps(tmp_path)) >= 5 and any(checkpoints.glob("step*")), launch)
    ranks = Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    code, said = finish(launch)
    assert code == 0, said[-9000:]
    assert "resumed after step " in said and "exitcode: " in said  # -9, or that of the rank that missed it first
    assert steps(tmp_path) == list(range(1, 41)), "each step once"
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["a"], "the same run"
