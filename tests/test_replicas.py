"""A warning, once, where gradients of context parallel ranks are never added up; and none where they are."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dtcp

S, STEPS = 12, 4


class Attention(nn.Module):
    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.sdpa = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out = self.sdpa(*self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4))
        return self.layers[0](out.transpose(1, 2).flatten(2))


# Name -> whether the warning is due.
CASES = {
    "nothing": True,
    "nothing, by a plan": True,
    "nothing, with accumulation": True,
    "nothing, one parameter of two": True,
    "nothing, two optimizers": True,
    "nothing, in float64": True,
    "nothing, in bfloat16 and float64": True,
    "nothing, compiled": True,
    "nothing, compiled step": False,  # not seen from within a graph, and no obstacle to it
    "reduce_gradients": False,
    "reduce_gradients, by a plan": False,
    "reduce_gradients, in float64": False,
    "reduce_gradients, with accumulation": False,
    "reduce_gradients, two optimizers": False,
    "apply_fsdp": False,
    "all_reduce": False,
    "no_grad": False,
    "frozen": False,
}


def train(case: str, world: int) -> nn.Module:
    torch.manual_seed(0)
    dims = dtcp.ParallelDims(cp=world)
    mesh = dims.build_mesh("cpu")["cp"]
    model: Any = Model()
    dtype = torch.float64 if "in float64" in case else torch.float32
    if "in bfloat16" in case:
        dtype = torch.bfloat16
        model.layers[0].double().register_forward_pre_hook(lambda _, x: x[0].double())
        model.norm.bfloat16(), model.qkv.bfloat16()
    else:
        model.to(dtype)
    parameters = list(model.parameters())
    if "plan" in case:
        parallelize_module = importlib.import_module("torch.distributed.tensor.parallel").parallelize_module
        parallelize_module(model, mesh, {"sdpa": dtcp.ContextParallel()})
        dtcp.set_sequence(model, dtcp.make_layout("head_tail", seq_len=S, cp=world))
    if case == "frozen":
        model.requires_grad_(False)
        model.input = nn.Parameter(torch.zeros(()), requires_grad=False)
    if case == "nothing, one parameter of two":
        parameters = [model.qkv.weight, model.layers[0].bias]
    if case == "apply_fsdp":
        dtcp.apply_fsdp(model, dims)
        parameters = list(model.parameters())
    run = torch.compile(model, backend="aot_eager") if case == "nothing, compiled" else model
    parts = [parameters[:1], parameters[1:]] if "two optimizers" in case else [parameters]
    optimizers = [torch.optim.SGD(part, lr=1e-3) for part in parts]
    for _ in range(STEPS):
        for _ in range(2 if "accumulation" in case else 1):
            x = torch.randn(2, S, 16, dtype=dtype)
            if "plan" in case:
                run(dtcp.shard(x, mesh, layout(world))).square().sum().backward()
                continue
            with torch.set_grad_enabled(case != "no_grad"), dtcp.context_parallel(mesh, seq_len=S) as cp:
                loss = run(cp.shard(x).requires_grad_()).square().sum()
            if case != "no_grad":
                loss.backward()
        if case.startswith("reduce_gradients"):
            dtcp.reduce_gradients(model, dims)
        if case == "all_reduce":
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        for optimizer in optimizers:
            if case == "nothing, compiled step":
                torch.compile(optimizer.step, backend="eager")()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return model


def layout(world: int) -> Any:
    return dtcp.make_layout("head_tail", seq_len=S, cp=world)


def check_case(rank: int, world: int, case: str) -> tuple[bool, bool, str]:
    """Whether it warns, whether the hook is gone, and where the warning points."""
    replicas = importlib.import_module("dtcp.replicas")
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    if replicas._remove_hook is not None:
        replicas._remove_hook()
    replicas._groups, replicas._remove_hook, replicas._KEY = {}, None, f"test/{case}"  # as in a new process
    assert not hooks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(case, world)
        ours = [w for w in caught if "dtcp: an optimizer has stepped" in str(w.message)]
        if ours:  # once in a process
            assert len(ours) == 1 and ours[0].category is UserWarning
            assert "reduce_gradients(model, dims)" in str(ours[0].message)
            assert "the optimizer's own step or a hook of it" in str(ours[0].message)
    return bool(ours), not hooks, ours[0].filename if ours else ""


@pytest.mark.parametrize("case", CASES)
def test_a_warning_says_that_gradients_are_never_added_up(ranks, case):
    for warned, hook_is_gone, where in ranks.run(2, check_case, case, timeout=120):
        assert warned == CASES[case]
        if warned:
            assert hook_is_gone and where == __file__
        if case == "no_grad":
            assert hook_is_gone, "there was no backward"


def check_other_tensors(rank: int, world: int) -> None:
    """What has no norm to compare, or none at all, is passed by."""
    replicas = importlib.import_module("dtcp.replicas")
    tensors = [
        torch.ones(2, dtype=torch.int32),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.float64),
        torch.ones(4, dtype=torch.float16),
    ]
    for x in tensors:
        x.grad = torch.full_like(x, 2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.param_groups[0]["params"] = tensors
    root = 2**0.5
    [double, half] = replicas._norms(replicas._whole_parameters(optimizer, [rank]))
    assert double == [[2], pytest.approx(root, abs=1e-12), pytest.approx(2 * root, abs=1e-12)]
    assert half == [[4], 2.0, 4.0]
    assert replicas._norms([]) == []


def test_only_tensors_with_a_norm_are_compared(ranks):
    ranks.run(1, check_other_tensors)


def check_one_rank(rank: int, world: int) -> None:
    hooks = importlib.import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    train("nothing", world)
    assert not hooks


def test_one_rank_is_not_watched(ranks):
    ranks.run(1, check_one_rank)
