"""``tools/balance_table.py``: packed rows are what it says, per_document is even on real files, errors are one line."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "balance_table.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("balance_table", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


def test_packed_rows_are_full_and_use_every_file_before_one_comes_again(tool):
    rows = tool.packed_rows([5, 6, 50], 7, 20)
    assert all(sum(row) == 20 and min(row) > 0 for row in rows)
    assert rows == tool.packed_rows([5, 6, 50], 7, 20) != tool.packed_rows([5, 6, 50], 7, 20, seed=1)
    first = [length for row in tool.packed_rows([5, 6, 9], 1, 20) for length in row]
    assert sorted(first) == [5, 6, 9]


@pytest.mark.parametrize("seq_len", [8192, 32768])
def test_per_document_is_even_on_packed_real_files(tool, seq_len):
    rows = tool.packed_rows(tool.file_lengths(), 12, seq_len)
    records = {(r["cp"], r["layout"]): r for r in tool.measure("files", rows, [2, 16])}
    for cp in (2, 16):
        assert 1 <= records[cp, "per_document"]["mean"] <= records[cp, "per_document"]["worst"] <= 1.01
        # The sample is heavy-tailed: without regard to documents, ranks differ.
        assert records[cp, "contiguous"]["worst"] > 1.5 and records[cp, "head_tail"]["worst"] > 1.05


def test_records_have_every_layout_and_a_published_value(tool, capsys):
    assert tool.main(["--json", "--rows", "1", "--cp", "2", "--seq-len", "2048"]) == 0
    records = json.loads(capsys.readouterr().out)
    values = {r["layout"]: r["mean"] for r in records if r["documents"] == "16384, 16 × 1024"}
    assert values["contiguous"] == pytest.approx(1.8823, abs=6e-5) and values["head_tail"] == pytest.approx(
        1.4705, abs=6e-5
    )
    assert values["per_document"] == 1 and set(values) == {"contiguous", "head_tail", "striped", "per_document", "auto"}


def test_bad_arguments_are_one_line(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["--cp", "0"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("--cp, --rows and --seq-len must be at least 1")
