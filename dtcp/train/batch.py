"""Which rows of the global batch a rank reads, and how they are cut over the cp ranks.

Shapes: B rows of a microbatch, S = seq_len, S_local slots of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtcp.documents import Documents
from dtcp.layout import SequenceLayout, make_layout
from dtcp.mesh import ParallelDims
from dtcp.shard import shard
from dtcp.train.config import JobConfig
from dtcp.train.data import deal_rows

PLACED_BY_DOCUMENTS = ("per_document", "auto")
"""Layouts that depend on where documents lie."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole rows of the global batch, on every cp rank alike. Labels are shifted already: that comes before the cut."""

    tokens: Tensor  # int64 (B, S)
    labels: Tensor  # int64 (B, S), the token after each; -100 counts for nothing
    documents: Documents | None = None  # of B rows; None: a row is one text
    positions: Tensor | None = None  # int64 (B, S), what the model is given; None: 0, 1, … in each row

    def to(self, device: torch.device) -> Rows:
        """The same on a device; documents are integers of the host."""
        positions = None if self.positions is None else self.positions.to(device)
        return Rows(self.tokens.to(device), self.labels.to(device), self.documents, positions)

    def select(self, start: int, stop: int) -> Rows:
        """Some of the rows, in order."""
        rows = slice(start, stop)
        documents = None if self.documents is None else self.documents.select_rows(rows)
        positions = None if self.positions is None else self.positions[rows]
        return Rows(self.tokens[rows], self.labels[rows], documents, positions)

    def tensors(self) -> list[Tensor]:
        """Everything that ranks which share the rows have to agree on."""
        found = [self.tokens, self.labels]
        if self.positions is not None:
            found.append(self.positions)
        return found if self.documents is None else [*found, self.documents.state]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """This rank's part of some rows, in layout order."""

    tokens: Tensor  # int64 (B, S_local); pads 0
    labels: Tensor  # int64 (B, S_local), the token after each; pads -100
    positions: Tensor  # int64 (B, S_local), what the model is given; pads 0
    token_indices: Tensor  # int64 (B, S_local), where in its row each token stands; pads 0
    row_indices: Sequence[int]  # (B,), of the global batch
    layout: SequenceLayout  # of these rows
    documents: Documents | None = None  # of these rows, whole


def deal_microbatches(global_batch_size: int, local_batch_size: int | None, dp_rank: int, dp_size: int) -> list[range]:
    """Return the rows of the global batch that a data parallel rank reads, a range per microbatch.

    Without a local batch size a rank takes all of its rows at once; else see `dtcp.train.data.deal_rows`.

    Raises:
        ValueError: If the global batch size is no multiple of ``local_batch_size * dp_size``; names the nearest.
    """
    if local_batch_size is None:
        local_batch_size = max(1, global_batch_size // dp_size if global_batch_size % dp_size == 0 else 1)
    return deal_rows(global_batch_size, local_batch_size, dp_rank, dp_size)


def layout_of(
    config: JobConfig, dims: ParallelDims, seq_len: int, documents: Documents | None = None
) -> SequenceLayout:
    """Return how the job cuts rows of ``seq_len`` tokens.

    Args:
        documents: Of the rows, where they place tokens. None: of a row of one document, which has the same length on
            every rank.

    Raises:
        ValueError: If there is no such layout, or the number makes no sense.
    """
    # Sequence parallelism cuts a rank's positions once more, evenly.
    multiple_of = dims.tp if config.tensor_parallel.sequence_parallel else 1
    name, more = config.attention.layout, dict[str, Any]()
    if name in PLACED_BY_DOCUMENTS:
        more["documents"] = Documents.from_lengths([seq_len]) if documents is None else documents
    return make_layout(name, seq_len=seq_len, cp=dims.cp, multiple_of=multiple_of, **more)


def cut(rows: Rows, row_indices: Sequence[int], *, mesh: DeviceMesh, layout: SequenceLayout) -> Microbatch:
    """Cut whole rows over the cp ranks.

    Args:
        rows: Equal on every cp rank.
        row_indices: Of the global batch, B.
        mesh: 1-D cp mesh.
        layout: Of these rows.
    """
    indices = layout.positions(mesh.get_local_rank() if layout.cp > 1 else 0).to(rows.tokens.device)
    indices = torch.where(indices < layout.seq_len, indices, 0).expand(rows.tokens.size(0), -1)
    by_row: dict[str, Any] = {} if layout.num_rows == 1 else {"batch_dim": 0}
    return Microbatch(
        tokens=shard(rows.tokens, mesh, layout, dim=1, pad_value=0, **by_row),
        labels=shard(rows.labels, mesh, layout, dim=1, pad_value=-100, **by_row),
        positions=indices
        if rows.positions is None
        else shard(rows.positions, mesh, layout, dim=1, pad_value=0, **by_row),
        token_indices=indices,
        row_indices=row_indices,
        layout=layout,
        documents=rows.documents,
    )


def cut_into_microbatches(
    rows: Rows, ranges: Sequence[Sequence[int]], *, mesh: DeviceMesh, layout: SequenceLayout
) -> list[Microbatch]:
    """Cut all rows of this rank's part of a step into its microbatches.

    Args:
        rows: One microbatch after the other.
        ranges: Rows of the global batch of each microbatch.
        layout: Of all rows: one choice for all, so that the stages of a pipeline see one length.
    """
    microbatches, start = [], 0
    for row_indices in ranges:
        stop = start + len(row_indices)
        of_these = layout.select_rows(slice(start, stop))
        microbatches.append(cut(rows.select(start, stop), row_indices, mesh=mesh, layout=of_these))
        start = stop
    assert start == rows.tokens.size(0), (start, rows.tokens.shape)
    return microbatches


def masked_labels(rows: Rows, ignored: Tensor) -> Rows:
    """``rows`` with the labels where ``ignored`` (B, S) counting for nothing."""
    return dataclasses.replace(rows, labels=rows.labels.masked_fill(ignored, -100))
