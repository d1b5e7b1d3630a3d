"""Which heads each of some ranks takes when heads are cut among them. Integers only.

Query head h reads key head h·Hkv // Hq. Where fewer key heads than ranks are, several ranks get the same one.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Some heads of one rank.

    Attributes:
        queries: Its query heads, of all.
        keys: The key heads that they read, of all.
        repeated: Which of ``keys`` each group of query heads reads; None if they are as many and in order.
    """

    queries: range
    keys: range
    repeated: tuple[int, ...] | None = None


@functools.lru_cache(maxsize=256)
def cut_heads(num_heads: int, num_kv_heads: int, degree: int) -> tuple[tuple[HeadPart, ...], ...]:
    """Return, in one part or two, what each of ``degree`` ranks takes; ranks differ by one query head at most.

    In two parts, so that the exchange of one may hide behind the attention of the other, wherever no key head then
    has to be sent twice.
    """
    whole = [range(member * num_heads // degree, (member + 1) * num_heads // degree) for member in range(degree)]
    middles = [_middle(heads, num_heads, num_kv_heads) for heads in whole]
    if None in middles:
        return (tuple(_part(heads, num_heads, num_kv_heads) for heads in whole),)
    halves = ([range(h.start, m) for h, m in zip(whole, middles, strict=True) if m is not None],
              [range(m, h.stop) for h, m in zip(whole, middles, strict=True) if m is not None])  # fmt: skip
    return tuple(tuple(_part(heads, num_heads, num_kv_heads) for heads in half) for half in halves)


def whole_of(parts: tuple[tuple[HeadPart, ...], ...], member: int) -> tuple[range, range]:
    """All query heads and key heads of one rank."""
    own = [part[member] for part in parts]
    return range(own[0].queries.start, own[-1].queries.stop), range(own[0].keys.start, own[-1].keys.stop)


def are_keys_shared(parts: tuple[tuple[HeadPart, ...], ...]) -> bool:
    """Whether some key head is read on several ranks."""
    spans = [whole_of(parts, member)[1] for member in range(len(parts[0]))]
    return any(before.stop > after.start for before, after in itertools.pairwise(spans))


def are_heads_even(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Whether every rank has as many query heads and as many key heads."""
    parts = cut_heads(num_heads, num_kv_heads, degree)
    return len({tuple(map(len, whole_of(parts, member))) for member in range(degree)}) == 1


def _middle(heads: range, num_heads: int, num_kv_heads: int) -> int | None:
    """The query head nearest to the middle at which another key head begins; None if all read one."""
    group_size = num_heads // num_kv_heads
    inside = [h for h in range(heads.start + 1, heads.stop) if h % group_size == 0]
    return min(inside, key=lambda h: abs(2 * h - heads.start - heads.stop), default=None)


def _part(heads: range, num_heads: int, num_kv_heads: int) -> HeadPart:
    group_size = num_heads // num_kv_heads
    read = [h // group_size for h in heads]
    keys = range(read[0], read[-1] + 1)
    # Kernels want groups of one size: the largest one that fits into what every key head is read by.
    common = math.gcd(*(read.count(key) for key in keys))
    chosen = tuple(key - keys.start for key in read[::common])
    return HeadPart(heads, keys, None if len(chosen) == len(keys) else chosen)
