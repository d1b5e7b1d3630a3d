"""``F.multi_head_attention_forward`` with ``need_weights=True``, which never asks for attention, is refused."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F

from dtcp.dispatch.frames import current

function = F.multi_head_attention_forward
_of_torch = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def checked(*args: Any, **kwargs: Any) -> Any:
    """Torch's own, unless it would form the weights by hand inside a context."""
    frame = current.frame
    need_weights = kwargs.get("need_weights", args[15] if len(args) > 15 else True)
    if frame is not None and not frame.is_plain and need_weights:
        raise NotImplementedError(
            "nn.MultiheadAttention with need_weights=True forms the attention weights of this rank's tokens only; pass "
            "need_weights=False inside context_parallel"
        )
    return _of_torch(*args, **kwargs)


def _call_checked(*args: Any, **kwargs: Any) -> Any:
    from dtcp.dispatch.multihead import checked  # this code runs with the globals of torch.nn.functional

    return checked(*args, **kwargs)


@contextlib.contextmanager
def checked_multihead() -> Iterator[None]:
    """Exchange the code of torch's function, not the function, which others have imported by name."""
    function.__code__, function.__defaults__ = _call_checked.__code__, None
    try:
        yield
    finally:
        function.__code__, function.__defaults__ = _of_torch.__code__, _of_torch.__defaults__
