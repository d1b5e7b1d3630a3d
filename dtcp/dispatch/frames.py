"""What attention inside a context does, and which context is the current one of a thread.

A frame outlives its ``with``: recomputation in a later backward enters it again, with its buffers local once
more. Nothing is read from "the current context" later than the call that needs it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from dtcp.attention.arguments import ResolvedStrategy
from dtcp.attention.calls import CallCounter
from dtcp.attention.dropout import CallDropout
from dtcp.attention.scores import NO_MASKS, CallMasks
from dtcp.dispatch.buffers import LocalBuffers
from dtcp.dropout_hash import keys_of_place
from dtcp.layout import SequenceLayout


@dataclass(eq=False)
class Frame:
    """One context, as attention sees it.

    Attributes:
        state: The layout and the number of ``counter``, for the attention op.
        is_plain: Nothing is cut (one rank): calls are torch's own.
        masks: Of every call, besides what it says itself.
        attn_mask_queries: Which queries an ``attn_mask`` is of: "local", "global", or "" if nobody said.
        dropout_keys: int64 (B, S_local) of the next call that drops weights; None if nobody told step and rows.
        head_offset: Global index of the first head here.
    """

    group_name: str
    layout: SequenceLayout
    strategy: ResolvedStrategy
    kernel: str
    counter: CallCounter
    state: Tensor
    is_plain: bool
    buffers: LocalBuffers
    masks: CallMasks = NO_MASKS
    attn_mask_queries: str = ""
    dropout_keys: Tensor | None = None
    head_offset: int = 0

    def is_torchs(self, dropout_p: float) -> bool:
        """Whether a call is torch's own: nothing is cut, and no mask has to be the one that it is on other meshes."""
        return self.is_plain and not (dropout_p and self.dropout_keys is not None)

    def take_dropout(self, dropout_p: float) -> tuple[CallDropout | None, float]:
        """Return what a call drops, None if it is not known, and then the probability asked for in vain, else 0.

        The next call drops others.

        Modules have no names here, so calls are told apart by their order: the keys of one are made of those of the
        call before. A tensor, not a number: a graph is good for every call. Recomputation begins with the keys that
        its forward began with.
        """
        keys = self.dropout_keys
        if not dropout_p or keys is None:
            return None, dropout_p
        self.dropout_keys = keys_of_place(keys, 1)
        return CallDropout(dropout_p, keys, self.head_offset), 0.0


class Entry:
    """Of this thread into a frame, or out of all of them (None), until it ends; a frame may be entered again."""

    def __init__(self, frame: Frame | None) -> None:
        self.frame = frame


class _Current(threading.local):
    frame: Frame | None = None  # of the last entry
    is_left = False  # for a while, for what ran outside; the context of this thread has not ended

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def enter(self, frame: Frame | None) -> Entry:
        """Make ``frame`` the current one until `leave`."""
        entry = Entry(frame)
        self.entries.append(entry)
        self.frame = frame
        return entry

    def leave(self, entry: Entry) -> bool:
        """End an entry; return whether it was the last of this thread, as it should be."""
        if entry not in self.entries:  # a generator that is finalized in another thread
            return False
        is_last = self.entries[-1] is entry
        self.entries.remove(entry)
        self.frame = self.entries[-1].frame if self.entries else None
        return is_last


current = _Current()


def is_traced(x: Tensor) -> bool:
    """Whether ``x`` stands for another tensor while a graph is made."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(x, (FakeTensor, FunctionalTensor))
