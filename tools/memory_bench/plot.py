"""A picture of what one layer keeps."""

from __future__ import annotations

from typing import Any

COLORS = {"one rank": "#777777", "TP": "#c44e52", "TP+SP": "#4c72b0", "CP": "#55a868"}
WIDTH = 0.27  # of a bar; degrees are 1 apart


def draw_activations(records: list[dict[str, Any]], path: str) -> Any:
    """Write a PNG and return its figure: a panel for each model, bars for each degree and way.

    Marks say where one rank's bytes divided by the number of ranks would be.

    Raises:
        SystemExit: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib; pip install -c constraints.txt -e '.[dev]' has it") from error
    models = list(dict.fromkeys(r["model"] for r in records))
    figure = Figure(figsize=(4.5 * len(models), 3.8), dpi=100, layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        _draw_model(axes, model, [r for r in records if r["model"] == model])
    figure.axes[0].set_ylabel("kept for the backward by one layer\non a rank, KiB per token")
    figure.axes[-1].legend(frameon=False)
    figure.savefig(path)
    return figure


def _draw_model(axes: Any, model: str, records: list[dict[str, Any]]) -> None:
    one, degrees = records[0], sorted({r["degree"] for r in records})
    for way, color in COLORS.items():
        of_way = [r for r in records if r["way"] == way]
        shift = 0.0 if way == "one rank" else WIDTH * (list(COLORS).index(way) - 2)
        places = [degrees.index(r["degree"]) + shift for r in of_way]
        axes.bar(places, [r["bytes_per_token"] / 1024 for r in of_way], WIDTH * 0.94, color=color, label=way)
        for x, r in zip(places, of_way, strict=True):  # at the foot of the bar, below every mark
            foot = 0.02 * one["bytes_per_token"] / 1024
            axes.text(x, foot, f"{r['ratio']:.2f}", ha="center", va="bottom", color="white", fontsize=8)
    for x, degree in enumerate(degrees):
        ideal, half = one["bytes_per_token"] / 1024 / degree, WIDTH * (0.65 if degree == 1 else 1.6)
        label = "one rank ÷ ranks" if degree == 1 else None
        axes.plot([x - half, x + half], [ideal, ideal], color="black", linestyle=":", linewidth=1.3, label=label)
    axes.set_xticks(range(len(degrees)), [str(degree) for degree in degrees])
    axes.set_xlabel("ranks")
    axes.set_title(f"{model}, width {one['dim']}, {one['dtype']}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
