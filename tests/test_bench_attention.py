"""tools/bench_attention.py: what it prints, what it refuses, and that nothing hangs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.append(str(TOOLS))

HEADS = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
ROW_BYTES = 2 * 2 * 16 * 4  # key and value of one token: 2 heads of 16, float32
M = 32  # tokens of a rank where nothing is padded


def start(*arguments):
    options = [*HEADS, "--repeats", "1", "--timeout", "120", *arguments]
    command = [sys.executable, str(TOOLS / "bench_attention.py"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """(table, records in the file) of two ranks; records on stdout of one rank, forward only."""
    path = tmp_path_factory.mktemp("bench") / "records.json"
    two = start("--nproc", "2", "--seq-len", "64", "65", "--json", str(path))
    one = start("--nproc", "1", "--seq-len", "64", "--strategy", "ring", "--forward-only", "--non-causal", "--json")
    (table, errors), (records, more_errors) = two.communicate(timeout=300), one.communicate(timeout=300)
    assert (two.returncode, one.returncode) == (0, 0), errors + more_errors
    return table, json.loads(path.read_text()), json.loads(records)


def test_the_table_has_a_row_for_each_configuration_and_names_its_units(outputs):
    table, _, _ = outputs
    lines = [line.split() for line in table.splitlines()]
    assert "Time, ms" in table and "MiB" in table and "float32" in table and "torch" in table
    for seq_len in ("64", "65"):
        assert sum(line[:1] == [seq_len] and "single" in line for line in lines) == 1
        for layout in ("contiguous", "head_tail", "striped"):
            for strategy in ("ring", "all_gather"):
                assert sum(line[:3] == [seq_len, layout, strategy] for line in lines) == 2, "one of time, one of bytes"
    assert "≠" not in table


def test_records_have_times_ratios_and_the_environment(outputs):
    _, records, _ = outputs
    assert len(records) == 2 * (1 + 3 * 2)
    singles = {r["seq_len_tokens"]: r for r in records if r["strategy"] == "single_process"}
    for record in records:
        assert record["num_ranks"] == 2 and record["dtype"] == "float32" and record["environment"]["torch_version"]
        for name in ("forward", "forward_backward"):
            low, median, high = (record[f"{name}_seconds_{key}"] for key in ("min", "median", "max"))
            assert 0 < low <= median <= high and len(record[f"{name}_seconds"]) == record["num_repeats"] == 1
        assert record["forward_seconds_median"] < record["forward_backward_seconds_median"]
        if record["layout"] is None:
            continue
        single = singles[record["seq_len_tokens"]]["forward_backward_seconds_median"]
        ratio = record["forward_backward_seconds_median"] / single
        assert record["forward_backward_ratio_to_single_process"] == pytest.approx(ratio)
        assert record["forward_backward_limit_seconds"] == pytest.approx(single * record["imbalance"])
        assert record["forward_backward_ratio_to_limit"] == pytest.approx(ratio / record["imbalance"])
        assert 0 < record["max_relative_error"] < 1e-5
        assert record["imbalance"] == pytest.approx(1.49, abs=0.02) or record["layout"] != "contiguous"


def test_bytes_are_the_closed_form(outputs):
    """Keys and values (P−1)/P·2·s·b·hkv·e; again in the backward, where float32 gradients come back."""
    _, records, _ = outputs
    # (rows of each rank passed on, rows of each rank whose gradient returns), worked out by hand for two ranks
    rows = {
        ("ring", "contiguous"): ([M, 0], [0, M]),
        ("ring", "head_tail"): ([M // 2, M], [M, M // 2]),
        ("ring", "striped"): ([M, M - 1], [M - 1, M]),
    }
    for record in records:
        if record["layout"] is None:
            continue
        passed, returned = rows.get((record["strategy"], record["layout"]), ([M, M], [M, M]))
        forward, backward = record["forward_sent_bytes_by_rank"], record["backward_sent_bytes_by_rank"]
        assert record["agreement_sent_bytes_by_rank"] == [2 * 192] * 2, "of the forward and of the backward"
        if record["seq_len_tokens"] == 64:
            assert forward == [p * ROW_BYTES for p in passed]
            assert backward == [(p + r) * ROW_BYTES for p, r in zip(passed, returned, strict=True)]
            assert record["forward_closed_form_bytes_by_rank"] == forward
            assert record["backward_closed_form_bytes_by_rank"] == backward
        else:
            assert min(sum(forward), sum(backward)) > 0
            assert record["forward_closed_form_bytes_by_rank"] is record["backward_closed_form_bytes_by_rank"] is None


def test_one_rank_sends_nothing(outputs):
    _, _, records = outputs
    assert [r["layout"] for r in records] == [None, "contiguous", "head_tail", "striped"]
    for record in records:
        assert not record["with_backward"] and not record["is_causal"]
        assert "forward_backward_seconds_median" not in record and record["forward_seconds_median"] > 0
        if record["layout"]:
            assert record["imbalance"] == 1
            assert record["forward_sent_bytes_by_rank"] == record["forward_closed_form_bytes_by_rank"] == [0]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_head_tail_ring_saves_a_quarter_of_the_bytes_in_the_mean(num_ranks):
    from attention_bench.problem import Configuration, Problem
    from attention_bench.sent import closed_form_bytes

    def forward(layout, is_causal, strategy="ring"):
        problem = Problem(num_ranks, 1, 4, 2, 16, "float32", is_causal, True, "cpu")
        return closed_form_bytes(problem, Configuration(32 * num_ranks, layout, strategy))[0]

    full = forward("head_tail", False)
    assert full == forward("striped", True, "all_gather") == [(num_ranks - 1) * 32 * ROW_BYTES] * num_ranks
    assert sum(forward("head_tail", True)) == 0.75 * sum(full)
    assert sum(forward("contiguous", True)) == 0.5 * sum(full)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc: must be an integer of at least 1, got '0'"),
        (["--seq-len", "0"], "--seq-len: must be an integer of at least 1, got '0'"),
        (["--seq-len", "64", "-5"], "-5"),
        (["--repeats", "x"], "--repeats"),
        (["--heads", "4", "--kv-heads", "3"], "--heads must be a multiple of --kv-heads, got 4 and 3"),
        (["--layout", "zigzag"], "layout must be one of contiguous, head_tail, striped, got 'zigzag'"),
        (["--layout", "auto"], "not available yet"),
        (["--strategy", "rings"], "strategy must be one of ring, all_gather, got 'rings'"),
        (["--dtype", "int8"], "int8"),
        (["--device", "cuda", "--nproc", "4096"], "--device cuda needs a device for each rank"),
        (["--json", "no/such/folder/x.json"], "--json needs a file in a folder that can be written"),
    ],
)
def test_bad_arguments_end_in_one_line_and_code_2(capsys, arguments, message):
    from bench_attention import main

    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capsys.readouterr()
    assert ended.value.code == 2 and not output.out
    assert message in output.err and output.err.count("\n") == 1


@pytest.mark.parametrize("error", [1e-4, float("nan")])
def test_a_wrong_result_ends_the_run(error):
    from attention_bench.measure import check_results
    from attention_bench.problem import BenchmarkError, Check, Configuration, Measurement, Problem

    problem = Problem(2, 1, 4, 2, 16, "float32", True, True, "cpu")
    checks = [Check(1e-7, 1, 1, 1), Check(error, 1, 1, 1)]
    row = Measurement(64, Configuration(64, "striped", "ring"), [], checks)
    with pytest.raises(BenchmarkError, match=r"striped.*rank \{1: .*tolerance 1e-05"):
        check_results(problem, row)


class Fake:
    """Stands in for a rank; what it does needs no torch."""

    def __init__(self, rank, failing_start=False):
        self.rank = rank
        if failing_start and rank == 1:
            raise RuntimeError("no start")

    def pid(self):
        return os.getpid()

    def fail(self, how):
        if self.rank == 0:
            time.sleep(60)
        if how == "raise":
            raise RuntimeError("lost the way")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 raised: Traceback(.|\n)*lost the way"),
        ("die", "rank 1 died: exit code -9"),
        ("hang", r"rank\(s\) \[0, 1\] gave no answer within 3 s"),
    ],
)
def test_a_rank_that_fails_ends_all_of_them(how, message):
    from attention_bench.problem import BenchmarkError
    from attention_bench.ranks import Ranks

    with pytest.raises(BenchmarkError, match=message), Ranks(2, Fake, timeout=3 if how == "hang" else 30) as ranks:
        pids = ranks.ask("pid")
        ranks.ask("fail", how)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"process {pid} is still there")


def test_a_rank_that_cannot_start_ends_all_of_them():
    from attention_bench.problem import BenchmarkError
    from attention_bench.ranks import Ranks

    with pytest.raises(BenchmarkError, match="no start"), Ranks(2, Fake, True, timeout=30):
        pass
