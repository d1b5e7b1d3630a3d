"""The chunked loss on one rank: the dense loss in float64, its gradients, and no more memory than a chunk's logits."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtcp
from dtcp import linear_loss_op
from dtcp.models import build_model
from live_bytes import peak_allocated_bytes
from oracle import relative_error

VOCAB, DIM, TOKENS = 37, 16, (3, 7)
CHUNKS = [1, 4, 7, 21, 1000]
IGNORED = {
    "none": lambda labels: torch.zeros_like(labels, dtype=torch.bool),
    "some": lambda labels: torch.arange(labels.numel()).view(labels.shape) % 3 == 0,
    "first_chunk": lambda labels: torch.arange(labels.numel()).view(labels.shape) < 8,
    "all_but_one": lambda labels: torch.arange(labels.numel()).view(labels.shape) != 11,
    "all": lambda labels: torch.ones_like(labels, dtype=torch.bool),
}


def make_inputs(dtype: torch.dtype = torch.float64, ignored: str = "some", bias: bool = True) -> tuple[Any, ...]:
    """hidden, weight, bias, labels; values that the dtype can hold, logits with a deviation of about 4."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(*TOKENS, DIM), (VOCAB, DIM), (VOCAB,)]
    hidden, weight, b = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    labels = torch.randint(VOCAB, TOKENS, generator=generator)
    labels = labels.masked_fill(IGNORED[ignored](labels), -100)
    return hidden.requires_grad_(), weight.requires_grad_(), b.requires_grad_() if bias else None, labels


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> list[Tensor]:
    """The loss and every gradient in float64, by torch alone; all tokens ignored is 0."""
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = F.linear(*inputs).flatten(0, -2)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / (labels != -100).sum().clamp(min=1)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def chunked(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any) -> list[Tensor]:
    loss = dtcp.linear_token_loss(hidden, weight, labels, bias=bias, **options)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_the_dense_ones(chunk_tokens, ignored, bias):
    inputs = make_inputs(torch.float64, ignored, bias)
    for own, right in zip(chunked(*inputs, chunk_tokens=chunk_tokens), dense(*inputs), strict=True):
        assert own.dtype == torch.float64 and own.shape == right.shape
        assert relative_error(own, right) < 1e-14
        assert ignored != "all" or not own.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_as_exact_as_full_logits(dtype):
    """``token_loss`` of full logits rounds as often; its error from float64 is the yardstick."""
    inputs = make_inputs(dtype)
    right = dense(*inputs)
    loss = dtcp.token_loss(F.linear(*inputs[:3]), inputs[3])
    full = [loss.detach(), *torch.autograd.grad(loss, inputs[:3])]
    for chunk_tokens in CHUNKS:
        own = chunked(*inputs, chunk_tokens=chunk_tokens)
        assert [x.dtype for x in own] == [x.dtype for x in full] == [torch.float32, dtype, dtype, dtype]
        assert abs(own[0] - full[0]) <= 1e-6 * full[0]
        for mine, theirs, exact in zip(own[1:], full[1:], right[1:], strict=True):
            # One rounding more than theirs at most: of the hidden gradient, before and after the scaling.
            limit = 1.5 * relative_error(theirs, exact) + torch.finfo(dtype).eps / 2
            assert relative_error(mine, exact) <= limit


def test_the_weight_gradient_of_half_precision_adds_up_in_float32():
    """512 chunks of alike gradients: in bfloat16 the sum would stop growing at 256 of them."""
    hidden, weight = torch.ones(512, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16).requires_grad_()
    dtcp.linear_token_loss(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk_tokens=1).backward()
    assert torch.equal(weight.grad, torch.tensor([-0.75, 0.25, 0.25, 0.25])[:, None].expand(4, 8).bfloat16())


def test_a_float16_gradient_survives_a_large_count():
    """1/count is applied in float32, with the loss scale that comes from above: in float16 it would be 0."""
    hidden, weight, bias, labels = make_inputs(torch.float16)
    loss = dtcp.linear_token_loss(hidden, weight, labels, bias=bias, num_valid_tokens=2**28)
    grad = torch.autograd.grad(loss * 2.0**28, weight)[0]
    total = dtcp.token_loss(F.linear(hidden.double(), weight.double(), bias.double()), labels, num_valid_tokens=1)
    assert relative_error(grad, torch.autograd.grad(total, weight)[0]) < 4 * torch.finfo(torch.float16).eps


