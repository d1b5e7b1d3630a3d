"""Tensor parallelism by hand: both doors, gradients that arrive whole, what is sent, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtcp
from dtcp.models import build_model
from parity import TOLERANCE, compare, job, record_run, scattered
from recorder import Sent, count_collectives

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"config_or_name": "gpt_tiny", "max_seq_len": 64},
    "llama": {"config_or_name": "llama_tiny", "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 96},
}
COMMON = {"num_layers": 2, "dim": 64, "vocab_size": 257, "qk_init_scale": 8.0}


def make_model(kind: str, **options: Any) -> Any:
    return build_model(**(SIZES[kind] | COMMON | options), seed=3)


def make_dims(**degrees: int) -> dtcp.ParallelDims:
    dims = dtcp.ParallelDims(**degrees)
    dims.build_mesh("cpu")
    return dims


def make_batch(seq_len: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(257, (rows, seq_len), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1).masked_fill(tokens % 5 == 0, -100)


def check_gradients(model: nn.Module, kind: str, seq_len: int, scale: float = 1.0, **options: Any) -> None:
    """Raise unless the gradients are those of one rank with the whole batch."""
    reference = make_model(kind, **options)
    tokens, labels = make_batch(seq_len)
    dtcp.token_loss(reference(tokens), labels).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), math.inf)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted, gradient = expected[name].grad, parameter.grad
        assert wanted is not None and isinstance(gradient, DTensor), name
        assert gradient.placements == parameter.placements, f"{name}: {gradient.placements}"
        error = (gradient.full_tensor() / scale - wanted).norm()
        assert error <= TOLERANCE * wanted.norm() + 1e-8 * norm, f"{name}: {error / wanted.norm()}"


# ---- both doors ------------------------------------------------------------------------------------------------------


def train_by_hand(
    rank: int, world: int, kind: str, door: str, compiled: bool, sequence_parallel: bool, degrees: dict[str, int]
) -> None:
    """Two steps' worth of gradients without FSDP2: one step compared, and no warning of the second."""
    seq_len, dims, model = 29, make_dims(**degrees), make_model(kind)
    multiple_of = dims.tp if sequence_parallel else 1
    dtcp.apply_tensor_parallel(model, dims, sequence_parallel=sequence_parallel)
    layout = dtcp.make_layout("head_tail", seq_len=seq_len, cp=dims.cp, multiple_of=multiple_of)
    if door == "plan":
        parallelize_module(model, dims.view("cp"), {"layers.*.attention.sdpa": dtcp.ContextParallel()})
        dtcp.set_sequence(model, layout)
    if compiled:
        for block in model.layers.values():
            block.compile(fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            take_gradients(model, dims, door, layout)
            if step == 0:
                check_gradients(model, kind, seq_len)
                norm = dtcp.clip_grad_norm_(model, math.inf, dims)
                dtcp.clip_grad_norm_(model, float(norm) / 4, dims)
                check_gradients(model, kind, seq_len, scale=0.25)
            optimizer.step()
            optimizer.zero_grad()
    assert not [w for w in caught if "dtcp:" in str(w.message)], [str(w.message) for w in caught]


def take_gradients(model: nn.Module, dims: Any, door: str, layout: dtcp.SequenceLayout) -> None:
    tokens, labels = make_batch(layout.seq_len)
    cp, loss_mesh = dims.view("cp"), dims.view("loss")
    if door == "plan":
        positions = layout.positions(cp.get_local_rank() if cp.size() > 1 else 0)
        local = dtcp.shard(tokens, cp, layout), dtcp.shard(labels, cp, layout, pad_value=-100)
        logits = model(local[0], torch.where(positions < layout.seq_len, positions, 0))
        dtcp.token_loss(logits, local[1], mesh=loss_mesh).backward()
    else:
        pads, multiple_of = [0, -100], layout.multiple_of
        with dtcp.context_parallel(
            cp, buffers=[tokens, labels], buffer_seq_dims=1, buffer_pad_values=pads, multiple_of=multiple_of
        ) as context:
            dtcp.token_loss(model(tokens, context.positions), labels, mesh=loss_mesh).backward()
    dtcp.reduce_gradients(model, dims)


BY_HAND = [
    ("gpt", "context", False, True, {"cp": 2, "tp": 2}),
    pytest.param("llama", "plan", False, True, {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("gpt", "plan", False, False, {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("llama", "context", False, False, {"tp": 2}, marks=pytest.mark.slow),
    ("gpt", "context", False, True, {"tp": 2}),  # one rank of cp, which pads
    pytest.param("llama", "plan", True, True, {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("gpt", "context", True, True, {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("llama", "context", True, False, {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "door", "compiled", "sequence_parallel", "degrees"), BY_HAND)
def test_a_loop_by_hand_has_the_gradients_of_one_rank(ranks, kind, door, compiled, sequence_parallel, degrees):
    world = math.prod(degrees.values())
    ranks.run(world, train_by_hand, kind, door, compiled, sequence_parallel, degrees, timeout=400)


def forget_to_reduce(rank: int, world: int) -> bool:
    dims, model = make_dims(cp=2, tp=2), make_model("llama")
    dtcp.apply_tensor_parallel(model, dims)
    layout = dtcp.make_layout("head_tail", seq_len=29, cp=2, multiple_of=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(dtcp, "reduce_gradients", lambda *_: None):
        warnings.simplefilter("always")
        for _ in range(3):
            take_gradients(model, dims, "context", layout)
            optimizer.step()
            optimizer.zero_grad()
    return any("an optimizer has stepped" in str(w.message) for w in caught)


def test_gradients_that_nobody_adds_over_cp_are_told_under_tp_too(ranks):
    ranks.renew(4)  # it is told once in a process
    assert all(ranks.run(4, forget_to_reduce))


# ---- gradients arrive whole ------------------------------------------------------------------------------------------


def gradients_arrive(rank: int, world: int, kind: str, tied: bool) -> None:
    dims = make_dims(tp=world)
    made = make_model(kind, tie_weights=tied)
    dtcp.apply_tensor_parallel(made, dims)
    emptied = make_model(kind, tie_weights=tied, device="meta")
    dtcp.apply_tensor_parallel(emptied, dims)
    emptied.to_empty(device="cpu")
    emptied.init_weights(3)
    tokens, labels = make_batch(12)
    for model in (made, emptied, copy.deepcopy(made)):
        for _ in range(2):
            dtcp.token_loss(model(tokens), labels).backward()
            model.double().float()  # another tensor in each parameter
        check_gradients(model, kind, 12, scale=2.0, tie_weights=tied)
        model.zero_grad()
        torch.optim.AdamW(model.parameters(), fused=True).step()
        state = {name: p.full_tensor() for name, p in model.named_parameters()}
        right = dict(make_model(kind, tie_weights=tied).named_parameters())
        assert all(torch.equal(state[name], right[name]) for name in right)


@pytest.mark.parametrize(
    ("world", "kind", "tied"),
    [
        (2, "gpt", True),
        pytest.param(4, "llama", False, marks=pytest.mark.slow),
        pytest.param(2, "llama", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_arrive_as_their_parameters_are_spread(ranks, world, kind, tied):
    ranks.run(world, gradients_arrive, kind, tied)


def frozen_norm(rank: int, world: int) -> None:
    model = make_model("gpt")
    model.final_norm.requires_grad_(False)
    dtcp.apply_tensor_parallel(model, make_dims(tp=2))
    assert not model.final_norm.weight.requires_grad
    logits = model(make_batch(12)[0])
    logits.to_local().sum().backward()
    assert model.final_norm.weight.grad is None


def test_frozen_parameters_stay_frozen(ranks):
    ranks.run(2, frozen_norm)


def gathered_logits(rank: int, world: int) -> None:
    for kind, tied in itertools.product(SIZES, (True, False)):
        dims, model = make_dims(tp=2), make_model(kind, tie_weights=tied)
        dtcp.apply_tensor_parallel(model, dims, plan=dtcp.tensor_parallel_plan(model, loss_parallel=False))
        tokens, labels = make_batch(12)
        logits = model(tokens)
        assert type(logits) is Tensor and logits.shape == (2, 12, 257)
        dtcp.token_loss(logits, labels).backward()
        check_gradients(model, kind, 12, tie_weights=tied)


@pytest.mark.slow
def test_logits_can_be_gathered(ranks):
    ranks.run(2, gathered_logits)


def initial_weights(rank: int, world: int) -> None:
    for kind in SIZES:
        dims, model = make_dims(dp_shard=2, tp=2), make_model(kind, device="meta")
        dtcp.apply_tensor_parallel(model, dims)
        dtcp.apply_fsdp(model, dims)
        model.to_empty(device="cpu")
        model.init_weights(3)
        right = dict(make_model(kind).named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), right[name]), name


def test_initial_weights_are_those_of_one_rank(ranks):
    ranks.run(4, initial_weights)


# ---- norms over several meshes ---------------------------------------------------------------------------------------


def clip_over_meshes(rank: int, world: int) -> None:
    """Parameters that are plain, over tp, over fsdp, and over both, on one dim and on two; one gradient is Partial."""
    dims = make_dims(dp_shard=2, tp=2)
    model = nn.Module()
    model.layers = nn.ModuleList()
    model.rows, model.columns, model.whole, model.plain = (nn.Linear(6, 5) for _ in range(4))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    plan = {"rows": ColwiseParallel(), "columns": RowwiseParallel()}
    parallelize_module(model, dims.view("tp"), plan)
    right = [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.rows, mesh=dims.view("fsdp"))
    fully_shard(model.columns, mesh=dims.view("fsdp"))
    fully_shard(model.whole, mesh=dims.view("fsdp"))
    model.partial = nn.Parameter(distribute_tensor(torch.ones(3), dims.view("tp"), [Replicate()]))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    share = torch.full((3,), 1.0 + dims.view("tp").get_local_rank())  # 1 and 2, a gradient of 3
    model.partial.grad = DTensor.from_local(share, dims.view("tp"), [Partial()], run_check=False)
    kinds = {(p.device_mesh.ndim, p.placements) if isinstance(p, DTensor) else None for p in model.parameters()}
    assert len(kinds) >= 6, kinds
    wanted = torch.cat([x.flatten() for x in [*right, torch.full((3,), 3.0)]]).norm()
    assert dtcp.clip_grad_norm_(model, math.inf, dims).item() == pytest.approx(wanted.item(), rel=1e-6)
    assert model.partial.grad.to_local().tolist() == [3.0] * 3
    dtcp.clip_grad_norm_(model, 0.5, dims)
    assert dtcp.clip_grad_norm_(model, math.inf, dims).item() == pytest.approx(0.5, rel=1e-5)


def test_the_norm_counts_each_element_once_over_several_meshes(ranks):
    ranks.run(4, clip_over_meshes)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def count_sent(rank: int, world: int, kind: str, sequence_parallel: bool, num_layers: int) -> list[Counter[str]]:
    dims, model = make_dims(tp=world), make_model(kind, num_layers=num_layers)
    dtcp.apply_tensor_parallel(model, dims, sequence_parallel=sequence_parallel)
    tokens, labels = make_batch(24)
    with count_collectives(world) as forward:
        loss = dtcp.token_loss(model(tokens), labels)
    with count_collectives(world) as backward:
        loss.backward()
    return [by_kind(forward), by_kind(backward)]


def by_kind(sent: list[Sent]) -> Counter[str]:
    total: Counter[str] = Counter()
    for exchange in sent:
        total[exchange.kind] += exchange.num_bytes
    return total


@pytest.mark.parametrize(("world", "kind"), [(2, "gpt"), pytest.param(4, "llama", marks=pytest.mark.slow)])
def test_sequence_parallelism_sends_the_bytes_of_tensor_parallelism(ranks, world, kind):
    """Of a layer, the second of two: 4 (t-1)/t·s·b·h·e forward, with and without; backward as many without, 6 with.

    The gathers again of the inputs of attention and feed-forward are what it costs not to keep them whole.
    """

    def of_a_layer(sequence_parallel: bool) -> list[Counter[str]]:
        both = [ranks.run(world, count_sent, kind, sequence_parallel, number)[0] for number in (1, 2)]
        return [two - one for one, two in zip(*both, strict=True)]

    unit = (world - 1) * 24 * 2 * COMMON["dim"] * 4 // world
    for sent in of_a_layer(sequence_parallel=False):
        assert sent == {"all_reduce": 4 * unit}
    forward, backward = of_a_layer(sequence_parallel=True)
    assert forward == {"all_gather": 2 * unit, "reduce_scatter": 2 * unit}
    num_whole = {"gpt": 4, "llama": 2}[kind]  # of the two norms; biases of row-parallel layers see all positions
    small = num_whole * round(COMMON["dim"] * 4 * 2 * (world - 1) / world)
    assert backward == {"all_gather": 4 * unit, "reduce_scatter": 2 * unit, "vectors": small}


# ---- planted faults --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bias_on_every_rank() -> Iterator[None]:
    """Row-parallel layers add their bias once on each rank of tp."""
    from dtcp.parallelize import tensor

    right = tensor.apply_tensor_parallel

    def apply(model: Any, dims: Any, **options: Any) -> None:
        right(model, dims, **options)
        for module in itertools.chain(*((b.attention.output, b.feed_forward.down) for b in model.layers.values())):
            module.register_forward_hook(lambda m, _, out: out + (dims.tp - 1) * m.bias.to_local())

    with mock.patch.object(tensor, "apply_tensor_parallel", apply):
        yield


@contextlib.contextmanager
def gradients_of_norms_left_as_they_are() -> Iterator[None]:
    """Each rank takes its own positions' part for the gradient."""
    from dtcp.parallelize import tensor

    def take_local(placements: Any, gradient: Any) -> Any:
        if not gradient.placements[0].is_partial():
            return gradient.redistribute(placements=placements)
        return DTensor.from_local(gradient.to_local(), gradient.device_mesh, placements, run_check=False)

    with mock.patch.object(tensor, "_take_placements", take_local):
        yield


@contextlib.contextmanager
def gradients_of_norms_counted_twice() -> Iterator[None]:
    """The norm adds those of whole parameters over tp, as if they were cut."""
    from dtcp.parallelize import gradients

    def all_dims(gradient: Any) -> Any:
        return (gradient.device_mesh, tuple(range(gradient.device_mesh.ndim)))

    with mock.patch.object(gradients, "_sharded_over", all_dims):
        yield


def record_with_fault(rank: int, world: int, fault: Any, overrides: list[str]) -> Any:
    with fault():
        return record_run(rank, world, overrides, scattered, (1, 2))


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (bias_on_every_rank, "gradient"),
        (gradients_of_norms_left_as_they_are, "gradient"),
        (gradients_of_norms_counted_twice, "grad_norm"),
    ],
)
def test_the_comparison_sees_a_planted_fault(ranks, fault, what):
    reference = ranks.run(1, record_run, job("gpt", 33, 2), scattered, (1, 2))[0]
    runs = ranks.run(2, record_with_fault, fault, [*job("gpt", 33, 2), "mesh.tp=2"])
    difference = compare(runs[0], reference)
    assert getattr(difference, what) > 100 * TOLERANCE, difference


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse(rank: int, world: int, kind: str, options: dict[str, Any], build: dict[str, Any]) -> None:
    model = make_model(kind, **build)
    dtcp.apply_tensor_parallel(model, make_dims(tp=world), **options)


@pytest.mark.parametrize(
    ("world", "kind", "build", "message"),
    [
        (3, "gpt", {}, r"num_heads divisible by tp, got num_heads=4 and tp=3; use tp=1 or 2 or 4, and cp"),
        (4, "llama", {"num_kv_heads": 2}, r"num_kv_heads divisible by tp, got num_kv_heads=2 and tp=4; use tp=1 or 2,"),
        (2, "gpt", {"ffn_dim": 99}, r"ffn_dim divisible by tp, got ffn_dim=99 and tp=2; use tp=1, and"),
        (4, "gpt", {"vocab_size": 3}, r"vocab_size >= tp, got 3 and tp=4"),
    ],
)
def test_sizes_that_ranks_cannot_share_are_refused(ranks, world, kind, build, message):
    ranks.run_expecting(world, refuse, ValueError, message, kind, {}, build)


def refuse_dropout(rank: int, world: int) -> None:
    model = make_model("gpt")
    model.embedding_dropout = nn.Dropout(0.1)
    dtcp.apply_tensor_parallel(model, make_dims(tp=world))


def test_a_dropout_that_depends_on_the_mesh_is_refused(ranks):
    message = r"cannot take nn.Dropout, got p=0.1 in embedding_dropout.*use dtcp.Dropout"
    ranks.run_expecting(2, refuse_dropout, NotImplementedError, message)


def test_a_key_that_matches_nothing_is_refused(ranks):
    plan = {"layers.*.attention.query": ColwiseParallel(), "layers.*.mlp.up": ColwiseParallel()}
    message = r"plan key 'layers\.\*\.mlp\.up' matches no module of GPT.*its modules are token_embedding"
    ranks.run_expecting(2, refuse, ValueError, message, "gpt", {"plan": plan}, {})


def refuse_weight_norm(rank: int, world: int) -> None:
    model = make_model("gpt")
    torch.nn.utils.parametrizations.weight_norm(model.layers["0"].feed_forward.down)
    dtcp.apply_tensor_parallel(model, make_dims(tp=world))


def test_a_weight_that_is_computed_at_each_use_is_refused(ranks):
    message = r"cuts layers\.0\.feed_forward\.down, whose weight is parametrized .*remove_parametrizations before"
    ranks.run_expecting(2, refuse_weight_norm, ValueError, message)


def refuse_more(rank: int, world: int) -> None:
    dims, model = make_dims(tp=2), make_model("llama")
    with pytest.raises(ValueError, match="plan for GPT, Llama and TitanDecoder, got Linear; write one"):
        dtcp.apply_tensor_parallel(nn.Linear(2, 2), dims)
    dtcp.apply_tensor_parallel(model, dims)
    with pytest.raises(ValueError, match=r"plain parameters, got token_embedding.weight as a DTensor over \('tp',\)"):
        dtcp.apply_tensor_parallel(model, dims)
    with pytest.raises(ValueError, match=r"evenly over tp=2, got 7; pad them: dtcp.make_layout\(..., multiple_of=2\)"):
        model(torch.zeros(1, 7, dtype=torch.int64))
    with_sequence, without = (dtcp.tensor_parallel_plan(model, sequence_parallel=on) for on in (True, False))
    assert set(without) - set(with_sequence) == {  # which layers share an input is one entry
        *(f"layers.*.attention.{name}" for name in ("query", "key", "value")),
        *(f"layers.*.feed_forward.{name}" for name in ("gate", "up")),
    }
    style = dtcp.ReplicatedParameters(input_layout=Replicate(), desired_input_layout=Shard(-1))
    table = parallelize_module(nn.Embedding(8, 4), dims.view("tp"), style)
    with pytest.raises(ValueError, match="evenly over tp=2, got 3"):
        table(torch.arange(3))
    one_rank = functools.partial(dtcp.ParallelDims, world_size=1)
    assert dtcp.apply_tensor_parallel(model, one_rank()) is None  # nothing to do


def test_what_the_verb_does_not_take_is_refused(ranks):
    ranks.run(2, refuse_more)


def uneven_rows(rank: int, world: int) -> None:
    """257 rows over 2 and 4 ranks: the columns are cut; where these do not divide either, it is refused."""
    dims = make_dims(dp_shard=4, tp=2)
    model = make_model("llama", device="meta")
    dtcp.apply_tensor_parallel(model, dims)
    dtcp.apply_fsdp(model, dims)
    model.to_empty(device="cpu")
    model.init_weights(3)
    assert model.token_embedding.weight.placements == (Shard(1), Shard(0))
    for name, parameter in make_model("llama").named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
    model = make_model("llama", dim=72, num_heads=4, num_kv_heads=4, device="meta")
    model.token_embedding = nn.Embedding(257, 70, device="meta")
    dtcp.apply_tensor_parallel(model, dims)
    with pytest.raises(ValueError, match=r"shape \(257, 70\) over tp=2 and 4 ranks of fsdp; use rows.*vocab_size=258"):
        dtcp.apply_fsdp(model, dims)


@pytest.mark.slow
def test_rows_that_tp_cuts_unevenly_are_right_under_fsdp(ranks):
    ranks.run(8, uneven_rows, timeout=200)
