"""The README's code runs as it stands, and its figures of pairs are the library's."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import dtcp

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def execute(rank: int, world: int, snippet: str, backend: str) -> None:
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_every_snippet_of_the_readme_runs_on_two_ranks(ranks, index, backend):
    """With the default backend in the slow run."""
    ranks.run(2, execute, SNIPPETS[index], backend)


def test_there_are_snippets():
    assert len(SNIPPETS) == 13


@pytest.mark.parametrize("name", ["contiguous", "head_tail", "striped"])
def test_pairs_in_the_picture_are_the_layouts_own(name):
    line = re.search(rf"^{name}( +\d)+", README, flags=re.MULTILINE)
    numbers = [int(x) for x in line.group().split()[1:]]
    layout = dtcp.make_layout(name, seq_len=16, cp=4)
    owner = {p: rank for rank in range(4) for p in layout.positions(rank).tolist()}
    rest = re.search(rf"^{name}.*$", README, flags=re.MULTILINE).group().split()[1:]
    assert numbers[:16] == [owner[p] for p in range(16)]
    assert [int(x) for x in rest[16:]] == layout.attended_pairs()
