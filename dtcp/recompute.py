"""Activation checkpointing: what a backward recomputes finds the state that its own forward found.

By then a context may have ended, another one may be active, and the model may know the layout of a later step. So
while somebody has such state, the functions that torch's checkpoint gets are wrapped to restore it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

Restore = Callable[[], AbstractContextManager[None]]
"""Called in the backward, around what is recomputed."""

_captures: list[Callable[[], Restore | None]] = []


def captures_state(capture: Callable[[], Restore | None]) -> Callable[[], Restore | None]:
    """Register, at import, what remembers state when a function is checkpointed; None if there is nothing."""
    _captures.append(capture)
    return capture


def _restoring(fn: Callable[..., Any]) -> Callable[..., Any]:
    restores = [restore for capture in _captures if (restore := capture()) is not None]
    if not restores:
        return fn

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for restore in restores:
                stack.enter_context(restore())
            return fn(*args, **kwargs)

    return run


class _CheckpointPatch:
    """Both kinds of ``torch.utils.checkpoint.checkpoint``, patched below the names that users import."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_users = 0

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._install()

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                torch_checkpoint._checkpoint_without_reentrant_generator = self._generator
                torch_checkpoint.CheckpointFunction = self._function  # type: ignore[misc]

    def _install(self) -> None:
        self._generator = generator = torch_checkpoint._checkpoint_without_reentrant_generator
        self._function = function = torch_checkpoint.CheckpointFunction

        def restoring_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return generator(_restoring(fn), *args, **kwargs)

        class RestoringCheckpointFunction:
            @staticmethod
            def apply(fn: Callable[..., Any], *args: Any) -> Any:
                return function.apply(_restoring(fn), *args)

        torch_checkpoint._checkpoint_without_reentrant_generator = restoring_generator
        torch_checkpoint.CheckpointFunction = RestoringCheckpointFunction  # type: ignore[misc, assignment]


checkpoint_patch = _CheckpointPatch()
"""Acquired for as long as there is state to restore, and released as often."""
