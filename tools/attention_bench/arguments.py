"""What the command lines of the benchmark and of its paper model share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Exits with 2 and one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def check_json(parser: Parser, path: str | None) -> None:
    """Refuse a file that cannot be written before anything is computed; None and ``-`` are no file."""
    folder = Path(path or "-").parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path or "-").is_dir():
        parser.error(f"--json needs a file in a folder that can be written, got {path}")
