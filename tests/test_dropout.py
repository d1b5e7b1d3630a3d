"""Dropout is a function of seed, step, row, position, module and feature, and its masks look like drawn ones."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtcp
import dtcp.dropout_hash as dropout_hash
from dtcp.dropout_hash import feature_words
from dtcp.models import build_model

SIGMAS = 5.0
LENGTHS = [256, pytest.param(2048, marks=pytest.mark.slow)]  # tokens of each of 4 rows, 512 features
PROBABILITIES = (0.5, 0.1, 0.9, 0.001, 0.999)


def keys(seed: int = 3, step: int = 5, rows: range | list[int] = range(4), start: int = 0, size: int = 256) -> Tensor:
    return dtcp.dropout_keys(seed, step, rows, torch.arange(start, start + size))


def kept(
    token_keys: Tensor, p: float, name: str = "layers.0.attention_residual_dropout", features: int = 512
) -> Tensor:
    """Which of (B, S, features) elements stay."""
    return dtcp.Dropout(p, name=name)(torch.ones(*token_keys.shape, features), token_keys) != 0


def standardised(mask: Tensor, p: float) -> Tensor:
    return (mask.double() - (1 - p)) / math.sqrt(p * (1 - p))


def sigmas(*masks: Tensor, p: float) -> float:
    """How many standard deviations the mean product of independent masks would be off 0; of one mask: its rate."""
    product = standardised(masks[0], p)
    for mask in masks[1:]:
        product *= standardised(mask, p)
    return abs(product.sum().item()) / math.sqrt(product.numel())


def sigmas_apart(mask: Tensor, other: Tensor, p: float) -> float:
    """The same of two masks, from counts."""
    both, each = (mask & other).count_nonzero().item(), (mask.count_nonzero() + other.count_nonzero()).item()
    covariance = both - (1 - p) * each + (1 - p) ** 2 * mask.numel()
    return abs(covariance) / (p * (1 - p) * math.sqrt(mask.numel()))


# ---- what the mask depends on ----------------------------------------------------------------------------------------


def test_equal_keys_drop_the_same_elements():
    assert torch.equal(kept(keys(), 0.5), kept(keys(), 0.5))


def test_the_keys_and_the_mask_are_those_of_every_release():
    """A change of these numbers changes the training of everybody who resumes a job."""
    found = dtcp.dropout_keys(1, 2, [3], torch.tensor([0, 4, 2**40]))
    assert found.tolist() == [[5630731884835902905, -2424800193238236168, 2319088747296031684]]
    word = kept(found, 0.5, "layers.1.feed_forward_residual_dropout", 32)[0].long()
    assert (word << torch.arange(32)).sum(-1).tolist() == [1762872701, 436648909, 712279965]


# What differs from the mask of seed 3, step 5, rows 0 to 3, positions from 0.
OTHER_KEYS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 4},
    "large seed": {"seed": 3 + 2**32},
    "negative seed": {"seed": -3},
    "step": {"step": 6},
    "far step": {"step": 5 + 10**6},
    "row": {"rows": range(1, 5)},
    "far row": {"rows": range(10**6, 10**6 + 4)},
    "row and step": {"step": 4, "rows": range(1, 5)},
    "step for seed": {"seed": 5, "step": 3},
    "next token": {"start": 1},
    "second token": {"start": 2},
    "token 2**20 later": {"start": 2**20},
    "token 2**32 later": {"start": 2**32},
}


@pytest.mark.parametrize("size", LENGTHS)
def test_masks_of_another_seed_step_row_or_token_are_not_correlated(size):
    for p in PROBABILITIES:
        mask = kept(keys(size=size), p)
        for what, other in OTHER_KEYS.items():
            assert sigmas_apart(mask, kept(keys(size=size, **other), p), p) < SIGMAS, (what, p)


@pytest.mark.parametrize("size", LENGTHS)
def test_masks_of_another_module_or_feature_are_not_correlated(size):
    for p in PROBABILITIES:
        mask = kept(keys(size=size), p, features=1024)
        for name in ("layers.1.attention_residual_dropout", "layers.0.feed_forward_residual_dropout"):
            assert sigmas_apart(mask, kept(keys(size=size), p, name, 1024), p) < SIGMAS, (name, p)
        for distance in (1, 2, 3, 16, 512):
            assert sigmas_apart(mask[..., :-distance], mask[..., distance:], p) < SIGMAS, (distance, p)


def test_one_position_has_one_key_wherever_it_lies():
    whole = keys(size=97)
    order = torch.randperm(97, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dtcp.dropout_keys(3, 5, range(4), order), whole[:, order])
    assert torch.equal(dtcp.dropout_keys(3, 5, [2, 0], torch.stack([order, order])), whole[[2, 0]][:, order])
    assert torch.equal(dtcp.dropout_keys(torch.tensor(3), torch.tensor(5), torch.arange(4), torch.arange(97)), whole)


def test_no_two_tokens_share_a_key():
    many = dtcp.dropout_keys(0, 0, range(64), torch.arange(2**15))
    assert many.unique().numel() == many.numel()


def test_a_wider_model_keeps_the_mask_of_its_first_features():
    assert torch.equal(kept(keys(), 0.3, features=100), kept(keys(), 0.3, features=512)[..., :100])


def test_trailing_dims_count_as_features_in_order():
    token_keys = keys(size=8)
    dropout = dtcp.Dropout(0.4, name="d")
    flat = dropout(torch.ones(4, 8, 30), token_keys)
    assert torch.equal(dropout(torch.ones(4, 8, 5, 6), token_keys).flatten(2), flat)
    assert torch.equal(dropout(torch.ones(4, 8), token_keys), flat[..., 0])


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", LENGTHS)
def test_the_keep_rate_is_within_5_sigma(size):
    for p in (*PROBABILITIES, 1e-5, 0.3):
        for start in (0, 2**20 - 17):
            mask = kept(keys(size=size, start=start), p)
            for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # of the whole, of each row, token and feature
                counts = mask.sum(dims).double()
                num = mask.numel() / counts.numel()
                if p * num > 100:  # enough for a normal distribution
                    each = (counts - num * (1 - p)) / math.sqrt(num * p * (1 - p))
                    assert each.abs().max() < SIGMAS + (counts.numel() > 1)
                    assert (each.square().mean() - 1) * math.sqrt(counts.numel() / 2) < SIGMAS


@pytest.mark.parametrize("p", [0.5, 0.1, 0.9])
def test_many_short_rows_are_independent(p):
    mask = kept(dtcp.dropout_keys(0, 0, range(5000), torch.arange(3)), p, features=64)
    assert sigmas(mask, p=p) < SIGMAS
    assert sigmas_apart(mask[:-1], mask[1:], p) < SIGMAS
    assert sigmas(mask[:, 0], mask[:, 1], mask[:, 2], p=p) < SIGMAS


@pytest.mark.parametrize("p", [0.5, 0.1, 0.9])
def test_products_of_more_masks_vanish_too(p):
    mask = kept(keys(), p)
    assert sigmas(mask[..., :-2], mask[..., 1:-1], mask[..., 2:], p=p) < SIGMAS
    corners = (mask[:, :-1, :-1], mask[:, 1:, :-1], mask[:, :-1, 1:], mask[:, 1:, 1:])
    assert sigmas(*corners, p=p) < SIGMAS
    assert sigmas(mask[0], mask[1], mask[2], mask[3], p=p) < SIGMAS


def pair_correlations(vectors: Tensor) -> Tensor:
    """Standardised correlation of each two of (N, n) vectors."""
    found = vectors @ vectors.T / math.sqrt(vectors.size(1))
    return found[torch.triu(torch.ones_like(found, dtype=torch.bool), 1)]


@pytest.mark.parametrize("over", ["tokens", "features"])
def test_every_pair_of_tokens_and_of_features_is_as_random_as_drawn(over):
    """A hash without its last round fails here: tokens whose factors have a simple ratio are correlated."""
    mask = standardised(kept(keys(), 0.5, features=1024), 0.5).flatten(0, 1).float()
    found = pair_correlations(mask if over == "tokens" else mask.T)
    assert abs(found.mean().item()) < SIGMAS / math.sqrt(found.numel())
    assert abs(found.var().item() - 1) < SIGMAS * math.sqrt(2 / found.numel())
    assert found.abs().max() < 6.2  # of half a million normal ones, once in three thousand times


def test_tokens_with_related_factors_are_not_correlated():
    """The worst case of an offset and a factor for each token: chosen, not hashed."""
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return torch.randint(-(2**31), 2**31, (1, 1000), generator=generator)

    def mask(factor: Tensor) -> Tensor:
        chosen = (factor << 32) | (some() & 0xFFFFFFFF)
        with mock.patch.object(dropout_hash, "mix", lambda z: chosen):
            return standardised(kept(chosen, 0.5, features=1024), 0.5)

    factor = some() | 1
    for ratio in (1, -1, 3, 5, 2**31 + 1):
        related = (factor * ratio + 2**31) % 2**32 - 2**31
        found = (mask(factor) * mask(related)).sum(-1) / math.sqrt(1024)
        assert abs(found.var().item() - 1) < SIGMAS * math.sqrt(2 / found.numel()), ratio


def test_feature_words_do_not_repeat():
    assert feature_words((2**20,), torch.device("cpu")).unique().numel() == 2**20


# ---- what nn.Dropout does too ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_stays_is_divided_by_the_keep_probability(dtype):
    x = torch.randn(2, 16, 64, dtype=dtype, requires_grad=True)
    out = dtcp.Dropout(0.1, name="d")(x, keys(rows=[0, 1], size=16))
    mask = kept(keys(rows=[0, 1], size=16), 0.1, "d", 64)
    assert out.dtype == dtype
    assert torch.equal(out, torch.where(mask, x * (1 / 0.9), 0.0))
    grad = torch.randn_like(x)
    out.backward(grad)
    assert torch.equal(x.grad, torch.where(mask, grad * (1 / 0.9), 0.0))
    scaled = nn.functional.dropout(torch.ones(10_000, dtype=dtype), 0.1)  # torch's own factor
    assert out[mask][0] == x[mask][0] * scaled[scaled != 0][0] or dtype == torch.bfloat16


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_and_nothing(p):
    x = torch.randn(2, 16, 8, requires_grad=True)
    out = dtcp.Dropout(p, name="d")(x, keys(rows=[0, 1], size=16))
    assert torch.equal(out, x * (1 - p))
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1 - p))


def test_evaluation_returns_its_input():
    x = torch.randn(2, 16, 8)
    assert dtcp.Dropout(0.5, name="d").eval()(x) is x
    assert dtcp.Dropout(0.5, name="d").eval()(x, keys(rows=[0, 1], size=16)) is x


@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12])
def test_probabilities_below_the_resolution(p):
    assert abs(kept(keys(), p).double().mean().item() - (1 - p)) < 1e-5


@pytest.mark.parametrize("shape", [(0, 16, 8), (2, 0, 8), (2, 16, 0)])
def test_empty_inputs(shape):
    token_keys = dtcp.dropout_keys(0, 0, range(shape[0]), torch.arange(shape[1]))
    assert dtcp.Dropout(0.5, name="d")(torch.ones(shape), token_keys).shape == shape


def test_on_one_rank_without_keys_every_call_drops_other_elements():
    dropout, x = dtcp.Dropout(0.5), torch.ones(2, 64, 8)
    torch.manual_seed(0)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(dropout(x), first)
    assert sigmas_apart(first != 0, second != 0, 0.5) < SIGMAS


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named_with_a_cure():
    x, token_keys = torch.ones(2, 16, 8), keys(rows=[0, 1], size=16)
    dropout = dtcp.Dropout(0.5, name="d")
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 1.5"):
        dtcp.Dropout(1.5)
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got nan"):
        dtcp.Dropout(math.nan)
    with pytest.raises(ValueError, match="needs a name.*dtcp.name_dropouts"):
        dtcp.Dropout(0.5)(x, token_keys)
    with pytest.raises(ValueError, match=r"\(B, S\) = \(2, 16\).*got torch.int64 \(2, 15\); pass dtcp.dropout_keys"):
        dropout(x, token_keys[:, 1:])
    with pytest.raises(ValueError, match=r"got torch.int32 \(2, 16\)"):
        dropout(x, token_keys.int())
    with pytest.raises(ValueError, match=r"rows has 3 entries for 2 rows of positions"):
        dtcp.dropout_keys(0, 0, range(3), torch.zeros(2, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions must be int64 .*got torch.float32"):
        dtcp.dropout_keys(0, 0, range(2), torch.zeros(2, 16))
    with pytest.raises(ValueError, match=r"rows must be B integers, got torch.float32"):
        dtcp.dropout_keys(0, 0, torch.ones(2), torch.arange(16))


# ---- in a model ------------------------------------------------------------------------------------------------------


def gpt(**options: Any) -> nn.Module:
    return build_model("gpt_tiny", num_layers=2, dim=32, max_seq_len=64, dropout=0.2, **options)


def some_tokens(rows: int = 2, size: int = 24) -> Tensor:
    return torch.randint(0, 256, (rows, size), generator=torch.Generator().manual_seed(rows))


def test_every_dropout_of_a_model_has_its_place_as_its_name():
    found = [module.name for module in gpt().modules() if isinstance(module, dtcp.Dropout)]
    blocks = [f"layers.{i}.{part}_residual_dropout" for i in range(2) for part in ("attention", "feed_forward")]
    assert found == ["embedding_dropout", *blocks]


def test_names_survive_what_is_done_to_a_model():
    """Also built on meta, as a copy, from a pickle, in another dtype: the same logits from the same weights."""
    tokens, token_keys = some_tokens(), keys(rows=[0, 1], size=24)
    model = gpt()
    expected = model(tokens, dropout_keys=token_keys)
    on_meta = gpt(device="meta").to_empty(device="cpu")
    on_meta.load_state_dict(model.state_dict())
    for other in (on_meta, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).double()):
        found = other(tokens, dropout_keys=token_keys)
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-5)
    assert torch.equal(on_meta(tokens, dropout_keys=token_keys), expected)


def test_a_block_taken_out_drops_what_it_dropped_before():
    model, token_keys, x = gpt(), keys(rows=[0, 1], size=24), torch.randn(2, 24, 32)
    expected = model.layers["1"](x, token_keys)
    block = model.layers.pop("1")
    assert torch.equal(nn.Sequential(block)[0](x, token_keys), expected)


def test_a_model_told_step_and_rows_computes_the_keys_itself():
    model, tokens = gpt(), some_tokens()
    model.dropout_seed = 3
    layout = dtcp.make_layout("contiguous", seq_len=24, cp=1)
    dtcp.set_sequence(model, layout, step=5, rows=[2, 3])
    expected = model(tokens, dropout_keys=keys(rows=[2, 3], size=24))
    assert torch.equal(model(tokens), expected)
    cut = torch.arange(12, 24)
    dtcp.set_sequence(model, layout, step=5, rows=torch.tensor([3]))
    part = dtcp.dropout_keys(3, 5, [3], cut)
    assert torch.equal(model(tokens[1:, 12:], cut), model(tokens[1:, 12:], cut, part))
    dtcp.set_sequence(model, layout, step=6)
    assert torch.equal(model(tokens), model(tokens, dropout_keys=keys(step=6, rows=[0, 1], size=24)))
    with pytest.raises(ValueError, match="found no context parallel module"):
        dtcp.set_sequence(model, layout)
    with pytest.raises(ValueError, match=r"told 1 row\(s\) of the global batch, this forward got 2"):
        dtcp.set_sequence(model, layout, rows=[1])
        model(tokens)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_equal_others_bitwise(use_reentrant):
    model, tokens, token_keys = gpt(), some_tokens(), keys(rows=[0, 1], size=24)
    expected = model(tokens, dropout_keys=token_keys)
    wanted = gradients(model, expected.square().mean())
    for block in model.layers.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=use_reentrant)
    found = model(tokens, dropout_keys=token_keys)
    assert torch.equal(found, expected)
    found.square().mean().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted, strict=True))


def test_a_checkpointed_model_recomputes_with_the_step_of_its_own_forward():
    model, tokens = gpt(), some_tokens()
    layout = dtcp.make_layout("contiguous", seq_len=24, cp=1)

    def run(step: int, forward: Callable[[Tensor], Tensor]) -> Tensor:
        dtcp.set_sequence(model, layout, step=step, rows=[step, step + 1])
        return forward(tokens).square().mean()

    wanted = [gradients(model, run(step, model)) for step in (0, 1)]
    losses = [run(step, lambda x: checkpoint(model, x, use_reentrant=False)) for step in (0, 1)]
    dtcp.set_sequence(model, layout, step=2, rows=[7, 8])
    for step in (1, 0):
        for p in model.parameters():
            p.grad = None
        losses[step].backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted[step], strict=True))
