"""A pipeline's stages give the loss and the gradients of the whole model on one rank, with every schedule."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtcp
from dtcp.models import build_model
from dtcp.models.init import plain_name
from dtcp.parallelize.pipeline import Pipeline
from dtcp.parallelize.stages import deal_layers, make_stage, split_into_stages
from parity import whole

ROWS, SEQ_LEN, WIDTH = 4, 13, 32


@dataclass(frozen=True)
class Cell:
    """A pipeline, and what it is combined with."""

    schedule: str
    model: str
    pp: int = 2
    cp: int = 1
    dp_shard: int = 1
    door: str = "plan"  # plan, context: how attention is cut
    checkpointed: bool = False
    compiled: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.cp * self.dp_shard

    def __str__(self) -> str:
        options = [self.schedule, self.model, f"pp{self.pp}", f"cp{self.cp}", f"dp{self.dp_shard}", self.door]
        return "-".join(options + ["checkpointed"] * self.checkpointed + ["compiled"] * self.compiled)


def make_model(name: str, num_layers: int = 4) -> nn.Module:
    sizes: dict[str, Any] = {"num_layers": num_layers, "dim": WIDTH, "qk_init_scale": 8.0}
    sizes |= {"tie_weights": True} if name == "gpt" else {"ffn_dim": 48}
    return build_model(f"{name}_tiny", seed=3, **sizes)


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = rows[:, 1:].clone()
    labels[0, :9] = labels[2] = -100
    return rows[:, :-1].contiguous(), labels, torch.arange(SEQ_LEN).repeat(ROWS, 1)


def make_pipeline(cell: Cell, dims: dtcp.ParallelDims, model: nn.Module) -> Pipeline:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.tensor.parallel import parallelize_module

    tied = ["token_embedding"] if cell.model == "gpt" else []
    stages, num_stages = split_into_stages(model, dims, schedule=cell.schedule, tied=tied)
    for stage in stages.values():
        for name, block in stage.layers.items():
            if cell.cp > 1 and cell.door == "plan":
                parallelize_module(block, dims.view("cp"), {"attention.sdpa": dtcp.ContextParallel()})
            if cell.checkpointed:
                stage.layers[name] = block = checkpoint_wrapper(block)
            if cell.compiled:
                block.compile(fullgraph=True, backend="aot_eager")
        if cell.dp_shard > 1:
            dtcp.apply_fsdp(stage, dims, reshard_after_forward=False)
    names = [f"{name}.weight" for name in tied]
    return Pipeline(stages, dims, num_stages=num_stages, width=WIDTH, schedule=cell.schedule, tied=names)


def check(rank: int, world: int, cell: Cell) -> None:
    """Evaluate and train twice, and once more with gradients of two runs added up."""
    dims = dtcp.ParallelDims(pp=cell.pp, cp=cell.cp, dp_shard=cell.dp_shard, world_size=world)
    dims.build_mesh("cpu")
    tokens, labels, positions = make_batch()
    reference = make_model(cell.model)
    loss = dtcp.token_loss(reference(tokens, positions), labels)
    loss.backward()
    right = {name: p.grad for name, p in reference.named_parameters()}
    norm = float(torch.stack([g.norm() for g in right.values()]).norm())

    pipeline = make_pipeline(cell, dims, make_model(cell.model))
    count = int((labels != -100).sum())
    mine = slice(*(ROWS // cell.dp_shard * (dims.view("batch").get_local_rank() + i) for i in (0, 1)))
    batch = [x[mine].contiguous() for x in (tokens, labels, positions)]
    layout = dtcp.make_layout("head_tail", seq_len=SEQ_LEN, cp=cell.cp)

    def run(method: str) -> Tensor:
        with contextlib.ExitStack() as stack:
            local = batch
            if cell.cp > 1 and cell.door == "plan":
                dtcp.set_sequence(pipeline, layout)
                local = [
                    dtcp.shard(x, dims.view("cp"), layout, pad_value=p)
                    for x, p in zip(batch, (0, -100, 0), strict=True)
                ]
            elif cell.cp > 1:
                options = {"buffer_seq_dims": [1] * 3, "buffer_pad_values": [0, -100, 0], "layout": layout.name}
                stack.enter_context(dtcp.context_parallel(dims.view("cp"), buffers=batch, **options))
            return getattr(pipeline, method)(
                local[0], local[1], num_microbatches=max(2, cell.pp), num_valid_tokens=count, positions=local[2]
            )

    def check_share(share: Tensor) -> None:
        assert pipeline.is_last or share == 0
        share = share.clone()
        for view in ("loss", "pp"):
            torch.distributed.all_reduce(share, group=dims.view(view).get_group())
        assert abs(share - loss) <= 1e-5 * loss

    def check_gradients(factor: int) -> None:
        if cell.cp > 1 and cell.dp_shard == 1:
            dtcp.reduce_gradients(pipeline, dims)
        for name, parameter in pipeline.named_parameters():
            expected = factor * right[plain_name(name)]
            error = (whole(parameter.grad) - expected).norm()
            assert error <= 1e-5 * expected.norm() + 1e-8 * factor * norm, name

    for _ in range(2):
        check_share(run("evaluate"))
        assert all(p.grad is None for p in pipeline.parameters())
        check_share(run("forward_backward"))
        check_gradients(1)
        assert abs(dtcp.clip_grad_norm_(pipeline, float("inf"), dims) - norm) <= 1e-5 * norm
        pipeline.zero_grad()
    if cell.cp == 1:
        run("forward_backward")
        run("forward_backward")
        check_gradients(2)


IN_SLOW_RUN = [
    Cell("Interleaved1F1B", "llama", compiled=True),
    Cell("Interleaved1F1B", "llama", dp_shard=2),
    Cell("1F1B", "llama", compiled=True, checkpointed=True),
    Cell("GPipe", "llama", pp=4),
    Cell("InterleavedZeroBubble", "gpt"),
]
CELLS = [
    *IN_SLOW_RUN,
    Cell("GPipe", "gpt", cp=2, door="context"),
    Cell("1F1B", "llama", cp=2),
    Cell("1F1B", "gpt", dp_shard=2, checkpointed=True),
    Cell("1F1B", "llama", pp=4),
    Cell("Interleaved1F1B", "gpt", checkpointed=True),
    Cell("InterleavedZeroBubble", "llama", cp=2),
    Cell("ZBVZeroBubble", "llama", checkpointed=True),
    Cell("ZBVZeroBubble", "llama", dp_shard=2),
]


@pytest.mark.filterwarnings("ignore:schedule ZBVZeroBubble with activation checkpointing")
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.slow] * (cell in IN_SLOW_RUN)) for cell in CELLS], ids=str
)
def test_a_pipeline_gives_the_gradients_of_the_whole_model(ranks, cell):
    ranks.run(cell.world, check, cell, timeout=90)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"), [(4, 2, [2, 2]), (5, 4, [1, 2, 1, 1]), (7, 3, [2, 3, 2]), (8, 3, [3, 3, 2])]
)
def test_layers_are_dealt_evenly(num_layers, num_stages, sizes):
    layers = deal_layers(num_layers, num_stages)
    assert [len(part) for part in layers] == sizes
    assert [i for part in layers for i in part] == list(range(num_layers))


def test_a_stage_has_the_models_own_parts_and_no_others():
    model = make_model("gpt")
    first = make_stage(model, [0], is_first=True, is_last=False)
    last = make_stage(model, [2, 3], is_first=False, is_last=True, tied=["token_embedding"])
    assert first.final_norm is None
    assert last.position_embedding is None
    assert list(last.layers) == ["2", "3"]
    assert last.token_embedding is first.token_embedding is model.token_embedding
    first.register_forward_hook(lambda *_: None)
    assert not last._forward_hooks
    assert not model._forward_hooks


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_part_that_belongs_to_no_stage_is_refused_until_the_model_says_where():
    """Else every stage would apply it, in the middle of the model."""
    dims = dtcp.ParallelDims(world_size=1)
    dims.build_mesh("cpu")
    model = make_model("llama")
    model.norm, model.final_norm = model.final_norm, nn.Identity()
    with pytest.raises(ValueError, match="which stage norm of Llama belongs to"):
        split_into_stages(model, dims)
    model.last_modules = ("final_norm", "norm", "head")
    split_into_stages(model, dims)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="which stage scale of Llama belongs to"):
        split_into_stages(model, dims)


def run_one_step(rank: int, world: int, schedule: str, num_microbatches: int, rows_of_rank: tuple[int, int]) -> None:
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    pipeline = make_pipeline(Cell(schedule, "llama"), dims, make_model("llama"))
    tokens, labels, positions = (x[: rows_of_rank[rank]] for x in make_batch())
    pipeline.forward_backward(
        tokens, labels, num_microbatches=num_microbatches, num_valid_tokens=3, positions=positions
    )


def test_rows_that_do_not_split_are_refused_on_every_rank(ranks):
    pattern = "got 3 rows and num_microbatches=2; use one of \\[1, 3\\]"
    ranks.run_expecting(2, run_one_step, ValueError, pattern, "1F1B", 2, (3, 3))


def test_too_few_microbatches_are_refused_with_a_number_that_works(ranks):
    pattern = "schedule 1F1B with pp=2 cannot run 1 microbatches; use 2 or a multiple of it"
    ranks.run_expecting(2, run_one_step, ValueError, pattern, "1F1B", 1, (4, 4))


def test_pp_ranks_with_different_rows_are_refused_before_anything_is_sent(ranks):
    pattern = "pipeline step: rows differs between the ranks of the group: {0: 4, 1: 2}"
    ranks.run_expecting(2, run_one_step, ValueError, pattern, "1F1B", 2, (4, 2))


def build(rank: int, world: int, num_layers: int, options: dict[str, Any]) -> None:
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    split_into_stages(make_model("llama", num_layers), dims, **options)


@pytest.mark.parametrize(
    ("num_layers", "options", "pattern"),
    [
        (1, {}, "1 layers are too few for 2 pipeline stages"),
        (3, {"schedule": "Interleaved1F1B"}, "3 layers are too few for 4 pipeline stages"),
        (4, {"schedule": "2F2B"}, "no pipeline schedule '2F2B'; schedules: GPipe, 1F1B"),
        (4, {"stages_per_rank": 2}, "schedule 1F1B has 1 stages a rank, got stages_per_rank=2"),
        (4, {"schedule": "Interleaved1F1B", "stages_per_rank": 1}, "has 2 or more stages a rank"),
        (4, {"schedule": "ZBVZeroBubble", "tied": ["token_embedding"]}, "use tie_weights=False"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, num_layers, options, pattern):
    ranks.run_expecting(2, build, ValueError, pattern, num_layers, options)


def build_zero_bubble(rank: int, world: int, cell: Cell) -> None:
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    make_pipeline(cell, dims, make_model("llama"))


def test_zero_bubble_refuses_compiled_stages(ranks):
    cell = Cell("ZBVZeroBubble", "llama", compiled=True)
    pattern = "compiled 0.layers.[01]; use training.compile=false, or schedule 1F1B or Interleaved1F1B"
    ranks.run_expecting(2, build_zero_bubble, NotImplementedError, pattern, cell)


def build_selective(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    options = dtcp.PipelineOptions("ZBVZeroBubble")
    dtcp.parallelize(make_model("llama"), dims, activation_checkpointing="selective", pipeline=options)


def test_zero_bubble_refuses_selective_checkpoints_before_the_first_step(ranks):
    pattern = "schedule ZBVZeroBubble goes .* 'selective' .* use 'full' or 'none'"
    ranks.run_expecting(2, build_selective, NotImplementedError, pattern)


def check_warning(rank: int, world: int) -> None:
    with pytest.warns(UserWarning, match="recomputes the layers twice"):
        build_zero_bubble(rank, world, Cell("ZBVZeroBubble", "llama", checkpointed=True))


def test_zero_bubble_warns_of_activation_checkpointing(ranks):
    ranks.run(2, check_warning)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def check_told_rows(rank: int, world: int, schedule: str, mode: str) -> None:
    """The same gradients whether keys come with the step, or stages make them of the rows that they were told."""
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    tokens, labels, positions = make_batch()
    rows, layout = [7, 2, 5, 11], dtcp.make_layout("contiguous", seq_len=SEQ_LEN, cp=1)
    options: dict[str, Any] = {"num_microbatches": 2, "num_valid_tokens": 9, "positions": positions}
    gradients = []
    for is_told in (False, True):
        model = build_model("gpt_tiny", seed=3, num_layers=4, dim=WIDTH, dropout=0.3)
        pipeline: Any = dtcp.parallelize(
            model, dims, activation_checkpointing=mode, pipeline=dtcp.PipelineOptions(schedule)
        )
        keys = {}
        if is_told:
            dtcp.set_sequence(pipeline, layout, step=3, rows=rows)
        else:
            keys = {"dropout_keys": dtcp.dropout_keys(seed=0, step=3, rows=rows, positions=positions)}
        for _ in range(2):  # what was told stays: it holds for a second step too
            pipeline.zero_grad()
            pipeline.forward_backward(tokens, labels, **options, **keys)
        gradients.append({name: p.grad for name, p in pipeline.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize(("schedule", "mode"), [("1F1B", "full"), ("Interleaved1F1B", "none")])
def test_stages_take_the_rows_of_their_microbatch_from_all_that_they_were_told(ranks, schedule, mode):
    ranks.run(2, check_told_rows, schedule, mode)


def tell_rows_of_one_microbatch(rank: int, world: int) -> None:
    dims = dtcp.ParallelDims(pp=world, world_size=world)
    dims.build_mesh("cpu")
    tokens, labels, positions = make_batch()
    pipeline: Any = dtcp.parallelize(build_model("gpt_tiny", seed=3, num_layers=2, dim=WIDTH, dropout=0.3), dims)
    dtcp.set_sequence(pipeline, dtcp.make_layout("contiguous", seq_len=SEQ_LEN, cp=1), step=3, rows=[7, 2])
    pipeline.forward_backward(tokens, labels, num_microbatches=2, num_valid_tokens=9, positions=positions)


def test_rows_of_one_microbatch_are_refused_where_those_of_the_step_are_wanted(ranks):
    pattern = r"was told 2 row\(s\) of the global batch, this step has 4 in 2 microbatches; tell it all of them"
    ranks.run_expecting(2, tell_rows_of_one_microbatch, ValueError, pattern)
