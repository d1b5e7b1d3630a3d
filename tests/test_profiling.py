"""Traces of steps: named ranges of attention, where the time went, what was sent, and who is slow."""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from dtcp.ranges import named_range
from dtcp.train import profiling
from dtcp.train.config import compose_job_config
from dtcp.train.metrics import MetricsLog
from dtcp.train.profiling import straggler
from dtcp.train.timeline import StepTimes, covered, step_times
from dtcp.train.trainer import Trainer
from parity import JOB, TINY

SMALL = [*TINY["gpt"], *JOB, "training.seq_len=33", "training.steps=3", "mesh.cp=2"]


# ---- named ranges ----------------------------------------------------------------------------------------------------


def ranges_of_a_call(rank: int, world: int, strategy: str, ulysses_degree: int | None, ranks_per_node: int | None):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"]
    layout = dtcp.make_layout("head_tail", seq_len=16, cp=world)
    tensors = [torch.randn(1, 4, layout.local_seq_len, 8, requires_grad=True) for _ in range(3)]
    more = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}

    def call() -> None:
        out = dtcp.context_parallel_attention(
            *tensors, mesh=mesh, layout=layout, is_causal=True, strategy=strategy, ulysses_degree=ulysses_degree, **more
        )
        out.sum().backward()

    with profile() as profiler:
        call()
    events = [(e.name(), e.start_ns(), e.end_ns()) for e in profiler.kineto_results.events()]
    return [event for event in events if event[0].startswith("dtcp:")]


@pytest.mark.parametrize(
    ("world", "strategy", "ulysses_degree", "ranks_per_node"),
    [
        (3, "ring", None, None), (3, "exchange", None, None), (3, "all_gather", None, None), (2, "ulysses", None, None),
        (4, "hybrid", 2, None), (4, "ring", None, 2), (4, "all_gather", None, 2),
    ],
)  # fmt: skip
def test_a_trace_names_hops_attention_merges_and_exchanges(ranks, world, strategy, ulysses_degree, ranks_per_node):
    cp = world if strategy not in ("ulysses", "hybrid") else world // 2
    for events in ranks.run(world, ranges_of_a_call, strategy, ulysses_degree, ranks_per_node):
        forward = _inside(events, "dtcp::attention_forward")
        backward = _inside(events, "dtcp::attention_backward")
        for inside in (forward, backward):
            names = {name for name, *_ in inside}
            assert {"dtcp:attend", "dtcp:exchange", "dtcp:exchange wait"} <= names
            assert {name for name in names if "hop" in name} == {f"dtcp:hop {hop}" for hop in range(cp)}
            for name, start, end in inside:
                if name == "dtcp:attend":
                    assert any("hop" in n and s <= start and end <= e for n, s, e in inside), "attends outside a hop"
        # The first keys that a query sees are merged with nothing; gradients are always added up.
        assert any(name == "dtcp:merge" for name, *_ in backward)
        assert cp == 1 or any(name == "dtcp:merge" for name, *_ in forward)


def _inside(events, op):
    (start, end), *others = [(s, e) for name, s, e in events if name == op]
    assert not others
    return [event for event in events if event[0] != op and start <= event[1] <= event[2] <= end]


def test_a_range_without_a_profiler_is_nothing():
    assert named_range("attend") is named_range("hop", 1)
    with profile() as profiler, named_range("hop", 7):
        pass
    assert [e.name() for e in profiler.kineto_results.events()] == ["dtcp:hop 7"]


# ---- where the time went ---------------------------------------------------------------------------------------------


@dataclass
class Event:
    """What a profiler gives, in seconds."""

    text: str
    start: float
    end: float
    thread: int = 1
    device: DeviceType = DeviceType.CPU
    is_range: bool = False

    name = lambda self: self.text  # noqa: E731
    start_ns = lambda self: int(self.start * 1e9)  # noqa: E731
    end_ns = lambda self: int(self.end * 1e9)  # noqa: E731
    start_thread_id = lambda self: self.thread  # noqa: E731
    device_type = lambda self: self.device  # noqa: E731
    is_user_annotation = lambda self: self.is_range  # noqa: E731


