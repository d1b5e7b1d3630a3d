"""tools/bench_attention.py: what it prints, what it refuses, and that nothing hangs."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

TOOLS = Path(__file__).resolve().parents[1] / "tools"
sys.path.append(str(TOOLS))

HEADS = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
ROW_BYTES = 2 * 2 * 16 * 4  # key and value of one token: 2 heads of 16, float32
M = 32  # tokens of a rank where nothing is padded


def start(*arguments):
    options = [*HEADS, "--repeats", "1", "--timeout", "120", *arguments]
    command = [sys.executable, str(TOOLS / "bench_attention.py"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def make_problem(num_ranks=2, batch_size=1, dtype="float32"):
    from attention_bench.problem import Problem

    return Problem(num_ranks, batch_size, 4, 2, 16, dtype, True, "cpu")


def make_case(name, seq_len=40, window=5):
    from attention_bench.masks import WITH_WINDOW
    from attention_bench.problem import Case, MaskChoice

    return Case(seq_len, MaskChoice(name, window if name in WITH_WINDOW else None))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """(table, records in the file) of two ranks; records on stdout of one rank, forward only."""
    path = tmp_path_factory.mktemp("bench") / "records.json"
    two = start("--nproc", "2", "--seq-len", "64", "65", "--mask", "causal", "documents", "--json", str(path))
    one = start("--nproc", "1", "--seq-len", "64", "--strategy", "ring", "--forward-only", "--non-causal", "--json")
    (table, errors), (records, more_errors) = two.communicate(timeout=300), one.communicate(timeout=300)
    assert (two.returncode, one.returncode) == (0, 0), errors + more_errors
    return table, json.loads(path.read_text()), json.loads(records)


def test_the_table_has_a_row_for_each_configuration_and_names_its_units(outputs):
    table, _, _ = outputs
    lines = [line.split() for line in table.splitlines()]
    assert "Time, ms" in table and "MiB" in table and "float32" in table and "torch" in table
    for seq_len, mask in itertools.product(("64", "65"), ("causal", "documents")):
        for by in ("torch", "dtcp"):
            assert sum(line[:6] == [seq_len, mask, "–", "1", "process:", by] for line in lines) == 1
        for layout in ("contiguous", "head_tail", "striped", *(["per_document"] if mask == "documents" else [])):
            assert sum(line[:3] == [seq_len, mask, layout] and len(line) == 8 for line in lines) >= 1, "its pairs"
            for strategy in ("ring", "all_gather", "exchange", "ulysses"):
                found = sum(line[:4] == [seq_len, mask, layout, strategy] for line in lines)
                assert found == 2, "one of time, one of bytes"
    assert "≠" not in table and "…" not in table


def test_records_have_times_ratios_and_the_environment(outputs):
    _, records, _ = outputs
    assert len(records) == 2 * (2 + 3 * 4) + 2 * (2 + 4 * 4)
    singles = {}
    for record in records:
        assert record["num_ranks"] == 2 and record["dtype"] == "float32" and record["environment"]["torch_version"]
        for name in ("forward", "forward_backward"):
            low, median, high = (record[f"{name}_seconds_{key}"] for key in ("min", "median", "max"))
            assert 0 < low <= median <= high and len(record[f"{name}_seconds"]) == record["num_repeats"] == 1
        assert record["forward_seconds_median"] < record["forward_backward_seconds_median"]
        assert 0 < record["max_relative_error"] < 1e-5 and record["error_relative_to"] == "reference_attention"
        case = record["seq_len_tokens"], record["mask"]
        if record["layout"] is None:
            singles.setdefault(case, {})[record["strategy"]] = record["forward_backward_seconds_median"]
            continue
        single = min(singles[case].values())
        ratio = record["forward_backward_seconds_median"] / single
        assert record["forward_backward_ratio_to_single_process"] == pytest.approx(ratio)
        assert record["forward_backward_limit_seconds"] == pytest.approx(single * record["imbalance"])
        assert record["forward_backward_ratio_to_limit"] == pytest.approx(ratio / record["imbalance"])
    assert all(set(by) == {"single_process_torch", "single_process_dtcp"} for by in singles.values())


def test_records_have_the_mask_and_its_pairs(outputs):
    _, records, _ = outputs
    causal, packed = 64 * 65 // 2, 32 * 33 // 2 + 2 * (16 * 17 // 2)
    for record in (r for r in records if r["layout"] and r["seq_len_tokens"] == 64):
        allowed, lengths = (causal, None) if record["mask"] == "causal" else (packed, [[32, 16, 16]])
        assert record["document_lengths_tokens"] == lengths
        assert sum(record["allowed_pairs_by_rank"]) == allowed <= record["computed_pairs"]
        assert record["computed_to_allowed_pairs"] == pytest.approx(record["computed_pairs"] / allowed)
        assert record["allowed_to_causal_pairs"] == pytest.approx(allowed / causal)
        assert record["imbalance"] == pytest.approx(max(record["allowed_pairs_by_rank"]) * 2 / allowed)
    imbalance = {(r["mask"], r["layout"]): r["imbalance"] for r in records if r["layout"]}
    assert imbalance["causal", "contiguous"] == pytest.approx(1.49, abs=0.02)
    assert imbalance["documents", "per_document"] < 1.01 < 1.2 < imbalance["documents", "head_tail"]


def test_bytes_are_the_closed_form(outputs):
    """Keys and values (P−1)/P·2·s·b·hkv·e; again in the backward, where float32 gradients come back."""
    _, records, _ = outputs
    # (rows of each rank passed on, rows of each rank whose gradient returns), worked out by hand for two ranks
    rows = {
        ("ring", "contiguous"): ([M, 0], [0, M]),
        ("ring", "head_tail"): ([M // 2, M], [M, M // 2]),
        ("ring", "striped"): ([M, M - 1], [M - 1, M]),
        ("exchange", "contiguous"): ([M, 0], [0, M]),
        ("exchange", "head_tail"): ([M // 2, M], [M, M // 2]),
        # Token 2i+1 is seen by what comes after it: all but the last of each rank by the other, token 62 by token 63.
        ("exchange", "striped"): ([M, M - 1], [M - 1, M]),
    }
    # Two of four query heads and one of two key heads there, two of the output back; gradients the other way.
    ulysses = 32 * 16 * 4 * (2 + 2 * 1 + 2)
    for record in records:
        if record["layout"] is None or record["mask"] != "causal":
            continue
        passed, returned = rows.get((record["strategy"], record["layout"]), ([M, M], [M, M]))
        forward, backward = record["forward_sent_bytes_by_rank"], record["backward_sent_bytes_by_rank"]
        assert record["agreement_sent_bytes_by_rank"] == [2 * 256] * 2, "of the forward and of the backward"
        if record["strategy"] == "ulysses" and record["seq_len_tokens"] == 64:
            assert forward == backward == [ulysses] * 2 == record["forward_closed_form_bytes_by_rank"]
        elif record["seq_len_tokens"] == 64:
            assert forward == [p * ROW_BYTES for p in passed]
            assert backward == [(p + r) * ROW_BYTES for p, r in zip(passed, returned, strict=True)]
            assert record["forward_closed_form_bytes_by_rank"] == forward
            assert record["backward_closed_form_bytes_by_rank"] == backward
        elif record["strategy"] in ("exchange", "ulysses"):
            assert record["forward_closed_form_bytes_by_rank"] == forward, "pads or not"
            assert record["backward_closed_form_bytes_by_rank"] == backward
        else:
            assert min(sum(forward), sum(backward)) > 0
            assert record["forward_closed_form_bytes_by_rank"] is record["backward_closed_form_bytes_by_rank"] is None


def test_one_rank_sends_nothing(outputs):
    _, _, records = outputs
    assert [r["layout"] for r in records] == [None, None, "contiguous", "head_tail", "striped"]
    for record in records:
        assert not record["with_backward"] and record["mask"] == "full"
        assert "forward_backward_seconds_median" not in record and record["forward_seconds_median"] > 0
        if record["layout"]:
            assert record["imbalance"] == 1
            assert record["forward_sent_bytes_by_rank"] == record["forward_closed_form_bytes_by_rank"] == [0]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_head_tail_ring_saves_a_quarter_of_the_bytes_in_the_mean(num_ranks):
    from attention_bench.problem import Case, Configuration, MaskChoice
    from attention_bench.sent import closed_form_bytes

    def forward(layout, is_causal, strategy="ring"):
        case = Case(32 * num_ranks, MaskChoice("causal" if is_causal else "full"))
        return closed_form_bytes(make_problem(num_ranks), Configuration(case, layout, strategy))[0]

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
        (
            ["--layout", "zigzag"],
            "layout must be one of contiguous, head_tail, striped, per_document, auto, got 'zigzag'",
        ),
        (["--layout", "per_document"], "--layout per_document needs documents, which --mask causal has none of"),
        (["--mask", "documents", "sinks", "--layout", "per_document"], "--mask sinks has none of"),
        (["--mask", "dense"], "--mask must be of causal, full, documents"),
        (["--mask", "window", "--non-causal"], "not allowed with argument --mask"),
        (["--mask", "window", "--window", "0"], "--window: must be an integer of at least 1, got '0'"),
        (["--mask", "sinks", "--window", "8"], "--window needs --mask window or documents_window, got sinks"),
        (["--lengths", "8"], "--lengths needs --mask documents or documents_window, got causal"),
        (
            ["--mask", "documents", "--seq-len", "64", "--lengths", "32", "31"],
            "--lengths must add up to --seq-len, got 63 and 64",
        ),
        (["--mask", "documents", "--lengths", "-1"], "--lengths"),
        (["--strategy", "rings"], "exchange, ulysses, hybrid, auto, got 'rings'"),
        (["--strategy", "hybrid"], "strategy='hybrid' needs ulysses_degree"),
        (["--strategy", "hybrid:3"], "ulysses_degree=3 must divide the 2 ranks"),
        (["--strategy", "ulysses", "--heads", "1"], "1 query heads cannot be cut among 2 ranks"),
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
    from attention_bench.problem import BenchmarkError, Check, Configuration, Measurement

    case = make_case("causal")
    checks = [Check(1e-7, 1, 1, 1), Check(error, 1, 1, 1)]
    row = Measurement(case, Configuration(case, "striped", "ring"), [], checks, [])
    with pytest.raises(BenchmarkError, match=r"striped.*rank \{1: .*tolerance 1e-05"):
        check_results(make_problem(), row)


def test_bytes_that_nobody_counted_end_the_run_where_some_have_to_be_sent():
    from attention_bench.measure import check_results
    from attention_bench.problem import BenchmarkError, Check, Configuration, Measurement

    case, checks = make_case("documents"), [Check(1e-7, 0, 0, 1)] * 2
    # Of documents of 20, 10 and 10 tokens, two contiguous ranks share none.
    check_results(make_problem(), Measurement(case, Configuration(case, "contiguous", "ring"), [], checks, []))
    with pytest.raises(BenchmarkError, match="does not count"):
        check_results(make_problem(), Measurement(case, Configuration(case, "striped", "ring"), [], checks, []))


MASKS = [
    "causal", "full", "documents", "documents_stdlib", "window", "documents_window", "sinks", "key_padding",
    "prefix_lm", "bias", "alibi", "softcap",
]  # fmt: skip


def single_results(problem, case):
    """(results of the oracle, {name: results} of all ways) for one case."""
    from attention_bench.masks import make_tensors, others, positional
    from attention_bench.passes import Clock, as_inputs, reference_results, run_pass
    from attention_bench.ways import dtcp_way, torch_ways

    generator, extra = torch.Generator().manual_seed(0), make_tensors(problem, case)
    *inputs, grad_out = as_inputs(
        [
            torch.randn(problem.batch_size, case.seq_len, heads, 16, generator=generator, dtype=torch.float64)
            for heads in (4, 2, 2, 4)
        ],
        problem,
        "cpu",
    )
    ways = torch_ways(problem, case, extra)
    if (sinks := extra.pop("sinks", None)) is not None:
        inputs.append(sinks.double().requires_grad_())
    told = positional(problem, case) | others(case) | extra
    ways["dtcp"] = dtcp_way(told)
    found = {name: run_pass(way, inputs, grad_out.detach(), Clock("cpu"))[1] for name, way in ways.items()}
    return reference_results(inputs, grad_out.detach(), told, with_backward=True), found


@pytest.mark.parametrize("mask", MASKS)
def test_every_way_of_the_single_process_computes_the_mask(mask, monkeypatch):
    from attention_bench import masks, ways
    from attention_bench.passes import max_relative_error

    monkeypatch.setattr(ways, "BLOCK_SIZES", (8, 16))
    monkeypatch.setattr(masks, "_file_lengths", lambda: [3, 17, 1, 9, 30])  # rows of several documents
    problem, case = make_problem(batch_size=3, dtype="float64"), make_case(mask, seq_len=37)
    reference, found = single_results(problem, case)
    assert len(found) >= (2 if mask in ("causal", "full") else 3)
    for name, results in found.items():
        error = max_relative_error(results, reference, reference)
        assert error <= (1e-11 if mask != "sinks" else 1e-6), name  # sinks are made in float32
    causal = single_results(problem, make_case("causal", seq_len=37))[0]
    is_same = torch.allclose(causal[0], reference[0], atol=1e-3)
    assert is_same == (mask == "causal"), "a mask that changes nothing shows nothing"


@pytest.mark.parametrize("mask", ["documents", "sinks"])
def test_a_wrong_way_of_the_single_process_ends_the_run(mask, monkeypatch, tmp_path):
    from attention_bench import single, ways
    from attention_bench.problem import BenchmarkError, Measurement

    def causal(query, key, value, *sinks):
        return ways._Plain(is_causal=True)(query, key, value) + 0 * sum(s.sum() for s in sinks)

    monkeypatch.setattr(single, "torch_ways", lambda *_: {"too much": causal})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    rows = [Measurement(make_case(mask), "torch", [], [], [])]
    with pytest.raises(BenchmarkError, match=f"mask {mask}: the single process is wrong by 'too much'"):
        single.SingleProcess(make_problem()).prepare(rows, tmp_path / "problem.pt")


def dense_allowed(problem, case, row):
    """bool (S, S), written out."""
    from attention_bench.masks import documents_of

    i, j = np.arange(case.seq_len)[:, None], np.arange(case.seq_len)
    allowed = (j <= i) | (case.mask.name == "full")
    if (documents := documents_of(problem, case)) is not None:
        ids = documents.ids.numpy().reshape(-1, case.seq_len)
        ids = ids[row % len(ids)]
        allowed &= ids[:, None] == ids
    if case.mask.window:
        allowed &= i - j < case.mask.window
    if case.mask.name == "key_padding" and row == problem.batch_size - 1:
        allowed &= j < max(1, case.seq_len // 2)
    if case.mask.name == "prefix_lm":
        allowed |= j < max(1, case.seq_len // 4)
    return allowed


@given(
    st.sampled_from(MASKS), st.integers(1, 70), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3),
    st.sampled_from(["contiguous", "head_tail", "striped", "per_document", "auto"]),
)  # fmt: skip
def test_pairs_are_those_of_the_dense_mask(mask, seq_len, window, num_ranks, batch_size, layout):
    from attention_bench.masks import WITH_DOCUMENTS, layout_of, work_of
    from attention_bench.problem import Configuration

    problem, case = make_problem(num_ranks, batch_size), make_case(mask, seq_len, window)
    if layout == "per_document" and mask not in WITH_DOCUMENTS:
        layout = "striped"
    configuration = Configuration(case, layout, "ring")
    work, taken = work_of(problem, configuration), layout_of(problem, configuration)
    dense = [dense_allowed(problem, case, row) for row in range(batch_size)]
    held = [taken.positions(rank).expand(batch_size, -1).numpy() for rank in range(num_ranks)]
    by_rank = [[rows[rows < seq_len] for rows in of_rank] for of_rank in held]
    expected = [sum(int(d[h].sum()) for d, h in zip(dense, of_rank, strict=True)) for of_rank in by_rank]
    assert work.allowed_by_rank == expected
    assert work.allowed <= work.computed <= batch_size * seq_len**2
    assert work.imbalance == pytest.approx(max(expected) * num_ranks / sum(expected))
    crossing = any(
        dense[row][np.ix_(by_rank[q][row], by_rank[k][row])].any()
        for q in range(num_ranks) for k in range(num_ranks) if q != k for row in range(batch_size)
    )  # fmt: skip
    assert work.crosses >= crossing and (work.crosses == crossing or mask == "prefix_lm")


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_computed_pairs_grow_with_the_window_and_not_with_the_sequence(layout):
    from attention_bench.masks import work_of
    from attention_bench.problem import Configuration

    def computed(seq_len, window):
        case = make_case("window", seq_len, window)
        return work_of(make_problem(), Configuration(case, layout, "ring")).computed

    windows = [64, 128, 256, 512, 1024]
    pairs = [computed(8192, window) for window in windows]
    for window, few, many in zip(windows, pairs, pairs[1:], strict=False):
        assert few < many < 2.1 * few and few <= 1.25 * 8192 * window
    assert computed(16384, 128) < 2.1 * computed(8192, 128)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_compute_every_mask_right(dtype):
    options = ["--nproc", "3", "--batch", "2", "--seq-len", "101", "--dtype", dtype, "--window", "7", "--mask", *MASKS]
    process = start(*options, "--json")
    records, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    found = {(r["mask_name"], r["layout"], r["strategy"]) for r in json.loads(records) if r["layout"]}
    # Four strategies; three masks have documents, and a fourth layout.
    assert len(found) == 4 * (3 * len(MASKS) + 3)


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
        ("hang", r"rank\(s\) \[0, 1\] gave no answer within 6 s"),
    ],
)
def test_a_rank_that_fails_ends_all_of_them(how, message):
    from attention_bench.problem import BenchmarkError
    from attention_bench.ranks import Ranks

    with pytest.raises(BenchmarkError, match=message), Ranks(2, Fake, timeout=6 if how == "hang" else 30) as ranks:
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
