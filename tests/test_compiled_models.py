"""The library's own models, a compiled block each: one graph for all steps, whichever door attention goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from dtcp.models import build_model
from oracle import relative_error


def make_rows(seq_len: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seq_len + step)
    return torch.randint(0, 256, (2, seq_len), generator=generator), torch.arange(seq_len).expand(2, -1)


def run_step(model: Any, mesh: Any, door: str, seq_len: int, layout_name: str, step: int) -> Tensor:
    """Logits of the whole sequence, after a backward."""
    tokens, positions = make_rows(seq_len, step)
    layout = dtcp.make_layout(layout_name, seq_len=seq_len, cp=mesh.size())
    if door == "plan":
        dtcp.set_sequence(model, layout)
        logits = model(*(dtcp.shard(x, mesh, layout) for x in (tokens, positions)))
    else:
        with dtcp.context_parallel(
            mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1], buffer_pad_values=0, layout=layout_name
        ):
            logits = model(tokens, positions)
    logits.square().mean().backward()
    return dtcp.unshard(logits.detach(), mesh, layout)


def check_steps(rank: int, world: int, name: str, door: str, backend: str) -> None:
    import torch._dynamo.testing
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = build_model(f"{name}_tiny", num_layers=2)
    whole = build_model(f"{name}_tiny", num_layers=2)
    whole.load_state_dict(model.state_dict())
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for block in model.layers.values():
        if door == "plan":
            parallelize_module(block, mesh, {"attention.sdpa": dtcp.ContextParallel()})
        block.compile(fullgraph=True, backend=counter)
    for step in range(20):  # other data, lengths in as many slots, and layouts
        seq_len, layout = 32 - step % 2, ("head_tail", "contiguous")[step // 2 % 2]
        logits = run_step(model, mesh, door, seq_len, layout, step)
        if step % 7 == 0:
            assert relative_error(logits, whole(*make_rows(seq_len, step)).detach()) < 1e-5
    assert counter.frame_count == 1, "one graph for both blocks and all steps"
    run_step(model, mesh, door, 48, "head_tail", 0)
    assert counter.frame_count == 2, "another number of slots costs one compilation"
    run_step(model, mesh, door, 64, "head_tail", 0)
    assert counter.frame_count == 2, "and only once: the length is dynamic by then"
    for graph in counter.graphs:
        assert sum("dtcp.attention_forward" in str(node.target) for node in graph.graph.nodes) == 1


@pytest.mark.parametrize(
    ("name", "door", "backend"),
    [
        ("gpt", "context", "aot_eager"),
        ("llama", "plan", "aot_eager"),
        pytest.param("gpt", "context", "inductor", marks=pytest.mark.slow),
        pytest.param("gpt", "plan", "inductor", marks=pytest.mark.slow),
        pytest.param("llama", "plan", "inductor", marks=pytest.mark.slow),
        pytest.param("llama", "context", "inductor", marks=pytest.mark.slow),
    ],
)
def test_blocks_compile_once(ranks, name, door, backend):
    ranks.run(2, check_steps, name, door, backend, timeout=180)
