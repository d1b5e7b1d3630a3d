"""Torch's own attention operators, called past ``scaled_dot_product_attention``: refused inside a context."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from oracle import relative_error

S = 12


def fused_calls(seq_len: int) -> dict[str, Any]:
    """Name -> (function, its inputs): the operators that have a CPU kernel, with a query that wants a gradient."""
    aten = getattr(torch, "ops").aten  # noqa: B009, cloudpickle would follow torch.ops
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, seq_len, 8, generator=generator)
    x = torch.randn(1, seq_len, 16, generator=generator)
    weights = [torch.randn(48, 16), torch.zeros(48), torch.randn(16, 16), torch.zeros(16)]
    norms = [torch.ones(16), torch.zeros(16)] * 2
    linears = [torch.randn(32, 16), torch.zeros(32), torch.randn(16, 32), torch.zeros(16)]
    return {
        "_scaled_dot_product_flash_attention_for_cpu": (
            lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0], query,
        ),
        "_scaled_dot_product_attention_math": (
            lambda q: aten._scaled_dot_product_attention_math.default(q, q, q, None, 0.0, True)[0], query,
        ),
        "_native_multi_head_attention": (
            lambda x: torch._native_multi_head_attention(x, x, x, 16, 2, *weights, None, False)[0], x,
        ),
        "_transformer_encoder_layer_fwd": (
            lambda x: torch._transformer_encoder_layer_fwd(x, 16, 2, *weights, False, False, 1e-5, *norms, *linears), x,
        ),
    }  # fmt: skip


DIFFERENTIABLE = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math")


def check_fused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole = torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(1))
    right = dtcp.reference_attention(*[whole.double()] * 3, is_causal=True)
    for name, (call, x) in fused_calls(S // world).items():
        modes: list[Any] = [torch.no_grad, torch.inference_mode]
        if name in DIFFERENTIABLE:
            modes.append(contextlib.nullcontext)
        before = call(x.requires_grad_(name in DIFFERENTIABLE)).detach()
        compiled = torch.compile(call, backend="aot_eager")
        with torch.no_grad():
            assert torch.equal(compiled(x), before), "a graph made outside"
        for mode in modes:
            with dtcp.context_parallel(mesh, seq_len=S) as cp:
                local = cp.shard(whole, dim=2)
                out = torch.nn.functional.scaled_dot_product_attention(local, local, local, is_causal=True)
                with mode(), pytest.raises(NotImplementedError, match=f"aten.{name} inside context_parallel would"):
                    call(x)
                again = torch.nn.functional.scaled_dot_product_attention(local, local, local, is_causal=True)
            assert torch.equal(out, again) and relative_error(cp.unshard(out, dim=2), right) < 1e-5
            entered = dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0)
            with mode(), entered, pytest.raises(NotImplementedError, match=f"aten.{name} inside"):
                call(x)
        with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0):
            with torch.no_grad(), pytest.raises(Exception, match=f"aten.{name} inside|by a route that dtcp"):
                compiled(x)
            seen: list[Tensor] = []
            thread = threading.Thread(target=lambda call=call, x=x, seen=seen: seen.append(call(x)))
            thread.start()
            thread.join()
            assert torch.equal(seen[0].detach(), before), "another thread has no context"
            if x.requires_grad:
                seen[0].sum().backward()
        assert torch.equal(call(x).detach(), before)


def test_fused_operators_are_refused_by_name(ranks):
    ranks.run(2, check_fused)


def check_counted(rank: int, world: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole = torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(1))
    right = dtcp.reference_attention(*[whole.double()] * 3, is_causal=True)
    counts = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with dtcp.context_parallel(mesh, seq_len=S) as cp, mode():
            local = cp.shard(whole, dim=2)
            with FlopCounterMode(display=False) as counter:
                out = torch.nn.functional.scaled_dot_product_attention(local, local, local, is_causal=True)
            assert cp.num_attention_calls == 1 or world == 1
            assert relative_error(cp.unshard(out, dim=2), right) < 1e-5
        counts.append(counter.get_total_flops())
    assert len(set(counts)) == 1 and (counts[0] > 0) == (world > 1), counts  # torch's own on CPU counts as none


@pytest.mark.parametrize("world", [1, 2])
def test_flops_are_counted_with_and_without_gradients(ranks, world):
    ranks.run(world, check_counted)


def check_fused_on_one_rank(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for call, x in fused_calls(S).values():
        before = call(x)
        with dtcp.context_parallel(mesh, seq_len=S):
            assert torch.equal(call(x), before)
        assert torch.equal(call(x), before)


def test_fused_operators_are_torchs_own_on_one_rank(ranks):
    ranks.run(1, check_fused_on_one_rank)


def check_fused_in_an_operator(rank: int, world: int) -> None:
    """A custom op of somebody else, which calls the operator below autograd."""
    flash, query = fused_calls(S // world)["_scaled_dot_product_flash_attention_for_cpu"]

    def theirs(x: Tensor) -> Tensor:
        return flash(x).clone()

    theirs.__annotations__ = {"x": Tensor, "return": Tensor}
    operator = torch.library.custom_op("someone::attend", theirs, mutates_args=())
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    right = operator(query)
    entered = dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0)
    with entered, pytest.raises(NotImplementedError, match="flash_attention_for_cpu inside context_parallel"):
        operator(query)
    assert torch.equal(operator(query), right)


def test_fused_operators_in_the_operators_of_others_are_refused(ranks):
    ranks.run(2, check_fused_in_an_operator)


def check_nested(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [torch.randn(6, 2, 8), torch.randn(4, 2, 8)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout)
        if layout == torch.strided:
            x = torch.nested.nested_tensor([part.transpose(0, 1).contiguous() for part in parts], layout=layout)
        else:
            x = x.transpose(1, 2)
        before = attend(x, x, x)
        for mode in (torch.no_grad, contextlib.nullcontext):
            with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0):
                y = x.detach().requires_grad_(mode is contextlib.nullcontext)
                with mode(), pytest.raises(NotImplementedError, match="nested tensors inside context_parallel would"):
                    attend(y, y, y)
                seen: list[Any] = []
                thread = threading.Thread(target=lambda y=y, seen=seen: seen.append(attend(y, y, y)))
                thread.start()
                thread.join()
        for again in (seen[0], attend(x, x, x)):
            assert all(torch.equal(a, b) for a, b in zip(before.unbind(), again.unbind(), strict=True))


def test_nested_tensors_are_refused(ranks):
    ranks.run(2, check_nested)
