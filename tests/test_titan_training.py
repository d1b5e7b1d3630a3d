"""Training torchtitan's models by the job, on every mesh, equals one rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dtcp.train.config import compose_job_config
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from parity import JOB, PEAKED, TOLERANCE, Ignored, Record, compare, nothing, record_run, scattered, tail
from ranks import Ranks
from resuming import Run, run_job, saved
from test_train_parity import dropped_cross_rank_attention

STEPS = 5
PLAIN = "tensor_parallel.sequence_parallel=false"
COMPILED = "training.compile=true"
FAMILY = {"small_qwen3": "qwen3", "small_qwen3_moe": "qwen3", "small_gpt_oss": "gpt_oss"}  # the rest: llama3
PIPELINE = ("training.local_batch_size=1", "mesh.pp=2")


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and what is trained on it: a flavor of `titans.register`, or torchtitan's debug model."""

    mesh: str
    world: int
    flavor: str = "small"
    ignored: Ignored = scattered
    options: tuple[str, ...] = ()
    seq_len: int = 97

    def __str__(self) -> str:
        names = [self.flavor, self.mesh.replace("mesh.", "").replace(" ", ","), *self.options, self.ignored.__name__]
        return "-".join([*names, str(self.seq_len)])


def job(flavor: str, seq_len: int = 97, steps: int = STEPS) -> list[str]:
    sizes = ["model.num_layers=2", "model.vocab_size=264"] if flavor == "debugmodel" else []
    model = [f"model=titan_{FAMILY.get(flavor, 'llama3')}_debug", f"model.flavor={flavor}", *sizes]
    # Behind a norm the scale of a query has no gradient but rounding, of which Adam's usual epsilon makes a whole step.
    more = ["optimizer.eps=1e-5"] if "qwen3" in flavor else []
    return [*model, *JOB, *more, PEAKED, f"training.seq_len={seq_len}", f"training.steps={steps}"]


def record(rank: int, world: int, overrides: Sequence[str], ignored: Ignored, steps: Sequence[int]) -> Record:
    import titans

    titans.register()
    return record_run(rank, world, overrides, ignored, steps)


def slow(case: Case) -> object:
    return pytest.param(case, marks=pytest.mark.slow)


CASES = [
    Case("mesh.tp=2", 2),
    slow(Case("mesh.cp=2", 2, "debugmodel", tail, ("attention.layout=contiguous", "attention.strategy=exchange"))),
    slow(Case("mesh.cp=3", 3, "small_tied", nothing, ("attention.layout=striped", COMPILED))),
    slow(Case("mesh.tp=2", 2, "small", tail, (PLAIN,))),
    slow(Case("mesh.tp=2", 2, "small_tied", scattered, (COMPILED,))),
    slow(Case("mesh.tp=2", 2, "small_tied", scattered, ("training.loss_chunk_tokens=32",))),
    slow(Case("mesh.tp=4", 4, "small_separate", scattered, ("activation_checkpointing.mode=full",))),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "debugmodel")),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "small", nothing, (PLAIN, "attention.strategy=all_gather"), 96)),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "small", tail, (COMPILED, "activation_checkpointing.mode=selective"))),
    slow(Case("mesh.cp=2 mesh.dp_shard=2", 4, "small", nothing, ("attention.strategy=ulysses",))),
    slow(Case("mesh.cp=2 mesh.dp_replicate=2", 4, "small_tied", tail, ("training.loss_chunk_tokens=32",))),
    slow(Case("mesh.dp_shard=2 mesh.tp=2", 4, "small_tied", nothing, ("training.local_batch_size=1",))),
    slow(Case("mesh.pp=2", 2, "small", scattered, PIPELINE)),
    slow(Case("mesh.cp=2", 4, "small_tied", scattered, (*PIPELINE, "activation_checkpointing.mode=selective"))),
    slow(Case("mesh.tp=2", 4, "small_tied", tail, (*PIPELINE, "training.loss_chunk_tokens=16"))),
    slow(Case("mesh.cp=2 mesh.tp=2", 8, "small", scattered, (*PIPELINE, COMPILED))),
    slow(Case("mesh.cp=2", 2, "small_qwen3", scattered)),
    slow(Case("mesh.tp=2", 2, "small_qwen3", scattered, (PLAIN,))),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "small_qwen3", scattered)),
    slow(Case("mesh.cp=2 mesh.tp=2", 4, "small_qwen3", nothing, (COMPILED, "activation_checkpointing.mode=selective"))),
    slow(Case("mesh.cp=2 mesh.dp_shard=2", 4, "small_qwen3", tail, ("attention.strategy=all_gather",))),
    slow(Case("mesh.cp=2", 4, "small_qwen3", scattered, PIPELINE)),
    Case("mesh.cp=2", 2, "small_gpt_oss"),
    slow(Case("mesh.cp=3", 3, "small_gpt_oss", nothing, ("attention.layout=striped",))),
    slow(Case("mesh.cp=2", 2, "small_gpt_oss", tail, ("attention.layout=contiguous", "attention.strategy=exchange"))),
    slow(Case("mesh.cp=2", 2, "small_gpt_oss", nothing, ("activation_checkpointing.mode=full",))),
    slow(Case("mesh.cp=2 mesh.dp_shard=2", 4, "small_gpt_oss", scattered)),
    slow(Case("mesh.cp=2 mesh.dp_replicate=2", 4, "small_gpt_oss", tail, ("training.loss_chunk_tokens=32",))),
    slow(Case("mesh.cp=2", 4, "small_gpt_oss", scattered, PIPELINE)),
    slow(Case("mesh.cp=2 mesh.dp_shard=2", 4, "small_qwen3_moe", scattered)),
    slow(Case("mesh.cp=2", 2, "small_qwen3_moe", nothing, ("activation_checkpointing.mode=selective",))),
]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[..., Record]:
    """Train on one rank, once for all cases with the same data and model."""

    @functools.cache
    def reference(flavor: str, ignored: Ignored, seq_len: int, *options: str) -> Record:
        return ranks.run(1, record, [*job(flavor, seq_len), *options], ignored, (1, STEPS), timeout=200)[0]

    return reference


