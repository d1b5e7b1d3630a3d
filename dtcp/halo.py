"""Tokens from around a rank's own: what short convolutions and token shifts look at across the cuts.

Shapes: any; ``dim`` is the sequence dim. S_local slots of a rank, E slots of its extended runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtcp.collectives import agree, check_mesh
from dtcp.documents import Documents, check_documents
from dtcp.halo_ops import halo_op
from dtcp.halo_plan import num_slots_at_most, plan_halo
from dtcp.layout import SequenceLayout
from dtcp.own_group import ALONE
from dtcp.shard import check_layout, check_pad_value, check_seq_dim, needs_grad
from dtcp.shard_ops import check_rows, take_slots

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Halo:
    """A rank's tokens, run by run, each run with the tokens around it; made by ``halo_exchange``.

    Whatever looks at most ``left`` slots back and ``right`` ahead can run along ``extended`` as along a whole sequence:
    no run reaches into another one. ``take`` picks the results of the rank's own slots.

        halo = dtcp.halo_exchange(x, mesh["cp"], layout, left=3, dim=2)             # x (B, C, S_local)
        out = halo.take(F.conv1d(halo.extended, weight, groups=C))                  # weight (C, 1, 4): (B, C, S_local)
        mixed = x + gate * halo.shift(1)                                            # the token before each one

    Attributes:
        extended: (…, E, …): ``left`` slots, a run, ``right`` slots; the next run; last, pads and padding. Slots of no
            token hold ``pad_value``.
        slots: int64 (S_local,), or (B, S_local) where rows differ: where each of the rank's slots is in ``extended``.
        left, right: Tokens before and after each run.
        dim, batch_dim: Dims of ``extended``, counted from the front.
    """

    extended: Tensor
    slots: Tensor
    left: int
    right: int
    dim: int
    batch_dim: int

    def shift(self, offset: int) -> Tensor:
        """Return, for each of the rank's slots, the token ``offset`` before it (after it where negative).

        ``pad_value`` where that is in another document, or no token; also for pads and padding themselves.
        """
        if not -self.right <= offset <= self.left:
            raise ValueError(
                f"shift({offset}) looks beyond a halo of left={self.left}, right={self.right}; ask halo_exchange for "
                f"{'left' if offset > 0 else 'right'}={abs(offset)}"
            )
        return take_slots(self.extended, self.slots - offset, self.dim, self.batch_dim).contiguous()

    def windows(self) -> Tensor:
        """Return (…, S_local, …, left + 1 + right): the tokens around each slot, in order, in a dim of their own.

        (left + 1 + right) times the memory of the rank's part.
        """
        return torch.stack([self.shift(offset) for offset in range(self.left, -self.right - 1, -1)], dim=-1)

    def take(self, results: Tensor) -> Tensor:
        """Return the results of the rank's own slots, (…, S_local, …).

        Args:
            results: One for each slot of ``extended``, along the same dim; or E − left − right of them, of a
                convolution without padding.
        """
        size, num_around = self.extended.size(self.dim), self.left + self.right
        if results.ndim <= self.dim or results.size(self.dim) not in (size, size - num_around):
            raise ValueError(
                f"take needs {size} results along dim {self.dim}, or {size - num_around} of a convolution without "
                f"padding, got a tensor of shape {tuple(results.shape)}; compute them from halo.extended"
            )
        skipped = self.left if results.size(self.dim) == size - num_around else 0
        return take_slots(results, self.slots - skipped, self.dim, self.batch_dim).contiguous()


def halo_exchange(
    x: Tensor,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    *,
    left: int,
    right: int = 0,
    documents: Documents | None = None,
    dim: int = 1,
    batch_dim: int = 0,
    pad_value: float = 0,
) -> Halo:
    """Give each rank the tokens around its own. Collective.

    A run is a stretch of tokens of one document that a rank holds in a row: one or two of them in a contiguous or
    head_tail layout without documents, each token by itself in a striped one.

    Args:
        x: This rank's part, in layout order, ``size(dim) == layout.local_seq_len``. Never written to.
        mesh: 1-D mesh of the cp axis.
        left: Tokens before each run, 0 or more; also more than a run, a rank's part or a document has.
        right: Tokens after each run.
        documents: Where documents lie; none is seen from another, and padding by nobody. None: one document.
        dim: Sequence dim of ``x``.
        batch_dim: Dim of the rows, where documents or places of rows differ.
        pad_value: In the place of tokens before a document's first and after its last, and of pads and padding.

    Returns:
        A `Halo`: ``extended`` for convolutions, ``shift(k)`` for the token k before each. One all-to-all, in which
        every token goes at most once to each rank that needs it. The backward sends gradients home by another one,
        which every rank has to run. ``extended`` has S_local + (left + right)·runs slots; in a compiled function as
        many as the most runs that the layout's name and ``documents`` being given allow, so that other documents cost
        no recompilation.

    Raises:
        ValueError: If ``x`` has another length or other rows than the layout and documents, an argument is out of
            range, or ranks differ in shape, dtype, layout, documents or ``requires_grad``: on every rank.
        RuntimeError: If ranks are in different calls, or the backward of one meets that of another or none.
    """
    check_mesh(mesh, "halo_exchange")
    group = mesh.get_group()
    try:
        check_layout(mesh, layout, "halo_exchange")
        num_rows = _check_arguments(x, layout, left, right, documents, dim, batch_dim, pad_value)
    except ValueError as error:
        if mesh.size() > 1 and not torch.compiler.is_compiling():  # the others would wait for this rank
            agree("halo_exchange", {}, group, torch.device(mesh.device_type), error=error)
        raise
    if torch.compiler.is_compiling():
        num_slots = num_slots_at_most(layout, documents is not None, left, right)
    else:
        num_slots = plan_halo(layout, documents, left, right, num_rows, mesh.get_local_rank()).num_slots
    dim, batch_dim = dim % x.ndim, batch_dim % x.ndim
    name = group.group_name if mesh.size() > 1 else ALONE.group_name
    state = None if documents is None else documents.state
    where = (num_slots, num_rows, name, left, right, dim, batch_dim)
    extended, slots, _ = halo_op(x, layout.state, state, *where, pad_value, needs_grad(x))
    return Halo(extended, slots, left, right, dim, batch_dim)


def _check_arguments(
    x: Tensor,
    layout: SequenceLayout,
    left: int,
    right: int,
    documents: Documents | None,
    dim: int,
    batch_dim: int,
    pad_value: float,
) -> int:
    """Return how many rows differ, 1 if all are alike."""
    for label, number in (("left", left), ("right", right)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"halo_exchange: {label} must be an int of at least 0, got {number!r}")
    check_seq_dim(x, dim, layout.local_seq_len, "halo_exchange", "layout.local_seq_len")
    check_pad_value(pad_value, x.dtype, "halo_exchange")
    num_rows = 1 if check_documents(documents) is None else documents.num_rows  # type: ignore[union-attr]
    if torch.compiler.is_compiling():  # without a look at what the documents are
        num_rows = max(num_rows, 1 if layout.placed_by is None else layout.placed_by.num_rows)
    else:
        check_rows(x, layout, dim, batch_dim, "halo_exchange")
        num_rows = max(num_rows, layout.num_rows)
    is_dim = -x.ndim <= batch_dim < x.ndim and batch_dim % x.ndim != dim % x.ndim
    if num_rows > 1 and not is_dim:
        raise ValueError(
            f"halo_exchange: documents describe {num_rows} rows, and batch_dim={batch_dim} is no dim of a tensor of "
            f"shape {tuple(x.shape)} beside its sequence dim {dim}; give the dim of its rows"
        )
    batch_size = x.size(batch_dim) if num_rows > 1 else None
    if documents is not None:
        documents.check_fits(layout.seq_len, batch_size)
    return 1 if batch_size is None else batch_size
