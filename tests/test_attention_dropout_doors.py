"""Attention dropout through each door: the same weights are dropped as in the dense model on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import dtcp
from dtcp.dropout import name_dropouts
from dtcp.dropout_hash import keys_of_place, place_salt
from dtcp.models import build_model
from dtcp.models.attention import ScaledDotProductAttention
from oracle import relative_error

P, SEQ_LEN, ROWS, NUM_BLOCKS = 0.25, 13, (4, 9), 3
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=P, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(32, 32), nn.Linear(32, 32)
        self.key, self.value = nn.Linear(32, 16), nn.Linear(32, 16)
        self.attend = attend

    def forward(self, x: Tensor, *keys: Tensor) -> Tensor:
        query, key, value = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.output(self.attend(query * 3, key, value, *keys).transpose(1, 2).flatten(2))


def make_blocks(attend: Any = by_torch) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(attend() if isinstance(attend, type) else attend) for _ in range(NUM_BLOCKS))


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(len(ROWS), SEQ_LEN, 32, generator=generator) for _ in range(2))
    return x, weight


def token_keys(step: int, positions: Tensor) -> Tensor:
    return dtcp.dropout_keys(6, step, ROWS, positions)


def dense(step: int, of_call: Callable[[int], tuple[Tensor, Any]]) -> dict[str, Tensor]:
    """The whole model in float64; ``of_call`` gives a call's keys and name."""
    blocks, (x, weight) = make_blocks().double(), make_data()
    x = x.double().requires_grad_()
    out = x
    for number, block in enumerate(blocks):
        keys, name = of_call(number)

        def attend(*qkv: Tensor, keys: Tensor = keys, name: Any = name) -> Tensor:
            return dtcp.reference_attention(
                *qkv, is_causal=True, enable_gqa=True, dropout_p=P, dropout_keys=keys, dropout_name=name
            )

        block.attend = attend
        out = block(out)
    (out * weight).sum().backward()
    grads = {name: p.grad for name, p in blocks.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def by_number(step: int) -> Callable[[int], tuple[Tensor, Any]]:
    """Keys inside a context: each call's are made of those of the call before."""

    def of_call(number: int) -> tuple[Tensor, Any]:
        keys, name = token_keys(step, torch.arange(SEQ_LEN)), torch.tensor(place_salt("context_parallel"))
        for _ in range(number):
            keys, name = keys_of_place(keys, name), torch.tensor(1)
        return keys, name

    return of_call


def check_equal(right: dict[str, Tensor], out: Tensor, x: Tensor, blocks: nn.Module, mesh: Any, layout: Any) -> None:
    import torch.distributed as dist

    for name, found in (("out", out.detach()), ("x", x.grad)):
        assert relative_error(dtcp.unshard(found, mesh, layout), right[name]) < 1e-5, name
    noise = 1e-7 * max(value.norm() for value in right.values())
    for name, parameter in blocks.named_parameters():
        grad = parameter.grad.clone()
        dist.all_reduce(grad)
        error = (grad.double() - right[name]).norm()
        assert error <= 1e-5 * right[name].norm() + noise, (name, error)  # a key bias has gradient 0


# ---- context ---------------------------------------------------------------------------------------------------------


def run_blocks(units: list[Any], how: str, x: Tensor) -> Tensor:
    for unit in units:
        x = checkpoint(unit, x, use_reentrant=how == "reentrant") if "reentrant" in how else unit(x)
    return x


def check_context(rank: int, world: int, cases: list[tuple[str, bool]]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    rights = {step: dense(step, by_number(step)) for step in (0, 1)}
    for how, is_compiled in cases:
        torch._dynamo.reset()
        pending = []
        for step in (0, 1):  # two steps in flight, their backwards after both
            blocks, (x, weight) = make_blocks(), make_data()
            units = [torch.compile(b, backend="aot_eager", fullgraph=True) if is_compiled else b for b in blocks]
            with dtcp.context_parallel(
                mesh, buffers=[x, weight], buffer_seq_dims=[1, 1], step=step, rows=ROWS, dropout_seed=6
            ) as cp:
                leaf = x.clone().requires_grad_()
                out = run_blocks(units, how, leaf)
                loss = (out * weight).sum()
            assert cp.num_attention_calls == NUM_BLOCKS
            pending.append((cp, blocks, leaf, out, loss))
        for step in (1, 0):
            cp, blocks, leaf, out, loss = pending[step]
            loss.backward()
            assert cp.num_attention_calls == NUM_BLOCKS * (2 if "reentrant" in how else 1)
            check_equal(rights[step], out, leaf, blocks, mesh, cp.layout)


CASES = [("plain", False), ("non_reentrant", False), ("reentrant", False)]
COMPILED = [("plain", True), ("non_reentrant", True)]


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_context_drops_by_step_rows_and_number_of_the_call(ranks, world):
    ranks.run(world, check_context, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_blocks_in_a_context_drop_the_same(ranks, world):
    ranks.run(world, check_context, COMPILED, timeout=240)


def check_one_graph(rank: int, world: int) -> None:
    """A graph serves every block and every step."""
    import torch._dynamo.testing

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    blocks = make_blocks()
    units = [torch.compile(block, backend=counter, fullgraph=True) for block in blocks]
    for step in range(4):
        x, _ = make_data()
        with dtcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], step=step, rows=ROWS):
            found = run_blocks(units, "plain", x)
        x, _ = make_data()
        with dtcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], step=step, rows=ROWS):
            torch.testing.assert_close(found, run_blocks(list(blocks), "plain", x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2, "a first graph, and at most one for another kind of object"


@pytest.mark.slow
def test_compiled_blocks_share_a_graph_in_a_context(ranks):
    ranks.run(2, check_one_graph, timeout=240)


def check_context_refusals(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for options, message in [
        ({"step": 1}, "both step and rows"),
        ({"rows": [0]}, r"both step and rows.*rows=\[0, 1\]"),
    ]:
        with pytest.raises(ValueError, match=message), dtcp.context_parallel(mesh, seq_len=8, **options):
            pass
    told = {"seq_len": 8, "step": 0, "rows": [0, 1]}
    for given, kernel, message in [
        (torch.randn(3, 2, 4, 8), "auto", r"int64 \(B, S_local\) = \(3, 4\), .*got torch.int64 \(2, 4\)"),
        (torch.randn(2, 2, 4, 8), "flash", "kernel='flash' draws its dropout masks.*use kernel='math'"),
    ]:
        with (
            pytest.raises(ValueError, match=message),
            dtcp.context_parallel(mesh, kernel=kernel, expected_attention_calls=0, **told),
        ):
            by_torch(given, given, given)
    x = torch.randn(2, 2, 4, 8)
    message = r"dropout_p=0.25 inside.*context_parallel\(\.\.\., step=, rows=\)"
    with pytest.raises(NotImplementedError, match=message), dtcp.context_parallel(mesh, seq_len=8):
        by_torch(x, x, x)
    with (
        pytest.raises(ValueError, match="leaves flash.*dropout_p=0.25; allow another"),
        torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]),
        dtcp.context_parallel(mesh, expected_attention_calls=0, **told),
    ):
        by_torch(x, x, x)


def test_what_a_context_cannot_drop_exactly_is_refused(ranks):
    ranks.run(2, check_context_refusals)


# ---- plan ------------------------------------------------------------------------------------------------------------


def by_name(step: int) -> Callable[[int], tuple[Tensor, Any]]:
    return lambda number: (token_keys(step, torch.arange(SEQ_LEN)), f"{number}.attend")


class Attention(ScaledDotProductAttention):
    def __init__(self) -> None:
        super().__init__(P)


def check_plan(rank: int, world: int, cases: list[tuple[str, bool]]) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    rights = {step: dense(step, by_name(step)) for step in (0, 1)}
    for how, is_compiled in cases:
        torch._dynamo.reset()
        pending = []
        for step in (0, 1):
            blocks, (x, weight) = make_blocks(Attention), make_data()
            name_dropouts(blocks)
            for block in blocks:
                parallelize_module(block, mesh, {"attend": dtcp.ContextParallel()})
            layout = dtcp.make_layout(("head_tail", "striped")[step], seq_len=SEQ_LEN, cp=world)
            dtcp.set_sequence(blocks, layout)
            units: list[Any] = list(blocks)
            if is_compiled:
                units = [torch.compile(block, backend="aot_eager", fullgraph=True) for block in blocks]
            keys = token_keys(step, layout.positions(rank))
            leaf = dtcp.shard(x, mesh, layout).requires_grad_()
            out = leaf
            for unit in units:
                out = checkpoint(unit, out, keys, use_reentrant=how == "reentrant") if "re" in how else unit(out, keys)
            pending.append((layout, blocks, leaf, out, (out * dtcp.shard(weight, mesh, layout)).sum()))
        for step in (1, 0):
            layout, blocks, leaf, out, loss = pending[step]
            loss.backward()
            check_equal(rights[step], out, leaf, blocks, mesh, layout)
        blocks.eval()
        assert torch.equal(blocks[0](leaf, keys), blocks[0](leaf, keys + 1)), "nothing is dropped in eval mode"


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_planned_module_drops_by_keys_and_name(ranks, world):
    ranks.run(world, check_plan, CASES)


@pytest.mark.slow
def test_compiled_planned_modules_drop_the_same(ranks):
    ranks.run(2, check_plan, COMPILED, timeout=240)


def check_plan_refusals(rank: int, world: int) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))

    class Drawing(nn.Module):
        is_causal = True

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5 * self.training, is_causal=True)

    for module, options, message in [
        (Drawing().eval(), {}, "something else; .*derive its class from dtcp.AttentionDropout if it drops"),
        (ScaledDotProductAttention(0.1), {"kernel": "flash"}, "kernel='flash'.*dropout 0.1.*use kernel='auto'"),
        (ScaledDotProductAttention(1.0), {}, "dropout_p must be at least 0 and below 1, got 1.0"),
    ]:
        was_training = module.training
        with pytest.raises(ValueError, match=message):
            parallelize_module(nn.ModuleDict({"sdpa": module}), mesh, {"sdpa": dtcp.ContextParallel(**options)})
        assert module.training == was_training
    layout, x = dtcp.make_layout("head_tail", seq_len=8, cp=world), torch.randn(2, 4, 4, 8)
    module = ScaledDotProductAttention(0.1)
    blocks = parallelize_module(nn.ModuleDict({"sdpa": module}), mesh, {"sdpa": dtcp.ContextParallel()})
    dtcp.set_sequence(blocks, layout)
    keys = dtcp.dropout_keys(0, 0, [0, 1], layout.positions(rank))
    with pytest.raises(ValueError, match="dropout on 2 ranks needs to know step, rows and positions"):
        module(x, x, x)
    with pytest.raises(ValueError, match="needs a name.*dtcp.name_dropouts"):
        module(x, x, x, keys)
    name_dropouts(blocks)
    with pytest.raises(ValueError, match=r"keys must be int64 \(B, S\) = \(2, 4\)"):
        module(x, x, x, keys[:1])
    assert module(x, x, x, keys).shape == x.shape


