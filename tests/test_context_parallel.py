"""ContextParallel as a plan entry, and set_sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from dtcp.models.attention import ScaledDotProductAttention
from oracle import STRATEGIES, options_of, relative_error


class Block(nn.Module):
    """Grouped-query attention with a residual; ``sdpa`` is the module that a plan names."""

    def __init__(self, dim: int = 32, num_heads: int = 4, num_kv_heads: int = 2) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        head_dim = dim // num_heads
        self.qkv = nn.ModuleList(nn.Linear(dim, h * head_dim) for h in self.heads)
        self.sdpa = ScaledDotProductAttention()
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            project(x).unflatten(-1, (h, -1)).transpose(1, 2) for project, h in zip(self.qkv, self.heads, strict=True)
        )
        return x + self.output(self.sdpa(*parts).transpose(1, 2).flatten(2))


def make_pair(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """The same two-block model twice, in float64, with peaked attention: one stays whole, one is cut."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block()).double()
    with torch.no_grad():
        for block in model:
            block.qkv[0].weight.mul_(6)
    return model, copy.deepcopy(model)


def parallelize(model: nn.Module, mesh: Any, **options: Any) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    for block in model:
        parallelize_module(block, mesh, {"sdpa": dtcp.ContextParallel(**options)})


def check_step(mesh: Any, whole: nn.Module, cut: nn.Module, layout: Any, run: Any = None) -> None:
    """One forward and backward of both; every rank's out, input gradient and the summed parameter gradients agree."""
    x = torch.randn(2, layout.seq_len, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = x.requires_grad_()
    right = whole(x)
    (right * weight).sum().backward()
    local = dtcp.shard(x.detach(), mesh, layout).requires_grad_()
    dtcp.set_sequence(cut, layout)
    out = (run or cut)(local)
    (out * dtcp.shard(weight, mesh, layout)).sum().backward()
    tokens = slice(0, layout.num_valid(mesh.get_local_rank()))  # pad slots hold what the biases put there
    assert relative_error(out[:, tokens].detach(), dtcp.shard(right.detach(), mesh, layout)[:, tokens]) < 1e-12
    assert relative_error(local.grad, dtcp.shard(x.grad, mesh, layout)) < 1e-12
    for (name, own), (_, expected) in zip(cut.named_parameters(), whole.named_parameters(), strict=True):
        torch.distributed.all_reduce(own.grad, group=mesh.get_group())
        assert (own.grad - expected.grad).norm() < 1e-10 * max(expected.grad.norm(), 1e-3), name
        own.grad = expected.grad = None


def check_plan(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for strategy in STRATEGIES:
        whole, cut = make_pair()
        names = list(cut.state_dict())
        parallelize(cut, mesh, **options_of(strategy, world), kernel="math")
        assert list(cut.state_dict()) == names, "checkpoints keep their names"
        assert type(cut[0].sdpa).__name__ == "ContextParallelScaledDotProductAttention"
        assert isinstance(cut[0].sdpa, ScaledDotProductAttention)
        for name, seq_len in (("head_tail", 13), ("striped", 8), ("contiguous", 5), ("head_tail", 1)):
            check_step(mesh, whole, cut, dtcp.make_layout(name, seq_len=seq_len, cp=world))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_planned_model_equals_the_whole_one(ranks, world):
    ranks.run(world, check_plan)


def check_wrapped(rank: int, world: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole, cut = make_pair()
    parallelize(cut, mesh, kernel="math")
    wrapped = nn.Sequential(*(checkpoint_wrapper(block) for block in cut))
    for seq_len in (13, 8):
        check_step(mesh, whole, cut, dtcp.make_layout("head_tail", seq_len=seq_len, cp=world), run=wrapped)
    reentrant = lambda x: torch.utils.checkpoint.checkpoint(cut, x, use_reentrant=True)  # noqa: E731
    check_step(mesh, whole, cut, dtcp.make_layout("striped", seq_len=9, cp=world), run=reentrant)


def test_a_planned_block_works_under_activation_checkpointing(ranks):
    ranks.run(2, check_wrapped)


def check_compiled(rank: int, world: int, backend: str) -> None:
    import torch._dynamo.testing

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole, cut = make_pair()
    parallelize(cut, mesh, kernel="math")
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for block in cut:
        block.compile(fullgraph=True, backend=counter)
    local_lengths = set()
    for step in range(20):
        # Other lengths in the same number of slots, other layouts, made anew each step.
        name = ("head_tail", "striped")[step % 2]
        layout = dtcp.make_layout(name, seq_len=8 * world - step % 3, cp=world, multiple_of=8)
        local_lengths.add(layout.local_seq_len)
        check_step(mesh, whole, cut, layout)
    assert len(local_lengths) == 1
    assert counter.frame_count == 1, "one graph, compiled once, for both blocks and all steps"
    for graph in counter.graphs:
        assert sum("dtcp.attention_forward" in str(node.target) for node in graph.graph.nodes) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_block_is_one_graph_and_steps_cost_no_recompilation(ranks, backend):
    ranks.run(2, check_compiled, backend, timeout=120)


def check_in_flight(rank: int, world: int, is_checkpointed: bool) -> None:
    """set_sequence for a second step before the backward of the first, with recomputation in the backward."""
    from torch.distributed._composable import checkpoint

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    _, cut = make_pair()
    parallelize(cut, mesh, kernel="math")
    layouts = [dtcp.make_layout("head_tail", seq_len=12, cp=world), dtcp.make_layout("striped", seq_len=11, cp=world)]
    inputs = [dtcp.shard(torch.randn(1, x.seq_len, 32).double(), mesh, x).requires_grad_() for x in layouts]

    def gradient(x: Tensor, layout: Any) -> Tensor:
        dtcp.set_sequence(cut, layout)
        return torch.autograd.grad(cut(x).square().sum(), x)[0]

    right = [gradient(x, layout) for x, layout in zip(inputs, layouts, strict=True)]
    if is_checkpointed:
        for block in cut:
            checkpoint(block)
    outs = []
    for x, layout in zip(inputs, layouts, strict=True):
        dtcp.set_sequence(cut, layout)
        outs.append(cut(x).square().sum())
    for index in (1, 0):
        assert torch.equal(torch.autograd.grad(outs[index], inputs[index])[0], right[index])


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
def test_a_later_set_sequence_does_not_reach_an_earlier_backward(ranks, is_checkpointed):
    ranks.run(2, check_in_flight, is_checkpointed)


def check_copies(rank: int, world: int) -> None:
    """A copy forgets the sequence: else a recomputation in it would take that of a later step."""
    import io

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole, cut = make_pair()
    parallelize(cut, mesh, kernel="math")
    layout = dtcp.make_layout("head_tail", seq_len=13, cp=world)
    dtcp.set_sequence(cut, layout)
    file = io.BytesIO()
    torch.save(cut[0].sdpa, file)
    file.seek(0)
    loaded = copy.deepcopy(cut)
    loaded[0].sdpa = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(cut), loaded):
        assert type(other[0].sdpa) is type(cut[0].sdpa)
        with pytest.raises(RuntimeError, match="does not know the sequence; call dtcp.set_sequence"):
            other(torch.zeros(1, layout.local_seq_len, 32).double())
        check_step(mesh, whole, other, layout)


def test_copies_of_a_planned_model_are_told_their_own_sequence(ranks):
    ranks.run(2, check_copies)


def check_attribute(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole, cut = make_pair()
    parallelize(cut, mesh, kernel="math")
    for is_causal in (True, False):
        for block in (*whole, *cut):
            block.sdpa.is_causal = is_causal
        check_step(mesh, whole, cut, dtcp.make_layout("striped", seq_len=9, cp=world))
    hidden = Block()
    hidden.sdpa.forward = torch.nn.functional.scaled_dot_product_attention
    compiled = Block()
    compiled.sdpa = torch.compile(compiled.sdpa)
    for block in (hidden, compiled):
        with pytest.raises(ValueError, match="has a forward of its own instance .* apply the plan before"):
            parallelize([block], mesh, is_causal=True)


def test_the_module_decides_at_each_call_and_hides_no_forward(ranks):
    ranks.run(2, check_attribute)


def check_refusals(rank: int, world: int) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=8, cp=world)
    _, cut = make_pair()
    with pytest.raises(
        ValueError, match="found no context parallel module; give ContextParallel to parallelize_module"
    ):
        dtcp.set_sequence(cut, layout)
    parallelize(cut, mesh)
    local = torch.randn(1, layout.local_seq_len, 32).double()
    with pytest.raises(RuntimeError, match=r"does not know the sequence; call dtcp\.set_sequence"):
        cut(local)
    with pytest.raises(ValueError, match="is context parallel already"):
        parallelize(cut, mesh)
    with pytest.raises(ValueError, match=f"for cp=5, the model was parallelized over {world} ranks; make it with"):
        dtcp.set_sequence(cut, dtcp.make_layout("head_tail", seq_len=8, cp=5))
    with pytest.raises(ValueError, match="documents must be dtcp.Documents, got list"):
        dtcp.set_sequence(cut, layout, documents=[8])
    dtcp.set_sequence(cut, layout)
    with pytest.raises(ValueError, match="query: 6 slots, but the layout"):
        cut(torch.randn(1, 6, 32).double())
    with pytest.raises(TypeError, match="attn_mask"):
        cut[0].sdpa(local, local, local, attn_mask=torch.ones(1))
    with pytest.raises(
        ValueError, match=r"cannot tell whether Identity is causal; pass ContextParallel\(is_causal=True\)"
    ):
        parallelize_module(nn.Sequential(nn.Identity()), mesh, {"0": dtcp.ContextParallel()})


def test_misuse_of_the_plan_is_refused(ranks):
    ranks.run(2, check_refusals)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "zigzag"}, ValueError, "strategy must be one of ring, .*, got 'zigzag'"),
        ({"strategy": "hybrid"}, ValueError, "strategy='hybrid' needs ulysses_degree"),
        ({"kernel": "triton"}, ValueError, "kernel must be one of auto, flash, .* got 'triton'"),
        ({"qkv_format": "thd"}, ValueError, "qkv_format must be 'bhsd' or 'bshd', got 'thd'"),
    ],
)
def test_bad_options_are_refused_when_the_plan_is_made(options, error, message):
    with pytest.raises(error, match=message):
        dtcp.ContextParallel(**options)