def test_time_is_compute_exposed_communication_or_waiting():
    steps = [Event("dtcp:step 1", 0, 10, is_range=True), Event("dtcp:step 2", 20, 30, is_range=True)]
    on_cpu = [
        Event("aten::mm", 1, 4), Event("aten::bmm", 2, 3), Event("gloo:all_reduce", 3, 6, thread=2),
        Event("aten::copy_", 5, 6, thread=2),  # of gloo's thread
        Event("aten::add", 9, 21), Event("gloo:send", 22, 31), Event("dtcp:attend", 0, 30),
    ]  # fmt: skip
    times = step_times([*steps, *on_cpu])
    assert (times.step, times.compute, times.communication) == (10, 2.5, 5.5)
    assert (times.exposed, times.waiting, times.own) == (5, 2.5, 5)
    cuda = DeviceType.CUDA
    on_gpu = [
        Event("gemm", 1, 4, device=cuda), Event("ncclDevKernel_AllGather", 3, 6, device=cuda),
        Event("dtcp:attend", 0, 10, device=cuda, is_range=True), Event("aten::mm", 0, 9),
    ]  # fmt: skip
    times = step_times([steps[0], *on_gpu])
    assert (times.compute, times.exposed, times.waiting) == (3, 2, 5)


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(spans, st.lists(st.integers(0, 30), max_size=6, unique=True).map(sorted))
@settings(max_examples=200, deadline=None)
def test_covered_counts_every_moment_once(spans, edges):
    windows = list(zip(edges[::2], edges[1::2], strict=False))
    moments = {t for a, b in spans for t in range(a, b) if any(start <= t < end for start, end in windows)}
    assert covered(spans, windows) == len(moments)


def times_of(own: float, waiting: float = 0.0) -> StepTimes:
    return StepTimes(step=10, compute=own - waiting, communication=0, exposed=10 - own, waiting=waiting)


def test_the_slowest_rank_is_named_beside_the_median_of_the_others():
    assert straggler([times_of(1.0), times_of(1.2), times_of(3.0), times_of(1.1)], 0.1) == (
        "warning: rank 2 is slow: 3.0000 s of its own work in a step, 173% more than the median 1.1000 s of the "
        "others, most of it computing"
    )
    assert "rank 0 is slow" in straggler([times_of(2.0, waiting=1.5), times_of(1.0)], 0.1)
    assert straggler([times_of(1.05), times_of(1.0)], 0.1) is None
    assert straggler([times_of(5.0)], 0.1) is None


class Slow(Trainer):
    """Rank 1 needs longer, in ways that its step time shows on all ranks alike."""

    how = ""

    def forward(self, microbatch):
        if self.device.type == "cpu" and torch.distributed.get_rank() == 1 and self.how == "sleeps":
            time.sleep(0.5)
        if torch.distributed.get_rank() == 1 and self.how == "computes":
            end = time.perf_counter() + 0.5
            while time.perf_counter() < end:
                torch.mm(*(torch.ones(200, 200),) * 2)
        return super().forward(microbatch)


def train_slowly(rank: int, world: int, how: str, folder: str) -> list[str]:
    trainer = Slow(compose_job_config([*SMALL, "stragglers.every=2", "stragglers.tolerance=0.5"]))
    trainer.how = how
    return told(trainer, folder)


@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_a_rank_that_is_slow_is_named_though_all_wait_for_it(ranks, tmp_path, how):
    said = ranks.run(2, train_slowly, how, str(tmp_path))[0]
    assert any(re.match("step 2: warning: rank 1 is slow", line) for line in said), said
    steps = [float(line.split()[1]) for line in said if re.match("[01]  ", line)]
    assert len(steps) == 2 and min(steps) > 0.5  # the whole step is as long on both


# ---- the job ---------------------------------------------------------------------------------------------------------


def told(trainer: Trainer, folder: str, **more) -> list[str]:
    """What a job prints."""
    said, say = [], MetricsLog.say
    MetricsLog.say = lambda self, line: said.append(line)
    try:
        trainer.train(Path(folder), **more)
    finally:
        MetricsLog.say = say
    return said


def train_into(rank: int, world: int, overrides: list[str], folder: str, stop_after: int = 9) -> list[str]:
    trainer = Trainer(compose_job_config([*SMALL, *overrides]))
    return told(trainer, folder, stop_requested=lambda: trainer.step + 1 >= stop_after)


def trace(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "traces" / f"{name}.json").read_text())["traceEvents"]


