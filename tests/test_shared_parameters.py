"""A parameter that a model has twice stays one where the model is cut, or is refused by both of its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dtcp
from dtcp.models.init import plain_name
from dtcp.parallelize.shared import ConstantBuffers, shared_buffers, tied_parameters
from dtcp.parallelize.stages import all_stages, deal_layers
from parity import whole

ROWS, SEQ_LEN, WIDTH, VOCAB = 4, 6, 8, 16
TIED = ("token_embedding",)


class Model(nn.Module):
    """A user's own: each part is skipped where it is None; parameters of its own at both ends."""

    first_modules = ("token_embedding", "scale")
    last_modules = ("head", "temperature")

    def __init__(self, num_layers: int = 2, is_tied: bool = True) -> None:
        super().__init__()
        self.token_embedding: nn.Module | None = nn.Embedding(VOCAB, WIDTH)
        self.scale: nn.Parameter | None = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(num_layers)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCAB, bias=False)
        self.temperature: nn.Parameter | None = nn.Parameter(torch.tensor(1.5))
        if is_tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.token_embedding is not None:
            x = self.token_embedding(x) * self.scale
        for block in self.layers.values():
            x = x + torch.tanh(block(x))
        return x if self.head is None else self.head(x) * self.temperature


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def make_batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---- stages ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(data=st.data(), num_layers=st.integers(2, 7), pp=st.integers(2, 4))
def test_layers_that_share_a_weight_are_refused_where_they_are_on_two_stages(data: Any, num_layers: int, pp: int):
    pp = min(pp, num_layers)
    one, other = sorted(data.draw(st.lists(st.integers(0, num_layers - 1), min_size=2, max_size=2, unique=True)))
    model = make_model(num_layers=num_layers, is_tied=False)
    model.layers[str(other)].weight = model.layers[str(one)].weight
    stage_of = {layer: stage for stage, layers in enumerate(deal_layers(num_layers, pp)) for layer in layers}
    if stage_of[one] == stage_of[other]:
        assert len(all_stages(model, pp)) == pp
        return
    stages = stage_of[one], stage_of[other]
    pattern = rf"layers.{one}.weight of .*stage {stages[0]} and layers.{other}.weight of stage {stages[1]} are one"
    with pytest.raises(ValueError, match=pattern):
        all_stages(model, pp)


def test_a_module_that_layers_share_is_refused():
    model = make_model(is_tied=False)
    common = nn.Linear(WIDTH, WIDTH)
    for block in model.layers.values():
        block.common = common
    with pytest.raises(ValueError, match=r"layers.0.common.weight .* layers.1.common.weight .* use pp=1"):
        all_stages(model, 2)


def test_a_head_with_the_embeddings_weight_is_refused_until_it_is_tied():
    dims = dtcp.ParallelDims(pp=2, world_size=2)
    model = make_model()
    pattern = r"token_embedding.weight .* and head.weight .*PipelineOptions\(tied=\('token_embedding',\)\)"
    with pytest.raises(ValueError, match=pattern):
        dtcp.parallelize(model, dims, context_plan={}, pipeline=dtcp.PipelineOptions(width=WIDTH))
    first, last = all_stages(model, 2, tied=TIED)
    assert tied_parameters(first, last, TIED) == {"token_embedding.weight": "head.weight"}
    assert last.token_embedding is None and last.head.weight is first.token_embedding.weight


def test_an_embedding_whose_head_has_another_weight_is_kept_on_the_last_stage():
    first, last = all_stages(make_model(is_tied=False), 2, tied=TIED)
    assert last.token_embedding is first.token_embedding
    assert tied_parameters(first, last, TIED) == {"token_embedding.weight": "token_embedding.weight"}


@pytest.mark.parametrize(
    ("tied", "device", "pattern"),
    [
        (("head",), "cpu", "tied names modules of the first stage, got 'head'; those of Model are token_embedding"),
        (("scale",), "cpu", "got 'scale'; Model has there token_embedding"),
        (TIED, "meta", "token_embedding.weight and head.weight are one parameter on the meta device"),
    ],
)
def test_what_cannot_be_tied_is_refused(tied: tuple[str, ...], device: str, pattern: str):
    with torch.device(device):
        model = make_model()
    with pytest.raises(ValueError, match=pattern):
        all_stages(model, 2, tied=tied)


def test_a_name_of_both_ends_is_refused():
    model = make_model(is_tied=False)
    model.last_modules = ("head", "temperature", "scale")
    with pytest.raises(ValueError, match="both name scale, which one stage has"):
        all_stages(model, 2)


def train(rank: int, world: int) -> None:
    """Two steps on two stages, beside one rank's."""
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    tokens, labels = make_batch()
    reference = make_model()
    pipeline = dtcp.parallelize(
        make_model(), dims, context_plan={}, pipeline=dtcp.PipelineOptions(width=WIDTH, tied=TIED)
    )
    assert isinstance(pipeline, dtcp.Pipeline)
    models = reference, pipeline
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for _ in range(2):
        dtcp.token_loss(reference(tokens), labels).backward()
        pipeline.forward_backward(tokens, labels, num_microbatches=2, num_valid_tokens=labels.numel())
        norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
        torch.testing.assert_close(dtcp.clip_grad_norm_(pipeline, 100.0, dims), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = [plain_name(name) for name, _ in pipeline.named_parameters()]
    assert names == (["scale", "token_embedding.weight"] if rank == 0 else ["temperature"]) + [
        f"layers.{rank}.weight", f"layers.{rank}.bias", *(["head.weight"] if rank else [])
    ]  # fmt: skip
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(plain_name(name)), rtol=1e-5, atol=1e-6)


