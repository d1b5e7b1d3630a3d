"""What autograd saves inside a context has the local contents in every backward, or the backward is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtcp
from contexts import NOTHING, TOLERANCE, attend_once, make_mesh, part, place, raises
from oracle import relative_error

MODIFIED = "modified by an inplace operation"


def check_saved(rank: int, world: int, where: str, mode: str) -> None:
    """Saved indices, targets, the buffer itself, a slice and a view of it, and a module's buffer."""
    mesh, generator = make_mesh(world), torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 11, (2, 13), generator=generator) for _ in range(2))
    module = nn.Module()
    module.register_buffer("rope", torch.randn(13, 6, generator=generator))
    table, head = (torch.randn(11, 6, generator=generator).requires_grad_() for _ in range(2))

    def compute_loss() -> Tensor:
        def body(x: Tensor) -> Tensor:
            rope = module.rope
            return x * rope + x.flip(-1) * rope[:, :1] * rope.unsqueeze(0)[..., 2:3] + (x * rope).sigmoid()

        x = F.embedding(tokens, table)
        x = body(x) if mode == "plain" else checkpoint(body, x, use_reentrant=mode == "reentrant")
        logits = F.linear(x, head)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)

    compute_loss().backward()
    right = [x.grad.clone() for x in (table, head)]
    table.grad = head.grad = None
    options: dict[str, Any] = {
        "buffers": [tokens, labels, module.rope], "buffer_seq_dims": [1, 1, 0], "buffer_pad_values": [0, -100, 0],
    }  # fmt: skip
    with dtcp.context_parallel(mesh, **options, **NOTHING):
        loss = compute_loss()
        if where == "inside":
            loss.backward()
    if where == "outside":
        for x in (tokens, labels, module.rope):
            x.zero_()  # whole again: nothing of it is in the graph
        loss.backward()
    if where == "another":
        with dtcp.context_parallel(mesh, **options, layout="contiguous", **NOTHING):
            loss.backward()
    for x, wanted in zip((table, head), right, strict=True):
        dist.all_reduce(x.grad)
        assert relative_error(x.grad, wanted) < TOLERANCE


@pytest.mark.parametrize("mode", ["plain", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("where", ["inside", "outside", "another"])
def test_a_backward_sees_the_local_contents(ranks: Any, where: str, mode: str) -> None:
    ranks.run(2, check_saved, where, mode)


def check_hooks_around(rank: int, world: int) -> None:
    """Hooks of the user around the context are still asked, with the local contents."""
    mesh, rope, w = make_mesh(world), torch.randn(16), torch.randn(8, requires_grad=True)
    local, packed = part(rope, mesh, 0), []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.clone()

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x * 2),
        dtcp.context_parallel(mesh, buffers=[rope], buffer_seq_dims=[0], **NOTHING),
    ):
        loss = (w * rope).sum()
    loss.backward()
    assert any(torch.equal(x, local) for x in packed) and torch.equal(w.grad, 2 * local)


def test_hooks_around_the_context_are_asked_too(ranks: Any) -> None:
    ranks.run(2, check_hooks_around)


