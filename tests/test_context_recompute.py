"""What a backward recomputes finds the context of its own forward, or none if that ran outside every context."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import dtcp
from oracle import relative_error

S = 12


class Model:
    """Attention that also reads two tensors with a sequence dim, which contexts may cut."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, 2, S, 8, generator=generator)
        self.rope, self.gate = (torch.randn(S, 8, generator=generator) for _ in range(2))

    def attend(self, x: Tensor) -> Tensor:
        gate = self.gate[: x.size(2)]  # the first rows, whole or cut
        x = (x * self.rope[: x.size(2)]).sin() * gate
        return scaled_dot_product_attention(x * 2, x, x, is_causal=True).tanh() * gate


class Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


KINDS: dict[str, Any] = {
    "none": lambda function, x: function(x),
    "non_reentrant": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "reentrant by name": lambda function, x: CheckpointFunction.apply(function, True, x),
    "composable": lambda function, x: composable_checkpoint(Block(function))(x),
}


@contextlib.contextmanager
def cut(mesh: Any, buffers: list[Tensor], layout: str = "head_tail") -> Iterator[Any]:
    dims = [0] * len(buffers)
    with dtcp.context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=dims, layout=layout, seq_len=S, expected_attention_calls=None
    ) as cp:
        local = torch.ones(1, 1, cp.layout.local_seq_len, 8)
        scaled_dot_product_attention(local, local, local)  # so that none of these contexts is without a call
        yield cp


def gradient(mesh: Any, kind: str, place: str) -> Tensor:
    """Of x, with the forward in one place and the backward in another."""
    model, run = Model(), KINDS[kind]
    rope, gate = [model.rope], [model.gate]
    x = model.x.clone().requires_grad_()

    def forward(x: Tensor) -> Tensor:
        loss = run(model.attend, x).square().sum()
        if kind == "none":  # the right value: by a backward at once
            loss.backward()
            return torch.zeros((), requires_grad=True)
        return loss

    def local(cp: Any) -> Tensor:
        return cp.shard(x, dim=2)

    match place:
        case "outside, then in a context":
            loss = forward(x)
            with cut(mesh, rope + gate):
                loss.backward()
        case "outside, then in the inner of two":
            loss = forward(x)
            with cut(mesh, rope), cut(mesh, gate, "striped"):
                loss.backward()
        case "outer, then inner":
            with cut(mesh, rope) as cp:
                loss = forward(local(cp))
                with cut(mesh, gate, "striped"):
                    loss.backward()
        case "inner, then outer":
            with cut(mesh, rope):
                with cut(mesh, gate, "striped") as cp:
                    loss = forward(local(cp))
                loss.backward()
        case "inner, then outside":
            with cut(mesh, rope), cut(mesh, gate, "striped") as cp:
                loss = forward(local(cp))
            loss.backward()
        case "one, then another":
            with cut(mesh, rope + gate) as cp:
                loss = forward(local(cp))
            with cut(mesh, gate + rope, "striped"):
                loss.backward()
        case "its own":
            with cut(mesh, rope + gate) as cp:
                loss = forward(local(cp))
                loss.backward()
        case _:
            raise AssertionError(place)
    assert torch.equal(model.rope, Model().rope) and torch.equal(model.gate, Model().gate)
    return x.grad


PLACES = [
    "outside, then in a context", "outside, then in the inner of two", "outer, then inner", "inner, then outer",
    "inner, then outside", "one, then another", "its own",
]  # fmt: skip


def check_place(rank: int, world: int, kind: str, place: str, plan: bool) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    if plan:  # a module that knows a sequence, so that checkpoints remember state outside contexts too
        from torch.distributed.tensor.parallel import parallelize_module

        planned = parallelize_module(torch.nn.Identity(), mesh, dtcp.ContextParallel(is_causal=True))
        dtcp.set_sequence(planned, dtcp.make_layout("head_tail", seq_len=S, cp=world))
    for _ in range(2):
        grad = gradient(mesh, kind, place)
        wanted = gradient(mesh, "none", place)
        assert torch.equal(grad, wanted), relative_error(grad, wanted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", list(KINDS)[1:])
@pytest.mark.parametrize("plan", [False, True], ids=["", "with a plan"])
def test_recomputation_is_that_of_its_own_forward(ranks, kind, place, plan):
    ranks.run(2, check_place, kind, place, plan)


def check_patches(rank: int, world: int) -> None:
    import importlib

    module = importlib.import_module("torch.utils.checkpoint")

    def state() -> list[Any]:
        function = module.CheckpointFunction
        names = ("_CheckpointFrame", "_run_fn_with_dynamo_disabled", "checkpoint")
        methods = [function.forward, function.backward, module._CheckpointFrame.__init__]
        return [function, *methods, *(getattr(module, name) for name in names)]

    gc.collect()  # planned modules of other tests keep the patch as long as they live
    before = state()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0):
        assert state() != before
    assert state() == before


def test_torchs_checkpoint_is_as_it_was_after_a_context(ranks):
    ranks.run(2, check_patches)
