"""The doctor: right configurations are right, and each planted fault ends in exit code 1 and a hint that names it."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial

import dtcp
from dtcp.attention.strategies import Ring
from dtcp.doctor import Report, compose_doctor_config, examine
from dtcp.doctor.compare import Deviation
from dtcp.doctor.hints import _factors_of_some
from dtcp.models.attention import ScaledDotProductAttention
from dtcp.parallelize.styles import ReplicatedParameters
from dtcp.train.session import JobError
from ranks import Ranks

TESTS = Path(__file__).resolve().parent
GPT = "model=gpt_tiny model.num_layers=2 model.dim=64 doctor.seq_len=61"
LLAMA = "model=llama_tiny model.num_layers=2 model.dim=64 model.ffn_dim=96 doctor.seq_len=61"
MASKED = (
    "model=llama_tiny_window model.num_layers=2 model.dim=64 model.ffn_dim=96 model.window_size=9 doctor.seq_len=61"
)
OWN = "doctor.model=doctor_models:make doctor.context_plan=doctor_models:CONTEXT_PLAN"
PLAN = "doctor.model=doctor_models:make doctor.tensor_plan=doctor_models"
BFLOAT16 = "training.param_dtype=bfloat16"

Fault = Callable[[], contextlib.AbstractContextManager[Any]]


def run_doctor(rank: int, world: int, overrides: str, fault: Fault = contextlib.nullcontext) -> Report:
    with fault():
        return examine(compose_doctor_config(overrides.split()))


# ---- right ones ------------------------------------------------------------------------------------------------------


RIGHT = [
    (2, f"{GPT} mesh.cp=2 model.dropout=0.1 training.local_batch_size=1"),
    (
        4,
        f"{LLAMA} mesh.cp=2 mesh.tp=2 activation_checkpointing.mode=selective training.loss_chunk_tokens=16 "
        "attention.strategy=ulysses",
    ),
    (4, f"{GPT} mesh.pp=2 mesh.cp=2 training.local_batch_size=1 model.dropout=0.1"),
    (2, f"{GPT} mesh.tp=2 {BFLOAT16}"),
    (2, f"{OWN} mesh.cp=2"),
    (2, f"{GPT} mesh.cp=2 doctor.door=context activation_checkpointing.mode=full"),
]
RIGHT_BUT_SLOW = [
    (1, GPT),
    (3, f"{LLAMA} mesh.cp=3 attention.layout=striped attention.strategy=all_gather"),
    (2, f"{LLAMA} mesh.cp=2 {BFLOAT16} training.reduce_dtype=bfloat16"),
    (2, f"{GPT} mesh.tp=2 training.compile=true activation_checkpointing.mode=full"),
    (2, f"{LLAMA} mesh.tp=2 tensor_parallel.sequence_parallel=false {BFLOAT16}"),
    (4, f"{LLAMA} mesh.cp=4 training.compile=true activation_checkpointing.mode=selective"),
    (4, f"{GPT} mesh.dp_replicate=2 mesh.dp_shard=2 training.local_batch_size=1 {BFLOAT16}"),
    (4, f"{GPT} mesh.cp=2 mesh.dp_shard=2 {BFLOAT16} model.dropout=0.1 attention.strategy=exchange"),
    (4, f"{LLAMA} mesh.cp=4 attention.strategy=hybrid attention.ulysses_degree=2 {BFLOAT16}"),
    (4, f"{LLAMA} mesh.tp=4 model.num_heads=8 model.num_kv_heads=4 doctor.reference_dtype=float64"),
    (4, f"{GPT} model.num_layers=4 mesh.pp=2 mesh.tp=2 pipeline.schedule=Interleaved1F1B training.local_batch_size=1"),
    (4, f"{GPT} model.num_layers=4 mesh.pp=2 mesh.dp_shard=2 pipeline.schedule=InterleavedZeroBubble"),
    (8, f"{LLAMA} mesh.pp=2 mesh.cp=2 mesh.tp=2 training.local_batch_size=1 {BFLOAT16}"),
    (2, f"{GPT} model.num_layers=12 mesh.cp=2 {BFLOAT16}"),
    (2, "model=llama_tiny mesh.cp=2 training.seq_len=4097"),
]


@pytest.mark.parametrize(
    ("world", "overrides"), [*RIGHT, *(pytest.param(*case, marks=pytest.mark.slow) for case in RIGHT_BUT_SLOW)]
)
def test_a_right_configuration_is_right(ranks: Ranks, world: int, overrides: str):
    for report in ranks.run(world, run_doctor, overrides, timeout=600):
        assert report.exit_code == 0, str(report)
        assert not report.hints and "RIGHT" in str(report)


@pytest.mark.slow
def test_narrow_key_gradients_are_compared_in_float32_first_and_then_as_the_job_has_them(ranks: Ranks):
    for report in ranks.run(2, run_doctor, f"{LLAMA} mesh.cp=2 attention.kv_grad_dtype=bfloat16", timeout=600):
        assert report.exit_code == 0, str(report)
        strict, narrow = ([d.error for d in c.deviations] for c in report.comparisons)
        assert max(strict) < 1e-5 < 1e-4 < max(narrow), "only the second rounds"


def short_documents(folder: Path) -> str:
    """Overrides for rows that hold several documents each."""
    for number in range(60):
        (folder / f"{number:02}.txt").write_text("abcdefghij " * (1 + number * number % 5))
    return f"data=text data.paths=[{folder}/*.txt] data.validation_fraction=0 data.pack_documents=true"


PACKED = [
    (2, f"{MASKED} mesh.cp=2 attention.layout=per_document training.local_batch_size=1"),
    (2, f"{MASKED} mesh.cp=2 doctor.door=context model.attention_dropout=0.1"),
    (4, f"{MASKED} mesh.cp=2 mesh.tp=2 attention.layout=per_document model.attention_dropout=0.1"),
    (4, f"{MASKED} mesh.pp=2 mesh.cp=2 training.local_batch_size=1"),
    (2, f"{MASKED} mesh.tp=2 {BFLOAT16}"),
    (1, f"{MASKED} doctor.door=context"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "overrides"), PACKED)
def test_packed_documents_windows_and_sinks_are_right(ranks: Ranks, tmp_path: Path, world: int, overrides: str):
    for report in ranks.run(world, run_doctor, f"{overrides} {short_documents(tmp_path)}", timeout=600):
        assert report.exit_code == 0, str(report)


@contextlib.contextmanager
def documents_not_told() -> Iterator[None]:
    """Attention takes a row for one text."""
    from dtcp.parallelize.context import set_sequence

    def tell(model: nn.Module, layout: Any, documents: Any = None) -> None:
        set_sequence(model, layout, documents=dtcp.Documents.from_lengths([layout.seq_len]))

    with mock.patch("dtcp.train.trainer.set_sequence", tell):
        yield


@pytest.mark.slow
def test_documents_that_attention_is_not_told_are_named(ranks: Ranks, tmp_path: Path):
    overrides = f"{MASKED} mesh.cp=2 {short_documents(tmp_path)}"
    report = ranks.run(2, run_doctor, overrides, documents_not_told)[0]
    assert report.exit_code == 1 and "attention sees the tokens of other documents" in str(report), str(report)


def test_what_is_measured_beside_the_numbers(ranks: Ranks):
    report = ranks.run(2, run_doctor, f"{GPT} mesh.cp=2 attention.layout=contiguous")[0]
    # 61 tokens in parts of 31 and 30; the pad of rank 1 attends to nothing.
    assert report.pairs == [31 * 32 // 2, 61 * 62 // 2 - 31 * 32 // 2]
    assert report.attention_calls == {"layers.0": 1, "layers.1": 1}
    # A block keeps half of what the whole model keeps: 31 of 62 slots, of which one is a pad.
    for name, kept in report.kept_bytes.items():
        assert kept == pytest.approx(report.whole_kept_bytes[name] * 31 / 61, rel=0.01), name


# ---- planted faults --------------------------------------------------------------------------------------------------


def no_reduction() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("dtcp.parallelize.fsdp.apply_fsdp", lambda model, dims, **options: None)


def mean_of_means() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("dtcp.train.trainer.count_valid_tokens", lambda labels, mesh: (labels != -100).sum())


def averaged_gradients() -> contextlib.AbstractContextManager[Any]:
    real = dtcp.apply_fsdp

    def apply(model: nn.Module, dims: dtcp.ParallelDims, **options: Any) -> None:
        real(model, dims, **options)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(dims.view("fsdp").size()))

    return mock.patch("dtcp.parallelize.fsdp.apply_fsdp", apply)


def changed_cut(**changes: Callable[[Any], torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    from dtcp.train.batch import cut

    def changed(*args: Any, **options: Any) -> Any:
        microbatch = cut(*args, **options)
        return dataclasses.replace(microbatch, **{name: change(microbatch) for name, change in changes.items()})

    return mock.patch("dtcp.train.batch.cut", changed)


def labels_after_cut() -> contextlib.AbstractContextManager[Any]:
    return changed_cut(labels=lambda microbatch: F.pad(microbatch.tokens[:, 1:], (0, 1), value=-100))


def local_positions() -> contextlib.AbstractContextManager[Any]:
    return changed_cut(positions=lambda m: torch.arange(m.tokens.size(1)).expand_as(m.tokens))


def plain_norms() -> contextlib.AbstractContextManager[Any]:
    real = ReplicatedParameters._apply

    def apply(self: ReplicatedParameters, module: nn.Module, mesh: Any) -> nn.Module:
        return module if isinstance(module, nn.LayerNorm) else real(self, module, mesh)

    return mock.patch.object(ReplicatedParameters, "_apply", apply)


def repeated_bias() -> contextlib.AbstractContextManager[Any]:
    real = dtcp.apply_tensor_parallel

    def add_again(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + module.bias.to_local(grad_placements=[Partial()])

    def apply(model: Any, dims: dtcp.ParallelDims, **options: Any) -> None:
        real(model, dims, **options)
        for block in model.layers.values():
            block.attention.output.register_forward_hook(add_again)

    return mock.patch("dtcp.parallelize.tensor.apply_tensor_parallel", apply)


def first_hop_in_backward() -> contextlib.AbstractContextManager[Any]:
    real_backward, real_walk = Ring.backward, Ring._walk

    def walk(self: Ring, call: Any, key: torch.Tensor, value: torch.Tensor) -> Iterator[Any]:
        for index, (step, held) in enumerate(real_walk(self, call, key, value)):
            if index == 1:
                first = tuple(x.clone() for x in held.parts[None][:2])
            yield step, held if index < 2 else dataclasses.replace(held, parts={None: (*first, 0)})

    def backward(self: Ring, *args: Any) -> Any:
        with mock.patch.object(Ring, "_walk", walk):
            return real_backward(self, *args)

    return mock.patch.object(Ring, "backward", backward)


def layer_1_attends_alone() -> contextlib.AbstractContextManager[Any]:
    def replace(model: Any, *args: Any, **options: Any) -> None:
        model.layers["1"].attention.sdpa = ScaledDotProductAttention()

    return mock.patch("dtcp.parallelize.checkpointing.apply_activation_checkpointing", replace)


def other_weights() -> contextlib.AbstractContextManager[Any]:
    from dtcp.models.init import initialize

    def draw(model: nn.Module, seed: int, rule: Any) -> None:
        initialize(model, seed + torch.distributed.get_rank(), rule)

    return mock.patch("dtcp.train.parallel.initialize", draw)


FAULTS = [
    (2, f"{GPT} mesh.cp=2", no_reduction, "every parameter: the gradient reduction over cp is missing"),
    (2, f"{GPT} mesh.cp=2", mean_of_means, "the loss is a mean of means: the tokens of each rank"),
    (2, f"{GPT} mesh.cp=2 doctor.seq_len=64", labels_after_cut, "labels are shifted after the cut"),
    (2, f"{LLAMA} mesh.cp=2", local_positions, "positions are local"),
    (2, f"{GPT} mesh.tp=2", plain_norms, "10 parameter(s), final_norm.bias, |(the missed reduction of norm and bias"),
    (2, f"{GPT} mesh.tp=2", repeated_bias, "row-parallel layer is added tp times, once by each rank before the sum"),
    (3, f"{LLAMA} mesh.cp=3", first_hop_in_backward, "the backward uses the keys and values of another hop"),
    (
        2,
        f"{LLAMA} mesh.cp=2",
        layer_1_attends_alone,
        "attention of layers.1 bypasses dtcp|attention call 1 of 2 (from 0) bypasses dtcp's dispatch",
    ),
    pytest.param(2, f"{GPT} mesh.tp=2", other_weights, "ranks begin with different weights", marks=pytest.mark.slow),
    pytest.param(
        2, f"{GPT} mesh.cp=2 {BFLOAT16}", mean_of_means, "the loss is a mean of means", marks=pytest.mark.slow
    ),
    (
        2,
        "doctor.model=doctor_models:make_with_local_positions mesh.cp=2 doctor.door=context doctor.seq_len=61",
        contextlib.nullcontext,
        "positions are local",
    ),
    (
        2,
        "doctor.model=doctor_models:make_centred mesh.cp=2 doctor.door=context doctor.seq_len=61",
        contextlib.nullcontext,
        "something in the model mixes tokens|doctor_models:make_centred: 40,008 parameters",
    ),
    (
        2,
        "doctor.model=doctor_models:make_with_hooks mesh.cp=2 doctor.door=context doctor.seq_len=61",
        contextlib.nullcontext,
        "the gradient of 4 parameter(s), layers.0.|is ×cp (2)",
    ),
]


def test_a_factor_of_one_is_no_cause_and_few_of_many_gradients_decide_nothing():
    def deviations(*factors: float) -> list[Deviation]:
        clear = [Deviation(f"p{i}", 1.0, 1e-5, factor, 1e-4) for i, factor in enumerate(factors)]
        return [*clear, Deviation("unclear", 1.0, 1e-5, 1.7, 0.5)]

    subject = types.SimpleNamespace(dims=dtcp.ParallelDims(cp=2, dp_shard=1, world_size=2), rows=[range(2)])
    assert list(_factors_of_some(deviations(1.0, 0.9995), subject)) == []
    assert list(_factors_of_some([*deviations(2.0), *deviations()], subject)) == []
    (hint,) = _factors_of_some(deviations(2.0, 2.0), subject)
    assert "the gradient of 2 parameter(s), p0 …, is ×cp (2)" in hint


# ---- what cannot be seen ---------------------------------------------------------------------------------------------


def test_gradients_that_are_zero_decide_nothing():
    report = run_doctor(0, 1, "doctor.model=doctor_models:make_detached doctor.seq_len=61")
    assert report.exit_code == 1 and not report.is_wrong
    assert str(report).rstrip().endswith("too many gradients are zero to see it") and "UNDECIDED" in str(report)
    assert "embedding.weight" in report.unexamined and "head.weight" not in report.unexamined
    assert f"not examined: {len(report.unexamined)} of {report.num_trainable} parameters" in str(report)


def test_every_tensor_that_starts_constant_is_drawn():
    overrides = "doctor.model=doctor_models:make_centred_behind_zeros doctor.seq_len=61"
    report = run_doctor(0, 1, overrides)  # on one rank nothing is wrong with it
    # But for the bias of the head: what is equal at all tokens is taken away.
    assert report.exit_code == 0 and report.unexamined == ["head.bias"], str(report)


def test_a_model_built_in_bfloat16_is_compared_in_float32_and_then_in_bfloat16(ranks: Ranks):
    overrides = "doctor.model=doctor_models:make_in_bfloat16 mesh.cp=2 doctor.door=context doctor.seq_len=61"
    report = ranks.run(2, run_doctor, overrides)[0]
    assert report.exit_code == 0, str(report)
    assert [c.dtype for c in report.comparisons] == ["float32", "bfloat16"] and "built in bfloat16" in report.job
    assert {d.limit for d in report.comparisons[0].deviations} == {1e-5}


def test_a_block_that_is_used_twice_is_planned_once(ranks: Ranks):
    plan = "doctor.context_plan=doctor_models:CONTEXT_PLAN"
    overrides = f"doctor.model=doctor_models:make_of_one_block {plan} mesh.cp=2 doctor.seq_len=61"
    for mode in ("none", "full"):
        report = ranks.run(2, run_doctor, f"{overrides} activation_checkpointing.mode={mode}")[0]
        assert report.exit_code == 0, str(report)
        assert report.num_trainable == 8 and list(report.attention_calls) == ["layers.0"]


def test_a_parameter_with_a_gradient_on_one_rank_only_is_named_before_anything_is_reduced(ranks: Ranks):
    overrides = "doctor.model=doctor_models:make_with_expert mesh.cp=2 doctor.door=context doctor.seq_len=61"
    message = r"parameter expert.weight got a gradient on rank 0 and none on rank 1: FSDP2 would"
    ranks.run_expecting(2, run_doctor, JobError, message, overrides)


def test_buffers_that_the_forward_changes_are_named():
    with pytest.raises(ValueError, match=r"changes the buffer\(s\) state and reads them"):
        run_doctor(0, 1, "doctor.model=doctor_models:make_with_running_state doctor.seq_len=61")
    report = run_doctor(0, 1, "doctor.model=doctor_models:make_that_counts doctor.seq_len=61")
    assert report.exit_code == 0 and report.changed_buffers == ["state"]
    assert "not compared: buffers that the forward changes by its own tokens, state" in str(report)


@pytest.mark.parametrize(("world", "overrides", "fault", "hints"), FAULTS)
def test_a_planted_fault_is_found_and_named(ranks: Ranks, world: int, overrides: str, fault: Fault, hints: str):
    for report in ranks.run(world, run_doctor, overrides, fault):
        assert report.exit_code == 1
        for hint in hints.split("|"):
            assert hint in str(report), str(report)


def test_averaged_gradients_are_named_and_the_table_says_by_what_factor_each_is_off(ranks: Ranks):
    report = ranks.run(2, run_doctor, f"{GPT} mesh.cp=2", averaged_gradients)[0]
    assert report.exit_code == 1 and "every gradient is ÷cp" in str(report)
    # But for the biases of keys, whose gradient is 0.
    right = [d.name for d in report.comparisons[0].deviations if not d.is_wrong]
    assert sorted(right) == ["layers.0.attention.key.bias", "layers.1.attention.key.bias"]
    assert "0.5 times the right one" in str(report)


# ---- command line and refusals ---------------------------------------------------------------------------------------


def command(world: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    return subprocess.run(
        [sys.executable, *launch, "-m", "dtcp.doctor", *overrides],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )


def test_the_command_says_right_with_exit_code_0_and_what_went_over_which_axis(tmp_path: Path):
    done = command(2, *GPT.split(), "mesh.cp=2", f"doctor.json={tmp_path / 'findings.json'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("RIGHT: this mesh trains as one rank does")
    findings = json.loads((tmp_path / "findings.json").read_text())
    assert findings["is_right"] and len(findings["comparisons"][0]["deviations"]) == 36
    sent = {(t["axis"], t["kind"]): t for t in findings["traffic"]}
    # Two layers: keys and values once forward and once backward (rank 1 sends its 31 tokens' whole, 2 rows, 64 + 64
    # features, float32), and in the backward the gradients of those that the other rank read.
    assert sent["cp", "send"]["count"] == 2 * 3
    assert ("cp", "reduce_scatter") in sent and ("cp", "comparison of ranks") in sent


@pytest.mark.slow
def test_the_command_says_wrong_with_exit_code_1():
    done = command(2, "doctor.model=doctor_models:make_with_local_positions", "mesh.cp=2", "doctor.door=context")
    assert done.returncode == 1
    assert "it looks like this: positions are local" in done.stdout and "WRONG" in done.stdout


def test_a_wrong_import_path_is_one_line():
    done = command(1, "doctor.model=doctor_models:nothing")
    assert done.returncode == 1
    assert "error: doctor.model=doctor_models:nothing cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("doctor.model=doctor_models", "has to be package.module:name"),
        ("doctor.model=doctor_models:VOCAB_SIZE", "has to be a function or a class, got int"),
        ("doctor.model=doctor_models:make_without_positions", "arguments named tokens (B, S) and positions (B, S)"),
        ("doctor.model=doctor_models:make_with_torchs_dropout", "drops elements in layers.2, at random"),
        ("model=llama3_70b", "the doctor compares with the whole model on one rank, 70,553,706,496 parameters"),
        ("doctor.json=nowhere/findings.json", "is in a folder that does not exist"),
        ("doctor.model=doctor_models:make_noisy doctor.seq_len=61", "does not give the same twice on one rank"),
        ("doctor.model=doctor_models:make_that_communicates doctor.seq_len=61", "calls a collective of its own (c10d"),
        (
            "doctor.model=doctor_models:make_pair doctor.seq_len=61",
            "to return logits (B, S, V) = (2, 61, …), got tuple",
        ),
        ("doctor.model=doctor_models:make_that_raises", "make_that_raises raised KeyError: 'no such file'"),
        ("doctor.model=doctor_models:make_frozen", "nothing requires a gradient"),
        (
            "doctor.model=doctor_models:make_with_few_words doctor.seq_len=61",
            "the forward of embedding (Embedding) failed with IndexError: index out of range in self; it has 100 rows, "
            "and the data's tokenizer has 257 ids",
        ),
        (
            "doctor.model=doctor_models:make_with_small_head doctor.seq_len=61",
            "gives logits of 100 words, and the data's tokenizer has 257 ids",
        ),
        (
            "doctor.model=doctor_models:make_of_sizes_that_do_not_fit doctor.seq_len=61",
            "the forward of layers.1.norm (LayerNorm) failed with RuntimeError",
        ),
        (f"{PLAN}:plan_that_raises", "plan_that_raises raised KeyError: 'no such module'"),
        (f"{PLAN}:plan_of_nothing", "plan_of_nothing has to return a mapping, got NoneType"),
        (f"{PLAN}:PLAN_OF_A_LIST", "has to be a mapping from module names to parallel styles, or a function"),
        (f"{PLAN}:PLAN_OF_NAMES", "to parallel styles, got 'layers.0': str"),
        ("doctor.seq_len=0", "doctor.seq_len has to be at least 1"),
        ("doctor.context_plan=doctor_models:CONTEXT_PLAN", "is for a doctor.model"),
    ],
)
def test_what_cannot_be_examined_is_refused(overrides: str, message: str):
    with pytest.raises((ValueError, JobError)) as caught:
        run_doctor(0, 1, overrides)
    assert message in str(caught.value)
