"""A job that is killed with SIGKILL, in training and in a save, goes on as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "kill_resume.py"


@pytest.mark.slow
def test_two_killed_jobs_resume_bitwise_and_on_another_mesh():
    command = [sys.executable, TOOL, "--kills", "2", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["kill"] for row in rows] == ["training", "save"]
    assert all(row["bitwise"] and row["difference"] <= 1e-5 and row["logged"] < 20 for row in rows)
