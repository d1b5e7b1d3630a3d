"""Attention dropout is a function of seed, step, row, name, head, query and key; the same on any mesh."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp
import dtcp.attention.blocks as cutting
from dtcp.models.attention import ScaledDotProductAttention
from oracle import STRATEGIES, all_pairs, options_of, relative_error

P = 0.3
SIGMAS = 5.0
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


def make_inputs(batch: int, heads: int, kv_heads: int, seq_len: int, dim: int = 16, value_dim: int = 8) -> list[Tensor]:
    """query, key, value and the gradient of out of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    return [torch.randn(batch, n, seq_len, d, generator=generator) for n, d in sizes]


def whole_keys(batch: int, seq_len: int, step: int = 5) -> Tensor:
    return dtcp.dropout_keys(3, step, range(7, 7 + batch), torch.arange(seq_len))


def right_answer(inputs: list[Tensor], **options: Any) -> dict[str, Tensor]:
    *qkv, grad_out = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in qkv]
    out, lse = dtcp.reference_attention(*leaves, enable_gqa=True, return_lse=True, **options)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)), strict=True))


# ---- the call, beside the dense oracle -------------------------------------------------------------------------------


def check_parity(rank: int, world: int, cases: list[dict[str, Any]]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for case in cases:
        seq_len, is_causal = case["seq_len"], case.get("is_causal", True)
        layout = dtcp.make_layout(case.get("layout", "head_tail"), seq_len=seq_len, cp=world)
        inputs = make_inputs(2, *case.get("heads", (4, 2)), seq_len)
        dropped = {"is_causal": is_causal, "dropout_p": case.get("p", P), "dropout_name": "layers.1"}
        right = right_answer(inputs, dropout_keys=whole_keys(2, seq_len), **dropped)

        dtype = getattr(torch, case.get("dtype", "float32"))
        leaves = [dtcp.shard(x.to(dtype), mesh, layout, dim=2).requires_grad_() for x in inputs[:3]]
        # Of the pads too, whatever is there.
        keys = dtcp.dropout_keys(3, 5, [7, 8], layout.positions(rank))
        out, lse = dtcp.context_parallel_attention(
            *leaves, mesh=mesh, layout=layout, enable_gqa=True, return_lse=True, dropout_keys=keys,
            kernel=case.get("kernel", "auto"), **options_of(case.get("strategy", "ring"), world), **dropped,
        )  # fmt: skip
        grads = torch.autograd.grad(out, leaves, dtcp.shard(inputs[3].to(dtype), mesh, layout, dim=2))
        num_valid = layout.num_valid(rank)
        for name, found in zip(NAMES, (out, lse, *grads), strict=True):
            expected = dtcp.shard(right[name], mesh, layout, dim=2)
            error = relative_error(found.detach()[:, :, :num_valid], expected[:, :, :num_valid])
            assert error <= (1e-12 if dtype == torch.float64 else 1e-5), (case, name, error)
            assert (found[:, :, num_valid:] == (-math.inf if name == "lse" else 0)).all(), (case, name)


QUICK = [
    {"seq_len": 21, "layout": "head_tail", "strategy": "ring"},
    {"seq_len": 22, "layout": "striped", "strategy": "all_gather", "kernel": "math"},
    {"seq_len": 19, "layout": "contiguous", "strategy": "ring", "is_causal": False},
    {"seq_len": 21, "layout": "striped", "strategy": "exchange"},
    {"seq_len": 22, "layout": "head_tail", "strategy": "ulysses"},
    {"seq_len": 21, "layout": "striped", "strategy": "hybrid"},
]
EVERY_PAIR = all_pairs(
    {
        "seq_len": [1, 2, 7, 97, 128],
        "layout": ["contiguous", "head_tail", "striped"],
        "strategy": list(STRATEGIES),
        "is_causal": [True, False],
        "heads": [(4, 4), (6, 2), (4, 1)],
        "p": [0.0, 0.1, 0.9, 0.999],
        "dtype": ["float32", "float64"],
    }
)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_output_and_gradients_equal_the_dense_oracle(ranks, world):
    ranks.run(world, check_parity, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_every_pair_of_options_equals_the_dense_oracle(ranks, world):
    ranks.run(world, check_parity, EVERY_PAIR, timeout=300)


def check_cross(rank: int, world: int) -> None:
    """Keys of another length, in another layout."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=9, cp=world)
    kv_layout = dtcp.make_layout("striped", seq_len=14, cp=world)
    (query, *_, grad_out), (_, key, value, _) = make_inputs(2, 4, 2, 9), make_inputs(2, 4, 2, 14)
    dropped: dict[str, Any] = {"dropout_p": P, "dropout_name": "cross"}
    right = right_answer([query, key, value, grad_out], dropout_keys=whole_keys(2, 9), **dropped)
    layouts = {"grad_key": kv_layout, "grad_value": kv_layout}
    leaves = [
        dtcp.shard(x, mesh, of, dim=2).requires_grad_()
        for x, of in ((query, layout), (key, kv_layout), (value, kv_layout))
    ]
    out = dtcp.context_parallel_attention(
        *leaves, mesh=mesh, layout=layout, kv_layout=kv_layout, enable_gqa=True, **dropped,
        dropout_keys=dtcp.dropout_keys(3, 5, [7, 8], layout.positions(rank)),
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, dtcp.shard(grad_out, mesh, layout, dim=2))
    for name, found in zip(("out", *NAMES[2:]), (out, *grads), strict=True):
        assert relative_error(found.detach(), dtcp.shard(right[name], mesh, layouts.get(name, layout), dim=2)) <= 1e-5


def test_cross_attention_drops_by_the_positions_of_its_keys(ranks):
    ranks.run(2, check_cross)


def check_heads(rank: int, world: int) -> None:
    """Halves of the heads, as two tensor parallel ranks have them, equal all heads at once."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("contiguous", seq_len=11, cp=1)
    query, key, value, _ = make_inputs(2, 8, 4, 11)
    options: dict[str, Any] = {
        "mesh": mesh, "layout": layout, "enable_gqa": True, "dropout_p": P, "dropout_keys": whole_keys(2, 11),
        "dropout_name": "layers.1",
    }  # fmt: skip
    whole = dtcp.context_parallel_attention(query, key, value, **options)
    halves = [
        dtcp.context_parallel_attention(query[:, 4 * i :][:, :4], *(x[:, 2 * i :][:, :2] for x in (key, value)),
                                        head_offset=4 * i, **options)
        for i in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, rtol=1e-6, atol=1e-6)
    by_name = dtcp.context_parallel_attention(query, key, value, **(options | {"dropout_name": torch.tensor(7)}))
    assert not torch.allclose(by_name, whole), "another name, another mask"


def test_heads_are_known_by_their_global_index(ranks):
    ranks.run(1, check_heads)


def test_blocks_of_queries_drop_what_the_whole_does(monkeypatch):
    from dtcp.attention.dropout import tile_dropout
    from dtcp.attention.kernels.math import MathKernel

    query, key, value, grad_out = make_inputs(2, 4, 2, 24)
    mask = tile_dropout(P, whole_keys(2, 24), range(4), torch.arange(24))
    results = []
    for block_elements in (1 << 24, 2 * 2 * 4 * 24 * 5):  # all queries at once, and 5 in a block
        monkeypatch.setattr(cutting, "_MAX_ELEMENTS", block_elements)
        kernel = MathKernel(mask)
        out, lse = kernel.forward(query, key, value, is_causal=True, scale=0.25)
        results.append((out, lse, *kernel.backward(grad_out, query, key, value, out, lse, is_causal=True, scale=0.25)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ---- what the mask depends on ----------------------------------------------------------------------------------------


def kept(
    p: float, *, seed: int = 3, step: int = 5, rows: Any = (0, 1), name: str = "layers.0", start: int = 0,
    heads: int = 4, head_offset: int = 0, size: int = 96,
) -> Tensor:  # fmt: skip
    """(B, H, Sq, Skv): which weights stay; by attention itself: with equal scores, out is the mask times identity."""
    keys = dtcp.dropout_keys(seed, step, rows, torch.arange(start, start + size))
    nothing, identity = torch.zeros(len(rows), heads, size, 1), torch.eye(size).expand(len(rows), heads, size, size)
    out = dtcp.reference_attention(
        nothing, nothing, identity, dropout_p=p, dropout_keys=keys, dropout_name=name, head_offset=head_offset
    )
    assert set(out.mul(size * (1 - p)).round(decimals=3).unique().tolist()) <= {0.0, 1.0}, "kept ones are scaled"
    return out != 0


def sigmas(p: float, *masks: Tensor) -> float:
    """How many standard deviations the mean product of independent masks is off 0; of one mask: its rate."""
    product = torch.ones((), dtype=torch.float64)
    for mask in masks:
        product = product * (mask.double() - (1 - p)) / math.sqrt(p * (1 - p))
    return abs(product.sum().item()) / math.sqrt(product.numel())


OTHERS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 4},
    "step": {"step": 6},
    "rows": {"rows": (1, 2)},
    "layer": {"name": "layers.1"},
    "query": {"start": 1},
    "far query": {"start": 2**31},
    "head": {"head_offset": 1},
    "far head": {"head_offset": 64},
}


@pytest.mark.parametrize("size", [96, pytest.param(512, marks=pytest.mark.slow)])
def test_masks_keep_their_rate_and_are_not_correlated(size):
    for p in (0.1, 0.5, 0.9):
        mask = kept(p, size=size)
        assert sigmas(p, mask) < SIGMAS, (p, "rate")
        for dim, what in enumerate(("rows", "heads", "queries", "keys")):
            for distance in {1, 2, 3, 16, size // 2}:
                if distance < mask.size(dim):
                    early = mask.narrow(dim, 0, mask.size(dim) - distance)
                    late = mask.narrow(dim, distance, mask.size(dim) - distance)
                    assert sigmas(p, early, late) < SIGMAS, (p, what, distance)
        for what, options in OTHERS.items():
            assert sigmas(p, mask, kept(p, size=size, **options)) < SIGMAS, (p, what)
        assert torch.equal(mask, kept(p, size=size)), "nothing is drawn"
        # Four corners of a rectangle: what sums of a query's and a key's number would fail.
        corners = [mask[..., q:, :][..., k:][..., : size - 1, : size - 1] for q, k in itertools.product((0, 1), (0, 1))]
        corners = [c[..., : size - 1, : size - 1] for c in corners]
        assert sigmas(p, *corners) < SIGMAS, (p, "rectangles")


def test_the_mask_is_that_of_every_release():
    """A change of these numbers changes the training of everybody who resumes a job."""
    word = kept(0.5, size=24)[1, 3].long()
    assert (word << torch.arange(24)).sum(-1)[:3].tolist() == PINNED


PINNED = [12293247, 4323649, 423791]


def test_attention_and_hidden_dropout_of_one_token_are_not_correlated():
    keys = dtcp.dropout_keys(3, 5, (0, 1), torch.arange(96))
    hidden = dtcp.Dropout(0.5, name="layers.0")(torch.ones(2, 96, 96), keys) != 0
    for head in range(4):
        assert sigmas(0.5, kept(0.5)[:, head], hidden) < SIGMAS


# ---- compiled and recomputed -----------------------------------------------------------------------------------------


def check_compiled(rank: int, world: int, backend: str) -> None:
    import torch._dynamo.testing

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=8 * world - 1, cp=world)
    salts = [torch.tensor(index) for index in range(12)]

    def block(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, name: Any) -> Tensor:
        return dtcp.context_parallel_attention(
            query * 2, key, value, mesh=mesh, layout=layout, is_causal=True, enable_gqa=True, dropout_p=P,
            dropout_keys=keys, dropout_name=name,
        ).sin()  # fmt: skip

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    leaves = [dtcp.shard(x, mesh, layout, dim=2).requires_grad_() for x in make_inputs(2, 4, 2, layout.seq_len)[:3]]
    seen = []
    for step in range(12):  # as many layers too, with one graph
        keys = dtcp.dropout_keys(3, step, [2 * step, 2 * step + 1], layout.positions(rank))
        results = []
        for run in (compiled, block):
            out = run(*leaves, keys, salts[step])
            results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
        for found, right in zip(*results, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        seen.append(results[0][0])
    assert counter.frame_count == 1, "no recompilation from step to step, nor from layer to layer"
    assert not torch.allclose(seen[0], seen[1])
    named = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(named(*leaves, keys, "layers.7"), block(*leaves, keys, "layers.7"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_serves_every_step_and_layer(ranks, backend):
    ranks.run(2, check_compiled, backend, timeout=180)


# ---- one process, without a process group ----------------------------------------------------------------------------


def test_a_module_without_ranks_drops_by_the_same_rule():
    query, key, value, grad_out = make_inputs(2, 4, 2, 17, value_dim=16)
    module = ScaledDotProductAttention(P, name="layers.1")
    right = right_answer(
        [query, key, value, grad_out],
        is_causal=True,
        dropout_p=P,
        dropout_keys=whole_keys(2, 17),
        dropout_name="layers.1",
    )
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = module(*leaves, whole_keys(2, 17))
    grads = torch.autograd.grad(out, leaves, grad_out)
    for name, found in zip(("out", *NAMES[2:]), (out, *grads), strict=True):
        assert relative_error(found.detach(), right[name]) <= 1e-5, name
    assert not torch.equal(module(*leaves), module(*leaves)), "without keys every call draws its own"
    module.eval()
    fused = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    assert torch.equal(module(*leaves, whole_keys(2, 17)), fused)


def test_half_precision_is_dropped_alike():
    inputs = make_inputs(2, 4, 2, 17, value_dim=16)
    module = ScaledDotProductAttention(P, name="layers.1")
    out, half = (module(*(x.to(d) for x in inputs[:3]), whole_keys(2, 17)) for d in (torch.float32, torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), out, rtol=2e-2, atol=4e-2)
