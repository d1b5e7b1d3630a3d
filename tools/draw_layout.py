#!/usr/bin/env python3
"""Draw who holds which tokens, and which tiles each rank computes at each step of the ring.

    tools/draw_layout.py --layout head_tail --cp 4 --seq-len 32 --out head_tail.png head_tail.svg
    tools/draw_layout.py --layout per_document --cp 2 --lengths 6 18 8 --window 7 0 --out packed.png
    tools/draw_layout.py --layout contiguous --cp 4 --seq-len 4096 --no-causal --out large.svg

Above: a line for each rank, coloured where it holds a token. Left: queries (down) and keys (across) as the model sees
them, each allowed pair in the colour of the rank that computes it. Right: the same pairs, ordered by the rank that
holds the query and the rank that holds the key; each outline is one tile, one call of a kernel, with the step at which
its keys are there: 0 is the rank's own, and from then on the keys of a neighbour further each. Dashed: a tile that
needs a mask. Above 512 tokens the colours are sampled; outlines are exact.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from dtcp.documents import Documents
from dtcp.layout import LAYOUT_NAMES, SequenceLayout, make_layout, slot_positions
from dtcp.mask import Mask, check_window
from dtcp.tiles import Tile

MAX_PIXELS = 512  # along a side of the coloured matrices
PAIR_BY_PAIR = 64  # tokens up to which triangles are drawn as stairs, and tokens are numbered
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}  # so that a number stands out on an edge


@dataclass(frozen=True, slots=True)
class Mark:
    """A tile where it is drawn: its corner in the rank-major matrix, and the step of the ring."""

    q_rank: int
    kv_rank: int
    step: int
    tile: Tile
    top: int
    left: int


def marks_of(layout: SequenceLayout, mask: Mask) -> list[Mark]:
    """Every tile of every pair of ranks, of the first row."""
    starts = np.cumsum([0, *(layout.num_valid(rank) for rank in range(layout.cp))]).tolist()
    direction = 1 if layout.name == "contiguous" else -1  # as the ring's schedule passes keys on
    return [
        Mark(q, kv, direction * (q - kv) % layout.cp, tile, starts[q] + tile.q_start, starts[kv] + tile.kv_start)
        for q in range(layout.cp)
        for kv in range(layout.cp)
        for tile in layout.tiles(q, kv, mask)
        if tile.rows is None or tile.rows[0] == 0
    ]


def outline(mark: Mark, as_stairs: bool) -> np.ndarray:
    """Corners (x, y) of a tile: a rectangle, or a triangle, pair by pair if they are to be seen."""
    height, width = mark.tile.num_queries, mark.tile.num_keys
    if mark.tile.kind in ("full", "masked"):
        corners = [(0, 0), (width, 0), (width, height), (0, height)]
    else:
        steps = range(height + 1) if as_stairs else [0, height]
        diagonal = [(i, i) for i in steps]
        if as_stairs:  # the pair on the diagonal is inside
            ahead = mark.tile.kind == "causal"
            stairs = [((i + 1, i), (i + 1, i + 1)) if ahead else ((i, i + 1), (i + 1, i + 1)) for i in range(height)]
            diagonal = [(0, 0), *(corner for pair in stairs for corner in pair)]
        corners = [*diagonal, (0, height) if mark.tile.kind == "causal" else (width, 0)]
    return np.array(corners, float) + np.array([mark.left, mark.top])


def colours(cp: int) -> np.ndarray:
    """RGB of each rank."""
    if cp <= 10:
        return np.array([matplotlib.colormaps["tab10"](rank)[:3] for rank in range(cp)])
    return np.array([matplotlib.colormaps["hsv"](rank / cp)[:3] for rank in range(cp)])


def pairs_image(order: np.ndarray, holder: np.ndarray, mask: Mask) -> np.ndarray:
    """Allowed pairs of tokens in ``order`` in the colour of the query's rank, sampled if they are many."""
    seq_len = len(holder)
    sampled = order[np.linspace(0, seq_len - 1, min(seq_len, MAX_PIXELS)).round().astype(int)]
    first, stop = mask.intervals(seq_len, seq_len, 0)
    sees = (sampled[None] >= first[sampled, None]) & (sampled[None] < stop[sampled, None])
    tint = 0.45 + 0.55 * colours(int(holder.max()) + 1)[holder[sampled]]
    return np.where(sees[..., None], tint[:, None], 1.0)


def draw_holders(axes: Axes, layout: SequenceLayout, documents: Documents | None) -> None:
    """A line for each rank, coloured where it holds a token."""
    seq_len, cp = layout.seq_len, layout.cp
    image = np.ones((cp, seq_len, 3))
    for rank, colour in enumerate(colours(cp)):
        held = slot_positions(layout, rank)[: layout.num_valid(rank)]
        image[rank, held] = colour
        if seq_len <= PAIR_BY_PAIR:
            for token in held.tolist():
                axes.text(token + 0.5, rank + 0.5, str(token), ha="center", va="center", fontsize=7, color="white")
    axes.imshow(image, extent=(0, seq_len, cp, 0), aspect="auto", interpolation="nearest")
    axes.set_yticks(np.arange(cp) + 0.5, [f"rank {rank}" for rank in range(cp)])
    axes.hlines(range(1, cp), 0, seq_len, color="0.85", linewidth=0.5)
    axes.set_title(
        "who holds which tokens" + (" (black lines: where documents begin)" if documents else ""), fontsize=10
    )
    for start in document_starts(documents):
        axes.axvline(start, color="black", linewidth=1.5)
    axes.set_xlabel("token")


def document_starts(documents: Documents | None) -> list[int]:
    """Where documents after the first begin."""
    return [] if documents is None else documents.rows()[0].starts[1:-1].tolist()


