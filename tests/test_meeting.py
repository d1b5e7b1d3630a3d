"""Ranks of a job that is started again meet each other, and not what an earlier start has left in the store."""

import threading
import time

import pytest
import torch.distributed as dist

from dtcp.train.meeting import fresh_store


def start(store: dist.Store, world: int, delays: dict[int, float]) -> list[int]:
    """One start: what each rank reads that rank 0 has written; each later than its delay."""
    read: list[int] = [0] * world

    def run(rank: int) -> None:
        time.sleep(delays.get(rank, 0))
        own = fresh_store(store, rank, world)
        if rank == 0:
            time.sleep(0.1)  # the others look before
            own.set("address", str(delays["start"]))
        read[rank] = int(own.get("address"))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return read


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_start_has_a_store_of_its_own(late):
    store = dist.HashStore()
    for number in (1, 2, 3):
        assert start(store, 3, {late: 0.3, "start": number}) == [number] * 3


def test_a_start_whose_rank_died_before_it_came_leaves_nothing_that_misleads_the_next():
    store = dist.HashStore()
    assert start(store, 3, {"start": 1}) == [1] * 3
    store.set("dtcp/greeting/1", "of a start that never got further")
    assert start(store, 3, {1: 0.3, "start": 2}) == [2] * 3


def test_one_rank_waits_for_nobody():
    assert isinstance(fresh_store(dist.HashStore(), 0, 1), dist.PrefixStore)
