"""The job trains models of transformers: on every mesh as on one rank, with packed documents, bf16 and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dtcp.models import build_model
from dtcp.train.config import compose_job_config
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from hf_job import STEPS, config_folder, job
from parity import TOLERANCE, Record, compare, nothing, record_run, scattered, tail
from ranks import Ranks
from resuming import run_job, saved
from test_train_parity import dropped_cross_rank_attention


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The config.json of a small model of ``hf_models``."""

    @functools.cache
    def make(name: str) -> Path:
        return config_folder(name, tmp_path_factory.mktemp(name.replace(" ", "_")))

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


def record_with_fault(rank: int, world: int, overrides: Sequence[str]) -> Record:
    with dropped_cross_rank_attention():
        return record_run(rank, world, overrides, scattered, (1, STEPS))


@pytest.mark.slow
def test_the_comparison_sees_attention_that_stays_on_its_rank(ranks, folders, one_rank):
    overrides = [*job(folders("llama"), "llama"), "mesh.cp=2", "attention.layout=contiguous"]
    difference = compare(ranks.run(2, record_with_fault, overrides)[0], one_rank("llama", False, scattered))
    assert difference.gradient > 100 * TOLERANCE, difference


@pytest.mark.slow
def test_bfloat16_on_a_mesh_is_bfloat16_of_one_rank(ranks, folders, one_rank):
    """To the rounding of bfloat16: 2^-9 of each number, and sums of many."""
    half = "training.param_dtype=bfloat16"
    reference = one_rank("llama", True, nothing, half)
    overrides = [*job(folders("llama"), "llama", True), half, "mesh.cp=2", "mesh.dp_shard=2"]
    run = ranks.run(4, record_run, overrides, nothing, (1, STEPS), timeout=200)[0]
    difference = compare(run, reference)
    assert 0 < difference.loss < 2e-3
    assert difference.grad_norm < 0.05


# ---- checkpoints and evaluation --------------------------------------------------------------------------------------

EVALUATED = ("evaluation.every=2", "evaluation.batches=2", "lr_scheduler=cosine", "training.steps=6")


def evaluations(path: Path, name: str) -> list[float]:
    lines = (path / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "gpt_oss"])
def test_a_job_resumes_bitwise_and_on_another_mesh(ranks, folders, tmp_path, model):
    base = [*job(folders(model), model, True), *EVALUATED, "data.validation_fraction=0.1"]
    whole = ranks.run(2, run_job, [*base, "mesh.cp=2", *saved(tmp_path, "whole")], timeout=200)[0]
    for name in ("same", "other"):
        ranks.run(2, run_job, [*base, "mesh.cp=2", *saved(tmp_path, name)], 4, timeout=200)
    same = ranks.run(2, run_job, [*base, "mesh.cp=2", *saved(tmp_path, "same")], timeout=200)[0]
    assert same.losses == whole.losses[4:]
    assert all((same.tensors[name] == value).all() for name, value in whole.tensors.items())
    mesh = ["mesh.cp=2", "mesh.dp_shard=2"]
    other = ranks.run(4, run_job, [*base, *mesh, *saved(tmp_path, "other")], timeout=200)[0]
    assert other.losses == pytest.approx(whole.losses[4:], rel=1e-5)
    losses = evaluations(tmp_path, "whole")
    assert len(losses) == 3
    assert evaluations(tmp_path, "other") == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_its_keys(ranks, folders, tmp_path):
    base = job(folders("qwen3"), "qwen3")
    ranks.run(1, run_job, [*base, "training.steps=2", *saved(tmp_path)], timeout=200)
    other = [*base, "+model.overrides.rms_norm_eps=0.1", *saved(tmp_path)]
    ranks.run_expecting(1, run_job, ValueError, r"model.rms_norm_eps was 1e-06 and is 0.1; set them back", other)


# ---- refused ---------------------------------------------------------------------------------------------------------


def start(rank: int, world: int, overrides: list[str]) -> str:
    return Trainer(compose_job_config(overrides)).describe()


def take_step(rank: int, world: int, overrides: list[str]) -> None:
    Trainer(compose_job_config(overrides)).train_step()


