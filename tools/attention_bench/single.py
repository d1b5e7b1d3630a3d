"""The single process that the ranks are compared with: torch in the fastest of its ways, and dtcp's own op."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_bench.masks import make_tensors, others, positional
from attention_bench.passes import Clock, as_inputs, has_reference, max_relative_error, reference_results, run_pass
from attention_bench.problem import TOLERANCES, BenchmarkError, Case, Check, Measurement, Problem, Seconds
from attention_bench.ways import dtcp_way, torch_ways

# OpenMP's threads go on spinning after a parallel region (7 ms of CPU time measured); no rank is timed meanwhile.
SETTLE_SECONDS = 0.02
_TRIALS = 3  # of each way, of which the fastest is taken


class SingleProcess:
    """Attention over the whole sequence, with as many threads as there are ranks."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._clock = problem, Clock(problem.device)
        self._inputs: dict[Case, tuple[list[Tensor], Tensor]] = {}
        self._attention: dict[tuple[Case, str], Callable[..., Tensor]] = {}
        torch.set_num_threads(problem.num_ranks)

    def prepare(self, rows: list[Measurement], path: Path) -> None:
        """Make the inputs of a case, and write them with the results to compare with; choose a way for each row.

        Raises:
            BenchmarkError: If a way computes something else than the oracle.
        """
        p, case = self._problem, rows[0].case
        generator = torch.Generator().manual_seed(case.seq_len)
        tensors = [
            torch.randn(p.batch_size, case.seq_len, heads, p.head_dim, generator=generator).to(getattr(torch, p.dtype))
            for heads in (p.num_heads, p.num_kv_heads, p.num_kv_heads, p.num_heads)
        ]
        *inputs, grad_out = as_inputs(tensors, p, p.device)
        extra = make_tensors(p, case)
        placed = {name: x.to(p.device) for name, x in extra.items()}
        if (sinks := placed.pop("sinks", None)) is not None:
            inputs.append(sinks.requires_grad_(p.with_backward))
        self._inputs[case] = inputs, grad_out.detach()
        told = positional(p, case) | others(case) | placed
        by_torch, by_dtcp = torch_ways(p, case, extra), {"single_rank_attention": dtcp_way(told)}
        if has_reference(case):
            expected = reference_results(inputs, grad_out, told, with_backward=p.with_backward)
        else:
            _, expected = run_pass(next(iter(by_torch.values())), *self._inputs[case], self._clock)
        for row in rows:
            ways = by_torch if row.computed_by == "torch" else by_dtcp
            name, error = self._fastest(case, ways, expected)
            self._attention[case, str(row.computed_by)] = ways[name]
            row.way.append(name)
            row.checks.append(Check(error, 0, 0, 0))
        results = [r.transpose(1, 2).contiguous().cpu() if r.ndim == 4 else r.cpu() for r in expected]
        torch.save({"inputs": tensors, "extra": extra, "expected": results}, path)

    def measure(self, row: Measurement) -> Seconds:
        self._clock.settle()
        attention = self._attention[row.case, str(row.computed_by)]
        seconds, _ = run_pass(attention, *self._inputs[row.case], self._clock)
        time.sleep(SETTLE_SECONDS)
        return seconds

    def _fastest(self, case: Case, ways: dict[str, Any], expected: list[Tensor]) -> tuple[str, float]:
        """Check every way; return the name of the fastest, and the largest error."""
        tolerance, errors, seconds = TOLERANCES[self._problem.dtype], {}, {}
        for name, attention in ways.items():
            _, results = run_pass(attention, *self._inputs[case], self._clock)
            errors[name] = max_relative_error(results, expected, expected)
            if not errors[name] <= tolerance:  # NaN is wrong
                raise BenchmarkError(
                    f"{case.seq_len} tokens, mask {case.mask}: the single process is wrong by {name!r}: relative "
                    f"difference {errors[name]:g}, tolerance {tolerance:g} for {self._problem.dtype}"
                )
        if len(ways) == 1:
            return next(iter(ways)), max(errors.values())
        for _ in range(_TRIALS):
            for name, attention in ways.items():
                self._clock.settle()
                taken = run_pass(attention, *self._inputs[case], self._clock)[0].total
                seconds[name] = min(taken, seconds.get(name, taken))
        return min(seconds, key=lambda name: seconds[name]), max(errors.values())
