"""Tiles of every mask and layout against the mask pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtcp
from dtcp.layout import LAYOUT_NAMES, SequenceLayout, slot_positions
from dtcp.mask import Mask, checked_mask
from dtcp.tiles import Tile, cut_tiles
from packing import dense, documents, masks


def block(tile: Tile, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Which pairs of its rectangle a tile holds, bool (queries, keys)."""
    whole = np.ones((tile.num_queries, tile.num_keys), bool)
    match tile.kind:
        case "full":
            return whole
        case "causal" | "anticausal":
            assert tile.num_queries == tile.num_keys
            return np.tril(whole) if tile.kind == "causal" else np.triu(whole)
        case "masked":
            keys = np.arange(tile.kv_start, tile.kv_stop)
            queries = slice(tile.q_start, tile.q_stop)
            return (keys >= lower[queries, None]) & (keys < upper[queries, None])
    raise AssertionError(tile.kind)


def count_pairs(layout: SequenceLayout, mask: Mask, num_rows: int, may_mask: bool) -> np.ndarray:
    """How often each pair of tokens is computed, (rows, S, S); checks each tile by itself, and the key ranges."""
    count = np.zeros((num_rows, layout.seq_len, layout.seq_len), int)
    for q_rank in range(layout.cp):
        for kv_rank in range(layout.cp):
            tiles = layout.tiles(q_rank, kv_rank, mask, may_mask=may_mask)
            for tile in tiles:
                assert tile.num_queries > 0 and tile.num_keys > 0
                assert may_mask or tile.kind != "masked"
                for row in range(num_rows) if tile.rows is None else range(*tile.rows):
                    inside = block(tile, *layout.visible(q_rank, kv_rank, mask, row))
                    assert inside.sum() == tile.num_pairs <= tile.num_computed
                    queries = slot_positions(layout, q_rank, row)[tile.q_start : tile.q_stop]
                    keys = slot_positions(layout, kv_rank, row)[tile.kv_start : tile.kv_stop]
                    count[row][np.ix_(queries, keys)] += inside
            hull = (min(t.kv_start for t in tiles), max(t.kv_stop for t in tiles)) if tiles else (0, 0)
            assert layout.key_range(q_rank, kv_rank, mask) == hull
    return count


@st.composite
def cases(draw):
    num_rows = draw(st.sampled_from([1, 1, 2, 3]))
    packed = draw(documents(num_rows=draw(st.sampled_from([1, num_rows]))))
    name = draw(st.sampled_from(LAYOUT_NAMES))
    layout = dtcp.make_layout(
        name,
        seq_len=packed.seq_len,
        cp=draw(st.integers(1, 5)),
        documents=packed,
        multiple_of=draw(st.sampled_from([1, 1, 2])),
    )
    seen = draw(st.sampled_from([packed, packed, None]))
    return layout, draw(masks(packed.seq_len, seen, num_rows)), num_rows


@given(cases(), st.booleans())
def test_tiles_of_any_mask_cover_every_allowed_pair_once_and_no_other(case, may_mask):
    layout, mask, num_rows = case
    expected = np.stack([dense(mask, layout.seq_len, row) for row in range(num_rows)]).astype(int)
    count = count_pairs(layout, mask, num_rows, may_mask)
    np.testing.assert_array_equal(count, expected)
    # Rows that are alike count once.
    pairs = layout.attended_pairs(mask.is_causal, mask.window_size, mask.documents, mask.key_lengths)
    differ = mask.row_groups(layout.placed_by) != (None,)
    assert sum(pairs) == (expected if differ else expected[:1]).sum()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=40))
