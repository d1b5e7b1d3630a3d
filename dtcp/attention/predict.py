"""How long a strategy takes on paper, from its own tiles and messages and a machine's rates: what ``auto`` compares.

One attention call, forward and backward, of the rank that takes longest. A step's messages hide behind its tiles, so a
step takes the longer of both (papers: a causal ring hides its keys from c ≥ e·g·F/B tokens per rank on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dtcp.attention.heads import HeadPart, are_keys_shared, cut_heads, whole_of
from dtcp.attention.schedule import exchange_steps, ring_schedule
from dtcp.layout import SequenceLayout
from dtcp.mask import Mask
from dtcp.tiles import Tile

Parts = tuple[tuple[HeadPart, ...], ...]
_BACKWARD = 2.5  # products of matrices in the backward, of those in the forward
_MAX_RANKS = 8  # that are looked at; others lie between them


class Rates(NamedTuple):
    """What one rank computes and sends.

    Attributes:
        kernel_flops: FLOP/s of the attention kernel in its forward: 4·D for each pair that it computes.
        link_bytes: Bytes/s that leave a rank, and as many enter it at the same time.
        call_seconds: Of a call of the kernel and the merge of its result.
        message_seconds: Of a message, however short.
    """

    kernel_flops: float
    link_bytes: float
    call_seconds: float = 0.0
    message_seconds: float = 0.0


# By what the name of a CUDA device contains: about what FlashAttention-2 reaches in bfloat16, and NVLink's bytes in one
# direction as its data sheets give them. None is measured here: measure_rates does that.
DEVICE_RATES = {
    "B200": Rates(900e12, 900e9, 5e-6, 10e-6),
    "H100": Rates(400e12, 450e9, 5e-6, 10e-6),
    "H200": Rates(400e12, 450e9, 5e-6, 10e-6),
    "H800": Rates(400e12, 200e9, 5e-6, 10e-6),
    "A100": Rates(190e12, 300e9, 5e-6, 10e-6),
    "A800": Rates(190e12, 200e9, 5e-6, 10e-6),
}
# One thread of a laptop or a small server, and ranks of one machine that talk over gloo.
CPU_RATES = Rates(80e9, 1.5e9, 60e-6, 150e-6)


@dataclass(frozen=True, slots=True)
class Shape:
    """The tensors of a call on one rank.

    Attributes:
        element_bytes, summed_bytes: Of an element of keys, and of ranks' parts of their gradients on the way.
    """

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    element_bytes: int
    summed_bytes: int = 4


class Candidate(NamedTuple):
    """A strategy: see ``ResolvedStrategy``."""

    core: str
    ulysses_degree: int


def name_of(core: str, ulysses_degree: int, cp: int) -> str:
    """What a user would write."""
    if ulysses_degree == 1:
        return core
    return "ulysses" if ulysses_degree == cp else f"hybrid(ulysses_degree={ulysses_degree})"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a candidate costs the rank that takes longest.

    Attributes:
        seconds: Of forward and backward.
        sent_bytes: By the rank that sends most.
    """

    candidate: Candidate
    seconds: float
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class _Part:
    """A step: what is computed while what is on its way."""

    compute: float
    num_messages: int
    num_bytes: float

    def seconds(self, rates: Rates) -> float:
        return max(self.compute, _message_seconds(self, rates))


def predict(
    candidate: Candidate, shape: Shape, layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rates: Rates
) -> Prediction:
    """Return what ``candidate`` costs. ``layout`` and ``kv_layout`` are those of all ranks."""
    degree = candidate.ulysses_degree
    if degree == 1:
        parts: Parts = ((HeadPart(range(shape.num_heads), range(shape.num_kv_heads)),),)
    else:
        parts = cut_heads(shape.num_heads, shape.num_kv_heads, degree)
    merged = layout.merge(degree), kv_layout.merge(degree)
    found = []
    for rank in _looked_at(merged[0].cp):
        for member in range(degree) if merged[0].cp == 1 else (0,):
            found.append(_of_rank(candidate, shape, parts, member, merged, mask, rank, rates))
    return Prediction(candidate, max(s for s, _ in found), max(b for _, b in found))


