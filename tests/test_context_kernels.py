"""Multi-head modules, the user's choice of a kernel, and flex_attention inside ``context_parallel``."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as by_name_before  # before dtcp is loaded

import dtcp
from contexts import check_right, draw, make_mesh, raises
from oracle import relative_error

S = 13
OF_PART = functools.partial(by_name_before, is_causal=True)


# --------------------------------------------------------------------------------------------------- multi-head modules


def check_multihead(rank: int, world: int, is_training: bool) -> None:
    """Module and gradients in double precision; a causal mask goes with is_causal, as torch wants it."""
    mesh = make_mesh(world)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, batch_first=True).double().train(is_training)
    nn.init.normal_(module.in_proj_weight, std=0.7)
    x = draw(2, S, 16).double()

    def attend(x: Tensor) -> Tensor:
        mask = torch.ones(x.size(1), x.size(1)).triu(1).bool()
        return module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    with torch.set_grad_enabled(is_training):
        right = attend(x)
        with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=1) as cp:
            local = cp.shard(x)
            out = attend(local)
            for options in ({}, {"need_weights": True}, {"average_attn_weights": False}):
                with raises(NotImplementedError, "need_weights=False"):
                    module(local, local, local, **options)
            with raises(NotImplementedError, "attn_mask"):
                module(local, local, local, key_padding_mask=~cp.valid.expand(2, -1), need_weights=False)
        assert relative_error(cp.unshard(out.detach()), right.detach()) < 1e-12
    if is_training:
        weight = draw(2, S, 16, seed=1).double()
        right_grads = torch.autograd.grad((right * weight).sum(), list(module.parameters()))
        grads = torch.autograd.grad((out * cp.shard(weight)).sum(), list(module.parameters()))
        for grad, wanted in zip(grads, right_grads, strict=True):
            dist.all_reduce(grad)
            assert (grad - wanted).norm() < 1e-12 * wanted.norm() + 1e-12


@pytest.mark.parametrize("is_training", [True, False])
def test_multihead_attention(ranks: Any, is_training: bool) -> None:
    ranks.run(2, check_multihead, is_training)


def check_encoder(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).double()
    x = draw(2, S, 16).double()
    for module in (layer, encoder):
        for is_training, has_grad in ((True, True), (False, False), (False, True)):
            module.train(is_training)
            with torch.set_grad_enabled(has_grad), torch.inference_mode(not has_grad):
                for is_causal in (False, True):

                    def run(x: Tensor, module: nn.Module = module, is_causal: bool = is_causal) -> Tensor:
                        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
                        if not is_causal:
                            return module(x)
                        return module(x, mask, is_causal=True)

                    right = run(x)
                    with dtcp.context_parallel(mesh, seq_len=S) as cp:
                        out = run(cp.shard(x))
                        assert relative_error(cp.unshard(out.detach().clone()), right.detach()) < 1e-10


def test_transformer_encoder_layers(ranks: Any) -> None:
    ranks.run(2, check_encoder)


# -------------------------------------------------------------------------------------------------------- kernels, flex


def kernels_of(call: Any) -> set[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = {event.name for event in profiled.events()}
    return {"flash" if any("flash_attention_for_cpu" in name for name in names) else "math"}


def check_kernels(rank: int, world: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = make_mesh(world)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        x = draw(2, 2, cp.layout.local_seq_len, 8)

        def call() -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

        assert kernels_of(call) == {"flash"}
        for backends, wanted in (
            ([SDPBackend.MATH], "math"),
            ([SDPBackend.FLASH_ATTENTION], "flash"),
            ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "math"),
        ):
            with sdpa_kernel(backends):
                assert kernels_of(call) == {wanted}
                check_right(cp, OF_PART)
        for backends in ([SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.CUDNN_ATTENTION]):
            with sdpa_kernel(backends), raises(ValueError, "sdpa_kernel", "allow another backend"):
                call()
    with dtcp.context_parallel(mesh, seq_len=S, kernel="math") as cp:
        assert kernels_of(call) == {"math"}
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), raises(ValueError, "kernel='math'", "excludes it"):
            call()


def test_the_choice_of_a_kernel_is_honoured_or_refused(ranks: Any) -> None:
    ranks.run(2, check_kernels)


def check_flex(rank: int, world: int) -> None:
    import torch.nn.attention.flex_attention as flex
    from torch.nn.attention.flex_attention import flex_attention

    mesh = make_mesh(world)
    compiled = torch.compile(flex_attention, backend="eager")
    x = draw(1, 2, 8, 16)
    before = compiled(x, x, x)
    with dtcp.context_parallel(mesh, seq_len=16) as cp:
        for call in (flex_attention, flex.flex_attention, functools.partial(flex_attention, scale=8**-0.5), compiled):
            check_right(cp, call, is_causal=False)
        check_right(cp, OF_PART)
    assert torch.equal(compiled(x, x, x), before)


def check_flex_loaded_inside(rank: int, world: int) -> None:
    name = "torch.nn.attention.flex_attention"
    loaded = sys.modules.pop(name, None)
    mesh, x = make_mesh(world), draw(1, 2, 8, 16)
    try:
        with dtcp.context_parallel(mesh, seq_len=16, expected_attention_calls=0):
            flex_attention = importlib.import_module(name).flex_attention
            for call in (flex_attention, torch.compile(flex_attention, backend="aot_eager")):
                with raises(Exception, "flex_attention inside context_parallel came by a way that dtcp does not see"):
                    call(x, x, x)
        assert flex_attention(x, x, x).shape == x.shape
    finally:
        if loaded is not None:
            sys.modules[name] = loaded


@pytest.mark.parametrize("check", [check_flex, check_flex_loaded_inside])
def test_flex_attention_is_refused(ranks: Any, check: Any) -> None:
    ranks.run(2, check)
