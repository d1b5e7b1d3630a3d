"""Ranks as threads of one process: they compute what ranks as processes do, and none of them waits for ever."""

import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

from device_check.problems import MASKS, Problem, errors, pose, right_answer
from device_check.solve import STRATEGIES, on_rank, solve, strategy_of

import dtcp
from dtcp.attention.comm import Message, start_exchange
from dtcp.attention.loopback import Loopback
from dtcp.attention.schedule import exchange_steps
from dtcp.collectives import (
    all_gather_rows,
    reduce_scatter_rows,
    resolve_group,
    start_all_gather_rows,
    start_reduce_scatter_rows,
)
from dtcp.mask import checked_mask

LAYOUTS = ("contiguous", "head_tail", "striped", "per_document", "auto")


@given(
    strategy=st.sampled_from(STRATEGIES), layout_name=st.sampled_from(LAYOUTS), mask=st.sampled_from(list(MASKS)),
    cp=st.integers(1, 6), seq_len=st.integers(8, 50), heads=st.sampled_from([(6, 2, 8, 8), (7, 7, 8, 4), (6, 1, 4, 8)]),
    kv_grad_dtype=st.sampled_from([None, torch.float32]),
)  # fmt: skip
@example("ring", "head_tail", "sinks", 3, 41, (6, 2, 8, 8), torch.float32)
@example("ulysses", "striped", "sinks", 4, 41, (6, 2, 8, 8), None)
@settings(max_examples=30)
def test_every_strategy_on_a_loopback_matches_the_float64_oracle(
    strategy, layout_name, mask, cp, seq_len, heads, kv_grad_dtype
):
    if layout_name == "per_document":
        mask = "documents+window"
    posed = pose(Problem(mask, heads, seq_len, torch.float64), torch.device("cpu"))
    layout = dtcp.make_layout(layout_name, seq_len=seq_len, cp=cp, documents=posed.documents)
    how = strategy_of(strategy, cp)._replace(kv_grad_dtype=kv_grad_dtype)
    found = errors(solve(posed, layout, how, Loopback(cp, strict=True)), right_answer(posed))
    rounded = ("grad_key", "grad_value") if kv_grad_dtype else ()
    assert all(error < (1e-6 if name in rounded else 1e-10) for name, error in found.items()), found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("cp", "seq_len"), [(5, 8), (6, 9), (7, 12)])
def test_gradients_come_home_where_ranks_have_nothing_to_do_in_some_steps(strategy, cp, seq_len):
    """Two ranks that read each other's keys have to send keys and gradients in one order, whatever others need."""
    posed = pose(Problem("documents+window", (7, 7, 8, 8), seq_len, torch.float64), torch.device("cpu"))
    layout = dtcp.make_layout("per_document", seq_len=seq_len, cp=cp, documents=posed.documents)
    found = errors(solve(posed, layout, strategy_of(strategy, cp), Loopback(cp, strict=True)), right_answer(posed))
    assert all(error < 1e-10 for error in found.values()), found


@given(
    layout_name=st.sampled_from(LAYOUTS), mask=st.sampled_from(sorted({*MASKS} - {"mask_mod", "sinks"})),
    cp=st.integers(1, 9), seq_len=st.integers(8, 60),
)  # fmt: skip
@settings(max_examples=60)
def test_an_exchange_has_the_steps_in_which_some_rank_needs_keys(layout_name, mask, cp, seq_len):
    if layout_name == "per_document":
        mask = "documents+window"
    options = MASKS[mask](seq_len)
    layout = dtcp.make_layout(layout_name, seq_len=seq_len, cp=cp, documents=options.get("documents"))
    seen = checked_mask(**{"is_causal": False, **options})
    needed = {
        distance for distance in range(cp) for r in range(cp) if layout.needed(r, (r + distance) % cp, seen).groups
    }
    for rank in range(cp):
        steps = exchange_steps(layout, layout, seen, True, rank)
        assert [(step.source - rank) % cp for step in steps] == sorted(needed | {0})


