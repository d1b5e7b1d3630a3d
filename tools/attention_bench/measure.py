"""One pass on a rank, and the run that takes ranks and the single process in turn.

Shapes: query (B, Hq, S, D), key and value (B, Hkv, S, D).
"""

from __future__ import annotations

import datetime
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dtcp
from attention_bench.masks import layout_of, others, positional, work_of
from attention_bench.passes import Clock, as_inputs, max_relative_error, run_pass
from attention_bench.problem import (
    TOLERANCES,
    BenchmarkError,
    Case,
    Check,
    Configuration,
    Measurement,
    Problem,
    Seconds,
    strategy_arguments,
)
from attention_bench.ranks import Ranks
from attention_bench.sent import count_bytes
from attention_bench.single import SingleProcess


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
        self._inputs: dict[tuple[Case, dtcp.SequenceLayout], tuple[list[Tensor], Tensor]] = {}
        self._told: dict[tuple[Case, dtcp.SequenceLayout], dict[str, Any]] = {}

    def prepare(self, configuration: Configuration, path: Path) -> Check:
        """Cut the inputs and run once."""
        p, case, layout = self._problem, configuration.case, layout_of(self._problem, configuration)
        file = torch.load(path, mmap=True, weights_only=True)
        *inputs, grad_out = as_inputs(dtcp.shard(file["inputs"], self._mesh, layout), p, self._device)
        extra = {name: x.to(self._device) for name, x in file["extra"].items()}
        if "attn_bias" in extra:
            extra["attn_bias"] = dtcp.shard(extra["attn_bias"], self._mesh, layout, dim=2)
        if (sinks := extra.pop("sinks", None)) is not None:
            inputs.append(sinks.clone().requires_grad_(p.with_backward))
        self._inputs.setdefault((case, layout), (inputs, grad_out.detach()))
        self._told.setdefault((case, layout), positional(p, case) | others(case) | extra)
        with count_bytes() as forward:
            out = self._attention(configuration)(*inputs)
        with count_bytes() as backward:
            grads = torch.autograd.grad(out, inputs, grad_out) if out.requires_grad else ()
        cut = [r.detach().transpose(1, 2).cpu() for r in (out, *grads[:3])]
        learned = [grad.double() for grad in grads[3:]]  # each rank has its share
        for share in learned:
            dist.all_reduce(share)
        whole = file["expected"]
        expected = dtcp.shard(whole[: len(cut)], self._mesh, layout)
        error = max_relative_error([*cut, *(x.cpu() for x in learned)], [*expected, *whole[len(cut) :]], whole)
        return Check(error, forward.data, backward.data, forward.agreement + backward.agreement)

    def measure(self, configuration: Configuration) -> Seconds:
        attention = self._attention(configuration)
        inputs, grad_out = self._inputs[configuration.case, layout_of(self._problem, configuration)]
        self._clock.settle()
        dist.barrier(self._starting_line)
        return run_pass(attention, inputs, grad_out, self._clock)[0]

    def _attention(self, configuration: Configuration) -> Callable[..., Tensor]:
        layout, p = layout_of(self._problem, configuration), self._problem
        told = self._told[configuration.case, layout]
        return lambda query, key, value, *sinks: dtcp.context_parallel_attention(
            query, key, value, mesh=self._mesh, layout=layout, enable_gqa=p.num_heads != p.num_kv_heads,
            **strategy_arguments(configuration.strategy), **told, **({"sinks": sinks[0]} if sinks else {}),
        )  # fmt: skip


def benchmark(
    problem: Problem, configurations: list[Configuration], *, repeats: int, timeout: float
) -> list[Measurement]:
    """Check every configuration, then measure all of them in turn ``repeats`` times, the single process first.

    Raises:
        BenchmarkError: If a result is wrong, or a rank fails or takes longer than ``timeout`` seconds for one request.
    """
    single = SingleProcess(problem)
    rows: list[Measurement] = []
    with (
        tempfile.TemporaryDirectory(prefix="dtcp-bench-") as name,
        Ranks(problem.num_ranks, Rank, problem, Path(name), timeout, timeout=timeout) as ranks,
    ):
        path = Path(name) / "problem.pt"
        for case in dict.fromkeys(c.case for c in configurations):
            path.unlink(missing_ok=True)  # ranks that have the old one mapped keep it
            of_single = [Measurement(case, by, [], [], []) for by in ("torch", "dtcp")]
            single.prepare(of_single, path)
            rows += of_single
            for configuration in (c for c in configurations if c.case == case):
                row = Measurement(case, configuration, [], ranks.ask("prepare", configuration, path), [])
                check_results(problem, row)
                rows.append(row)
        for repeat, row in itertools.product(range(-1, repeats), rows):
            if isinstance(row.computed_by, str):
                seconds = single.measure(row)
            else:
                seconds = Seconds(*map(max, zip(*ranks.ask("measure", row.computed_by), strict=True)))
            if repeat >= 0:  # the first round warms up
                row.samples.append(seconds)
    return rows


def check_results(problem: Problem, row: Measurement) -> None:
    """Raise unless the results of ranks are right and the bytes were seen."""
    assert isinstance(row.computed_by, Configuration)
    tolerance = TOLERANCES[problem.dtype]
    wrong = {r: check.error for r, check in enumerate(row.checks) if not check.error <= tolerance}  # NaN is wrong
    if wrong:
        raise BenchmarkError(
            f"{row.computed_by} is wrong: relative difference from the right result by rank {wrong}, tolerance "
            f"{tolerance:g} for {problem.dtype}"
        )
    has_to_send = work_of(problem, row.computed_by).crosses
    if has_to_send and not any(check.forward_bytes for check in row.checks):
        raise BenchmarkError(f"{row.computed_by} sends in a way that this tool does not count; extend count_bytes")