def merge(records: list[Record]) -> Record:
    """All stages' gradients in one record; ranks that hold a parameter too have the same."""
    gradients = {step: {k: v for r in records for k, v in r.gradients[step].items()} for step in records[0].gradients}
    return dataclasses.replace(records[0], gradients=gradients)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_torchtitans_model_on_a_mesh_equals_one_rank(ranks, one_rank, case):
    reference = one_rank(case.flavor, case.ignored, case.seq_len)
    overrides = [*job(case.flavor, case.seq_len), *case.mesh.split(), *case.options]
    runs = ranks.run(case.world, record, overrides, case.ignored, (1, STEPS), timeout=400)
    whole = [merge(runs)] if "mesh.pp=2" in case.options else runs
    for rank, run in enumerate(whole):
        difference = compare(run, reference)
        assert difference.is_within, f"rank {rank}: {difference}"


def record_with_fault(rank: int, world: int, overrides: Sequence[str]) -> Record:
    with dropped_cross_rank_attention():
        return record(rank, world, overrides, scattered, (1, STEPS))


@pytest.mark.slow
def test_the_comparison_sees_attention_that_stays_on_its_rank(ranks, one_rank):
    overrides = [*job("small"), "mesh.cp=2", "attention.layout=contiguous"]
    difference = compare(ranks.run(2, record_with_fault, overrides)[0], one_rank("small", scattered, 97))
    assert difference.gradient > 100 * TOLERANCE, difference


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.cp=2 mesh.dp_shard=2", "mesh.cp=2 mesh.tp=2"])
def test_bfloat16_on_a_mesh_is_bfloat16_of_one_rank(ranks, one_rank, mesh):
    """To the rounding of bfloat16: 2^-9 of each number, and sums of many."""
    half = "training.param_dtype=bfloat16"
    reference = one_rank("small", nothing, 97, half)
    runs = ranks.run(4, record, [*job("small"), half, *mesh.split()], nothing, (1, STEPS), timeout=200)
    difference = compare(runs[0], reference)
    assert difference.loss < 1e-3
    assert difference.grad_norm < 0.05


# ---- checkpoints and evaluation --------------------------------------------------------------------------------------

