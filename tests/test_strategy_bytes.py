"""What every strategy sends: closed forms of the papers, and for ``exchange`` the least that any could.

A recorder around every message and collective counts what leaves a rank for another, without what ranks agree by.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from dtcp import collectives
from dtcp.mask import checked_mask
from oracle import options_of
from packing import dense
from recorder import Sent, count_exchanges

BATCH, HEAD_DIM, VALUE_DIM = 2, 16, 8


@dataclasses.dataclass(frozen=True)
class Asked:
    """An attention in bfloat16, whose gradients of keys return in float32 (or as they are by ulysses) unless asked."""

    strategy: str
    layout: str = "head_tail"
    is_causal: bool = True
    window: tuple[int, int] = (-1, -1)
    lengths: tuple[tuple[int, ...], ...] = ()
    key_lengths: tuple[int, ...] = ()
    heads: tuple[int, int] = (8, 4)
    seq_len: int = 48
    ulysses_degree: int = 0
    ranks_per_node: int | None = None
    kv_grad_dtype: torch.dtype | None = None

    @property
    def grad_bytes(self) -> int:
        return (self.kv_grad_dtype or torch.float32).itemsize

    def documents(self) -> dtcp.Documents | None:
        if not self.lengths:
            return None
        return dtcp.Documents.from_lengths([list(row) for row in self.lengths] * (BATCH // len(self.lengths)))


def make_layout(asked: Asked, cp: int) -> dtcp.SequenceLayout:
    return dtcp.make_layout(asked.layout, seq_len=asked.seq_len, cp=cp, documents=asked.documents())


def check_sent(rank: int, world: int, every: list[Asked]) -> list[tuple[int, int]]:
    """(bytes of the forward, of the backward) that this rank sent, of each call."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    found = []
    for asked in every:
        layout = make_layout(asked, world)
        num_heads, num_kv_heads = asked.heads
        shapes = (num_heads, HEAD_DIM), (num_kv_heads, HEAD_DIM), (num_kv_heads, VALUE_DIM)
        inputs = [
            torch.randn(BATCH, heads, layout.local_seq_len, dim, dtype=torch.bfloat16, requires_grad=True)
            for heads, dim in shapes
        ]
        how: dict[str, Any] = options_of(asked.strategy, world)
        if asked.ulysses_degree:
            how["ulysses_degree"] = asked.ulysses_degree
        with count_exchanges() as forward:
            out = dtcp.context_parallel_attention(
                *inputs, mesh=mesh, layout=layout, is_causal=asked.is_causal, window_size=asked.window,
                documents=asked.documents(), key_lengths=asked.key_lengths or None, enable_gqa=True,
                kv_grad_dtype=asked.kv_grad_dtype, ranks_per_node=asked.ranks_per_node, **how,
            )  # fmt: skip
        with count_exchanges() as backward:
            out.sum().backward()
        agreement = Sent("all_gather", 8 * collectives._RECORD_SIZE * (world - 1))
        for sent in (forward, backward):
            sent.remove(agreement)
        found.append((sum(s.num_bytes for s in forward), sum(s.num_bytes for s in backward)))
    return found


def allowed(asked: Asked, row: int) -> Tensor:
    """bool (S, S): the mask, written out."""
    mask = checked_mask(
        is_causal=asked.is_causal, window_size=asked.window, documents=asked.documents(),
        key_lengths=asked.key_lengths or None,
    )  # fmt: skip
    return torch.from_numpy(dense(mask, asked.seq_len, row))


def needed_keys(asked: Asked, cp: int) -> list[list[int]]:
    """[reader][owner]: how many (row, key) of the owner some query of the reader sees, by brute force."""
    layout = make_layout(asked, cp)
    counts = [[0] * cp for _ in range(cp)]
    for row in range(BATCH):
        seen = allowed(asked, row)
        held = []
        for rank in range(cp):
            positions = layout.positions(rank)
            own = positions[row] if positions.ndim == 2 else positions
            held.append(own[own < asked.seq_len])
        for reader in range(cp):
            for owner in range(cp):
                if reader != owner:
                    counts[reader][owner] += int(seen[held[reader]][:, held[owner]].any(0).sum())
    return counts


