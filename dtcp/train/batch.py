"""Which rows of the global batch a rank reads, and how they are cut over the cp ranks.

Shapes: B rows of a microbatch, S = seq_len, S_local slots of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtcp.layout import SequenceLayout
from dtcp.shard import shard


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How the rows of one optimizer step are spread over data parallel ranks and microbatches."""

    global_batch_size: int  # rows
    local_batch_size: int  # rows of one microbatch of one rank
    num_microbatches: int
    dp: int  # data parallel ranks

    def row_indices(self, batch_rank: int, microbatch: int) -> list[int]:
        """Rows of the global batch in this microbatch; over all ranks and microbatches each row comes once."""
        start = (microbatch * self.dp + batch_rank) * self.local_batch_size
        return list(range(start, start + self.local_batch_size))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """This rank's part of some rows, in layout order."""

    tokens: Tensor  # int64 (B, S_local); pads 0
    labels: Tensor  # int64 (B, S_local), the token after each; pads -100
    positions: Tensor  # int64 (B, S_local), global; pads 0
    row_indices: list[int]  # (B,), of the global batch


def plan_batch(global_batch_size: int, local_batch_size: int | None, dp: int) -> BatchPlan:
    """Return the plan; without a local batch size a rank takes all of its rows at once.

    Raises:
        ValueError: If the global batch size is not a multiple of ``local_batch_size * dp``.
    """
    if global_batch_size < 1 or (local_batch_size is not None and local_batch_size < 1):
        raise ValueError(
            "training.global_batch_size and training.local_batch_size have to be at least 1, "
            f"got {global_batch_size} and {local_batch_size}"
        )
    rows = dp * (local_batch_size or 1)
    if global_batch_size % rows:
        named = f"local_batch_size * dp = {local_batch_size} * {dp}" if local_batch_size else f"dp = {dp}"
        nearest = max(1, round(global_batch_size / rows)) * rows
        raise ValueError(
            f"training.global_batch_size has to be a multiple of {named}, got {global_batch_size}; "
            f"use training.global_batch_size={nearest}"
        )
    local = local_batch_size or global_batch_size // dp
    return BatchPlan(global_batch_size, local, global_batch_size // (local * dp), dp)


def cut(
    tokens: Tensor, labels: Tensor, row_indices: list[int], *, mesh: DeviceMesh, layout: SequenceLayout
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
