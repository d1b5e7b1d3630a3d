"""Enter a frame: in the ``with`` of the user, and again in every recomputation of what ran in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from dtcp.dispatch.frames import Frame, current
from dtcp.dispatch.redirect import redirected_attention
from dtcp.recompute import Restore, captures_state, restores_absence


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Make ``frame`` the current one of this thread, with redirected attention and local buffers."""
    with redirected_attention(), frame.buffers.local():
        entry, is_last = current.enter(frame), False
        try:
            yield
        finally:
            is_last = current.leave(entry)
        if not is_last:
            raise RuntimeError(
                "a context_parallel ended that was not the innermost of its thread, so attention in between was of the "
                "wrong context; end contexts in the reverse order. A generator or a coroutine that is suspended inside "
                "one leaves it active for all that its thread does meanwhile: enter and leave within one step of it"
            )


@contextlib.contextmanager
def _left() -> Iterator[None]:
    """Leave the context of this thread and those around it for a while, buffers too."""
    previous = current.frame
    if previous is None:
        yield
        return
    with previous.buffers.whole():
        entry, current.is_left = current.enter(None), True
        try:
            yield
        finally:
            current.leave(entry)
            current.is_left = False


@contextlib.contextmanager
def _exchanged(frame: Frame) -> Iterator[None]:
    with _left(), entered(frame):
        yield


@captures_state
def _reenter_current_frame() -> Restore:
    frame = current.frame
    if frame is None:
        return _left
    dropout_keys = frame.dropout_keys

    @contextlib.contextmanager
    def restore() -> Iterator[None]:
        with contextlib.nullcontext() if current.frame is frame else _exchanged(frame):
            # The reentrant kind restores around its forward too, without gradients: that goes on counting.
            if dropout_keys is None or not torch.is_grad_enabled():
                yield
                return
            later, frame.dropout_keys = frame.dropout_keys, dropout_keys
            try:
                yield
            finally:
                frame.dropout_keys = later

    return restore


restores_absence(_left)  # what was computed before the first context
