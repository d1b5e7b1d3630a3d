"""The doctor examines model=hf: right is right, a planted fault is wrong, and what it cannot compare is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtcp.integrations import transformers_attention
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
        ("opt", 2, ["mesh.cp=2", "packed", "attention.layout=striped", "attention.strategy=all_gather"]),
        ("gpt_oss", 2, ["mesh.cp=2", "packed"]),
        ("gpt_oss", 2, ["mesh.cp=2"]),
        ("gemma2", 2, ["mesh.cp=2", "packed"]),
        ("qwen3", 2, ["mesh.cp=2", "packed"]),
        ("llama4", 2, ["mesh.cp=2", "packed"]),
    ],
)
def test_a_right_configuration_is_right(ranks, tmp_path, name, world, more):
    for report in ranks.run(world, run_doctor, overrides(name, tmp_path, *more), timeout=200):
        assert report.is_right, report


@contextlib.contextmanager
def forgetting(name: str, nothing: Any) -> Iterator[None]:
    """Attention is not told of a part of the mask."""
    attend = transformers_attention.context_parallel_attention
    transformers_attention.context_parallel_attention = lambda *args, **how: attend(*args, **how | {name: nothing})
    try:
        yield
    finally:
        transformers_attention.context_parallel_attention = attend


FAULTS = {
    "cross-rank attention": dropped_cross_rank_attention,
    "positions": local_positions,
    "documents": functools.partial(forgetting, "documents", None),
    "window": functools.partial(forgetting, "window_size", (-1, -1)),
    "sinks": functools.partial(forgetting, "sinks", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_wrong(ranks, tmp_path, fault: str):
    given = overrides("gpt_oss", tmp_path, "mesh.cp=2", "packed", "attention.layout=contiguous")
    for report in ranks.run(2, run_doctor, given, FAULTS[fault], timeout=200):
        assert not report.is_right


def test_positions_that_do_not_restart_leave_no_reference_to_a_model_with_sinks(ranks, tmp_path):
    given = overrides("gpt_oss", tmp_path, "mesh.cp=2", "packed", "data.reset_positions=false")
    ranks.run_expecting(2, run_doctor, JobError, r"one rank's gpt_oss .*got data.reset_positions=false", given)


def test_the_context_is_no_door_of_these_models(ranks, tmp_path):
    given = overrides("llama", tmp_path, "mesh.cp=2", "doctor.door=context")
    ranks.run_expecting(2, run_doctor, JobError, r"has its own door; use door=plan", given)
