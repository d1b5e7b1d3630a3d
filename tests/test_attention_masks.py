"""context_parallel_attention under masks against the float64 oracle: out, lse, and every gradient, sinks' and biases'.

Everything is computed in float64, where the fused CPU kernel is exact too, and compared to 1e-10: rounding of some
thousand additions. In float32 the kernels are those of ``test_attention_parity``, with the same tolerance.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from masked import MASK_MODS, MaskedCase, MaskedProblem, errors, layout_of, solve_masked
from oracle import STRATEGIES, all_pairs

TOLERANCE = 1e-10
SEQ_LEN = 41

AXES: dict[str, list[Any]] = {
    "layout": ["contiguous", "head_tail", "striped", "per_document", "auto"],
    "strategy": list(STRATEGIES),
    "is_causal": [True, False],
    "heads": [(4, 2, 8, 8), (4, 4, 8, 4), (4, 1, 4, 8)],
    "lengths": [
        (),
        ((41,),),
        ((1, 2, 17, 21),),
        ((5, -3, 1, 1, 20, -11),),
        ((20, 21), (41,)),
        ((41,), (1,) * 41),
        ((3, -5, 33), (-1, 40)),
    ],
    "window": [(-1, -1), (0, 0), (2, 0), (7, -1), (40, 0), (3, 2), (-1, 5)],
    "key_lengths": [(), (41, 12), (0, 40)],
    "mask_mod": ["", *MASK_MODS],
    "sinks": [False, True],
    "bias": ["", "11", "bh", "1h"],
    "slopes": ["", "h", "bh"],
    "softcap": [None, 2.0],
    "kernel": ["auto", "math", "flash"],
}


def possible(**options: Any) -> MaskedCase:
    """The case, or the nearest that is not refused."""
    case = MaskedCase(seq_len=SEQ_LEN, **options)
    changes: dict[str, Any] = {}
    if case.layout == "per_document" and not case.lengths:
        changes["lengths"] = ((1, 2, 17, 21),)
    if case.is_causal and case.window[1] > 0:
        changes["window"] = (case.window[0], 0)
    if case.kernel == "flash":
        changes["softcap"] = None  # which it refuses
        changes["needs_mask_gradients"] = not (case.bias or case.slopes)
    return dataclasses.replace(case, **changes)


def pairs() -> Iterator[dict[str, Any]]:
    """Every two values of two axes."""
    for (a, values_a), (b, values_b) in itertools.combinations(AXES.items(), 2):
        yield from ({a: x, b: y} for x, y in itertools.product(values_a, values_b))


def has(case: MaskedCase, options: dict[str, Any]) -> bool:
    return all(getattr(case, name) == value for name, value in options.items())


def make_pairwise() -> list[MaskedCase]:
    """A small set with every pair; what became of the others because of a third value gets a case of its own."""
    cases = [possible(**options) for options in all_pairs(AXES)]
    for pair in pairs():
        alone = possible(**{"is_causal": False, **pair})
        if has(alone, pair) and not any(has(case, pair) for case in cases):
            cases.append(alone)
    return cases


PAIRWISE = make_pairwise()


def check_cases(rank: int, world: int, cases: list[MaskedCase], poison: float | None = None) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    wrong = []
    for case in cases:
        problem = MaskedProblem(case)
        solved = solve_masked(problem, mesh, layout_of(case, world), poison=poison)
        answer = problem.answer()
        assert set(solved) >= {"out", "lse", "grad_query", "grad_key", "grad_value"}
        assert not case.needs_mask_gradients or set(solved) == set(answer)
        found = errors(solved, answer)
        if not all(error < TOLERANCE for error in found.values()):
            wrong.append(f"{case}: {found}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases on rank {rank}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_masks_match_the_float64_oracle(ranks, world):
    ranks.run(world, check_cases, PAIRWISE, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", AXES["layout"])
def test_masks_match_the_float64_oracle_in_every_pair_of_masks(ranks, world, layout):
    """Every two values of the masks, in every layout, strategy, causal or not, kernel."""
    names = ("lengths", "window", "key_lengths", "mask_mod", "sinks", "bias", "slopes", "softcap")
    cases = {}
    for first, second in itertools.combinations(names, 2):
        for a, b in itertools.product(AXES[first], AXES[second]):
            for strategy, is_causal in itertools.product(AXES["strategy"], AXES["is_causal"]):
                heads = AXES["heads"][len(cases) % 3]
                kernel = AXES["kernel"][len(cases) // 3 % 3]
                case = possible(
                    layout=layout, strategy=strategy, is_causal=is_causal, heads=heads, kernel=kernel,
                    **{first: a, second: b},
                )  # fmt: skip
                cases[case] = None
    ranks.run(world, check_cases, list(cases), timeout=1200)


@st.composite
def drawn_cases(draw: st.DrawFn) -> MaskedCase:
    seq_len = draw(st.integers(1, 70))

    def lengths() -> tuple[int, ...]:
        cuts = draw(st.lists(st.one_of(st.integers(0, seq_len), st.integers(0, 4)), max_size=6))
        ends = sorted({min(cut, seq_len) for cut in cuts} | {0, seq_len})
        parts = [b - a for a, b in itertools.pairwise(ends)]
        return tuple(-part if draw(st.integers(0, 6)) == 0 else part for part in parts)

    batch = draw(st.integers(1, 2))
    num_described = draw(st.sampled_from([0, 1, batch]))
    is_causal = draw(st.booleans())
    window = draw(st.sampled_from([(-1, -1), (0, 0), (1, -1), (3, 0), (seq_len, 0), (seq_len // 3, -1), (2, 4)]))
    layouts = AXES["layout"] if num_described else [x for x in AXES["layout"] if x != "per_document"]
    return MaskedCase(
        layout=draw(st.sampled_from(layouts)),
        strategy=draw(st.sampled_from(AXES["strategy"])),
        is_causal=is_causal,
        heads=draw(st.sampled_from(AXES["heads"])),
        seq_len=seq_len,
        batch=batch,
        lengths=tuple(lengths() for _ in range(num_described)),
        window=(window[0], min(window[1], 0)) if is_causal else window,
        key_lengths=tuple(draw(st.integers(0, seq_len)) for _ in range(batch)) if draw(st.booleans()) else (),
        mask_mod=draw(st.sampled_from(["", "", *MASK_MODS])),
        sinks=draw(st.booleans()),
        bias=draw(st.sampled_from(["", "", "1h", "b1"])),
        slopes=draw(st.sampled_from(["", "", "h"])),
        softcap=draw(st.sampled_from([None, None, 3.0])),
    )


def check_drawn(rank: int, world: int, case: MaskedCase, multiple_of: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    problem = MaskedProblem(case)
    solved = solve_masked(problem, mesh, layout_of(case, world, multiple_of), poison=float("nan"))
    found = errors(solved, problem.answer())
    assert set(found) == set(problem.answer()) and all(error < TOLERANCE for error in found.values()), found


DRAWN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@given(case=drawn_cases(), multiple_of=st.integers(1, 3), world=st.integers(1, 4))
@settings(DRAWN, max_examples=150)
def test_drawn_masks_match_the_oracle_and_nan_in_padding_reaches_nothing(ranks, case, multiple_of, world):
    ranks.run(world, check_drawn, case, multiple_of)


@pytest.mark.slow
@given(case=drawn_cases(), multiple_of=st.integers(1, 3), world=st.integers(1, 4))
@settings(DRAWN, max_examples=2000)
def test_many_drawn_masks_match_the_oracle(ranks, case, multiple_of, world):
    ranks.run(world, check_drawn, case, multiple_of)


def test_nan_in_padding_reaches_nothing(ranks):
    masks = ({}, {"window": (3, 0)}, {"sinks": True}, {"window": (3, 0), "sinks": True}, {"mask_mod": "chunked"})
    lengths = ((3, -5, 33), (-1, 40))
    cases = [
        MaskedCase(layout=layout, strategy=AXES["strategy"][index % 2], lengths=lengths, **more)
        for index, (layout, more) in enumerate(itertools.product(AXES["layout"], masks))
    ]
    ranks.run(3, check_cases, cases, float("nan"))
    ranks.run(3, check_cases, cases[::3], float("inf"))


def test_the_pairwise_set_has_every_pair_but_those_that_are_refused():
    missing = [pair for pair in pairs() if not any(has(case, pair) for case in PAIRWISE)]
    for pair in missing:
        is_refused = (
            (pair.get("layout") == "per_document" and pair.get("lengths") == ())
            or (pair.get("is_causal") and pair.get("window", (0, 0))[1] > 0)
            or (pair.get("kernel") == "flash" and pair.get("softcap"))
        )
        assert is_refused, pair
    assert len(PAIRWISE) < 120


# ---- step after step -------------------------------------------------------------------------------------------------


def check_in_flight(rank: int, world: int) -> None:
    """Documents of several microbatches in flight, backwards in reverse order, recomputation in them."""
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for layout in ("head_tail", "per_document"):
        rows = [((5, 36),), ((41,),), ((1, 2, 38), (20, 21)), ((-4, 37),)]
        problems = [MaskedProblem(MaskedCase(layout=layout, lengths=lengths), seed=i) for i, lengths in enumerate(rows)]
        in_flight = []
        for index, problem in enumerate(problems):
            of = layout_of(problem.case, world)
            local = [
                dtcp.shard(x, mesh, of, dim=2).requires_grad_() for x in (problem.query, problem.key, problem.value)
            ]

            def attend(q: Any, k: Any, v: Any, of: Any = of, problem: MaskedProblem = problem) -> Any:
                return dtcp.context_parallel_attention(q, k, v, mesh=mesh, layout=of, **problem.masks())[0]

            out = checkpoint(attend, *local, use_reentrant=False) if index % 2 else attend(*local)
            in_flight.append((out, local, of, problem))
        for out, local, of, problem in reversed(in_flight):
            answer = problem.answer()
            grads = torch.autograd.grad(out, local, dtcp.shard(problem.grad_out, mesh, of, dim=2))
            for name, x in zip(("out", "grad_query", "grad_key", "grad_value"), (out, *grads), strict=True):
                joined = dtcp.unshard(x.detach(), mesh, of, dim=2)
                assert (joined - answer[name]).abs().max() < TOLERANCE, (layout, problem.case, name)


def test_microbatches_with_other_documents_in_flight_and_recomputed(ranks):
    ranks.run(2, check_in_flight)


def check_no_recompilation(rank: int, world: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    counter = CompileCounterWithBackend("aot_eager")
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def block(q: Any, k: Any, v: Any, layout: Any, documents: Any) -> Any:
        return dtcp.context_parallel_attention(
            q * 2, k, v, mesh=mesh, layout=layout, documents=documents, is_causal=True, window_size=(9, 0), sinks=sinks
        )

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for step in range(12):
        documents = dtcp.Documents.from_lengths([step + 1, 20 - step, 20])
        layout = dtcp.make_layout(
            "per_document" if step % 2 else "head_tail", seq_len=41, cp=world, documents=documents
        )
        torch.manual_seed(step)
        inputs = [torch.randn(1, 4, layout.local_seq_len, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        results = []
        for run in (compiled, block):
            out = run(*inputs, layout, documents)
            results.append((out, *torch.autograd.grad(out.square().sum(), [*inputs, sinks])))
        for mine, eager in zip(*results, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-12, atol=1e-12)
    # Two layouts: a layout that documents place has a longer state.
    assert counter.frame_count <= 2, "other documents in every step cost no recompilation"


def test_documents_that_change_every_step_cost_no_recompilation(ranks):
    ranks.run(2, check_no_recompilation, timeout=180)


def check_other_documents(rank: int, world: int) -> None:
    """Tokens placed by some documents, masked by others: a layout is no mask."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for placed, masked in (([[5, 36]], [[20, 1, 20]]), ([[5, 36], [41]], [[20, 21]]), ([[41]], [[3, 38], [30, 11]])):
        layout = dtcp.make_layout(
            "per_document", seq_len=SEQ_LEN, cp=world, documents=dtcp.Documents.from_lengths(placed)
        )
        problem = MaskedProblem(MaskedCase(lengths=tuple(map(tuple, masked)), window=(9, 0)))
        found = errors(solve_masked(problem, mesh, layout), problem.answer())
        assert all(error < TOLERANCE for error in found.values()), (placed, masked, found)


