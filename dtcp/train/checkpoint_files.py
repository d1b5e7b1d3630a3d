"""A checkpoint on disk: whole or not there, described, and checked before anything of it is used.

A checkpoint is a folder ``step_00000010`` with the files of torch.distributed.checkpoint and ``checkpoint.json``, which
says what was trained and holds the size and CRC-32 of each file. It is written as ``step_00000010.partial`` and renamed
when the files of all ranks are on disk, so a job that dies while it saves leaves the one before as the newest.
"""

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

CHECKPOINTS_FOLDER = "checkpoints"
DESCRIPTION_FILE = "checkpoint.json"
FORMAT = 1
"""Of the description and of the names of the tensors; another one is refused."""

_WHOLE = re.compile(r"step_\d{8,}")
_LEFT_OVER = re.compile(r"step_\d{8,}\.(partial|removed)")
_PIECE_BYTES = 16 * 2**20


class AtomicWriter(FileSystemWriter):
    """torch's writer of files, which shows the checkpoint only when it is whole, and then deletes the oldest ones.

    Every rank makes one for each save. ``finish`` runs on one rank, when all have written.
    """

    def __init__(self, folder: Path, description: dict[str, Any], *, keep: int) -> None:
        """Choose where to write.

        Args:
            folder: Where the whole checkpoint is going to be.
            description: What `read_description` returns later; JSON types.
            keep: Checkpoints that stay, this one counted; 0 keeps all.
        """
        self._folder = folder
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._description = description
        self._keep = keep
        super().__init__(self._partial, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and beside them their sizes and checksums."""
        written = super().write_data(plan, planner)
        written.wait()
        prefix = plan.storage_data.prefix
        files = sorted(self._partial.glob(f"{prefix}*.distcp"))
        _write(self._partial / f"{prefix}files.json", json.dumps({file.name: measure(file) for file in files}))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Describe the checkpoint, show it, and delete the oldest; a failure reaches every rank."""
        super().finish(metadata, results)
        files = {".metadata": measure(self._partial / ".metadata")}
        for listing in sorted(self._partial.glob("__*_files.json")):
            files |= json.loads(listing.read_text())
            listing.unlink()
        write_description(self._partial, self._description | {"format": FORMAT, "files": files})
        self._partial.rename(self._folder)
        _sync_folder(self._folder.parent)
        if self._keep:
            for old in whole_checkpoints(self._folder.parent)[: -self._keep]:
                remove(old)


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` optimizer steps is."""
    return checkpoints / f"step_{step:08d}"


def whole_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a run's folder of them, oldest first; half-written ones are not among them."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _WHOLE.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a whole checkpoint was made."""
    return int(checkpoint.name.removeprefix("step_"))


def remove_left_overs(checkpoints: Path) -> None:
    """Delete what a job that died while saving or deleting has left."""
    if checkpoints.is_dir():
        for path in list(checkpoints.iterdir()):
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that is half deleted is never taken for a whole one."""
    away = checkpoint.with_name(f"{checkpoint.name}.removed")
    checkpoint.rename(away)
    shutil.rmtree(away)


def find_checkpoint(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, or the newest one of the run ``path``.

    Raises:
        ValueError: If it is neither.
    """
    if (path / DESCRIPTION_FILE).is_file():
        return path
    if found := whole_checkpoints(path / CHECKPOINTS_FOLDER):
        return found[-1]
    what = "is neither a checkpoint nor a run with one" if path.is_dir() else "does not exist"
    raise ValueError(f"{path} {what}; name a folder <run>/{CHECKPOINTS_FOLDER}/step_… or <run>")


def write_description(checkpoint: Path, body: dict[str, Any]) -> None:
    """Write ``checkpoint.json``, with a checksum of its own."""
    text = json.dumps(body, sort_keys=True)
    _write(checkpoint / DESCRIPTION_FILE, json.dumps({"crc32": zlib.crc32(text.encode()), "body": body}, indent=1))


def read_description(checkpoint: Path) -> dict[str, Any]:
    """Return what was said about a checkpoint when it was made.

    Raises:
        ValueError: If it is no checkpoint of ours, damaged, or of another format.
    """
    path = checkpoint / DESCRIPTION_FILE
    if not path.is_file():
        if _WHOLE.fullmatch(checkpoint.name):
            raise damaged(checkpoint, f"it has no {DESCRIPTION_FILE}")
        raise ValueError(f"{checkpoint} is not a checkpoint of dtcp: it has no {DESCRIPTION_FILE}; name another folder")
    try:
        read = json.loads(path.read_text())
        body, checksum = read["body"], read["crc32"]
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(checkpoint, f"{DESCRIPTION_FILE} cannot be read ({error})") from error
    if zlib.crc32(json.dumps(body, sort_keys=True).encode()) != checksum:
        raise damaged(checkpoint, f"{DESCRIPTION_FILE} has another checksum than when it was written")
    if body["format"] != FORMAT:
        raise ValueError(
            f"{checkpoint} has format {body['format']}, written by dtcp {body['version']}; this version reads format "
            f"{FORMAT}; resume with that version"
        )
    return body


def check_files(checkpoint: Path, description: dict[str, Any], *, rank: int = 0, world_size: int = 1) -> None:
    """Read this rank's part of the files and compare them with what was written.

    Raises:
        ValueError: Naming the first file that is missing or differs.
    """
    for name, (size, checksum) in sorted(description["files"].items())[rank::world_size]:
        path = checkpoint / name
        if not path.is_file():
            raise damaged(checkpoint, f"{name} is missing")
        if path.stat().st_size != size:
            raise damaged(checkpoint, f"{name} has {path.stat().st_size} bytes, {size} were written")
        if measure(path)[1] != checksum:
            raise damaged(checkpoint, f"{name} has another checksum than when it was written")


def damaged(checkpoint: Path, what: str) -> ValueError:
    """The error for a checkpoint that is not what was written; names the one before it as the cure."""
    others = [path for path in whole_checkpoints(checkpoint.parent) if path.name < checkpoint.name]
    cure = f"delete it to go on from {others[-1].name}" if others else "delete it, or name another one"
    return ValueError(f"the checkpoint {checkpoint} is damaged: {what}; {cure}")


def measure(path: Path) -> list[int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return [size, checksum]


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Have a rename reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
