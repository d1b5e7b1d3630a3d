"""`parallelize`: all steps in one call, for a model that is not of this library; the result equals one rank's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    with pytest.raises(ValueError, match=r"use pipeline=PipelineOptions\(width=…\)"):
        dtcp.parallelize(make_model(), dims, context_plan=PLAN)


def refuse_attention(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(cp=world, world_size=world)
    dims.build_mesh("cpu")
    dtcp.parallelize(make_model(), dims)


def test_a_block_without_the_attention_module_is_refused(ranks):
    ranks.run_expecting(
        2, refuse_attention, ValueError, "plan key 'attention.sdpa' of ContextParallel matches no module"
    )