EVALUATED = ("evaluation.every=2", "evaluation.batches=2", "lr_scheduler=cosine", "training.steps=6")


def run_titan_job(rank: int, world: int, overrides: list[str], stop_after: int | None = None) -> Run:
    import titans

    titans.register()
    return run_job(rank, world, overrides, stop_after)


def evaluations(path: Path, name: str) -> list[str]:
    lines = (path / name / "metrics.jsonl").read_text().splitlines()
    return [line.partition('"eval_loss": ')[2].partition(",")[0] for line in lines if "eval_loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "mesh", "other_world", "other_mesh"),
    [(2, "mesh.tp=2", 4, "mesh.cp=2 mesh.dp_shard=2"), (4, "mesh.cp=2 mesh.tp=2", 2, "mesh.cp=2")],
)
def test_a_job_resumes_bitwise_and_on_another_mesh(ranks, tmp_path, world, mesh, other_world, other_mesh):
    base = [*job("small"), *EVALUATED]
    whole = ranks.run(world, run_titan_job, [*base, *mesh.split(), *saved(tmp_path, "whole")], timeout=200)[0]
    for name in ("same", "other"):
        ranks.run(world, run_titan_job, [*base, *mesh.split(), *saved(tmp_path, name)], 4, timeout=200)
    same = ranks.run(world, run_titan_job, [*base, *mesh.split(), *saved(tmp_path, "same")], timeout=200)[0]
    assert same.losses == whole.losses[4:]
    assert all((same.tensors[name] == value).all() for name, value in whole.tensors.items())
    assert any("qkv_linear.wqkv" in name for name in whole.tensors)
    other = ranks.run(other_world, run_titan_job, [*base, *other_mesh.split(), *saved(tmp_path, "other")], timeout=200)[
        0
    ]
    assert other.losses == pytest.approx(whole.losses[4:], rel=1e-5)
    losses = [float(x) for x in evaluations(tmp_path, "whole")]
    assert len(losses) == 3
    assert [float(x) for x in evaluations(tmp_path, "other")] == pytest.approx(losses, rel=1e-5)


# ---- refused ---------------------------------------------------------------------------------------------------------


def start(rank: int, world: int, overrides: list[str]) -> str:
    import titans

    titans.register()
    return Trainer(compose_job_config(overrides)).describe()


def test_what_the_job_cannot_do_is_refused_by_name(ranks):
    heads = r"needs num_kv_heads divisible by tp, got num_kv_heads=1 and tp=2"
    ranks.run_expecting(2, start_one_key_head, JobError, heads)
    for overrides, pattern in [
        (["model.weights=somewhere"], "for llama models only, got TitanConfig"),
        (["model.max_seq_len=96"], r"rotary table of max_seq_len=96 positions, got a sequence of 97; override max"),
        (["model.vocab_size=200"], "the tokenizer has 257 ids, model titan_llama3_debug only 200"),
        (["model.flavor=9B"], "no Llama 3 flavor '9B'"),
    ]:
        ranks.run_expecting(2, start, JobError, pattern, [*job("small"), *overrides])
    for overrides, pattern in [
        (["model.family=gpt5"], r"no family 'gpt5' of torchtitan's models here; families: llama3, qwen3, gpt_oss"),
        (["mesh.tp=2"], "no tensor parallel plan for a mixture of experts, which layer 0 has; use tp=1"),
        ([COMPILED], "compile=True for a mixture of experts of torchtitan's"),
    ]:
        ranks.run_expecting(2, start, JobError, pattern, [*job("small_gpt_oss"), *overrides])


def start_one_key_head(rank: int, world: int) -> None:
    from torchtitan.models.llama3 import llama3_configs

    def one_key_head(**options):
        config = titans.small_llama3(**options, fused=False)
        for layer in config.layers:
            layer.attention.n_kv_heads = 1
            layer.attention.qkv_linear.wkv.out_features = 8
        return config

    import titans

    llama3_configs["one_key_head"] = one_key_head
    Trainer(compose_job_config([*job("one_key_head"), "mesh.tp=2"]))


def test_the_job_says_what_it_trains(ranks):
    assert "titan_llama3_debug: 119,232 parameters" in ranks.run(2, start, [*job("small"), "mesh.tp=2"])[0]
