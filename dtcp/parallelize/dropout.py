"""Dropout in the regions that sequence parallelism cuts, as an entry of a ``parallelize_module`` plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtcp.dropout import AttentionDropout, Dropout
from dtcp.dtensor import is_dtensor


class SequenceParallelDropout(ParallelStyle):
    """Give a `dtcp.Dropout`, whose plain input is this rank's part of the positions, its part of the keys.

    ``{"layers.*.attention_residual_dropout": SequenceParallelDropout()}`` beside norms that are sequence parallel. The
    model passes the keys (B, S) of all positions; the input is (B, S/T, *F), the rank-th of T equal parts. A DTensor
    knows its part itself and needs no entry.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"SequenceParallelDropout needs the 1-D mesh of the tp axis, got axes {device_mesh.mesh_dim_names}; "
                "pass mesh['tp']"
            )
        if not isinstance(module, Dropout):
            raise ValueError(
                f"SequenceParallelDropout is for dtcp.Dropout, got {type(module).__name__}, whose mask would depend on "
                "the mesh; use dtcp.Dropout in the model"
            )
        rank, num_ranks = device_mesh.get_local_rank(), device_mesh.size()

        def cut_keys(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            x, keys = inputs[0], inputs[1] if len(inputs) > 1 else options.get("keys")
            if keys is None or is_dtensor(x) or is_dtensor(keys):
                return inputs, options
            return (x, _part(x, keys, rank, num_ranks)), {}

        module.register_forward_pre_hook(cut_keys, with_kwargs=True)
        return module


def _part(x: Tensor, keys: Tensor, rank: int, num_ranks: int) -> Tensor:
    if keys.ndim != 2 or x.ndim < 2 or keys.size(1) != num_ranks * x.size(1):
        raise ValueError(
            f"sequence parallel dropout on {num_ranks} ranks needs keys of all positions, {num_ranks} times those of "
            f"its input, got keys {tuple(keys.shape)} and input {tuple(x.shape)}; pass the keys (B, S) of the whole "
            f"sequence, with S a multiple of {num_ranks}"
        )
    return keys.narrow(1, rank * x.size(1), x.size(1))


class HeadParallelDropout(ParallelStyle):
    """Tell a module that attends which heads a rank has, where they are cut: the mask of a weight is that of its head.

    ``{"layers.*.attention.sdpa": HeadParallelDropout()}`` beside projections that are column parallel. Every rank has
    as many heads. The module is an `AttentionDropout`, as those of the models here are.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, AttentionDropout):
            raise ValueError(
                f"HeadParallelDropout is for an AttentionDropout, got {type(module).__name__}; use "
                "dtcp.models.attention.ScaledDotProductAttention, or a class derived from dtcp.AttentionDropout"
            )
        module.head_shard = device_mesh.get_local_rank()
        return module
