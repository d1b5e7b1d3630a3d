"""Tensors of the caller that hold this rank's part of the sequence for a while.

The tensor object stays, its memory does not: it is pointed at separate local storage and back. Nothing is written to
the caller's memory, so views and expanded tensors are as good as any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dtcp.containers import named_tensors


class LocalBuffers:
    """The buffers of one context, each with its whole and its local contents.

    Args:
        tensors: (tensor, its local contents) of each buffer, no tensor twice.
        kept: Tensors that stay local when the context exits.
        containers: TensorDicts that hold some of them, with their batch size while they are local.
    """

    def __init__(
        self, tensors: list[tuple[Tensor, Tensor]], kept: list[Tensor], containers: list[tuple[Any, list[int]]]
    ) -> None:
        self._tensors = tensors
        self._kept = {id(tensor) for tensor in kept}
        self._containers = containers
        # Their storages, by address; the tensors above keep them alive and the addresses true.
        self._storages = {local.untyped_storage()._cdata for _, local in tensors}

    @contextlib.contextmanager
    def local(self, *, save_locally: bool) -> Iterator[None]:
        """Hold the local contents inside the block, and what was there before after it, also after an exception."""
        if not self._tensors:
            yield
            return
        before = [_Contents(tensor) for tensor, _ in self._tensors]
        batch_sizes = [container.batch_size for container, _ in self._containers]
        try:
            for tensor, local in self._tensors:
                _point_at(tensor, local)
            for container, batch_size in self._containers:
                container.batch_size = batch_size
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack) if save_locally else _nothing():
                yield
        finally:
            for contents in before:
                contents.restore()
            for (container, _), batch_size in zip(self._containers, batch_sizes, strict=True):
                container.batch_size = batch_size

    def release(self) -> None:
        """At the end of the context: leave those that the caller wants to keep with their local contents."""
        for tensor, local in self._tensors:
            if id(tensor) in self._kept:
                _point_at(tensor, local)

    def _pack(self, saved: Tensor) -> tuple[Tensor, int | None]:
        """Autograd saves the tensor object, which will be whole again: save an alias of the local memory instead.

        For every other tensor this does what autograd does without hooks: remember the version.
        """
        if saved.untyped_storage()._cdata in self._storages:
            return saved.detach(), None
        return saved, None if saved.is_inference() else saved._version


def _unpack(packed: tuple[Tensor, int | None]) -> Tensor:
    saved, version = packed
    if version is not None and saved._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{saved.type()} of shape {list(saved.shape)} is at version {saved._version}; expected version {version}"
        )
    return saved


class _Contents:
    """What a tensor holds now, to be put back."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._alias = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def restore(self) -> None:
        self._tensor.data = self._alias
        if self._version is not None:
            # What was saved for a backward before the context holds again what it held then.
            torch._C._autograd._unsafe_set_version_counter((self._tensor,), (self._version,))


def _point_at(tensor: Tensor, contents: Tensor) -> None:
    tensor.data = contents
    if not tensor.is_inference():
        # A backward inside the context that saved the whole contents before it ends in torch's own error.
        torch.autograd.graph.increment_version(tensor)


_nothing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def refuse_graph(buffers: Any) -> None:
    """Raise ValueError if a buffer needs a gradient: its contents cannot be exchanged behind autograd's back."""
    for name, tensor in named_tensors(buffers):
        if tensor.requires_grad:
            raise ValueError(
                f"buffer {name} needs a gradient (shape {tuple(tensor.shape)}), so it cannot be cut in place; cut it "
                "by a differentiable copy inside the context: x = cp.shard(x, dim=...)"
            )
