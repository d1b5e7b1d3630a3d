"""What a call of an attention kernel, a merge and a message cost on a machine: the rates of ``simulate.py``.

A call computes ``heads × pairs`` and more than that, in two ways that its length decides:

- The edge of a causal call computes whole blocks and leaves its thread blocks unequal: as if each query on the edge
  saw ``Kernel.diagonal_tokens / 2`` more keys (never more than the square around the triangle).
- At the end of a call the last thread blocks run while other multiprocessors have nothing left: a share
  ``Kernel.tail_blocks`` of one block's run on every multiprocessor, whatever the heads. On average a last wave is
  half full, so 0.5 is what one expects. A block is 128 queries that see all keys (backward: 128 keys, all queries).

A merge moves ``Kernel.merge_bytes`` through memory for each value of out (backward: of the query's gradient).
The three of ``Kernel`` are the only fitted numbers, see ``published.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attention_bench.problem import BenchmarkError
from dtcp.tiles import Tile

BLOCK_TOKENS = 128  # of a thread block of FlashAttention-2 at head dim 128
BACKWARD_FLOPS = 2.5  # of the forward: five products of matrices, the recomputed scores among them, beside two


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel for one head.

    Attributes:
        num_pairs: That it computes.
        num_diagonal: Queries of it that lie on a causal edge.
    """

    num_queries: int
    num_keys: int
    num_pairs: int
    num_diagonal: int

    @classmethod
    def of(cls, tile: Tile) -> Call:
        is_triangle = tile.kind in ("causal", "anticausal")
        return cls(tile.num_queries, tile.num_keys, tile.num_computed, tile.num_queries if is_triangle else 0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """The fitted numbers.

    Attributes:
        diagonal_tokens: Keys that a query on a causal edge costs too much, times two.
        tail_blocks: Share of a thread block's run for which the machine idles at the end of a call.
        merge_bytes: Bytes through memory for each value of out that is merged, in each pass.
    """

    diagonal_tokens: float
    tail_blocks: float
    merge_bytes: float


# ``published.fit_kernel()``, rounded; a test does it again. Of the bytes of a merge, ring-flash-attention's code
# accounts for 18 forward, 34 if none of its passes are fused, and 15 backward. The others stand for what else a step
# costs beside its kernel: memory below its specified rate, gaps, messages that take multiprocessors from the kernel.
FITTED = Kernel(diagonal_tokens=1018.0, tail_blocks=0.4356, merge_bytes=73.6)


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one device and its link.

    Attributes:
        forward_flops, backward_flops: FLOP/s of the attention kernel in the limit of many full blocks.
        link_bytes: Bytes/s that leave a rank, and as many enter it at the same time.
        memory_bytes: Bytes/s of its memory.
        num_multiprocessors: That compute blocks side by side.
        latency_seconds: Of a message or a collective.
        call_seconds: Of a call of the kernel; 0 where calls are queued ahead, as on CUDA.
    """

    name: str
    forward_flops: float
    backward_flops: float
    link_bytes: float
    memory_bytes: float
    num_multiprocessors: int
    latency_seconds: float = 0.0
    call_seconds: float = 0.0
    kernel: Kernel = FITTED

    def __post_init__(self) -> None:
        for name in ("forward_flops", "backward_flops", "link_bytes", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise BenchmarkError(f"{name} of a machine must be more than 0, got {getattr(self, name)}")
        for name in ("num_multiprocessors", "latency_seconds", "call_seconds"):
            if not getattr(self, name) >= 0:
                raise BenchmarkError(f"{name} of a machine must be 0 or more, got {getattr(self, name)}")

    def attend_seconds(self, call: Call, num_heads: int, head_dim: int, backward: bool) -> float:
        """Time of one call for ``num_heads`` query heads (times rows of the batch)."""
        if not call.num_pairs:
            return 0.0
        # A block of the forward is of queries and sees all keys; one of the backward is of keys.
        run = BLOCK_TOKENS * (call.num_queries if backward else call.num_keys)
        edge = min(call.num_diagonal * self.kernel.diagonal_tokens, call.num_diagonal * (call.num_diagonal - 1)) / 2
        pairs = num_heads * (call.num_pairs + edge) + self.kernel.tail_blocks * run * self.num_multiprocessors
        flops = 4 * head_dim * pairs
        return self.call_seconds + (
            BACKWARD_FLOPS * flops / self.backward_flops if backward else flops / self.forward_flops
        )

    def merge_seconds(self, call: Call, num_heads: int, head_dim: int) -> float:
        """Time to add the result of a call to those before it."""
        return self.kernel.merge_bytes * call.num_queries * num_heads * head_dim / self.memory_bytes

    def message_seconds(self, num_bytes: int) -> float:
        """Time of a message by itself; nothing is not sent."""
        return self.latency_seconds + num_bytes / self.link_bytes if num_bytes else 0.0

    def calibrated(self, call: Call, num_heads: int, head_dim: int, forward: float, total: float) -> Machine:
        """The machine whose kernel takes measured seconds for one call: of its forward, and with the backward."""
        if not self.call_seconds < forward < total - self.call_seconds:
            raise BenchmarkError(f"a call took {forward} s forward and {total} s with backward: no rate follows")
        unit = replace(self, forward_flops=1.0, backward_flops=1.0, call_seconds=0.0)
        flops = [unit.attend_seconds(call, num_heads, head_dim, backward) for backward in (False, True)]
        return replace(
            self,
            forward_flops=flops[0] / (forward - self.call_seconds),
            backward_flops=flops[1] / (total - forward - self.call_seconds),
        )
