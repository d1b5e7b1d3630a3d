"""One pass in the single process or on a rank, and the run that takes all of them in turn.

Shapes: query (B, Hq, S, D), key and value (B, Hkv, S, D).
"""

from __future__ import annotations

import datetime
import itertools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dtcp
from attention_bench.problem import (
    TOLERANCES,
    BenchmarkError,
    Check,
    Configuration,
    Measurement,
    Problem,
    Seconds,
)
from attention_bench.ranks import Ranks
from attention_bench.sent import count_bytes

# OpenMP's threads go on spinning after a parallel region (7 ms of CPU time measured); no rank is timed meanwhile.
SETTLE_SECONDS = 0.02


class Clock:
    """Marks in time: of the host, or of the CUDA stream."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        if not self._is_cuda:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def settle(self) -> None:
        """Wait until nothing of this process is running."""
        if self._is_cuda:
            torch.cuda.synchronize()


def run_pass(
    attention: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor, clock: Clock
) -> tuple[Seconds, list[Tensor]]:
    """Return the time, and [out, the inputs' gradients where they want any]."""
    start = clock.mark()
    out = attention(*inputs)
    middle = clock.mark()
    grads = torch.autograd.grad(out, inputs, grad_out) if out.requires_grad else ()
    stop = clock.mark()
    return Seconds(clock.seconds(start, middle), clock.seconds(start, stop)), [out.detach(), *grads]


def as_inputs(tensors: list[Tensor], problem: Problem, device: str) -> list[Tensor]:
    """(B, S, H, D) in memory, as projections leave it, seen as (B, H, S, D); leaves of the graph."""
    return [t.to(device).transpose(1, 2).detach().requires_grad_(problem.with_backward) for t in tensors]


class SingleProcess:
    """Torch's own attention over the whole sequence, with as many threads as there are ranks."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._clock = problem, Clock(problem.device)
        self._inputs: dict[int, tuple[list[Tensor], Tensor]] = {}
        torch.set_num_threads(problem.num_ranks)

    def prepare(self, seq_len: int, path: Path) -> None:
        """Make the inputs and write them, with the results to compare with, as (B, S, H, D) tensors."""
        p, generator = self._problem, torch.Generator().manual_seed(seq_len)
        tensors = [
            torch.randn(p.batch_size, seq_len, heads, p.head_dim, generator=generator).to(getattr(torch, p.dtype))
            for heads in (p.num_heads, p.num_kv_heads, p.num_kv_heads, p.num_heads)
        ]
        *inputs, grad_out = as_inputs(tensors, p, p.device)
        self._inputs[seq_len] = inputs, grad_out.detach()
        _, results = run_pass(self._attention, *self._inputs[seq_len], self._clock)
        expected = [r.transpose(1, 2).contiguous().cpu() for r in results]
        torch.save({"inputs": tensors, "expected": expected}, path)

    def measure(self, seq_len: int) -> Seconds:
        self._clock.settle()
        seconds, _ = run_pass(self._attention, *self._inputs[seq_len], self._clock)
        time.sleep(SETTLE_SECONDS)
        return seconds

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        is_grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=self._problem.is_causal, enable_gqa=is_grouped
        )


class Rank:
    """One rank; lives in a process of its own and does what it is asked by method name."""

    def __init__(self, rank: int, problem: Problem, folder: Path, timeout: float) -> None:
        torch.set_num_threads(1)
        self._problem, self._clock = problem, Clock(problem.device)
        self._device = problem.device if problem.device == "cpu" else f"cuda:{rank}"
        if problem.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "gloo" if problem.device == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=(folder / "store").as_uri(),
            rank=rank,
            world_size=problem.num_ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
        self._mesh = dist.init_device_mesh(problem.device, (problem.num_ranks,), mesh_dim_names=("cp",))
        self._starting_line = dist.new_group(backend="gloo")  # its barrier sleeps; it does not spin
        self._inputs: dict[tuple[int, str], tuple[list[Tensor], Tensor]] = {}

    def prepare(self, configuration: Configuration, path: Path) -> Check:
        """Cut the inputs and run once."""
        layout = self._layout(configuration)
        file = torch.load(path, mmap=True, weights_only=True)
        *inputs, grad_out = as_inputs(dtcp.shard(file["inputs"], self._mesh, layout), self._problem, self._device)
        self._inputs.setdefault((configuration.seq_len, configuration.layout), (inputs, grad_out.detach()))
        with count_bytes() as forward:
            out = self._attention(configuration)(*inputs)
        with count_bytes() as backward:
            grads = torch.autograd.grad(out, inputs, grad_out) if out.requires_grad else ()
        actual = [r.detach().transpose(1, 2).cpu() for r in (out, *grads)]
        expected = dtcp.shard(file["expected"], self._mesh, layout)
        error = max_relative_error(actual, expected, file["expected"])
        return Check(error, forward.data, backward.data, forward.agreement + backward.agreement)

    def measure(self, configuration: Configuration) -> Seconds:
        attention = self._attention(configuration)
        inputs, grad_out = self._inputs[configuration.seq_len, configuration.layout]
        self._clock.settle()
        dist.barrier(self._starting_line)
        return run_pass(attention, inputs, grad_out, self._clock)[0]

    def _layout(self, configuration: Configuration) -> dtcp.SequenceLayout:
        return dtcp.make_layout(configuration.layout, seq_len=configuration.seq_len, cp=self._problem.num_ranks)

    def _attention(self, configuration: Configuration) -> Callable[..., Tensor]:
        layout, p = self._layout(configuration), self._problem
        return lambda query, key, value: dtcp.context_parallel_attention(
            query, key, value, mesh=self._mesh, layout=layout, is_causal=p.is_causal,
            enable_gqa=p.num_heads != p.num_kv_heads, strategy=configuration.strategy,
        )  # fmt: skip


def max_relative_error(actual: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> float:
    """Return the larger of max|Δ|/max|ref| and ‖Δ‖/‖ref‖ over this rank's out and gradients; NaN stays NaN.

    A result that is all but zero, such as the query gradient of a token that sees one key, is measured by 1 % of the
    largest of its kind: relative to itself it is rounding and nothing else.
    """
    errors = [torch.zeros((), dtype=torch.float64)]
    for kind in (slice(0, 1), slice(1, None)):
        for norm in (math.inf, 2):
            norms = [torch.linalg.vector_norm(w.double(), norm) for w in whole[kind]]
            for a, e in zip(actual[kind], expected[kind], strict=True):
                scale = torch.linalg.vector_norm(e.double(), norm).clamp_min(0.01 * max(norms))
                errors.append(torch.linalg.vector_norm(a.double() - e.double(), norm) / scale)
    return float(torch.stack(errors).max())


def benchmark(
    problem: Problem, configurations: list[Configuration], *, repeats: int, timeout: float
) -> list[Measurement]:
    """Check every configuration, then measure all of them in turn ``repeats`` times, the single process first.

    Raises:
        BenchmarkError: If a result is wrong, or a rank fails or takes longer than ``timeout`` seconds for one request.
    """
    single = SingleProcess(problem)
    rows = [
        Measurement(seq_len, configuration, [], [])
        for seq_len in dict.fromkeys(c.seq_len for c in configurations)
        for configuration in (None, *(c for c in configurations if c.seq_len == seq_len))
    ]
    with (
        tempfile.TemporaryDirectory(prefix="dtcp-bench-") as name,
        Ranks(problem.num_ranks, Rank, problem, Path(name), timeout, timeout=timeout) as ranks,
    ):
        path = Path(name) / "problem.pt"
        for row in rows:
            if row.configuration is None:
                path.unlink(missing_ok=True)  # ranks that have the old one mapped keep it
                single.prepare(row.seq_len, path)
            else:
                row.checks.extend(ranks.ask("prepare", row.configuration, path))
                check_results(problem, row)
        for repeat, row in itertools.product(range(-1, repeats), rows):
            if row.configuration is None:
                seconds = single.measure(row.seq_len)
            else:
                seconds = Seconds(*map(max, zip(*ranks.ask("measure", row.configuration), strict=True)))
            if repeat >= 0:  # the first round warms up
                row.samples.append(seconds)
    return rows


def check_results(problem: Problem, row: Measurement) -> None:
    """Raise unless the results are right and the bytes were seen."""
    tolerance = TOLERANCES[problem.dtype]
    wrong = {r: check.error for r, check in enumerate(row.checks) if not check.error <= tolerance}  # NaN is wrong
    if wrong:
        raise BenchmarkError(
            f"{row.configuration} is wrong: relative difference from the single process by rank {wrong}, tolerance "
            f"{tolerance:g} for {problem.dtype}"
        )
    if problem.num_ranks > 1 and row.seq_len > 1 and not any(check.forward_bytes for check in row.checks):
        raise BenchmarkError(f"{row.configuration} sends in a way that this tool does not count; extend count_bytes")