def check_interrupted(rank: int, world: int, where: str) -> None:
    """What runs eagerly in the middle of a compiled function is saved, and its modification seen, as everywhere."""
    mesh, table = make_mesh(world), torch.randn(9, 8, requires_grad=True)

    def attend(tokens: Tensor, scale: Tensor) -> Tensor:
        x = torch.zeros(())
        for _ in range(2):
            torch._dynamo.graph_break()  # in a loop: the whole function runs eagerly, only what it calls is compiled
            x = x + F.embedding(tokens, table) * scale
        heads = x[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    def step(attend: Callable[..., Tensor], tokens: Tensor, scale: Tensor, is_modified: bool) -> Tensor:
        with dtcp.context_parallel(
            mesh, buffers=[tokens, scale], buffer_seq_dims=[1, 0], buffer_pad_values=0, expected_attention_calls=1
        ):
            loss = attend(tokens, scale).square().sum()
            if is_modified:
                scale.add_(1)
        return torch.autograd.grad(loss, table)[0]

    def run(step: Callable[..., Tensor], attend: Callable[..., Tensor], is_modified: bool = False) -> Tensor:
        tokens, scale = torch.arange(14).view(2, 7) % 9, torch.arange(7.0)[:, None] / 7 + 1
        gradient = step(attend, tokens, scale, is_modified)
        assert tokens.size(1) == scale.size(0) == 7
        return gradient

    right = run(step, attend)
    compiled = {
        "inside": (step, torch.compile(attend, backend="aot_eager")),
        "around": (torch.compile(step, backend="aot_eager"), attend),
    }[where]
    for _ in range(3):
        assert relative_error(run(*compiled), right) < TOLERANCE
    with raises(RuntimeError, MODIFIED):
        run(*compiled, is_modified=True)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_functions_with_graph_breaks_save_local_contents(ranks: Any, where: str) -> None:
    ranks.run(2, check_interrupted, where)


def check_modified(rank: int, world: int) -> None:
    """In-place modification of what autograd saved is an error, as it is without a context."""
    mesh = make_mesh(world)
    rope, base, w = torch.randn(16), torch.randn(20), torch.randn(8, requires_grad=True)
    view, labels, cache = base[2:18], torch.arange(16), torch.randn(16)
    local_view = part(view, mesh, 0)
    options: dict[str, Any] = {"buffers": [rope, view, labels, cache], "buffer_seq_dims": [0] * 4}
    early = (torch.ones(16, requires_grad=True) * rope).sum()  # saved whole, before
    with dtcp.context_parallel(mesh, **options, no_restore_buffers={labels}, **NOTHING):
        for buffer, alias in ((rope, rope), (rope, rope[2:]), (rope, rope.detach()), (cache, cache.view(2, 4))):
            y = (w * buffer).sum()
            with torch.no_grad():
                alias.add_(1)
            with raises(RuntimeError, MODIFIED):
                y.backward()
        late = (w * rope).sum()
        rope.add_(1)
        kept = (w * labels).sum()
        untouched = (w * view).sum()
        # Others than buffers, saved as an input and as an output.
        x = torch.randn(8)
        y = (w * x).sum()
        x.add_(1)
        with raises(RuntimeError, MODIFIED):
            y.backward()
        z = w.exp()
        total = z.sum()
        with torch.no_grad():
            z.add_(1)
        with raises(RuntimeError, MODIFIED):
            total.backward()
    with raises(RuntimeError, MODIFIED):
        late.backward()
    w.grad = None
    untouched.backward()
    assert torch.equal(w.grad, local_view)
    labels.add_(1)  # local still, and in the graph
    with raises(RuntimeError, MODIFIED):
        kept.backward()
    # Something was written to ``rope`` inside, if to other contents: refused rather than guessed.
    with raises(RuntimeError, MODIFIED):
        early.backward()


def test_modifying_what_autograd_saved_is_an_error(ranks: Any) -> None:
    ranks.run(2, check_modified)


def check_graph_from_before(rank: int, world: int) -> None:
    mesh, base = make_mesh(world), torch.randn(2, 20)
    rope, view, x = torch.randn(16), base[:, :16], torch.randn(2, 16, requires_grad=True)
    y, z = (x * rope * view).sum(), (x[:, :1] * base).sum()
    right = torch.autograd.grad(y, x, retain_graph=True)[0]
    options: dict[str, Any] = {"buffers": [rope, view], "buffer_seq_dims": [0, 1]}
    for _ in range(2):
        with dtcp.context_parallel(mesh, **options, **NOTHING), raises(RuntimeError, MODIFIED):
            torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], right)
    torch.autograd.grad(z, x, retain_graph=True)
    # A base that is modified inside stays modified: not hidden by what the context puts back.
    with dtcp.context_parallel(mesh, **options, **NOTHING):
        base.add_(1)
    for graph in (y, z):
        with raises(RuntimeError, MODIFIED):
            torch.autograd.grad(graph, x, retain_graph=True)


def test_a_graph_from_before_the_context(ranks: Any) -> None:
    ranks.run(2, check_graph_from_before)


def check_graph_into_buffer(rank: int, world: int) -> None:
    mesh, rope, w = make_mesh(world), torch.randn(16), torch.randn(8, requires_grad=True)
    whole, before = rope.clone(), place(rope)
    with (
        raises(RuntimeError, "modified in place", "out-of-place"),
        dtcp.context_parallel(mesh, buffers=[rope], buffer_seq_dims=[0], **NOTHING),
    ):
        rope.mul_(w)
    assert torch.equal(rope, whole) and place(rope) == before


def test_a_gradient_cannot_slip_into_a_buffer(ranks: Any) -> None:
    ranks.run(2, check_graph_into_buffer)


def check_double_backward(rank: int, world: int) -> None:
    """The hooks that save buffers keep the graph of everything else."""
    mesh, rope, x = make_mesh(world), torch.randn(16), torch.randn(8, requires_grad=True)
    local = part(rope, mesh, 0)

    def second(y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    with dtcp.context_parallel(mesh, buffers=[rope], buffer_seq_dims=[0], **NOTHING):
        y = (x.exp() * x**3 * rope).sum()
    assert torch.allclose(second(y), second((x.exp() * x**3 * local).sum()))


def test_double_backward_of_other_ops(ranks: Any) -> None:
    ranks.run(2, check_double_backward)


def check_modes(rank: int, world: int) -> None:
    mesh, normal = make_mesh(world), torch.arange(13)
    with torch.inference_mode():
        inference = torch.arange(13)
    options: dict[str, Any] = {"buffers": [inference, normal], "buffer_seq_dims": [0, 0], "buffer_pad_values": 0}
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), dtcp.context_parallel(mesh, **options) as cp:
            assert torch.equal(inference, normal) and torch.equal(normal, part(torch.arange(13), mesh, 0))
            assert inference.is_inference() and not normal.is_inference()
            attend_once(cp.layout.local_seq_len)
        assert torch.equal(inference, torch.arange(13)) and torch.equal(normal, torch.arange(13))
        assert inference.is_inference() and not normal.is_inference() and normal._version == 0


def test_inference_tensors_and_grad_modes(ranks: Any) -> None:
    ranks.run(2, check_modes)