def test_any_shape_dtype_of_labels_and_ignore_index_give_the_same_loss():
    hidden, weight, bias, labels = make_inputs(torch.float64, "some")
    right = chunked(hidden, weight, bias, labels)
    for dtype, ignore_index in ((torch.int32, -100), (torch.int16, -1), (torch.uint8, 255)):
        other = labels.masked_fill(labels == -100, ignore_index).to(dtype)
        own = chunked(hidden, weight, bias, other, ignore_index=ignore_index, chunk_tokens=5)
        assert all(relative_error(a, b) < 1e-14 for a, b in zip(own, right, strict=True))
    turned = hidden.transpose(0, 1)  # not contiguous
    own = dtcp.linear_token_loss(turned, weight, labels.t(), bias=bias)
    assert relative_error(own.detach(), right[0]) < 1e-14
    one = dtcp.linear_token_loss(hidden[1, 1], weight, labels[1, 1], bias=bias)
    alone = F.cross_entropy(F.linear(hidden, weight, bias)[1, 1], labels[1, 1])
    assert relative_error(one.detach(), alone.detach()) < 1e-14


def test_no_tokens_cost_nothing():
    hidden, weight = torch.zeros(2, 0, DIM, requires_grad=True), torch.randn(VOCAB, DIM, requires_grad=True)
    loss = dtcp.linear_token_loss(hidden, weight, torch.zeros(2, 0, dtype=torch.int64))
    loss.backward()
    assert loss == 0 and hidden.grad.shape == hidden.shape and not weight.grad.any()


def test_tokens_without_a_label_are_not_looked_at():
    hidden, weight, bias, labels = make_inputs()
    right = chunked(hidden, weight, bias, labels)
    spoilt = hidden.detach().clone()
    spoilt[labels == -100] = float("nan")
    own = chunked(spoilt.requires_grad_(), weight, bias, labels, chunk_tokens=5)
    assert all(relative_error(a, b) < 1e-14 for a, b in zip(own, right, strict=True))


@pytest.mark.parametrize("trained", list(itertools.product([True, False], repeat=3)))
def test_only_the_gradients_that_are_needed_are_made(trained):
    hidden, weight, bias, labels = make_inputs(torch.float32)
    right = dense(hidden, weight, bias, labels)[1:]
    inputs = [x.detach().requires_grad_(needs) for x, needs in zip((hidden, weight, bias), trained, strict=True)]
    loss = dtcp.linear_token_loss(*inputs[:2], labels, bias=inputs[2], chunk_tokens=4)
    assert loss.requires_grad == any(trained)
    if any(trained):
        loss.backward()
    for x, grad in zip(inputs, right, strict=True):
        assert x.grad is None if not x.requires_grad else relative_error(x.grad, grad) < 1e-6
    with torch.no_grad():
        again = dtcp.linear_token_loss(hidden, weight, labels, bias=bias)
    with torch.inference_mode():
        inferred = dtcp.linear_token_loss(hidden, weight, labels, bias=bias)
    assert not again.requires_grad and torch.equal(again, inferred)


def test_a_backward_may_be_repeated_and_its_gradient_scaled():
    inputs = make_inputs()
    right = chunked(*inputs)[1:]
    loss = dtcp.linear_token_loss(*inputs[:2], inputs[3], bias=inputs[2])
    for scale in (3.0, 0.0, -0.5):
        grads = torch.autograd.grad(loss, inputs[:3], torch.tensor(scale, dtype=torch.float64), retain_graph=True)
        assert all(relative_error(a, scale * b) < 1e-14 for a, b in zip(grads, right, strict=True))


def test_a_double_backward_is_refused():
    hidden, weight, _, labels = make_inputs(bias=False)
    loss = dtcp.linear_token_loss(hidden, weight, labels)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative .* use token_loss"):
        grad.sum().backward()


