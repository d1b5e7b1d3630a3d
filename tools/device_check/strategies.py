"""Every strategy on every layout, all ranks of it in this process, against float64 and beside one call's error."""

from __future__ import annotations

import itertools
import random

import torch
import torch.nn.functional as F

from device_check.problems import MASKS, RESULTS, Problem, errors, pose, right_answer, tolerance
from device_check.sections import Section
from device_check.solve import STRATEGIES, solve, strategy_of
from dtcp.attention.loopback import Loopback
from dtcp.layout import make_layout

LAYOUTS = ("contiguous", "head_tail", "striped", "per_document", "auto")
COLUMNS = ("strategy", "layout", "problems", "float32", "bfloat16", "beside one call", "worst in")
HALF_RATIO = 1.2  # error of out and gradients in bfloat16, beside that of one call of the same kernel


def check_strategies(device: torch.device, section: Section, *, is_small: bool) -> None:
    """Every strategy x layout x cp in float32 and bfloat16, causal; then masks, as many as fit."""
    section.columns = COLUMNS
    sizes = (2, 4) if is_small else (2, 4, 8)
    seq_len, heads, uneven = (45, (4, 2, 16, 16), (4, 2, 16, 8)) if is_small else (173, (8, 2, 64, 64), (8, 2, 64, 32))
    ways = list(itertools.product(sizes, STRATEGIES, LAYOUTS))
    dtypes = torch.float32, torch.bfloat16
    first = [(way, Problem("causal", heads, seq_len, dtype)) for way, dtype in itertools.product(ways, dtypes)]
    others = [(way, Problem(m, uneven, seq_len)) for way, m in itertools.product(ways, MASKS) if m != "causal"]
    for checks in (first, others):
        random.Random(0).shuffle(checks)  # those that do not fit are left out everywhere alike
    checks = first + (others[:40] if is_small else others)
    answers: dict[Problem, tuple] = {}
    loopbacks = {cp: Loopback(cp, timeout=30) for cp in sizes}
    table: dict[tuple[str, str], dict] = {}
    for (cp, strategy, layout_name), given in section.within_budget(checks, "problems of strategies"):
        # A per_document layout is made for the documents that its calls have.
        problem = given
        if layout_name == "per_document" and "documents" not in given.mask:
            problem = Problem("documents", given.heads, seq_len, given.dtype)
        what = f"{strategy} on {layout_name}, cp {cp}, {problem}"
        with section.catching(what):
            if problem not in answers:
                answers[problem] = _answer(problem, device)
            posed, right, of_one_call = answers[problem]
            documents = posed.documents if layout_name in ("per_document", "auto") else None
            layout = make_layout(layout_name, seq_len=seq_len, cp=cp, documents=documents)
            by_name = errors(solve(posed, layout, strategy_of(strategy, cp), loopbacks[cp]), right)
            row = table.setdefault((strategy, layout_name), {"problems": 0})
            row["problems"] += 1
            for name, error in by_name.items():
                section.expect(f"{what}, {name}", error, tolerance(name, problem.dtype))
            _compare(section, row, what, by_name, of_one_call, str(problem.dtype).removeprefix("torch."))
    section.rows = [{"strategy": s, "layout": name, **row} for (s, name), row in sorted(table.items())]


def _answer(problem: Problem, device: torch.device) -> tuple:
    """(tensors, right answer, errors of torch's own attention in one call for causal bfloat16; {} for others)."""
    posed = pose(problem, device)
    right = right_answer(posed)
    if problem.dtype != torch.bfloat16 or problem.mask != "causal":
        return posed, right, {}
    inputs = [x.clone().requires_grad_() for x in (posed.query, posed.key, posed.value)]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    found = (out.detach(), right["lse"], *torch.autograd.grad(out, inputs, posed.grad_out))
    return posed, right, errors(dict(zip(RESULTS, found, strict=True)), right)


def _compare(
    section: Section, row: dict, what: str, by_name: dict[str, float], of_one_call: dict[str, float], dtype: str
) -> None:
    """Keep the largest error of the dtype, and of ratios to one call's; check those."""
    largest = max(error for name, error in by_name.items() if name != "lse")
    if largest > row.get(dtype, 0.0):
        row[dtype] = largest
        if dtype == "float32":
            row["worst in"] = what.split(", ", 1)[1]
    for name, error in of_one_call.items():
        if name == "lse":
            continue
        ratio = by_name[name] / error
        row["beside one call"] = max(row.get("beside one call", 0.0), ratio)
        section.expect(f"{what}, {name} beside one call's error", ratio, HALF_RATIO)
