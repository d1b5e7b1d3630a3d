"""Contexts inside contexts, in threads, and a hundred thousand of them."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dtcp
from contexts import NOTHING, TOLERANCE, make_mesh, new_mesh, part, raises
from oracle import relative_error


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


def check_thread_beside_contexts(rank: int, world: int) -> None:
    """A thread that attends all the time, in no context, while another one enters and leaves contexts."""
    mesh, errors, calls = make_mesh(world), [], 0
    x = torch.randn(1, 2, 8, 8)
    right = F.scaled_dot_product_attention(x, x, x)
    has_ended = threading.Event()

    def attend() -> None:
        nonlocal calls
        while not has_ended.is_set():
            try:
                assert torch.equal(F.scaled_dot_product_attention(x, x, x), right), "another number"
            except BaseException as error:
                errors.append(error)
            calls += 1

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        for seed in range(200):
            with dtcp.context_parallel(mesh, seq_len=13, expected_attention_calls=1) as cp:
                check_attention(cp, seed % 3)
    finally:
        has_ended.set()
        thread.join()
    assert calls > 100 and not errors, (calls, errors[:3])


@pytest.mark.parametrize("world", [1, 2])
def test_a_thread_without_a_context_attends_while_others_come_and_go(ranks: Any, world: int) -> None:
    ranks.renew(world)
    ranks.run(world, check_thread_beside_contexts)


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
