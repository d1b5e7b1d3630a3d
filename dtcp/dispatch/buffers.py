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
from dtcp.dispatch.untraced import untraced


class LocalBuffers:
    """The buffers of one context, each with its whole and its local contents.

    Args:
        tensors: (tensor, its local contents) of each buffer, no tensor twice.
        kept: Tensors that stay local when the context exits.
        containers: TensorDicts that hold some of them, with their batch size while they are local.
        outer: The buffers of the context around this one, which are local whenever these are.
    """

    def __init__(
        self,
        tensors: list[tuple[Tensor, Tensor]],
        kept: list[Tensor],
        containers: list[tuple[Any, list[int]]],
        outer: LocalBuffers | None = None,
    ) -> None:
        self._buffers = [_Buffer(tensor, local) for tensor, local in tensors]
        self._kept = {id(tensor) for tensor in kept}
        self._containers = containers
        self._outer = outer
        self._num_active = 0
        # What buffers and containers held before the first of these.
        self._before: tuple[list[Tensor], list[Any]] = [], []
        # By the address of their local storage, which they keep alive; with those of the contexts around.
        self._by_storage: dict[int, _Buffer] = dict(outer._by_storage) if outer else {}
        self._by_storage |= {buffer.local.untyped_storage()._cdata: buffer for buffer in self._buffers}

    def cut_by(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` has the memory of a buffer of this context or one around it."""
        return tensor.untyped_storage()._cdata in self._by_storage

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Hold the local contents inside the block, and what was there before after it, also after an exception."""
        if not self._by_storage:
            yield
            return
        with contextlib.ExitStack() as stack:
            if self._outer and not self._outer._num_active:  # recomputation: the contexts around have ended too
                stack.enter_context(self._outer.local())
            stack.enter_context(self._pointed())
            stack.enter_context(_saving(self._pack))
            yield
        for buffer in self._buffers:
            if buffer.tensor.requires_grad:
                raise RuntimeError(
                    f"a buffer of context_parallel (shape {tuple(buffer.tensor.shape)}) was modified in place by "
                    "something that needs a gradient, which would end with the context; use an out-of-place operation"
                )

    @contextlib.contextmanager
    def _pointed(self) -> Iterator[None]:
        before = [buffer.tensor.detach() for buffer in self._buffers]
        were_local = [buffer.is_watched for buffer in self._buffers]
        batch_sizes = [container.batch_size for container, _ in self._containers]
        self._num_active += 1
        if self._num_active == 1:
            self._before = before, batch_sizes
        try:
            self._point_at_local()
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._before = [], []
            self._point_back_at(before, batch_sizes)
            for buffer, was_local in zip(self._buffers, were_local, strict=True):
                buffer.watch(was_local)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """The reverse of ``local``, inside it: hold what was there before this context and those around it."""
        with contextlib.ExitStack() as stack:
            if self._num_active:
                stack.enter_context(self._pointed_back())
            if self._outer:
                stack.enter_context(self._outer.whole())
            yield

    @contextlib.contextmanager
    def _pointed_back(self) -> Iterator[None]:
        num_active, self._num_active = self._num_active, 0
        before = self._before
        try:
            self._point_back_at(*before)
            with _saving(_packing_whole(before[0])):
                yield
        finally:
            self._num_active, self._before = num_active, before
            self._point_at_local()

    @untraced
    def _point_at_local(self) -> None:
        self._watch(False)
        for buffer in self._buffers:
            buffer.point_at_local()
        for container, batch_size in self._containers:
            container.batch_size = batch_size
        self._watch(True)

    @untraced
    def _point_back_at(self, before: list[Tensor], batch_sizes: list[Any]) -> None:
        self._watch(False)
        for buffer, contents in zip(self._buffers, before, strict=True):
            buffer.point_back_at(contents)
        for (container, _), size in zip(self._containers, batch_sizes, strict=True):
            container.batch_size = size

    @untraced
    def _watch(self, is_local: bool) -> None:
        # All at once, never between two that are pointed elsewhere: views of one base share their version.
        for buffer in self._buffers:
            buffer.watch(is_local)

    @untraced
    def release(self) -> None:
        """At the end of the context: leave those that the caller wants to keep with their local contents."""
        kept = [buffer for buffer in self._buffers if id(buffer.tensor) in self._kept]
        for buffer in kept:
            buffer.point_at_local()
        for buffer in kept:
            buffer.watch(True)
        for container, batch_size in self._containers:
            if all(id(tensor) in self._kept for _, tensor in named_tensors(container)):
                container.batch_size = batch_size

    @untraced
    def _pack(self, saved: Tensor) -> _Saved:
        buffer = self._by_storage.get(saved.untyped_storage()._cdata) if saved.layout == torch.strided else None
        if buffer is None:
            return saved, None, saved._version
        return saved.data, buffer, buffer.num_changes  # with a version of its own, not that of the tensor


def _saving(pack_here: Callable[[Tensor], _Saved]) -> torch.autograd.graph.saved_tensors_hooks:
    """Autograd saves the tensor object, which will be pointed elsewhere: save an alias of the memory instead.

    Only the innermost hooks are asked, so these ask those around them: of a checkpoint that recomputes, say.
    """
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if around is None:
        return torch.autograd.graph.saved_tensors_hooks(pack_here, _unpack)
    pack, unpack = around

    @untraced
    def pack_twice(saved: Tensor) -> _Saved:
        alias, buffer, version = pack_here(saved)
        return pack(alias), buffer, None if buffer is None else version

    @untraced
    def unpack_twice(packed: _Saved) -> Any:
        return unpack(_unpack(packed))

    return torch.autograd.graph.saved_tensors_hooks(pack_twice, unpack_twice)


def _packing_whole(contents: list[Tensor]) -> Callable[[Tensor], _Saved]:
    storages = {whole.untyped_storage()._cdata for whole in contents}

    @untraced
    def pack(saved: Tensor) -> _Saved:
        if saved.layout == torch.strided and saved.untyped_storage()._cdata in storages:
            return saved.data, None, None  # for a backward that follows at once: nobody changes it in between
        return saved, None, saved._version

    return pack


class _Buffer:
    """One of them, with how often its local contents were modified in place.

    Autograd counts modifications in the version of the tensor, which views and aliases share, and which also counts
    while the tensor is whole.
    """

    def __init__(self, tensor: Tensor, local: Tensor) -> None:
        self.tensor, self.local = tensor, local
        self._num_earlier_changes = 0
        self._watched_version: int | None = None  # that since which changes are those of the local contents
        self._has_version = not tensor.is_inference()

    @property
    def is_watched(self) -> bool:
        return self._watched_version is not None

    @property
    def num_changes(self) -> int:
        if self._watched_version is None:
            return self._num_earlier_changes
        return self._num_earlier_changes + self.tensor._version - self._watched_version

    @untraced
    def watch(self, is_local: bool) -> None:
        self._num_earlier_changes = self.num_changes
        self._watched_version = self.tensor._version if is_local and self._has_version else None

    @untraced
    def point_at_local(self) -> None:
        self.tensor.data = self.local
        if self._has_version:
            # A backward inside the context that saved the whole contents before it ends in torch's own error.
            torch.autograd.graph.increment_version(self.tensor)

    @untraced
    def point_back_at(self, contents: Tensor) -> None:
        self.tensor.data = contents
        if self._has_version:
            # What was saved for a backward before the context holds again what it held then. Our own change only is
            # taken back: others, of a base that the tensor is a view of, say, are still seen.
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.tensor._version - 1,))


_Saved = tuple[Any, _Buffer | None, int | None]
"""What autograd keeps: the tensor, the buffer whose local memory it has if any, and its version when it was saved."""


@untraced
def _unpack(packed: _Saved) -> Any:
    """Return what was saved, unless it was modified since: autograd leaves that check to whoever packs."""
    saved, buffer, version = packed
    now = None if version is None else saved._version if buffer is None else buffer.num_changes
    if now != version:
        what = saved if buffer is None else buffer.local
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what.type()} of shape {list(what.shape)} is at version {now}; expected version {version}"
        )
    return saved


def refuse_graph(buffer: Any, buffer_name: str) -> None:
    """Raise ValueError if a buffer needs a gradient: its contents cannot be exchanged behind autograd's back."""
    for name, tensor in named_tensors(buffer, buffer_name):
        if tensor.requires_grad:
            raise ValueError(
                f"buffer {name} needs a gradient (shape {tuple(tensor.shape)}), so it cannot be cut in place; cut it "
                "by a differentiable copy inside the context: x = cp.shard(x, dim=...)"
            )
