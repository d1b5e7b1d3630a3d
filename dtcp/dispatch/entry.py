"""Enter a frame: in the ``with`` of the user, and again in every recomputation of what ran in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dtcp.dispatch.frames import Frame, current
from dtcp.dispatch.redirect import redirected_attention
from dtcp.recompute import Restore, captures_state


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


@captures_state
def _reenter_current_frame() -> Restore | None:
    frame = current.frame
    if frame is None:
        return None

    def restore() -> contextlib.AbstractContextManager[None]:
        if current.frame is frame:
            return contextlib.nullcontext()
        return entered(frame)

    return restore
