"""Every way to call attention takes ``ranks_per_node``, the training job too; and ranks agree on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from dtcp.mesh import ParallelDims
from parity import compare, job, record_run, scattered
from recorder import Sent, count_exchanges


def inputs_of(layout: dtcp.SequenceLayout, rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    return [torch.randn(1, 2, layout.local_seq_len, 16, requires_grad=True) for _ in range(3)]


def crossings(rank: int, sent: list[Sent]) -> int:
    """Messages to the other node: of one level, rank 0 would send three in the forward and rank 1 none."""
    return sum(x.peer is not None and x.peer // 2 != rank // 2 for x in sent)


def check_doors(rank: int, world: int) -> None:
    """Every door gives the numbers of the explicit call, and crosses to the other node as often."""
    from torch.nn.functional import scaled_dot_product_attention as attend

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=4 * world, cp=world)
    inputs = inputs_of(layout, rank)

    def explicit() -> Tensor:
        return dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout, is_causal=True, ranks_per_node=2)

    def in_context() -> Tensor:
        with dtcp.context_parallel(mesh, seq_len=layout.seq_len, ranks_per_node=2):
            return attend(*inputs, is_causal=True)

    def of_dtensors() -> Tensor:
        return attend(*(dtcp.as_dtensor(x, mesh, layout, ranks_per_node=2) for x in inputs), is_causal=True).to_local()

    class Attention(torch.nn.Module):
        is_causal = True

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, is_causal=True)

    def planned() -> Tensor:
        from torch.distributed.tensor.parallel import parallelize_module

        model = torch.nn.ModuleDict({"attention": Attention()})
        parallelize_module(model, mesh, {"attention": dtcp.ContextParallel(ranks_per_node=2)})
        dtcp.set_sequence(model, layout)
        return torch.utils.checkpoint.checkpoint(model["attention"], *inputs, use_reentrant=False)

    results, crossed = [], []
    for door in (explicit, in_context, of_dtensors, planned):
        with count_exchanges() as sent:
            out = door()
            num_forward = crossings(rank, sent)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
        crossed.append((num_forward, crossings(rank, sent) - num_forward))
    assert crossed[0] == (2, 3), "two pieces of a shard; in the backward these again, and a sum of gradients"
    assert crossed[1:3] == crossed[:1] * 2
    assert crossed[3] == (2, 2 + 3), "a checkpoint runs the forward again"
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_every_door_takes_ranks_per_node(ranks):
    ranks.run(4, check_doors)


def check_compiled(rank: int, world: int, strategy: str) -> None:
    import torch._dynamo.testing

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))

    def block(query: Tensor, key: Tensor, value: Tensor, layout: dtcp.SequenceLayout) -> Tensor:
        out = dtcp.context_parallel_attention(
            query * 2, key, value, mesh=mesh, layout=layout, is_causal=True, strategy=strategy, ranks_per_node=2
        )
        return out.sin()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for step in range(3):
        layout = dtcp.make_layout("head_tail", seq_len=8 * world - step, cp=world)
        inputs = inputs_of(layout, rank)
        with count_exchanges() as sent:
            results = [compiled(*inputs, layout)]
        assert crossings(rank, sent) == (2 if strategy == "ring" else 1)
        results.append(block(*inputs, layout))
        grads = [torch.autograd.grad(out.sum(), inputs) for out in results]
        for one, other in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1, "one graph, and no recompilation from step to step"


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_compiled_attention_of_two_levels_is_one_graph_and_equals_eager(ranks, strategy):
    ranks.run(4, check_compiled, strategy, timeout=120)


def check_disagreement(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=16, cp=world)
    with pytest.raises(ValueError, match="0: 'ring', 1: 'ring with ranks_per_node=2', 2: 'ring'"):
        dtcp.context_parallel_attention(
            *inputs_of(layout, rank), mesh=mesh, layout=layout, ranks_per_node=2 if rank == 1 else None
        )


def test_ranks_with_other_nodes_are_refused_before_anything_is_sent(ranks):
    ranks.run(4, check_disagreement)


def check_configured(rank: int, world: int, overrides: list[str]) -> tuple[Any, ...]:
    from dtcp.models import build_model
    from dtcp.train.config import compose_job_config, to_model_config
    from dtcp.train.parallel import cut_model

    config = compose_job_config(overrides)
    dims = ParallelDims(**config.mesh.degrees())
    dims.build_mesh("cpu")
    with torch.device("meta"):
        model = build_model(to_model_config(config.model))
    return cut_model(model, dims, config).layers["0"].attention.sdpa._dtcp_plan.strategy[:3]


def test_the_training_job_takes_the_ranks_of_a_node(ranks):
    """Of the world, where neighbours on the cp axis are tp ranks apart."""
    tiny = ["model=llama_tiny", "mesh.cp=4", "mesh.ranks_per_node=2"]
    assert ranks.run(4, check_configured, tiny) == [("ring", 1, 2)] * 4
    tiny = ["model=llama_tiny", "mesh.cp=2", "mesh.tp=2", "mesh.ranks_per_node=2", "attention.strategy=all_gather"]
    assert ranks.run(4, check_configured, tiny) == [("all_gather", 1, 1)] * 4
    ranks.run_expecting(4, check_configured, ValueError, "ranks_per_node=1 with tp=2", [*tiny, "mesh.ranks_per_node=1"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_training_on_nodes_equals_one_rank(ranks, strategy):
    whole = ranks.run(1, record_run, job("llama", 97), scattered)[0]
    on_nodes = [*job("llama", 97), "mesh.cp=4", "mesh.ranks_per_node=2", f"attention.strategy={strategy}"]
    for run in ranks.run(4, record_run, on_nodes, scattered):
        difference = compare(run, whole)
        assert difference.is_within, difference
