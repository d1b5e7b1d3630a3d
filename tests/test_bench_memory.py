"""tools/bench_memory.py: its tables, its records, and that the chunked loss is the full one there."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import bench_memory

LOSS = ["loss", "--vocab-size", "2000", "--dim", "16", "--tokens", "256", "--chunk-tokens", "32", "--repeats", "1"]
BLOCKS = ["blocks", "--layers", "2", "--dim", "32", "--tokens", "64", "--repeats", "1"]


@pytest.mark.parametrize(("arguments", "titles"), [(LOSS, ("peak MiB", "chunks of 32")), (BLOCKS, ("kept MiB",))])
def test_tables_and_records_say_the_same(capsys, arguments, titles):
    assert bench_memory.main(arguments) == 0
    table = capsys.readouterr().out
    assert bench_memory.main([*arguments, "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert all(title in table for title in ("ratio", "seconds", *titles))
    assert all(record["way"] in table and record["environment"]["torch_version"] for record in records)
    first = records[0]
    for record in records:
        assert record["measurement"] == arguments[0] and record["seconds"] > 0
        assert record["peak_ratio"] == record["peak_bytes"] / first["peak_bytes"]
    if arguments is LOSS:
        full, chunked = records[:2]
        assert full["peak_bytes"] >= 2 * 256 * 2000 * 4
        assert chunked["peak_bytes"] <= 32 * 2000 * 4 + 2 * 2000 * 16 * 4 + 3 * 256 * 16 * 4 + 256 * 60
        assert 0 < chunked["error_gradients"] < 1e-5 and chunked["error_loss"] < 1e-6
    else:
        kept = {record["way"]: record["kept_bytes"] for record in records}
        assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nothing"], "invalid choice"), (["loss", "--repeats", "0"], "must be at least 1, got 0")],
)
def test_numbers_and_names_that_make_no_sense_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        bench_memory.main(arguments)
    assert message in capsys.readouterr().err