def test_each_rank_writes_a_trace_and_the_first_tells_what_is_in_it(ranks, tmp_path):
    overrides = ["profile.steps=[2,3]", "profile.memory=true"]
    said = "\n".join(ranks.run(2, train_into, overrides, str(tmp_path))[0])
    for rank in (0, 1):
        events = trace(tmp_path, f"steps-2-3-rank{rank}")
        names = Counter(event.get("name") for event in events)
        assert names["dtcp:step 2"] == names["dtcp:step 3"] == 1 and not names["dtcp:step 1"]
        assert names["dtcp:attend"] and names["[memory]"]
    # The summary, again from the file: torch's operations of the thread that takes the steps.
    steps = [e for e in trace(tmp_path, "steps-2-3-rank0") if str(e.get("name")).startswith("dtcp:step")]
    ops = [
        (int(e["ts"] * 1000), int((e["ts"] + e["dur"]) * 1000))
        for e in trace(tmp_path, "steps-2-3-rank0")
        if str(e.get("name")).startswith("aten::") and e["tid"] == steps[0]["tid"]
    ]
    windows = sorted((int(e["ts"] * 1000), int((e["ts"] + e["dur"]) * 1000)) for e in steps)
    row = re.search(r"^0 +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", said, flags=re.MULTILINE)
    step, compute, exposed, waiting, own = map(float, row.groups())
    assert compute == pytest.approx(covered(ops, windows) / 2e9, abs=2e-4)
    assert step == pytest.approx(compute + exposed + waiting, abs=3e-4)
    assert own == pytest.approx(compute + waiting, abs=2e-4)
    assert "allocations are in the traces" in said


def test_a_job_that_stops_in_between_writes_the_steps_it_took(ranks, tmp_path):
    ranks.run(2, train_into, ["profile.steps=[1,3]"], str(tmp_path), 2)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [f"steps-1-2-rank{r}.json" for r in (0, 1)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profile.steps=[3,2]"], r"training.steps=3, got \[3, 2\]; null"),
        (["profile.steps=[0,2]"], r"got \[0, 2\]"),
        (["profile.steps=[2,4]"], r"got \[2, 4\]"),
        (["profile.steps=[2]"], r"got \[2\]"),
        (["profile.memory=true"], r"needs profile.steps, got null; profile.steps=\[3,5\]"),
        (["stragglers.every=-1"], "got -1; 0 never"),
        (["stragglers.tolerance=0"], "got 0"),
    ],
)
def test_values_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        Trainer(compose_job_config([*SMALL, "mesh.cp=1", *overrides]))


def test_traffic_of_a_step_by_axis(ranks, tmp_path):
    """Each number by hand; contiguous layouts send keys one way."""
    overrides = ["mesh.dp_shard=2", "profile.steps=[2,3]", "attention.layout=contiguous", "training.seq_len=64"]
    said = ranks.run(4, train_into, overrides, str(tmp_path))[0]
    rows = [re.fullmatch(r"(\w+) +([\w ]+?) +([\d.]+) +([\d.,]+)", line) for line in said]
    sent = {(row[1], row[2]): (float(row[3]), float(row[4].replace(",", ""))) for row in rows if row}
    num_layers, rows_of_rank, slots, entry = 2, 2, 32, 2 * 64
    shard = rows_of_rank * slots * entry * 4 / 1024
    # Rank 0 gives its keys to rank 1 in the forward and again in the backward; rank 1 gives back their gradients.
    assert sent["cp", "send"] == (2 * num_layers, 2 * num_layers * shard)
    num_parameters = int(re.search(r": ([\d,]+) parameters", said[0])[1].replace(",", ""))
    assert sent["fsdp", "reduce_scatter"][1] == pytest.approx(num_parameters * 4 * 3 / 4 / 1024, rel=0.02)
    assert not {axis for axis, _ in sent} & {"tp", "pp"}


def test_unknown_traffic_is_said_to_be_unknown(ranks, tmp_path):
    """A recorder that has forgotten, or other threads that communicate too: nothing is guessed."""
    assert any("traffic by axis is not known" in line for line in ranks.run(2, forgets, str(tmp_path))[0])


def forgets(rank: int, world: int, folder: str) -> list[str]:
    entries = profiling.flight_entries
    profiling.flight_entries = lambda: entries()[:-1]
    try:
        return train_into(rank, world, ["profile.steps=[2,2]"], folder)
    finally:
        profiling.flight_entries = entries
