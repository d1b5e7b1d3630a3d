"""The doctor examines model=hf: right is right, a planted fault is wrong, and what it cannot compare is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtcp.train.session import JobError
from hf_job import config_folder, packed_documents
from test_doctor import local_positions, run_doctor
from test_train_parity import dropped_cross_rank_attention

pytestmark = pytest.mark.slow


def overrides(name: str, folder: Path, *more: str) -> str:
    path = config_folder(name, folder)
    options = [x for option in more for x in (packed_documents(path) if option == "packed" else [option])]
    return " ".join(["model=hf", f"model.path={path}", "model.vocab_size=264", "doctor.seq_len=61", *options])


@pytest.mark.parametrize(
    ("name", "world", "more"),
    [
        ("llama", 2, ["mesh.cp=2"]),
        ("mistral with a window", 2, ["mesh.cp=2", "+model.overrides.sliding_window=7"]),
        ("gpt2", 4, ["mesh.cp=2", "mesh.dp_shard=2", "activation_checkpointing.mode=full"]),
        ("gemma3", 2, ["mesh.cp=2", "packed", "training.param_dtype=bfloat16"]),
        ("opt", 2, ["mesh.cp=2", "attention.layout=striped", "attention.strategy=all_gather"]),
    ],
)
def test_a_right_configuration_is_right(ranks, tmp_path, name, world, more):
    for report in ranks.run(world, run_doctor, overrides(name, tmp_path, *more), timeout=200):
        assert report.is_right, report


@pytest.mark.parametrize("fault", [dropped_cross_rank_attention, local_positions])
def test_a_planted_fault_is_wrong(ranks, tmp_path, fault: Callable[[], Any]):
    given = overrides("llama", tmp_path, "mesh.cp=2", "attention.layout=contiguous")
    for report in ranks.run(2, run_doctor, given, fault, timeout=200):
        assert not report.is_right


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_a_model_that_torch_cannot_attend_for_is_refused(ranks, tmp_path, name):
    message = r"attends with a soft cap or sinks"
    ranks.run_expecting(2, run_doctor, JobError, message, overrides(name, tmp_path, "mesh.cp=2"))


def test_the_context_is_no_door_of_these_models(ranks, tmp_path):
    given = overrides("llama", tmp_path, "mesh.cp=2", "doctor.door=context")
    ranks.run_expecting(2, run_doctor, JobError, r"has its own door; use door=plan", given)
