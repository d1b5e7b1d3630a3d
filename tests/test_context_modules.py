"""torch's multi-head modules inside ``context_parallel``, eager and compiled: exact, or refused by name."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import multi_head_attention_forward as by_name  # before dtcp is loaded

import dtcp
from oracle import relative_error

S = 12
NEEDS_WEIGHTS = "need_weights=True forms the attention weights of this rank's tokens only"


class Attention(nn.MultiheadAttention):
    """With the masks that torch wants for causal attention."""

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor:  # type: ignore[override]
        mask = torch.ones(x.size(1), x.size(1), device=x.device).triu(1).bool()
        return super().forward(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]


class ByName(nn.MultiheadAttention):
    """Calls the function by a name that was imported before dtcp."""

    def forward(self, x: Tensor, need_weights: bool = False) -> Tensor:  # type: ignore[override]
        x = x.transpose(0, 1)
        return by_name(
            x, x, x, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0,
            self.out_proj.weight, self.out_proj.bias, training=self.training, need_weights=need_weights,
        )[0].transpose(0, 1)  # fmt: skip


def make_module(name: str) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    match name:
        case "attention":
            return Attention(16, 2, **options)
        case "by name":
            return ByName(16, 2, **options)
        case "encoder layer":
            return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, **options)
        case "encoder":
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, **options)
            return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    raise AssertionError(name)


def check_module(rank: int, world: int, name: str, compiled: bool, is_training: bool) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    module = make_module(name).train(is_training)
    run: Any = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x = torch.randn(2, S, 16, generator=torch.Generator().manual_seed(1)).double()
    weight = torch.randn(2, S, 16, generator=torch.Generator().manual_seed(2)).double()
    parameters = list(module.parameters())
    needs_weights = [{"need_weights": True}] if "encoder" not in name else []
    with contextlib.nullcontext() if is_training else torch.no_grad():
        right = module(x)
        for _ in range(2):  # graphs made outside are there when the context is entered, and the other way round
            assert relative_error(run(x), right) < 1e-12
            outside = [run(x, **options) for options in needs_weights]
            with dtcp.context_parallel(mesh, seq_len=S) as cp:
                local = cp.shard(x)
                out = run(local)
                assert relative_error(cp.unshard(out.detach()), right.detach()) < 1e-12
                for options in needs_weights:
                    with pytest.raises(Exception, match=NEEDS_WEIGHTS):
                        run(local, **options)
                loss = (out * cp.shard(weight)).sum()
            if is_training:
                right_grads = torch.autograd.grad((right * weight).sum(), parameters, retain_graph=True)
                for grad, wanted in zip(torch.autograd.grad(loss, parameters), right_grads, strict=True):
                    dist.all_reduce(grad)
                    assert (grad - wanted).norm() < 1e-12 * wanted.norm() + 1e-12
            for options, before in zip(needs_weights, outside, strict=True):
                assert torch.equal(run(x, **options), before)


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("attention", False),
        ("by name", False),
        ("encoder layer", False),
        ("encoder", False),
        ("attention", True),
        ("encoder layer", True),
        pytest.param("by name", True, marks=pytest.mark.slow),
        pytest.param("encoder", True, marks=pytest.mark.slow),
    ],
)
def test_module_is_exact_or_refused(ranks, name, compiled, is_training):
    ranks.run(2, check_module, name, compiled, is_training)


def check_function(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    before = by_name.__code__, by_name.__defaults__, inspect.signature(by_name)
    assert by_name is F.multi_head_attention_forward
    for error in (None, KeyError):
        with contextlib.suppress(KeyError), dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0):
            assert by_name is F.multi_head_attention_forward and by_name.__code__ is not before[0]
            if error:
                raise error
        assert (by_name.__code__, by_name.__defaults__, inspect.signature(by_name)) == before


def test_torchs_function_is_as_it_was_after_a_context(ranks):
    ranks.run(2, check_function)
