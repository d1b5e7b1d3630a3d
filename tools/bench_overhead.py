#!/usr/bin/env python3
"""What dtcp costs on the host: Python time per attention call by door and by strategy, and a training step at cp=1.

    tools/bench_overhead.py              three tables, under two minutes on 2 cores
    tools/bench_overhead.py --json       the same as records

Calls are timed on 2 CPU ranks with two tokens each, in CPU time of the calling thread, so that nothing is left but
what a call costs the host: the op with its exchange, and on top of it what each door adds. The step is one rank's
forward and backward of a GPT, with and without the context around it, in turn. Medians; times are those of this
machine, differences and ratios of this run.

Strategies are timed on one rank of two whose messages are there already, beside the same calls of torch with the same
tensors and nothing around them: what is left is our own Python. The least of many, in turn: others on the machine only
ever add to it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_bench.problem import BenchmarkError
from attention_bench.ranks import Ranks
from device_check.prepared import PreparedRank
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import dtcp
from dtcp.attention.ops import attention_forward
from dtcp.models import build_model

NUM_RANKS = 2
SEQ_LEN = 4


class Attention(nn.Module):
    """What a plan names."""

    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Calls:
    """On each rank: attention of almost nothing, by every door."""

    def __init__(self, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS,
            timeout=datetime.timedelta(seconds=120),
        )  # fmt: skip
        self.mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("cp",))
        self.layout = dtcp.make_layout("head_tail", seq_len=SEQ_LEN, cp=NUM_RANKS)
        self.inputs = [torch.randn(1, 1, SEQ_LEN // NUM_RANKS, 8) for _ in range(3)]

    def time(self, repeats: int) -> dict[str, float]:
        """Median microseconds of a call by each door, taken in turn; of entering a context too."""
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.parallel import parallelize_module

        planned = parallelize_module(Attention(), self.mesh, dtcp.ContextParallel())
        dtcp.set_sequence(planned, self.layout)
        natural = [DTensor.from_local(x, self.mesh, [Shard(2)]) for x in self.inputs]
        tagged = [dtcp.as_dtensor(x, self.mesh, self.layout) for x in self.inputs]
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        explicit = functools.partial(
            dtcp.context_parallel_attention, mesh=self.mesh, layout=self.layout, is_causal=True
        )
        ways: dict[str, Callable[[], Any]] = {
            "dtcp.context_parallel_attention": lambda: explicit(*self.inputs),
            "plan": lambda: planned(*self.inputs),
            "context": lambda: attend(*self.inputs),
            "DTensor, Shard(2)": lambda: attend(*natural),
            "as_dtensor": lambda: attend(*tagged),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, call in ways.items():
                if name == "context":
                    with dtcp.context_parallel(self.mesh, seq_len=SEQ_LEN):
                        seconds[name].append(self._timed(call))
                else:
                    seconds[name].append(self._timed(call))
        medians = {name: 1e6 * statistics.median(of) for name, of in seconds.items()}
        return medians | {"entering and leaving a context with 3 buffers": self._entering(repeats)}

    def _timed(self, call: Callable[[], Any]) -> float:
        call()
        start = time.thread_time()  # of this thread: waiting for the other rank takes none
        for _ in range(10):
            call()
        return (time.thread_time() - start) / 10

    def _entering(self, repeats: int) -> float:
        buffers = [torch.zeros(1, SEQ_LEN), torch.zeros(1, SEQ_LEN), torch.zeros(SEQ_LEN, 8)]
        seconds = []
        for _ in range(10 * repeats):
            start = time.thread_time()
            with dtcp.context_parallel(
                self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], expected_attention_calls=0
            ):
                pass
            seconds.append(time.thread_time() - start)
        return 1e6 * statistics.median(seconds)


class Step:
    """One rank's training step, inside a context and outside."""

    def __init__(self, rank: int, store: str, seq_len: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        self.mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        self.model = build_model("gpt_tiny", num_layers=4, dim=256, num_heads=4, max_seq_len=seq_len)
        self.tokens = torch.randint(0, 256, (1, seq_len))
        self.positions = torch.arange(seq_len)[None]

    def _step(self) -> None:
        logits = self.model(self.tokens, self.positions)
        F.cross_entropy(logits[0, :-1], self.tokens[0, 1:]).backward()

    def time(self, repeats: int) -> tuple[list[float], list[float]]:
        """Seconds of each step without a context, and with one."""
        plain, inside = [], []
        self._step()
        for index in range(2 * repeats):
            start = time.perf_counter()
            if index % 2 == 0:
                self._step()
            else:
                with dtcp.context_parallel(self.mesh, buffers=[self.tokens, self.positions], buffer_seq_dims=[1, 1]):
                    self._step()
            (inside if index % 2 else plain).append(time.perf_counter() - start)
        return plain, inside


STRATEGIES = ("ring", "exchange", "all_gather", "ulysses")
LAYOUTS = ("head_tail", "striped")
STRATEGY_TOKENS = 64
LIMIT = 150.0  # microseconds of our own in a forward


class _TorchCalls(TorchFunctionMode):
    """Keeps the calls of torch that give tensors, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__setitem__ or any(isinstance(x, Tensor) for x in tree_leaves(result)):
            self.calls.append((func, args, kwargs or {}))
        return result

    def again(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def time_strategies(repeats: int) -> list[dict[str, Any]]:
    """Microseconds of forward and backward of each strategy at cp=2, and of the same calls of torch."""
    torch.set_num_threads(1)
    records = []
    for layout_name, strategy in itertools.product(LAYOUTS, STRATEGIES):
        layout = dtcp.make_layout(layout_name, seq_len=STRATEGY_TOKENS, cp=2)
        rank = PreparedRank(strategy, layout, 0, (8, 4, 16, 16), torch.float32, torch.device("cpu"))
        inputs = [x.transpose(1, 2) for x in (rank.query, rank.key, rank.value)]
        how = layout.state, layout.state, rank.group.group_name, True, 0.25, rank.how, "auto"
        with torch.no_grad():  # as inside of an op
            rank.forward()
            record = {
                "strategy": strategy, "layout": layout_name, "limit": LIMIT,
                "forward": _own(rank.forward, repeats), "backward": _own(rank.backward, repeats),
                "call": _own(functools.partial(attention_forward, *inputs, *how), repeats),
            }  # fmt: skip
        records.append(record)
    return records


def _own(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of ``run``, of the calls of torch in it, and what is left."""
    # A custom op hides what happens inside: its function is looked into, and the op is timed.
    opened = mock.patch.object(CustomOpDef, "__call__", lambda self, *args: self._init_fn(*args))
    with _TorchCalls() as torch_calls, opened:
        run()
    whole, alone = _least(run, torch_calls.again, repeats=50 * repeats)
    return {
        "microseconds": round(whole, 1), "torch_calls": len(torch_calls.calls),
        "microseconds_of_torch": round(alone, 1), "own": round(whole - alone, 1),
    }  # fmt: skip


def _least(*runs: Callable[[], Any], repeats: int) -> list[float]:
    """The least microseconds of each, taken in turn."""
    least = [float("inf")] * len(runs)
    for _ in range(repeats + 5):
        for index, run in enumerate(runs):
            start = time.thread_time()
            run()
            least[index] = min(least[index], 1e6 * (time.thread_time() - start))
    return least


def measure(repeats: int, seq_len: int) -> list[dict[str, Any]]:
    """Records of all tables: calls by door, strategies, the step."""
    strategies = time_strategies(repeats)
    with tempfile.TemporaryDirectory() as folder:
        with Ranks(NUM_RANKS, Calls, str(Path(folder) / "calls"), timeout=300) as ranks:
            by_rank = ranks.ask("time", repeats)
        with Ranks(1, Step, str(Path(folder) / "step"), seq_len, timeout=600) as ranks:
            ((plain, inside),) = ranks.ask("time", repeats)
    least = min(by_rank, key=lambda of: of["dtcp.context_parallel_attention"])
    explicit = least["dtcp.context_parallel_attention"]
    records: list[dict[str, Any]] = [
        {"what": name, "microseconds": round(value, 1), "beside_explicit": round(value - explicit, 1)}
        for name, value in least.items()
    ]
    # Of steps next to each other, so that what else the machine does weighs on both.
    ratio = statistics.median(b / a for a, b in zip(plain, inside, strict=True))
    return [
        *records,
        *strategies,
        {
            "what": f"step at cp=1, {seq_len} tokens",
            "milliseconds_plain": round(1e3 * statistics.median(plain), 2),
            "milliseconds_inside": round(1e3 * statistics.median(inside), 2),
            "ratio": round(ratio, 4),
        },
    ]


def print_tables(records: list[dict[str, Any]]) -> None:
    """The calls, the strategies, then the step."""
    console = Console(width=110)
    step = records[-1]
    strategies = [record for record in records if "strategy" in record]
    calls = [record for record in records[:-1] if "strategy" not in record]
    table = Table("forward of one call, 2 ranks, 2 tokens each", "µs", "µs beside the explicit call")
    for record in calls:
        beside = f"{record['beside_explicit']:+.1f}" if "entering" not in record["what"] else ""
        table.add_row(record["what"], f"{record['microseconds']:.1f}", beside)
    console.print(table)
    parts = ("forward", "backward", "call")
    table = Table("rank 0 of 2 alone", "layout", *(name for part in parts for name in (f"{part}, torch µs", "own")))
    for record in strategies:
        cells = [
            cell
            for part in (record[name] for name in parts)
            for cell in (f"{part['microseconds']:.0f}, {part['microseconds_of_torch']:.0f}", f"{part['own']:.0f}")
        ]
        table.add_row(record["strategy"], record["layout"], *cells)
    console.print(table)
    console.print(f"own: without torch's calls; of a strategy's forward at most {LIMIT:.0f} are wanted; call: the op")
    table = Table(step["what"], "ms", "ratio")
    table.add_row("plain", f"{step['milliseconds_plain']:.2f}", "1")
    table.add_row("inside context_parallel", f"{step['milliseconds_inside']:.2f}", f"{step['ratio']:.4f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41, help="measurements of each way (41)")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of the step (1024)")
    parser.add_argument("--json", action="store_true", help="records to stdout, and no tables")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.seq_len < 2:
        parser.error("--repeats must be at least 1 and --seq-len at least 2")
    try:
        records = measure(arguments.repeats, arguments.seq_len)
    except BenchmarkError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(records, indent=1))
    else:
        print_tables(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
