"""Two-level strategies: ranks that share a node (``ranks_per_node``), in a world of two nodes and more, simulated."""

from __future__ import annotations

import dataclasses

import pytest
from torch.distributed.device_mesh import init_device_mesh

from masked import MaskedCase, MaskedProblem, errors, layout_of, solve_masked

TOLERANCE = 1e-10


def check_cases(rank: int, world: int, cases: list[MaskedCase]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    wrong = []
    for case in cases:
        problem = MaskedProblem(case)
        found = errors(solve_masked(problem, mesh, layout_of(case, world)), problem.answer())
        if not all(error < TOLERANCE for error in found.values()):
            wrong.append(f"{case}: {found}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases on rank {rank}:\n" + "\n".join(wrong)


CASES = [MaskedCase(strategy=s, is_causal=c, ranks_per_node=2, layout=l) for s in ("ring", "all_gather") for c in (True, False) for l in ("contiguous", "head_tail", "striped")]


def test_two_levels_match_the_float64_oracle(ranks):
    ranks.run(4, check_cases, CASES)
