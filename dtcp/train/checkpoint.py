"""Save a training job while it goes on, and go on from what was saved, on any mesh.

Saved are the parameters, the optimizer's tensors by parameter name, and how far the job is. The data's position and the
learning rate follow from the step, and all other state from the configuration.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from dtcp.models.init import plain_name
from dtcp.train.checkpoint_files import (
    CHECKPOINTS_FOLDER,
    AtomicWriter,
    check_files,
    checkpoint_folder,
    damaged,
    remove_left_overs,
)
from dtcp.train.config import CheckpointConfig
from dtcp.train.session import JobError, agreed, one_line


class Checkpointer:
    """Saves one job, on every rank alike, at most one checkpoint at a time.

    An asynchronous save copies the state to CPU memory before it returns; the files are written by a thread, whose
    collectives have a process group of their own. If it fails, ``has_failed`` turns true on each rank in its own time:
    the caller stops all ranks after one step, and `finish` then raises on all of them.
    """

    def __init__(
        self, config: CheckpointConfig, run_folder: Path, model: nn.Module, optimizer: Any, *, step: int = 0
    ) -> None:
        """Make the folder and delete what a job that died has left in it. Collective.

        Args:
            config: With ``every`` 0 nothing is ever saved, and no group is made.
            run_folder: Of the job; checkpoints go into ``checkpoints`` in it.
            model: With its final parameters.
            optimizer: Of ``model``.
            step: Steps taken so far, which need no saving.

        Raises:
            OSError: If the folder cannot be made; JobError on all ranks of several.
        """
        self._config = config
        self._checkpoints = run_folder / CHECKPOINTS_FOLDER
        self._model = model
        self._optimizer = optimizer
        self._pending: Future[Any] | None = None
        self._saved_step = step
        self._group: dist.ProcessGroup | None = None
        if config.every == 0:
            return
        with agreed():
            if dist.get_rank() == 0:
                _make_folder(self._checkpoints)
        self._group = dist.new_group(backend="gloo")

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that a save in the background has failed."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save_if_due(self, step: int, describe: Callable[[], dict[str, Any]]) -> None:
        """Save after every ``config.every`` steps; see `save`."""
        if self._config.every and step % self._config.every == 0:
            self.save(step, describe())

    def save(self, step: int, description: dict[str, Any], *, asynchronous: bool | None = None) -> None:
        """Save the state after ``step`` steps. Collective.

        Args:
            step: Optimizer steps taken.
            description: JSON types; `dtcp.train.checkpoint_files.read_description` returns it.
            asynchronous: None: as configured.

        Raises:
            OSError: If this save, or the asynchronous one before, failed; JobError on all ranks of several.
        """
        self.wait()
        if self._saved_step == step:
            return
        state = state_tensors(self._model, self._optimizer)
        writer = AtomicWriter(checkpoint_folder(self._checkpoints, step), description, keep=self._config.keep)
        if self._config.asynchronous if asynchronous is None else asynchronous:
            saving = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            self._pending = saving if isinstance(saving, Future) else saving.upload_completion
        else:
            self._pending = _run(lambda: dcp.save(state, storage_writer=writer, process_group=self._group))
            self.wait()
        self._saved_step = step

    def wait(self) -> None:
        """Return when no save is in flight. Collective.

        Raises:
            OSError: If it failed; JobError on all ranks of several.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.exception()
        with agreed():
            if error is not None:
                raise _save_error(error, self._checkpoints)

    def finish(self, step: int, describe: Callable[[], dict[str, Any]]) -> None:
        """Save the last step if it is not saved yet, and wait; see `save`."""
        self.wait()
        if self._config.every:
            self.save(step, describe(), asynchronous=False)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # All ranks raise a JobError together, so the save in flight can end; any other error is one rank's own.
        if kind is not None and issubclass(kind, JobError) and self._pending is not None:
            self._pending.exception()


def check_checkpoint_config(config: CheckpointConfig) -> None:
    """Refuse numbers that make no sense."""
    if config.every < 0:
        raise ValueError(f"checkpoint.every has to be at least 0, got {config.every}; 0 saves nothing")
    if config.keep < 0:
        raise ValueError(f"checkpoint.keep has to be at least 0, got {config.keep}; 0 keeps all")
    if not config.resume:
        raise ValueError("checkpoint.resume has to be auto, never or a folder, got ''")