def test_any_bounds_that_never_fall_are_cut_exactly(steps):
    by = np.array(steps)
    lower = by[:, 0].cumsum()
    upper = np.maximum(lower + by[:, 2], (lower + by[:, 1]).cumsum() // np.arange(1, len(by) + 1))
    upper = np.maximum.accumulate(upper)
    seen = (np.arange(upper[-1] + 1) >= lower[:, None]) & (np.arange(upper[-1] + 1) < upper[:, None])
    for may_mask in (True, False):
        count = np.zeros_like(seen, dtype=int)
        for tile in cut_tiles(lower, upper, may_mask=may_mask, rows=(2, 3)):
            assert tile.rows == (2, 3)
            count[tile.q_start : tile.q_stop, tile.kv_start : tile.kv_stop] += block(tile, lower, upper)
        np.testing.assert_array_equal(count, seen)


@pytest.mark.parametrize("num", [0, 3])
def test_what_sees_nothing_has_no_tiles(num):
    nothing = np.zeros(num, np.int64)
    assert cut_tiles(nothing, nothing, may_mask=True) == cut_tiles(nothing, nothing, may_mask=False) == ()


def test_a_narrow_window_is_few_masked_tiles_and_a_wide_one_bands():
    layout = dtcp.make_layout("contiguous", seq_len=4096, cp=1)
    narrow = layout.tiles(0, 0, Mask(True, (15, 0)))
    assert {t.kind for t in narrow} == {"masked"} and len(narrow) <= 4096 // 64
    wide = layout.tiles(0, 0, Mask(True, (1023, 0)))
    assert {t.kind for t in wide} == {"full", "causal", "anticausal"} and len(wide) < 16
    assert sum(t.num_pairs for t in wide) == 4096 * 1024 - 1023 * 1024 // 2


def test_many_tiny_documents_become_few_tiles_under_masks():
    docs = dtcp.Documents.from_lengths([4] * 256)
    layout = dtcp.make_layout("contiguous", seq_len=1024, cp=1)
    tiles = layout.tiles(0, 0, Mask(True, documents=docs))
    assert len(tiles) < 32 and sum(t.num_pairs for t in tiles) == 256 * 10
    assert len(layout.tiles(0, 0, Mask(True, documents=docs), may_mask=False)) == 256


def test_rows_that_differ_have_tiles_of_their_own_and_neighbours_alike_share():
    docs = dtcp.Documents.from_lengths([[4, 12], [4, 12], [16]])
    layout = dtcp.make_layout("contiguous", seq_len=16, cp=2)
    rows = [t.rows for t in layout.tiles(1, 1, Mask(True, documents=docs))]
    assert rows == [(0, 2), (2, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_size": (3,)}, r"window_size must be a pair .* got \(3,\); use \(-1, -1\)"),
        ({"window_size": (-2, 0)}, r"-1 for no bound, got \(-2, 0\)"),
        ({"window_size": (True, 0)}, "pair"),
        ({"window_size": (4, 2)}, r"looks 2 tokens ahead, which is_causal=True forbids; use \(4, 0\)"),
        ({"documents": [4, 12]}, "must be dtcp.Documents, got list; make them with"),
        ({"key_lengths": [3, -1]}, r"an int of 0 or more for each row of the batch, got \[3, -1\]"),
        ({"key_lengths": [2.5]}, r"an int of 0 or more for each row of the batch, got \[2.5\]"),
        ({"key_lengths": 5}, "an int of 0 or more for each row of the batch, got 5"),
        ({"key_lengths": []}, r"got \[\]"),
    ],
)
def test_bad_masks_name_the_value_and_the_cure(arguments, message):
    with pytest.raises(ValueError, match=message):
        checked_mask(is_causal=True, **arguments)


def test_masks_that_do_not_fit_the_layout_are_refused():
    layout = dtcp.make_layout("contiguous", seq_len=16, cp=2)
    with pytest.raises(ValueError, match="documents add up to 8 tokens, but the sequence has 16"):
        layout.tiles(0, 0, Mask(True, documents=dtcp.Documents.from_lengths([8])))
    two_rows = dtcp.Documents.from_lengths([[4, 12], [12, 4]])
    with pytest.raises(ValueError, match=r"rows of one batch, got \[2, 3\] rows; select those"):
        layout.attended_pairs(documents=two_rows, key_lengths=[1, 2, 3])
    other = dtcp.make_layout("contiguous", seq_len=12, cp=2)
    with pytest.raises(ValueError, match="window_size needs queries and keys in one layout"):
        layout.tiles(0, 0, Mask(False, (3, 3)), kv_layout=other)
