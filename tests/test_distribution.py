"""What is handed out: the source archive, the wheel, and the wheel installed into an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import dtcp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dtcp"


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with a source archive, and the wheel that is built from it, not from the checkout."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    return folder


def test_a_source_archive_holds_what_a_wheel_and_the_tests_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "constraints.txt", "conf/config.yaml"} <= names
    assert {"dtcp/py.typed", "tests/ranks.py"} <= names
    assert not [name for name in names if name.startswith((".ci", "outputs", ".venv"))]


def test_a_wheel_holds_the_package_its_conf_its_licence_and_its_command(built, tmp_path):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
    in_checkout = files_below(PACKAGE) | {f"conf/{name}": data for name, data in files_below(ROOT / "conf").items()}
    assert files_below(tmp_path / "dtcp") == in_checkout
    assert "py.typed" in in_checkout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dtcp", f"dtcp-{dtcp.__version__}.dist-info"]
    (info,) = tmp_path.glob("*.dist-info")
    assert (info / "licenses" / "LICENSE").is_file()
    metadata = (info / "METADATA").read_text()
    assert "License-Expression: BSD-3-Clause" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "dtcp = dtcp.cli:main" in (info / "entry_points.txt").read_text()


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """An environment with the wheel, and behind it the packages of the present one without its dtcp."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=ROOT)
    wheel = next(built.glob("*.whl"))
    run(folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-deps", "--no-index", wheel, cwd=built)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth is searched, the .pth files in it are not read: an editable dtcp there stays out.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.mark.slow
def test_the_installed_wheel_trains_from_another_folder(installed, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{installed / 'bin'}{os.pathsep}{env['PATH']}"
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    code = "import dtcp; from dtcp._paths import conf_dir; print(dtcp.__file__); print(conf_dir())"
    where, conf = (
        Path(line) for line in run(installed / "bin" / "python", "-c", code, cwd=elsewhere, env=env).split("\n")[:2]
    )
    assert where.is_relative_to(installed)
    assert conf.is_relative_to(installed)
    assert files_below(conf) == files_below(ROOT / "conf")

    command = installed / "bin" / "dtcp"
    assert dtcp.__version__ in run(command, "--version", cwd=elsewhere, env=env)
    sizes = ["model=gpt_tiny", "model.num_layers=1", "training.seq_len=64"]
    training = ["training.steps=2", "training.global_batch_size=2", "run.name=wheel"]
    run(command, "train", "--nproc", "2", "mesh.cp=2", *sizes, *training, cwd=elsewhere, env=env)
    lines = (elsewhere / "outputs" / "wheel" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "RIGHT" in run(command, "doctor", "--nproc", "2", "mesh.cp=2", *sizes, cwd=elsewhere, env=env)
