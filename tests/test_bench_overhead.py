"""tools/bench_overhead.py: what of a strategy's time is its own."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import bench_overhead


def test_calls_of_torch_are_repeated_with_nothing_around_them():
    x = torch.zeros(3)
    with bench_overhead._TorchCalls() as calls:
        x[:2] = 1
        assert x.size(0) == 3 and x.dtype == torch.float32
        x.add_(1)
    names = [getattr(func, "__name__", "") for func, _, _ in calls.calls]
    assert names == ["__setitem__", "add_"], "what gives no tensor is our own"
    calls.again()
    assert x.tolist() == [2, 2, 2]


def test_every_strategy_is_timed_beside_its_calls_of_torch(capsys):
    records = bench_overhead.time_strategies(1)
    assert [(r["layout"], r["strategy"]) for r in records] == [
        (layout, strategy) for layout in bench_overhead.LAYOUTS for strategy in bench_overhead.STRATEGIES
    ]
    for record in records:
        for part in (record["forward"], record["backward"], record["call"]):
            assert part["own"] == pytest.approx(part["microseconds"] - part["microseconds_of_torch"], abs=0.11)
            assert part["torch_calls"] > 20
        assert record["call"]["torch_calls"] > record["forward"]["torch_calls"], "a call is the strategy and more"
    step = {"what": "step", "milliseconds_plain": 1.0, "milliseconds_inside": 1.0, "ratio": 1.0}
    bench_overhead.print_tables([*records, step])
    printed = capsys.readouterr().out
    assert all(strategy in printed for strategy in bench_overhead.STRATEGIES) and "own" in printed
