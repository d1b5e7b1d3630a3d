"""What used to be silently wrong around contexts and plans, and now says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from contexts import make_mesh, new_mesh, raises
from oracle import relative_error


class Attend(nn.Module):
    """The attention call, with what a case does beside it."""

    def __init__(self, body: Callable[..., Any] | None = None, is_causal: bool = True) -> None:
        super().__init__()
        self.body, self.is_causal = body, is_causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        if self.body is not None:
            return self.body(query, key, value)
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)


class Normed(Attend):
    """Attention of normalised queries, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)


MORE_THAN_ATTENTION = {
    "another scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.05), {}),
    "not causal": (F.scaled_dot_product_attention, {}),
    "causal": (None, {"is_causal": False}),
    "gate": (lambda q, k, v: torch.tanh(F.scaled_dot_product_attention(q, k, v, is_causal=True)), {}),
    "another order of dims": (None, {"qkv_format": "bshd"}),
    "a tuple": (lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, is_causal=True), None), {}),
}


def refuse_plan(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    for name, (body, options) in MORE_THAN_ATTENTION.items():
        block = nn.ModuleDict({"sdpa": Attend(body)})
        with raises(ValueError, "takes the place of the forward of Attend, which is not attention alone"):
            parallelize_module(block, mesh, {"sdpa": dtcp.ContextParallel(**options)})
            raise AssertionError(name)
    block = nn.ModuleDict({"sdpa": Normed()})
    with raises(ValueError, "forward of Normed, and would leave norm.weight out of it"):
        parallelize_module(block, mesh, {"sdpa": dtcp.ContextParallel()})


def test_a_module_whose_forward_does_more_than_attend_is_refused(ranks):
    ranks.run(2, refuse_plan)


def scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.05)


def swapped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*inputs, is_causal=True).transpose(1, 2)


