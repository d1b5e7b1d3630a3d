"""Layouts against closed forms and against a mask built pair by pair."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtcp
from dtcp.layout import LAYOUT_NAMES, SequenceLayout, layout_from_state

layouts = st.builds(
    lambda name, seq_len, cp, multiple_of: dtcp.make_layout(name, seq_len=seq_len, cp=cp, multiple_of=multiple_of),
    st.sampled_from(LAYOUT_NAMES),
    st.integers(1, 200),
    st.integers(1, 7),
    st.sampled_from([1, 2, 3, 4]),
)


def all_positions(layout: SequenceLayout) -> list[list[int]]:
    return [layout.positions(r).tolist() for r in range(layout.cp)]


def tile_mask(layout: SequenceLayout, q_rank: int, kv_rank: int, is_causal: bool) -> torch.Tensor:
    """How often each (query slot, key slot) pair is computed."""
    count = torch.zeros(layout.local_seq_len, layout.local_seq_len, dtype=torch.int64)
    for tile in layout.tiles(q_rank, kv_rank, is_causal=is_causal):
        block = torch.ones(tile.num_queries, tile.num_keys, dtype=torch.int64)
        if tile.kind == "causal":
            assert tile.num_queries == tile.num_keys
            block = block.tril()
        assert tile.num_queries > 0 and tile.num_keys > 0
        assert int(block.sum()) == tile.num_pairs
        count[tile.q_start : tile.q_stop, tile.kv_start : tile.kv_stop] += block
    return count


def test_head_tail_positions_are_the_published_ones():
    assert all_positions(dtcp.make_layout("head_tail", seq_len=8, cp=2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert all_positions(dtcp.make_layout("head_tail", seq_len=16, cp=4)) == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_contiguous_and_striped_positions():
    assert all_positions(dtcp.make_layout("contiguous", seq_len=5, cp=2)) == [[0, 1, 2], [3, 4, 5]]
    assert all_positions(dtcp.make_layout("striped", seq_len=6, cp=3)) == [[0, 3], [1, 4], [2, 5]]


def test_pairs_of_sixteen_tokens_on_two_ranks():
    assert dtcp.make_layout("contiguous", seq_len=16, cp=2).attended_pairs() == [36, 100]
    assert dtcp.make_layout("head_tail", seq_len=16, cp=2).attended_pairs() == [68, 68]


@pytest.mark.parametrize(
    ("cp", "contiguous", "striped"),
    [
        (2, Fraction(6145, 4097), Fraction(4098, 4097)),
        (4, Fraction(7169, 4097), Fraction(4100, 4097)),
        (8, Fraction(7681, 4097), Fraction(4104, 4097)),
        (16, Fraction(7937, 4097), Fraction(4112, 4097)),
        (32, Fraction(8065, 4097), Fraction(4128, 4097)),
    ],
)
def test_causal_imbalance_is_the_closed_form(cp, contiguous, striped):
    def imbalance(name: str) -> Fraction:
        pairs = dtcp.make_layout(name, seq_len=4096, cp=cp).attended_pairs()
        return Fraction(max(pairs) * cp, sum(pairs))

    assert imbalance("contiguous") == contiguous
    assert imbalance("striped") == striped
    assert imbalance("head_tail") == 1
    assert dtcp.make_layout("head_tail", seq_len=4096, cp=cp).imbalance() == 1.0


@pytest.mark.parametrize(
    ("name", "cp", "multiple_of", "padded"),
    [
        ("head_tail", 1, 1, 101),
        ("head_tail", 1, 4, 104),
        ("head_tail", 2, 1, 104),
        ("head_tail", 2, 2, 104),
        ("head_tail", 3, 4, 108),
        ("head_tail", 4, 3, 120),
        ("contiguous", 2, 1, 102),
        ("striped", 3, 2, 102),
    ],
)
def test_padding_is_the_least_multiple(name, cp, multiple_of, padded):
    layout = dtcp.make_layout(name, seq_len=101, cp=cp, multiple_of=multiple_of)
    assert layout.padded_seq_len == padded
    assert layout.local_seq_len == padded // cp


@pytest.mark.parametrize("seq_len", [1, 2])
@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_shorter_than_the_ranks_still_places_every_token(name, seq_len):
    layout = dtcp.make_layout(name, seq_len=seq_len, cp=4)
    assert sum(layout.num_valid(r) for r in range(4)) == seq_len
    assert sum(layout.attended_pairs()) == seq_len * (seq_len + 1) // 2


@given(layouts)
def test_positions_are_a_partition_with_pads_last(layout):
    positions = all_positions(layout)
    assert sorted(itertools.chain(*positions)) == list(range(layout.padded_seq_len))
    assert layout.local_seq_len % layout.multiple_of == 0
    for rank, own in enumerate(positions):
        assert own == sorted(own)
        assert sum(p < layout.seq_len for p in own) == layout.num_valid(rank)


@given(layouts)
def test_inverse_finds_every_token(layout):
    order = torch.tensor([*itertools.chain(*all_positions(layout))])
    assert order[layout.inverse()].tolist() == list(range(layout.seq_len))


@given(layouts, st.booleans())
def test_tiles_cover_every_allowed_pair_once_and_no_other(layout, is_causal):
    for q_rank in range(layout.cp):
        for kv_rank in range(layout.cp):
            q, kv = layout.positions(q_rank)[:, None], layout.positions(kv_rank)[None, :]
            allowed = (q < layout.seq_len) & (kv < layout.seq_len)
            if is_causal:
                allowed &= kv <= q
            assert torch.equal(tile_mask(layout, q_rank, kv_rank, is_causal), allowed.long())
            read = allowed.any(0).nonzero().flatten().tolist() or [0, -1]
            assert layout.key_range(q_rank, kv_rank, is_causal=is_causal) == (read[0], read[-1] + 1)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_any_staircase_is_cut_exactly(increments):
    from dtcp.layout import _staircase_tiles

    visible = np.cumsum(increments)
    count = torch.zeros(len(increments), int(visible[-1]), dtype=torch.int64)
    for t in _staircase_tiles(visible):
        block = torch.ones(t.num_queries, t.num_keys, dtype=torch.int64)
        count[t.q_start : t.q_stop, t.kv_start : t.kv_stop] += block.tril() if t.kind == "causal" else block
    assert torch.equal(count, (torch.arange(count.size(1))[None] < torch.from_numpy(visible)[:, None]).long())


@given(layouts)
def test_state_brings_back_the_layout(layout):
    assert layout_from_state(layout.state.clone()) == layout


def test_tiles_of_whole_chunks_are_the_fewest():
    """One causal call for the local tile and one full call per other rank, whatever cp is."""
    layout = dtcp.make_layout("head_tail", seq_len=64, cp=4)
    kinds = [[t.kind for t in layout.tiles(2, s, is_causal=True)] for s in range(4)]
    assert kinds == [["full"], ["full"], ["causal"], ["full"]]
    striped = dtcp.make_layout("striped", seq_len=64, cp=4)
    assert [[t.kind for t in striped.tiles(1, s, is_causal=True)] for s in range(4)] == [["causal"]] * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dtcp.make_layout("zigzag", seq_len=8, cp=2), ValueError, "contiguous, head_tail, striped.*'zigzag'"),
        (lambda: dtcp.make_layout("head_tail", seq_len=0, cp=2), ValueError, "seq_len must be .* at least 1, got 0"),
        (lambda: dtcp.make_layout("head_tail", seq_len=True, cp=2), ValueError, "seq_len must be an int"),
        (lambda: dtcp.make_layout("head_tail", seq_len=8.0, cp=2), ValueError, "seq_len must be an int"),
        (lambda: dtcp.make_layout("head_tail", seq_len=8, cp=0), ValueError, "cp must be"),
        (lambda: dtcp.make_layout("head_tail", seq_len=8, cp=2, multiple_of=-1), ValueError, "multiple_of must be"),
        (lambda: dtcp.make_layout("per_document", seq_len=8, cp=2), NotImplementedError, "not available yet; use one"),
        (lambda: dtcp.make_layout("head_tail", seq_len=8, cp=2, documents=[8]), NotImplementedError, "documents=None"),
        (
            lambda: dtcp.make_layout("striped", seq_len=8, cp=2).positions(2),
            ValueError,
            r"rank must be in 0\.\.1.*got 2",
        ),
        (lambda: dtcp.make_layout("striped", seq_len=8, cp=2).tiles(0, -1), ValueError, "got -1"),
        (
            lambda: dtcp.make_layout("striped", seq_len=8, cp=2).attended_pairs(window_size=(3, 0)),
            NotImplementedError,
            r"windows yet, got window_size=\(3, 0\)",
        ),
    ],
)
def test_bad_arguments_name_the_value_and_the_cure(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_causal_with_another_key_layout_is_refused():
    q, kv = dtcp.make_layout("contiguous", seq_len=8, cp=2), dtcp.make_layout("contiguous", seq_len=12, cp=2)
    with pytest.raises(ValueError, match="is_causal needs queries and keys in one layout"):
        q.tiles(0, 0, is_causal=True, kv_layout=kv)
    assert [t.num_pairs for t in q.tiles(0, 1, kv_layout=kv)] == [24]


def test_returned_tensors_can_be_written_to_without_harm():
    layout = dtcp.make_layout("striped", seq_len=8, cp=2)
    layout.positions(0).zero_()
    layout.inverse().zero_()
    assert layout.positions(0).tolist() == [0, 2, 4, 6]
    assert layout.inverse().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_layout_first_made_in_another_mode_serves_training():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    for number, mode in enumerate((torch.inference_mode(), FakeTensorMode())):
        seq_len = 9001 + number  # no other test has cached it
        with mode:
            layout = dtcp.make_layout("striped", seq_len=seq_len, cp=2)
            layout.tiles(0, 1, is_causal=True)
        again = dtcp.make_layout("striped", seq_len=seq_len, cp=2)
        assert not again.state.is_inference() and not isinstance(again.state, FakeTensor)
        assert again.num_valid(0) + again.num_valid(1) == seq_len
        assert again.positions(1)[:2].tolist() == [1, 3] and not again.positions(1).is_inference()
        assert again.inverse()[:2].tolist() == [0, again.local_seq_len]
