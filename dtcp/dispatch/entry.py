"""Enter a frame: in the ``with`` of the user, and again in every recomputation of what ran in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dtcp.dispatch.frames import Frame, current
from dtcp.dispatch.redirect import redirected_attention
from dtcp.recompute import Restore, captures_state, restores_absence


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Make ``frame`` the current one of this thread, with redirected attention and local buffers."""
    previous = current.frame
    with redirected_attention(), frame.buffers.local():
        current.frame = frame
        try:
            yield
        finally:
            current.frame = previous


@contextlib.contextmanager
def _left() -> Iterator[None]:
    """Leave the context of this thread and those around it for a while, buffers too."""
    previous = current.frame
    if previous is None:
        yield
        return
    with previous.buffers.whole():
        current.frame, current.is_left = None, True
        try:
            yield
        finally:
            current.frame, current.is_left = previous, False


@contextlib.contextmanager
def _exchanged(frame: Frame) -> Iterator[None]:
    with _left(), entered(frame):
        yield


@captures_state
def _reenter_current_frame() -> Restore:
    frame = current.frame
    if frame is None:
        return _left

    def restore() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if current.frame is frame else _exchanged(frame)

    return restore


restores_absence(_left)  # what was computed before the first context
