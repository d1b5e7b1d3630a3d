"""The counts by which ``auto`` chooses a layout against counts slot by slot, and what it chooses."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtcp
from dtcp.auto_layout import demand_of
from dtcp.layout import LAYOUT_NAMES
from packing import documents, masks


@st.composite
def cases(draw):
    packed = draw(st.one_of(documents(), documents(num_rows=2)))
    given_documents = draw(st.sampled_from([packed, packed, None]))
    mask = draw(masks(packed.seq_len, given_documents, 1, key_lengths=False))
    return packed.seq_len, draw(st.integers(1, 8)), draw(st.sampled_from([1, 1, 2, 3])), given_documents, mask


@given(cases())
def test_pairs_and_received_slots_are_those_of_the_placed_tokens(case):
    seq_len, cp, multiple_of, packed, mask = case
    num_rows = 1 if packed is None or packed.is_shared else packed.num_rows
    for name in LAYOUT_NAMES[: 3 if packed is None else 4]:
        layout = dtcp.make_layout(name, seq_len=seq_len, cp=cp, documents=packed, multiple_of=multiple_of)
        demand = demand_of(name, seq_len, cp, packed, multiple_of, mask.is_causal, mask.window_size)
        assert demand.pairs.tolist() == layout.attended_pairs(mask.is_causal, mask.window_size, packed)
        received = [0] * cp
        for row in range(num_rows):
            for q_rank in range(cp):
                for kv_rank in set(range(cp)) - {q_rank}:
                    bounds = zip(*layout.visible(q_rank, kv_rank, mask, row), strict=True)
                    received[q_rank] += len({slot for low, high in bounds for slot in range(low, high)})
        assert demand.received.tolist() == received


def chosen(lengths, cp=4, **mask) -> str:
    docs = dtcp.Documents.from_lengths(lengths)
    return dtcp.make_layout("auto", seq_len=docs.seq_len, cp=cp, documents=docs, **mask).name


def test_documents_that_fill_ranks_stay_whole():
    assert chosen([1024] * 8) == "contiguous"
    assert chosen([64] * 512) == "contiguous"


def test_one_long_document_is_dealt_head_tail_and_a_long_one_among_short_ones_per_document():
    assert chosen([8192]) == "head_tail"
    assert dtcp.make_layout("auto", seq_len=8192, cp=4).name == "head_tail"
    assert chosen([16384, *[1024] * 16]) == "per_document"
    assert chosen([[16384, *[1024] * 16], [16384, 2048, *[1024] * 14]]) == "per_document"


def test_rows_count_together():
    assert chosen([*[1024] * 16, 16384]) == "per_document"
    # What one row gives a rank too much of, the other gives it too little of.
    assert chosen([[16384, *[1024] * 16], [*[1024] * 16, 16384]]) == "head_tail"


def test_what_is_even_in_any_layout_takes_the_simplest():
    assert dtcp.make_layout("auto", seq_len=8192, cp=4, is_causal=False).name == "contiguous"
    assert dtcp.make_layout("auto", seq_len=8192, cp=4, window_size=(127, 0)).name == "contiguous"
    assert dtcp.make_layout("auto", seq_len=8192, cp=1).name == "contiguous"


def test_auto_gives_the_layout_that_asking_for_its_name_gives():
    docs = dtcp.Documents.from_lengths([700, 9])
    layout = dtcp.make_layout("auto", seq_len=709, cp=3, documents=docs, multiple_of=2)
    again = dtcp.make_layout(layout.name, seq_len=709, cp=3, documents=docs, multiple_of=2)
    assert layout == again and layout.documents is docs


def test_a_choice_is_logged_once_with_its_figures(caplog):
    docs = dtcp.Documents.from_lengths([4321, 17])  # no other test chooses for these
    with caplog.at_level(logging.INFO, logger="dtcp"):
        for _ in range(2):
            name = dtcp.make_layout("auto", seq_len=4338, cp=2, documents=docs).name
    (record,) = [r for r in caplog.records if r.name == "dtcp.auto_layout"]
    assert f"layout auto took {name} for seq_len=4338 cp=2" in record.getMessage()
    for layout in LAYOUT_NAMES:
        pairs = max(dtcp.make_layout(layout, seq_len=4338, cp=2, documents=docs).attended_pairs(documents=docs))
        assert f"{layout} {pairs} pairs" in record.getMessage()


def test_a_window_that_causal_forbids_is_refused_by_every_layout():
    for name in ("auto", "striped"):
        with pytest.raises(ValueError, match=r"use \(3, 0\) or is_causal=False"):
            dtcp.make_layout(name, seq_len=8, cp=2, window_size=(3, 2))
