"""Cut and join: values, dtypes, memory. Every tensor comes back bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuts import cp_mesh, cut_by_hand, inputs, layout_of, layouts, raises, same
from dtcp.layout import LAYOUT_NAMES, make_layout
from dtcp.shard import shard, unshard

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def cut_and_join(rank, world):
    mesh = cp_mesh(world)
    for layout in layouts(world):
        for x, dim in inputs(layout.seq_len):
            local = shard(x, mesh, layout, dim=dim, pad_value=-7)
            assert same(local, cut_by_hand(x, layout, rank, dim, -7)), (layout, dim)
            assert local.is_contiguous()
            whole = unshard(local, mesh, layout, dim=dim)
            assert same(whole, x), (layout, dim)
            assert whole.is_contiguous()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_rank_holds_its_layouts_tokens_and_the_join_is_the_whole_in_order(ranks, world):
    ranks.run(world, cut_and_join)


def cut_every_dtype(rank, world):
    mesh = cp_mesh(world)
    layout = make_layout("head_tail", seq_len=7, cp=world, multiple_of=2)
    more = (torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.complex128, torch.float8_e5m2, torch.complex32)
    for dtype in DTYPES + more:
        numbers = torch.arange(42.0).reshape(2, 7, 3)
        x = numbers % 3 == 0 if dtype == torch.bool else numbers.to(dtype)
        for pad_value in (0, 1):
            local = shard(x, mesh, layout, pad_value=pad_value)
            assert same(local, cut_by_hand(x, layout, rank, 1, pad_value)), dtype
            assert same(unshard(local, mesh, layout), x), dtype


@pytest.mark.parametrize("world", [1, 3])
def test_every_dtype_makes_the_round_trip(ranks, world):
    ranks.run(world, cut_every_dtype)


def cut_special_values(rank, world):
    mesh = cp_mesh(world)
    layout = make_layout("striped", seq_len=5, cp=world)
    extremes = torch.tensor([[2**63 - 1, -(2**63), 2**53 + 1, -1, 0]])
    assert same(unshard(shard(extremes, mesh, layout, pad_value=-100), mesh, layout), extremes)
    numbers = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 0.0]])
    assert same(unshard(shard(numbers, mesh, layout), mesh, layout), numbers)
    z = torch.tensor([[1 + 2j, 3 - 1j, 0j, 5j, 1]], dtype=torch.complex64)
    assert same(unshard(shard(z.conj(), mesh, layout), mesh, layout), z.conj().resolve_conj())
    conjugate = shard(z, mesh, layout).conj()
    assert same(unshard(conjugate, mesh, layout), z.conj().resolve_conj())
    assert same(unshard(conjugate.imag, mesh, layout), z.conj().resolve_conj().imag.resolve_neg())


def test_extreme_integers_nan_infinity_and_conjugates_come_back_bit_by_bit(ranks):
    ranks.run(2, cut_special_values)


# Seven tokens on two ranks make one pad, on one rank; every rank has to give the same verdict.
def pad_with(rank, world):
    mesh, layout = cp_mesh(world), make_layout("contiguous", seq_len=7, cp=world)
    ints, floats = torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1, 7)

    def pad(x, value):
        return shard(x, mesh, layout, pad_value=value)

    if rank == 1:
        assert pad(ints, -100)[0, -1].item() == -100
        assert pad(ints, -(2**63))[0, -1].item() == -(2**63)
        assert pad(ints.bool(), True)[0, -1].item() is True
        assert pad(floats, float("nan"))[0, -1].isnan()
        assert pad(floats.half(), float("-inf"))[0, -1].item() == -float("inf")
        assert pad(floats, 0.1)[0, -1].item() == torch.tensor(0.1).item()
        assert pad(floats.to(torch.complex64), 0.5)[0, -1].item() == 0.5
    raises(lambda: pad(ints.to(torch.uint8), -100), r"pad_value=-100 does not fit torch.uint8 \(0..255\); give another")
    raises(lambda: pad(ints, 0.5), "pad_value=0.5 does not fit torch.int64")
    raises(lambda: pad(ints, float("nan")), "pad_value=nan does not fit torch.int64")
    raises(lambda: pad(ints, float("inf")), "pad_value=inf does not fit torch.int64")
    raises(lambda: pad(ints, 2**63), "does not fit torch.int64")
    raises(lambda: pad(ints.bool(), 2), r"pad_value=2 does not fit torch.bool \(False or True\)")
    raises(lambda: pad(floats.half(), 1e30), r"pad_value=1e\+30 does not fit torch.float16")
    raises(lambda: pad(floats, 1e300), "does not fit torch.float32")
    raises(lambda: pad(floats.to(torch.float8_e4m3fn), 1000), "does not fit torch.float8_e4m3fn")
    # Without pads the value is not looked at.
    even = make_layout("contiguous", seq_len=6, cp=world)
    assert shard(ints[:, :6].to(torch.uint8), mesh, even, pad_value=-100).sum() == 0


def test_a_pad_value_fits_the_dtype_or_is_refused_on_every_rank(ranks):
    ranks.run(2, pad_with)


def cut_unusual_inputs(rank, world):
    mesh = cp_mesh(world)
    for name in LAYOUT_NAMES:
        for seq_len in (16, 13, 1):
            layout = layout_of(name, seq_len, world)
            base = torch.randn(2, seq_len + 5)
            cases = [
                (torch.arange(seq_len).expand(2, seq_len), 1),
                (torch.randn(1, 1).expand(3, seq_len), 1),
                (base[:, :seq_len], 1),
                (base[:, 2 : seq_len + 2], -1),
                (torch.randn(seq_len, 3).t(), 1),
                (torch.randn(2, 3, 2, seq_len).permute(0, 3, 1, 2), 1),
                (torch.randn(2, 4, 3, seq_len).to(memory_format=torch.channels_last), 3),
                (torch.randn(2, 2 * seq_len)[:, ::2], 1),
            ]
            for x, dim in cases:
                before, storage = x.clone(), x.untyped_storage().data_ptr()
                base_before = base.clone()
                local = shard(x, mesh, layout, dim=dim)
                assert same(local, cut_by_hand(x, layout, rank, dim))
                assert local.is_contiguous()
                # The result owns its storage: writing to it reaches nothing else.
                assert local.untyped_storage().data_ptr() != storage
                whole = unshard(local, mesh, layout, dim=dim)
                assert whole.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
                local.fill_(77)
                assert same(whole, before)
                assert same(x, before)
                assert same(base, base_before)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_views_and_expanded_inputs_are_never_written_to_and_share_nothing_with_the_result(ranks, world):
    ranks.run(world, cut_unusual_inputs)


def join_mixed_strides(rank, world):
    """Strides are a rank's own affair."""
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=10, cp=world)
    x = torch.randn(3, 10, 2)
    local = shard(x, mesh, layout)
    if rank == 1:
        local = local.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        assert not local.is_contiguous()
    local.requires_grad_()
    whole = unshard(local, mesh, layout)
    assert same(whole, x)
    weight = torch.randn(10, 2, 3).permute(2, 0, 1)
    whole.backward(weight if rank == 0 else weight.contiguous())
    assert torch.equal(local.grad, shard(weight * world, mesh, layout))


