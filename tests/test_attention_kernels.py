"""Kernels of one tile against the oracle, the merge against exact sums, and the contract of the CUDA kernels."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtcp
from dtcp.attention.kernels import KERNEL_NAMES, choose_kernel
from dtcp.attention.kernels.cpu import _triangle_calls
from dtcp.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from dtcp.attention.kernels.heads import pad_head_dim, repeat_heads, sum_heads
from dtcp.attention.merge import Partial
from oracle import relative_error

INF = float("inf")


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("heads", [(4, 4, 16, 16), (4, 2, 8, 24), (6, 1, 24, 8)])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "is_causal"), [(9, 9, True), (1, 1, True), (5, 17, False), (33, 1, False)]
)
def test_tile_and_its_backward_match_the_oracle(name, heads, num_queries, num_keys, is_causal):
    check_tile(name, heads, num_queries, num_keys, is_causal)


@pytest.mark.parametrize("num", [383, 384, 500, 640, 1023, 1024, 1025, 1300, 2200])
def test_a_causal_tile_of_the_cpu_kernel_that_is_computed_in_blocks_matches_the_oracle(num, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # several compute the longest ones in one call
    check_tile("flash", (2, 1, 8, 12), num, num, is_causal=True)


def test_a_causal_tile_computed_in_blocks_has_its_pairs_and_few_more():
    for num in range(384, 3000, 37):
        is_in = np.zeros(num, np.int64)  # keys that each query is given
        computed = 0
        for call in _triangle_calls(num, torch.float32):
            block = call.block
            is_in[block.queries] += block.kv_stop - block.kv_start
            computed += block.num_pairs
            allowed = np.arange(block.kv_start, block.kv_stop) <= np.arange(block.q_start, block.q_stop)[:, None]
            given = np.ones_like(allowed) if call.mask is None else call.mask.numpy() == 0
            assert (allowed == given).all()
        assert (is_in > np.arange(num)).all() and computed <= num * (num + 1) // 2 + 64 * (num + 128)


def check_tile(name: str, heads: tuple[int, int, int, int], num_queries: int, num_keys: int, is_causal: bool) -> None:
    num_heads, num_kv_heads, head_dim, value_dim = heads
    torch.manual_seed(0)
    # As strategies hand them over: query a slice of rows, keys a slice of the packed message.
    query = torch.randn(2, num_queries + 3, num_heads, head_dim, dtype=torch.float64).transpose(1, 2)[:, :, 2:-1]
    kv = torch.randn(num_keys, 2, num_kv_heads, head_dim + value_dim, dtype=torch.float64).permute(1, 2, 0, 3)
    leaves = [x.clone().requires_grad_() for x in (query, kv[..., :head_dim], kv[..., head_dim:])]
    out, lse = dtcp.reference_attention(*leaves, is_causal=is_causal, scale=0.3, enable_gqa=True, return_lse=True)
    grad_out = torch.randn_like(out)
    right = torch.autograd.grad(out, leaves, grad_out)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, packed, grad, own_out = (x.to(dtype) for x in (query, kv, grad_out, out.detach()))
        kernel = choose_kernel(name, q, max(head_dim, value_dim))
        k, v = packed[..., :head_dim], packed[..., head_dim:]
        tile_out, tile_lse = kernel.forward(q, k, v, is_causal=is_causal, scale=0.3)
        assert relative_error(tile_out, out.detach()) < tolerance
        assert relative_error(tile_lse, lse.detach()) < tolerance
        wide_lse = torch.cat([lse.detach().to(dtype)] * 2, dim=-1)[..., :num_queries]  # a slice, as of a longer row
        grads = kernel.backward(grad, q, k, v, own_out, wide_lse, is_causal=is_causal, scale=0.3)
        for grad_tile, expected in zip(grads, right, strict=True):
            assert grad_tile.shape == expected.shape
            assert relative_error(grad_tile, expected) < tolerance


def test_math_kernel_in_many_blocks_equals_one(monkeypatch):
    from dtcp.attention import blocks as cutting
    from dtcp.attention.kernels import math as math_kernel

    query, key, value = (torch.randn(1, h, 40, 8, dtype=torch.float64) for h in (4, 2, 2))
    kernel = math_kernel.MathKernel()
    for is_causal in (True, False):
        out, lse = kernel.forward(query, key, value, is_causal=is_causal, scale=0.3)
        grads = kernel.backward(query, query, key, value, out, lse, is_causal=is_causal, scale=0.3)
        with monkeypatch.context() as patch:
            patch.setattr(cutting, "_MAX_ELEMENTS", 4 * 40 * 7)
            blocks = kernel.forward(query, key, value, is_causal=is_causal, scale=0.3)
            block_grads = kernel.backward(query, query, key, value, out, lse, is_causal=is_causal, scale=0.3)
        for one, many in zip((out, lse, *grads), (*blocks, *block_grads), strict=True):
            torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-12)


def merged(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """Merge (out, lse) scalars through Partial; the first part is the first merge."""
    partial = Partial((1, 1, 1, 1), torch.float32, torch.device("cpu"))
    for out, lse in parts:
        partial.merge(slice(0, 1), torch.full((1, 1, 1, 1), out), torch.full((1, 1, 1), lse))
    out, lse = partial.result()
    return out.item(), lse.item()


def test_merge_of_infinities_and_huge_gaps_has_the_right_value():
    assert merged([]) == (0.0, -INF)
    assert merged([(0.0, -INF), (0.0, -INF)]) == (0.0, -INF)
    assert merged([(0.0, -INF), (3.0, 1.5)]) == (3.0, 1.5)
    assert merged([(3.0, 1.5), (0.0, -INF)]) == (3.0, 1.5)
    assert merged([(3.0, 1.5), (7.0, -INF)]) == (3.0, 1.5), "a set without keys has no weight, whatever its out"
    assert merged([(1.0, 0.0), (2.0, 200.0)]) == (2.0, 200.0)
    assert merged([(1.0, 200.0), (2.0, 0.0)]) == (1.0, 200.0)
    out, lse = merged([(1.0, 800.0), (3.0, 799.0)])
    assert lse == pytest.approx(800.3133, abs=1e-4)
    assert out == pytest.approx((1 + 3 * math.exp(-1)) / (1 + math.exp(-1)), rel=1e-6)


def test_merge_hands_a_nan_on_and_to_its_row_alone():
    partial = Partial((1, 1, 2, 1), torch.float32, torch.device("cpu"))
    for lse in (0.0, float("nan")):
        partial.merge(slice(0, 1), torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), lse))
    partial.merge(slice(1, 2), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1))
    out, lse = partial.result()
    assert out[0, 0, 0].isnan() and lse[0, 0, 0].isnan()
    assert out[0, 0, 1] == 1 and lse[0, 0, 1] == 0


@given(st.lists(st.tuples(st.floats(-5, 5), st.one_of(st.floats(-900, 900), st.just(-INF))), min_size=1, max_size=6))
def test_merge_is_the_softmax_weighted_sum(parts):
    parts = [(0.0 if lse == -INF else out, lse) for out, lse in parts]
    out, lse = merged(parts)
    lses = torch.tensor([p[1] for p in parts], dtype=torch.float64)
    right_lse = lses.logsumexp(0)
    if right_lse == -INF:
        assert (out, lse) == (0.0, -INF)
        return
    weights = (lses - right_lse).exp()
    right = (weights * torch.tensor([p[0] for p in parts], dtype=torch.float64)).sum()
    assert out == pytest.approx(right.item(), rel=1e-4, abs=1e-4)
    assert lse == pytest.approx(right_lse.item(), rel=1e-5, abs=1e-4)


def test_an_explicit_kernel_never_falls_back():
    query = torch.randn(1, 1, 4, 8)
    assert choose_kernel("auto", query, 8).name == "flash"
    assert choose_kernel("math", query, 8).name == "math"
    with pytest.raises(ValueError, match="kernel='cudnn' does not exist on cpu; use auto, or one of flash, math"):
        choose_kernel("cudnn", query, 8)
    with pytest.raises(ValueError, match="kernel must be one of auto, flash, efficient, cudnn, math, got 'triton'"):
        choose_kernel("triton", query, 8)
    assert set(KERNEL_NAMES) == {"auto", "flash", "efficient", "cudnn", "math"}


def test_padding_and_repeating_heads_are_exact():
    x, y = torch.randn(2, 2, 3, 5), torch.randn(2, 4, 3, 8)
    padded, same = pad_head_dim(x, y, multiple=8)
    assert padded.shape[-1] == same.shape[-1] == 8 and same is y
    assert torch.equal(padded[..., :5], x) and not padded[..., 5:].any()
    assert pad_head_dim(torch.ones(1, 1, 1, 9), multiple=8)[0].size(-1) == 16
    repeated = repeat_heads(x, 4)
    assert torch.equal(repeated[:, 0], repeated[:, 1]) and torch.equal(repeated[:, 2], x[:, 1])
    assert torch.equal(sum_heads(repeated, 2), 2 * x)


def test_half_precision_is_never_summed_in_half():
    """CPU kernels give float32 parts for half inputs: the merge, not a rounding per tile, decides the error."""
    query = torch.randn(1, 2, 8, 16).bfloat16()
    for name in ("flash", "math"):
        kernel = choose_kernel(name, query, 16)
        out, lse = kernel.forward(query, query, query, is_causal=True, scale=0.25)
        assert out.dtype == lse.dtype == torch.float32
        grads = kernel.backward(query, query, query, query, out.bfloat16(), lse, is_causal=True, scale=0.25)
        assert {g.dtype for g in grads} == {torch.float32}


# ---- CUDA kernels: without a GPU, at least every call fits the operator's schema and its shapes ----

CUDA_KERNELS = {
    "flash": (FlashKernel(), torch.bfloat16),
    "efficient": (EfficientKernel(), torch.float32),
    "cudnn": (CudnnKernel(), torch.float16),
}


@pytest.mark.parametrize("name", CUDA_KERNELS)
@pytest.mark.parametrize("heads", [(8, 2, 64, 64), (4, 1, 20, 36)])
def test_cuda_kernel_calls_fit_their_operators(name, heads):
    kernel, dtype = CUDA_KERNELS[name]
    num_heads, num_kv_heads, head_dim, value_dim = heads
    for num_queries, num_keys, is_causal in ((40, 40, True), (33, 70, False)):
        query = torch.empty(2, num_queries, num_heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)
        key = torch.empty(2, num_kv_heads, num_keys, head_dim, dtype=dtype, device="meta")
        value = torch.empty(2, num_kv_heads, num_keys, value_dim, dtype=dtype, device="meta")
        out, lse = kernel.forward(query, key, value, is_causal=is_causal, scale=0.3)
        assert out.shape == (2, num_heads, num_queries, value_dim)
        assert lse.shape == (2, num_heads, num_queries) and lse.dtype == torch.float32
        grads = kernel.backward(out, query, key, value, out, lse, is_causal=is_causal, scale=0.3)
        assert [g.shape for g in grads] == [x.shape for x in (query, key, value)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "math"])
def test_cuda_kernels_match_the_oracle(name):
    for (num_heads, num_kv_heads, head_dim, value_dim), is_causal in itertools.product(
        [(4, 4, 64, 64), (8, 2, 64, 48), (4, 1, 20, 36)], (True, False)
    ):
        dtype = torch.float32 if name in ("efficient", "math") else torch.bfloat16
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(2, h, 97, d, device="cuda").to(dtype)
            for h, d in ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_dim))
        )
        leaves = [x.double().requires_grad_() for x in (query, key, value)]
        out, lse = dtcp.reference_attention(*leaves, is_causal=is_causal, scale=0.3, enable_gqa=True, return_lse=True)
        grad_out = torch.randn_like(query.new_empty(out.shape))
        right = torch.autograd.grad(out, leaves, grad_out.double())
        kernel = choose_kernel(name, query, max(head_dim, value_dim))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        mask = {"is_causal": is_causal, "scale": 0.3}
        tile_out, tile_lse = kernel.forward(query, key, value, **mask)
        assert relative_error(tile_out, out.detach()) < tolerance
        assert relative_error(tile_lse, lse.detach()) < 1e-4
        grads = kernel.backward(grad_out, query, key, value, tile_out.to(dtype), tile_lse, **mask)
        for grad, expected in zip(grads, right, strict=True):
            assert relative_error(grad, expected) < tolerance
