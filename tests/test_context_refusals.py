"""Arguments and ways of calling that reach ``context_parallel``, and those that are refused by name."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as by_name_after
from torch.nn.functional import scaled_dot_product_attention as by_name_before  # before dtcp is loaded

import dtcp
from contexts import TOLERANCE, check_right, draw, make_mesh, raises, scripted
from oracle import STRATEGIES, options_of, relative_error

S = 13
OF_PART = functools.partial(by_name_before, is_causal=True)


# ----------------------------------------------------------------------------------------------------------- arguments

MASK = {
    "local": lambda local: torch.ones(local, local).tril().bool(),
    "local × all": lambda local: torch.zeros(local, S),
    "float": lambda local: torch.zeros(local, local),
    "broadcast": lambda local: torch.ones(1, 1, 1, local).bool(),
}


def check_arguments(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        local = cp.layout.local_seq_len
        x, whole = draw(2, 4, local, 8), draw(2, 4, S, 8)
        for make in MASK.values():
            mask = make(local)
            with raises(NotImplementedError, f"attn_mask of shape {tuple(mask.shape)}", "attn_mask_queries='local'"):
                F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        with raises(NotImplementedError, "dropout_p=0.1", "step=, rows=", "use 0.0"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with raises(ValueError, "as many keys as queries"):
            F.scaled_dot_product_attention(x, whole, whole, is_causal=True)
        with raises(ValueError, f"{S} slots", "seq_len=13"):
            F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)  # not cut
        with raises(ValueError, f"{S} slots"):
            F.scaled_dot_product_attention(x, whole, whole)
        with raises(ValueError, "4 query heads with 2 key heads", "enable_gqa=True"):
            F.scaled_dot_product_attention(x, x[:, :2], x[:, :2])
        with raises(ValueError, "float32"):
            F.scaled_dot_product_attention(x, x.double(), x)
        check_right(cp, functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=8**-0.5))
        assert cp.num_attention_calls == 1


def test_arguments_are_exact_or_refused(ranks: Any) -> None:
    ranks.run(2, check_arguments)


def check_refusal_travels(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        x = draw(2, 2, cp.layout.local_seq_len, 8)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if rank == 1 else 0.0)


def test_the_refusal_of_one_rank_reaches_the_others(ranks: Any) -> None:
    ranks.run_expecting(3, check_refusal_travels, Exception, r"dropout_p=0.5|rank\(s\) \[1\] of the group refused")


def check_own_arguments(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    for error, words, options in [
        (ValueError, "layout must be one of", {"layout": "zigzag"}),
        (ValueError, "strategy must be one of", {"strategy": "rings"}),
        (ValueError, "ulysses_degree=7 must divide", {"strategy": "hybrid", "ulysses_degree": 7}),
        (ValueError, "kernel must be one of", {"kernel": "fast"}),
    ]:
        with raises(error, words), dtcp.context_parallel(mesh, seq_len=S, **options):
            raise AssertionError("entered")


def test_options_of_the_context_are_checked_at_once(ranks: Any) -> None:
    ranks.run(2, check_own_arguments)


# ------------------------------------------------------------------------------------------------------ number of calls


def check_calls(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with (
        raises(RuntimeError, "no attention call", "flash_attn", "another thread", "expected_attention_calls=0"),
        dtcp.context_parallel(mesh, seq_len=S),
    ):
        pass
    with raises(ZeroDivisionError), dtcp.context_parallel(mesh, seq_len=S):
        raise ZeroDivisionError  # the user's own is never replaced
    with raises(ZeroDivisionError), dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=5):
        raise ZeroDivisionError
    for expected in (0, 1, 2):
        guard: Any = contextlib.nullcontext() if expected == 1 else raises(RuntimeError, f"={expected}, but 1")
        with guard, dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=expected) as cp:
            check_right(cp, OF_PART)


def test_the_number_of_calls_is_checked(ranks: Any) -> None:
    ranks.run(2, check_calls)


# ---------------------------------------------------------------------------------------------------- ways of calling


def ways() -> list[Any]:
    operator = getattr(torch, "ops").aten.scaled_dot_product_attention  # noqa: B009, cloudpickle would follow torch.ops
    return [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        scripted,
        lambda q, k, v: by_name_before(q, k, v, is_causal=True),
        lambda q, k, v: by_name_after(q, k, v, is_causal=True),
        OF_PART,
        lambda q, k, v: operator(q, k, v, is_causal=True),
        lambda q, k, v: operator.default(q, k, v, None, 0.0, True),
        lambda q, k, v: torch.stack([by_name_before(*x, is_causal=True) for x in zip(q, k, v, strict=True)]),  # 3-D
    ]


def check_ways(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    for strategy in STRATEGIES if world == 2 else STRATEGIES[:3]:  # there are two heads to cut
        with dtcp.context_parallel(mesh, seq_len=S, **options_of(strategy, world), expected_attention_calls=9) as cp:
            for way in ways():
                check_right(cp, way)


@pytest.mark.parametrize("world", [2, 3])
def test_every_way_of_calling_is_redirected(ranks: Any, world: int) -> None:
    ranks.run(world, check_ways)


def check_leaves_nothing(rank: int, world: int) -> None:
    torch_checkpoint, mha = (importlib.import_module(f"torch.{name}") for name in ("utils.checkpoint", "backends.mha"))
    c_api = importlib.import_module("torch._C")

    def attributes() -> list[Any]:
        return [
            F.scaled_dot_product_attention, F.multi_head_attention_forward, c_api._nn.scaled_dot_product_attention,
            torch_checkpoint._CheckpointFrame.__init__, torch_checkpoint.CheckpointFunction,
            torch_checkpoint.checkpoint, mha.get_fastpath_enabled(),
        ]  # fmt: skip

    def kernels() -> list[bool]:
        keys = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA", "CompositeImplicitAutograd")
        name = "aten::scaled_dot_product_attention"
        return [c_api._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys]

    before, kernels_before = attributes(), kernels()
    mesh = make_mesh(world)
    x = draw(3, 2, 2, S, 8)
    for leave in (None, ZeroDivisionError):
        with contextlib.suppress(ZeroDivisionError), dtcp.context_parallel(mesh, seq_len=S) as cp:
            assert kernels() != kernels_before
            check_right(cp, OF_PART)
            if leave:
                raise leave
        assert all(a is b for a, b in zip(attributes(), before, strict=True)) and kernels() == kernels_before
        out = by_name_before(*x, is_causal=True)
        assert relative_error(out, dtcp.reference_attention(*x.double(), is_causal=True)) < TOLERANCE
    mha.set_fastpath_enabled(False)
    try:
        with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0):
            pass
        assert mha.get_fastpath_enabled() is False
    finally:
        mha.set_fastpath_enabled(True)


def test_the_last_context_leaves_torch_as_it_was(ranks: Any) -> None:
    ranks.renew(2)  # in a process in which several threads attend, kernels stay
    ranks.run(2, check_leaves_nothing)
