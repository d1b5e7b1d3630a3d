"""FSDP2 around both doors equals one process: loss, every parameter's gradient, their norm, and optimizer steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import cells
import dtcp
import fsdp_cells
from fsdp_cells import AXES, MESHES, FsdpCell, Run, make_model, train_alone, train_on_ranks
from oracle import all_pairs
from parity import TOLERANCE, Difference, compare, whole

DOORS = AXES["door"]
# Two are padded at every cp, and of the last a rank of three holds nothing but a pad.
MICROBATCHES = ((29, "head_tail"), (17, "striped"), (2, "contiguous"))


def make_dims(cell: FsdpCell) -> dtcp.ParallelDims:
    dims = dtcp.ParallelDims(**MESHES[cell.mesh][1])
    dims.build_mesh("cpu")
    return dims


def check(rank: int, world: int, cell: FsdpCell) -> Difference:
    """Raise unless the ranks do what one process does."""
    own, right = train_on_ranks(cell, make_dims(cell)), train_alone(cell)
    difference = compare(own.record, right.record)
    assert difference.is_within, difference
    assert own.untrained == right.untrained
    assert own.num_op_calls == cell.num_op_calls
    return difference


def cells_of(axes: dict[str, list[Any]], *, num_quick: int, **common: Any) -> Any:
    """Parametrize by cells in which every pair of options occurs; those after the first ones in the slow run only."""
    options = [{**option.pop("way", {}), **option} for option in all_pairs(axes)]
    names = ["-".join(str(value) for value in option.values()) for option in options]
    cells = [
        pytest.param(FsdpCell(**common, **option), marks=[pytest.mark.slow] * (number >= num_quick))
        for number, option in enumerate(options)
    ]
    return pytest.mark.parametrize("cell", cells, ids=names)


@cells_of(AXES, num_quick=6)
def test_cell_equals_one_process(ranks, cell):
    ranks.run(cell.world, check, cell, timeout=120)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"compile": "inside", "backend": "inductor", "checkpointing": "non_reentrant", "model": "llama"},
            marks=pytest.mark.slow,
        ),
        {"compile": "model", "checkpointing": "non_reentrant"},
    ],
    ids=["block_by_inductor", "sharded_model"],
)
def test_other_compiled_cells_equal_one_process(ranks, options):
    ranks.run(2, check, FsdpCell(**options), timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", AXES["compile"])
@pytest.mark.parametrize("checkpointing", AXES["checkpointing"])
def test_every_cell_equals_one_process(ranks, compiled, checkpointing):
    names = ("door", "backward", "model", "reshard")
    for values in itertools.product(*(AXES[name] for name in names)):
        cell = FsdpCell(compile=compiled, checkpointing=checkpointing, **dict(zip(names, values, strict=True)))
        ranks.run(cell.world, check, cell, timeout=120)


# ---- the comparison itself -------------------------------------------------------------------------------------------


def compare_with_fault(rank: int, world: int, fault: str) -> Difference:
    cell = FsdpCell(door="plan")
    with contextlib.ExitStack() as stack:
        if fault == "attention_of_own_tokens":
            stack.enter_context(mock.patch.object(fsdp_cells, "parallelize_module"))
            stack.enter_context(mock.patch.object(dtcp, "set_sequence"))
        else:
            for method in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms"):
                stack.enter_context(mock.patch.object(FSDPModule, method))
        return compare(train_on_ranks(cell, make_dims(cell)).record, train_alone(cell).record)


@pytest.mark.parametrize("fault", ["attention_of_own_tokens", "mean_of_shares"])
def test_the_comparison_sees_a_planted_fault(ranks, fault):
    difference = ranks.run(2, compare_with_fault, fault)[0]
    assert difference.gradient > 1000 * TOLERANCE, difference
    assert difference.grad_norm > 1000 * TOLERANCE, difference


# ---- several microbatches, optimizer steps ---------------------------------------------------------------------------


@cells_of(
    {
        "way": [
            {"mesh": "cp3"},
            {"mesh": "replicate2_cp2", "reshard": False},
            {"mesh": "dp2_cp2", "checkpointing": "non_reentrant"},
            {"mesh": "cp2", "checkpointing": "selective", "compile": "inside"},
        ],
        "door": DOORS,
        "model": AXES["model"],
        "backward": AXES["backward"],
    },
    num_quick=2,
    microbatches=MICROBATCHES,
)
def test_microbatches_without_gradient_sync_equal_one_process(ranks, cell):
    ranks.run(cell.world, check, cell, timeout=120)


def check_parameters(rank: int, world: int, cell: FsdpCell) -> None:
    own, right = train_on_ranks(cell, make_dims(cell)), train_alone(cell)
    for name, start in make_model(cell).named_parameters():
        wanted, error = right.parameters[name], (own.parameters[name] - right.parameters[name]).norm()
        moved = (wanted - start).norm()
        if name.endswith("key.bias"):  # its gradient is noise
            continue
        assert moved > 0
        # AdamW makes steps of full size of every element's gradient: one that is near 0 may end elsewhere. SGD shows
        # that no more is behind it; its second term is the rounding of the parameter itself.
        limit = 1e-2 * moved if cell.optimizer == "AdamW" else TOLERANCE * moved + 1e-7 * wanted.norm()
        assert error <= limit, name


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(("door", "model"), [("context", "gpt"), ("plan", "llama")])
def test_optimizer_steps_lead_to_the_parameters_of_one_process(ranks, door, model, optimizer):
    options = {"mesh": "dp2_cp2", "num_steps": 2, "microbatches": MICROBATCHES[:2]}
    ranks.run(4, check_parameters, FsdpCell(door=door, model=model, optimizer=optimizer, **options))


# ---- a RoPE cache that is a buffer of the sharded model --------------------------------------------------------------


class WithCache(nn.Module):
    def __init__(self, rope: Tensor, checkpointing: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(cells.Block("F") for _ in range(cells.NUM_BLOCKS))
        self.register_buffer("rope", rope, persistent=False)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        return cells.forward(list(self.layers), self.checkpointing, x, self.rope)


def check_cache(rank: int, world: int, checkpointing: str, compiled: bool) -> None:
    dims = dtcp.ParallelDims(cp=world)
    dims.build_mesh("cpu")
    x, rope, weight = cells.make_data(13)
    alone, model = WithCache(rope.clone(), "none"), WithCache(rope, checkpointing)
    for block in model.layers if compiled else ():
        block.compile(fullgraph=True, backend="aot_eager")
    dtcp.apply_fsdp(model, dims)
    with dtcp.context_parallel(dims.view("cp"), buffers=[model.rope, weight], buffer_seq_dims=1) as cp:
        local = cp.shard(x).requires_grad_()
        loss = (model(local) * weight).sum()
    assert torch.equal(model.rope, alone.rope)
    loss.backward()
    (alone(x.requires_grad_()) * weight).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    trained = zip(model.named_parameters(), alone.parameters(), strict=True)
    gradients = {name: (whole(p.grad), q.grad) for (name, p), q in trained}
    gradients["x"] = cp.unshard(local.grad), x.grad
    for name, (own, wanted) in gradients.items():
        assert (own - wanted).norm() <= TOLERANCE * wanted.norm() + 1e-8 * norm, name


@pytest.mark.parametrize(
    ("checkpointing", "compiled"), [("none", True), ("non_reentrant", False), ("reentrant", False)]
)
def test_a_cut_cache_in_the_sharded_model_equals_one_process(ranks, checkpointing, compiled):
    ranks.run(2, check_cache, checkpointing, compiled)


# ---- policies of FSDP2 and frozen parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_parameters_offloaded_to_the_cpu_equal_one_process(ranks, door):
    options = {"mesh": "dp2_cp2", "num_steps": 2, "microbatches": MICROBATCHES, "optimizer": "SGD"}
    ranks.run(4, check, FsdpCell(door=door, cpu_offload=True, **options))


@cells_of(
    {
        "adapters": [("0", "1"), ("1",), ("0.attention.output", "1")],  # all; first block frozen; its attention frozen
        "reshard": AXES["reshard"],
        "door": DOORS,
        "model": AXES["model"],
        "way": [
            {"mesh": "dp2_cp2"},
            {"mesh": "cp3", "checkpointing": "non_reentrant", "backward": "outside"},
            {"mesh": "cp2", "checkpointing": "non_reentrant", "compile": "around"},
        ],
    },
    num_quick=2,
)
def test_adapters_of_a_frozen_model_equal_one_process(ranks, cell):
    ranks.run(cell.world, check, cell, timeout=120)


# ---- mixed precision -------------------------------------------------------------------------------------------------


# Four batches with the same weights: over one alone the errors of a bias scatter by a factor of 1.4.
MIXED: dict[str, Any] = {"param_dtype": torch.bfloat16, "num_steps": 4, "optimizer": "none"}


def run_on_ranks(rank: int, world: int, cell: FsdpCell, is_alone: bool) -> Run:
    if not is_alone:
        return train_on_ranks(cell, make_dims(cell))
    dims = dtcp.ParallelDims()
    dims.build_mesh("cpu")
    return train_on_ranks(dataclasses.replace(cell, door="context"), dims)


def gradient_errors(run: Run, right: Run) -> dict[str, float]:
    """Relative norm of the error of each parameter's gradient over all steps, and of all together."""
    errors, norms = {}, {}
    for name in right.parameters:
        pairs = [(run.record.gradients[step][name], g[name]) for step, g in right.record.gradients.items()]
        errors[name] = sum(float((own - wanted).norm() ** 2) for own, wanted in pairs)
        norms[name] = sum(float(wanted.norm() ** 2) for _, wanted in pairs)
    errors["all"], norms["all"] = sum(errors.values()), sum(norms.values())
    return {name: (errors[name] / norms[name]) ** 0.5 for name in errors}


@pytest.fixture(scope="module")
def one_rank_errors(ranks):
    """Of FSDP2 on one rank in bfloat16, from one process in float32; and that process."""

    @functools.cache
    def of(cell: FsdpCell) -> tuple[dict[str, float], Run]:
        right = train_alone(cell)
        return gradient_errors(ranks.run(1, run_on_ranks, cell, True)[0], right), right

    return of


@cells_of(
    {
        "way": [
            {"mesh": "cp2", "checkpointing": "non_reentrant", "compile": "inside"},
            {"mesh": "cp3"},
            {"mesh": "dp2_cp2"},
        ],
        "door": DOORS,
        "model": AXES["model"],
    },
    num_quick=2,
    **MIXED,
)
def test_mixed_precision_is_as_exact_as_on_one_rank(ranks, one_rank_errors, cell):
    one_rank, right = one_rank_errors(FsdpCell(model=cell.model, **MIXED))
    errors = gradient_errors(ranks.run(cell.world, run_on_ranks, cell, False, timeout=120)[0], right)
    for name, error in errors.items():
        assert error <= 1.5 * one_rank[name], f"{name}: {error:.1e}, on one rank {one_rank[name]:.1e}"
