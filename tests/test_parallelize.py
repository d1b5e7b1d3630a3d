"""`parallelize`: all steps in one call, for a model that is not of this library; the result equals one rank's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

import dtcp
from dtcp.models.init import plain_name
from parity import whole

PLAN = {"attn.core": dtcp.ContextParallel(is_causal=True)}
ROWS, SEQ_LEN, WIDTH, VOCAB = 4, 13, 16, 32


class Core(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.core = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Core()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.core(4 * query, key, value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.mlp = Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(F.gelu(self.attn(self.norm(x))))


class Model(nn.Module):
    """A user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding: nn.Module | None = nn.Embedding(VOCAB, WIDTH)
        self.position_embedding: nn.Module | None = nn.Embedding(2 * SEQ_LEN, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.token_embedding is not None:
            x = self.token_embedding(x) + self.position_embedding(positions)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def check(rank: int, world: int, degrees: dict[str, int], options: dict[str, Any]) -> None:
    dims = dtcp.ParallelDims(**degrees, world_size=world)
    dims.build_mesh("cpu")
    rows = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels, positions = rows[:, :-1], rows[:, 1:].clone(), torch.arange(SEQ_LEN).repeat(ROWS, 1)
    labels[0, 4:] = labels[2] = -100
    reference = make_model()
    loss = dtcp.token_loss(reference(tokens, positions), labels)
    loss.backward()

    model = dtcp.parallelize(make_model(), dims, context_plan=PLAN, **options)
    layout = dtcp.make_layout("head_tail", seq_len=SEQ_LEN, cp=dims.cp)
    if dims.cp > 1:
        dtcp.set_sequence(model, layout)
    reader, num_rows = dims.view("batch").get_local_rank(), ROWS // (dims.dp_shard * dims.dp_replicate)
    mine = [x[reader * num_rows : (reader + 1) * num_rows] for x in (tokens, labels, positions)]
    local = [dtcp.shard(x, dims.view("cp"), layout, pad_value=pad) for x, pad in zip(mine, (0, -100, 0), strict=True)]
    count = int((labels != -100).sum())
    if dims.pp > 1:
        assert isinstance(model, dtcp.Pipeline)
        share = model.forward_backward(
            local[0], local[1], num_microbatches=2, num_valid_tokens=count, positions=local[2]
        )
    else:
        share = dtcp.token_loss(model(local[0], local[2]), local[1], num_valid_tokens=count)
        share.backward()
    share = share.detach().clone()
    for view in ("loss", "pp"):
        torch.distributed.all_reduce(share, group=dims.view(view).get_group())
    assert abs(share - loss) <= 1e-5 * loss
    right = {name: p.grad for name, p in reference.named_parameters()}
    norm = torch.stack([g.norm() for g in right.values()]).norm()
    for name, parameter in model.named_parameters():
        expected = right[plain_name(name)]
        assert (whole(parameter.grad) - expected).norm() <= 1e-5 * expected.norm() + 1e-8 * norm, name


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"cp": 3}, {"offload_activations": True}),
        ({"cp": 2, "dp_replicate": 2}, {"activation_checkpointing": "full", "checkpoint_every": 2}),
        ({"cp": 2, "dp_shard": 2}, {"activation_checkpointing": "selective"}),
        pytest.param(
            {"cp": 2, "dp_shard": 2},
            {"activation_checkpointing": "selective", "compile": {"backend": "aot_eager"}},
            marks=pytest.mark.slow,
        ),
        ({"cp": 2, "pp": 2}, {"pipeline": dtcp.PipelineOptions("GPipe", width=WIDTH)}),
    ],
    ids=str,
)
def test_a_users_model_equals_one_rank(ranks, degrees, options):
    world = torch.tensor(list(degrees.values())).prod().item()
    ranks.run(world, check, degrees, options, timeout=90)


def test_one_rank_keeps_a_plain_model():
    dims = dtcp.ParallelDims(world_size=1)
    model = make_model()
    assert dtcp.parallelize(model, dims, context_plan=PLAN) is model
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"strategy": "rign"}, "strategy"),
        ({"activation_checkpointing": "some"}, "must be one of none, full, selective, got 'some'"),
        ({"compile": {"fullgraph": False}}, "leave fullgraph out"),
        ({"pipeline": dtcp.PipelineOptions()}, "pipeline= is for pp > 1, got pp=1"),
    ],
)
def test_what_does_not_fit_is_refused(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        dtcp.parallelize(make_model(), dtcp.ParallelDims(world_size=1), context_plan=PLAN, **options)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match=r"wants the blocks of Linear in model.layers.*got NoneType"):
        dtcp.parallelize(nn.Linear(2, 2), dtcp.ParallelDims(world_size=1))


