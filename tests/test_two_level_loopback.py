"""Two-level strategies on nodes of any shape: ranks are threads, and messages come as late as they may."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dtcp
from cuts import cut_by_hand
from dtcp.attention.call import Call
from dtcp.attention.kernels import choose_kernel
from dtcp.attention.loopback import Loopback
from dtcp.attention.strategies import CORES, Strategy
from dtcp.attention.two_level import core_of
from dtcp.attention.two_level_schedule import pieces
from dtcp.layout import LAYOUT_NAMES
from dtcp.mask import Mask
from live_bytes import peak_live_bytes
from oracle import GRADIENT_NAMES, relative_error

TOLERANCE = 1e-10
ROUNDED = 1e-6  # to float32 on the way
SHAPES = [
    shape for shape in itertools.product((2, 3, 4), (2, 3, 4)) if shape[0] * shape[1] <= 9
]  # (nodes, ranks of each)


def solve(
    core: Strategy, layout: dtcp.SequenceLayout, mask: Mask, inputs: list[Tensor], kv_grad_dtype: torch.dtype | None
) -> list[dict[str, Tensor]]:
    """out, lse and gradients of each rank; ``inputs`` are the whole query, key, value and gradient of out."""

    def on_rank(group: Any) -> dict[str, Tensor]:
        query, key, value, grad_out = (cut_by_hand(x, layout, group.rank(), 2) for x in inputs)
        kernel = choose_kernel("auto", query, query.size(-1), masked_by="masks")
        call = Call(
            group, layout, layout, mask, scale=query.size(-1) ** -0.5, kernel=kernel, kv_grad_dtype=kv_grad_dtype
        )
        out, lse = core.forward(call, query, key, value)
        seen = lse.masked_fill(lse == float("-inf"), float("inf"))
        grads = core.backward(call, grad_out, query, key, value, out, seen)
        return {"out": out, "lse": lse, **dict(zip(GRADIENT_NAMES, grads, strict=True))}

    return Loopback(layout.cp, strict=True).run(on_rank)


@st.composite
def problems(draw: Callable[..., Any]) -> dict[str, Any]:
    seq_len = draw(st.integers(1, 40))
    is_causal = draw(st.booleans())
    name = draw(st.sampled_from(LAYOUT_NAMES))
    lengths = []
    while sum(lengths) < seq_len and (lengths or name == "per_document" or draw(st.booleans())):
        lengths.append(draw(st.integers(1, seq_len - sum(lengths))))
    window = draw(st.sampled_from([-1, -1, 0, 3, 17])), draw(st.sampled_from([-1, 0] if is_causal else [-1, -1, 2, 9]))
    return {
        "shape": draw(st.sampled_from(SHAPES)), "core": draw(st.sampled_from(["ring", "all_gather"])),
        "layout": name, "seq_len": seq_len, "lengths": lengths, "is_causal": is_causal, "window": window,
        "heads": draw(st.sampled_from([(4, 4), (4, 2), (3, 1), (5, 5)])),
        "kv_grad_dtype": draw(st.sampled_from([None, torch.float32])),
    }  # fmt: skip


@settings(max_examples=25)
@given(problems())
def test_any_nodes_layout_and_mask_match_the_float64_oracle(problem):
    check_problem(problem)


@pytest.mark.slow
@settings(max_examples=400)
@given(problems())
def test_many_nodes_layouts_and_masks_match_the_float64_oracle(problem):
    check_problem(problem)


def check_problem(problem: dict[str, Any]) -> None:
    (num_nodes, length), seq_len = problem["shape"], problem["seq_len"]
    documents = dtcp.Documents.from_lengths(problem["lengths"]) if problem["lengths"] else None
    layout = dtcp.make_layout(problem["layout"], seq_len=seq_len, cp=num_nodes * length, documents=documents)
    num_heads, num_kv_heads = problem["heads"]
    generator = torch.Generator().manual_seed(seq_len)
    inputs = [
        torch.randn(2, heads, seq_len, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((num_heads, 8), (num_kv_heads, 8), (num_kv_heads, 4), (num_heads, 4))
    ]
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    masks = {"is_causal": problem["is_causal"], "window_size": problem["window"], "documents": documents}
    out, lse = dtcp.reference_attention(*leaves, **masks, enable_gqa=True, return_lse=True)
    grads = torch.autograd.grad(out, leaves, inputs[3])
    right = {"out": out.detach(), "lse": lse.detach()[..., None], **dict(zip(GRADIENT_NAMES, grads, strict=True))}
    mask = Mask(problem["is_causal"], problem["window"], documents)
    solved = solve(core_of(problem["core"], 1, length), layout, mask, inputs, problem["kv_grad_dtype"])
    for name, whole in right.items():
        mine = torch.cat([of_rank[name] if name != "lse" else of_rank[name][..., None] for of_rank in solved], 2)
        parts = torch.cat([cut_by_hand(whole, layout, rank, 2) for rank in range(layout.cp)], 2)
        positions = torch.cat([layout.positions(rank) for rank in range(layout.cp)])
        tokens = positions < seq_len  # no documents of rows here, so that slots are those of all rows
        is_rounded = problem["kv_grad_dtype"] is not None and name in GRADIENT_NAMES[1:]
        tolerance = ROUNDED if is_rounded else TOLERANCE
        assert relative_error(mine[:, :, tokens], parts[:, :, tokens]) < tolerance, name
        if name != "lse":
            assert not mine[:, :, ~tokens].any(), f"{name} of padding"


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9))
def test_pieces_of_slots_are_the_whole_and_equally_long(start, length, number):
    cut = pieces((start, start + length), number)
    assert [slot for piece in cut for slot in range(*piece)] == list(range(start, start + length))
    assert len(cut) == number and max(b - a for a, b in cut) - min(b - a for a, b in cut) <= 1


NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM = 64, 4, 16


def peaks(core: Strategy, world: int, *, is_causal: bool = False) -> tuple[int, int]:
    """Peak of live bytes that forward and backward allocate on the rank that needs most, with 64 tokens on each."""
    layout = dtcp.make_layout("head_tail", seq_len=NUM_TOKENS * world, cp=world)

    def on_rank(group: Any) -> tuple[int, int]:
        query, key, value = (torch.randn(1, NUM_KV_HEADS, NUM_TOKENS, HEAD_DIM) for _ in range(3))
        kernel = choose_kernel("flash", query, HEAD_DIM)
        call = Call(group, layout, layout, Mask(is_causal), scale=0.25, kernel=kernel)
        core.forward(call, query, key, value)  # layouts and schedules are cached by now
        with peak_live_bytes() as forward:
            out, lse = core.forward(call, query, key, value)
        with peak_live_bytes() as backward:
            core.backward(call, out, query, key, value, out, lse)
        return forward.peak, backward.peak

    by_rank = Loopback(world, strict=True).run(on_rank)
    return max(forward for forward, _ in by_rank), max(backward for _, backward in by_rank)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_two_level_ring_holds_four_shards_and_six_of_gradients_whatever_cp_is(is_causal):
    """float32 here, so that a shard of gradients is one of keys and values; a ring of one level holds two and three."""
    shard_bytes = NUM_TOKENS * NUM_KV_HEADS * 2 * HEAD_DIM * 4
    one_level = peaks(CORES["ring"], 4, is_causal=is_causal)
    found = {shape: peaks(core_of("ring", 1, shape[1]), shape[0] * shape[1], is_causal=is_causal) for shape in SHAPES}
    for (num_nodes, length), (forward, backward) in found.items():
        inside = min(length - 1, 2)  # two ranks of a node have one shard to pass on, and no other meanwhile
        assert forward - one_level[0] == inside * shard_bytes, found
        assert backward - one_level[1] <= (inside + 3) * shard_bytes, found
        if not is_causal:  # else parts are smaller than shards
            sums = min(num_nodes - 1, 2)
            assert backward - one_level[1] == (inside + inside + 1 + sums + 1 - 3) * shard_bytes, found
