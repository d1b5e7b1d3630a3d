"""``tools/draw_layout.py``: what is drawn is what is computed, at the step at which the ring computes it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.patches import Polygon

import dtcp
from dtcp.mask import Mask
from dtcp.tiles import Tile

TOOL = Path(__file__).resolve().parent.parent / "tools" / "draw_layout.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("draw_layout", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def packed(name: str = "per_document"):
    docs = dtcp.Documents.from_lengths([6, 18, 8])
    layout = dtcp.make_layout(name, seq_len=32, cp=2, documents=docs)
    return layout, Mask(True, (7, 0), docs)


def area(corners: np.ndarray) -> float:
    x, y = corners.T
    return abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2


def test_outlines_of_tiles_without_masks_hold_as_many_pairs_as_are_allowed(tool):
    for name in ("contiguous", "head_tail", "striped"):
        layout = dtcp.make_layout(name, seq_len=20, cp=2)
        for mask in (Mask(True), Mask(False)):
            marks = tool.marks_of(layout, mask)
            assert {mark.tile.kind for mark in marks} <= {"full", "causal"}
            for mark in marks:
                assert area(tool.outline(mark, as_stairs=True)) == mark.tile.num_pairs


def test_a_triangle_that_sees_less_and_less_keeps_its_last_pair(tool):
    mark = tool.Mark(0, 0, 0, Tile(0, 3, 0, 3, "anticausal"), top=5, left=2)
    corners = tool.outline(mark, as_stairs=True)
    assert area(corners) == 6
    assert [4, 8] in corners.tolist() and [2, 8] not in corners.tolist()  # x, y: the last query sees the last key only


def test_every_tile_is_drawn_once_with_its_step(tool):
    layout, mask = packed()
    figure, marks = tool.make_figure(layout, mask)
    expected = sum(len(layout.tiles(q, kv, mask)) for q in range(2) for kv in range(2))
    (axes,) = [a for a in figure.axes if a.get_xlabel() == "keys held by"]
    drawn = [p for p in axes.patches if isinstance(p, Polygon)]
    assert len(marks) == len(drawn) == expected
    dashed = sum(p.get_linestyle() == "--" for p in drawn)
    assert dashed == sum(m.tile.kind == "masked" for m in marks) > 0
    assert all(m.step == (m.kv_rank != m.q_rank) for m in marks)


def test_steps_are_those_at_which_the_ring_has_the_keys(tool):
    forward = {
        (m.q_rank, m.kv_rank): m.step for m in tool.marks_of(dtcp.make_layout("contiguous", seq_len=8, cp=4), Mask())
    }
    assert [forward[1, kv] for kv in range(4)] == [1, 0, 3, 2]
    backward = {
        (m.q_rank, m.kv_rank): m.step for m in tool.marks_of(dtcp.make_layout("striped", seq_len=8, cp=4), Mask())
    }
    assert [backward[1, kv] for kv in range(4)] == [3, 0, 1, 2]


def test_every_token_is_coloured_and_numbered_at_its_rank(tool):
    layout, mask = packed()
    figure, _ = tool.make_figure(layout, mask)
    numbers = {(int(t.get_text()), int(t.get_position()[1])) for t in figure.axes[0].texts}
    assert numbers == {(token, rank) for rank in range(2) for token in layout.positions(rank).tolist()}


def test_colours_are_of_allowed_pairs_only(tool):
    layout, mask = packed()
    holder = np.zeros(32, int)
    coloured = (tool.pairs_image(np.arange(32), holder, mask) < 1).any(axis=2)
    assert coloured.sum() == sum(layout.attended_pairs(True, (7, 0), mask.documents))


def test_png_and_svg_are_written_also_of_long_sequences(tool, tmp_path):
    files = [tmp_path / "a.png", tmp_path / "a.svg"]
    assert tool.main(["--layout", "auto", "--seq-len", "3000", "--cp", "3", "--out", *map(str, files)]) == 0
    assert files[0].read_bytes().startswith(b"\x89PNG") and b"<svg" in files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.pdf"], "must be .png or .svg files in a folder that exists, got a.pdf"),
        (["--cp", "0", "--out", "a.png"], "cp must be an int of at least 1, got 0"),
        (["--window", "3", "3", "--out", "a.png"], "looks 3 tokens ahead"),
        (["--lengths", "4", "--seq-len", "5", "--out", "a.png"], "add up to 4, but the sequence has 5"),
        (["--layout", "per_document", "--out", "a.png"], "needs to know where documents lie"),
    ],
)
def test_bad_arguments_are_one_line(tool, capsys, arguments, message):
    with pytest.raises(SystemExit):
        tool.main(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]
