"""One rank without the others: what it would be sent is there already. For what a rank costs, not for its results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device_check.solve import strategy_of
from dtcp.attention.call import Call
from dtcp.attention.kernels import choose_kernel, lse_dtype
from dtcp.attention.strategies import CORES
from dtcp.attention.ulysses import Kept, Ulysses, kept_shapes
from dtcp.layout import SequenceLayout
from dtcp.mask import Mask
from dtcp.own_group import OwnGroup

_numbers = itertools.count()


class _Done:
    def wait(self) -> None:
        pass


_DONE: Any = _Done()


class PreparedGroup(OwnGroup):
    """Receives copies of normal numbers made before; gathers as if every other rank had what this one has.

    Args:
        dtype: Of what travels as bytes.
    """

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        super().__init__(f"prepared {next(_numbers)}", rank, size)
        self._dtype = dtype
        self._prepared: dict[tuple[Any, ...], Tensor] = {}

    def start_messages(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[dist.Work]:
        for _, rows in receives:
            rows.copy_(self._like(rows))
        return []

    def start_all_gather(self, gathered: Tensor, rows: Tensor) -> dist.Work:
        gathered.view(self._size, -1).copy_(rows)
        return _DONE

    def start_reduce_scatter(self, scattered: Tensor, rows: Tensor) -> dist.Work:
        scattered.copy_(rows[: scattered.size(0)])
        return _DONE

    def _like(self, rows: Tensor) -> Tensor:
        key = (rows.shape, rows.dtype)
        if key not in self._prepared:
            as_bytes = rows.dtype == torch.uint8
            size = torch.empty(0, dtype=self._dtype).element_size() if as_bytes else 1
            made = torch.randn(-(-rows.numel() // size), device=rows.device).to(self._dtype if as_bytes else rows.dtype)
            made = made.view(torch.uint8)[: rows.numel()] if as_bytes else made
            self._prepared[key] = made.view(rows.shape)
        return self._prepared[key]


class PreparedRank:
    """Forward and backward of one strategy on one rank.

    Args:
        heads: (Hq, Hkv, D, Dv).
    """

    def __init__(
        self, strategy: str, layout: SequenceLayout, rank: int, heads: tuple[int, int, int, int], dtype: torch.dtype,
        device: torch.device, *, mask: Mask | None = None, kernel: str = "auto", batch_size: int = 1,
    ) -> None:  # fmt: skip
        hq, hkv, head_dim, value_dim = heads
        # In memory (B, S, H, D), as the op gives them.
        self.query, self.key, self.value, self.grad_out = (
            torch.randn(batch_size, layout.local_seq_len, h, d, dtype=dtype, device=device).transpose(1, 2)
            for h, d in ((hq, head_dim), (hkv, head_dim), (hkv, value_dim), (hq, value_dim))
        )
        self.group: Any = PreparedGroup(rank, layout.cp, dtype)
        self.how = strategy_of(strategy, layout.cp)
        self.call = Call(
            self.group, layout, layout, mask or Mask(is_causal=True), head_dim**-0.5,
            choose_kernel(kernel, self.query, max(head_dim, value_dim)),
        )  # fmt: skip
        self._kept: Kept | None = None
        self._results: tuple[Tensor, Tensor] | None = None

    def forward(self) -> None:
        """What the forward op does between its checks and its result."""
        core, degree = CORES[self.how.core], self.how.ulysses_degree
        if degree == 1:
            out, lse = core.forward(self.call, self.query, self.key, self.value)
            self._results = out.to(self.query.dtype), lse.contiguous()
            return
        shapes = kept_shapes(*(x.transpose(1, 2).shape for x in (self.query, self.key, self.value)), degree)
        kept = [self.query.new_zeros(shape).transpose(1, 2) for shape in shapes[:4]]
        self._kept = Kept(*kept, self.query.new_zeros(shapes[4], dtype=lse_dtype(self.query.dtype)))
        ulysses = Ulysses(self.call, core, degree, self.query.size(1), self.key.size(1))
        ulysses.forward(self.query, self.key, self.value, self._kept, None, needs_lse=False)

    def backward(self) -> None:
        """What the backward op does, after ``forward``."""
        core, degree = CORES[self.how.core], self.how.ulysses_degree
        if degree == 1:
            assert self._results is not None
            core.backward(self.call, self.grad_out, self.query, self.key, self.value, *self._results)
            return
        assert self._kept is not None
        ulysses = Ulysses(self.call, core, degree, self.query.size(1), self.key.size(1))
        ulysses.backward(self.grad_out, self._kept, None)

    def forget(self) -> None:
        """Let go of the results of the forward."""
        self._kept = self._results = None


def ranks_of(strategy: str, layout: SequenceLayout, *args: Any, **options: Any) -> list[Callable[[], PreparedRank]]:
    """How to make each rank; one after the other, for memory."""
    return [
        lambda rank=rank: PreparedRank(strategy, layout, rank, *args, **options) for rank in range(layout.cp)
    ]  # fmt: skip
