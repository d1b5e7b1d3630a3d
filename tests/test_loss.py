"""Loss shares and token counts against cross_entropy's mean over the whole batch in one process."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cuts import layout_of
from dtcp.layout import LAYOUT_NAMES, make_layout
from dtcp.loss import count_valid_tokens, token_loss
from dtcp.mesh import ParallelDims
from dtcp.shard import shard, shift_labels

VOCAB = 11


def loss_dims(world, **degrees):
    dims = ParallelDims(**(degrees or {"cp": world}))
    dims.build_mesh("cpu")
    return dims


def summed(share):
    total = share.detach().clone()
    dist.all_reduce(total)
    return total


def batch(seq_len, dtype, ignore_index, rows=3):
    """Logits that are far from uniform, and labels of which some are ignored: all of the second half of row 0."""
    torch.manual_seed(seq_len)
    logits = (4 * torch.randn(rows, seq_len, VOCAB)).to(dtype)
    tokens = torch.randint(VOCAB, (rows, seq_len))
    labels = shift_labels(tokens, ignore_index=ignore_index)
    labels[0, seq_len // 2 :] = ignore_index
    labels[1, ::3] = ignore_index
    return logits, labels


def compare_with_the_whole(rank, world, dtype, tolerance):
    dims = loss_dims(world)
    mesh, loss_mesh = dims.view("cp"), dims.view("loss")
    for name in LAYOUT_NAMES:
        for seq_len, ignore_index in ((5, -100), (12, -1), (13, 99)):
            layout = layout_of(name, seq_len, world)
            logits, labels = batch(seq_len, dtype, ignore_index)
            whole = logits.clone().requires_grad_()
            expected = F.cross_entropy(whole.view(-1, VOCAB), labels.view(-1), ignore_index=ignore_index)
            expected.backward()

            logits.requires_grad_()
            local = shard(logits, mesh, layout, pad_value=3)
            targets = shard(labels, mesh, layout, pad_value=ignore_index)
            share = token_loss(local, targets, mesh=loss_mesh, ignore_index=ignore_index)
            share.backward()
            dist.all_reduce(logits.grad)
            assert share.shape == ()
            assert share.dtype == dtype
            assert (summed(share) - expected).abs() <= tolerance * expected.abs()
            assert (logits.grad - whole.grad).abs().max() <= tolerance * whole.grad.abs().max()
            count = count_valid_tokens(targets, mesh=loss_mesh, ignore_index=ignore_index)
            assert (count.dtype, count.shape) == (torch.int64, ())
            assert count.item() == (labels != ignore_index).sum().item()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    # float32: a few ulp of 6e-8, because the sums run in another order.
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6)],
)
def test_shares_and_their_gradients_add_up_to_the_mean_over_all_valid_tokens(ranks, world, dtype, tolerance):
    ranks.run(world, compare_with_the_whole, dtype, tolerance)


def one_rank_ignored(rank, world):
    """The second half of every row is masked, under contiguous: the last ranks hold no valid token at all."""
    dims = loss_dims(world)
    layout = make_layout("contiguous", seq_len=4 * world, cp=world)
    logits, _ = batch(4 * world, torch.float64, -100)
    labels = torch.randint(VOCAB, logits.shape[:-1])
    labels[:, 2 * world :] = -100
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole.view(-1, VOCAB), labels.view(-1)).backward()
    local = shard(logits, dims.view("cp"), layout).requires_grad_()
    share = token_loss(local, shard(labels, dims.view("cp"), layout, pad_value=-100), mesh=dims.view("loss"))
    share.backward()
    if rank == world - 1:
        assert share == 0
        assert not local.grad.any()
    assert torch.allclose(local.grad, shard(whole.grad, dims.view("cp"), layout), rtol=1e-12, atol=0)
    # No valid token anywhere.
    local.grad = None
    share = token_loss(local, torch.full(local.shape[:-1], -100), mesh=dims.view("loss"))
    share.backward()
    assert share == 0
    assert torch.equal(local.grad, torch.zeros_like(local))
    # No token at all on one rank.
    none = torch.zeros(2, 0, VOCAB, requires_grad=True)
    tokens, targets = (none, torch.zeros(2, 0, dtype=torch.int64)) if rank == 0 else (local, labels[:, :4].clamp(min=0))
    token_loss(tokens, targets, mesh=dims.view("loss")).backward()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_valid_tokens_have_a_share_of_zero_and_zero_gradients(ranks, world):
    ranks.run(world, one_rank_ignored)


def linear_on_two_axes(rank, world):
    """One Linear on dp 2 × cp 2; the rows of the first dp rank have 3 valid tokens, those of the second 7."""
    dims = loss_dims(world, dp_shard=2, cp=2)
    torch.manual_seed(0)
    x, labels = torch.randn(2, 8, 5, dtype=torch.float64), torch.randint(VOCAB, (2, 8))
    labels[0, 3:] = labels[1, 7:] = -100
    layout = make_layout("head_tail", seq_len=8, cp=2)
    linear = torch.nn.Linear(5, VOCAB, dtype=torch.float64)
    reference = torch.nn.Linear(5, VOCAB, dtype=torch.float64)
    reference.load_state_dict(linear.state_dict())
    expected = F.cross_entropy(reference(x).view(-1, VOCAB), labels.view(-1))
    expected.backward()

    row = dims.view("batch").get_local_rank()
    local = shard({"x": x[row : row + 1], "labels": labels[row : row + 1]}, dims.view("cp"), layout, pad_value=0)
    share = token_loss(linear(local["x"]), local["labels"], mesh=dims.view("loss"))
    share.backward()
    for mine, whole in zip(linear.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(mine.grad)
        assert torch.allclose(mine.grad, whole.grad, rtol=1e-12, atol=1e-15)
    assert torch.allclose(summed(share), expected, rtol=1e-12)
    assert count_valid_tokens(local["labels"], mesh=dims.view("loss")) == 10
    assert count_valid_tokens(local["labels"], mesh=dims.view("cp")) == (3, 7)[row]


def test_one_linear_on_dp2_cp2_with_3_and_7_valid_tokens_has_the_gradients_of_one_process(ranks):
    ranks.run(4, linear_on_two_axes)


def uniform_logits(rank, world):
    dims = loss_dims(world)
    labels = torch.randint(100, (2, 6))
    labels[0, : rank + 1] = -100  # other counts on each rank
    return summed(token_loss(torch.zeros(2, 6, 100), labels, mesh=dims.view("loss"))).item()


@pytest.mark.parametrize("world", [1, 4])
def test_uniform_logits_over_100_tokens_cost_4_60517(ranks, world):
    for loss in ranks.run(world, uniform_logits):
        assert loss == pytest.approx(4.60517, abs=5e-6)


def accumulate(rank, world):
    """Three microbatches of unlike token counts, one of them empty on this rank, are one batch."""
    dims = loss_dims(world)
    layout = make_layout("striped", seq_len=9, cp=world)
    logits, labels = batch(9, torch.float64, -100, rows=4)
    labels[3] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.view(-1, VOCAB), labels.view(-1))
    expected.backward()
    local = shard(logits, dims.view("cp"), layout).requires_grad_()
    targets = shard(labels, dims.view("cp"), layout, pad_value=-100)
    parts = (slice(0, 1), slice(1, 3), slice(3, 4))
    counts = [count_valid_tokens(targets[rows], mesh=dims.view("loss")) for rows in parts]
    for total in (sum(counts), sum(counts).item(), sum(counts).to(torch.int32)):
        local.grad = None
        loss = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            share = token_loss(local[rows], targets[rows], num_valid_tokens=total)
            share.backward()
            loss += share.detach()
        assert torch.allclose(summed(loss), expected, rtol=1e-12)
        assert torch.allclose(local.grad, shard(whole.grad, dims.view("cp"), layout), rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_microbatches_with_one_count_equal_one_batch(ranks, world):
    ranks.run(world, accumulate)


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_take_their_softmax_in_float32(dtype):
    torch.manual_seed(0)
    logits = torch.randn(64, 1000).to(dtype).requires_grad_()
    labels = torch.randint(1000, (64,))
    loss = token_loss(logits, labels)
    exact = F.cross_entropy(logits.detach().double(), labels)
    assert loss.dtype == torch.float32
    assert abs(loss.double() - exact) <= 1e-6 * exact
    # The softmax of the half dtype itself is far off: this test can tell them apart.
    assert abs(F.cross_entropy(logits.detach(), labels).double() - exact) > 1e-5 * exact
    loss.backward()
    wide = logits.detach().double().requires_grad_()
    F.cross_entropy(wide, labels).backward()
    assert logits.grad.dtype == dtype
    assert (logits.grad - wide.grad).norm() <= 2 * torch.finfo(dtype).eps * wide.grad.norm()


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e4, -3e4, -3e4]])
    assert token_loss(logits, torch.tensor([1, 0])).item() == pytest.approx((2e4 + math.log(3)) / 2)


def test_any_integer_dtype_of_labels_and_any_leading_shape_give_the_same_loss():
    logits = torch.randn(2, 3, 4, 5)
    labels = torch.randint(5, (2, 3, 4))
    expected = F.cross_entropy(logits.view(-1, 5), labels.view(-1))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.allclose(token_loss(logits, labels.to(dtype)), expected)
    assert torch.allclose(token_loss(logits.transpose(0, 2), labels.transpose(0, 2)), expected)
    one, target = logits[0, 0, 0], labels[0, 0, 0]
    assert torch.allclose(token_loss(one, target), F.cross_entropy(one, target))
    ignored = labels.to(torch.uint8).clone()
    ignored[0] = 255
    masked = torch.where(ignored == 255, -100, labels)
    assert torch.allclose(token_loss(logits, ignored, ignore_index=255), token_loss(logits, masked))


def test_the_default_dtype_and_inference_mode_change_nothing():
    logits, labels = torch.randn(3, 5), torch.tensor([0, 1, -100])
    expected = token_loss(logits, labels)
    torch.set_default_dtype(torch.float64)
    try:
        assert token_loss(logits, labels).dtype == torch.float32
        assert torch.equal(token_loss(logits, labels, num_valid_tokens=2), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert torch.equal(token_loss(logits.clone(), labels.clone()), expected)


def test_what_is_no_valid_token_does_not_count():
    assert count_valid_tokens(torch.tensor([[1, -100], [-100, 0]])).item() == 2
    assert count_valid_tokens(torch.tensor([1, -1, -100]), ignore_index=-1).item() == 2
    assert count_valid_tokens(torch.tensor([], dtype=torch.int64)).item() == 0
    assert count_valid_tokens(torch.tensor(3)).item() == 1


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    logits, labels = torch.zeros(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits \(…, V\) and labels \(…\), got \(2, 4, 8\) and \(2, 3\); cut both"):
        token_loss(logits, labels[:, :3])
    with pytest.raises(ValueError, match=r"got \(2, 4, 8\) and \(2, 4, 8\)"):
        token_loss(logits, logits)
    with pytest.raises(ValueError, match=r"got \(8, 8\) and \(2, 4\)"):
        token_loss(logits.view(8, 8), labels)
    with pytest.raises(ValueError, match=r"got \(\) and \(\)"):
        token_loss(torch.tensor(1.0), torch.tensor(1))
    with pytest.raises(ValueError, match=r"of an integer one, got torch.float32 and torch.float32; swap them"):
        token_loss(logits, labels.float())
    with pytest.raises(ValueError, match="got torch.float32 and torch.bool"):
        token_loss(logits, labels.bool())
    with pytest.raises(ValueError, match="got torch.int64 and torch.int64"):
        token_loss(logits.long(), labels)
    with pytest.raises(ValueError, match=r"num_valid_tokens must be one number, got a tensor of shape \(2,\); give"):
        token_loss(logits, labels, num_valid_tokens=torch.tensor([4, 4]))
    with pytest.raises(ValueError, match="num_valid_tokens must be at least 0, got -1"):
        token_loss(logits, labels, num_valid_tokens=-1)


@pytest.mark.parametrize("label", [8, -1, 2**40])
def test_a_label_outside_the_vocabulary_is_named_with_its_place(label):
    labels = torch.full((2, 4), -100)
    labels[1, 2] = label
    message = rf"label {label} at \(1, 2\) is outside the vocabulary of 8, .* labels in 0\.\.7, or ignore_index=-100"
    with pytest.raises(ValueError, match=message):
        token_loss(torch.zeros(2, 4, 8), labels)


def refuse_a_plane(rank, world):
    dims = ParallelDims(cp=world)
    plane = dims.build_mesh("cpu")
    with pytest.raises(ValueError, match="count_valid_tokens needs the 1-D mesh of"):
        count_valid_tokens(torch.tensor([1]), mesh=plane)
    with pytest.raises(ValueError, match="1-D mesh"):
        token_loss(torch.zeros(1, 2), torch.tensor([1]), mesh=plane)


def test_a_mesh_of_more_axes_is_refused(ranks):
    ranks.run(2, refuse_a_plane)


def test_token_loss_with_a_given_count_compiles_into_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(token_loss, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        for count in (7, 9, torch.tensor(11)):
            labels = torch.randint(VOCAB, (rows, 4))
            labels[0] = -100
            grads = []
            for fn in (token_loss, compiled):
                logits = torch.linspace(-1, 1, rows * 4 * VOCAB).view(rows, 4, VOCAB).requires_grad_()
                loss = fn(logits, labels, num_valid_tokens=count)
                loss.backward()
                grads.append((loss.detach(), logits.grad))
            assert torch.equal(grads[0][0], grads[1][0])
            assert torch.equal(grads[0][1], grads[1][1])
