"""The command ``dtcp``."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

import dtcp
from dtcp import cli


def test_version_and_help_say_what_there_is(capsys):
    for arguments, expected in ((["--version"], f"dtcp {dtcp.__version__}\n"), (["--help"], "dtcp train --nproc 4")):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 0 and expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "COMMAND"), (["fly"], "fly"), (["train", "--nproc", "0"], "at least 1, got '0'")]
)
def test_bad_arguments_name_the_value(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_options_go_to_hydra_as_they_are(monkeypatch):
    ran = []
    monkeypatch.setattr(sys, "argv", ["dtcp"])
    monkeypatch.setattr(runpy, "run_module", lambda module, run_name: ran.append((module, run_name, sys.argv[1:])))
    cli.main(["doctor", "mesh.cp=2", "--cfg", "job", "-m"])
    assert ran == [("dtcp.doctor", "__main__", ["mesh.cp=2", "--cfg", "job", "-m"])]


def test_nproc_starts_ranks_by_torchrun(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["train", "--nproc", "4", "mesh.cp=4"])
    assert started[0][1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "dtcp.train", "mesh.cp=4",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_job_on_two_ranks_trains_and_a_doctor_finds_it_right(tmp_path):
    for words, expected in (
        (["train", "--nproc", "2", "mesh.cp=2", "model=gpt_tiny", "training.steps=2", "training.seq_len=64"], "loss"),
        (["doctor", "--nproc", "2", "mesh.cp=2", "model=gpt_tiny", "doctor.seq_len=24"], "RIGHT"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "dtcp", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0 and expected in done.stdout + done.stderr, done.stderr[-2000:]
