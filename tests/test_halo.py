"""Tokens from around a rank's own: against the whole sequence on one process, in float64, forward and backward."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cuts import cp_mesh, layout_of, raises, same, some_documents
from dtcp.collectives import agree
from dtcp.documents import Documents
from dtcp.halo import halo_exchange
from dtcp.halo_plan import FILLED, num_slots_at_most, plan_halo
from dtcp.layout import LAYOUT_NAMES, make_layout
from dtcp.shard import shard, shift_labels, unshard

ROWS = 2


def document_ids(documents, seq_len):
    ids = torch.zeros(1, seq_len, dtype=torch.int64) if documents is None else documents.ids
    return ids.expand(ROWS, seq_len)


def shifted_by_hand(x, documents, offset, pad_value=0.0):
    """(B, S, …): for each token the one ``offset`` before it in its document."""
    ids, size = document_ids(documents, x.size(1)).tolist(), x.size(1)
    seen = [[0 <= i - offset < size and row[i] == row[i - offset] >= 0 for i in range(size)] for row in ids]
    is_seen = torch.tensor(seen).view(*x.shape[:2], *[1] * (x.ndim - 2))
    return torch.where(is_seen, x.roll(offset, dims=1), pad_value)


def problems(world, seq_len):
    """(layout, documents): every layout, without documents, with the same and with others in each row."""
    with_padding = some_documents(seq_len, ROWS, is_padded=True)
    for name in LAYOUT_NAMES:
        yield layout_of(name, seq_len, world), None
        yield layout_of(name, seq_len, world, multiple_of=3), some_documents(seq_len)
        yield layout_of(name, seq_len, world), with_padding
    yield make_layout("per_document", seq_len=seq_len, cp=world, documents=with_padding), with_padding
    yield make_layout("per_document", seq_len=seq_len, cp=world, documents=with_padding), None


def shift_everywhere(rank, world):
    mesh = cp_mesh(world)
    for seq_len, left, right in ((1, 1, 1), (13, 9, 0), (12, 2, 13)):
        x = torch.randn(ROWS, seq_len, 2)
        for layout, documents in problems(world, seq_len):
            local = shard(x, mesh, layout, pad_value=float("nan"))
            halo = halo_exchange(local, mesh, layout, left=left, right=right, documents=documents, pad_value=-9)
            for offset in {-right, -1 * (right > 0), 0, 1 * (left > 0), 2 * (left > 1), left}:
                expected = shard(shifted_by_hand(x, documents, offset, -9), mesh, layout, pad_value=-9)
                assert same(halo.shift(offset), expected), (layout, documents, offset)
            windows = halo.windows()
            assert windows.shape == (*local.shape, left + 1 + right)
            assert same(windows[..., 0], halo.shift(left))
            assert same(windows[..., -1], halo.shift(-right))


@pytest.mark.parametrize(
    "world", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_token_reads_those_around_it_in_its_document_whatever_the_layout(ranks, world):
    ranks.run(world, shift_everywhere)


def convolve_by_hand(x, weight, documents):
    """Depthwise causal convolution (B, C, S) of each document by itself; padding reads and gives nothing."""
    ids, out = document_ids(documents, x.size(2)), torch.zeros_like(x)
    for row in range(x.size(0)):
        for number in ids[row].unique().tolist():
            if number >= 0:
                where = (ids[row] == number).nonzero().squeeze(1)
                padded = F.pad(x[row][:, where], (weight.size(2) - 1, 0))
                out = out.index_put(
                    (torch.tensor(row), torch.arange(x.size(1)).unsqueeze(1), where),
                    F.conv1d(padded, weight, groups=x.size(1)),
                )
    return out


def convolve(rank, world):
    mesh = cp_mesh(world)
    for seq_len, width in ((13, 8),):  # chunks of 4, 3 and 2 tokens at cp 2, 3, 4: from several ranks
        generator = torch.Generator().manual_seed(seq_len)
        data, grad_out = (torch.randn(ROWS, 3, seq_len, dtype=torch.float64, generator=generator) for _ in range(2))
        kernel = torch.randn(3, 1, width, dtype=torch.float64, generator=generator)
        for layout, documents in problems(world, seq_len):
            x, weight = data.clone().requires_grad_(), kernel.clone().requires_grad_()
            whole = convolve_by_hand(x, weight, documents)
            expected = torch.autograd.grad(whole, (x, weight), grad_out)

            where = {"dim": 2, "batch_dim": 0}
            leaf, own_weight = data.clone().requires_grad_(), kernel.clone().requires_grad_()
            local = shard(leaf, mesh, layout, pad_value=float("nan"), **where)
            halo = halo_exchange(local, mesh, layout, left=width - 1, documents=documents, **where)
            out = halo.take(F.conv1d(halo.extended, own_weight, groups=3))
            also = halo.take(F.conv1d(F.pad(halo.extended, (width - 1, 0)), own_weight, groups=3))
            assert torch.allclose(unshard(out.detach(), mesh, layout, **where), whole, rtol=0, atol=1e-13)
            assert torch.allclose(also, out, rtol=0, atol=1e-13)
            grads = torch.autograd.grad(out, (leaf, own_weight), shard(grad_out, mesh, layout, **where))
            for grad, reference in zip(grads, expected, strict=True):
                dist.all_reduce(grad)  # each rank has its own tokens' share
                assert torch.allclose(grad, reference, rtol=0, atol=1e-12), (layout, documents)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_causal_convolution_of_the_parts_is_that_of_the_whole_forward_and_backward(ranks, world):
    ranks.run(world, convolve)


def shift_labels_by_halo(rank, world):
    mesh = cp_mesh(world)
    for seq_len in (5, 13):
        tokens = torch.arange(ROWS * seq_len).view(ROWS, seq_len)
        for layout, documents in problems(world, seq_len):
            halo = halo_exchange(
                shard(tokens, mesh, layout), mesh, layout, left=0, right=6, documents=documents, pad_value=-100
            )
            for k in (1, 2, 6):
                expected = shift_labels(tokens, documents=documents, shift=k)
                if k >= seq_len:
                    assert (expected == -100).all()
                assert same(halo.shift(-k), shard(expected, mesh, layout, pad_value=-100)), (layout, documents, k)


@pytest.mark.parametrize("world", [1, 3])
def test_labels_shifted_across_the_cuts_are_labels_shifted_before_the_cut(ranks, world):
    ranks.run(world, shift_labels_by_halo)


def differentiate_twice(rank, world):
    mesh = cp_mesh(world)
    for layout, documents in problems(world, 7):
        x = torch.randn(ROWS, 7, dtype=torch.float64, requires_grad=True)
        whole = sum((shifted_by_hand(x, documents, k) * (k + 2)) ** 3 for k in (-1, 0, 2)).sum()
        (first,) = torch.autograd.grad(whole, x, create_graph=True)
        (expected,) = torch.autograd.grad((first**2).sum(), x)
        local = shard(x.detach(), mesh, layout).requires_grad_()
        halo = halo_exchange(local, mesh, layout, left=2, right=1, documents=documents)
        cubes = sum((halo.shift(k) * (k + 2)) ** 3 for k in (-1, 0, 2)).sum()
        (grad,) = torch.autograd.grad(cubes, local, create_graph=True)
        assert torch.allclose(grad, shard(first.detach(), mesh, layout), rtol=1e-12)
        (second,) = torch.autograd.grad((grad**2).sum(), local)
        assert torch.allclose(second, shard(expected, mesh, layout), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [1, 3])
def test_second_derivatives_pass_through_an_exchange(ranks, world):
    ranks.run(world, differentiate_twice)


def exchange_dtypes(rank, world):
    from dtcp.collectives import DTYPES

    mesh, layout = cp_mesh(world), make_layout("striped", seq_len=7, cp=world)
    for dtype in DTYPES:
        if dtype == torch.float8_e8m0fnu:  # has no zero, to fill with
            continue
        x = (torch.arange(28.0).view(ROWS, 7, 2) % 5).to(dtype)
        expected = torch.cat([torch.zeros(ROWS, 2, 2).to(dtype), x[:, :5]], 1)
        halo = halo_exchange(shard(x, mesh, layout), mesh, layout, left=2)
        assert same(halo.shift(2), shard(expected, mesh, layout)), dtype
    z = torch.randn(ROWS, 7, 2, dtype=torch.complex64)
    local = shard(z, mesh, layout).conj()
    expected = torch.cat([torch.zeros(ROWS, 1, 2), z.conj().resolve_conj()[:, :6]], 1)
    assert same(halo_exchange(local, mesh, layout, left=1).shift(1), shard(expected, mesh, layout))
    for shape in ((0, 7), (ROWS, 7, 0)):
        x = torch.zeros(shape, requires_grad=True)
        halo_exchange(shard(x, mesh, layout), mesh, layout, left=2).shift(1).sum().backward()
        assert x.grad.shape == shape
    # 256 + 1 + 1 is 256 in bf16: gradients from other ranks are summed in float32.
    x = torch.zeros(1, layout.local_seq_len, dtype=torch.bfloat16, requires_grad=True)
    windows = halo_exchange(x, mesh, layout, left=2).windows()
    windows.backward(torch.tensor([1.0, 1.0, 256.0], dtype=torch.bfloat16).expand_as(windows))
    gathered = unshard(x.grad, mesh, layout)
    assert gathered.tolist() == [[258.0] * 5 + [256.0, 256.0]]  # 257 is no bf16 number: half to even


def test_every_dtype_travels_and_half_precision_gradients_are_summed_in_float32(ranks):
    ranks.run(2, exchange_dtypes)


def leave_pads_alone(rank, world):
    """NaN in pads and padding, and in the gradients that come to them, reaches no token."""
    mesh, documents = cp_mesh(world), Documents.from_ids([0, 0, 0, -1, -1, 1, 1])
    is_real = torch.tensor([1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    x = torch.where(is_real, torch.randn(ROWS, 7), float("nan"))
    for name in ("head_tail", "striped"):
        layout = make_layout(name, seq_len=7, cp=world, multiple_of=2)
        local = shard(x, mesh, layout, pad_value=float("nan")).requires_grad_()
        valid = shard(is_real.expand(ROWS, 7), mesh, layout, pad_value=False)
        halo = halo_exchange(local, mesh, layout, left=4, right=4, documents=documents)
        windows = halo.windows()
        assert not windows.isnan().any()
        windows.backward(torch.where(valid, 1.0, float("nan")).unsqueeze(-1).expand_as(windows))
        assert not local.grad.isnan().any()
        assert not local.grad[~valid].any()
        lengths = torch.tensor([3.0, 3, 3, 0, 0, 2, 2]).expand(ROWS, 7)
        assert torch.equal(local.grad, shard(lengths, mesh, layout))


@pytest.mark.parametrize("world", [1, 2])
def test_pads_and_padding_are_neither_read_nor_given_gradients(ranks, world):
    ranks.run(world, leave_pads_alone)


# ---- what travels ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    name=st.sampled_from(LAYOUT_NAMES), seq_len=st.integers(1, 30), cp=st.integers(1, 5), rows=st.integers(1, 3),
    left=st.integers(0, 40), right=st.integers(0, 5), has_documents=st.booleans(), is_padded=st.booleans(),
)  # fmt: skip
def test_plans_of_all_ranks_fit_together_and_each_token_goes_once(
    name, seq_len, cp, rows, left, right, has_documents, is_padded
):
    layout = layout_of(name, seq_len, cp, rows)
    documents = some_documents(seq_len, rows, is_padded) if has_documents else None
    num_rows = rows if has_documents else layout.num_rows
    plans = [plan_halo(layout, documents, left, right, num_rows, rank) for rank in range(cp)]
    ids = torch.zeros(num_rows, seq_len, dtype=torch.int64) if documents is None else documents.ids.view(num_rows, -1)
    tables = []
    for rank in range(cp):
        positions = layout.positions(rank).expand(num_rows, -1)
        is_token = positions < seq_len
        tables.append(
            torch.where(is_token, positions + seq_len * torch.arange(num_rows).unsqueeze(1), FILLED).flatten()
        )
    starts = [[sum(plan.num_sent[:r]) for r in range(cp + 1)] for plan in plans]
    for rank, plan in enumerate(plans):
        received = []
        for sender, other in enumerate(plans):
            assert other.num_sent[rank] == plan.num_received[sender]
            sent = other.send[starts[sender][rank] : starts[sender][rank + 1]]
            received.append(tables[sender][torch.from_numpy(sent)])
        arrived = torch.cat(received)
        assert len(arrived.unique()) == len(arrived)
        assert not torch.isin(arrived, tables[rank]).any(), "nobody is sent what is its own"
        assert plan.num_slots <= num_slots_at_most(layout, has_documents, left, right)
        values = torch.cat([tables[rank], arrived, torch.tensor([FILLED])])
        extended = values[torch.from_numpy(plan.source)].view(num_rows, -1)
        assert torch.isin(arrived, extended).all(), "nothing is sent in vain"
        for row, slots in enumerate(plan.slots):
            for slot, position in zip(
                slots.tolist(), layout.positions(rank).expand(num_rows, -1)[row].tolist(), strict=True
            ):
                for offset in (-right, -1, 0, 1, left):
                    if not -right <= offset <= left:
                        continue
                    j = position - offset
                    is_seen = position < seq_len and 0 <= j < seq_len and ids[row, position] == ids[row, j] >= 0
                    expected = j + row * seq_len if is_seen else FILLED
                    assert extended[row, slot - offset] == expected, (rank, row, position, offset)


def count_bytes(rank, world):
    from dtcp import collectives

    mesh, sent = cp_mesh(world), []

    def record(rows, num_sent, num_received, group):
        sent.append(sum(num_sent) * rows[:1].numel() * rows.element_size())
        return exchange_rows(rows, num_sent, num_received, group)

    exchange_rows = collectives.exchange_rows
    from dtcp import halo_ops

    with mock.patch.object(halo_ops, "exchange_rows", record):
        for name in ("contiguous", "head_tail", "striped"):
            layout = make_layout(name, seq_len=16 * world, cp=world)
            x = torch.randn(ROWS, layout.local_seq_len, 3, requires_grad=True)
            halo_exchange(x, mesh, layout, left=3).windows().sum().backward()
    row = ROWS * 3 * 4
    return [n / row for n in sent]


def test_only_the_rows_that_another_rank_lacks_travel_in_one_exchange_each_way(ranks):
    # Contiguous: 3 rows to the next rank, and their gradients back. Head-tail: to the holders of the next chunks.
    # Striped, 48 tokens: each goes to both other ranks, but 46 to rank 2 alone, and 47 to nobody.
    by_rank = ranks.run(3, count_bytes)
    assert [sent[:2] for sent in by_rank] == [[3, 0], [3, 3], [0, 3]]
    assert [sent[2:4] for sent in by_rank] == [[3, 3], [6, 6], [3, 3]]
    assert [sent[4:] for sent in by_rank] == [[32, 30], [31, 31], [30, 32]]


# ---- compiled --------------------------------------------------------------------------------------------------------


def compile_exchange(rank, world, name):
    import torch._dynamo.testing

    mesh = cp_mesh(world)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, weight, layout, documents):
        halo = halo_exchange(x * 2, mesh, layout, left=2, right=1, documents=documents, dim=2)
        return halo.take(F.conv1d(halo.extended, weight, groups=3)), halo.shift(-1)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for lengths in ([[13], [3, 10]], [[1, 12], [2, 2, 9]], [[0, 13], [1] * 13], [[5, 8], [8, 5]]):
        documents = None if name == "contiguous" else Documents.from_lengths(lengths)
        layout = make_layout(name, seq_len=13, cp=world, documents=documents)
        x = torch.randn(2, 3, layout.local_seq_len, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
        results = []
        for fn in (step, compiled):
            out, shifted = fn(x, weight, layout, documents)
            grads = torch.autograd.grad(out.square().sum() + shifted.sum(), (x, weight))
            results.append((out, shifted, *grads))
        for eager, traced in zip(*results, strict=True):
            assert torch.allclose(eager, traced, rtol=1e-12, atol=1e-12)
    return counter.frame_count


@pytest.mark.parametrize(
    "name", ["per_document", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUT_NAMES[:3])]
)
def test_an_exchange_compiles_and_other_documents_cost_no_recompilation(ranks, name):
    assert ranks.run(2, compile_exchange, name) == [1, 1]


def check_ops(rank, world):
    from dtcp import halo_ops

    mesh, documents = cp_mesh(world), some_documents(6, ROWS)
    layout = make_layout("per_document", seq_len=6, cp=world, documents=documents)
    group = mesh.get_group().group_name
    for x, state, num_rows in ((torch.randn(ROWS, 3, 2), documents.state, ROWS), (torch.randn(ROWS, 3), None, ROWS)):
        for needs_grad in (False, True):
            arguments = (layout.state, state, 16, num_rows, group, 2, 1, 1, 0, 0, needs_grad)
            # opcheck compares the outputs of two runs, and each call has another number.
            with mock.patch.object(halo_ops, "agree", lambda *args, **kwargs: 7 * bool(agree(*args, **kwargs))):
                torch.library.opcheck(halo_ops.halo_op, (x.clone().requires_grad_(needs_grad), *arguments))


def test_opcheck_passes_with_and_without_gradients(ranks):
    ranks.run(2, check_ops)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=8, cp=world)
    x = torch.zeros(ROWS, layout.local_seq_len, 2)

    def exchange(x=x, layout=layout, left=1, **options):
        return halo_exchange(x, mesh, layout, left=left, **options)

    raises(lambda: exchange(left=-1), "halo_exchange: left must be an int of at least 0, got -1")
    raises(lambda: exchange(right=1.5), "right must be an int of at least 0, got 1.5")
    raises(lambda: exchange(x[:, :1]), "must have layout.local_seq_len=.* slots, got 1")
    raises(lambda: exchange(dim=3), "dim=3 is out of range")
    raises(lambda: exchange(x.long(), pad_value=0.5), "halo_exchange: pad_value=0.5 does not fit torch.int64")
    raises(lambda: exchange(layout=make_layout("striped", seq_len=8, cp=7)), "the layout is for cp=7 but the mesh has")
    raises(lambda: exchange(documents=[8]), "documents must be dtcp.Documents, got list")
    raises(lambda: exchange(documents=Documents.from_lengths([9])), "documents add up to 9 tokens, but the sequence")
    three = Documents.from_lengths([[8], [4, 4], [2, 6]])
    raises(lambda: exchange(documents=three), "documents describe 3 rows, but the batch has 2")
    raises(lambda: exchange(documents=three, batch_dim=1), "documents describe 3 rows, and batch_dim=1 is no dim of")
    placed = make_layout("per_document", seq_len=8, cp=world, documents=three)
    raises(lambda: exchange(layout=placed), "must have layout.num_rows=3 rows, got 2")
    halo = exchange(right=2)
    raises(lambda: halo.shift(2), r"shift\(2\) looks beyond a halo of left=1, right=2; ask halo_exchange for left=2")
    raises(lambda: halo.shift(-3), r"shift\(-3\) looks beyond .*; ask halo_exchange for right=3")
    raises(lambda: halo.take(x[:, :1]), r"take needs \d+ results along dim 1, or \d+ of a convolution without padding")


@pytest.mark.parametrize("world", [1, 2])
def test_an_exchange_that_cannot_be_is_refused_with_value_and_cure(ranks, world):
    ranks.run(world, refuse)


def differ(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=8, cp=world)
    x, last = torch.zeros(ROWS, layout.local_seq_len), rank == world - 1
    one, other = Documents.from_lengths([4, 4]), Documents.from_lengths([3, 5])

    def check(field, part=x, **options):
        call = {"left": 2, **(options if last else {})}
        raises(lambda: halo_exchange(part, mesh, layout, **call), f"{field} differs between the ranks of the group")
        assert halo_exchange(x, mesh, layout, left=1).shift(1).shape == x.shape

    check("left", left=3)
    check("right", right=1)
    check(r"documents \(hash\)", documents=one)
    check("dtype", part=x.double() if last else x)
    check("requires_grad", part=x.clone().requires_grad_(last))
    raises(
        lambda: halo_exchange(x, mesh, layout, left=1, documents=other if last else one), r"documents \(hash\) differs"
    )
    # One rank refuses its arguments by itself, or is somewhere else.
    if last:
        raises(lambda: halo_exchange(x, mesh, layout, left=-1), "left must be")
        raises(lambda: unshard(x, mesh, layout), "different operations", RuntimeError)
    else:
        told = rf"halo_exchange: rank\(s\) \[{world - 1}\] of the group refused their arguments"
        raises(lambda: halo_exchange(x, mesh, layout, left=1), told, RuntimeError)
        raises(lambda: halo_exchange(x, mesh, layout, left=1), "different operations", RuntimeError)
    # Backwards of different calls.
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    results = [halo_exchange(leaf, mesh, layout, left=1).shift(1).sum() for leaf in leaves]
    raises(lambda: results[last].backward(), "halo_exchange: .* run the backwards of different calls", RuntimeError)


def test_ranks_in_different_exchanges_are_refused_on_all_of_them(ranks):
    ranks.run(3, differ)