def on_process(rank: int, world: int, strategy: str) -> dict[str, torch.Tensor]:
    """A rank of a process group, by gloo."""
    posed = pose(Problem("documents", (6, 2, 16, 8), 45), torch.device("cpu"))
    layout = dtcp.make_layout("head_tail", seq_len=45, cp=world)
    group = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)).get_group()
    return on_rank(posed, layout, strategy_of(strategy, world), group, "auto")


@pytest.mark.parametrize("strategy", ["ring", "exchange", "ulysses"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_rank_of_a_loopback_computes_bit_for_bit_what_a_process_does(ranks, strategy, strict):
    posed = pose(Problem("documents", (6, 2, 16, 8), 45), torch.device("cpu"))
    layout = dtcp.make_layout("head_tail", seq_len=45, cp=3)
    loopback = Loopback(3, strict=strict)
    threads = loopback.run(lambda group: on_rank(posed, layout, strategy_of(strategy, 3), group, "auto"))
    for thread, process in zip(threads, ranks.run(3, on_process, strategy), strict=True):
        for name, x in thread.items():
            assert torch.equal(x, process[name]) or x.isnan().equal(process[name].isnan()), name


@pytest.mark.parametrize("strict", [False, True])
def test_collectives_of_rows_are_those_of_a_process_group(strict):
    rows = [torch.arange(6.0).view(6, 1) * 10**rank for rank in range(3)]
    gathered = Loopback(3, strict=strict).run(lambda group: all_gather_rows(rows[group.rank()], group))
    assert all(torch.equal(x, torch.cat(rows)) for x in gathered)
    scattered = Loopback(3, strict=strict).run(lambda group: reduce_scatter_rows(rows[group.rank()], group))
    assert torch.equal(torch.cat(scattered), sum(rows))


def test_a_group_is_found_by_its_name_while_somebody_holds_it():
    loopback = Loopback(2)
    names = [group.group_name for group in loopback.groups]
    assert [resolve_group(name).rank() for name in names] == [0, 1] and len({*names}) == 2
    del loopback
    import gc

    gc.collect()
    with pytest.raises(KeyError):
        resolve_group(names[0])


def exchange(group, peer: int, send=(), receive=()) -> None:
    start_exchange([Message(peer, x) for x in send], [Message(peer, x) for x in receive], group).wait()


@pytest.mark.parametrize("strict", [False, True])
def test_messages_of_two_ranks_are_matched_in_their_order(strict):
    def run(group):
        if group.rank() == 0:
            exchange(group, 1, send=[torch.full((2,), 1.0), torch.full((2,), 2.0)])
            return None
        first, second = torch.zeros(2), torch.zeros(2)
        exchange(group, 0, receive=[first, second])
        return [first.tolist(), second.tolist()]

    assert Loopback(2, strict=strict).run(run)[1] == [[1, 1], [2, 2]]


def test_a_rank_that_fails_ends_all_of_them_with_its_error():
    def run(group):
        if group.rank() == 2:
            raise ZeroDivisionError("mine")
        exchange(group, 2, receive=[torch.zeros(1)])

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        Loopback(4, timeout=60).run(run)
    assert time.monotonic() - start < 20, "nobody waits for the time-out"
    assert raised.value.__notes__ == ["(on rank 2 of a loopback of 4)"]


@pytest.mark.parametrize("what", ["message", "all-gather"])
def test_waiting_for_a_rank_that_does_not_come_is_an_error_that_says_for_what(what):
    def run(group):
        if group.rank() == 0:
            if what == "message":
                exchange(group, 1, receive=[torch.zeros(3, 2)])
            else:
                all_gather_rows(torch.zeros(6, 1), group)
        elif is_late:
            time.sleep(0.3)

    is_late = False
    with pytest.raises(RuntimeError, match=rf"rank 0 .* waits for an? {what} .* never come, .*; every rank must"):
        Loopback(2).run(run)
    is_late = True
    with pytest.raises(TimeoutError, match=rf"rank 0 .* waited 0.2 s for an? {what} .*; every rank must"):
        Loopback(2, timeout=0.2).run(run)


def test_ranks_that_wait_for_each_other_are_found_before_the_time_out():
    def run(group):
        exchange(group, 1 - group.rank(), receive=[torch.zeros(1)])
        exchange(group, 1 - group.rank(), send=[torch.zeros(1)])

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="which will never come, since every rank that still runs waits"):
        Loopback(2, timeout=60).run(run)
    assert time.monotonic() - start < 20


def start_ones(group, *, mine=None):
    """(the rows that this rank sends to the other one, those that arrive, the exchange)."""
    mine, rows = torch.ones(1) if mine is None else mine, torch.zeros(1)
    return mine, rows, start_exchange([Message(1 - group.rank(), mine)], [Message(1 - group.rank(), rows)], group)


def test_what_has_not_been_waited_for_is_nan_on_a_strict_loopback():
    def run(group):
        _, rows, exchange = start_ones(group)
        gathered, gathering = start_all_gather_rows(torch.ones(2, dtype=torch.bfloat16), group)
        scattered, scattering = start_reduce_scatter_rows(torch.ones(2), group)
        early = [bool(x.isnan().all()) for x in (rows, gathered, scattered)]
        for work in (exchange, gathering, scattering):
            work.wait()
        return early, rows.tolist(), gathered.tolist(), scattered.tolist()

    assert Loopback(2, strict=True).run(run) == [([True] * 3, [1], [1] * 4, [2])] * 2


def test_what_is_written_to_while_it_is_on_its_way_arrives_wrong_on_a_strict_loopback():
    def of_messages(group):
        mine, rows, exchange = start_ones(group)
        mine.fill_(7)
        exchange.wait()
        return float(rows)

    def of_collectives(group):
        mine = torch.ones(1)
        gathered, work = start_all_gather_rows(mine, group)
        mine.fill_(7)
        work.wait()
        return float(gathered.max())

    def after_waiting(group):
        mine, rows, exchange = start_ones(group)
        exchange.wait()
        mine.fill_(7)
        return float(rows)

    # Whoever writes last has the other's 7; the other may have looked before.
    for run in (of_messages, of_collectives):
        assert 7 in Loopback(2, strict=True).run(run)
    assert Loopback(2, strict=True).run(after_waiting) == [1, 1]


@pytest.mark.parametrize("what", ["message", "all-gather"])
def test_what_nobody_waits_for_is_refused_on_a_strict_loopback(what):
    def run(group):
        if what == "message":
            start_ones(group)
        else:
            start_all_gather_rows(torch.ones(1), group)

    with pytest.raises(RuntimeError, match=rf"ended without waiting for what they had started: .*an? {what}"):
        Loopback(2, strict=True).run(run)


@pytest.mark.parametrize("rows", [torch.zeros(4, 2)[:, 0], torch.zeros(1)])
def test_rows_that_a_process_group_would_not_send_are_refused(rows):
    def run(group):
        peer = group.rank() if rows.is_contiguous() else 1 - group.rank()
        exchange(group, peer, send=[rows])

    with pytest.raises(ValueError, match="a process group sends contiguous rows to other ranks only"):
        Loopback(2).run(run)


def test_ranks_that_disagree_are_refused():
    def sizes(group):
        x = torch.zeros(2 + group.rank())
        exchange(group, 1 - group.rank(), **{"receive" if group.rank() else "send": [x]})

    with pytest.raises(ValueError, match=r"disagree: a message \(.,\) torch.float32 from rank 0 to rank 1, and a mess"):
        Loopback(2, timeout=5).run(sizes)

    def kinds(group):
        (all_gather_rows if group.rank() else reduce_scatter_rows)(torch.zeros(2, 1), group)

    with pytest.raises(ValueError, match="disagree: an? (all-gather|reduce-scatter)"):
        Loopback(2, timeout=5).run(kinds)

    def unread(group):
        if group.rank() == 0:
            start_exchange([Message(1, torch.zeros(7))], [], group)

    with pytest.raises(RuntimeError, match=r"nobody took or sent: \['a message \(7,\)"):
        Loopback(2).run(unread)


def test_a_rank_that_does_not_end_is_named():
    def run(group):
        if group.rank() == 1:
            time.sleep(1)

    with pytest.raises(TimeoutError, match=r"rank\(s\) \[1\] of a loopback still run 0.2 s after"):
        Loopback(2, timeout=0.1).run(run)


def test_a_loopback_has_ranks():
    with pytest.raises(ValueError, match="at least one rank, got size=0"):
        Loopback(0)
