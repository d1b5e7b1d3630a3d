"""What the blocks of a Llama keep between forward and backward, by the mode of activation checkpointing."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import dtcp
from dtcp.models import build_model
from memory_bench.steps import MIB, add_block_arguments, kept_between_halves, measure_steps

HELP = "activation checkpointing: none, full, selective, every second block"
IS_TIMED = True
add_arguments = add_block_arguments
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "selective, matmuls saved": {"mode": "selective", "save_matmuls": True},
    "full, every 2nd block": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "full": {"mode": "full"},
}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each mode."""
    tokens = torch.randint(64, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    models, dim = {}, arguments.dim
    for name, options in MODES.items():
        models[name] = build_model(
            "llama_tiny", num_layers=arguments.layers, dim=dim, ffn_dim=11 * dim // 4, vocab_size=64
        )
        dtcp.apply_activation_checkpointing(models[name], **options)

    def forward(model: nn.Module) -> torch.Tensor:
        return model(tokens).square().mean()

    def step(model: nn.Module) -> None:
        forward(model).backward()
        model.zero_grad()

    kept = {name: kept_between_halves(functools.partial(forward, model)) for name, model in models.items()}

    records = measure_steps({name: functools.partial(step, model) for name, model in models.items()}, arguments.repeats)
    sizes = {name: getattr(arguments, name) for name in ("layers", "dim", "tokens")}
    return [
        {"way": name, **sizes, "kept_bytes": kept[name], "kept_ratio": kept[name] / kept["none"], **record}
        for name, record in records.items()
    ]


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    sizes = records[0]
    table = Table(title=f"{sizes['layers']} blocks, D {sizes['dim']}, {sizes['tokens']} tokens, float32")
    for name in ("checkpointing", "kept MiB", "ratio", "peak MiB", "seconds", "ratio"):
        table.add_column(name, justify="left" if name == "checkpointing" else "right")
    for r in records:
        table.add_row(
            r["way"], f"{r['kept_bytes'] / MIB:,.1f}", f"{r['kept_ratio']:.2f}", f"{r['peak_bytes'] / MIB:,.1f}",
            f"{r['seconds']:.2f}", f"{r['seconds_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
