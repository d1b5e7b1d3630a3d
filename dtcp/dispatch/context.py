"""``with context_parallel(...)``: one block in which attention is context parallel and buffers hold a rank's part.

Shapes: buffers of any shape, ``buffer_seq_dims`` says where the sequence is; S tokens, S_local slots of a rank.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from dtcp.attention.api import is_plain
from dtcp.attention.arguments import check_strategy
from dtcp.attention.calls import CallCounter
from dtcp.attention.kernels import KERNEL_NAMES
from dtcp.attention.masks import checked_masks
from dtcp.collectives import check_mesh
from dtcp.containers import named_tensors
from dtcp.dispatch.attn_mask import QUERIES
from dtcp.dispatch.buffers import LocalBuffers, refuse_graph
from dtcp.dispatch.entry import entered
from dtcp.dispatch.frames import Frame, current
from dtcp.dropout import dropout_keys
from dtcp.dropout_hash import keys_of_place, place_salt
from dtcp.layout import SequenceLayout, make_layout
from dtcp.mask import NO_WINDOW
from dtcp.shard import shard, unshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtcp.attention.scores import MaskMod
    from dtcp.documents import Documents

Tree = TypeVar("Tree")


class ContextParallelRegion:
    """What ``with context_parallel(...) as cp`` gives.

    Attributes:
        layout: Who holds which tokens.
        positions: int64 (S_local,), global token index of each slot of this rank; pads hold 0. (B, S_local) where rows
            hold different documents that place their tokens.
        valid: bool, of the same shape: which slots hold a token.
    """

    def __init__(self, mesh: DeviceMesh, layout: SequenceLayout, counter: CallCounter) -> None:
        self.layout = layout
        self._mesh, self._counter = mesh, counter
        positions = layout.positions(mesh.get_local_rank())
        self.valid = (positions < layout.seq_len).to(mesh.device_type)
        self.positions = torch.where(positions < layout.seq_len, positions, 0).to(mesh.device_type)

    @property
    def num_attention_calls(self) -> int:
        """Attention calls so far in this context, those of recomputation included."""
        return self._counter.num_calls

    def shard(self, x: Tree, *, dim: int = 1, pad_value: float = 0) -> Tree:
        """``dtcp.shard`` in this context's layout."""
        return shard(x, self._mesh, self.layout, dim=dim, pad_value=pad_value)

    def unshard(self, x: Tree, *, dim: int = 1) -> Tree:
        """``dtcp.unshard`` in this context's layout."""
        return unshard(x, self._mesh, self.layout, dim=dim)


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Any = None,
    buffer_seq_dims: Sequence[int] | int | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    buffer_pad_values: Sequence[float] | float | None = None,
    layout: str = "head_tail",
    strategy: str = "ring",
    kernel: str = "auto",
    documents: Documents | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    key_lengths: Tensor | Sequence[int] | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    attn_mask_queries: Literal["local", "global"] | None = None,
    seq_len: int | None = None,
    multiple_of: int = 1,
    expected_attention_calls: int | None = None,
    step: int | Tensor | None = None,
    rows: Sequence[int] | Tensor | None = None,
    dropout_seed: int | Tensor = 0,
    head_offset: int = 0,
) -> Iterator[ContextParallelRegion]:
    """Make every ``F.scaled_dot_product_attention`` inside context parallel, and cut ``buffers`` for so long.

    Code written for ``torch.distributed.tensor.experimental.context_parallel`` works with the import changed. The
    attention calls of this thread are redirected, however the function was imported, eager and compiled, and those of
    recomputation in a later backward too. A backward may run inside or after the block.

    Args:
        mesh: 1-D mesh of the cp axis. With one rank nothing is cut and attention is torch's own,
            unless ``multiple_of`` asks for pads.
        buffers: Tensors, equal on every cp rank, whose contents become this rank's part inside the block: a list of
            tensors, nested containers or TensorDicts. They get memory of their own; theirs is put back at the end,
            also after an exception, and never written to. What autograd saves inside keeps the local contents; what
            is written to a buffer inside is written to these, and gone after the block unless it is in
            ``no_restore_buffers``. Contexts nest, but a buffer is cut by one of them only.
        buffer_seq_dims: Sequence dim of each buffer; may be negative.
        no_restore_buffers: Those that stay local after the block.
        buffer_pad_values: What pad slots hold, for each buffer (a number holds for all). Floats default to 0;
            integer buffers need a value if there is padding.
        layout, strategy, kernel: As in ``make_layout`` and ``context_parallel_attention``.
        documents: Where documents lie: tokens see their own only, and ``per_document`` places tokens by them.
        window_size, key_lengths, mask_mod, sinks, alibi_slopes, softcap: Of every attention call inside, as in
            ``context_parallel_attention``. Calls may be causal or not.
        attn_mask_queries: Which queries the ``attn_mask`` of a call is of, (…, Q, S) with all S keys in natural order:
            ``"local"``, those of this rank in layout order (or Q = 1), or ``"global"``, all in natural order, which is
            cut here. Without it an ``attn_mask`` is refused.
        seq_len: Tokens of the sequence, where there are no buffers to tell.
        multiple_of: Pad until S_local is a multiple of it: the tp degree, where the model is sequence parallel.
        expected_attention_calls: Raise at the end unless there were so many. None wants at least one.
        step, rows, dropout_seed: What the masks of attention dropout (``dropout_p``) are made of, as in
            ``dropout_keys``: the optimizer step, and the row of the global batch for each row held here. Without them
            ``dropout_p`` is refused where the sequence is cut. Beside them an element's mask is a function of its
            head, of the positions of query and key, and of the number of the call that drops among those of the
            block; so calls have to come in one order on any mesh.
        head_offset: Global index of the first query head, for those masks, where heads are cut (tensor parallelism)
            and are no DTensors.

    Raises:
        ValueError: If buffers do not fit together, one needs a gradient, or an argument is unknown.
        RuntimeError: At the end of the block, if no attention call was redirected, or not as many as expected.
    """
    check_mesh(mesh, "context_parallel")
    check_strategy(strategy, None)
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {kernel!r}")
    if attn_mask_queries not in (None, *QUERIES):
        raise ValueError(f"attn_mask_queries must be 'local', 'global' or None, got {attn_mask_queries!r}")
    masks = checked_masks(
        is_causal=False, window_size=window_size, documents=documents, key_lengths=key_lengths, mask_mod=mask_mod,
        sinks=sinks, alibi_slopes=alibi_slopes, softcap=softcap, head_offset=head_offset,
    )  # fmt: skip
    listed = _list_buffers(buffers, buffer_seq_dims, buffer_pad_values)
    seq_len = _sequence_length(listed, seq_len)
    if documents is not None:
        documents.check_fits(seq_len)
    sequence = make_layout(layout, seq_len=seq_len, cp=mesh.size(), documents=documents, multiple_of=multiple_of)
    local_buffers = _cut_buffers(listed, no_restore_buffers or (), mesh, sequence)
    counter = CallCounter()
    region = ContextParallelRegion(mesh, sequence, counter)
    frame = Frame(
        group_name=mesh.get_group().group_name,
        layout=sequence,
        strategy=strategy,
        kernel=kernel,
        counter=counter,
        state=counter.state_of(sequence),
        is_plain=is_plain(sequence, sequence) and masks.are_none,
        buffers=local_buffers,
        masks=masks,
        attn_mask_queries=attn_mask_queries or "",
        dropout_keys=_first_dropout_keys(dropout_seed, step, rows, region.positions),
        head_offset=head_offset,
    )
    with entered(frame):
        yield region
    local_buffers.release()
    if not frame.is_plain:
        _check_calls(counter.num_calls, expected_attention_calls)