class Hybrid(nn.Module):
    """Two kinds of layers, of which one has no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), nn.Linear(32, 32), Block()])


def check_unmatched(rank: int, world: int) -> None:
    import warnings

    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    style = dtcp.ContextParallel
    for plan, key in [
        ({"spda": style()}, "spda"),
        ({"sdpa": style(), "attention.sdpa": style()}, "attention.sdpa"),  # the other one is applied
        ({"sdpa.attention": style()}, "sdpa.attention"),
        ({"qkv.3": style()}, "qkv.3"),
        ({"s?dpa": style()}, r"s\?dpa"),
    ]:
        words = f"plan key '{key}' of ContextParallel matches no module of Block, .* qkv, qkv.0, .*sdpa"
        with pytest.raises(ValueError, match=words):
            parallelize_module(Block(), mesh, plan)
    with pytest.raises(ValueError, match="key 'layers.*.sdpa.x' of ContextParallel matches no module of Hybrid"):
        parallelize_module(Hybrid(), mesh, {"layers.*.sdpa.x": style()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize_module(Hybrid(), mesh, {"layers.*.sdpa": style(), "head": ColwiseParallel()})
    assert all(type(layer.sdpa).__name__.startswith("ContextParallel") for layer in model.layers[::2])
    torchs = [(w.filename, str(w.message)) for w in caught]  # for the layer that has none, and for another's entry
    assert ["key 'sdpa'" in message for _, message in torchs] == [True, False] and "key 'head'" in torchs[1][1]
    assert torchs[1][0] == __file__


def test_a_plan_entry_that_matches_nothing_is_an_error(ranks):
    ranks.run(2, check_unmatched)


def check_two_meshes(rank: int, world: int) -> None:
    """Two models over different cp groups, used in turn."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    models = []
    for axis in ("outer", "inner"):
        whole, cut = make_pair(seed=len(models))
        parallelize(cut, mesh[axis], kernel="math")
        models.append((mesh[axis], whole, cut))
    for seq_len in (5, 12):
        for axis_mesh, whole, cut in models:
            check_step(axis_mesh, whole, cut, dtcp.make_layout("head_tail", seq_len=seq_len, cp=2))


def test_two_models_on_two_meshes_do_not_see_each_other(ranks):
    ranks.run(4, check_two_meshes)


def check_one_rank_refuses(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    _, cut = make_pair()
    parallelize(cut, mesh)
    dtcp.set_sequence(cut, dtcp.make_layout("head_tail", seq_len=8 * world, cp=world))
    query = torch.randn(1, 4, 8, 8)
    with pytest.raises((ValueError, RuntimeError), match="one head dim" if rank else r"rank\(s\) \[1\] .*refused"):
        cut[0].sdpa(query, query[..., :4] if rank else query, query)


def test_a_refusal_of_one_rank_reaches_the_others(ranks):
    ranks.run(2, check_one_rank_refuses)


def check_default_dtype(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            module = nn.ModuleDict({"sdpa": ScaledDotProductAttention()})
            dtcp.ContextParallel()._apply(module["sdpa"], mesh)
        finally:
            torch.set_default_dtype(torch.float32)
        assert type(module["sdpa"]).__name__ == "ContextParallelScaledDotProductAttention"


def test_a_plan_does_not_depend_on_the_default_dtype(ranks):
    ranks.run(2, check_default_dtype)
