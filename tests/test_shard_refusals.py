"""What cannot be cut or joined, told on every rank; and labels, which are shifted before the cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuts import cp_mesh, raises, same
from dtcp.documents import Documents
from dtcp.layout import make_layout
from dtcp.mesh import ParallelDims
from dtcp.shard import shard, shift_labels, unshard

# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_locally(rank, world):
    mesh = cp_mesh(world)
    layout = make_layout("head_tail", seq_len=8, cp=world)
    x = torch.zeros(2, 8)
    raises(lambda: shard(x[:, :6], mesh, layout), r"dim 1 .* of shape \(2, 6\) must have layout.seq_len=8 .* 6;")
    raises(lambda: shard(x, mesh, layout, dim=0), r"dim 0 .* layout.seq_len=8 slots, got 2; make the layout")
    raises(lambda: shard(x, mesh, layout, dim=2), r"dim=2 is out of range for a tensor of shape \(2, 8\); give its seq")
    raises(lambda: shard(x, mesh, layout, dim=-3), "dim=-3 is out of range")
    raises(lambda: shard(torch.tensor(1), mesh, layout, dim=0), r"dim=0 is out of range for a tensor of shape \(\)")
    wrong = make_layout("head_tail", seq_len=8, cp=world + 1)
    raises(lambda: shard(x, mesh, wrong), f"the layout is for cp={world + 1} but the mesh has {world} ranks; make it")
    raises(lambda: shard({"a": None, "b": ["text", 3]}, mesh, layout), "shard found no tensor in dict; pass a tensor")
    plane = ParallelDims(cp=world).build_mesh("cpu")
    raises(lambda: shard(x, plane, layout), r"shard needs the 1-D mesh of the cp axis, got a 5-D mesh .*mesh\['cp'\]")
    raises(lambda: unshard(x, plane, layout), "unshard needs the 1-D mesh")


@pytest.mark.parametrize("world", [1, 2])
def test_a_cut_that_does_not_fit_is_refused_with_value_and_cure(ranks, world):
    ranks.run(world, refuse_locally)


def join_differing(rank, world):
    """In each case the last rank differs. All ranks must raise, name the field and both values; then work again."""
    mesh = cp_mesh(world)
    layout = make_layout("head_tail", seq_len=4 * world, cp=world)
    last = rank == world - 1
    good = torch.zeros(2, 4)

    def check(bad, field, ours, theirs, good=good, layout=layout, bad_layout=None, dim=1, bad_dim=None):
        by_rank = ", ".join(f"{r}: {theirs if r == world - 1 else ours}" for r in range(world))
        with pytest.raises(ValueError) as info:
            unshard(
                bad if last else good,
                mesh,
                bad_layout if last and bad_layout else layout,
                dim=bad_dim if last and bad_dim is not None else dim,
            )
        assert f"{field} differs between the ranks of the group: {{{by_rank}}}" in str(info.value)
        messages.append(str(info.value))
        x = torch.arange(8.0 * world).view(2, -1)
        assert same(unshard(shard(x, mesh, layout), mesh, layout), x)

    messages = []
    check(torch.zeros(3, 4), "size of dim 0", 2, 3)
    check(torch.zeros(2, 3), "local length", 4, 3)
    check(torch.zeros(2, 4, 5), "size of dim 2", 3, 5, good=torch.zeros(2, 4, 3))
    check(torch.zeros(2, 4, 1), "number of dims", 2, 3)
    check(torch.zeros(4), "number of dims", 2, 1)
    check(torch.zeros(()), "number of dims", 2, 0)
    check(good.double(), "dtype", "'float32'", "'float64'")
    check(good.int(), "dtype", "'float32'", "'int32'")
    check(torch.zeros(4, 4), "dim", 1, 0, good=torch.zeros(4, 4), bad_dim=0)
    check(torch.zeros(2, 4), "dim", 1, 3, bad_dim=3)
    nine = [torch.zeros(1, 4, 1, 1, 1, 1, 1, n) for n in (2, 3)]
    check(nine[1], "number of elements", 8, 12, good=nine[0])
    contiguous = make_layout("contiguous", seq_len=4 * world, cp=world)
    check(good, "layout (0 contiguous, 1 head_tail, 2 striped, 3 per_document)", 1, 0, bad_layout=contiguous)
    shorter = make_layout("head_tail", seq_len=4 * world - 1, cp=world)
    check(good, "seq_len", 4 * world, 4 * world - 1, bad_layout=shorter)
    coarser = make_layout("head_tail", seq_len=4 * world, cp=world, multiple_of=4)
    check(good, "multiple_of", 1, 4, bad_layout=coarser)
    check(good.clone().requires_grad_(), "requires_grad", 0, 1)
    return messages


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parts_that_differ_between_ranks_are_refused_on_all_of_them_with_the_values_by_rank(ranks, world):
    every = ranks.run(world, join_differing)
    # The rank whose own part does not fit says that first.
    own = "unshard: dim 1 of a tensor of shape (2, 3) must have layout.local_seq_len=4 slots, got 3; make"
    assert every[-1][1].startswith(own)
    assert f"rank(s) [{world - 1}] of the group refused their arguments" in every[0][1]


def refuse_alone(rank, world):
    """What one rank alone cannot pass on is told to the others, who would wait for it."""
    mesh, layout = cp_mesh(world), make_layout("striped", seq_len=6, cp=world)
    x = torch.arange(12.0).view(2, 6)
    local = shard(x, mesh, layout)
    bad = [
        (lambda: unshard(local, mesh, make_layout("striped", seq_len=6, cp=world + 1)), "the layout is for cp=4 but"),
        (lambda: unshard({}, mesh, layout), "unshard found no tensor in dict"),
        (lambda: unshard({"a": {1, 2}}, mesh, layout), "got set at 'a'"),
    ]
    for call, message in bad:
        if rank == 1:
            raises(call, message)
        else:
            told = r"unshard: rank\(s\) \[1\] of the group refused their arguments; see their error"
            raises(lambda: unshard(local, mesh, layout), told, RuntimeError)
        assert same(unshard(local, mesh, layout), x)


def test_a_rank_that_refuses_alone_is_reported_by_the_others(ranks):
    ranks.run(3, refuse_alone)


# ---- labels ----------------------------------------------------------------------------------------------------------


def cut_labels(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=8, cp=world)
    return shard(shift_labels(torch.arange(8).view(1, 8)), mesh, layout, pad_value=-100).tolist()


def test_labels_shifted_before_the_cut_cross_the_cuts(ranks):
    # ids 0..7: rank 0 holds tokens 0 1 6 7. Shifted after the cut, token 1 would be told to predict 6.
    assert ranks.run(2, cut_labels) == [[[1, 2, 7, -100]], [[3, 4, 5, 6]]]


def test_shift_labels_takes_the_next_token_or_label():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    before = tokens.clone()
    assert shift_labels(tokens).tolist() == [[6, 7, -100], [9, 10, -100]]
    assert shift_labels(tokens, ignore_index=-1).tolist() == [[6, 7, -1], [9, 10, -1]]
    assert shift_labels(tokens.int()).dtype == torch.int32
    masked = torch.tensor([[-100, 6, 7], [-100, -100, 10]])
    assert shift_labels(tokens, masked).tolist() == [[6, 7, -100], [-100, 10, -100]]
    assert shift_labels(tokens.to(torch.uint8), masked).tolist() == shift_labels(tokens, masked).tolist()
    assert shift_labels(tokens.to(torch.uint8), ignore_index=255).tolist() == [[6, 7, 255], [9, 10, 255]]
    assert shift_labels(tokens[0]).tolist() == [6, 7, -100]
    assert shift_labels(tokens[:, :1]).tolist() == [[-100], [-100]]
    assert shift_labels(tokens[:, :0]).shape == (2, 0)
    assert shift_labels(torch.arange(4).expand(2, 4)).tolist() == [[1, 2, 3, -100]] * 2
    assert shift_labels(tokens.view(1, 2, 3)).shape == (1, 2, 3)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize(
    ("dtype", "ignore_index"),
    [
        (torch.float32, -100), (torch.bool, -100), (torch.uint8, -100), (torch.int8, -1000), (torch.complex64, -100),
        (torch.uint16, -100), (torch.int64, 0.5),
    ],
)  # fmt: skip
def test_shift_labels_refuses_a_dtype_that_cannot_hold_the_ignore_index(dtype, ignore_index):
    with pytest.raises(ValueError, match=rf"integer dtype that holds ignore_index={ignore_index}, got {dtype}; use"):
        shift_labels(torch.zeros(1, 4).to(dtype), ignore_index=ignore_index)


def test_shift_labels_refuses_other_shapes_and_shifts():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens \(…, S\) and labels of the same shape, got \(2, 4\) and \(2, 3\)"):
        shift_labels(tokens, tokens[:, 1:])
    with pytest.raises(ValueError, match=r"got \(\) and \(\)"):
        shift_labels(tokens[0, 0])
    for shift in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match=f"shift must be an int of at least 1, got {shift}; 1 predicts the next"):
            shift_labels(tokens, shift=shift)


def test_shift_labels_refuses_documents_of_another_kind_length_or_batch():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"documents must be dtcp.Documents, got list; make them with"):
        shift_labels(tokens, documents=[4, 4])
    with pytest.raises(ValueError, match="documents add up to 5 tokens, but the sequence has 4"):
        shift_labels(tokens, documents=Documents.from_lengths([5]))
    three = Documents.from_lengths([[4]] * 3)
    with pytest.raises(ValueError, match="documents describe 3 rows, but the batch has 2; .*select_rows"):
        shift_labels(tokens, documents=three)
    with pytest.raises(ValueError, match="documents describe 3 rows, but the batch has 1"):
        shift_labels(tokens[0], documents=three)


def test_the_last_tokens_of_a_document_and_padding_have_no_target():
    tokens = torch.arange(10, 18).view(1, 8)
    documents = Documents.from_ids([0, 0, 0, -1, -1, 1, 2, 2])
    assert shift_labels(tokens, documents=documents).tolist() == [[11, 12, -100, -100, -100, -100, 17, -100]]
    assert shift_labels(tokens, documents=documents, shift=2).tolist() == [[12] + [-100] * 7]
    assert shift_labels(tokens, documents=documents, shift=9, ignore_index=-1).tolist() == [[-1] * 8]
    assert shift_labels(tokens[0].to(torch.uint8), documents=documents, ignore_index=0).tolist()[:3] == [11, 12, 0]


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.booleans(), st.booleans())
def test_targets_are_those_of_each_document_alone(data, rows, shift, has_labels, is_deep):
    lengths = [data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)) for _ in range(rows)]
    size = max(1, *(sum(row) for row in lengths))
    ids = torch.full((rows, size), -1)
    tokens, labels = torch.arange(rows * size).view(rows, size), torch.arange(rows * size).view(rows, size) * 3 + 1
    expected = torch.full_like(tokens, -100)
    for row in range(rows):
        start = size - sum(lengths[row])  # padding comes first, if any
        for number, length in enumerate(lengths[row]):
            ids[row, start : start + length] = number
            for i in range(start, start + length - shift):
                expected[row, i] = (labels if has_labels else tokens)[row, i + shift]
            start += length
    if is_deep:
        tokens, labels, expected = (x.unsqueeze(1).expand(rows, 2, size) for x in (tokens, labels, expected))
    found = shift_labels(tokens, labels if has_labels else None, Documents.from_ids(ids), shift=shift)
    assert torch.equal(found, expected)


def test_shift_labels_with_other_documents_in_each_step_compiles_once():
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: shift_labels(args[0], None, args[1]), fullgraph=True, backend=counter)
    tokens = torch.arange(14).view(2, 7)
    for lengths in ([[3, 4], [7]], [[7], [1, 6]], [[2, 5]] * 2):
        documents = Documents.from_lengths(lengths)
        assert torch.equal(compiled(tokens, documents), shift_labels(tokens, documents=documents))
    assert counter.frame_count == 1
