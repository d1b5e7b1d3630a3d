"""``ranks_per_node``: strategies that pass inside nodes and between them, on ranks that play at nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from dtcp import collectives
from dtcp.attention.arguments import resolved_strategy
from dtcp.mesh import ParallelDims
from masked import MaskedCase
from oracle import GRADIENT_NAMES, Case, all_pairs, make_problem, solve
from recorder import Sent, count_exchanges
from test_attention_masks import AXES, check_cases, possible

BATCH, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, NUM_TOKENS = 2, 4, 16, 8, 12
SHARD = NUM_TOKENS * BATCH * NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM)  # elements of one rank's keys and values
LARGER = [(6, 2), (6, 3), (8, 2), (8, 4)]  # ranks, those of a node


# ---- exactness -------------------------------------------------------------------------------------------------------


def masked_cases(ranks_per_node: int, **axes: Any) -> list[MaskedCase]:
    """Every pair of a strategy with another option, and of two options, where that is possible."""
    rows = all_pairs(AXES | {"strategy": ["ring", "all_gather"]} | axes)
    return [dataclasses.replace(possible(**row), ranks_per_node=ranks_per_node) for row in rows]


# The masks that the ranks of a node treat alike, or not; all values of each are in the slow tests.
FEW: dict[str, Any] = {
    "lengths": [(), ((5, -3, 1, 1, 20, -11),), ((20, 21), (41,))],
    "window": [(-1, -1), (7, -1), (3, 2)],
    "mask_mod": ["", "by_head_and_row"],
    "bias": ["", "bh"],
    "slopes": ["", "h"],
    "kernel": ["auto"],
}


def test_two_levels_match_the_float64_oracle_in_every_layout_and_mask(ranks):
    ranks.run(4, check_cases, masked_cases(2, **FEW))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks_per_node"), [(4, 2), *LARGER])
def test_two_levels_match_the_float64_oracle_in_every_value_of_every_mask(ranks, world, ranks_per_node):
    ranks.run(world, check_cases, masked_cases(ranks_per_node), timeout=600)


@pytest.mark.slow
def test_heads_cut_inside_a_node_with_a_ring_of_two_levels_match_the_float64_oracle(ranks):
    """Eight ranks, four of a node, heads cut among two: two super-ranks of a node, two nodes."""
    ranks.run(8, check_cases, masked_cases(4, strategy=["hybrid"]), timeout=600)


def check_twice(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for strategy in ("ring", "all_gather"):
        case = Case(strategy=strategy, heads=(8, 4, 16, 16), seq_len=61)
        problem, layout = make_problem(case), dtcp.make_layout("head_tail", seq_len=61, cp=world)
        first, second = (solve(case, problem, mesh, layout, ranks_per_node=2) for _ in range(2))
        for name in ("out", "lse", *GRADIENT_NAMES):
            assert torch.equal(first[name], second[name]), (strategy, name)


def test_two_runs_are_bitwise_equal(ranks):
    ranks.run(4, check_twice)


# ---- bytes by kind of link -------------------------------------------------------------------------------------------


def is_inside(rank: int, sent: Sent, ranks_per_node: int) -> bool:
    assert sent.peer is not None, "every message has one receiver"
    return rank // ranks_per_node == sent.peer // ranks_per_node


def check_bytes(
    rank: int, world: int, ranks_per_node: int, every: list[dict[str, Any]]
) -> list[tuple[int, int, int, int]]:
    """(bytes inside the node, between nodes) that this rank sends in the forward, the same of the backward."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=NUM_TOKENS * world, cp=world)
    shapes = (8, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, VALUE_DIM)
    found = []
    for asked in every:
        inputs = [
            torch.randn(BATCH, heads, NUM_TOKENS, dim, dtype=torch.bfloat16, requires_grad=True)
            for heads, dim in shapes
        ]
        with count_exchanges() as forward:
            out = dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout, enable_gqa=True, **asked)
        with count_exchanges() as backward:
            out.sum().backward()
        agreement = Sent("all_gather", 8 * collectives._RECORD_SIZE * (world - 1))
        numbers: list[int] = []
        for sent in (forward, backward):
            sent.remove(agreement)
            inside = sum(x.num_bytes for x in sent if is_inside(rank, x, ranks_per_node))
            numbers += [inside, sum(x.num_bytes for x in sent) - inside]
        found.append(tuple(numbers))
    return found


