"""The loss of the output layer, forward and backward: logits of all tokens at once, and of a chunk at a time."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dtcp
from memory_bench.steps import MIB, measure_steps

HELP = "full logits against linear_token_loss"
IS_TIMED = True
TORCHS_OWN = "torch linear_cross_entropy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocab-size", type=int, default=128_256, metavar="V", help="rows of the head (128256, Llama 3's)")
    add("--dim", type=int, default=512, metavar="D", help="512")
    add("--tokens", type=int, default=4096, metavar="N", help="4096")
    add("--chunk-tokens", type=int, nargs="+", default=[1024, 256], metavar="C", help="1024 256")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="float32")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each way; errors are relative to full logits."""
    dtype = getattr(torch, arguments.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.dim, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(arguments.vocab_size, arguments.dim, generator=generator) * 0.05).to(dtype).requires_grad_()
    labels = torch.randint(arguments.vocab_size, (arguments.tokens,), generator=generator)
    losses = {"full logits": lambda: dtcp.token_loss(F.linear(hidden, weight), labels)}
    for chunk in arguments.chunk_tokens:
        losses[f"chunks of {chunk}"] = functools.partial(
            dtcp.linear_token_loss, hidden, weight, labels, chunk_tokens=chunk
        )
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # since torch 2.13
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
            losses[f"{TORCHS_OWN}, {chunk}"] = functools.partial(
                F.linear_cross_entropy, hidden, weight, labels, options=options
            )

    def step(loss: Any) -> tuple[Tensor, ...]:
        value = loss()
        value.backward()
        result = value.detach(), hidden.grad, weight.grad
        hidden.grad = weight.grad = None
        return result

    records = measure_steps({name: functools.partial(step, loss) for name, loss in losses.items()}, arguments.repeats)
    right = step(losses["full logits"])
    for name, record in records.items():
        own = step(losses[name])
        record["error_loss"], *errors = (float((a - b).norm() / b.norm()) for a, b in zip(own, right, strict=True))
        record["error_gradients"] = max(errors)
        del own
    sizes = {name: getattr(arguments, name) for name in ("vocab_size", "dim", "tokens", "dtype")}
    return [{"way": name, **sizes, **record} for name, record in records.items()]


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    sizes = records[0]
    table = Table(title=f"V {sizes['vocab_size']:,}, D {sizes['dim']}, {sizes['tokens']} tokens, {sizes['dtype']}")
    for name in ("loss", "peak MiB", "ratio", "seconds", "ratio", "error of loss", "of gradients"):
        table.add_column(name, justify="left" if name == "loss" else "right")
    for r in records:
        table.add_row(
            r["way"], f"{r['peak_bytes'] / MIB:,.0f}", f"{r['peak_ratio']:.3f}", f"{r['seconds']:.2f}",
            f"{r['seconds_ratio']:.2f}", f"{r['error_loss']:.1e}", f"{r['error_gradients']:.1e}",
        )  # fmt: skip
    console.print(table)
