"""context_parallel_attention against the float64 oracle: out, lse and every gradient, on every rank.

Tolerances. float64 on the math kernel 1e-12: rounding of some hundred additions. float32 1e-5, per rank; where
queries are scaled by 100 the softmax is so peaked that torch's own single-device attention is off by more than
that, and three times its error is the bound. Half precision: 1.2 times the error (relative Frobenius norm over the
whole sequence) of torch's own single-device attention in that dtype against the same oracle.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from oracle import (
    GRADIENT_NAMES,
    STRATEGIES,
    Case,
    Problem,
    all_pairs,
    make_problem,
    options_of,
    relative_error,
    single_device,
    solve,
)

AXES = {
    "layout": ["contiguous", "head_tail", "striped"],
    "strategy": list(STRATEGIES),
    "is_causal": [True, False],
    "heads": [(4, 4, 16, 16), (8, 2, 16, 16), (4, 1, 8, 8), (8, 2, 24, 16), (4, 4, 8, 16)],
    "seq_len": [1, 2, 5, 6, 97, 130, 257],
    "dtype": ["float32", "float64", "bfloat16", "float16"],
    "kernel": ["auto", "math"],
    "qkv_format": ["bhsd", "bshd"],
    "batch": [2, 1],
    "query_scale": [1.0, 100.0],
    "scale": [None, 0.3],
}
LAYOUTS_OF_STRATEGIES = ("head_tail", "striped", "head_tail", "contiguous", "head_tail")
PAIRWISE = [Case(**options) for options in all_pairs(AXES)]
REPORTED = [
    Case(heads=(8, 1, 16, 16), seq_len=700),
    Case(heads=(8, 1, 16, 16), seq_len=700, strategy="all_gather", layout="striped", dtype="float64", kernel="math"),
    Case(heads=(1, 1, 8, 8), seq_len=7, is_causal=False),
    Case(seq_len=4, layout="contiguous", dtype="float64", kernel="math"),
    Case(heads=(8, 2, 24, 16), seq_len=64),
    # Torch's fused CPU kernel gives NaN for these under a causal mask.
    Case(scale=-0.5),
    Case(scale=0.0, strategy="all_gather", layout="striped"),
]


def excess(case: Case, problem: Problem, solved: dict, mesh, layout) -> dict[str, float]:
    """Error over tolerance of each result: at most 1 where all is well."""
    if case.dtype in ("bfloat16", "float16"):
        own = single_device(case, problem)
        whole = {name: dtcp.unshard(solved[name].contiguous(), mesh, layout, dim=2) for name in solved}
        ratios = {}
        for name in whole:
            right = problem.answer[name]
            # What cancels to nothing (query and key gradients at S=1) is judged by the rounding of its terms; lse is
            # float32.
            size = max(float(right.norm()), _natural_size(problem, name, case) * right.numel() ** 0.5)
            floor = 1e-5 * size if name == "lse" else 1e-2 * torch.finfo(case.torch_dtype).eps * size
            own_error = (own[name].double() - right).norm()
            ratios[name] = float((whole[name].double() - right).norm() / (1.2 * own_error + floor))
        return ratios
    bounds = dict.fromkeys(solved, 1e-5 if case.dtype == "float32" else 1e-12)
    if case.dtype == "float32" and case.query_scale > 1:
        own = single_device(case, problem)
        # What a score is rounded by is the relative error of its weight, whoever computes it; of few rows the error of
        # one device may happen to be much less.
        of_scores = 2 * torch.finfo(torch.float32).eps * _largest_score(problem, case)
        for name, result in own.items():
            bounds[name] = max(1e-5, of_scores, 3 * relative_error(result, problem.answer[name]))
    local = {name: dtcp.shard(right, mesh, layout, dim=2) for name, right in problem.answer.items()}
    valid = layout.num_valid(mesh.get_local_rank())
    ratios = {}
    for name, result in solved.items():
        own, right = result[:, :, :valid], local[name][:, :, :valid]
        # A rank whose part of a gradient is nothing but rounding (S=1 has no query gradient) is judged on the whole.
        whole = problem.answer[name]
        reference = right if right.numel() and right.norm() > 1e-3 * whole.norm() else whole
        difference = (own.double() - right).abs()
        size = max(reference.abs().max().item(), _natural_size(problem, name, case))
        ratios[name] = float(difference.max() / size / bounds[name]) if bool(difference.any()) else 0.0
        pads = result[:, :, valid:]
        assert bool((pads == (float("-inf") if name == "lse" else 0)).all()), (case, name, "pads")
    return ratios


def _largest_score(problem: Problem, case: Case) -> float:
    scale = case.heads[2] ** -0.5 if case.scale is None else abs(case.scale)
    key = problem.key.double().repeat_interleave(case.heads[0] // case.heads[1], dim=1)
    return scale * float((problem.query.double() @ key.mT).abs().max())


def _natural_size(problem: Problem, name: str, case: Case) -> float:
    """What the terms of a result are like where they cancel to (nearly) nothing: query and key gradients at S=1."""
    if name not in ("grad_query", "grad_key"):
        return 0.0
    scale = case.heads[2] ** -0.5 if case.scale is None else abs(case.scale)
    other = problem.key if name == "grad_query" else problem.query
    return scale * float(other.double().abs().max() * problem.grad_out.double().abs().max())


def check_cases(rank: int, world: int, cases: list[Case]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    wrong = []
    for case in cases:
        if case.dtype in ("bfloat16", "float16") and case.seq_len < 128:
            # The ratio of two rounding errors is noise where there are few of them: more rows.
            case = dataclasses.replace(case, batch=256 // case.seq_len)
        problem = make_problem(case)
        layout = dtcp.make_layout(case.layout, seq_len=case.seq_len, cp=world)
        solved = solve(case, problem, mesh, layout)
        assert solved["out"].dtype == solved["grad_key"].dtype == case.torch_dtype
        assert solved["lse"].dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
        assert solved["lse"].is_contiguous()
        ratios = excess(case, problem, solved, mesh, layout)
        if not all(ratio <= 1 for ratio in ratios.values()):
            wrong.append(f"{case}: {ratios}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases on rank {rank}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_attention_matches_the_float64_oracle(ranks, world):
    ranks.run(world, check_cases, PAIRWISE + REPORTED)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", AXES["dtype"])
def test_attention_matches_the_float64_oracle_in_every_combination(ranks, world, dtype):
    names = ("layout", "strategy", "is_causal", "heads", "seq_len", "kernel", "query_scale")
    lengths = {"seq_len": [*AXES["seq_len"], 3, 4, 7, 700]}
    combinations = itertools.product(*((AXES | lengths)[name] for name in names))
    cases = [Case(**dict(zip(names, c, strict=True)), dtype=dtype, batch=1) for c in combinations]
    ranks.run(world, check_cases, cases, timeout=1200)


def check_cross_attention(rank: int, world: int, strategy: str) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    problems = [(20, 33, "head_tail", "contiguous"), (7, 2, "contiguous", "striped"), (1, 50, "striped", "head_tail")]
    for q_len, kv_len, q_name, kv_name in problems:
        layout = dtcp.make_layout(q_name, seq_len=q_len, cp=world)
        kv_layout = dtcp.make_layout(kv_name, seq_len=kv_len, cp=world)
        torch.manual_seed(0)
        shapes = (2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 12)
        whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        out, lse = dtcp.reference_attention(*whole, enable_gqa=True, return_lse=True)
        grad_out = torch.randn_like(out)
        right = [out, lse, *torch.autograd.grad(out, whole, grad_out)]
        of = [layout, layout, layout, kv_layout, kv_layout]
        local = [dtcp.shard(x.detach(), mesh, o, dim=2).requires_grad_() for x, o in zip(whole, of[2:], strict=True)]
        out, lse = dtcp.context_parallel_attention(
            *local, mesh=mesh, layout=layout, kv_layout=kv_layout, enable_gqa=True, return_lse=True, kernel="math",
            **options_of(strategy, world),
        )  # fmt: skip
        grads = torch.autograd.grad(out, local, dtcp.shard(grad_out, mesh, layout, dim=2))
        for result, expected, o in zip([out, lse, *grads], right, of, strict=True):
            joined = dtcp.unshard(result.detach(), mesh, o, dim=2)
            assert relative_error(joined, expected.detach()) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_cross_attention_has_a_key_layout_of_its_own(ranks, world, strategy):
    ranks.run(world, check_cross_attention, strategy)


def check_bitwise(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    axes = STRATEGIES, ("head_tail", "striped"), ("float32", "bfloat16")
    for strategy, layout_name, dtype in itertools.product(*axes):
        case = Case(layout=layout_name, strategy=strategy, dtype=dtype, heads=(8, 2, 16, 16), seq_len=130)
        problem, layout = make_problem(case), dtcp.make_layout(layout_name, seq_len=130, cp=world)
        first, second = (solve(case, problem, mesh, layout) for _ in range(2))
        for name in first:
            assert torch.equal(first[name], second[name]), (case, name)


def test_two_runs_are_bitwise_equal(ranks):
    ranks.run(4, check_bitwise)


def check_pads(rank: int, world: int) -> None:
    """NaN and infinity in every pad slot of q, k, v and grad_out."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for strategy, name, is_causal in itertools.product(STRATEGIES, AXES["layout"], (True, False)):
        layout = dtcp.make_layout(name, seq_len=9, cp=world, multiple_of=4)
        assert layout.padded_seq_len > 9
        case = Case(layout=name, strategy=strategy, is_causal=is_causal, seq_len=9, dtype="float64", kernel="math")
        problem = make_problem(case)
        poisoned = []
        for x, poison in ((problem.query, float("nan")), (problem.key, float("inf")), (problem.value, float("nan"))):
            poisoned.append(dtcp.shard(x, mesh, layout, dim=2, pad_value=poison).requires_grad_())
        grad_out = dtcp.shard(problem.grad_out, mesh, layout, dim=2, pad_value=float("nan"))
        out, lse = dtcp.context_parallel_attention(
            *poisoned, mesh=mesh, layout=layout, is_causal=is_causal, kernel="math", return_lse=True,
            **options_of(strategy, world),
        )  # fmt: skip
        grads = torch.autograd.grad(out, poisoned, grad_out)
        solved = {"out": out.detach(), "lse": lse, **dict(zip(GRADIENT_NAMES, grads, strict=True))}
        ratios = excess(case, problem, solved, mesh, layout)
        assert all(r <= 1 for r in ratios.values()), (case, ratios)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_pad_slots_hold_never_matters(ranks, world):
    ranks.run(world, check_pads)


