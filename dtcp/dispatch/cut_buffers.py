"""What a context cuts: the buffers that it was given, checked and cut.

Shapes: buffers of any shape, ``buffer_seq_dims`` says where the sequence is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtcp.attention.api import is_plain
from dtcp.containers import named_tensors
from dtcp.dispatch.buffers import LocalBuffers, refuse_graph
from dtcp.dispatch.frames import current
from dtcp.layout import SequenceLayout
from dtcp.shard import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def list_buffers(buffers: Any, dims: Any, pad_values: Any) -> list[tuple[Any, int, float | None]]:
    """(buffer, sequence dim, pad value or None) of each."""
    if buffers is None:
        buffers = []
    if not isinstance(buffers, (list, tuple)):
        buffers = [buffers]
    if isinstance(dims, int):
        dims = [dims] * len(buffers)
    pad_values = listed(pad_values, len(buffers), "buffer_pad_values")
    if len(dims or []) != len(buffers):
        raise ValueError(
            f"buffer_seq_dims must name the sequence dim of each of the {len(buffers)} buffers, got {dims}; for "
            "instance buffer_seq_dims=[1, 1]"
        )
    return list(zip(buffers, dims or [], pad_values, strict=True))


def listed(values: Any, count: int, name: str) -> list[Any]:
    """A value for each buffer, from a list or from one for all."""
    listed = list(values) if isinstance(values, Sequence) else [values] * count
    if len(listed) != count:
        raise ValueError(f"{name} must have one value for each of the {count} buffers, got {values}")
    return listed


def sequence_length(buffers: list[tuple[Any, int, float | None]], seq_len: int | None) -> int:
    lengths: dict[int, str] = {} if seq_len is None else {seq_len: "seq_len"}
    for index, (buffer, dim, _) in enumerate(buffers):
        for name, tensor in named_tensors(buffer, str(index)):
            if not -tensor.ndim <= dim < tensor.ndim:
                raise ValueError(f"buffer {name} of shape {tuple(tensor.shape)} has no dim {dim}; see buffer_seq_dims")
            lengths.setdefault(tensor.size(dim), f"buffer {name}")
    if len(lengths) > 1:
        named = ", ".join(f"{length} ({name})" for length, name in lengths.items())
        raise ValueError(f"buffers of one context must have one length along buffer_seq_dims, got {named}")
    if not lengths:
        raise ValueError("context_parallel needs the length of the sequence: give buffers, or seq_len=")
    return next(iter(lengths))


def cut_buffers(
    buffers: list[tuple[Any, int, float | None]],
    batch_dims: list[int | None],
    kept: Iterable[Tensor],
    mesh: DeviceMesh,
    layout: SequenceLayout,
) -> LocalBuffers:
    tensors: dict[int, tuple[Tensor, tuple[int, float, int]]] = {}  # with dim, pad value and dim of the rows
    containers: list[tuple[Any, list[int]]] = []
    outer = current.frame.buffers if current.frame is not None else None
    for index, (buffer, dim, pad_value) in enumerate(buffers):
        refuse_graph(buffer, str(index))
        for name, tensor in _held_tensors(buffer, str(index)):
            if outer is not None and outer.cut_by(tensor):
                raise ValueError(
                    f"buffer {name} is a buffer of the context around this one too and is cut already; leave that "
                    "context first, or list it in one of them only (seq_len= says how long the sequence is)"
                )
            rows = _batch_dim(tensor, dim % tensor.ndim, batch_dims[index], layout, name)
            how = dim % tensor.ndim, _pad_value(tensor, pad_value, layout, buffers, name), rows
            _, before = tensors.setdefault(id(tensor), (tensor, how))
            if before != how:
                raise ValueError(
                    f"buffer {name} is listed twice, with (sequence dim, pad value, dim of rows) {before} and {how}; "
                    "list it once, or pass a copy (x.clone())"
                )
        containers += _tensordicts(buffer, dim, layout)
    kept = list(kept)
    _check_kept(kept, set(tensors), containers)
    if is_plain(layout, layout):  # not for one rank that pads for sequence parallelism
        return LocalBuffers([], [], [], outer)
    local = [(tensor, _cut(tensor, mesh, layout, *how)) for tensor, how in tensors.values()]
    return LocalBuffers(local, kept, containers, outer)


def _batch_dim(tensor: Tensor, dim: int, given: int | None, layout: SequenceLayout, name: str) -> int:
    if given is None and layout.num_rows > 1 and dim > 1:
        raise ValueError(
            f"each row has places of its own in this layout (documents differ by row), and buffer {name} of shape "
            f"{tuple(tensor.shape)} has {dim} dims before its sequence: say which of them is the batch, for instance "
            "buffer_batch_dims=[0, 1] (1 for position ids (3, B, S))"
        )
    return 0 if given is None else given


def _cut(
    tensor: Tensor, mesh: DeviceMesh, layout: SequenceLayout, dim: int, pad_value: float, batch_dim: int
) -> Tensor:
    # An inference tensor stays one, and no other becomes one: else it would change its kind with its contents.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return shard(tensor.detach(), mesh, layout, dim=dim, pad_value=pad_value, batch_dim=batch_dim)


def _held_tensors(buffer: Any, name: str) -> list[tuple[str, Tensor]]:
    """Tensors of ``buffer`` with their names, if it holds them: a lazy stack makes new ones whenever it is asked."""
    found = named_tensors(buffer, name)
    for (where, tensor), (_, again) in zip(found, named_tensors(buffer, name), strict=True):
        if tensor is not again:
            raise ValueError(
                f"buffer {where} is made anew by its {type(buffer).__name__} at every access, so it cannot be cut in "
                "place; pass a TensorDict that holds its tensors (x.contiguous())"
            )
        if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise ValueError(
                f"buffer {where} is a {type(tensor).__name__}, which cannot be cut in place; pass a plain tensor "
                "(x.full_tensor() of a DTensor)"
            )
    return found


def _check_kept(kept: list[Tensor], listed: set[int], containers: list[tuple[Any, list[int]]]) -> None:
    for tensor in kept:
        if id(tensor) not in listed:
            raise ValueError(f"no_restore_buffers has a tensor of shape {tuple(tensor.shape)} that is not in buffers")
    ids = {id(tensor) for tensor in kept}
    for container, _ in containers:
        are_kept = {name: id(tensor) in ids for name, tensor in named_tensors(container)}
        if len(set(are_kept.values())) > 1:
            raise ValueError(
                f"no_restore_buffers has some tensors of a TensorDict and not others ({are_kept}), which would then "
                "have two sequence lengths; put all of them in, or none"
            )


def _pad_value(
    tensor: Tensor, value: float | None, layout: SequenceLayout, buffers: list[tuple[Any, int, float | None]], name: str
) -> float:
    if value is not None:
        return value
    if layout.padded_seq_len > layout.seq_len and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"{layout.seq_len} tokens are padded to {layout.padded_seq_len} for cp={layout.cp}, and buffer {name} is "
            f"of dtype {tensor.dtype}: say what pad slots hold, for instance "
            f"buffer_pad_values={_example_pad_values(buffers)} (-100 for labels, 0 for tokens and positions)"
        )
    return 0


def _example_pad_values(buffers: list[tuple[Any, int, float | None]]) -> list[float]:
    """Values that the dtypes can hold: -100 where it can be labels, a signed buffer not before the tokens, else 0."""
    values: list[float] = []
    for index, (buffer, _, value) in enumerate(buffers):
        is_signed = isinstance(buffer, Tensor) and buffer.dtype in (torch.int64, torch.int32)
        can_be_labels = is_signed and (index > 0 or len(buffers) == 1)
        values.append(value if value is not None else -100 if can_be_labels else 0)
    return values


def _tensordicts(buffer: Any, dim: int, layout: SequenceLayout) -> list[tuple[Any, list[int]]]:
    """TensorDicts in ``buffer``, innermost first, with the batch size that they have while local."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is None or not tensordict.is_tensor_collection(buffer):
        values = buffer.values() if isinstance(buffer, dict) else buffer if isinstance(buffer, (list, tuple)) else []
        return [found for value in values for found in _tensordicts(value, dim, layout)]
    if dim < 0:
        raise ValueError(f"the sequence dim of a TensorDict must be counted from the front, got {dim}")
    nested = [value for value in buffer.values() if tensordict.is_tensor_collection(value)]
    found = [entry for value in nested for entry in _tensordicts(value, dim, layout)]
    if dim >= buffer.batch_dims:
        return found
    batch_size = list(buffer.batch_size)
    batch_size[dim] = layout.local_seq_len
    return [*found, (buffer, batch_size)]