def _first_dropout_keys(seed: Any, step: Any, rows: Any, positions: Tensor) -> Tensor | None:
    if (step is None) != (rows is None):
        raise ValueError(
            f"dropout needs both step and rows, got step={step!r} and rows={rows!r}; pass the optimizer step, and the "
            "row of the global batch for each row held here: context_parallel(..., step=7, rows=[0, 1])"
        )
    if step is None or rows is None:
        return None
    return keys_of_place(dropout_keys(seed, step, rows, positions), place_salt("context_parallel"))


def _list_buffers(buffers: Any, dims: Any, pad_values: Any) -> list[tuple[Any, int, float | None]]:
    """(buffer, sequence dim, pad value or None) of each."""
    if buffers is None:
        buffers = []
    if not isinstance(buffers, (list, tuple)):
        buffers = [buffers]
    if isinstance(dims, int):
        dims = [dims] * len(buffers)
    if not isinstance(pad_values, Sequence):
        pad_values = [pad_values] * len(buffers)
    if len(dims or []) != len(buffers):
        raise ValueError(
            f"buffer_seq_dims must name the sequence dim of each of the {len(buffers)} buffers, got {dims}; for "
            "instance buffer_seq_dims=[1, 1]"
        )
    if len(pad_values) != len(buffers):
        raise ValueError(
            f"buffer_pad_values must have one value for each of the {len(buffers)} buffers, got {pad_values}"
        )
    return list(zip(buffers, dims or [], pad_values, strict=True))


def _sequence_length(buffers: list[tuple[Any, int, float | None]], seq_len: int | None) -> int:
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


def _cut_buffers(
    buffers: list[tuple[Any, int, float | None]], kept: Iterable[Tensor], mesh: DeviceMesh, layout: SequenceLayout
) -> LocalBuffers:
    tensors: dict[int, tuple[Tensor, int, float]] = {}
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
            cut = (tensor, dim % tensor.ndim, _pad_value(tensor, pad_value, layout, buffers, name))
            if tensors.setdefault(id(tensor), cut)[1:] != cut[1:]:
                raise ValueError(
                    f"buffer {name} is listed twice, with (sequence dim, pad value) {tensors[id(tensor)][1:]} and "
                    f"{cut[1:]}; list it once, or pass a copy (x.clone())"
                )
        containers += _tensordicts(buffer, dim, layout)
    kept = list(kept)
    _check_kept(kept, set(tensors), containers)
    if is_plain(layout, layout):  # not for one rank that pads for sequence parallelism
        return LocalBuffers([], [], [], outer)
    local = [(tensor, _cut(tensor, mesh, layout, dim, pad_value)) for tensor, dim, pad_value in tensors.values()]
    return LocalBuffers(local, kept, containers, outer)


def _cut(tensor: Tensor, mesh: DeviceMesh, layout: SequenceLayout, dim: int, pad_value: float) -> Tensor:
    # An inference tensor stays one, and no other becomes one: else it would change its kind with its contents.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return shard(tensor.detach(), mesh, layout, dim=dim, pad_value=pad_value)


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


def _check_calls(num_calls: int, expected: int | None) -> None:
    if expected is None and num_calls == 0:
        raise RuntimeError(
            "no attention call was made context parallel inside this context, so its tokens saw only their own rank. "
            "Likely causes: the model does not call F.scaled_dot_product_attention (a fused or hand-written attention, "
            "flash_attn, flex_attention); it ran in another thread; or nothing attends here, which "
            "expected_attention_calls=0 says"
        )
    if expected is not None and num_calls != expected:
        raise RuntimeError(
            f"expected_attention_calls={expected}, but {num_calls} attention calls were made context parallel inside "
            "this context (recomputation inside it counts too); calls that it misses see only this rank's tokens"
        )
