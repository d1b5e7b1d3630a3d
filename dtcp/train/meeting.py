"""A store that the ranks of this start of a job share, and those of an earlier start have not written to.

torchrun keeps one store for all restarts of a job (torch 2.13), so what ranks of an earlier start have left in it would
be taken for that of this one: their addresses, which nobody listens at any more.
"""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist

_POLL_SECONDS = 0.02


def fresh_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Return ``store`` under a prefix that rank 0 has chosen anew; every rank of this start calls it. Waits for all.

    A count of restarts would not do: torchrun's differ between nodes, and a rank that dies early counts nothing.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        while store.add(f"dtcp/came/{own}", 0) < world_size - 1:
            for other in range(1, world_size):
                # Maybe that of an earlier start; then the one of this start is there in a later round.
                greeting = store.get(f"dtcp/greeting/{other}").decode()
                store.set(f"dtcp/answer/{greeting}", own)
            time.sleep(_POLL_SECONDS)
        return dist.PrefixStore(f"dtcp/{own}", store)
    store.set(f"dtcp/greeting/{rank}", own)
    chosen = store.get(f"dtcp/answer/{own}").decode()
    store.add(f"dtcp/came/{chosen}", 1)
    return dist.PrefixStore(f"dtcp/{chosen}", store)
