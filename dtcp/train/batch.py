"""Which rows of the global batch a rank reads, and how they are cut over the cp ranks.

Shapes: B rows of a microbatch, S = seq_len, S_local slots of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtcp.layout import SequenceLayout, make_layout
from dtcp.mesh import ParallelDims
from dtcp.shard import shard
from dtcp.train.config import JobConfig
from dtcp.train.data import deal_rows


@dataclass(frozen=True, slots=True)
class Microbatch:
    """This rank's part of some rows, in layout order."""

    tokens: Tensor  # int64 (B, S_local); pads 0
    labels: Tensor  # int64 (B, S_local), the token after each; pads -100
    positions: Tensor  # int64 (B, S_local), global; pads 0
    row_indices: Sequence[int]  # (B,), of the global batch


def deal_microbatches(
    global_batch_size: int, local_batch_size: int | None, dp_rank: int, dp_size: int
) -> list[range]:
    """Return the rows of the global batch that a data parallel rank reads, a range per microbatch.

    Without a local batch size a rank takes all of its rows at once; else see `dtcp.train.data.deal_rows`.

    Raises:
        ValueError: If the global batch size is no multiple of ``local_batch_size * dp_size``; names the nearest.
    """
    if local_batch_size is None:
        local_batch_size = max(1, global_batch_size // dp_size if global_batch_size % dp_size == 0 else 1)
    return deal_rows(global_batch_size, local_batch_size, dp_rank, dp_size)


def layout_of(config: JobConfig, dims: ParallelDims, seq_len: int) -> SequenceLayout:
    """Return how the job cuts a sequence of ``seq_len`` tokens.

    Raises:
        ValueError: If there is no such layout, or the number makes no sense.
    """
    # Sequence parallelism cuts a rank's positions once more, evenly.
    multiple_of = dims.tp if config.tensor_parallel.sequence_parallel else 1
    return make_layout(config.attention.layout, seq_len=seq_len, cp=dims.cp, multiple_of=multiple_of)


def cut(
    tokens: Tensor, labels: Tensor, row_indices: Sequence[int], *, mesh: DeviceMesh, layout: SequenceLayout
) -> Microbatch:
    """Cut whole rows over the cp ranks; labels have been shifted before, by construction of the rows.

    Args:
        tokens: int64 (B, S), equal on every cp rank.
        labels: int64 (B, S); -100 counts for nothing.
        mesh: 1-D cp mesh.
    """
    positions = layout.positions(mesh.get_local_rank() if layout.cp > 1 else 0).to(tokens.device)
    positions = torch.where(positions < layout.seq_len, positions, 0)
    return Microbatch(
        tokens=shard(tokens, mesh, layout, dim=1, pad_value=0),
        labels=shard(labels, mesh, layout, dim=1, pad_value=-100),
        positions=positions.expand(tokens.size(0), -1),
        row_indices=row_indices,
    )
