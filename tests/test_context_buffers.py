"""Buffers of ``context_parallel``: local inside, as they were afterwards, and right in every backward."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import dtcp
from oracle import relative_error

TOLERANCE = 1e-5  # float32, against one rank
NOTHING: dict[str, Any] = {"expected_attention_calls": 0}
MODIFIED = "modified by an inplace operation"


def make_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


def new_mesh(world: int) -> DeviceMesh:
    """A mesh with a group of its own, which ``init_device_mesh`` over the whole world does not make."""
    return DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu", mesh_dim_names=("cp",))


@contextlib.contextmanager
def raises(error: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def part(x: Tensor, mesh: DeviceMesh, dim: int = 1, layout: str = "head_tail", pad_value: float = 0) -> Tensor:
    """This rank's part by indexing, without the library's ``shard``."""
    sequence = dtcp.make_layout(layout, seq_len=x.size(dim), cp=mesh.size())
    shape = [sequence.padded_seq_len if d == dim % x.ndim else n for d, n in enumerate(x.shape)]
    padded = torch.full(shape, pad_value).to(x.dtype)
    padded.narrow(dim, 0, x.size(dim)).copy_(x)
    return padded.index_select(dim, sequence.positions(mesh.get_local_rank()))


def place(x: Tensor) -> tuple[Any, ...]:
    """Where the contents of a tensor are."""
    return x.untyped_storage()._cdata, x.data_ptr(), x.shape, x.stride(), x.storage_offset(), x.dtype


def attend_once(local_seq_len: int) -> None:
    x = torch.randn(1, 1, local_seq_len, 8)
    F.scaled_dot_product_attention(x, x, x, is_causal=True)


KINDS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "int": (lambda: torch.arange(32).view(2, 16), 1),
    "padded int": (lambda: torch.arange(26).view(2, 13), 1),
    "view of a base": (lambda: torch.arange(60).view(2, 30)[:, 3:16], 1),
    "expanded": (lambda: torch.arange(16).expand(2, 16), 1),
    "transposed": (lambda: torch.arange(32.0).view(16, 2).t(), 1),
    "1-D": (lambda: torch.arange(13), 0),
    "(S, …)": (lambda: torch.randn(13, 2, 3), 0),
    "last dim": (lambda: torch.randn(2, 3, 13), -1),
    "negative dim": (lambda: torch.randn(2, 13, 3), -2),
    "bool": (lambda: torch.arange(26).view(2, 13) % 3 == 0, 1),
    "float64": (lambda: torch.randn(2, 13, dtype=torch.float64), 1),
    "bfloat16": (lambda: torch.randn(2, 13).bfloat16(), 1),
    "complex": (lambda: torch.polar(torch.ones(13, 4), torch.randn(13, 4)), 0),
    "uint8": (lambda: torch.arange(13, dtype=torch.uint8), 0),
    "stepped": (lambda: torch.arange(52)[::4], 0),
}


def check_kind(rank: int, world: int, kind: str, error: bool) -> None:
    make, dim = KINDS[kind]
    mesh, buffer = make_mesh(world), make()
    base = buffer._base
    whole, before, base_before = buffer.clone(), place(buffer), None if base is None else base.clone()
    right = part(whole, mesh, dim, pad_value=1)

    def base_is_untouched() -> bool:
        return base is None or torch.equal(base, base_before)

    options: dict[str, Any] = {"buffers": [buffer], "buffer_seq_dims": [dim], "buffer_pad_values": [1]}
    guard: Any = pytest.raises(ZeroDivisionError) if error else contextlib.nullcontext()
    with guard, dtcp.context_parallel(mesh, **options, **NOTHING):
        assert place(buffer)[0] != before[0] and buffer.is_contiguous()
        assert buffer.dtype == whole.dtype and torch.equal(buffer, right)
        assert base_is_untouched()
        buffer.fill_(0)  # the local contents, nothing else
        assert base_is_untouched()
        if error:
            raise ZeroDivisionError
    assert place(buffer) == before and torch.equal(buffer, whole) and base_is_untouched()


def test_a_buffer_of_any_kind_is_local_inside_and_its_own_afterwards(ranks: Any) -> None:
    for kind in KINDS:
        ranks.run(2, check_kind, kind, False)
        ranks.run(3, check_kind, kind, True)


def check_batch_views(rank: int, world: int) -> None:
    mesh, batch = make_mesh(world), torch.arange(34).view(2, 17)
    tokens, labels, raw = batch[:, :-1], batch[:, 1:], batch.clone()
    with dtcp.context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1], **NOTHING) as cp:
        assert torch.equal(tokens, raw[:, :-1][:, cp.positions]) and torch.equal(labels, raw[:, 1:][:, cp.positions])
        tokens.zero_()
        labels.fill_(-1)
        assert torch.equal(batch, raw)
    assert torch.equal(batch, raw) and torch.equal(tokens, raw[:, :-1]) and torch.equal(labels, raw[:, 1:])
    tokens[0, 0] = 99  # a view again
    assert batch[0, 0] == 99


def test_two_views_of_one_batch(ranks: Any) -> None:
    ranks.run(2, check_batch_views)


def check_containers(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    tree = {"a": torch.arange(26).view(2, 13), "b": [torch.randn(2, 13, 3), ("text", torch.ones(2, 13).bool(), None)]}
    tensors = [tree["a"], tree["b"][0], tree["b"][1][1]]
    wholes, before = [x.clone() for x in tensors], [place(x) for x in tensors]
    for buffers in ([tree], tree):
        with dtcp.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1], buffer_pad_values=0, **NOTHING):
            assert all(torch.equal(x, part(whole, mesh)) for x, whole in zip(tensors, wholes, strict=True))
            assert tree["b"][1][0] == "text"
        assert [place(x) for x in tensors] == before


def test_nested_containers(ranks: Any) -> None:
    ranks.run(2, check_containers)


def check_tensordict(rank: int, world: int, error: bool) -> None:
    from tensordict import LazyStackedTensorDict, TensorDict

    mesh = make_mesh(world)

    def make() -> Any:
        inner = TensorDict({"y": torch.randn(2, 13, 3)}, batch_size=[2, 13])
        return TensorDict({"x": torch.arange(26).view(2, 13), "inner": inner}, batch_size=[2, 13])

    td = make()
    tensors = td["x"], td["inner", "y"]
    whole, before = td.clone(), [place(x) for x in tensors]
    guard: Any = pytest.raises(ZeroDivisionError) if error else contextlib.nullcontext()
    options: dict[str, Any] = {"buffers": [td], "buffer_seq_dims": [1], "buffer_pad_values": [7]}
    with guard, dtcp.context_parallel(mesh, **options, **NOTHING) as cp:
        size = torch.Size([2, cp.layout.local_seq_len])
        assert td.batch_size == size and td["inner"].batch_size == size
        assert torch.equal(td["x"], part(whole["x"], mesh, pad_value=7))
        assert torch.equal(td["inner", "y"], part(whole["inner", "y"], mesh, pad_value=7))
        if error:
            raise ZeroDivisionError
    assert td.batch_size == torch.Size([2, 13]) and td["inner"].batch_size == torch.Size([2, 13])
    assert [place(x) for x in tensors] == before and (td == whole).all()
    # Kept: all of it or none.
    with (
        raises(ValueError, "some tensors of a TensorDict"),
        dtcp.context_parallel(mesh, **options, no_restore_buffers={td["x"]}),
    ):
        raise AssertionError
    with dtcp.context_parallel(mesh, **options, no_restore_buffers=set(tensors), **NOTHING):
        pass
    assert td.batch_size == size and td["inner"].batch_size == size and td["x"].shape == size
    lazy = LazyStackedTensorDict(*make().unbind(0), stack_dim=0)
    with (
        raises(ValueError, "made anew", "LazyStackedTensorDict"),
        dtcp.context_parallel(mesh, buffers=[lazy], buffer_seq_dims=[1], buffer_pad_values=[7]),
    ):
        raise AssertionError


@pytest.mark.parametrize("error", [False, True])
def test_a_tensordict_and_its_batch_size(ranks: Any, error: bool) -> None:
    ranks.run(2, check_tensordict, error)


def check_refusals(rank: int, world: int) -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = make_mesh(world)
    tokens, labels = torch.arange(26).view(2, 13), torch.arange(26).view(2, 13)

    def refused(*words: str, error: type[Exception] = ValueError, **options: Any) -> None:
        with raises(error, *words), dtcp.context_parallel(mesh, **options):
            raise AssertionError("entered")
        assert tokens.shape == (2, 13) and tokens._version == 0

    refused("one length", "13 (buffer 0)", "11 (buffer 1)", buffers=[tokens, tokens[:, :11]], buffer_seq_dims=[1, 1])
    refused("13 (buffer 0)", "16 (seq_len)", buffers=[tokens], buffer_seq_dims=[1], seq_len=16)
    refused("give buffers, or seq_len=")
    refused("give buffers, or seq_len=", buffers=[], buffer_seq_dims=[])
    refused("each of the 2 buffers", "[1]", buffers=[tokens, labels], buffer_seq_dims=[1])
    refused("each of the 1 buffers", buffers=[tokens])
    refused("no dim 2", "(2, 13)", buffers=[tokens], buffer_seq_dims=[2])
    refused("one value for each", buffers=[tokens], buffer_seq_dims=[1], buffer_pad_values=[0, 0])
    leaf = torch.randn(2, 13, requires_grad=True)
    for x in (leaf, leaf * 2, nn.Parameter(torch.randn(2, 13))):
        refused("needs a gradient", "cp.shard(x", buffers=[x], buffer_seq_dims=[1])
    refused("pad_value=-100", "uint8", buffers=[tokens.byte()], buffer_seq_dims=[1], buffer_pad_values=[-100])
    refused("not in buffers", buffers=[tokens], buffer_seq_dims=[1], buffer_pad_values=0, no_restore_buffers={labels})
    refused("listed twice", buffers=[tokens, tokens], buffer_seq_dims=[1, 1], buffer_pad_values=[0, -100])
    square = torch.zeros(13, 13)
    refused("listed twice", buffers=[square, square], buffer_seq_dims=[0, 1])
    refused("documents", error=NotImplementedError, seq_len=13, documents=object())
    even = distribute_tensor(torch.arange(32).view(2, 16), mesh)
    refused("DTensor", "full_tensor()", buffers=[even], buffer_seq_dims=[1])


def test_what_cannot_be_a_buffer_is_refused_by_name(ranks: Any) -> None:
    ranks.run(2, check_refusals)


def check_pad_example(rank: int, world: int) -> None:
    mesh, whole = make_mesh(world), torch.arange(26).view(2, 13)
    tokens, labels = whole.clone(), whole.clone()
    options: dict[str, Any] = {
        "buffers": [tokens, labels, whole > 3, torch.randn(13)], "buffer_seq_dims": [1, 1, 1, 0],
    }  # fmt: skip
    with (
        pytest.raises(ValueError, match="13 tokens are padded to 16 for cp=2.*torch.int64") as caught,
        dtcp.context_parallel(mesh, **options),
    ):
        raise AssertionError
    example = str(caught.value).split("buffer_pad_values=")[1].split("]")[0] + "]"
    assert example == "[0, -100, 0, 0]"
    with dtcp.context_parallel(mesh, **options, buffer_pad_values=[0, -100, 0, 0], **NOTHING):
        assert torch.equal(tokens, part(whole, mesh)) and torch.equal(labels, part(whole, mesh, pad_value=-100))


def test_the_example_for_pad_values_is_a_call_that_works(ranks: Any) -> None:
    ranks.run(2, check_pad_example)


def check_region(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    x = torch.randn(2, 13, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with dtcp.context_parallel(mesh, seq_len=13, layout="striped") as cp:
        assert cp.layout == dtcp.make_layout("striped", seq_len=13, cp=world)
        positions = cp.layout.positions(rank)
        assert cp.positions.dtype == torch.int64 and torch.equal(cp.positions, positions.where(positions < 13, 0))
        assert cp.valid.dtype == torch.bool and cp.valid.sum() == cp.layout.num_valid(rank)
        local = cp.shard(x)
        assert torch.equal(local, part(x.detach(), mesh, layout="striped"))
        assert (cp.shard(x.transpose(1, 2), dim=-1, pad_value=5)[..., ~cp.valid] == 5).all()
        whole = cp.unshard(local)
        assert torch.equal(whole, x)
        (whole.square().sum() / world).backward()
        mine = torch.zeros(13).index_fill(0, cp.positions[cp.valid], 1)
        assert torch.allclose(x.grad, 2 * x.detach() * mine[:, None])
        for calls in range(3):
            assert cp.num_attention_calls == calls
            attend_once(cp.layout.local_seq_len)
    assert cp.num_attention_calls == 3 and torch.equal(cp.unshard(cp.shard(x)), x)


@pytest.mark.parametrize("world", [2, 3])
def test_what_the_context_gives(ranks: Any, world: int) -> None:
    ranks.run(world, check_region)


def check_kept(rank: int, world: int) -> None:
    mesh, whole = make_mesh(world), torch.arange(26).view(2, 13)
    tokens, labels = whole.clone(), whole.clone()
    options: dict[str, Any] = {"buffers": [tokens, labels], "buffer_seq_dims": [1, 1], "buffer_pad_values": [0, -100]}
    with raises(ZeroDivisionError), dtcp.context_parallel(mesh, **options, no_restore_buffers={labels}):
        raise ZeroDivisionError
    assert torch.equal(labels, whole)  # the block did not end: nothing is kept
    with dtcp.context_parallel(mesh, **options, no_restore_buffers=[labels], **NOTHING):
        labels[0, 0] = 77
    right = part(whole, mesh, pad_value=-100)
    right[0, 0] = 77
    assert torch.equal(tokens, whole) and torch.equal(labels, right)
    with dtcp.context_parallel(mesh, buffers=[tokens, tokens], buffer_seq_dims=[1, -1], buffer_pad_values=3, **NOTHING):
        assert torch.equal(tokens, part(whole, mesh, pad_value=3))  # the same one listed twice
    assert torch.equal(tokens, whole)


def test_kept_buffers_stay_local(ranks: Any) -> None:
    ranks.run(2, check_kept)


def check_one_rank(rank: int, world: int) -> None:
    mesh, tokens = make_mesh(1), torch.arange(13)
    before = place(tokens)
    with dtcp.context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers={tokens}) as cp:
        assert place(tokens) == before and torch.equal(cp.shard(tokens, dim=0), tokens)
        attend_once(13)
        assert cp.num_attention_calls == 1
    assert place(tokens) == before


def test_one_rank_cuts_nothing(ranks: Any) -> None:
    ranks.run(1, check_one_rank)


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


def check_attention(cp: Any, seed: int = 0) -> None:
    """One call of the context equals dense attention."""
    whole = torch.randn(3, 2, 2, cp.layout.seq_len, 8, generator=torch.Generator().manual_seed(seed)) * 2
    out = F.scaled_dot_product_attention(*cp.shard(whole, dim=3), is_causal=True)
    right = dtcp.reference_attention(*whole.double(), is_causal=True)
    assert relative_error(cp.unshard(out, dim=2), right) < TOLERANCE


def check_nested(rank: int, world: int) -> None:
    mesh, other = new_mesh(world), new_mesh(world)
    outer_buffer, inner_buffer = (torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (13, 9))
    wholes = outer_buffer.clone(), inner_buffer.clone()
    local = part(wholes[0], mesh, 0), part(wholes[1], mesh, 0, "striped")
    x, losses = torch.randn(3, requires_grad=True), []

    def body(x: Tensor) -> Tensor:
        return (x * outer_buffer).sin().sum() + (x * inner_buffer).sin().sum()

    options: dict[str, Any] = {"buffers": [inner_buffer], "buffer_seq_dims": [0], "layout": "striped"}
    with dtcp.context_parallel(mesh, buffers=[outer_buffer], buffer_seq_dims=[0], expected_attention_calls=3) as cp:
        check_attention(cp)
        for inner_mesh in (mesh, other):
            with dtcp.context_parallel(inner_mesh, **options, expected_attention_calls=1) as inner:
                assert torch.equal(outer_buffer, local[0]) and torch.equal(inner_buffer, local[1])
                check_attention(inner, 1)
                losses += [body(x), checkpoint(body, x, use_reentrant=False), checkpoint(body, x, use_reentrant=True)]
            assert torch.equal(outer_buffer, local[0]) and torch.equal(inner_buffer, wholes[1])
            check_attention(cp)
        with raises(ZeroDivisionError), dtcp.context_parallel(mesh, **options):
            raise ZeroDivisionError
        assert torch.equal(outer_buffer, local[0]) and torch.equal(inner_buffer, wholes[1])
        for buffer in (outer_buffer, outer_buffer[:2]):
            with (
                raises(ValueError, "cut already"),
                dtcp.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
            ):
                raise AssertionError
    assert torch.equal(outer_buffer, wholes[0])
    y = x.detach().clone().requires_grad_()
    right = torch.autograd.grad(sum((y * part).sin().sum() for part in local), y)[0]
    for loss in losses:
        x.grad = None
        loss.backward()
        assert relative_error(x.grad, right) < TOLERANCE
    assert torch.equal(outer_buffer, wholes[0]) and torch.equal(inner_buffer, wholes[1])


def test_contexts_nest_on_one_mesh_and_on_two(ranks: Any) -> None:
    ranks.run(2, check_nested)


def check_threads(rank: int, world: int) -> None:
    """Two threads in contexts of their own, one in none: each gets its own attention and buffers."""
    meshes = [new_mesh(world), new_mesh(world)]
    errors: list[BaseException] = []
    together = threading.Barrier(3)

    def in_context(index: int) -> None:
        buffer, layout = torch.randn(13 + index), ["head_tail", "striped"][index]
        options: dict[str, Any] = {"buffers": [buffer], "buffer_seq_dims": [0], "layout": layout}
        with dtcp.context_parallel(meshes[index], **options, expected_attention_calls=5) as cp:
            together.wait(20)
            for seed in range(5):
                check_attention(cp, seed)
            together.wait(20)
        assert buffer.numel() == 13 + index

    def in_none() -> None:
        together.wait(20)
        for seed in range(5):
            x = torch.randn(3, 2, 2, 16, 8, generator=torch.Generator().manual_seed(seed))
            out = F.scaled_dot_product_attention(*x, is_causal=True)
            assert relative_error(out, dtcp.reference_attention(*x.double(), is_causal=True)) < TOLERANCE
        together.wait(20)

    def run(fn: Callable[..., None], *args: Any) -> None:
        try:
            fn(*args)
        except BaseException as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=run, args=args) for args in ((in_context, 0), (in_context, 1), (in_none,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_each_thread_has_its_own_context(ranks: Any) -> None:
    ranks.run(2, check_threads)


def check_leaks(rank: int, world: int, times: int) -> None:
    mesh, rope, w = make_mesh(world), torch.randn(13, 4), torch.randn(4, requires_grad=True)

    def enter(times: int) -> None:
        for index in range(times):
            with (
                contextlib.suppress(ZeroDivisionError),
                dtcp.context_parallel(mesh, buffers=[rope], buffer_seq_dims=[0], **NOTHING),
            ):
                loss = (w * rope).sum()
                if index % 4 == 0:
                    raise ZeroDivisionError
            loss.backward()

    def measure() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(gc.get_objects()), len(os.listdir("/proc/self/fd")), resident

    enter(1000)
    objects, files, resident = measure()
    grown_by = []
    for _ in range(3):
        enter(times // 3)
        more_objects, more_files, now = measure()
        grown_by.append(now - resident)
        resident = now
    assert more_objects - objects < 100 and more_files == files
    # Pages come and go, and a heap grows now and then; an object left by each entry would take 50 bytes every time.
    assert min(grown_by) < (1 << 16) + 8 * times // 3, grown_by
    tracemalloc.start()
    try:
        enter(300)
        gc.collect()
        before = tracemalloc.take_snapshot()
        enter(1000)
        gc.collect()
        after = tracemalloc.take_snapshot()
        own = [tracemalloc.Filter(False, "*/tracemalloc.py")]
        grown = [
            line
            for line in after.filter_traces(own).compare_to(before.filter_traces(own), "lineno")
            if line.count_diff >= 500
        ]
        assert not grown, grown[:3]
    finally:
        tracemalloc.stop()


def test_a_context_leaks_nothing(ranks: Any) -> None:
    ranks.run(2, check_leaks, 6000)


@pytest.mark.slow
def test_a_hundred_thousand_contexts_leak_nothing(ranks: Any) -> None:
    ranks.run(2, check_leaks, 100_000, timeout=3000)
