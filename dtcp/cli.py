"""The command ``dtcp``: the training job and the doctor, on as many ranks of this machine as asked for."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from dtcp import __version__

_COMMANDS = {
    "train": ("dtcp.train", "train a model by a configuration"),
    "doctor": ("dtcp.doctor", "compare one training step of a configuration with one rank's"),
}
_EPILOG = """\
examples:
  dtcp train data=stdlib training.steps=20                      one rank
  dtcp train --nproc 4 mesh.cp=2 mesh.dp_shard=2 data=stdlib    four ranks: the sequence over two of them, rows over two
  dtcp doctor --nproc 2 mesh.cp=2 model=llama_tiny              RIGHT or WRONG, and why
  dtcp train --multirun mesh.cp=1,2 attention.strategy=ring,ulysses    a job for each, one after the other
  dtcp train --help                                             every option

Options are hydra's: name=value. On several machines start a rank of each by torchrun:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m dtcp.train mesh.cp=16
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and leave the process as it does."""
    parser = argparse.ArgumentParser(
        prog="dtcp",
        description="Exact context and sequence parallelism for PyTorch: training jobs, and a doctor that checks them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dtcp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, what) in _COMMANDS.items():
        # Its own --help is hydra's.
        command = commands.add_parser(name, help=what, add_help=False)
        command.add_argument("--nproc", type=_positive, default=None, help="ranks on this machine, started by torchrun")
        if name == "train":
            command.add_argument("-m", "--multirun", action="store_true", help="a job for each of the values key=a,b")
    given, options = parser.parse_known_args(arguments)
    module = _COMMANDS[given.command][0]
    if getattr(given, "multirun", False):
        _sweep(options, given.nproc)
    if given.nproc is not None:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.nproc)]
        os.execv(sys.executable, [*launch, "-m", module, *options])
    sys.argv = [f"dtcp {given.command}", *options]
    runpy.run_module(module, run_name="__main__")


def _sweep(options: Sequence[str], num_ranks: int | None) -> NoReturn:
    """Run the jobs of a sweep; with a launcher of hydra, hand them to it."""
    if any(option.startswith("hydra/launcher=") for option in options):
        os.execv(sys.executable, [sys.executable, "-m", "dtcp.train", "--multirun", *options])
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from dtcp.sweep import run_sweep

    try:
        sys.exit(run_sweep(options, num_ranks))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {error}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)
