"""What attention inside a context does, and which context is the current one of a thread.

A frame outlives its ``with``: recomputation in a later backward enters it again (``reentered``), with its buffers
local once more. Nothing is read from "the current context" later than the call that needs it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dtcp.attention.calls import CallCounter
from dtcp.dispatch.buffers import LocalBuffers
from dtcp.layout import SequenceLayout


@dataclass(eq=False)
class Frame:
    """One context, as attention sees it.

    Attributes:
        state: The layout and the number of ``counter``, for the attention op.
        is_plain: Nothing is cut (one rank): calls are torch's own.
    """

    group_name: str
    layout: SequenceLayout
    strategy: str
    kernel: str
    counter: CallCounter
    state: Tensor
    is_plain: bool
    buffers: LocalBuffers


class _Current(threading.local):
    frame: Frame | None = None


current = _Current()


@contextlib.contextmanager
def entered(frame: Frame, *, save_locally: bool = True) -> Iterator[None]:
    """Make ``frame`` the current one of this thread, with redirected attention and local buffers.

    Args:
        save_locally: Keep the local contents of buffers for what autograd saves meanwhile. Not while a non-reentrant
            checkpoint recomputes: that collects what is saved by hooks of its own, which ours would hide.
    """
    from dtcp.dispatch.redirect import redirected_attention

    previous = current.frame
    with redirected_attention(), frame.buffers.local(save_locally=save_locally):
        current.frame = frame
        try:
            yield
        finally:
            current.frame = previous