def test_autocast_does_what_it_does_to_a_linear_layer():
    hidden, weight, bias, labels = make_inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full = dtcp.token_loss(F.linear(hidden, weight, bias), labels)
        own = dtcp.linear_token_loss(hidden, weight, labels, bias=bias, chunk_tokens=4)
        exact = dtcp.linear_token_loss(hidden.double(), weight.double(), labels, bias=bias.double())
    assert abs(own - full) < 1e-6 * full
    assert abs(own - exact) > 1e-5 * exact  # float64 is left alone, and the difference can be seen
    grads = torch.autograd.grad(own, (hidden, weight, bias))
    assert [x.dtype for x in grads] == [torch.float32] * 3
    wanted = torch.autograd.grad(full, (hidden, weight, bias))
    assert all(relative_error(a, b) < 0.02 for a, b in zip(grads, wanted, strict=True))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name():
    hidden, weight, bias, labels = make_inputs(torch.float32)
    loss = dtcp.linear_token_loss
    cases: list[tuple[str, Any]] = [
        (r"hidden \(…, D\) and labels \(…\), got .* \(3, 6\)", lambda: loss(hidden, weight, labels[:, 1:])),
        (r"weight \(V, D\) for hidden .* got \(16, 37\)", lambda: loss(hidden, weight.t(), labels)),
        (r"bias \(V,\) for weight .* got \(36,\)", lambda: loss(hidden, weight, labels, bias=bias[1:])),
        (r"hidden of a float dtype and labels of an integer one", lambda: loss(hidden, weight, labels.float())),
        (r"weight in the dtype of hidden, torch.bfloat16, got torch.float32; use hidden.to", lambda: loss(
            hidden.bfloat16(), weight, labels)),
        (r"bias in the dtype of hidden", lambda: loss(hidden, weight, labels, bias=bias.double())),
        (r"chunk_tokens must be an integer of at least 1, got 0", lambda: loss(hidden, weight, labels, chunk_tokens=0)),
        (r"num_valid_tokens must be at least 0, got -1", lambda: loss(hidden, weight, labels, num_valid_tokens=-1)),
        (r"num_valid_tokens must be one number", lambda: loss(hidden, weight, labels, num_valid_tokens=labels)),
        (r"labels on the device of hidden", lambda: loss(hidden, weight, labels.to("meta"))),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("label", [VOCAB, -1, 2**40])
def test_a_label_outside_the_vocabulary_is_named_with_its_place(label):
    hidden, weight, _, labels = make_inputs()
    labels[1, 2] = label
    message = rf"label {label} at \(1, 2\) is outside the vocabulary of 37, the rows of weight; give labels in 0\.\.36"
    with pytest.raises(ValueError, match=message):
        dtcp.linear_token_loss(hidden, weight, labels)


# ---- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_into_one_graph_for_all_lengths_and_counts(backend):
    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @functools.partial(torch.compile, fullgraph=True, backend=counter)
    def compiled(hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return dtcp.linear_token_loss(hidden.tanh(), weight, labels, num_valid_tokens=count, chunk_tokens=4)

    for length in (5, 6, 9, 12, 17):
        hidden, weight = torch.randn(2, length, DIM, requires_grad=True), torch.randn(VOCAB, DIM, requires_grad=True)
        labels = torch.randint(VOCAB, (2, length)).masked_fill(torch.rand(2, length) < 0.3, -100)
        count = torch.tensor(length)
        own = compiled(hidden, weight, labels, count)
        right = dtcp.token_loss(F.linear(hidden.tanh(), weight), labels, num_valid_tokens=count)
        assert relative_error(own.detach(), right.detach()) < 1e-6
        for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (own, right)), strict=True):
            assert relative_error(a, b) < 1e-5
    assert counter.frame_count == 2  # the first length, then any


def test_the_ops_keep_torchs_rules():
    hidden, weight, bias, labels = make_inputs(torch.bfloat16)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for needs in itertools.product([True, False], repeat=3):
        arguments = (hidden, weight, bias, labels, -100, 4, "", False, *needs)
        torch.library.opcheck(linear_loss_op.forward_op, arguments, test_utils=utils)
    torch.library.opcheck(
        linear_loss_op.backward_op, (torch.tensor(2.0), torch.randn(4, 5), torch.bfloat16), test_utils=utils
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_bytes_are_those_of_a_chunk(dtype):
    """N tokens: full logits are there three times (logits, log-softmax, gradient), a chunk's once, and in its dtype."""
    num_tokens, vocab, dim, chunk = 2048, 3000, 16, 64
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    peaks = {}
    losses = {
        "full": lambda: dtcp.token_loss(F.linear(hidden, weight), labels),
        "chunked": lambda: dtcp.linear_token_loss(hidden, weight, labels, chunk_tokens=chunk),
        "a chunk of all": lambda: dtcp.linear_token_loss(hidden, weight, labels, chunk_tokens=num_tokens),
    }
    for name, loss in losses.items():
        hidden.grad = weight.grad = None
        loss().backward()
        hidden.grad = weight.grad = None
        peaks[name] = peak_allocated_bytes(lambda loss=loss: loss().backward())
    size = dtype.itemsize
    logits = chunk * vocab * (4 + (size if size < 4 else 0))
    weights = vocab * dim * (4 + size + (4 if size < 4 else 0))  # the sum, the gradient, and what is added to the sum
    hiddens = 3 * num_tokens * dim * max(size, 4)
    labels_and_losses = num_tokens * 60
    assert peaks["chunked"] <= logits + weights + hiddens + labels_and_losses
    assert peaks["full"] >= 2 * num_tokens * vocab * 4
    assert peaks["chunked"] < peaks["full"] / 10
    assert peaks["a chunk of all"] >= num_tokens * vocab * 4  # so what is inside the op is seen


# ---- in a model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_returns_the_loss_of_its_own_logits(name, tied):
    model = build_model(f"{name}_tiny", num_layers=1, dim=32, vocab_size=61, tie_weights=tied, init_std=0.2).double()
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = dtcp.shift_labels(tokens)
    right = dtcp.token_loss(model(tokens), labels)
    right.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    own = model(tokens, head_fn=functools.partial(dtcp.linear_token_loss, labels=labels, chunk_tokens=4))
    own.backward()
    assert relative_error(own.detach(), right.detach()) < 1e-6
    total = torch.cat([grad.flatten() for grad in wanted.values()]).norm()
    for parameter_name, p in model.named_parameters():
        error = (p.grad - wanted[parameter_name]).norm()
        assert error <= 1e-5 * wanted[parameter_name].norm() + 1e-8 * total, parameter_name
