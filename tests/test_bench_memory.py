"""tools/bench_memory.py: its tables, its records, and what they claim: bytes by the formulas, equal losses."""

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import bench_memory

from live_bytes import kept_allocated_bytes

ELEMENT = {"float32": 4, "bfloat16": 2}
LOSS = ["loss", "--vocab-size", "2000", "--dim", "16", "--tokens", "256", "--chunk-tokens", "32", "--repeats", "1"]
BLOCKS = ["blocks", "--layers", "2", "--dim", "32", "--tokens", "64", "--repeats", "1"]


@pytest.mark.parametrize(
    ("arguments", "titles"),
    [(LOSS, ("peak MiB", "chunks of 32")), pytest.param(BLOCKS, ("kept MiB",), marks=pytest.mark.slow)],
)
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


# ---- one layer on ranks ----------------------------------------------------------------------------------------------

ONE_LAYER = ["--dim", "256", "--tokens", "64", "--json"]


def measured(capsys, *arguments: str) -> list[dict]:
    assert bench_memory.main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("dtype", "degrees"),
    [
        ("float32", [2]),
        pytest.param("float32", [2, 4], marks=pytest.mark.slow),
        pytest.param("bfloat16", [2, 4], marks=pytest.mark.slow),
    ],
)
def test_a_layer_keeps_what_the_formula_says(capsys, monkeypatch, borrowed_ranks, dtype, degrees):
    monkeypatch.setattr("memory_bench.activations.Ranks", borrowed_ranks)
    records = measured(capsys, "activations", *ONE_LAYER, "--dtype", dtype, "--degrees", *map(str, degrees))
    assert {(r["way"], r["degree"]) for r in records} == {
        ("one rank", 1), *((way, degree) for way in ("TP", "TP+SP", "CP") for degree in degrees)
    }  # fmt: skip
    kept = {(r["model"], r["way"], r["degree"]): r["kept_bytes"] for r in records}
    for record in records:
        # The rest: a few integers of a cp rank, the number of its call and its layout; with so few tokens they show.
        assert record["kept_bytes"] == pytest.approx(record["formula_bytes"], rel=1e-3), record
    for model, degree in itertools.product(("gpt", "llama"), degrees):
        one = kept[model, "one rank", 1]
        assert kept[model, "TP+SP", degree] == pytest.approx(one / degree, rel=0.01)
        # Without sequence parallelism every rank has all of what lies between the linear layers.
        between = {"gpt": (4 * 256 + 4) * ELEMENT[dtype] + 2 * 256, "llama": 256 * (16 + 2 * ELEMENT[dtype]) + 8}[model]
        duplicated = 64 * between * (degree - 1) // degree
        assert kept[model, "TP", degree] - kept[model, "TP+SP", degree] == pytest.approx(duplicated, rel=1e-3)
    for degree in degrees:
        assert kept["gpt", "CP", degree] == pytest.approx(kept["gpt", "one rank", 1] / degree, rel=0.01)
        # One rank's attention with grouped queries keeps its output twice on CPU.
        without_copy = kept["llama", "one rank", 1] - 64 * 256 * ELEMENT[dtype]
        assert kept["llama", "CP", degree] == pytest.approx(without_copy / degree, rel=0.01)


@pytest.mark.slow
def test_what_is_kept_is_what_stays_alive(ranks):
    """The saved tensors are all there is: the allocator's account says the same."""
    ranks.run(2, check_alive)


def check_alive(rank: int, world: int) -> None:
    from memory_bench.layer import Layer, kept_bytes, make_layer

    layer = Layer("gpt", 256, 32, 32, 1024, 512, tp=2)
    _, forward = make_layer(layer)
    forward()  # what is made once
    # The input is kept, and was there before; the output is there, and is for the next layer to keep. The least of some
    # runs: what gloo's thread frees, a moment later, is not in the account of this one.
    alive = min(kept_allocated_bytes(forward) for _ in range(20))
    assert alive == pytest.approx(kept_bytes(rank, world, layer), rel=0.002)


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_layer_sends_what_the_formula_says(capsys, monkeypatch, borrowed_ranks, degree):
    monkeypatch.setattr("memory_bench.collectives.Ranks", borrowed_ranks)
    records = measured(capsys, "collectives", *ONE_LAYER, "--degrees", str(degree))
    assert len(records) == 2 * 2 * 2
    for record in records:
        assert record["sent_bytes"] == record["formula_bytes"] > 0
        counts = tuple(record[kind][0] for kind in ("all_reduce", "reduce_scatter", "all_gather"))
        assert counts == {
            ("TP", "forward"): (2, 0, 0), ("TP", "backward"): (2, 0, 0),
            ("TP+SP", "forward"): (0, 2, 2), ("TP+SP", "backward"): (0, 2, 4),
        }[record["way"], record["direction"]]  # fmt: skip
    forward = [r["sent_bytes"] for r in records if (r["direction"], r["model"]) == ("forward", "gpt")]
    assert forward[0] == forward[1]


@pytest.mark.slow
def test_recomputation_beside_context_parallelism(capsys):
    sizes = ["--layers", "2", "--dim", "64", "--tokens", "128", "--repeats", "1"]
    records = measured(capsys, "recomputation", *sizes, "--json")
    kept = {r["way"]: r["kept_ratio"] for r in records}
    assert kept["full"] < kept["selective"] < kept["none"] == 1
    assert kept["full, cp=2"] < kept["none, cp=2"] < 0.55
    assert all(r["seconds"] > 0 and r["cpu_seconds"] > 0 and r["ranks"] * r["threads_per_rank"] == 2 for r in records)
    assert bench_memory.main(["recomputation", *sizes]) == 0
    assert "full, every 2nd" in capsys.readouterr().out


def test_the_plot_has_a_bar_for_each_way(tmp_path):
    pytest.importorskip("matplotlib")
    from memory_bench.activations import kept_by_formula, make_layers
    from memory_bench.plot import draw_activations

    arguments = bench_memory.make_parser().parse_args(["activations"])
    records = []
    for layer in make_layers(arguments):
        kept, way = kept_by_formula(layer), layer.way if layer.num_ranks > 1 else "one rank"
        record = {"model": layer.model, "dim": layer.dim, "dtype": layer.dtype, "way": way, "degree": layer.num_ranks}
        records.append({**record, "bytes_per_token": kept / layer.seq_len, "ratio": 0.5})
    path = tmp_path / "kept.png"
    figure = draw_activations(records, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    for axes, model in zip(figure.axes, ("gpt", "llama"), strict=True):
        heights = sorted(bar.get_height() * 1024 for bar in axes.patches)
        assert heights == pytest.approx(sorted(r["bytes_per_token"] for r in records if r["model"] == model))


def test_without_matplotlib_the_plot_is_refused(monkeypatch):
    from memory_bench.plot import draw_activations

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"--plot needs matplotlib; pip install -c constraints.txt"):
        draw_activations([], "kept.png")
