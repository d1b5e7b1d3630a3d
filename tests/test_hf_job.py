"""The job trains models of transformers: on every mesh as on one rank, with packed documents, bf16 and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import hf_models
from dtcp.train.config import compose_job_config
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from parity import JOB, TOLERANCE, Record, compare, nothing, record_run, scattered, tail
from ranks import Ranks
from resuming import run_job, saved
from test_train_parity import dropped_cross_rank_attention

STEPS = 5
PACKED = "data.pack_documents=true"
# Standard deviations that make attention peaked, where 0.02 is flat.
_PEAKED = "initializer_range:0.15"
_OF_TYPE = {"mistral with a window": ",sliding_window:3", "gpt_oss": ",sliding_window:3", "gemma3": ",sliding_window:5"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The config.json of a small model of ``hf_models``."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        config, _ = (hf_models.MODELS | hf_models.OTHERS)[name]()
        config.save_pretrained(folder)
        return folder

    return make


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of ``hf_models`` on a mesh."""

    model: str
    mesh: str
    world: int
    packed: bool
    ignored: Callable = scattered
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = [self.model, self.mesh.replace("mesh.", "").replace(" ", ","), *self.options, self.ignored.__name__]
        return "-".join([*names, "packed" if self.packed else "rows"]).replace(" ", "_")


def job(folder: Path, model: str, packed: bool = False, steps: int = STEPS) -> list[str]:
    overrides = f"model.overrides={{{_PEAKED}{_OF_TYPE.get(model, '')}}}"
    sizes = ["model=hf", f"model.path={folder}", "model.vocab_size=264", overrides, *JOB]
    rows = [PACKED, "data.max_bytes=60000"] if packed else ["data.max_bytes=60000"]
    return [*sizes, *rows, "training.seq_len=97", f"training.steps={steps}"]


def slow(*values: object) -> object:
    return pytest.param(Case(*values), marks=pytest.mark.slow)


CASES = [
    Case("llama", "mesh.cp=2", 2, True),
    Case("gpt_oss", "mesh.cp=2", 2, False, tail),
    *(
        slow(model, mesh, world, packed)
        for model in ("llama", "mistral with a window", "qwen3", "gpt2", "gpt_oss", "gemma3")
        for mesh, world in (("mesh.cp=2", 2), ("mesh.cp=2 mesh.dp_shard=2", 4))
        for packed in (False, True)
        if (model, mesh, packed) not in [("llama", "mesh.cp=2", True)]
    ),
    slow("gemma2", "mesh.cp=2", 2, True),
    slow("llama4", "mesh.cp=2", 2, True, scattered, ("attention.layout=contiguous",)),
    slow("opt", "mesh.cp=3", 3, False, scattered, ("attention.layout=striped", "attention.strategy=all_gather")),
    slow("phi3", "mesh.dp_shard=2", 2, True),
    slow("olmo2", "mesh.cp=2 mesh.dp_replicate=2", 4, True, tail, ("attention.layout=per_document",)),
    slow("llama", "mesh.cp=2", 2, True, tail, ("attention.strategy=ulysses", "activation_checkpointing.mode=full")),
    slow("qwen3", "mesh.cp=4", 4, True, tail, ("attention.strategy=hybrid", "attention.ulysses_degree=2")),
    slow("gpt_oss", "mesh.cp=2", 2, True, tail, ("activation_checkpointing.mode=selective", "attention.layout=auto")),
    slow("gpt2", "mesh.cp=2 mesh.dp_shard=2", 4, True, scattered, ("training.loss_chunk_tokens=32",)),
    slow("llama", "mesh.cp=2", 2, True, scattered, ("attention.strategy=exchange", "training.local_batch_size=1")),
    slow("llama", "mesh.cp=2", 2, True, scattered, ("attention.strategy=auto", "data.reset_positions=false")),
]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks, folders: Callable[[str], Path]) -> Callable[..., Record]:
    """Train on one rank, once for all cases with the same data and model."""

    @functools.cache
    def reference(model: str, packed: bool, ignored: Callable, *options: str) -> Record:
        overrides = [*job(folders(model), model, packed), *options]
        return ranks.run(1, record_run, overrides, ignored, (1, STEPS), timeout=200)[0]

    return reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_a_model_of_transformers_on_a_mesh_equals_one_rank(ranks, folders, one_rank, case):
    # What changes the numbers is asked of the one rank too.
    reference = one_rank(case.model, case.packed, case.ignored, *(x for x in case.options if x.startswith("data.")))
    overrides = [*job(folders(case.model), case.model, case.packed), *case.mesh.split(), *case.options]
    for rank, run in enumerate(ranks.run(case.world, record_run, overrides, case.ignored, (1, STEPS), timeout=400)):
        difference = compare(run, reference)
        assert difference.is_within, f"rank {rank}: {difference}"