REFUSED = [
    ("llama", "mesh.tp=2", r"model=hf has cp and dp, got tp=2 and pp=1"),
    ("llama", "training.compile=true", r"model=hf is not compiled"),
    ("llama", "model.vocab_size=200", r"has 257 ids, model hf only 200; use model.vocab_size=257"),
    ("llama", "model.path=null", r"set model.path=FOLDER"),
    ("llama", "model.path=/nowhere", r"there is no /nowhere"),
    ("llama", "model.num_layers=3", r"has 2 layers, got model.num_layers=3"),
    ("llama", "+model.overrides.attention_dropout=0.1", r"attention_dropout=0.1.*overrides=\{attention_dropout:0"),
    ("llama", "+model.overrides.quantization_config={a:1}", r"quantized model"),
    ("gpt2", "+model.overrides.resid_pdrop=0.1", r"resid_pdrop=0.1, others on each mesh"),
    ("gpt2", "training.seq_len=129", r"max_seq_len=128 learned positions, got a sequence of 129"),
    ("bert", "mesh.cp=2", r"is of BertForMaskedLM, and the job trains models that predict the next token"),
]


def refusals(rank: int, world: int, jobs: list[list[str]]) -> list[str]:
    messages = []
    for overrides in jobs:
        try:
            Trainer(compose_job_config(overrides))
            messages.append("not refused")
        except JobError as error:
            messages.append(str(error))
    return messages


def test_what_the_job_cannot_do_is_refused_by_name(ranks, folders):
    jobs = [[*job(folders(model), model), override] for model, override, _ in REFUSED]
    for messages in ranks.run(2, refusals, jobs, timeout=200):
        for (_, override, pattern), message in zip(REFUSED, messages, strict=True):
            assert re.search(pattern, message), (override, message)


@pytest.mark.slow
def test_stages_of_a_pipeline_are_refused(ranks, folders):
    overrides = [*job(folders("llama"), "llama"), "mesh.pp=2", "training.local_batch_size=1"]
    ranks.run_expecting(2, start, JobError, r"model=hf has cp and dp, got tp=1 and pp=2", overrides)


@pytest.mark.slow
def test_logits_that_change_after_the_head_have_no_loss_by_chunks(ranks, folders):
    overrides = [*job(folders("gemma2"), "gemma2"), "training.loss_chunk_tokens=32", "mesh.cp=2"]
    ranks.run_expecting(2, take_step, NotImplementedError, r"changes its logits after the head", overrides)


@pytest.mark.slow
def test_a_model_that_sees_the_future_is_refused(ranks, folders):
    path = str(folders("llama"))
    ranks.run_expecting(2, see_the_future, NotImplementedError, "sees the tokens that it has to predict", path)


def see_the_future(rank: int, world: int, path: str) -> None:
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    before = modeling_llama.create_causal_mask
    modeling_llama.create_causal_mask = masking_utils.create_bidirectional_mask
    try:
        Trainer(compose_job_config([*job(Path(path), "llama"), "mesh.cp=2"])).train_step()
    finally:
        modeling_llama.create_causal_mask = before


@pytest.mark.slow
def test_the_job_says_what_it_trains(ranks, folders):
    assert (
        "hf LlamaForCausalLM: 32,416 parameters"
        in ranks.run(2, start, [*job(folders("llama"), "llama"), "mesh.cp=2"])[0]
    )


def test_a_seed_draws_what_transformers_would_draw_and_a_mesh_changes_nothing(folders):
    """The same distributions, by parameter; and scaled residual weights, which GPT-2 draws a second time."""
    from transformers import AutoModelForCausalLM

    model = build_model("hf", path=str(folders("gpt2")), vocab_size=264, overrides={"n_embd": 128}, seed=5)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(model.hf.config, attn_implementation="eager")
    drawn = dict(model.named_parameters())
    for name, parameter in theirs.named_parameters():
        mine = drawn[f"hf.{name}"]
        assert float(mine.mean()) == pytest.approx(float(parameter.mean()), abs=2e-3), name
        assert float(mine.std()) == pytest.approx(float(parameter.std()), rel=0.1, abs=1e-6), name
    assert float(drawn["hf.transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(0.01, rel=0.1)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(dict(model.hf.named_buffers())[name], buffer), name
