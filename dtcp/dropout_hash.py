"""The hash that dropout masks are made of: 64 bits for each token and place, 31 for each element.

Every function is elementwise over any shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

# Note [Integers that wrap]
# The hash has to be bit-equal in eager kernels, C++ and Triton made by inductor, on CPU and GPU. So: two's complement
# int64 for each token, int32 for each element (half the memory traffic), logical shifts made of arithmetic ones by a
# mask. Overflow of a signed product is undefined in C++, where inductor's loops are compiled without -fwrapv. What a
# compiler may do with that: infer bounds of a loop from a product of its counter, so counters (rows, positions,
# features) are never multiplied before they are mixed with something unknown, or are kept below 2^63; and fold a sign
# test into the product, so the last comparison is of 31 masked bits.
GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as int64; the finalizers are those of splitmix64 and murmur3
_WORD = 0xFFFFFFFF


def mix(z: Tensor) -> Tensor:
    """A bijection of int64 in which every bit depends on every bit."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & (2**33 - 1))


def kept(mixed: Tensor, words: Tensor, p: float) -> Tensor:
    """Return which elements stay, where each is named by a mixed int64 and an int32 word; the shapes broadcast.

    Args:
        mixed: int64, every bit of it random.
        words: int32, well mixed, see ``feature_words``.
        p: Probability of dropping, below 1.
    """
    # The two halves, sign extended, so that the conversion is exact.
    offset, factor = ((mixed << 32) >> 32).to(torch.int32), (mixed >> 32).to(torch.int32) | 1
    word = torch.addcmul(offset, factor, words)
    high = word >> 15
    high &= 0x1FFFF
    word ^= high
    word *= -0x3D4D51CB
    word &= 0x7FFFFFFF
    return word >= min(round(p * 2**31), 2**31 - 1)


def place_salt(name: str) -> int:
    """Return what tells a place in a model from all others: an int64."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


# A name is a constant of a graph, and so is what is made of it.
place_salt._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keys_of_place(keys: Tensor, salt: int | Tensor) -> Tensor:
    """Return the tokens' keys for one place in a model: unrelated to those of another."""
    return mix(keys ^ salt)


def feature_words(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a well mixed int32 for each feature, of ``shape``; feature by feature the same for any number of them."""
    return index_words(torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)).view(tuple(shape))


def index_words(indices: Tensor) -> Tensor:
    """Return a well mixed int32 for each index, int64 from 0 to 2³² - 2."""
    word = indices + 1
    for factor in (0x45D9F3B7, 0x2C1B3C6D):  # below 2^31: products of 32-bit words stay below 2^63
        word = ((word ^ (word >> 16)) * factor) & _WORD
    word = word ^ (word >> 16)
    return ((word << 32) >> 32).to(torch.int32)