def check_grad_subsets(rank: int, world: int, count_exchanges) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    case = Case(seq_len=41, dtype="float64", kernel="math")
    problem, layout = make_problem(case), dtcp.make_layout("head_tail", seq_len=41, cp=world)
    local = [dtcp.shard(x, mesh, layout, dim=2) for x in (problem.query, problem.key, problem.value)]
    grad_out = dtcp.shard(problem.grad_out, mesh, layout, dim=2)
    attend = functools.partial(dtcp.context_parallel_attention, mesh=mesh, layout=layout, is_causal=True, kernel="math")
    hops = set()
    for needed in itertools.product((False, True), repeat=3):
        inputs = [x.clone().requires_grad_(n) for x, n in zip(local, needed, strict=True)]
        with count_exchanges() as exchanges:
            out = attend(*inputs)
            assert out.requires_grad == any(needed)
            if any(needed):
                out.backward(grad_out)
                hops.add(len(exchanges))
        for x, need, name in zip(inputs, needed, GRADIENT_NAMES, strict=True):
            assert (x.grad is not None) == need
            if need:
                right = dtcp.shard(problem.answer[name], mesh, layout, dim=2)
                assert relative_error(x.grad, right) < 1e-12
    assert len(hops) == 1, f"the exchange depends on which inputs need a gradient: {hops}"
    right = dtcp.shard(problem.answer["out"], mesh, layout, dim=2)
    with torch.no_grad():
        out = attend(*(x.detach().requires_grad_() for x in local))
        assert not out.requires_grad and relative_error(out, right) < 1e-12
    with torch.inference_mode():
        assert relative_error(attend(*(x.detach() + 0 for x in local)), right) < 1e-12
    assert relative_error(attend(*(x.detach() for x in local)), right) < 1e-12