def _looked_at(cp: int) -> range:
    return range(0, cp, -(-cp // _MAX_RANKS))


def _of_rank(
    candidate: Candidate, shape: Shape, parts: Parts, member: int, layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask, rank: int, rates: Rates,
) -> tuple[float, float]:  # fmt: skip
    """(seconds, bytes sent)."""
    seconds = sent = 0.0
    for backward in (False, True):
        exchanged = _head_bytes(candidate, shape, parts, layouts, backward)
        num_messages = candidate.ulysses_degree - 1
        there, back = (
            _message_seconds(_Part(0.0, num_messages, num_bytes / len(parts)), rates) for num_bytes in exchanged
        )
        sent += sum(exchanged)
        of_parts = []
        for part in parts:
            heads, keys = len(part[member].queries), len(part[member].repeated or part[member].keys)
            steps = list(_steps(candidate.core, shape, heads, keys, layouts, mask, rank, rates, backward))
            of_parts.append(sum(step.seconds(rates) for step in steps))
            sent += sum(step.num_bytes for step in steps)
        # The first part's heads are waited for, the last part's result too; between them one hides behind another.
        seconds += there + back
        if len(of_parts) == 2:
            seconds += max(of_parts[0], there) + max(of_parts[1], back)
        else:
            seconds += of_parts[0]
    return seconds, sent


def _head_bytes(
    candidate: Candidate, shape: Shape, parts: Parts, layouts: tuple[SequenceLayout, SequenceLayout], backward: bool
) -> tuple[float, float]:
    """Bytes that a rank sends to exchange tokens for heads, and heads for tokens; means over the ranks."""
    degree = candidate.ulysses_degree
    if degree == 1:
        return 0.0, 0.0
    others = (degree - 1) / degree
    q_rows, kv_rows = (shape.batch_size * layout.local_seq_len / degree for layout in layouts)
    num_keys = sum(len(whole_of(parts, member)[1]) for member in range(degree))
    of_query, of_out = q_rows * shape.num_heads * shape.head_dim, q_rows * shape.num_heads * shape.value_dim
    of_keys = kv_rows * num_keys * (shape.head_dim + shape.value_dim)
    e = shape.element_bytes
    if not backward:
        return others * (of_query + of_keys) * e, others * of_out * e
    summed = shape.summed_bytes if are_keys_shared(parts) else min(shape.summed_bytes, e)
    return others * of_out * e, others * (of_query * e + of_keys * summed)


def _steps(
    core: str, shape: Shape, num_heads: int, num_kv_heads: int, layouts: tuple[SequenceLayout, SequenceLayout],
    mask: Mask, rank: int, rates: Rates, backward: bool,
) -> Iterator[_Part]:  # fmt: skip
    layout, kv_layout = layouts

    def compute(tiles: tuple[Tile, ...]) -> float:
        factor = (_BACKWARD if backward else 1.0) * num_heads * 2 * (shape.head_dim + shape.value_dim)
        pairs = sum(tile.num_computed * _num_rows(tile, shape.batch_size) for tile in tiles)
        return factor * pairs / rates.kernel_flops + len(tiles) * rates.call_seconds

    entry = num_kv_heads * (shape.head_dim + shape.value_dim)
    if layout.cp == 1:
        yield _Part(compute(layout.tiles(0, 0, mask, kv_layout=kv_layout)), 0, 0)
        return
    if core == "all_gather":
        yield from _gathered(shape, entry, compute, layouts, mask, rank, backward)
        return
    if core == "ring":
        schedule = ring_schedule(layout, kv_layout, mask, True, rank)
        steps = schedule.steps
        sent = [(hop.send[1] - hop.send[0]) * shape.batch_size for hop in schedule.hops]
    else:
        steps = exchange_steps(layout, kv_layout, mask, True, rank)
        sent = [step.reader_keys.num_entries(shape.batch_size) for step in steps[1:]] + [0]
    returned = [step.keys.num_entries(shape.batch_size) if i else 0 for i, step in enumerate(steps)]
    own = compute(steps[0].tiles)
    for index, step in enumerate(steps):
        # Gradients made in the step before return during this one; half of the own tiles hide the last ones.
        late = returned[index - 1] if backward and index else 0
        num_bytes = entry * (sent[index] * shape.element_bytes + late * shape.summed_bytes)
        seconds = own * (0.5 if backward else 1.0) if index == 0 else compute(step.tiles)
        yield _Part(seconds, (sent[index] > 0) + (late > 0), num_bytes)
    if backward:
        yield _Part(own / 2, 1 if returned[-1] else 0, entry * returned[-1] * shape.summed_bytes)


def _gathered(
    shape: Shape, entry: int, compute: Callable[[tuple[Tile, ...]], float],
    layouts: tuple[SequenceLayout, SequenceLayout], mask: Mask, rank: int, backward: bool,
) -> Iterator[_Part]:  # fmt: skip
    layout, kv_layout = layouts
    tiles = [layout.tiles(rank, source, mask, kv_layout=kv_layout) for source in range(layout.cp)]
    own = compute(tiles[rank])
    gathered = (layout.cp - 1) * kv_layout.local_seq_len * shape.batch_size * entry
    yield _Part(own / 2 if backward else own, 1, gathered * shape.element_bytes)
    yield _Part(sum(compute(t) for source, t in enumerate(tiles) if source != rank), 0, 0)
    if backward:
        yield _Part(own / 2, 1, gathered * shape.summed_bytes)


def _message_seconds(part: _Part, rates: Rates) -> float:
    return part.num_messages * rates.message_seconds + part.num_bytes / rates.link_bytes


def _num_rows(tile: Tile, batch_size: int) -> int:
    return batch_size if tile.rows is None else tile.rows[1] - tile.rows[0]
