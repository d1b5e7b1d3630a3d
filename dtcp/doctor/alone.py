"""The world of the reference: one rank, whatever the process group says, and nobody to communicate with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@contextlib.contextmanager
def alone(*, sees_world: bool = False) -> Iterator[list[str]]:
    """Inside it the model is on rank 0 of 1 rank, and what communicates raises ``ValueError``.

    The process group is that of the job, so a model that asks it for its size would get the job's, and be as wrong
    here as there. All ways to ask, ``dist.get_world_size()`` under whatever name and for any group, end in the group.

    Args:
        sees_world: Leave sizes and ranks as they are.

    Yields:
        What was asked for, as it comes.
    """
    asked: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_NoCommunication())
        if not sees_world:
            stack.enter_context(_answers("size", 1, asked))
            stack.enter_context(_answers("rank", 0, asked))
            there = {name: value for name, value in _ENVIRONMENT.items() if name in os.environ}
            stack.enter_context(mock.patch.dict(os.environ, there))
        yield asked


@contextlib.contextmanager
def _answers(method: str, value: int, asked: list[str]) -> Iterator[None]:
    """Have every process group say that its ``method()`` is ``value``."""
    group: Any = torch._C._distributed_c10d.ProcessGroup

    def answer(self: Any) -> int:
        asked.append(method)
        return value

    before = vars(group)[method]
    setattr(group, method, answer)
    try:
        yield
    finally:
        setattr(group, method, before)


class _NoCommunication(TorchDispatchMode):
    """Raises where the model communicates: this rank alone runs it, and would wait for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ValueError(
                f"the model calls a collective of its own ({func.name()}), in its forward or in a hook, so it has no "
                "meaning on one rank and the doctor cannot compare; leave communication to parallelize and to plans"
            )
        return func(*args, **(kwargs or {}))