def test_a_pipeline_asks_for_the_width():
    dims = dtcp.ParallelDims(pp=2, world_size=2)
    with pytest.raises(ValueError, match=r"give the model config.dim, or .* pipeline=PipelineOptions\(width=…\)"):
        dtcp.parallelize(make_model(), dims, context_plan=PLAN)


def refuse_attention(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(cp=world, world_size=world)
    dims.build_mesh("cpu")
    dtcp.parallelize(make_model(), dims)


def test_a_block_without_the_attention_module_is_refused(ranks):
    ranks.run_expecting(
        2, refuse_attention, ValueError, "plan key 'attention.sdpa' of ContextParallel matches no module"
    )


# ---- modules that are there several times, or never called -----------------------------------------------------------


class Past(Attention):
    """Attends, and not by the module that the plan names."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(4 * query, key, value, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def forward_of_two_ranks(rank: int, world: int, past: list[str]) -> list[str]:
    dims = dtcp.ParallelDims(cp=world, world_size=world)
    mesh = dims.build_mesh("cpu")
    model = make_model()
    for name in past:
        model.layers[name].attn = Past()
    dtcp.parallelize(model, dims, context_plan=PLAN)
    layout = dtcp.make_layout("head_tail", seq_len=SEQ_LEN, cp=world)
    dtcp.set_sequence(model, layout)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    local, positions = (dtcp.shard(x, mesh["cp"], layout) for x in (tokens, torch.arange(SEQ_LEN)[None]))
    caught = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(local, positions)
        caught += [str(warning.message) for warning in found if "planned module" in str(warning.message)]
    return caught


def test_a_planned_module_that_is_never_called_is_an_error_and_some_are_a_warning(ranks):
    ranks.run_expecting(
        2,
        forward_of_two_ranks,
        RuntimeError,
        r"planned module\(s\) layers.0.attn.core, layers.1.attn.core not called in the forward of Model",
        ["0", "1"],
    )
    for caught in ranks.run(2, forward_of_two_ranks, ["1"]):
        assert len(caught) == 1 and "planned module(s) layers.1.attn.core not called" in caught[0]
    assert ranks.run(2, forward_of_two_ranks, []) == [[], []]


def shares_parts(model: nn.Module, what: str) -> nn.Module:
    if what == "block":
        model.layers["1"] = model.layers["0"]
    else:
        model.layers["1"].attn = model.layers["0"].attn
    return model


def check_shared(rank: int, world: int, degrees: dict[str, int], what: str) -> None:
    tokens = torch.arange(SEQ_LEN)[None] * 7 % VOCAB
    positions = torch.arange(SEQ_LEN)[None]
    alone = shares_parts(make_model(), what)
    alone(tokens, positions).square().sum().backward()
    dims = dtcp.ParallelDims(world_size=world, **degrees)
    mesh = dims.build_mesh("cpu")
    plan = {"layers.*.mlp": RowwiseParallel(input_layouts=Replicate())}
    model = shares_parts(make_model(), what)
    dtcp.parallelize(
        model, dims, tensor_plan=plan, context_plan=PLAN, sequence_parallel=False, activation_checkpointing="full"
    )
    local = tokens, positions
    if dims.cp > 1:
        layout = dtcp.make_layout("striped", seq_len=SEQ_LEN, cp=dims.cp)
        dtcp.set_sequence(model, layout)
        local = tuple(dtcp.shard(x, mesh["cp"], layout) for x in (tokens, positions))
        valid = (layout.positions(mesh["cp"].get_local_rank()) < SEQ_LEN)[None, :, None]
    else:
        valid = torch.ones(1, SEQ_LEN, 1)
    (model(*local).square() * valid).sum().backward()
    found = {plain_name(name): whole(p.grad) for name, p in model.named_parameters()}
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("degrees", [{"cp": 2}, {"tp": 2}])
@pytest.mark.parametrize("what", ["block", "attention"])
def test_what_layers_share_is_made_parallel_once(ranks, degrees, what):
    ranks.run(2, check_shared, degrees, what)


def test_a_block_that_is_used_again_has_no_place_in_a_pipeline():
    dims = dtcp.ParallelDims(pp=2, world_size=2)
    with pytest.raises(ValueError, match=r"has a block in model.layers several times.* use pp=1"):
        dtcp.parallelize(
            shares_parts(make_model(), "block"), dims, context_plan=PLAN, pipeline=dtcp.PipelineOptions(width=WIDTH)
        )


def share_with_root(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(cp=world, world_size=world)
    dims.build_mesh("cpu")
    model = make_model()
    model.layers["0"].mlp.weight = model.extra = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    dtcp.parallelize(model, dims, context_plan=PLAN)


def test_a_block_that_shares_a_weight_with_the_root_is_refused_by_name(ranks):
    ranks.run_expecting(2, share_with_root, ValueError, r"shares extra with the rest of the model")