def check_full(ranks: Any, world: int, length: int) -> None:
    """Full masks; a shard in bfloat16 has 2 bytes an element, its gradient 4."""
    num_nodes = world // length
    inside, between = num_nodes * (length - 1) * SHARD, (num_nodes - 1) * SHARD
    asked = [{"strategy": strategy, "ranks_per_node": length} for strategy in ("ring", "all_gather")]
    sent = ranks.run(world, check_bytes, length, [*asked, {"strategy": "ring"}])
    for rank, (ring, gathered, flat) in enumerate(sent):
        assert ring == (inside * 2, between * 2, inside * (2 + 4), between * (2 + 4)), rank
        assert gathered == ring, "the same numbers of shards"
        # One level: only the node's first rank has a neighbour outside, which gets all shards; and each rank returns
        # the gradients of every rank of the other nodes by itself.
        leaves = rank % length == 0
        assert flat[1] == (world - 1) * SHARD * 2 * leaves
        assert flat[3] == flat[1] + (world - length) * SHARD * 4
    for of_ring in (1, 3):  # forward, backward: what the busiest link of a node carries
        busiest = max(of_rank[2][of_ring] for of_rank in sent)
        assert busiest >= max(of_rank[0][of_ring] for of_rank in sent) * length


def test_bytes_inside_nodes_and_between_them_are_the_closed_form(ranks):
    """Papers: between nodes N−1 shards of each rank, inside N·(L−1), of keys and values and of their gradients."""
    check_full(ranks, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks_per_node"), LARGER)
def test_bytes_inside_nodes_and_between_them_are_the_closed_form_on_more_ranks(ranks, world, ranks_per_node):
    check_full(ranks, world, ranks_per_node)


def check_causal(ranks: Any, world: int, length: int) -> None:
    """Head_tail: the nodes and ranks below an owner need all of its keys and come first, those above need half."""
    num_nodes = world // length
    asked = {"strategy": "ring", "ranks_per_node": length, "is_causal": True}
    sent = ranks.run(world, check_bytes, length, [asked])
    for rank in range(world):
        node, local = divmod(rank, length)

        def shards(node: int, local: int) -> tuple[float, float]:
            """(inside, between) of the keys that the rank gets: half of those that lower nodes and ranks own."""
            between = num_nodes - 1 - node / 2
            return (length - 1 - local / 2) + (length - 1) * between, between

        # Keys come from above: a rank sends what the one below it gets.
        below = node * length + (local - 1) % length, (node - 1) % num_nodes * length + local
        inside, between = (shards(*divmod(peer, length))[index] * SHARD for index, peer in enumerate(below))
        returned = [x * SHARD for x in shards(node, local)]  # gradients of all that it got, summed by node
        (of_rank,) = sent[rank]
        assert of_rank == (inside * 2, between * 2, inside * 2 + returned[0] * 4, between * 2 + returned[1] * 4), rank
    total = sum(of_rank[0][1] for of_rank in sent)
    assert total == 0.75 * world * (num_nodes - 1) * SHARD * 2, "a quarter never crosses a node's link"


def test_a_causal_ring_of_two_levels_sends_what_is_read_and_no_more(ranks):
    check_causal(ranks, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks_per_node"), LARGER)
def test_a_causal_ring_of_two_levels_sends_what_is_read_and_no_more_on_more_ranks(ranks, world, ranks_per_node):
    check_causal(ranks, world, ranks_per_node)


def check_hybrid_bytes(rank: int, world: int) -> None:
    asked = {"strategy": "hybrid", "ulysses_degree": 2}
    (two, one) = check_bytes(rank, world, 4, [asked | {"ranks_per_node": 4}, asked])
    # Two super-ranks of a node, two nodes: one shard of half the heads of two ranks' tokens crosses, and a sum of as
    # many; a ring of four passes three on from every second super-rank, and returns two parts each.
    assert (two[1], two[3]) == (SHARD * 2, SHARD * (2 + 4))
    leaves = rank % 4 < 2
    assert (one[1], one[3]) == (3 * SHARD * 2 * leaves, 3 * SHARD * 2 * leaves + 2 * SHARD * 4)


@pytest.mark.slow
def test_the_ring_of_a_hybrid_crosses_to_another_node_once_for_each_of_its_ranks(ranks):
    ranks.run(8, check_hybrid_bytes)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_one_level_is_what_is_left_where_a_node_has_all_ranks_or_one():
    def resolved(strategy: str, cp: int, ranks_per_node: int | None, degree: int | None = None) -> tuple[Any, ...]:
        return resolved_strategy(strategy, degree, cp, ranks_per_node=ranks_per_node)[:3]

    assert resolved("ring", 8, 4) == ("ring", 1, 4) and resolved("all_gather", 8, 2) == ("all_gather", 1, 2)
    assert {resolved("ring", 8, n) for n in (None, 1, 8, 9, 16)} == {("ring", 1, 1)}
    assert resolved("hybrid", 8, 4, degree=2) == ("ring", 2, 4)
    assert resolved("hybrid", 8, 4, degree=4) == ("ring", 4, 1), "heads are cut among all ranks of a node"
    assert resolved("hybrid", 8, 8, degree=4) == ("ring", 4, 1) and resolved("hybrid", 6, 8, degree=3) == ("ring", 3, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ranks_per_node": 4},
            "ranks_per_node=4 must divide the 6 ranks of the cp axis, or be at least 6.*1, 2, 3, 6",
        ),
        ({"ranks_per_node": 0}, "ranks_per_node must be the number of adjacent ranks .* got 0; use a divisor of cp"),
        ({"ranks_per_node": True}, "got True; use a divisor of cp, or None"),
        ({"ranks_per_node": "2"}, "got '2'"),
        ({"strategy": "exchange", "ranks_per_node": 2}, "no meaning for strategy='exchange'.*leave it None, or use"),
        ({"strategy": "ulysses", "ranks_per_node": 8}, "ranks_per_node=8 has no meaning for strategy='ulysses'"),
        ({"strategy": "auto", "ranks_per_node": 2}, "no meaning for strategy='auto', which predicts for one kind of"),
        (
            {"strategy": "hybrid", "ulysses_degree": 2, "ranks_per_node": 3},
            "ulysses_degree=2 must divide ranks_per_node=3, since .*use one of 1, 3, or leave ranks_per_node None",
        ),
    ],
)
def test_nodes_that_make_no_sense_are_refused_with_the_value_and_a_cure(options, message):
    with pytest.raises(ValueError, match=message):
        resolved_strategy(**({"strategy": "ring", "ulysses_degree": None, "cp": 6} | options))


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 30))
def test_the_ranks_of_the_cp_axis_on_a_node_are_those_of_the_mesh(dp_shard, cp, tp, ranks_per_node):
    """By brute force: every cp group is cut by nodes into runs of so many adjacent ranks, or that is refused."""
    dims = ParallelDims(dp_shard=dp_shard, cp=cp, tp=tp, world_size=dp_shard * cp * tp)
    runs = set()
    for data, other in ((d, t) for d in range(dp_shard) for t in range(tp)):
        nodes = [((data * cp + place) * tp + other) // ranks_per_node for place in range(cp)]
        runs |= {nodes.count(node) for node in nodes}
    try:
        found = dims.cp_ranks_per_node(ranks_per_node)
    except ValueError as error:
        # Nodes that cut a tp group in two, or cp groups unevenly.
        assert f"ranks_per_node={ranks_per_node} with tp={tp} and cp={cp}" in str(error)
        assert ranks_per_node % tp or len(runs) > 1
        return
    assert runs == {found}


def test_no_nodes_are_no_nodes():
    dims = ParallelDims(cp=4, world_size=4)
    assert dims.cp_ranks_per_node(None) is None
    with pytest.raises(ValueError, match="ranks_per_node must be >= 1, got 0; use None"):
        dims.cp_ranks_per_node(0)
