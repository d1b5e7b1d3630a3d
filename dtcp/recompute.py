"""Activation checkpointing: what a backward recomputes finds the state that its own forward found.

By then a context may have ended, another one may be active, and the model may know the layout of a later step. So
while somebody has such state, the functions that torch's checkpoint gets are wrapped to restore it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

Restore = Callable[[], AbstractContextManager[None]]
"""Called in the backward, around what is recomputed."""

_captures: list[Callable[[], Restore | None]] = []
_absences: list[Restore] = []


def captures_state(capture: Callable[[], Restore | None]) -> Callable[[], Restore | None]:
    """Register, at import, what remembers state when a function is checkpointed; None if there is nothing."""
    _captures.append(capture)
    return capture


def restores_absence(restore: Restore) -> Restore:
    """Register, at import, what takes state away around a recomputation whose forward nobody captured."""
    _absences.append(restore)
    return restore


@contextlib.contextmanager
def _restored(restores: list[Restore]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for restore in restores:
            stack.enter_context(restore())
        yield


def _restoring(fn: Callable[..., Any]) -> Callable[..., Any]:
    restores = [restore for capture in _captures if (restore := capture()) is not None]

    def run(*args: Any, **kwargs: Any) -> Any:
        with _restored(restores):
            return fn(*args, **kwargs)

    run.is_restoring = True  # type: ignore[attr-defined]
    return run


def _is_restoring(fn: Any) -> bool:
    return getattr(fn, "is_restoring", False)


_frame = torch_checkpoint._CheckpointFrame  # has what a non-reentrant checkpoint, of any kind, will recompute
_init = _frame.__init__
_run = torch_checkpoint._run_fn_with_dynamo_disabled
_function = torch_checkpoint.CheckpointFunction
_forward, _backward = _function.forward, _function.backward


def _restoring_init(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _init(self, _restoring(recompute_fn), *args, **kwargs)


def _run_restoring(recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _restored([] if _is_restoring(recompute) else _absences):
        return _run(recompute, *args, **kwargs)


def _restoring_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
    return _forward(ctx, _restoring(run_function), *args)


def _restoring_backward(ctx: Any, *grads: Any) -> Any:
    run_function = ctx.run_function
    if not _is_restoring(run_function):  # its forward came before the patch

        def run_in_absence(*args: Any) -> Any:
            with _restored(_absences):
                return run_function(*args)

        ctx.run_function = run_in_absence
    try:
        return _backward(ctx, *grads)
    finally:
        ctx.run_function = run_function


class _CheckpointPatch:
    """Both kinds of ``torch.utils.checkpoint.checkpoint``, patched below the names that users and torch import.

    What makes the function to recompute, and what calls it: the latter for those made before the patch.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_users = 0

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                _frame.__init__ = _restoring_init  # type: ignore[method-assign]
                torch_checkpoint._run_fn_with_dynamo_disabled = _run_restoring  # type: ignore[assignment]
                _function.forward = staticmethod(_restoring_forward)  # type: ignore[method-assign]
                _function.backward = staticmethod(_restoring_backward)  # type: ignore[method-assign]

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                _frame.__init__ = _init  # type: ignore[method-assign]
                torch_checkpoint._run_fn_with_dynamo_disabled = _run
                _function.forward = staticmethod(_forward)  # type: ignore[method-assign]
                _function.backward = staticmethod(_backward)  # type: ignore[method-assign]


checkpoint_patch = _CheckpointPatch()
"""Acquired for as long as there is state to restore, and released as often."""


_stateful: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""Modules that were told what comes next, and the attributes that hold it."""


def restored_in_recomputation(module: nn.Module, names: tuple[str, ...]) -> None:
    """From now on, whatever is checkpointed finds the attributes ``names`` of ``module`` as its forward found them."""
    if module not in _stateful:
        _stateful[module] = names
        checkpoint_patch.acquire()
        weakref.finalize(module, checkpoint_patch.release)


def _set_attributes(values: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, attributes in values:
        for name, value in attributes.items():
            setattr(module, name, value)


@captures_state
def _capture_modules() -> Restore | None:
    if not _stateful:
        return None
    states = [(weakref.ref(m), {name: getattr(m, name) for name in names}) for m, names in _stateful.items()]

    @contextlib.contextmanager
    def restore() -> Iterator[None]:
        alive = [(module, values) for ref, values in states if (module := ref()) is not None]
        later = [(module, {name: getattr(module, name) for name in values}) for module, values in alive]
        _set_attributes(alive)
        try:
            yield
        finally:
            _set_attributes(later)

    return restore
