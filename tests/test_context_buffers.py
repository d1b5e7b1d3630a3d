"""Buffers of ``context_parallel``: local inside, as they were afterwards, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtcp
from contexts import NOTHING, attend_once, make_mesh, part, place, raises

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
    refused("documents must be dtcp.Documents", seq_len=13, documents=object())
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
