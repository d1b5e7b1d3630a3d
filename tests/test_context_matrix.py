"""Every way of compiling, checkpointing, calling and differentiating equals one rank: a pairwise-covering set."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cells import AXES, INDUCTOR_CELLS, Cell, check_cell
from oracle import all_pairs

PAIRWISE = [Cell(**options) for options in all_pairs(AXES | {"world": [2]})] + [
    Cell("eager", "reentrant", "inside", "by_name", "dtensor", "ring", 3),
    Cell("block", "non_reentrant", "outside", "F", "context", "all_gather", 3),
    Cell("block", "selective_saved", "outside", "attribute", "plan", "ring", 4),
]


MODEL_CELLS = [cell for cell in PAIRWISE if cell.compile == "model"]  # the longest; two of them in the quick run


def cell_id(cell: Cell) -> str:
    return "-".join(str(value) for value in dataclasses.astuple(cell))


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell_id(cell), marks=[pytest.mark.slow] * (cell in MODEL_CELLS[2:])) for cell in PAIRWISE],
)
def test_cell_equals_one_rank(ranks, cell):
    ranks.run(cell.world, check_cell, cell, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("cell", INDUCTOR_CELLS, ids=cell_id)
def test_inductor_cell_equals_one_rank(ranks, cell):
    ranks.run(2, check_cell, cell, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", AXES["compile"])
@pytest.mark.parametrize("checkpointing", AXES["checkpointing"])
def test_every_cell_equals_one_rank(ranks, compiled, checkpointing):
    names = ("backward", "call", "door", "strategy")
    for values in itertools.product(*(AXES[name] for name in names)):
        cell = Cell(compile=compiled, checkpointing=checkpointing, **dict(zip(names, values, strict=True)))
        ranks.run(2, check_cell, cell, timeout=120)
