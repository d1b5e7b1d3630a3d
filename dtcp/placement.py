"""Which tokens each cp rank holds: one function for each layout. Integers only.

A rank's slots are in increasing order of their tokens, and pads, with positions of seq_len and more, come last.
"""

from __future__ import annotations

import math

import numpy as np

from dtcp.documents import Documents, Integers


def padded_len(name: str, seq_len: int, cp: int, multiple_of: int) -> int:
    """Slots of all ranks together. At cp=1 nothing is cut, so head_tail needs no even length."""
    local = math.lcm(2, multiple_of) if name == "head_tail" and cp > 1 else multiple_of
    return -(-seq_len // (cp * local)) * cp * local


def regular_positions(name: str, cp: int, local_seq_len: int, rank: int) -> Integers:
    """Positions of the slots of ``rank`` in a layout that does not look at documents, int64 (S_local,)."""
    slots = np.arange(local_seq_len, dtype=np.int64)
    if cp == 1:
        return slots
    match name:
        case "contiguous":
            return slots + rank * local_seq_len
        case "head_tail":
            chunk = local_seq_len // 2
            return np.concatenate([slots[:chunk] + rank * chunk, slots[:chunk] + (2 * cp - 1 - rank) * chunk])
        case "striped":
            return slots * cp + rank
        case _:
            raise AssertionError(name)


def per_document_positions(documents: Documents, row: int, cp: int, local_seq_len: int) -> list[Integers]:
    """Positions of the slots of each rank, where every document of ``row`` is dealt head-tail.

    A document of L tokens is cut into 2·cp equal chunks, r and 2·cp − 1 − r of which go to rank r; the L mod 2·cp
    tokens that are left over, its first and cheapest ones, go round the ranks, beginning where those of the document
    before ended. So all ranks hold equally many tokens, but for one, and no document has to be padded. Under a causal
    mask the pairs of two ranks differ by less than the left-over tokens of all documents together. Padding is dealt
    round the ranks.
    """
    parts = documents.rows()[row % documents.num_rows]
    lengths = parts.lengths
    left_over = np.where(parts.is_padding, lengths, lengths % (2 * cp))
    chunk = np.maximum((lengths - left_over) // (2 * cp), 1)
    first_rank = np.concatenate([[0], left_over.cumsum()[:-1]]) % cp
    inside = np.arange(documents.seq_len) - parts.per_token(parts.starts[:-1])
    beyond = inside - parts.per_token(left_over)
    number = beyond // parts.per_token(chunk)
    dealt = np.where(number < cp, number, 2 * cp - 1 - number)
    ranks = np.where(beyond < 0, (parts.per_token(first_rank) + inside) % cp, dealt)
    held = [np.flatnonzero(ranks == rank) for rank in range(cp)]
    num_pads = [local_seq_len - len(tokens) for tokens in held]
    first_pads = documents.seq_len + np.concatenate([[0], np.cumsum(num_pads)])
    return [
        np.concatenate([tokens, np.arange(first_pads[rank], first_pads[rank] + num_pads[rank])])
        for rank, tokens in enumerate(held)
    ]
