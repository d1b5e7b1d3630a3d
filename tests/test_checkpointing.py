"""Activation checkpointing and offload: attention runs as often as the mode says, and gradients stay what they are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import dtcp
from cells import count_op_calls
from dtcp.models import build_model
from dtcp.models.init import plain_name
from dtcp.parallelize import checkpointing
from dtcp.parallelize.checkpointing import OffloadWrapper, apply_activation_checkpointing
from live_bytes import peak_live_bytes
from oracle import all_pairs
from parity import whole

NUM_BLOCKS = 3
SIZES = {"gpt": {"max_seq_len": 40}, "llama": {"num_kv_heads": 2, "ffn_dim": 80}}


@dataclass(frozen=True)
class Cell:
    """A combination; the names are those of the table."""

    mode: str = "full"
    every: int = 1
    save_matmuls: bool = False
    offload: bool = False
    compile: bool = False
    door: str = "plan"  # plan, context
    fsdp: bool = False
    model: str = "gpt"
    backend: str = "aot_eager"

    @property
    def num_attention_calls(self) -> int:
        """Forwards of attention in a step."""
        num_treated = len(range(0, NUM_BLOCKS, self.every))
        return NUM_BLOCKS + (num_treated if self.mode == "full" else 0)


AXES: dict[str, list[Any]] = {
    "mode": ["none", "full", "selective"],
    "offload": [False, True],
    "compile": [False, True],
    "door": ["plan", "context"],
    "fsdp": [False, True],
    "every": [1, 2],
    "model": ["gpt", "llama"],
}


def cell_id(cell: Cell) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(cell))


def make_model(name: str = "gpt", **options: Any) -> nn.Module:
    """The same weights on every rank, with peaked attention."""
    sizes = {"num_layers": NUM_BLOCKS, "dim": 32, "num_heads": 4, "vocab_size": 61}
    peaked = {"init_std": 0.06, "qk_init_scale": 5}
    return build_model(f"{name}_tiny", **(sizes | peaked | SIZES[name] | options))


def make_rows(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(61, (2, seq_len), generator=torch.Generator().manual_seed(seq_len))
    return tokens, dtcp.shift_labels(tokens), torch.arange(seq_len).expand(2, -1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): whole(p.grad).clone() for name, p in model.named_parameters()}


def assert_equal_gradients(own: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert own.keys() == right.keys()
    total = torch.cat([grad.flatten() for grad in right.values()]).norm()
    for name, grad in right.items():
        error = (own[name] - grad).norm()
        assert error <= 1e-5 * grad.norm() + 1e-8 * total, f"{name}: {error / grad.norm():.1e}"


def parallelize(model: nn.Module, dims: dtcp.ParallelDims, cell: Cell) -> None:
    """In the order of the library."""
    if cell.door == "plan":
        for block in model.layers.values():
            parallelize_module(block, dims.view("cp"), {"attention.sdpa": dtcp.ContextParallel()})
    options = {"every": cell.every, "save_matmuls": cell.save_matmuls, "offload": cell.offload}
    apply_activation_checkpointing(model, cell.mode, **options)
    if cell.compile:
        for block in model.layers.values():
            block.compile(fullgraph=True, backend=cell.backend)
    if cell.fsdp:
        dtcp.apply_fsdp(model, dims)


def run_step(model: nn.Module, dims: dtcp.ParallelDims, cell: Cell, seq_len: int, layout_name: str) -> Tensor:
    """This rank's share of the loss; its backward comes after the context, and after the next step's layout."""
    tokens, labels, positions = make_rows(seq_len)
    mesh = dims.view("cp")
    if cell.door == "context":
        with dtcp.context_parallel(
            mesh, buffers=[tokens, labels, positions], buffer_seq_dims=1, buffer_pad_values=[0, -100, 0],
            layout=layout_name,
        ):  # fmt: skip
            return dtcp.token_loss(model(tokens, positions), labels, mesh=dims.view("loss"))
    layout = dtcp.make_layout(layout_name, seq_len=seq_len, cp=dims.cp)
    dtcp.set_sequence(model, layout)
    logits = model(dtcp.shard(tokens, mesh, layout), dtcp.shard(positions, mesh, layout))
    return dtcp.token_loss(logits, dtcp.shard(labels, mesh, layout, pad_value=-100), mesh=dims.view("loss"))


def check(rank: int, world: int, cell: Cell) -> None:
    dims = dtcp.ParallelDims(cp=world)
    dims.build_mesh("cpu")
    model, alone = make_model(cell.model), make_model(cell.model)
    parallelize(model, dims, cell)
    sequences = [(29, "head_tail"), (18, "striped")]
    with count_op_calls() as count:
        if cell.fsdp:  # a unit's parameters are there for one step at a time
            for sequence in sequences:
                run_step(model, dims, cell, *sequence).backward()
        else:
            for loss in reversed([run_step(model, dims, cell, *sequence) for sequence in sequences]):
                loss.backward()
            dtcp.reduce_gradients(model, dims)
    assert count[0] == cell.num_attention_calls * len(sequences)
    for seq_len, _ in sequences:
        tokens, labels, positions = make_rows(seq_len)
        dtcp.token_loss(alone(tokens, positions), labels).backward()
    assert_equal_gradients(gradients(model), gradients(alone))


CELLS = [Cell(**options) for options in all_pairs(AXES)]
COMPILED_IN_QUICK_RUN = Cell("selective", offload=True, compile=True, fsdp=True, door="context")


@pytest.mark.parametrize(
    "cell",
    [COMPILED_IN_QUICK_RUN, *(pytest.param(cell, marks=[pytest.mark.slow] * cell.compile) for cell in CELLS)],
    ids=cell_id,
)
def test_cell_equals_one_rank(ranks, cell):
    ranks.run(2, check, cell, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("mode", AXES["mode"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("door", ["plan", "context"])
def test_inductor_cell_equals_one_rank(ranks, mode, offload, door):
    cell = Cell(mode=mode, offload=offload, door=door, compile=True, fsdp=True, model="llama", backend="inductor")
    ranks.run(2, check, cell, timeout=240)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_selective_with_matmuls_and_three_ranks_equal_one_rank(ranks, compiled):
    ranks.run(3, check, Cell("selective", save_matmuls=True, compile=compiled, fsdp=compiled))


def check_wrong_saving(rank: int, world: int) -> None:
    """The count and the gradients can fail: a policy that saves nothing, and an offload that loses a sign."""
    with mock.patch.object(checkpointing, "ATTENTION_OPS", ()), pytest.raises(AssertionError, match="assert"):
        check(rank, world, Cell("selective"))
    with (
        mock.patch.object(checkpointing, "_host_copy", lambda x: -x.detach()),
        pytest.raises(AssertionError, match=r"(weight|bias): "),
    ):
        check(rank, world, Cell("none", offload=True))


def test_the_comparison_sees_planted_faults(ranks):
    ranks.run(2, check_wrong_saving)


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "per_block"), [("none", 1), ("full", 2), ("selective", 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_torchs_own_attention_runs_as_often_as_the_mode_says(mode, per_block, compiled):
    model, alone = make_model(), make_model()
    apply_activation_checkpointing(model, mode)
    tokens, labels, positions = make_rows(16)
    dtcp.token_loss(alone(tokens, positions), labels).backward()
    if compiled:
        torch._dynamo.reset()
        for block in model.layers.values():
            block.compile(fullgraph=True, backend="aot_eager")
        dtcp.token_loss(model(tokens, positions), labels).backward()
        model.zero_grad()
    # A mode is below the one that saves results, the profiler above it; and Dynamo does not compile under a mode.
    with torch.autograd.profiler.profile() if compiled else CountAttention() as counted:
        dtcp.token_loss(model(tokens, positions), labels).backward()
    names = [op.name().removesuffix(".default") for op in checkpointing.ATTENTION_OPS]
    calls = [event.name for event in counted.function_events] if compiled else counted.names
    assert sum(name in names for name in calls) == per_block * NUM_BLOCKS
    assert_equal_gradients(gradients(model), gradients(alone))


class CountAttention(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def kept_bytes(mode: str, **options: Any) -> int:
    """What is alive between forward and backward, beside parameters."""
    model = make_model("llama", num_layers=4, dim=64)
    apply_activation_checkpointing(model, mode, **options)
    tokens, labels, positions = make_rows(64)
    with peak_live_bytes() as live:
        loss = dtcp.token_loss(model(tokens, positions), labels)
        kept = live.live
        loss.backward()
    return kept


def test_modes_keep_less_and_less():
    none, full = kept_bytes("none"), kept_bytes("full")
    selective, matmuls = kept_bytes("selective"), kept_bytes("selective", save_matmuls=True)
    block_input, out_and_lse = 2 * 64 * 64 * 4, 2 * 64 * 64 * 4 + 2 * 64 * 4 * 4
    assert full < selective < matmuls < none
    assert none - full > 4 * 10 * block_input
    # What attention returns, in each of four blocks; the last block's is the same with and without.
    assert selective - full == 4 * out_and_lse
    half = kept_bytes("full", every=2)
    assert abs((none - full) / 2 - (none - half)) < block_input  # two of four blocks


def test_offload_keeps_copies_on_the_host_of_all_but_parameters():
    model = make_model()
    apply_activation_checkpointing(model, "none", offload=True)
    tokens, labels, positions = make_rows(16)
    copied: list[Tensor] = []

    def copy(x: Tensor, _real: Any = checkpointing._host_copy) -> Tensor:
        copied.append(x)
        return _real(x)

    with mock.patch.object(checkpointing, "_host_copy", copy):
        loss = dtcp.token_loss(model(tokens, positions), labels)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert copied and not parameters & {x.untyped_storage().data_ptr() for x in copied}
    num_in_blocks = len(copied)
    loss.backward()
    for mode in ("full", "selective"):
        model, copied = make_model(), []
        apply_activation_checkpointing(model, mode, offload=True)
        with mock.patch.object(checkpointing, "_host_copy", copy):
            dtcp.token_loss(model(tokens, positions), labels).backward()
        assert [x.shape for x in copied] == [(2, 16, 32)] * NUM_BLOCKS, "the inputs of the blocks"
    assert num_in_blocks > 10 * NUM_BLOCKS


def test_names_of_parameters_stay_and_weights_load():
    for layers in (nn.ModuleDict, nn.ModuleList):
        plain, model = make_model(), make_model()
        names = [name for name, _ in plain.named_parameters()]
        if layers is nn.ModuleList:
            model.layers = nn.ModuleList(model.layers.values())
        apply_activation_checkpointing(model, "selective", every=2, offload=True)
        assert [plain_name(name) for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == list(plain.state_dict())
        model.load_state_dict(plain.state_dict())
        plain.load_state_dict(model.state_dict())
        blocks = list(model.layers.values() if layers is nn.ModuleDict else model.layers)
        assert [isinstance(block, OffloadWrapper) for block in blocks] == [True, False, True]


def test_what_makes_no_sense_is_refused_by_name():
    with pytest.raises(ValueError, match="one of none, full, selective, got 'some'"):
        apply_activation_checkpointing(make_model(), "some")
    for every in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"every must be an integer of at least 1, got {every}"):
            apply_activation_checkpointing(make_model(), "full", every=every)
    with pytest.raises(ValueError, match="save_matmuls is an option of mode='selective', got mode='full'"):
        apply_activation_checkpointing(make_model(), "full", save_matmuls=True)
    with pytest.raises(ValueError, match=r"blocks of Linear in model.layers, .* got NoneType"):
        apply_activation_checkpointing(nn.Linear(2, 2), "full")
    for options in ({}, {"offload": True}):
        model = make_model()
        apply_activation_checkpointing(model, "full", every=2, **options)
        with pytest.raises(ValueError, match=r"model.layers\['0'\] is wrapped .* already .*call .* once"):
            apply_activation_checkpointing(model, "selective")
    model = make_model()
    inner = model.layers["1"]
    inner.attention = checkpointing.checkpoint_wrapper(inner.attention)
    with pytest.raises(ValueError, match=r"model.layers\['1'\].attention is wrapped .*CheckpointWrapper"):
        apply_activation_checkpointing(model, "full")
    with mock.patch.object(checkpointing, "checkpoint_wrapper") as wrap:
        apply_activation_checkpointing(make_model(), "none")
    assert not wrap.called