def only_three_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    assert query.size(1) == 3
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def check_plan(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    state = torch.get_rng_state()
    for body, options in [(scaled, {"scale": 0.05}), (swapped, {"qkv_format": "bshd"}), (only_three_heads, {})]:
        parallelize_module(nn.ModuleDict({"sdpa": Attend(body)}), mesh, {"sdpa": dtcp.ContextParallel(**options)})
    assert torch.equal(torch.get_rng_state(), state)


def test_what_an_entry_says_of_a_forward_may_fit_it(ranks):
    ranks.run(2, check_plan)


# ---- a plan inside a context -----------------------------------------------------------------------------------------


def check_both_doors(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    block = nn.ModuleDict({"sdpa": Attend()})
    parallelize_module(block, mesh, {"sdpa": dtcp.ContextParallel()})
    whole = torch.randn(3, 2, 2, 13, 8, generator=torch.Generator().manual_seed(0)) * 2
    right = dtcp.reference_attention(*whole.double(), is_causal=True)
    for layout in ("head_tail", "striped"):
        options: dict[str, Any] = {"seq_len": 13, "layout": layout}
        dtcp.set_sequence(block, dtcp.make_layout("head_tail", seq_len=13, cp=world))
        if layout == "striped":
            with (
                raises(ValueError, "another sequence by set_sequence than the context", "(striped, 13 tokens)"),
                dtcp.context_parallel(mesh, **options) as cp,
            ):
                block["sdpa"](*cp.shard(whole, dim=3))
        with dtcp.context_parallel(mesh, **options, expected_attention_calls=2) as cp:
            dtcp.set_sequence(block, cp.layout)
            local = cp.shard(whole, dim=3)
            for attend in (block["sdpa"], Attend()):  # both are counted
                assert relative_error(cp.unshard(attend(*local), dim=2), right) < 1e-5


def test_a_planned_module_inside_a_context_has_its_layout_and_counts(ranks):
    ranks.run(2, check_both_doors)


# ---- order of contexts -----------------------------------------------------------------------------------------------


def check_order(rank: int, world: int) -> None:
    mesh = make_mesh(world)

    def attend_in_context(seq_len: int, times: int):
        with dtcp.context_parallel(mesh, seq_len=seq_len, expected_attention_calls=times) as cp:
            for _ in range(times):
                x = torch.ones(1, 1, cp.layout.local_seq_len, 4)
                F.scaled_dot_product_attention(x, x, x)
                yield

    first, second = attend_in_context(8, 1), attend_in_context(12, 2)
    next(first)
    next(second)
    with raises(RuntimeError, "not the innermost of its thread", "A generator or a coroutine"):
        next(first)
    next(second)  # goes on in its own context
    with pytest.raises(StopIteration):
        next(second)
    whole = torch.randn(1, 1, 8, 4)  # nothing is left behind
    right = dtcp.reference_attention(whole, whole, whole)
    assert relative_error(F.scaled_dot_product_attention(whole, whole, whole), right) < 1e-5
    with dtcp.context_parallel(mesh, seq_len=8, expected_attention_calls=0):
        pass


def test_contexts_that_end_in_another_order_are_an_error_and_leave_nothing(ranks):
    ranks.run(2, check_order)


# ---- DDP -------------------------------------------------------------------------------------------------------------


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sdpa = nn.Linear(4, 4), Attend()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)[:, None]
        return self.sdpa(x, x, x)


def check_ddp(rank: int, world: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    dims = dtcp.ParallelDims(cp=2, dp_shard=world // 2, world_size=world)
    mesh = dims.build_mesh("cpu")["cp"]
    x = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0))
    planned = OneLayer()
    parallelize_module(planned, mesh, {"sdpa": dtcp.ContextParallel()})
    layout = dtcp.make_layout("head_tail", seq_len=8, cp=2)
    dtcp.set_sequence(planned, layout)
    with raises(NotImplementedError, "DistributedDataParallel over the context parallel ranks"):
        DistributedDataParallel(planned)(dtcp.shard(x, mesh, layout))
    with (
        raises(NotImplementedError, "use dtcp.apply_fsdp(model, dims) or dtcp.reduce_gradients"),
        dtcp.context_parallel(mesh, seq_len=8) as cp,
    ):
        DistributedDataParallel(OneLayer())(cp.shard(x, dim=1))
    if world > 2:  # over other ranks than those of the sequence
        group = dims.view("batch").get_group()
        DistributedDataParallel(planned, process_group=group)(dtcp.shard(x, mesh, layout)).sum().backward()


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_over_context_parallel_ranks_is_refused(ranks, world):
    ranks.run(world, check_ddp)


# ---- gradients -------------------------------------------------------------------------------------------------------


def check_reduced(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(cp=world, world_size=world)
    dims.build_mesh("cpu")
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def step() -> None:
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        dtcp.reduce_gradients(model, dims)
        assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.full((1, 2), 3.0))

    step()
    with raises(ValueError, "gradient of weight as its last call left it", "once per optimizer step"):
        dtcp.reduce_gradients(model, dims)
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        step()


def test_reducing_the_same_gradients_twice_is_refused(ranks):
    ranks.run(2, check_reduced)


def refuse_other_weights(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(cp=world, world_size=world)
    dims.build_mesh("cpu")
    torch.manual_seed(rank // 2)  # two ranks alike
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    dtcp.reduce_gradients(model, dims)


def test_ranks_that_start_from_different_weights_are_refused(ranks):
    ranks.run_expecting(3, refuse_other_weights, ValueError, "the ranks hold different weights, checksums by rank")


# ---- messages --------------------------------------------------------------------------------------------------------


def check_messages(rank: int, world: int) -> None:
    mesh = new_mesh(world)
    with (
        raises(ValueError, "buffer 0 needs a gradient (shape (4,))"),
        dtcp.context_parallel(mesh, buffers=torch.ones(4, requires_grad=True), buffer_seq_dims=0),
    ):
        pass
    with (
        raises(ValueError, "flatten the dims before the heads into one (x.flatten(0, -4))"),
        dtcp.context_parallel(mesh, seq_len=4),
    ):
        x = torch.ones(1, 1, 1, 2, 4)
        F.scaled_dot_product_attention(x, x, x)


def test_messages_name_the_buffer_and_the_cure(ranks):
    ranks.run(2, check_messages)
