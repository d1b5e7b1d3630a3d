"""Folders with a model in Hugging Face's form: ``config.json`` and safetensors files, one or several with an index."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9


def open_tensors(folder: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield every tensor's name with the open file that has it."""
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX_FILE
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {WEIGHTS_FILE}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; give a folder with all files of the model")
        try:
            file = stack.enter_context(safe_open(folder / name, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}; get the file again") from error
        keys = file.keys()
        yield from ((key, file) for key in keys)


def write_tensors(
    folder: str | Path,
    shapes: Mapping[str, torch.Size],
    read: Callable[[list[str]], dict[str, Tensor]],
    content: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    is_writer: bool = True,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors and ``config.json``; memory holds one file's tensors.

    Args:
        folder: Made if missing; files of the same names are overwritten.
        shapes: Of every tensor, by Hugging Face's name.
        read: Gives the tensors of these names; called on every rank, in the same order.
        content: Of ``config.json``.
        dtype: What the tensors are rounded to.
        is_writer: Whether this rank writes; all ranks call, one is the writer.
        max_file_bytes: The tensors go into several files where they are more.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    files = _deal_into_files(sizes, max_file_bytes)
    for file, names in files.items():
        tensors = read(names)
        if is_writer:
            tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if is_writer:
        if len(files) > 1:
            index = {name: file for file, names in files.items() for name in names}
            total = {"total_size": sum(sizes.values())}
            (folder / INDEX_FILE).write_text(json.dumps({"metadata": total, "weight_map": index}))
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
        for file in files:  # which safetensors leaves to their owner alone
            shutil.copymode(folder / CONFIG_FILE, folder / file)


def _deal_into_files(sizes: dict[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Names by file, in order, as many in a file as fit; Hugging Face's names of files."""
    groups: list[list[str]] = []
    left = -math.inf
    for name, size in sizes.items():
        if size > left:
            groups.append([])
            left = max_file_bytes
        groups[-1].append(name)
        left -= size
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}
