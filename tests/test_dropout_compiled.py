"""Compiled dropout drops what eager dropout drops, bit by bit, and a new step, seed, row or block compiles nothing."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtcp
from dtcp.models import build_model


def keys(rows: int, size: int, step: int = 1) -> Tensor:
    return dtcp.dropout_keys(2, step, range(rows), torch.arange(size))


def run(dropout: nn.Module, x: Tensor, token_keys: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    out = dropout(leaf, token_keys)
    return out, torch.autograd.grad(out, leaf, x)[0]


# Small and odd sizes end in the scalar loops of a vectorised kernel; p = 0.5 asks for the highest bit of a product.
@pytest.mark.parametrize(
    ("shape", "dtype", "p"),
    [
        pytest.param((1, 3, 5), torch.float32, 0.5, marks=pytest.mark.slow),
        pytest.param((2, 7, 67), torch.bfloat16, 0.1, marks=pytest.mark.slow),
        pytest.param((3, 64, 128), torch.float64, 0.9, marks=pytest.mark.slow),
        pytest.param((2, 9, 1), torch.float32, 0.5, marks=pytest.mark.slow),
        pytest.param((1, 5, 3, 11), torch.bfloat16, 0.5, marks=pytest.mark.slow),
        pytest.param((2, 33), torch.float32, 0.3, marks=pytest.mark.slow),
    ],
)
def test_inductor_equals_eager_bitwise(shape, dtype, p):
    dropout, x = dtcp.Dropout(p, name="d"), torch.randn(shape).to(dtype)
    compiled = torch.compile(dropout, fullgraph=True, dynamic=False)
    for found, wanted in zip(run(compiled, x, keys(*shape[:2])), run(dropout, x, keys(*shape[:2])), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_compiled_keys_equal_eager_ones():
    step, positions = torch.tensor(5), torch.arange(100) + 2**33
    compiled = torch.compile(dtcp.dropout_keys, fullgraph=True)
    rows = torch.tensor([3, 10**6])
    assert torch.equal(compiled(7, step, rows, positions), dtcp.dropout_keys(7, 5, rows, positions))


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=False)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_blocks_compile_once_and_equal_eager_ones(backend, checkpointed):
    model = build_model("gpt_tiny", num_layers=3, dim=32, max_seq_len=64, dropout=0.3)
    whole = build_model("gpt_tiny", num_layers=3, dim=32, max_seq_len=64, dropout=0.3)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    if checkpointed:
        model.layers = nn.ModuleDict({name: Checkpointed(block) for name, block in model.layers.items()})
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    for step in range(20):
        model.zero_grad()
        whole.zero_grad()
        token_keys = dtcp.dropout_keys(step // 10, step, [step, step + 1], torch.arange(step, step + 24))
        outs = [m(tokens, dropout_keys=token_keys) for m in (model, whole)]
        for out in outs:
            out.square().mean().backward()
        if step % 10 == 1:
            torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
            for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-8)
            assert backend == "inductor" or torch.equal(*outs)
    assert counter.frame_count == 1, "one graph for all blocks and steps"


def test_a_compiled_model_that_is_told_its_step_compiles_once():
    model = build_model("gpt_tiny", num_layers=1, dim=32, max_seq_len=64, dropout=0.3)
    whole = build_model("gpt_tiny", num_layers=1, dim=32, max_seq_len=64, dropout=0.3)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    layout = dtcp.make_layout("contiguous", seq_len=24, cp=1)
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    for step in range(12):
        for each in (compiled, whole):
            dtcp.set_sequence(each, layout, step=step, rows=[step, 100 * step])
        assert torch.equal(compiled(tokens), whole(tokens))
    assert counter.frame_count == 1