def test_what_a_plan_cannot_drop_exactly_is_refused(ranks):
    ranks.run(2, check_plan_refusals)


# ---- heads over tensor parallel ranks --------------------------------------------------------------------------------


def check_dtensors(rank: int, world: int, backend: str | None) -> None:
    """Heads as DTensors over tp, in a context and in a plan, equal all heads on one rank."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(2, h, SEQ_LEN, 8, generator=generator) for h in (4, 2, 2)]
    layout = dtcp.make_layout("head_tail", seq_len=SEQ_LEN, cp=2)
    module = nn.ModuleDict({"sdpa": ScaledDotProductAttention(P)})
    name_dropouts(module)
    parallelize_module(module, mesh["cp"], {"sdpa": dtcp.ContextParallel()})
    dtcp.set_sequence(module, layout)
    keys = token_keys(0, layout.positions(mesh["cp"].get_local_rank()))

    def in_context(*qkv: Tensor) -> Tensor:
        with dtcp.context_parallel(mesh["cp"], seq_len=SEQ_LEN, step=0, rows=ROWS, dropout_seed=6):
            return (by_torch if backend is None else torch.compile(by_torch, backend=backend))(*qkv)

    sdpa = module["sdpa"] if backend is None else torch.compile(module["sdpa"], backend=backend, fullgraph=True)
    for run, name in ((in_context, "context_parallel"), (lambda *qkv: sdpa(*qkv, keys), "sdpa")):
        expected = [x.double().requires_grad_() for x in whole]
        right = dtcp.reference_attention(
            *expected, is_causal=True, enable_gqa=True, dropout_p=P,
            dropout_keys=token_keys(0, torch.arange(SEQ_LEN)), dropout_name=name,
        )  # fmt: skip
        right.square().sum().backward()
        local = [dtcp.shard(x, mesh["cp"], layout, dim=2) for x in whole]
        leaves = [distribute_tensor(x, mesh["tp"], [Shard(1)]).requires_grad_() for x in local]
        out = run(*leaves)
        out.square().sum().backward()
        for found, wanted in zip((out, *(x.grad for x in leaves)), (right, *(x.grad for x in expected)), strict=True):
            part = dtcp.shard(wanted.detach(), mesh["cp"], layout, dim=2)
            assert relative_error(found.full_tensor().detach(), part) < 1e-5, name


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_heads_as_dtensors_are_known_by_their_global_index(ranks, backend):
    ranks.run(4, check_dtensors, backend, timeout=180)


# ---- a model ---------------------------------------------------------------------------------------------------------


def check_model_in_context(rank: int, world: int) -> None:
    """A GPT that drops attention weights attends over the whole sequence inside a context too."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model = build_model("gpt_tiny", num_layers=2, dim=32, num_heads=4, attention_dropout=0.3, dropout=0.1)
    model.init_weights(seed=0)
    tokens = torch.randint(0, 256, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQ_LEN).expand(2, SEQ_LEN).contiguous()
    keys = token_keys(0, torch.arange(SEQ_LEN))
    whole = copy.deepcopy(model)
    right = whole(tokens, positions, keys)
    right.square().sum().backward()
    with dtcp.context_parallel(
        mesh, buffers=[tokens, positions, keys], buffer_seq_dims=[1, 1, 1], buffer_pad_values=[0, 0, 0]
    ) as cp:
        out = model(tokens, positions, keys)
        (out * cp.valid[:, None]).square().sum().backward()
    assert cp.num_attention_calls == 2
    torch.testing.assert_close(cp.unshard(out).detach(), right.detach(), rtol=1e-5, atol=1e-5)
    grads = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.distributed.all_reduce(parameter.grad)
        assert (parameter.grad - grads[name]).norm() <= 1e-5 * grads[name].norm() + 1e-4, name


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_drops_is_seen_by_a_context(ranks, world):
    ranks.run(world, check_model_in_context)
