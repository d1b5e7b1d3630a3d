"""tools/bench_attention.py --simulate: closed forms, the fit, and what it predicts of published figures."""

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from attention_bench import published
from attention_bench.problem import BenchmarkError
from attention_bench.rates import FITTED, Call, Kernel, Machine
from attention_bench.simulate import STRATEGIES, Work, _Ranks, ideal_seconds, predict
from bench_attention import main

import dtcp

IDEAL = Kernel(0.0, 0.0, 0.0)
FREE_LINKS = Machine("free links", 1e9, 1e9, math.inf, 1e9, 1, kernel=IDEAL)
FREE_COMPUTE = Machine("free compute", math.inf, math.inf, 1e6, 1e9, 1, kernel=IDEAL)
LAYOUTS = ("contiguous", "head_tail", "striped")
LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def can(strategy, layout):
    return strategy != "exposed_all_gather" or layout != "striped"


@pytest.mark.parametrize("strategy", ["ring", "plain_ring"])
@pytest.mark.parametrize(
    "layout, cp, step_maxima",
    [
        ("contiguous", 2, [528, 1024]), ("contiguous", 4, [136, *[256] * 3]), ("contiguous", 8, [36, *[64] * 7]),
        ("head_tail", 2, [528, 512]), ("head_tail", 4, [136, *[128] * 3]), ("head_tail", 8, [36, *[32] * 7]),
        ("striped", 2, [528] * 2), ("striped", 4, [136] * 4), ("striped", 8, [36] * 8),
    ],
)  # fmt: skip
def test_a_ring_with_free_links_takes_the_busiest_ranks_pairs(strategy, layout, cp, step_maxima):
    work = Work(64, cp, num_heads=4, num_kv_heads=2, head_dim=16)
    found, (ideal, ideal_total) = predict(strategy, layout, work, FREE_LINKS), ideal_seconds(work, FREE_LINKS)
    flops = 4 * 16 * 4 * sum(step_maxima)
    assert found.forward_seconds == pytest.approx(flops / 1e9)
    assert found.total_seconds == pytest.approx(3.5 * flops / 1e9)
    makespan = sum(step_maxima) / (64 * 65 / 2 / cp)
    assert found.forward_seconds / ideal == pytest.approx(makespan)
    assert found.total_seconds / ideal_total == pytest.approx(makespan)


