"""The pool of ranks itself: results, failures, hangs and deaths, and that it works again after each."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RanksError


def sum_of_ranks(rank, world, scale):
    total = torch.tensor([float(rank * scale)])
    dist.all_reduce(total)
    return rank, world, total.item(), torch.get_num_threads()


def assert_works(ranks, world):
    expected = 10.0 * sum(range(world))
    assert ranks.run(world, sum_of_ranks, 10) == [(rank, world, expected, 1) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_rank_order(ranks, world):
    assert_works(ranks, world)


def test_the_processes_stay_for_the_next_run(ranks):
    assert ranks.run(2, lambda rank, world: os.getpid()) == ranks.run(2, lambda rank, world: os.getpid())


def test_closures_travel(ranks):
    offset = torch.arange(3)
    results = ranks.run(2, lambda rank, world: offset + rank)
    assert torch.equal(results[1], torch.tensor([1, 2, 3]))


def raise_on_rank_1(rank, world):
    if rank == 1:
        raise KeyError("planted on rank 1")
    dist.barrier()


def test_a_failure_has_the_ranks_traceback_and_says_who_waits(ranks):
    with pytest.raises(RanksError) as error:
        ranks.run(3, raise_on_rank_1)
    message = str(error.value)
    assert message.startswith("rank 1 raised: KeyError: 'planted on rank 1'")
    assert "waiting: [0, 2]" in message
    assert 'raise KeyError("planted on rank 1")' in message
    assert_works(ranks, 3)


def fail_an_assertion(rank, world):
    left, right = rank + 1, 7
    assert left == right


def test_assertions_on_ranks_show_their_values(ranks):
    with pytest.raises(RanksError, match="assert 1 == 7"):
        ranks.run(1, fail_an_assertion)


def test_results_that_cannot_travel_are_an_error(ranks):
    with pytest.raises(RanksError, match=r"raised: TypeError: cannot pickle"):
        ranks.run(1, lambda rank, world: (x for x in ()))


def sleep_on_rank_1(rank, world):
    if rank == 1:
        time.sleep(1000)
    return rank


def test_a_hang_names_the_rank_and_its_stack(ranks):
    start = time.monotonic()
    with pytest.raises(RanksError) as error:
        ranks.run(2, sleep_on_rank_1, timeout=0.5)
    message = str(error.value)
    assert message.startswith("ranks [1] did not return within 0.5 s")
    assert "returned: [0]" in message
    assert "in sleep_on_rank_1" in message
    assert time.monotonic() - start < 15
    assert_works(ranks, 2)


def test_a_hang_inside_a_collective_is_found(ranks):
    with pytest.raises(RanksError, match=r"(?s)ranks \[0\] did not return.*in barrier"):
        ranks.run(2, lambda rank, world: dist.barrier() if rank == 0 else None, timeout=1)
    assert_works(ranks, 2)


def abort_rank_1(rank, world):
    if rank == 1:
        os.abort()
    dist.barrier()


def test_a_death_names_the_rank_and_the_signal(ranks):
    with pytest.raises(RanksError) as error:
        ranks.run(2, abort_rank_1)
    message = str(error.value)
    assert message.startswith("rank 1 died: killed by SIGABRT")
    assert "in abort_rank_1" in message
    assert_works(ranks, 2)


def test_an_exit_is_a_death_too(ranks):
    with pytest.raises(RanksError, match="rank 0 died: left with exit code 7"):
        ranks.run(1, lambda rank, world: os._exit(7))
    assert_works(ranks, 1)


def test_one_world_failing_leaves_the_others_alone(ranks):
    assert_works(ranks, 3)
    pids = ranks.pids(3)
    with pytest.raises(RanksError):
        ranks.run(2, raise_on_rank_1)
    assert_works(ranks, 3)
    assert ranks.pids(3) == pids


def raise_everywhere(rank, world, kind=ValueError):
    dist.barrier()
    raise kind(f"seq_len must be >= 1, got {rank}")


def test_expected_errors_keep_the_pool(ranks):
    assert_works(ranks, 2)
    pids = ranks.pids(2)
    messages = ranks.run_expecting(2, raise_everywhere, ValueError, r"seq_len must be >= 1, got \d")
    assert messages == ["seq_len must be >= 1, got 0", "seq_len must be >= 1, got 1"]
    assert_works(ranks, 2)
    assert ranks.pids(2) == pids


def test_expected_errors_are_demanded_of_every_rank(ranks):
    with pytest.raises(RanksError, match=r"(?s)on each of 2 ranks, got.*rank 0 returned: 0"):
        ranks.run_expecting(2, lambda rank, world: rank and 1 / 0, ZeroDivisionError, "division")
    with pytest.raises(RanksError, match=r"(?s)expected KeyError.*rank 1 raised: ValueError"):
        ranks.run_expecting(2, raise_everywhere, KeyError, "seq_len")
    with pytest.raises(RanksError, match="matching 'got 0'"):
        ranks.run_expecting(2, raise_everywhere, ValueError, "got 0")


def leave_a_wreck(rank, world):
    if rank == 0:
        dist.barrier(async_op=True)
    raise ValueError("planted")


def make_a_group_on_rank_0(rank, world):
    if rank == 0:
        dist.new_group([0])
    raise ValueError("planted")


@pytest.mark.parametrize("fn", [leave_a_wreck, make_a_group_on_rank_0])
def test_a_wreck_after_an_expected_error_costs_the_pool(ranks, fn):
    assert_works(ranks, 2)
    pids = ranks.pids(2)
    ranks.run_expecting(2, fn, ValueError, "planted")
    assert_works(ranks, 2)
    assert ranks.pids(2) != pids


def leave_a_mess(rank, world):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.manual_seed(99)
    os.environ["PLANTED"] = "1"
    os.chdir("/")
    dist.new_group([0, 1])


def state(rank, world):
    x = torch.randn(2, requires_grad=True) * 2
    num_groups = len(dist.distributed_c10d._world.pg_map)
    settings = torch.get_num_threads(), "PLANTED" in os.environ, os.getcwd()
    return x.dtype, x.device.type, x.requires_grad, x.tolist(), random.random(), num_groups, settings


def test_nothing_is_inherited_from_the_test_before(ranks):
    before = ranks.run(2, state)
    ranks.run(2, leave_a_mess)
    assert ranks.run(2, state) == before
    assert before[0][:3] == (torch.float32, "cpu", True)


def test_a_call_costs_little(ranks):
    assert_works(ranks, 4)
    start = time.monotonic()
    for _ in range(20):
        assert_works(ranks, 4)
    assert (time.monotonic() - start) / 20 < 0.25  # measured 0.003 s; the rest is for a busy machine
