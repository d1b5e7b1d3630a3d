"""Documents made from lengths, running sums, ids and positions: they agree, come back, and say what is wrong."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtcp.documents import Documents, check_documents
from dtcp.remembered import Recent
from packing import LENGTHS, documents


def cumulated(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


@given(LENGTHS)
def test_all_ways_to_say_where_documents_lie_agree(lengths):
    expected = Documents.from_lengths(lengths)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    same = [
        Documents.from_lengths(torch.tensor(lengths, dtype=torch.int32), seq_len=sum(lengths)),
        Documents.from_lengths(np.array(lengths)),
        Documents.from_cu_seqlens(cumulated(lengths)),
        Documents.from_cu_seqlens(torch.tensor(cumulated(lengths), dtype=torch.int32)),
        Documents.from_cu_seqlens(expected.cu_seqlens),
        Documents.from_ids(ids * 3 + 5),
        Documents.from_ids(torch.from_numpy(ids)[None]),
        Documents.from_position_ids(positions),
        Documents.from_position_ids(expected.positions()),
    ]
    for made in same:
        assert made == expected and hash(made) == hash(expected)
    real = [length for length in lengths if length]
    assert expected.num_documents == len(real) and expected.max_len == max(real)
    assert expected.num_tokens == expected.seq_len == sum(lengths) and not expected.has_padding
    assert expected.ids.tolist() == np.repeat(np.arange(len(real)), real).tolist()
    assert expected.positions().tolist() == positions.tolist()
    assert expected.positions(restart=False).tolist() == list(range(sum(lengths)))
    assert expected.cu_seqlens.tolist() == cumulated(real) and expected.cu_seqlens.dtype == torch.int32


@given(st.one_of(documents(), documents(num_rows=3)))
def test_state_pickle_and_ids_bring_documents_back(docs):
    for again in (
        Documents.from_state(docs.state.clone()),
        pickle.loads(pickle.dumps(docs)),
        Documents.from_ids(docs.ids),
    ):
        assert again == docs and hash(again) == hash(docs) and torch.equal(again.state, docs.state)
    assert docs.state.shape == (2 + docs.num_rows * docs.seq_len,) and docs.state.dtype == torch.int64


@given(documents(num_rows=3))
def test_rows_are_those_of_documents_of_one_row(docs):
    alone = [docs.select_rows([row]) for row in range(3)]
    assert all(one.num_rows == 1 for one in alone)
    assert torch.equal(docs.ids, torch.stack([one.ids for one in alone]))
    assert torch.equal(docs.positions(), torch.stack([one.positions() for one in alone]))
    assert docs.select_rows(slice(1, 3)) == Documents.from_ids(docs.ids[1:])
    assert docs.select_rows([2, 0]) == Documents.from_ids(docs.ids[[2, 0]])
    assert docs.is_shared == (alone[0] == alone[1] == alone[2])
    assert docs.num_documents == sum(one.num_documents for one in alone)
    assert docs.num_tokens == int((docs.ids >= 0).sum())
    assert docs.cu_seqlens.tolist()[-1] == 3 * docs.seq_len


def test_documents_without_a_token_do_not_count():
    assert Documents.from_lengths([16, 24, 0, 0]) == Documents.from_lengths([0, 16, 0, 24])
    assert Documents.from_cu_seqlens([0, 16, 40, 40, 40]) == Documents.from_lengths([16, 24])


def test_padding_may_stand_between_documents_and_is_in_none():
    docs = Documents.from_ids([7, 7, -1, -100, 9, 9, 9, -1])
    assert docs.ids.tolist() == [0, 0, -1, -1, 1, 1, 1, -1]
    assert docs.has_padding and docs.num_documents == 2 and docs.num_tokens == 5 and docs.max_len == 3
    assert docs.positions().tolist() == [0, 1, 0, 1, 0, 1, 2, 0]
    assert docs.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert Documents.from_cu_seqlens([0, 2, 5], cu_seqlens_padded=[0, 4, 8]) == docs
    everything = Documents.from_ids([-1, -1])
    assert everything.max_len == everything.num_documents == everything.num_tokens == 0


def test_documents_that_touch_differ_from_one_of_both():
    assert Documents.from_lengths([2, 2]) != Documents.from_lengths([4])
    assert Documents.from_lengths([2, 2]) != Documents.from_ids([0, 0, -1, -1])
    assert Documents.from_lengths([4]) != Documents.from_lengths([[4], [4]])
    assert Documents.from_lengths([4]) != [4]


def test_one_row_holds_for_any_batch():
    docs = Documents.from_lengths([4, 12])
    assert docs.select_rows(slice(3, 5)) is docs
    docs.check_fits(16, batch_size=7)
    assert check_documents(docs) is docs and check_documents(None) is None


def test_returned_tensors_can_be_written_to_without_harm():
    docs = Documents.from_lengths([[1, 3], [2, 2]])
    for tensor in (docs.ids, docs.positions(), docs.cu_seqlens):
        tensor.fill_(9)
    one = Documents.from_lengths([1, 3])
    one.ids.fill_(9)
    assert docs.ids.tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]] and one.ids.tolist() == [0, 1, 1, 1]


def test_an_input_that_changes_later_does_not_change_documents():
    ids = torch.tensor([0, 0, 1, 1])
    docs = Documents.from_ids(ids)
    ids.fill_(0)
    assert docs == Documents.from_lengths([2, 2])


def test_repr_names_the_lengths_and_is_short():
    assert repr(Documents.from_lengths([4, 12])) == "Documents(seq_len=16, num_rows=1, lengths=[4, 12])"
    assert len(repr(Documents.from_lengths([[1] * 99] * 9))) < 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Documents.from_lengths([4, -1]), "0 or more, got -1 in row 0"),
        (lambda: Documents.from_lengths([4, 11], seq_len=16), "row 0 add up to 15, but the sequence has 16 tokens"),
        (lambda: Documents.from_lengths([[4, 12], [15]]), "row 1 add up to 15, but the sequence has 16 tokens"),
        (lambda: Documents.from_lengths([]), "at least 1 token, got 0"),
        (lambda: Documents.from_lengths([0, 0]), "at least 1 token, got 0"),
        (lambda: Documents.from_lengths([4.0, 12.0]), "lengths must be integers, got float64"),
        (lambda: Documents.from_lengths(torch.ones(2, 2, 2)), "lengths must be integers, got float32"),
        (lambda: Documents.from_cu_seqlens([4, 16]), r"begin with 0 and never fall, got \[4, 16\]; .*from_lengths"),
        (lambda: Documents.from_cu_seqlens([0, 8, 4]), r"never fall, got \[0, 8, 4\]"),
        (lambda: Documents.from_cu_seqlens([0, 8], seq_len=9), "cu_seqlens of row 0 add up to 8, but .* 9 tokens"),
        (
            lambda: Documents.from_cu_seqlens([0, 2], cu_seqlens_padded=[0, 2, 4]),
            r"as many entries, got \[2\] and \[3\]",
        ),
        (lambda: Documents.from_cu_seqlens([0, 3, 4], cu_seqlens_padded=[0, 2, 4]), "document 0 has 3 tokens .* for 2"),
        (lambda: Documents.from_ids([0, 0, 1, 0]), "id 0 comes back in row 0 after another id"),
        (lambda: Documents.from_ids([3, -1, 3]), "id 3 comes back"),
        (lambda: Documents.from_ids(torch.zeros(2, 2, 2, dtype=torch.int64)), r"and not empty, got shape \(2, 2, 2\)"),
        (lambda: Documents.from_ids([0.5]), "ids must be integers, got float64"),
        (lambda: Documents.from_position_ids([0, 1, 5, 6]), "restart at 0 .* got 5 for token 2 of row 0; .* from_ids"),
        (lambda: Documents.from_position_ids([[0, 1], [3, 4]]), "got 3 for token 0 of row 1"),
        (lambda: Documents.from_lengths([[1, 1]] * 2).select_rows([]), r"found none of 2 rows in \[\]"),
        (lambda: Documents.from_lengths([[1, 1]] * 2).select_rows(slice(5, 9)), "found none of 2 rows in slice"),
        (lambda: Documents.from_lengths([8]).check_fits(9), "add up to 8 tokens, but the sequence has 9"),
        (lambda: Documents.from_lengths(5), "document lengths must be a list or an integer tensor, got 5; .*: \\[5\\]"),
        (lambda: Documents.from_lengths([2**63]), "document lengths must be"),
        (lambda: Documents.from_lengths([[[1]]]), "document lengths of a row must be a list of numbers, got shape"),
        (lambda: Documents.from_lengths([5], seq_len=5.0), "seq_len must be an int, got 5.0"),
        (lambda: Documents.from_ids([]), "ids must be of shape .* and not empty"),
        (lambda: Documents.from_ids(torch.zeros(3, dtype=torch.int64, device="meta")), "ids is a tensor on the meta"),
        (lambda: Documents.from_lengths([[8], [3, 5]]).check_fits(8, 3), "describe 2 rows, but the batch has 3"),
        (lambda: check_documents([8]), "must be dtcp.Documents, got list; make them with"),
    ],
)
def test_what_is_wrong_is_named_with_the_cure(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_remembered_is_bounded_by_tokens_and_the_last_stay():
    recent: Recent[int, str] = Recent()
    for key in range(1000):
        recent.put(key, str(key), 1)
    assert len(recent) == 256 and recent.get(0) is None and recent.get(999) == "999"
    for key in range(6):
        recent.put(key, str(key), 1 << 22)
    assert len(recent) == 4 and recent.get(1) is None and recent.get(2) == "2"
    recent.put(6, "6", 1 << 22)  # 2 was used after 3
    assert recent.get(3) is None and recent.get(2) == "2"
    recent.put(6, "six", 1)
    recent.put(7, "7", 1)
    assert recent.get(6) == "six"
