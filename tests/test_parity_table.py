"""tools/parity_table.py: every row of its table is within 1e-5 of one rank, and it tells a row that is not."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import parity_table

from oracle import STRATEGIES
from parity import TOLERANCE, Record, compare
from parity_meshes import ROWS, Row, record_row, reference_of, run_row
from ranks import RanksError


def row_id(row: Row) -> str:
    return f"{row.model}-{row.mesh}".replace(" ", ",")


@pytest.fixture(scope="module")
def one_rank(ranks) -> Callable[[str], Record]:
    references: dict[str, Record] = {}

    def reference(model: str) -> Record:
        if model not in references:
            references[model] = reference_of(ranks, model)
        return references[model]

    return reference


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_training_on_the_mesh_is_training_on_one_rank(ranks, one_rank, row):
    reference = one_rank(row.model)
    difference = run_row(ranks, row, reference)
    assert difference.is_within, difference
    assert reference.losses[-1] < reference.losses[0] - 0.2  # it does learn


def test_the_rows_are_those_of_the_table():
    meshes = {row.mesh for row in ROWS}
    assert len(meshes) == 11 and len(ROWS) == 22 and max(row.num_ranks for row in ROWS) == 8
    assert {(row.mesh, row.model) for row in ROWS} == {(mesh, model) for mesh in meshes for model in ("gpt", "llama")}
    assert sum(row.compile for row in ROWS) == 3
    with_cp = [row for row in ROWS if "cp" in row.degrees]
    assert {row.layout for row in with_cp} == {"contiguous", "head_tail", "striped"}
    assert {row.strategy for row in with_cp} == set(STRATEGIES)
    counted = {(row.checkpointing, row.model) for row in ROWS if not row.compile}
    assert counted == {(mode, model) for mode in ("none", "full", "selective") for model in ("gpt", "llama")}
    assert Row("dp_replicate2 cp2 tp2+SP", "gpt").degrees == {"dp_replicate": 2, "cp": 2, "tp": 2}


def test_the_tool_prints_and_writes_its_rows(capsys, monkeypatch, borrowed_ranks, tmp_path):
    monkeypatch.setattr(parity_table, "Ranks", borrowed_ranks)
    path = tmp_path / "rows.json"
    assert parity_table.main(["--only", "tp2", "--models", "gpt", "--steps", "2", "--json", str(path)]) == 0
    (record,) = json.loads(path.read_text())
    said = capsys.readouterr().out
    assert f"| tp2 | 2 | gpt |  | full |  | {record['loss']:.1e} | {record['gradient']:.1e} |" in said
    assert "1 of 1 rows equal one rank within 1e-05" in said
    assert record["is_equal"] and 0 < record["gradient"] <= TOLERANCE


def test_a_row_that_is_apart_or_fails_is_told(capsys, monkeypatch):
    record = Record([2.0, 1.0], [1.0, 1.0], {})
    other = dataclasses.replace(record, losses=[2.0, 1.0001])
    found = iter([compare(other, record), RanksError("rank 1 raised: ValueError: no")])

    def run_row(*args: object) -> object:
        result = next(found)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(parity_table, "run_row", run_row)
    monkeypatch.setattr(parity_table, "reference_of", lambda *args: record)
    assert parity_table.main(["--only", "tp2"]) == 1
    captured = capsys.readouterr()
    assert "1.0e-04" in captured.out and "| failed | failed | failed |" in captured.out
    assert "0 of 2 rows equal one rank" in captured.out and "ValueError: no" in captured.err


def count_forwards_wrongly(rank: int, world: int, overrides: list[str]) -> None:
    from dtcp.train import parallel

    apply = parallel.parallelize_for_training

    def without(whole, dims, config, device):
        config.activation_checkpointing.mode = type(config.activation_checkpointing.mode).none
        model = apply(whole, dims, config, device)
        config.activation_checkpointing.mode = type(config.activation_checkpointing.mode).full
        return model

    from dtcp.train import trainer

    trainer.parallelize_for_training = without
    try:
        record_row(rank, world, overrides, (1,))
    finally:
        trainer.parallelize_for_training = apply


def test_forwards_that_are_not_run_again_are_found(ranks):
    from parity import job

    overrides = [*job("gpt", 33, 2), "activation_checkpointing.mode=full"]
    ranks.run_expecting(
        1, count_forwards_wrongly, AssertionError, "blocks ran 2 times, 2 calls with full checkpointing", overrides
    )