TWO_ROWS = ((5, 17, 1, 25), (48,))
EXCHANGES = [
    Asked("exchange"),
    Asked("exchange", is_causal=False),
    Asked("exchange", layout="contiguous"),
    Asked("exchange", layout="striped", seq_len=45),
    Asked("exchange", layout="contiguous", window=(7, 0)),
    Asked("exchange", window=(3, 5), is_causal=False),
    Asked("exchange", layout="striped", window=(0, 0)),
    Asked("exchange", lengths=((11, 3, 20, 14),)),
    Asked("exchange", layout="contiguous", lengths=((12, 12, 12, 12),), is_causal=False),
    Asked("exchange", layout="per_document", lengths=TWO_ROWS),
    Asked("exchange", lengths=TWO_ROWS, window=(4, -1)),
    Asked("exchange", layout="striped", lengths=((1,) * 48,)),
    Asked("exchange", key_lengths=(48, 13), is_causal=False),
    Asked("exchange", lengths=TWO_ROWS, kv_grad_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_exchange_sends_each_key_once_to_those_who_see_it_and_nothing_else(ranks, world):
    sent = ranks.run(world, check_sent, EXCHANGES)
    for index, asked in enumerate(EXCHANGES):
        counts = needed_keys(asked, world)
        row = asked.heads[1] * (HEAD_DIM + VALUE_DIM)
        for rank in range(world):
            given = sum(counts[reader][rank] for reader in range(world))
            returned = sum(counts[rank][owner] for owner in range(world))
            assert sent[rank][index] == (
                given * row * 2,
                given * row * 2 + returned * row * asked.grad_bytes,
            ), (asked, rank)


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_causal_head_tail_ring_sends_three_quarters_and_rank_r_gets_its_part_of_it(ranks, world):
    """papers: rank r receives 1 − r/(2(P−1)) of what a plain ring brings; the mean is 0.75 at every cp."""
    causal, full, exact = Asked("ring"), Asked("ring", is_causal=False), Asked("exchange")
    sent = ranks.run(world, check_sent, [causal, full, exact])
    plain = (world - 1) * (48 // world) * BATCH * 4 * (HEAD_DIM + VALUE_DIM) * 2
    assert [of_rank[1][0] for of_rank in sent] == [plain] * world
    # The rank below is sent what this one passes on.
    received = [sent[(rank + 1) % world][0][0] for rank in range(world)]
    assert received == [plain - plain * rank // (2 * (world - 1)) for rank in range(world)]
    assert sum(received) == 0.75 * plain * world
    assert sum(of_rank[2][0] for of_rank in sent) == sum(received), "the ring repeats no byte here"


def test_a_window_and_documents_send_what_does_not_grow_with_the_sequence(ranks):
    short = Asked("exchange", layout="contiguous", window=(7, 0))
    sent = ranks.run(2, check_sent, [short, dataclasses.replace(short, seq_len=192)])
    assert sent[0][0] == sent[0][1] == (7 * BATCH * 4 * 24 * 2,) * 2 and sent[1][0][0] == 0
    apart = Asked("exchange", layout="contiguous", lengths=((24, 24),), is_causal=False)
    assert ranks.run(2, check_sent, [apart]) == [[(0, 0)]] * 2, "documents that nobody shares travel nowhere"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_key_gradients_return_in_the_dtype_asked_for_and_keys_go_as_they_are(ranks, world):
    """The backward sends the keys of the forward once more, and beside them gradients."""
    ways = [Asked("ring"), Asked("exchange"), Asked("all_gather")]
    if world == 4:
        ways += [Asked("ring", ranks_per_node=2), Asked("all_gather", ranks_per_node=2)]
    halves = [dataclasses.replace(asked, kv_grad_dtype=torch.bfloat16) for asked in ways]
    for of_rank in ranks.run(world, check_sent, ways + halves):
        for (forward, backward), half in zip(of_rank[: len(ways)], of_rank[len(ways) :], strict=True):
            returned = backward - forward
            assert returned > 0 and half == (forward, forward + returned // 2)


def ulysses_bytes(asked: Asked, cp: int, degree: int, rank: int) -> tuple[int, int]:
    """Forward and backward of the all-to-alls alone, in bfloat16: heads of queries and keys there, the output back."""
    num_heads, num_kv_heads = asked.heads
    tokens, member = BATCH * asked.seq_len // cp, rank % degree
    heads = [range(m * num_heads // degree, (m + 1) * num_heads // degree) for m in range(degree)]
    keys = [len({h * num_kv_heads // num_heads for h in own}) for own in heads]
    others = [m for m in range(degree) if m != member]
    to_heads = sum(len(heads[m]) * HEAD_DIM + keys[m] * (HEAD_DIM + VALUE_DIM) for m in others)
    back = len(others) * len(heads[member]) * VALUE_DIM
    grad_out = sum(len(heads[m]) * VALUE_DIM for m in others)
    grad_query = len(others) * len(heads[member]) * HEAD_DIM
    # Key heads that several ranks read have shares of their gradients, which are summed in float32.
    grad_bytes = asked.grad_bytes if sum(keys) > num_kv_heads else 2
    grad_keys = len(others) * keys[member] * (HEAD_DIM + VALUE_DIM) * grad_bytes
    return tokens * (to_heads + back) * 2, tokens * ((grad_out + grad_query) * 2 + grad_keys)


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ulysses_bytes_are_the_closed_form_also_with_few_key_heads_and_uneven_heads(ranks, world):
    every = [
        Asked("ulysses"),
        Asked("ulysses", layout="striped", heads=(8, 2), is_causal=False),
        Asked("ulysses", layout="contiguous", heads=(10, 10), window=(5, 0)),
        Asked("ulysses", heads=(9, 3), lengths=((20, 28),)),
        Asked("ulysses", heads=(8, 1), kv_grad_dtype=torch.bfloat16),
        Asked("ulysses", heads=(8, 8), kv_grad_dtype=torch.float32),
    ]
    sent = ranks.run(world, check_sent, every)
    for rank in range(world):
        assert sent[rank] == [ulysses_bytes(asked, world, world, rank) for asked in every], rank


def test_ulysses_bytes_are_those_of_the_papers():
    """(P−1)/P²·s·b·(2h + 2·max(Hkv, P)·d)·e forward and backward, where D = Dv; here D+Dv = 24 of the mean d = 12."""
    for world, heads in ((2, (8, 4)), (4, (8, 4)), (4, (8, 2)), (8, (8, 8))):
        num_heads, num_kv_heads = heads
        right = (world - 1) / world**2 * 48 * BATCH * (2 * num_heads + 2 * max(num_kv_heads, world)) * 12 * 2
        assert ulysses_bytes(Asked("ulysses", heads=heads), world, world, 0)[0] == right


def test_hybrid_bytes_are_all_to_all_plus_the_ring_of_what_is_left(ranks):
    """papers, USP U×R: the a2a over U ranks, and a ring of R super-ranks whose heads of keys are a part of all."""
    asked = Asked("hybrid", is_causal=False, ulysses_degree=2)
    half = dataclasses.replace(asked, kv_grad_dtype=torch.bfloat16)
    sent = ranks.run(4, check_sent, [asked, Asked("hybrid", ulysses_degree=2), half])
    ring = BATCH * (2 * 48 // 4) * (4 // 2) * (HEAD_DIM + VALUE_DIM)  # entries of two heads of two ranks' tokens
    for rank in range(4):
        forward, backward = ulysses_bytes(asked, 4, 2, rank)
        assert sent[rank][0] == (forward + ring * 2, backward + ring * (2 + 4))
        assert sent[rank][2] == (forward + ring * 2, backward + ring * (2 + 2))
    causal = sum(of_rank[1][0] - ulysses_bytes(asked, 4, 2, rank)[0] for rank, of_rank in enumerate(sent))
    assert causal == 0.75 * 4 * ring * 2, "the merged ranks are a head_tail layout again"
