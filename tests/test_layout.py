"""Layouts against closed forms and against a mask built pair by pair."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtcp
from dtcp.layout import LAYOUT_NAMES, SequenceLayout, layout_from_state
from packing import documents


@st.composite
def layouts(draw) -> SequenceLayout:
    name = draw(st.sampled_from(LAYOUT_NAMES))
    packed = draw(documents(padding=False)) if name == "per_document" else None
    seq_len = packed.seq_len if packed else draw(st.integers(1, 200))
    cp, multiple_of = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 3, 4]))
    return dtcp.make_layout(name, seq_len=seq_len, cp=cp, documents=packed, multiple_of=multiple_of)


def all_positions(layout: SequenceLayout) -> list[list[int]]:
    return [layout.positions(r).tolist() for r in range(layout.cp)]


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
    layout = dtcp.make_layout(name, seq_len=seq_len, cp=4, documents=dtcp.Documents.from_lengths([seq_len]))
    assert sum(layout.num_valid(r) for r in range(4)) == seq_len
    assert sum(layout.attended_pairs()) == seq_len * (seq_len + 1) // 2


@given(layouts())
def test_positions_are_a_partition_with_pads_last(layout):
    positions = all_positions(layout)
    assert sorted(itertools.chain(*positions)) == list(range(layout.padded_seq_len))
    assert layout.local_seq_len % layout.multiple_of == 0
    for rank, own in enumerate(positions):
        assert own == sorted(own)
        assert sum(p < layout.seq_len for p in own) == layout.num_valid(rank)


@given(layouts())
def test_inverse_finds_every_token(layout):
    order = torch.tensor([*itertools.chain(*all_positions(layout))])
    assert order[layout.inverse()].tolist() == list(range(layout.seq_len))


# ---- documents -------------------------------------------------------------------------------------------------------


def test_per_document_positions_are_rank_major_and_increasing():
    docs = dtcp.Documents.from_lengths([4, 12])
    layout = dtcp.make_layout("per_document", seq_len=16, cp=2, documents=docs)
    assert all_positions(layout) == [[0, 3, 4, 5, 6, 13, 14, 15], [1, 2, 7, 8, 9, 10, 11, 12]]
    assert layout.attended_pairs(documents=docs) == [44, 44]
    others = {"contiguous": [20, 68], "head_tail": [52, 36]}
    for name, pairs in others.items():
        assert dtcp.make_layout(name, seq_len=16, cp=2).attended_pairs(documents=docs) == pairs


# Imbalance of contiguous, head_tail, striped and per_document (max / mean, 4 digits) and all pairs.
PUBLISHED = [
    ([3, 3, 8, 2], 2, 51, (1.4118, 1.0196, 1.0980, 1.0196)),
    ([16384, *[1024] * 16], 2, 142622720, (1.8823, 1.4705, 1.0001, 1)),
    ([16384, *[1024] * 16], 4, 142622720, (2.8233, 1.7058, 1.0003, 1)),
    ([16384, *[1024] * 16], 8, 142622720, (3.2939, 1.8234, 1.0008, 1)),
    ([*[1024] * 16, 16384], 4, 142622720, (2.8233, 1.7058, 1.0003, 1)),
    ([1024] * 64, 4, 33587200, (1, 1, 1.0029, 1)),
    ([1024] * 64, 8, 33587200, (1, 1, 1.0068, 1)),
    ([4096, 4096], 4, 16781312, (1.4999, 1, 1.0007, 1)),
    ([8192, 4096, 2048, 1024, 512, 256, 128, 128], 4, 44752896, (2.2495, 1.4997, 1.0005, 1)),
    ([8192, 4096, 2048, 1024, 512, 256, 128, 128], 8, 44752896, (2.6244, 1.4997, 1.0013, 1)),
    ([128, 128, 256, 512, 1024, 2048, 4096, 8192], 8, 44752896, (2.6244, 1.4382, 1.0013, 1)),
]


@pytest.mark.parametrize(("lengths", "cp", "total", "expected"), PUBLISHED)
def test_imbalance_of_packed_documents_is_the_published_one(lengths, cp, total, expected):
    docs = dtcp.Documents.from_lengths(lengths)
    for name, imbalance in zip(LAYOUT_NAMES, expected, strict=True):
        layout = dtcp.make_layout(name, seq_len=docs.seq_len, cp=cp, documents=docs)
        assert sum(layout.attended_pairs(documents=docs)) == total
        assert layout.imbalance(documents=docs) == pytest.approx(imbalance, abs=6e-5)


@given(documents(num_rows=2, padding=False), st.integers(1, 7))
def test_per_document_is_balanced_for_any_lengths(docs, cp):
    layout = dtcp.make_layout("per_document", seq_len=docs.seq_len, cp=cp, documents=docs)
    num_valid = [layout.num_valid(rank) for rank in range(cp)]
    assert max(num_valid) - min(num_valid) <= 1 and sum(num_valid) == docs.seq_len
    for row in range(docs.num_rows):
        alone, own = layout.select_rows([row]), docs.select_rows([row])
        pairs = alone.attended_pairs(documents=own)
        assert max(pairs) - min(pairs) <= docs.seq_len


@given(documents(num_rows=3), st.integers(1, 5))
def test_each_row_of_different_documents_has_a_partition_of_its_own(docs, cp):
    layout = dtcp.make_layout("per_document", seq_len=docs.seq_len, cp=cp, documents=docs)
    for row in range(3):
        alone = layout.select_rows(slice(row, row + 1))
        assert alone == dtcp.make_layout("per_document", seq_len=docs.seq_len, cp=cp, documents=docs.select_rows([row]))
        own = [layout.positions(rank).reshape(-1, layout.local_seq_len)[row % layout.num_rows] for rank in range(cp)]
        assert [o.tolist() for o in own] == all_positions(alone)
        assert all((o.diff() > 0).all() for o in own)
        order = torch.cat(own)
        inverse = layout.inverse().reshape(-1, layout.seq_len)[row % layout.num_rows]
        assert order[inverse].tolist() == list(range(layout.seq_len))
    again = layout_from_state(layout.state.clone())
    assert again == layout and again.placed_by == docs


def test_rows_that_hold_the_same_documents_share_their_places():
    docs = dtcp.Documents.from_lengths([[4, 12], [4, 12]])
    layout = dtcp.make_layout("per_document", seq_len=16, cp=2, documents=docs)
    assert layout.num_rows == 1 and layout.positions(0).shape == (8,)


def test_documents_given_to_a_regular_layout_place_nothing_and_come_back():
    docs = dtcp.Documents.from_lengths([4, 12])
    layout = dtcp.make_layout("striped", seq_len=16, cp=2, documents=docs)
    assert layout == dtcp.make_layout("striped", seq_len=16, cp=2)
    assert layout.documents is docs and layout.placed_by is None


# ---- state and errors ------------------------------------------------------------------------------------------------


@given(layouts())
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
        (lambda: dtcp.make_layout("per_document", seq_len=8, cp=2), ValueError, "pass documents=dtcp.Documents.from_l"),
        (lambda: dtcp.make_layout("head_tail", seq_len=8, cp=2, documents=[8]), ValueError, "got list; make them with"),
        (
            lambda: dtcp.make_layout("head_tail", seq_len=8, cp=2, documents=dtcp.Documents.from_lengths([9])),
            ValueError,
            "documents add up to 9 tokens, but the sequence has 8",
        ),
        (
            lambda: dtcp.make_layout("striped", seq_len=8, cp=2).positions(2),
            ValueError,
            r"rank must be in 0\.\.1.*got 2",
        ),
        (lambda: dtcp.make_layout("striped", seq_len=8, cp=2).tiles(0, -1), ValueError, "got -1"),
        (
            lambda: dtcp.make_layout("striped", seq_len=8, cp=2).attended_pairs(window_size=(3, 1)),
            ValueError,
            r"looks 1 tokens ahead, which is_causal=True forbids; use \(3, 0\)",
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