def test_a_part_that_is_not_contiguous_on_one_rank_is_joined(ranks):
    ranks.run(2, join_mixed_strides)


def join_nothing(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=5, cp=world)
    for shape in ((0, 5), (0, 5, 3), (2, 5, 0)):
        x = torch.zeros(shape, requires_grad=True)
        local = shard(x, mesh, layout)
        assert local.shape == (shape[0], layout.local_seq_len, *shape[2:])
        whole = unshard(local, mesh, layout)
        assert whole.shape == shape
        whole.sum().backward()
        assert x.grad.shape == shape


@pytest.mark.parametrize("world", [1, 2])
def test_an_empty_batch_is_cut_and_joined(ranks, world):
    ranks.run(world, join_nothing)


def cut_in_modes(rank, world):
    """A layout first used where no gradients are recorded serves training afterwards."""
    mesh = cp_mesh(world)
    x = torch.randn(2, 11)
    layout = make_layout("striped", seq_len=11, cp=world)
    with torch.inference_mode():
        inference = shard(x, mesh, layout)
        assert same(unshard(inference, mesh, layout), x)
    assert same(unshard(inference, mesh, layout), x)
    parameter = torch.nn.Parameter(x)
    with torch.no_grad():
        local = shard(parameter, mesh, layout)
        assert not local.requires_grad
        assert same(unshard(local, mesh, layout), x)
        assert not unshard(local.requires_grad_(), mesh, layout).requires_grad
    torch.set_default_dtype(torch.float64)
    local = shard(parameter, mesh, layout, pad_value=0.5)
    assert local.dtype == torch.float32
    unshard(local, mesh, layout).sum().backward()
    expected = torch.zeros_like(x)
    expected[:, layout.positions(rank)[: layout.num_valid(rank)]] = world
    assert torch.equal(parameter.grad, expected)


def test_inference_mode_no_grad_and_another_default_dtype_change_nothing(ranks):
    ranks.run(2, cut_in_modes)


@settings(deadline=None)
@given(
    name=st.sampled_from(LAYOUT_NAMES),
    seq_len=st.integers(1, 40),
    cp=st.integers(1, 6),
    rows=st.integers(1, 3),
    multiple_of=st.integers(1, 5),
)
def test_the_cuts_of_all_ranks_hold_each_token_once_and_pads_elsewhere(name, seq_len, cp, rows, multiple_of):
    layout = layout_of(name, seq_len, cp, rows, multiple_of=multiple_of)
    from dtcp.shard_ops import shard_op

    x = torch.arange(seq_len).expand(rows, seq_len)
    parts = torch.cat([shard_op(x, layout.state, layout.local_seq_len, rank, 1, 0, -1) for rank in range(cp)], 1)
    assert parts.shape == (rows, layout.padded_seq_len)
    for row in parts:
        assert row[row >= 0].sort().values.tolist() == x[0].tolist()
