"""Peak of live bytes that each strategy allocates for what travels, as a closed form (papers b1, "CP transient").

Tiles are computed by a stand-in that allocates nothing, so that what is left are messages and sums.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import dtcp
from dtcp.attention import gradients, strategies
from dtcp.attention.call import Call
from dtcp.attention.kernels import choose_kernel
from dtcp.attention.loopback import Loopback
from dtcp.attention.strategies import CORES
from dtcp.mask import Mask
from live_bytes import peak_live_bytes

LOCAL, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 12, 12, 16
QUERIES = LOCAL * NUM_HEADS * HEAD_DIM * 4  # bytes of a rank's queries, outputs and of their gradients: float32
SHARD = 2 * LOCAL * NUM_KV_HEADS * HEAD_DIM * 4  # keys and values of one rank, and as many bytes of gradients
ROWS = LOCAL * NUM_HEADS * 4  # lse


def peaks(world: int, name: str, kv_grad_dtype: torch.dtype | None = None) -> list[tuple[int, int]]:
    """(peak of the forward, of the backward) of full attention, of each rank.

    On a loopback: a thread of gloo may hold tensors for a moment after they have been waited for.
    """
    made: dict[Any, Any] = {}

    def once(shape: Any) -> torch.Tensor:
        if shape not in made:
            made[shape] = torch.zeros(shape)
        return made[shape]

    def forward_tile(call: Any, held: Any, tile: Any, query: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*query.shape[:2], tile.num_queries, HEAD_DIM)
        return once((held.source, *shape)[1:]), once(shape[:3])

    def backward_tile(call: Any, held: Any, tile: Any, heads: range, of_queries: Any) -> tuple[torch.Tensor, ...]:
        of_keys = held.of(tile)[0].shape
        return once((1, len(heads), tile.num_queries, HEAD_DIM)), once(of_keys), once(of_keys)

    def on_rank(group: Any) -> tuple[int, int]:
        return peaks_of_rank(group, name, kv_grad_dtype)

    with (
        mock.patch.object(strategies, "forward_tile", forward_tile),
        mock.patch.object(gradients, "backward_tile", backward_tile),
    ):
        return Loopback(world, strict=True).run(on_rank)


def peaks_of_rank(group: Any, name: str, kv_grad_dtype: torch.dtype | None) -> tuple[int, int]:
    world = group.size()
    layout = dtcp.make_layout("head_tail", seq_len=LOCAL * world, cp=world)
    query, key, value = (torch.randn(1, h, LOCAL, HEAD_DIM) for h in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    call = Call(
        group, layout, layout, Mask(), scale=0.25, kernel=choose_kernel("flash", query, HEAD_DIM),
        kv_grad_dtype=kv_grad_dtype,
    )  # fmt: skip

    def run() -> tuple[Any, Any]:
        core = CORES[name]
        with peak_live_bytes() as forward:
            out, lse = core.forward(call, query, key, value)
        with peak_live_bytes() as backward:
            core.backward(call, out, query, key, value, out, lse)
        return forward, backward

    run()  # layouts, schedules and the stand-in's results are there by now
    forward, backward = run()
    return forward.peak, backward.peak


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", ["ring", "exchange", "all_gather"])
def test_peak_is_the_closed_form_in_shards(name, world):
    """Forward: keys and values. Backward: those, gradients on their way, and the sums of the rank's own gradients."""
    two = world == 2  # a single part of a gradient, and nothing to receive while another is read
    forward, backward = {
        "ring": (2, 2 + (2 if two else 3)),
        "exchange": (2, 2 + 2) if two else (3, 3 + 3),
        # What a rank sends lies there beside what it gathers; in the backward the sums of all ranks are more than that.
        "all_gather": (world + 1, 2 * world),
    }[name]
    for found in peaks(world, name):
        assert 0 <= found[0] - forward * SHARD <= 2 * ROWS
        assert 0 <= found[1] - (backward * SHARD + SHARD + QUERIES) <= 2 * ROWS


def test_key_gradients_that_travel_in_half_take_no_more_memory():
    """One part that is made, and half of it each for what leaves and what arrives; all at once by all_gather."""
    forms = {"ring": 2 + 1 + 1, "exchange": 3 + 1 + 1, "all_gather": 2 * 3}
    for name, backward in forms.items():
        for _, found in peaks(3, name, torch.bfloat16):
            assert 0 <= found - (backward * SHARD + SHARD + QUERIES) <= 2 * ROWS, name