def test_any_subset_of_inputs_may_be_frozen_and_hops_do_not_depend_on_it(ranks):
    from recorder import count_exchanges

    ranks.run(3, check_grad_subsets, count_exchanges)


def check_strides(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for strategy in STRATEGIES:
        case = Case(seq_len=41, heads=(4, 2, 16, 16), strategy=strategy, layout="striped")
        problem, layout = make_problem(case), dtcp.make_layout("striped", seq_len=41, cp=world)
        strided = dataclasses.replace(
            problem,
            query=problem.query.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
            key=torch.cat([problem.key, problem.key], dim=-1)[..., 16:],
            value=problem.value.flip(0).contiguous().flip(0).transpose(0, 3).contiguous().transpose(0, 3),
        )
        local = [dtcp.shard(x, mesh, layout, dim=2) for x in (strided.query, strided.key, strided.value)]
        wide = [torch.stack([x, x], dim=-1)[..., 1].requires_grad_() for x in local]  # last stride 2
        assert not any(x.is_contiguous() for x in wide)
        versions = [(x._version, x.detach().clone()) for x in wide]
        out = dtcp.context_parallel_attention(
            *wide, mesh=mesh, layout=layout, is_causal=True, enable_gqa=True, **options_of(strategy, world)
        )
        # An expanded upstream gradient: what .sum().backward() hands over.
        grads = torch.autograd.grad(out.sum(), wide)
        ones = dataclasses.replace(problem, grad_out=torch.ones_like(problem.grad_out))
        right = solve(case, ones, mesh, layout)
        assert torch.equal(out, right["out"])
        for grad, name in zip(grads, GRADIENT_NAMES, strict=True):
            assert relative_error(grad, right[name]) < 1e-6
        for x, (version, copy) in zip(wide, versions, strict=True):
            assert x._version == version and torch.equal(x, copy), "an input was written to"


def test_inputs_of_any_strides_and_none_is_written_to(ranks):
    ranks.run(2, check_strides)


def check_autocast(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=16, cp=world)
    query = torch.randn(1, 2, layout.local_seq_len, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dtcp.context_parallel_attention(query, query.bfloat16(), query, mesh=mesh, layout=layout)
        assert out.dtype == torch.bfloat16
        wide = [query.double()] * 3
        assert dtcp.context_parallel_attention(*wide, mesh=mesh, layout=layout).dtype == torch.float64


@pytest.mark.parametrize("world", [1, 2])
def test_autocast_casts_as_for_plain_attention(ranks, world):
    ranks.run(world, check_autocast)


def check_plain(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=33, cp=1)
    query, key, value = (torch.randn(2, h, 33, 16) for h in (4, 2, 2))
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    called: list[str] = []
    with Record():
        right = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    plain, called = called, []
    with Record():
        out = dtcp.context_parallel_attention(
            query, key, value, mesh=mesh, layout=layout, is_causal=True, enable_gqa=True
        )
    assert [c for c in called if c != "aten::transpose.int"] == plain
    assert torch.equal(out, right)


def test_one_rank_is_plain_attention_without_a_copy(ranks):
    ranks.run(1, check_plain)


def test_pairwise_set_covers_every_pair():
    for (a, values_a), (b, values_b) in itertools.combinations(AXES.items(), 2):
        seen = {(getattr(case, a), getattr(case, b)) for case in PAIRWISE}
        assert seen == set(itertools.product(values_a, values_b)), (a, b)


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_half_precision_errs_no_more_than_1_2_times_what_one_device_does(ranks, world):
    """Relative Frobenius norm of out and every gradient; the ratio is what ``excess`` returns for half precision."""
    cases = [
        Case(strategy=strategy, layout=layout, heads=(8, 2, 64, 64), seq_len=512, dtype="bfloat16", batch=1)
        for strategy, layout in zip(STRATEGIES, LAYOUTS_OF_STRATEGIES, strict=True)
    ]
    ranks.run(world, check_cases, cases)