def state_tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return the tensors of a job by names that no mesh changes; loading into them in place restores the job.

    Names are ``model.<parameter>`` and ``optimizer.<parameter>.<key>``, without what wrappers insert. An
    optimizer that has not stepped yet gets its state, all zeros. Learning rates and other hyperparameters are not
    among them: they follow from the configuration and the step.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    tensors: dict[str, Any] = {f"model.{plain_name(name)}": value for name, value in model_state.items()}
    for name, value in optimizer_state.items():
        if not name.startswith("param_groups."):
            tensors[f"optimizer.{plain_name(name.removeprefix('state.'))}"] = value
    for name, value in tensors.items():
        assert isinstance(value, Tensor), f"{name} is {type(value).__name__}, which in-place loading cannot restore"
    return tensors


def load_tensors(
    checkpoint: Path, description: dict[str, Any], tensors: dict[str, Tensor], *, is_checked: bool = False
) -> None:
    """Fill ``tensors`` in place from a checkpoint, after comparing its files with what was written. Collective.

    Args:
        checkpoint: The folder.
        description: Its description.
        tensors: By name; DTensors on any mesh, or plain and then equal on all ranks.
        is_checked: The files were compared before.

    Raises:
        ValueError: If files are damaged, or names, shapes or dtypes differ; JobError on all ranks of several.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with agreed():
        if not is_checked:
            check_files(checkpoint, description, rank=rank, world_size=world_size)
    reader = dcp.FileSystemReader(checkpoint)
    names = _names_of_all_ranks(tensors)
    with agreed():
        _check_tensors(checkpoint, _read_index(checkpoint, reader), tensors, names)
    error: BaseException | None = None
    with agreed():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(tensors, storage_reader=reader)
        except CheckpointException as caught:  # raised on all ranks, after its own exchange
            error = caught
        if error is not None:
            raise damaged(checkpoint, _first_failure(error)) from error


def _make_folder(checkpoints: Path) -> None:
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        remove_left_overs(checkpoints)
    except OSError as error:
        raise OSError(
            f"cannot make {checkpoints}: {error.strerror or error}; set run.dir to a folder you can write to, or "
            "checkpoint.every=0"
        ) from error


def _read_index(checkpoint: Path, reader: dcp.FileSystemReader) -> dict[str, Any]:
    try:
        return reader.read_metadata().state_dict_metadata
    except Exception as error:  # unpickling raises anything
        raise damaged(checkpoint, f"its index .metadata cannot be read ({one_line(error)})") from error


def _names_of_all_ranks(tensors: dict[str, Tensor]) -> set[str]:
    """Names that some rank has: ranks may hold different parameters."""
    if not dist.is_initialized():
        return set(tensors)
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(tensors))
    return {name for held in names for name in held}


def _check_tensors(checkpoint: Path, index: dict[str, Any], tensors: dict[str, Tensor], names: set[str]) -> None:
    """Compare names, global shapes and dtypes; more in the checkpoint than asked for is no error for an export."""
    missing = sorted(set(tensors) - set(index))
    wants_all = any(name.startswith("optimizer.") for name in names)
    unknown = sorted(set(index) - names) if wants_all else []
    if missing or unknown:
        lists = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        lists += [f"{len(unknown)} that the job has not, such as {unknown[0]}"] if unknown else []
        raise ValueError(
            f"the checkpoint {checkpoint} is of another model: tensors {' and '.join(lists)}; use the configuration it "
            "was made with, or name another one"
        )
    for name, tensor in tensors.items():
        saved = index[name]
        assert isinstance(saved, TensorStorageMetadata), saved
        if saved.size != tensor.size() or saved.properties.dtype != tensor.dtype:
            raise ValueError(
                f"the checkpoint {checkpoint} is of another model: {name} is {tuple(saved.size)} "
                f"{saved.properties.dtype}, the job has {tuple(tensor.size())} {tensor.dtype}; use the configuration "
                "it was made with, or name another one"
            )


def _run(save: Callable[[], Any]) -> Future[Any]:
    """Call and return the outcome like an asynchronous save does."""
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(save())
    except (Exception, CheckpointException) as error:
        outcome.set_exception(error)
    return outcome


def _save_error(error: BaseException, checkpoints: Path) -> OSError:
    return OSError(
        f"cannot save a checkpoint in {checkpoints}: {_first_failure(error)}; make room there or set run.dir to "
        "another disk, and start the job again (the checkpoints before are whole)"
    )


def _first_failure(error: BaseException) -> str:
    """One line of the error of the first failing rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"{one_line(cause)} (rank {rank})"
    return one_line(error)
