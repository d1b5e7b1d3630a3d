"""``with context_parallel(...)``: one block in which attention is context parallel and buffers hold a rank's part.

Shapes: buffers of any shape, ``buffer_seq_dims`` says where the sequence is; S tokens, S_local slots of a rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from dtcp.attention.api import is_plain
from dtcp.attention.arguments import resolved_strategy
from dtcp.attention.calls import CallCounter
from dtcp.attention.kernels import KERNEL_NAMES
from dtcp.attention.masks import checked_masks
from dtcp.collectives import check_mesh
from dtcp.dispatch.attn_mask import QUERIES
from dtcp.dispatch.cut_buffers import cut_buffers, list_buffers, listed, sequence_length
from dtcp.dispatch.entry import entered
from dtcp.dispatch.frames import Frame
from dtcp.dropout import dropout_keys
from dtcp.dropout_hash import keys_of_place, place_salt
from dtcp.layout import SequenceLayout, make_layout
from dtcp.mask import NO_WINDOW
from dtcp.shard import shard, unshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtcp.attention.predict import Rates
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

    def shard(self, x: Tree, *, dim: int = 1, pad_value: float = 0, batch_dim: int = 0) -> Tree:
        """``dtcp.shard`` in this context's layout."""
        return shard(x, self._mesh, self.layout, dim=dim, pad_value=pad_value, batch_dim=batch_dim)

    def unshard(self, x: Tree, *, dim: int = 1, batch_dim: int = 0) -> Tree:
        """``dtcp.unshard`` in this context's layout."""
        return unshard(x, self._mesh, self.layout, dim=dim, batch_dim=batch_dim)


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Any = None,
    buffer_seq_dims: Sequence[int] | int | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    buffer_pad_values: Sequence[float] | float | None = None,
    buffer_batch_dims: Sequence[int] | int | None = None,
    layout: str = "head_tail",
    strategy: str = "ring",
    ulysses_degree: int | None = None,
    ranks_per_node: int | None = None,
    kv_grad_dtype: torch.dtype | None = None,
    rates: Rates | None = None,
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
        buffer_batch_dims: Dim of each buffer's rows (a number holds for all), for layouts that place the tokens of each
            row by its own documents. 0 by default; has to be said of a buffer with more dims before its sequence, like
            3-row position ids (3, B, S), whose rows are in dim 1.
        layout, strategy, ulysses_degree, ranks_per_node, kv_grad_dtype, rates, kernel: As in ``make_layout`` and
            ``context_parallel_attention``.
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
    how = resolved_strategy(
        strategy, ulysses_degree, mesh.size(), rates=rates, ranks_per_node=ranks_per_node, kv_grad_dtype=kv_grad_dtype
    )
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {kernel!r}")
    if attn_mask_queries not in (None, *QUERIES):
        raise ValueError(f"attn_mask_queries must be 'local', 'global' or None, got {attn_mask_queries!r}")
    masks = checked_masks(
        is_causal=False, window_size=window_size, documents=documents, key_lengths=key_lengths, mask_mod=mask_mod,
        sinks=sinks, alibi_slopes=alibi_slopes, softcap=softcap, head_offset=head_offset,
    )  # fmt: skip
    to_cut = list_buffers(buffers, buffer_seq_dims, buffer_pad_values)
    batch_dims = listed(buffer_batch_dims, len(to_cut), "buffer_batch_dims")
    seq_len = sequence_length(to_cut, seq_len)
    if documents is not None:
        documents.check_fits(seq_len)
    sequence = make_layout(layout, seq_len=seq_len, cp=mesh.size(), documents=documents, multiple_of=multiple_of)
    local_buffers = cut_buffers(to_cut, batch_dims, no_restore_buffers or (), mesh, sequence)
    counter = CallCounter()
    region = ContextParallelRegion(mesh, sequence, counter)
    frame = Frame(
        group_name=mesh.get_group().group_name,
        layout=sequence,
        strategy=how,
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
