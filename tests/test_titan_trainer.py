"""torchtitan's own trainer with dtcp: what it trains on two ranks and more is what it trains on one."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "tests" / "titan_trainer_run.py"


def launch(folder: Path, world: int, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [*command, str(RUN), str(folder / "history.json"), *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        stdin=subprocess.DEVNULL,
    )


def history(folder: Path, world: int, *flags: str) -> list[dict[str, float]]:
    folder.mkdir(exist_ok=True)
    done = launch(folder, world, *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "history.json").read_text())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Callable[[str], list[dict[str, float]]]:
    return functools.cache(lambda name: history(tmp_path_factory.mktemp(name), 1, name))


TP = ("--parallelism.tensor_parallel_degree", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "flags"),
    [
        ("llama", 2, ()),
        ("llama", 4, TP),
    ],
)
def test_a_run_of_torchtitans_trainer_equals_its_run_on_one_rank(tmp_path, one_rank, name, world, flags):
    """Losses and gradient norms of three steps on packed documents."""
    steps = history(tmp_path / "run", world, name, "--context.degree", "2", *flags)
    assert len(steps) == 3
    for step, right in zip(steps, one_rank(name), strict=True):
        assert step == pytest.approx(right, rel=1e-5)


@pytest.mark.slow
def test_labels_that_are_the_inputs_are_refused(tmp_path):
    done = launch(tmp_path, 1, "unshifted")
    assert done.returncode != 0
    assert "the labels are the inputs themselves; shift them in the data loader" in done.stderr


def test_what_torchtitans_trainer_cannot_do_with_dtcp_is_refused_by_name():
    from torchtitan.config import ParallelismConfig
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    from dtcp.integrations.torchtitan_trainer import ContextConfig, DtcpTrainer, with_dtcp
    from titans import register

    register()
    theirs = Trainer.Config(model_spec=llama3.model_registry("small"))
    config = with_dtcp(theirs)
    assert isinstance(config, DtcpTrainer.Config)
    assert config.parallelism.spmd_backend == "partial_dtensor"
    assert not theirs.training.disable_cuda_graphs  # a copy
    for change, message in [
        ({"parallelism": {"context_parallel_degree": 2}}, r"cut the sequence again, got .*=2; use --context.degree 2"),
        (
            {"parallelism": {"spmd_backend": "spmd_types"}},
            "needs parallelism.spmd_backend=partial_dtensor, got spmd_ty",
        ),
        ({"parallelism": {"pipeline_parallel_degree": 2}}, "needs parallelism.pipeline_parallel_degree=1, got 2"),
        ({"training": {"disable_cuda_graphs": False}}, "needs training.disable_cuda_graphs=True, got False"),
    ]:
        ((section, values),) = change.items()
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    with pytest.raises(ValueError, match="context.degree must be >= 1, got 0"):
        dataclasses.replace(config, context=ContextConfig(degree=0))
    with pytest.raises(ValueError, match=r"attention that is not dtcp's; make the config by with_dtcp\(config\)"):
        dataclasses.replace(config, model_spec=theirs.model_spec)
    own = dataclasses.replace(theirs, parallelism=ParallelismConfig(context_parallel_degree=2))
    with pytest.raises(ValueError, match="use --context.degree 2"):
        with_dtcp(own)
