"""Peak memory of one rank by strategy: what forward and backward allocate beside their inputs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from device_check.prepared import ranks_of
from device_check.sections import Section
from device_check.solve import STRATEGIES
from dtcp.layout import make_layout

COLUMNS = ("strategy", "cp", "forward MiB", "backward MiB", "forward kv shards", "backward kv shards")
_MIB = 1 << 20


def measure_memory(device: torch.device, section: Section, *, is_small: bool) -> None:
    """A rank's slots are equally many at every cp: what ring and exchange need then is too, and that is checked."""
    section.columns = COLUMNS
    heads = (8, 8, 16, 16) if is_small else (16, 8, 128, 128)
    local_seq_len, dtype = (64, torch.float32) if is_small else (8192, torch.bfloat16)
    sizes = (2, 3, 4) if is_small else (2, 4, 8)
    element = torch.empty(0, dtype=dtype).element_size()
    shard = local_seq_len * heads[1] * (heads[2] + heads[3]) * element
    section.notes.append(
        f"{str(dtype).removeprefix('torch.')}, {local_seq_len} tokens on each rank, heads {heads[0]}:{heads[1]}, D "
        f"{heads[2]}; the rank that needs most; a kv shard is {shard / _MIB:.3f} MiB; bytes kept for the backward count"
    )
    peaks: dict[tuple[str, int], tuple[int, int]] = {}
    for strategy, cp in section.within_budget(list(itertools.product(STRATEGIES, sizes)), "cases of memory"):
        with section.catching(f"memory of {strategy}, cp {cp}"):
            layout = make_layout("head_tail", seq_len=local_seq_len * cp, cp=cp)
            by_rank = []
            for make in ranks_of(strategy, layout, heads, dtype, device):
                rank = make()
                rank.forward()  # prepares what it will be sent, and plans
                rank.backward()
                rank.forget()
                by_rank.append((peak_bytes(rank.forward, device), peak_bytes(rank.backward, device)))
            forward, backward = peaks[strategy, cp] = max(f for f, _ in by_rank), max(b for _, b in by_rank)
            section.rows.append({
                "strategy": strategy, "cp": cp, "forward MiB": forward / _MIB, "backward MiB": backward / _MIB,
                "forward kv shards": forward / shard, "backward kv shards": backward / shard,
            })  # fmt: skip
    for strategy in ("ring", "exchange"):
        # From the second size on: two ranks have one part of a gradient to return, and no other one meanwhile.
        for index, which in enumerate(("forward", "backward")):
            known = [peaks[strategy, cp][index] for cp in sizes[1:] if (strategy, cp) in peaks]
            if len(known) > 1:
                what = f"{which} memory of {strategy}, cp {sizes[-1]} beside cp {sizes[1]}"
                section.expect(what, known[-1] / known[0], 1.01)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that was allocated during ``run`` beside what was before, by the allocator's own account."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Live() as live:
        run()
    return live.peak


class _Live(TorchDispatchMode):
    """Counts the storages that operators make until they are freed; for devices without an account of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size
