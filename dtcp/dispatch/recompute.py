"""Activation checkpointing: what is recomputed in a backward runs in the context of its own forward.

By then the ``with`` may have ended, another one may be active, and buffers are whole again. So while a context is
active, torch's checkpoint is given functions that enter their frame again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from dtcp.dispatch import frames


def _in_frame(fn: Callable[..., Any], *, save_locally: bool) -> Callable[..., Any]:
    frame = frames.current.frame
    if frame is None:
        return fn

    def run(*args: Any, **kwargs: Any) -> Any:
        if frames.current.frame is frame:
            return fn(*args, **kwargs)
        with frames.entered(frame, save_locally=save_locally):
            return fn(*args, **kwargs)

    return run


@contextlib.contextmanager
def checkpoint_reenters() -> Iterator[None]:
    """Patch both kinds of ``torch.utils.checkpoint.checkpoint``, below the names that users import."""
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    function = torch_checkpoint.CheckpointFunction

    def reentering_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_in_frame(fn, save_locally=False), *args, **kwargs)

    class ReenteringCheckpointFunction:
        @staticmethod
        def apply(fn: Callable[..., Any], *args: Any) -> Any:
            return function.apply(_in_frame(fn, save_locally=True), *args)

    torch_checkpoint._checkpoint_without_reentrant_generator = reentering_generator
    torch_checkpoint.CheckpointFunction = ReenteringCheckpointFunction  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = generator
        torch_checkpoint.CheckpointFunction = function  # type: ignore[misc]
