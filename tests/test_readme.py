"""The code in the README and in docs/ runs as it stands, and the README's figures of pairs are the library's."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import dtcp

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
}
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
# Each once, though a page may show what another has.
SNIPPETS = {
    snippet: f"{page}-{index}"
    for page, text in PAGES.items()
    for index, (_, language, snippet) in enumerate(FENCED.findall(text), 1)
    if language == "python"
}


def execute(rank: int, world: int, snippet: str, name: str, backend: str) -> None:
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        exec(compile(snippet, name, "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("snippet", SNIPPETS, ids=SNIPPETS.values())
def test_every_snippet_of_the_readme_and_the_docs_runs_on_two_ranks(ranks, snippet, backend):
    """With the default backend in the slow run."""
    ranks.run(2, execute, snippet, SNIPPETS[snippet], backend)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_that_imports_dtcp_is_among_the_snippets(page):
    for _, language, text in FENCED.findall(PAGES[page]):
        assert language == "python" or "import dtcp" not in text, text


def test_there_are_snippets():
    assert len(SNIPPETS) == 16


@pytest.mark.parametrize("name", ["contiguous", "head_tail", "striped"])
def test_pairs_in_the_picture_are_the_layouts_own(name):
    line = re.search(rf"^{name}( +\d)+", README, flags=re.MULTILINE)
    numbers = [int(x) for x in line.group().split()[1:]]
    layout = dtcp.make_layout(name, seq_len=16, cp=4)
    owner = {p: rank for rank in range(4) for p in layout.positions(rank).tolist()}
    rest = re.search(rf"^{name}.*$", README, flags=re.MULTILINE).group().split()[1:]
    assert numbers[:16] == [owner[p] for p in range(16)]
    assert [int(x) for x in rest[16:]] == layout.attended_pairs()