@pytest.mark.parametrize("layout, cp", list(itertools.product(LAYOUTS, [2, 3, 4, 8])))
def test_with_free_compute_a_pass_takes_its_bytes_over_the_rate(layout, cp):
    work = Work(48 * cp, cp, num_heads=24, num_kv_heads=24, head_dim=16)
    shard = 48 * 2 * 24 * 16  # values of the keys and values of a rank
    for strategy in filter(lambda name: can(name, layout), set(STRATEGIES) - {"ring"}):
        found = predict(strategy, layout, work, FREE_COMPUTE)
        backward = {"plain_ring": shard * (2 * (cp - 1) + 4 * cp), "ulysses": 4 * shard * (cp - 1) // cp}
        forward = backward["ulysses"] if strategy == "ulysses" else 2 * shard * (cp - 1)
        total = forward + backward.get(strategy, (2 + 4) * shard * (cp - 1))
        assert found.forward_sent_bytes == (forward,) * cp and found.total_sent_bytes == (total,) * cp
        assert found.forward_seconds == pytest.approx(forward / 1e6)
        assert found.total_seconds == pytest.approx(total / 1e6)


def test_each_hop_has_a_latency_and_a_collective_one():
    work = Work(64, 4, num_heads=4, num_kv_heads=4, head_dim=16)
    machine = replace(FREE_COMPUTE, link_bytes=math.inf, latency_seconds=1.0)
    messages = {name: predict(name, "head_tail", work, machine) for name in STRATEGIES}
    forward = {"ring": 3, "plain_ring": 3, "all_gather": 1, "exposed_all_gather": 1, "ulysses": 2}
    assert {name: round(p.forward_seconds, 6) for name, p in messages.items()} == forward
    assert messages["all_gather"].total_seconds == pytest.approx(1 + 2)
    assert messages["plain_ring"].total_seconds == pytest.approx(3 + 3 + 4)


@pytest.mark.parametrize("num_bytes_per_pair", [0.1, 10.0])
def test_messages_hide_behind_the_calls_that_run_beside_them(num_bytes_per_pair):
    work = Work(64, 2, num_heads=4, num_kv_heads=4, head_dim=16, is_causal=False)
    tile, shard_bytes = 4 * 16 * 4 * 32 * 32 / 1e9, 32 * 2 * 4 * 16 * 2
    message = tile * num_bytes_per_pair
    machine = replace(FREE_LINKS, link_bytes=shard_bytes / message)
    seconds = {name: predict(name, "head_tail", work, machine).forward_seconds for name in STRATEGIES}
    assert seconds["ring"] == seconds["plain_ring"] == pytest.approx(max(tile, message) + tile)
    assert seconds["all_gather"] == pytest.approx(max(tile, message) + tile)
    assert seconds["exposed_all_gather"] == pytest.approx(message + 2 * tile)
    # Half the heads of the whole square; of q, k, v and out each rank sends a half, which is twice the keys and values.
    assert seconds["ulysses"] == pytest.approx(message + 2 * tile)


def test_the_last_key_gradients_of_a_ring_hide_behind_half_of_its_own_tiles():
    work = Work(64, 2, num_heads=4, num_kv_heads=4, head_dim=16, is_causal=False)
    tile, kv_bytes = 2.5 * 4 * 16 * 4 * 32 * 32 / 1e9, 32 * 2 * 4 * 16 * 2
    machine = replace(FREE_LINKS, link_bytes=kv_bytes / (tile / 10))

    def backward(strategy):
        found = predict(strategy, "head_tail", work, machine)
        return found.total_seconds - found.forward_seconds

    returned = 2 * tile / 10  # float32
    assert backward("ring") == pytest.approx(2 * tile)
    assert backward("plain_ring") == pytest.approx(2 * tile + returned)
    slow = replace(machine, link_bytes=machine.link_bytes / 4)
    found = predict("ring", "head_tail", work, slow)
    assert found.total_seconds - found.forward_seconds == pytest.approx(1.5 * tile + 4 * returned)


def test_a_message_begins_when_both_ends_are_there_and_their_links_are_free():
    work = Work(8, 3, num_heads=1, num_kv_heads=1, head_dim=16)
    ranks = _Ranks(work, dtcp.make_layout("contiguous", seq_len=8, cp=3), replace(FREE_COMPUTE, link_bytes=10.0))
    ranks.now = [0.0, 5.0, 7.0]
    ranks.post(0, 1, 20)  # 5 to 7: the receiver is late
    ranks.post(1, 0, 10)  # 5 to 6: the other direction of the same link
    ranks.post(0, 2, 10)  # 7 to 8: the sender's link was busy until then
    ranks.post(2, 2, 10)  # to itself: nothing
    ranks.wait()
    assert ranks.now == [8.0, 7.0, 8.0] and ranks.sent == [30, 10, 0]


@given(
    layout=st.sampled_from(LAYOUTS), seq_len=st.integers(1, 80), cp=st.integers(1, 6), kv_heads=st.integers(1, 3),
    group=st.integers(1, 3), is_causal=st.booleans(), link=st.floats(1e3, 1e9),
)  # fmt: skip
def test_every_strategy_computes_every_pair_once_and_hides_no_more_than_it_has(
    layout, seq_len, cp, kv_heads, group, is_causal, link
):
    work = Work(seq_len, cp, kv_heads * group, kv_heads, 8, is_causal)
    machine = replace(FREE_LINKS, link_bytes=link, latency_seconds=1e-6)
    pairs = seq_len * (seq_len + 1) // 2 if is_causal else seq_len**2
    for strategy in STRATEGIES:
        try:
            found = predict(strategy, layout, work, machine)
        except BenchmarkError:
            assert strategy in ("exposed_all_gather", "ulysses")
            continue
        assert sum(found.busy_seconds) == pytest.approx(3.5 * 4 * 8 * work.num_heads * pairs / 1e9)
        wire = [num_bytes / link for num_bytes in found.total_sent_bytes]
        assert found.total_seconds >= max(*found.busy_seconds, *wire) * (1 - 1e-9)
        # At worst nothing runs beside anything; each rank posts at most 2·cp messages in a pass.
        worst = sum(found.busy_seconds) + sum(wire) + 4 * cp * cp * 1e-6
        assert found.forward_seconds <= found.total_seconds <= worst * (1 + 1e-9)


@pytest.mark.parametrize("cp, gather, ulysses", [(2, 256, 640), (4, 384, 480), (8, 448, 280), (16, 480, 180)])
def test_bytes_of_llama_8b_are_those_of_the_closed_forms(cp, gather, ulysses):
    work = Work(131072, cp, **LLAMA_8B, gradient_bytes=2)
    sent = {}
    for strategy in ("all_gather", "exposed_all_gather", "plain_ring", "ulysses", "ring"):
        found = predict(strategy, "head_tail", work, FREE_LINKS)
        sent[strategy] = [sum(x) / cp / 2**20 for x in (found.forward_sent_bytes, found.total_sent_bytes)]
    assert sent["all_gather"] == sent["exposed_all_gather"] == [gather, 3 * gather]
    assert sent["plain_ring"] == [gather, 3 * gather + 512 / cp]  # its gradients go all the way home
    assert sent["ulysses"] == [ulysses, 2 * ulysses]
    assert sent["ring"] == [0.75 * gather, 3 * 0.75 * gather], "rows that nobody needs are not sent"


def test_the_fit_on_three_percentages_gives_the_kernel_that_the_presets_have():
    kernel = published.fit_kernel()
    assert (kernel.diagonal_tokens, kernel.tail_blocks) == pytest.approx(
        (FITTED.diagonal_tokens, FITTED.tail_blocks), rel=1e-3
    )
    assert kernel.merge_bytes == pytest.approx(FITTED.merge_bytes, rel=1e-3)
    assert 0.3 < kernel.tail_blocks < 0.7, "a last wave of blocks is half full on average"
    fitted = [c for c in published.compare() if c.role == "fitted"]
    assert len(fitted) == 3 and all(abs(c.difference_points) < 0.05 for c in fitted)


def test_published_figures_that_were_not_fitted_are_predicted_within_8_points():
    predicted = [c for c in published.compare(published.fit_kernel()) if c.role == "predicted"]
    a100 = [c for c in predicted if "a100" in c.source and c.passes == "forward+backward"]
    assert [c.published_percent for c in a100] == [52.5, 89.8, 82.6]
    assert max(abs(c.difference_points) for c in a100) < 2
    assert sum("ISCA" in c.source for c in predicted) == 12 and len(predicted) == 9 + 12
    assert max(abs(c.difference_points) for c in predicted) < published.TOLERANCE_POINTS == 8


def test_without_its_three_numbers_the_model_would_be_wrong():
    differences = {(c.what, c.passes): c.difference_points for c in published.compare(IDEAL) if "h800" in c.source}
    assert differences["striped", "forward+backward"] > 15 and differences["head_tail", "forward"] > 10


def test_predictions_with_less_to_go_by_miss_what_is_said_of_them():
    beyond = {}
    for c in published.compare():
        if abs(c.difference_points) > 8:
            beyond.setdefault(c.role, []).append((c.what, round(c.difference_points)))
    assert beyond == {
        "specified FLOP/s": [("head_tail", 9)],
        "of 128:8 heads": [("all_gather, cp 2, 16384 tokens", 10), ("all_gather, cp 4, 4096 tokens", 13)],
        "bandwidth of HBM2e": [("all_gather, cp 2, 4096 tokens", -9), ("all_gather, cp 4, 8192 tokens", -12)],
    }


def test_flash_attention_2_on_an_h100_is_as_fast_as_published_full_and_causal():
    # FlashAttention-3 (arXiv 2407.08608), figure 5, head dim 128: TFLOP/s forward at 16384 tokens in all, 16 heads.
    machine = published.preset("h100")
    for n, batch, full, causal in [(4096, 4, 368, 319), (8192, 2, 370, 333), (16384, 1, 370, 335)]:
        calls = {full: Call(n, n, n * n, 0), causal: Call(n, n, n * (n + 1) // 2, n)}
        for tflops, call in calls.items():
            seconds = machine.attend_seconds(call, 16 * batch, 128, backward=False)
            assert 4 * 128 * 16 * batch * call.num_pairs / seconds / 1e12 == pytest.approx(tflops, rel=0.08)


def test_a_measured_call_is_what_a_calibrated_machine_takes():
    call = Call(100, 100, 5050, 100)
    machine = replace(FREE_LINKS, kernel=Kernel(10.0, 0.5, 1.0), call_seconds=0.1).calibrated(call, 4, 16, 0.5, 2.0)
    assert [machine.attend_seconds(call, 4, 16, backward) for backward in (False, True)] == pytest.approx([0.5, 1.5])
    with pytest.raises(BenchmarkError, match="no rate follows"):
        machine.calibrated(call, 4, 16, 2.0, 1.0)


def test_a_causal_edge_never_costs_more_than_the_square_around_it():
    machine = replace(FREE_LINKS, kernel=Kernel(1e9, 0.0, 0.0))
    of_square = machine.attend_seconds(Call(32, 32, 32 * 32, 0), 1, 16, backward=False)
    assert machine.attend_seconds(Call(32, 32, 32 * 33 // 2, 32), 1, 16, backward=False) == pytest.approx(of_square)


def test_the_table_and_the_records_say_the_same(capsys, tmp_path):
    path = tmp_path / "paper.json"
    options = ["--nproc", "2", "4", "--seq-len", "4096", "--layout", *LAYOUTS, "--json", str(path)]
    assert main(["--simulate", *options]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    records = json.loads(path.read_text())
    assert len(records) == 2 * (3 * 3 + 2 + 1), "striped has no runs to gather for, and ulysses has no layout"
    for r in records:
        names = ["4096", str(r["num_ranks"]), r["layout"] or "any", r["strategy"]]
        (row,) = [line for line in lines if line[:4] == names]
        assert row[4] == f"{r['forward_seconds'] * 1e3:.3f}" and row[7] == f"{r['forward_backward_seconds'] * 1e3:.3f}"
        assert float(row[9]) == pytest.approx(r["forward_backward_percent_of_ideal"], abs=0.05)
        assert 0 < r["forward_backward_percent_of_ideal"] < 100


def test_given_rates_replace_those_of_the_machine(capsys):
    options = ["--simulate", "--strategy", "exposed_all_gather", "--seq-len", "8192", "--json"]

    def record(*more):
        assert main([*options, *more]) == 0
        (r,) = json.loads(capsys.readouterr().out)
        return r

    base = record("--latency", "0")
    compute = base["forward_seconds"] - 7 * 1024 * 2 * 8 * 128 * 2 / 200e9
    halved = record("--latency", "0", "--link", "100")
    assert halved["forward_seconds"] - compute == pytest.approx(2 * (base["forward_seconds"] - compute))
    assert record()["forward_seconds"] == pytest.approx(base["forward_seconds"] + 10e-6)
    called = record("--latency", "0", "--tile-latency", "100")
    assert called["forward_seconds"] == pytest.approx(base["forward_seconds"] + 2 * 100e-6)
    doubled = record("--latency", "0", "--flops", str(2 * base["machine"]["forward_flops"] / 1e12))
    assert doubled["forward_seconds"] == pytest.approx(base["forward_seconds"] - compute / 2)
    assert doubled["machine"]["backward_flops"] == pytest.approx(2 * base["machine"]["backward_flops"])
    merged = record("--strategy", "all_gather", "--merge-bytes", "0")
    assert merged["forward_seconds"] < record("--strategy", "all_gather")["forward_seconds"]


def test_published_prints_each_figure_with_its_role(capsys):
    assert main(["--simulate", "--published"]) == 0
    out = capsys.readouterr().out
    assert out.count("predicted") == 21 and out.count("fitted") == 3
    beyond = [line for line in out.splitlines() if "beyond  " in line]
    assert len(beyond) == 5 and not any("predicted" in line or "fitted" in line for line in beyond)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--layout", "striped", "--strategy", "exposed_all_gather"], "layout striped has 8192 on a rank; use contig"),
        (["--strategy", "ulysses", "--nproc", "3"], "got 32 and 8 heads at cp=3; use ring or all_gather"),
        (["--heads", "4", "--kv-heads", "3"], "multiple of --kv-heads, got 4 and 3"),
        (["--link", "0"], "above 0, got '0'"), (["--latency", "nan"], "0 or more, got 'nan'"),
        (["--machine", "b200"], "invalid choice: 'b200'"), (["--strategy", "exchange"], "invalid choice: 'exchange'"),
        (["--json", "/nowhere/file"], "a file in a folder that can be written"), (["--mask", "full"], "unrecognized"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_refused_with_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--simulate", *options])
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and message in errors and errors.count("\n") == 1


def test_an_abbreviated_simulate_does_not_measure(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--sim"])
    assert stopped.value.code == 2 and "not to be abbreviated" in capsys.readouterr().err


def test_layouts_of_the_command_line_are_those_without_documents():
    from attention_bench.paper import make_parser

    from dtcp.layout import LAYOUT_NAMES

    (layouts,) = [action.choices for action in make_parser()._actions if action.dest == "layout"]
    assert set(layouts) == set(LAYOUT_NAMES) - {"per_document"}
    for name in layouts:
        dtcp.make_layout(name, seq_len=1, cp=1)