def test_documents_that_place_tokens_need_not_be_those_that_mask(ranks):
    ranks.run(3, check_other_documents)


def check_changed_captures(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=SEQ_LEN, cp=world)
    local = [dtcp.shard(torch.randn(1, 2, SEQ_LEN, 8), mesh, layout, dim=2).requires_grad_() for _ in range(3)]
    ids = torch.zeros(SEQ_LEN, dtype=torch.int64)

    class Width:
        value = 5

        def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return q - kv < self.value

    width = Width()
    for mask_mod, change in (
        (lambda b, h, q, kv: ids[q] == ids[kv], lambda: ids[-1:].fill_(3)),  # one token: seen by the version alone
        (width, lambda: setattr(width, "value", 1)),
    ):
        unchanged = dtcp.context_parallel_attention(*local, mesh=mesh, layout=layout, mask_mod=mask_mod)
        torch.autograd.grad(unchanged.sum(), local)
        out = dtcp.context_parallel_attention(*local, mesh=mesh, layout=layout, mask_mod=mask_mod)
        change()
        with pytest.raises(RuntimeError, match="not what it was in the forward: a tensor or number .* has changed"):
            torch.autograd.grad(out.sum(), local)


def test_a_mask_mod_that_changes_before_its_backward_is_refused(ranks):
    ranks.run(2, check_changed_captures)
