"""Transforms, export, compile and autocast inside ``context_parallel``: right or refused."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_name_before  # before dtcp is loaded

import dtcp
from contexts import TOLERANCE, check_right, draw, make_mesh, raises, scripted
from oracle import relative_error

S = 13
OF_PART = functools.partial(by_name_before, is_causal=True)


# ------------------------------------------------------------------------------ transforms, export, double backward


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def transformed(name: str, cp: Any, local: Tensor, loss: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the transform gives, and what is right if that is not attention itself."""
    query = local[0].clone()
    match name:
        case "vmap":
            return torch.vmap(OF_PART)(*(y[:, None] for y in local)).squeeze(1), None
        case "func.grad":
            return torch.func.grad(loss)(query), grad
        case "func.vjp":
            return torch.func.vjp(OF_PART, *local)[0], None
        case "func.jvp":
            return torch.func.jvp(loss, (query,), (query,))[1], (grad * query).sum()
        case "forward mode":
            forward_ad = importlib.import_module("torch.autograd.forward_ad")
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(query, query))).tangent
                return torch.zeros(()) if tangent is None else tangent, (grad * query).sum()
        case "functional_call":
            return torch.func.functional_call(Attention(), {}, tuple(local)), None
        case "double backward":
            (first,) = torch.autograd.grad(loss(query.requires_grad_()), query, create_graph=True)
            return torch.autograd.grad(first.sum(), query)[0], torch.tensor(float("nan"))
        case "export strict" | "export":
            export = importlib.import_module("torch.export").export
            return export(Attention(), tuple(local), strict=name == "export strict").module()(*local), None
        case "make_fx real" | "make_fx fake":
            make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
            return make_fx(OF_PART, tracing_mode=name.split()[1])(*local)(*local), None
        case "jit.trace" | "jit.script":
            jit = importlib.import_module("torch.jit")
            traced = jit.script(scripted) if name == "jit.script" else jit.trace(scripted, tuple(local))
            return traced(*local), None
    raise AssertionError(name)


# Right, or an error with these words: also where another call of the same context was counted.
TRANSFORMS: dict[str, str | None] = {
    "vmap": "vmap",
    "func.grad": "func",
    "func.vjp": "func",
    "func.jvp": "forward",
    "forward mode": "forward",
    "functional_call": None,
    "double backward": "no second derivative (double backward)",
    "export strict": None,
    "export": "by a route that dtcp does not see",
    "make_fx real": None,
    "make_fx fake": "by a route that dtcp does not see",
    "jit.trace": None,
    "jit.script": None,
}


def check_transform(rank: int, world: int, name: str) -> None:
    mesh, refusal = make_mesh(world), TRANSFORMS[name]
    whole = draw(3, 2, 2, S, 8)
    right = dtcp.reference_attention(*whole.double(), is_causal=True)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        check_right(cp, OF_PART)
        local = cp.shard(whole, dim=3)

        def loss(query: Tensor) -> Tensor:
            return OF_PART(query, local[1], local[2]).square().sum()

        query = local[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(query), query)
        try:
            out, wanted = transformed(name, cp, local, loss, grad)
        except Exception as error:
            assert refusal is not None and refusal in str(error), f"{type(error).__name__}: {error}"
            return
        assert refusal is None, "expected a refusal"
        wanted = cp.shard(right, dim=2) if wanted is None else wanted
        assert relative_error(out.detach(), wanted) < TOLERANCE, (out.flatten()[:4], wanted.flatten()[:4])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_right_or_refused(ranks: Any, name: str) -> None:
    ranks.run(2, check_transform, name)


def check_traced_before(rank: int, world: int) -> None:
    """Torch keeps the kernels that it found when it traced outside a context, or inside: neither reaches the other."""
    from torch.fx.experimental.proxy_tensor import make_fx

    mesh, x = make_mesh(world), draw(3, 1, 2, 4, 8)
    trace = make_fx(OF_PART, tracing_mode="symbolic")
    for _ in range(2):
        trace(*x)
        with (
            dtcp.context_parallel(mesh, seq_len=8, expected_attention_calls=0),
            raises(RuntimeError, "by a route that dtcp does not see"),
        ):
            trace(*x)
        query = x[0].clone().requires_grad_()

        def gradient(query: Tensor) -> Tensor:
            return torch.autograd.grad(OF_PART(query, query, query).sum(), query)[0]

        assert torch.allclose(make_fx(gradient, tracing_mode="symbolic")(query)(query), gradient(query))


def test_a_trace_inside_does_not_go_by_one_outside(ranks: Any) -> None:
    ranks.run(2, check_traced_before)


# -------------------------------------------------------------------------------------------------------------- compile


def check_compile(rank: int, world: int, inside_first: bool) -> None:
    """One compiled function outside and inside, in either order, is right in both."""
    mesh, x = make_mesh(world), draw(3, 2, 2, S, 8)
    right = dtcp.reference_attention(*x.double(), is_causal=True)
    compiled = torch.compile(lambda q, k, v: by_name_before(q, k, v, is_causal=True), backend="aot_eager")

    def outside() -> None:
        assert relative_error(compiled(*x), right) < TOLERANCE

    def inside(layout: str) -> None:
        with dtcp.context_parallel(mesh, seq_len=S, layout=layout, expected_attention_calls=1) as cp:
            check_right(cp, compiled)

    for _ in range(2):
        if not inside_first:
            outside()
        inside("head_tail")
        inside("striped")
        outside()


@pytest.mark.parametrize("inside_first", [True, False])
def test_compiled_outside_and_inside(ranks: Any, inside_first: bool) -> None:
    ranks.run(2, check_compile, inside_first)


def check_autocast(rank: int, world: int) -> None:
    """Autocast casts the inputs of attention, eager and compiled, of one dtype or of several."""
    mesh, x = make_mesh(world), draw(3, 2, 2, S, 8)
    compiled = torch.compile(OF_PART, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16), dtcp.context_parallel(mesh, seq_len=S) as cp:
        local = cp.shard(x, dim=3)
        eager, again = OF_PART(*local), compiled(*local)
        assert eager.dtype == again.dtype == torch.bfloat16 and torch.equal(eager, again)
        assert torch.equal(OF_PART(local[0], local[1], local[2].bfloat16()), eager)
        assert torch.equal(compiled(local[0], local[1], local[2].bfloat16()), eager)


def test_autocast(ranks: Any) -> None:
    ranks.run(2, check_autocast)