def test_a_tied_model_with_parameters_of_its_own_trains_on_two_stages_as_on_one_rank(ranks):
    ranks.run(2, train)


def begin_differently(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    options = dtcp.PipelineOptions(width=WIDTH, tied=TIED)
    pipeline: Any = dtcp.parallelize(make_model(), dims, context_plan={}, pipeline=options)
    if rank == 1:
        with torch.no_grad():
            pipeline.stages[0].head.weight.add_(1)
    tokens, labels = make_batch()
    pipeline.forward_backward(tokens, labels, num_microbatches=2, num_valid_tokens=labels.numel())


def test_tied_weights_that_begin_differently_are_refused_on_every_rank(ranks):
    pattern = "token_embedding.weight of the first stage and head.weight of the last are tied, and begin with different"
    ranks.run_expecting(2, begin_differently, ValueError, pattern)


class Counting(nn.Linear):
    """A block with a table that all blocks share, and may count in."""

    counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.table += 1
        return super().forward(x) * self.table


@pytest.mark.parametrize("counts", [False, True])
def test_a_table_that_stages_share_may_be_read_and_not_changed(counts: bool):
    model = make_model(is_tied=False)
    table = torch.ones(WIDTH)
    for key in model.layers:
        model.layers[key] = Counting(WIDTH, WIDTH)
        model.layers[key].register_buffer("table", table)
        model.layers[key].counts = counts
    first, last = all_stages(model, 2)
    assert shared_buffers([first, last]) == {"layers.0.table", "layers.1.table"}
    ConstantBuffers(shared_buffers([first, last])).watch(first)
    if not counts:
        first(make_batch()[0])
        return
    with pytest.raises(ValueError, match=r"changes the buffer layers.0.table, which several pipeline stages have"):
        first(make_batch()[0])


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def plan(embedding: Any) -> dict[str, Any]:
    return {"token_embedding": embedding, "head": ColwiseParallel(output_layouts=Replicate())}


def train_over_tp(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(tp=world, world_size=world)
    dims.build_mesh("cpu")
    tokens, labels = make_batch()
    reference = make_model()
    dtcp.token_loss(reference(tokens), labels).backward()
    model = make_model()
    cut = plan(RowwiseParallel(input_layouts=Replicate()))
    dtcp.parallelize(model, dims, tensor_plan=cut, context_plan={}, sequence_parallel=False)
    assert model.head.weight is model.token_embedding.weight and model.head.weight.to_local().size(0) == VOCAB // world
    dtcp.token_loss(model(tokens), labels).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_plan_that_cuts_embedding_and_head_alike_leaves_them_one_parameter(ranks):
    ranks.run(2, train_over_tp)


def cut_in_two_ways(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(tp=world, world_size=world)
    dims.build_mesh("cpu")
    cut = plan(ColwiseParallel(output_layouts=Replicate()))
    dtcp.parallelize(make_model(), dims, tensor_plan=cut, context_plan={}, sequence_parallel=False)


def test_a_plan_that_cuts_one_parameter_in_two_ways_is_refused(ranks):
    pattern = r"token_embedding.weight and head.weight are one parameter, .*first as .*dim=1.* second as .*dim=0"
    ranks.run_expecting(2, cut_in_two_ways, ValueError, pattern)


def test_parameters_that_share_memory_and_are_no_one_parameter_are_refused_by_both_names():
    dims = dtcp.ParallelDims()
    for tie in (
        lambda model: setattr(model.head.weight, "data", model.token_embedding.weight.data),
        lambda model: setattr(model.layers["1"], "weight", nn.Parameter(model.layers["0"].weight.data)),
        lambda model: setattr(model.layers["1"], "bias", nn.Parameter(model.layers["0"].weight.data[3])),
        lambda model: setattr(
            model.layers["1"], "weight", nn.Parameter(torch.from_numpy(model.layers["0"].weight.data.numpy()))
        ),
        lambda model: model.layers["0"].register_buffer("anchor", model.layers["1"].weight.data),
    ):
        model = Model(is_tied=False)
        tie(model)
        with pytest.raises(ValueError, match="lie in the same memory"):
            dtcp.parallelize(model, dims)
    flat = torch.zeros(2 * WIDTH)
    model = Model(is_tied=True)  # one parameter under two names
    model.layers["0"].bias, model.layers["1"].bias = (nn.Parameter(x) for x in flat.split(WIDTH))  # side by side
    dtcp.parallelize(model, dims)
    wide = torch.zeros(WIDTH, 2 * WIDTH)  # columns of one tensor lie between each other
    model = Model(is_tied=True)
    for layer, part in zip(model.layers.values(), wide.chunk(2, dim=1), strict=True):
        layer.weight = nn.Parameter(part)
    dtcp.parallelize(model, dims)
