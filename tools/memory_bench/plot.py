"""A picture of what one layer keeps."""

from __future__ import annotations

from typing import Any

COLORS = {"TP": "#c44e52", "TP+SP": "#4c72b0", "CP": "#55a868"}
MARKERS = {"TP": "s", "TP+SP": "o", "CP": "D"}


def draw_activations(records: list[dict[str, Any]], path: str) -> None:
    """Write a PNG: a panel for each model, a line for each way, beside one rank's bytes divided by the ranks.

    Raises:
        SystemExit: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib; pip install -c constraints.txt -e '.[dev]' has it") from error
    models = list(dict.fromkeys(r["model"] for r in records))
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        of_model = [r for r in records if r["model"] == model]
        one = of_model[0]
        degrees = sorted({r["degree"] for r in of_model})
        ideal = [one["bytes_per_token"] / 1024 / degree for degree in degrees]
        axes.plot(degrees, ideal, color="#888888", linestyle="--", linewidth=1, label="one rank ÷ ranks", zorder=1)
        for way, color in COLORS.items():
            points = [one, *(r for r in of_model if r["way"] == way)]
            axes.plot(
                [r["degree"] for r in points], [r["bytes_per_token"] / 1024 for r in points],
                color=color, marker=MARKERS[way], markersize=6, linewidth=1.6, alpha=0.85, label=way,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(degrees, [str(degree) for degree in degrees])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks")
        axes.set_title(f"{model}, width {one['dim']}, {one['dtype']}", fontsize=11)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("kept for the backward by one layer on a rank,\nKiB per token of the sequence")
    figure.axes[-1].legend(frameon=False)
    figure.savefig(path)