def draw_natural(axes: Axes, layout: SequenceLayout, mask: Mask, holder: np.ndarray) -> None:
    """The mask as the model sees it, by the rank that computes each pair."""
    size = layout.seq_len
    axes.imshow(pairs_image(np.arange(size), holder, mask), extent=(0, size, size, 0), interpolation="nearest")
    for start in document_starts(mask.documents):
        axes.axvline(start, color="black", linewidth=0.8)
        axes.axhline(start, color="black", linewidth=0.8)
    axes.set_title("allowed pairs, coloured by the rank\nthat computes them", fontsize=10)
    axes.set_xlabel("key token")
    axes.set_ylabel("query token")


def draw_tiles(axes: Axes, layout: SequenceLayout, mask: Mask, holder: np.ndarray) -> list[Mark]:
    """The same pairs by ranks, with tiles; returns what is outlined."""
    size, cp = layout.seq_len, layout.cp
    order = np.concatenate([slot_positions(layout, rank)[: layout.num_valid(rank)] for rank in range(cp)])
    axes.imshow(pairs_image(order, holder, mask), extent=(0, size, size, 0), interpolation="nearest")
    bounds = np.cumsum([0, *(layout.num_valid(rank) for rank in range(cp))])
    for bound in bounds[1:-1]:
        axes.axvline(bound, color="0.55", linewidth=0.8)
        axes.axhline(bound, color="0.55", linewidth=0.8)
    marks = marks_of(layout, mask)
    for mark in marks:
        corners = outline(mark, size <= PAIR_BY_PAIR)
        style = "--" if mark.tile.kind == "masked" else "-"
        axes.add_patch(Polygon(corners, closed=True, fill=False, edgecolor="black", linewidth=1.1, linestyle=style))
        if min(mark.tile.num_queries, mark.tile.num_keys) * 50 >= size:  # room for a digit
            third = {"causal": (1 / 3, 2 / 3), "anticausal": (2 / 3, 1 / 3)}.get(mark.tile.kind, (1 / 2, 1 / 2))
            at = mark.left + third[0] * mark.tile.num_keys, mark.top + third[1] * mark.tile.num_queries
            axes.text(*at, str(mark.step), ha="center", va="center", fontsize=8, fontweight="bold", bbox=BEHIND)
    middles = (bounds[1:] + bounds[:-1]) / 2
    axes.set_xticks(middles, [f"rank {rank}" for rank in range(cp)])
    axes.set_yticks(middles, [f"rank {rank}" for rank in range(cp)], rotation=90, va="center")
    axes.set_title(
        "the same by ranks: outlines are tiles,\nnumbers the step of the ring (dashed: with a mask)", fontsize=10
    )
    axes.set_xlabel("keys held by")
    axes.set_ylabel("computed by (holds the queries)")
    return marks


def make_figure(layout: SequenceLayout, mask: Mask) -> tuple[Figure, list[Mark]]:
    """The whole picture, and the tiles in it."""
    holder = np.empty(layout.seq_len, np.int64)
    for rank in range(layout.cp):
        holder[slot_positions(layout, rank)[: layout.num_valid(rank)]] = rank
    figure = Figure(figsize=(10, 7.2 + 0.24 * layout.cp), layout="constrained")
    above, left, right = figure.subplot_mosaic([["a", "a"], ["l", "r"]], height_ratios=[0.24 * layout.cp, 4.6]).values()
    draw_holders(above, layout, mask.documents)
    draw_natural(left, layout, mask, holder)
    marks = draw_tiles(right, layout, mask, holder)
    pairs = layout.attended_pairs(mask.is_causal, mask.window_size, mask.documents)
    what = ["causal" if mask.is_causal else "not causal"]
    what += [f"window {mask.window_size}"] if mask.window_size != (-1, -1) else []
    what += [f"{mask.documents.num_documents} documents"] if mask.documents else []
    shown = ", ".join(map(str, pairs[:8])) + (", …" if len(pairs) > 8 else "")
    figure.suptitle(
        f"{layout.name}, {layout.seq_len} tokens on {layout.cp} ranks, {', '.join(what)}\npairs of each rank: {shown}",
        fontsize=12,
    )
    return figure, marks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=[*LAYOUT_NAMES, "auto"], default="head_tail", help="(head_tail)")
    parser.add_argument("--cp", type=int, default=4, help="ranks (4)")
    parser.add_argument("--seq-len", type=int, metavar="S", help="tokens (32, or the sum of --lengths)")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="L", help="tokens of each document")
    parser.add_argument("--window", type=int, nargs=2, default=[-1, -1], metavar=("LEFT", "RIGHT"), help="(-1 -1)")
    parser.add_argument("--no-causal", action="store_true", help="queries see later keys too")
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="files, .png or .svg")
    arguments = parser.parse_args(argv)
    for path in arguments.out:
        if path.suffix not in (".png", ".svg") or not path.resolve().parent.is_dir():
            parser.error(f"--out must be .png or .svg files in a folder that exists, got {path}")
    is_causal = not arguments.no_causal
    try:
        documents = None
        if arguments.lengths:
            documents = Documents.from_lengths(arguments.lengths, seq_len=arguments.seq_len)
        seq_len = documents.seq_len if documents else (32 if arguments.seq_len is None else arguments.seq_len)
        mask = Mask(is_causal, check_window(tuple(arguments.window), is_causal), documents)
        layout = make_layout(
            arguments.layout,
            seq_len=seq_len,
            cp=arguments.cp,
            documents=documents,
            is_causal=is_causal,
            window_size=mask.window_size,
        )
    except ValueError as error:
        parser.error(str(error))
    figure, _ = make_figure(layout, mask)
    for path in arguments.out:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    return 0


if __name__ == "__main__":
    sys.exit(main())
