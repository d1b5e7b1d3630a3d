"""Cut a sequence over the cp ranks, join it again, and prepare what has to be done before the cut.

Shapes: any; ``dim`` is the sequence dim. S tokens, S_local slots of a rank.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dtcp.collectives import (
    DTYPES,
    agree,
    all_gather_ints,
    all_gather_rows,
    check_mesh,
    reduce_scatter_rows,
    resolve_group,
)
from dtcp.containers import map_tensors, tensors_of
from dtcp.layout import SequenceLayout, layout_from_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tree = TypeVar("Tree")


def shard(x: Tree, mesh: DeviceMesh, layout: SequenceLayout, *, dim: int = 1, pad_value: float = 0) -> Tree:
    """Return this rank's part of ``x``, in layout order.

    Args:
        x: Full tensor with ``x.size(dim) == layout.seq_len``, equal on every cp rank; or a nested dict, list,
            tuple or TensorDict of such tensors. Never written to.
        mesh: 1-D mesh of the cp axis.
        layout: Who holds which tokens; ``layout.cp`` is the size of ``mesh``.
        dim: Sequence dim of ``x``; may be negative.
        pad_value: What the pad slots hold.

    Returns:
        Contiguous copy with ``size(dim) == layout.local_seq_len``. No communication; the backward puts the
        gradient of each slot at its token and zero elsewhere.

    Raises:
        ValueError: If a tensor has another sequence length than the layout, the mesh does not fit, or
            ``pad_value`` is needed and its dtype cannot hold it.
    """
    _check_layout(mesh, layout, "shard")
    rank = mesh.get_local_rank()

    def cut(tensor: Tensor) -> Tensor:
        seq_dim = _check_seq_dim(tensor, dim, layout.seq_len, "shard", "layout.seq_len")
        return _cut(tensor, layout, rank, seq_dim, pad_value)

    return map_tensors(cut, x, dim=dim)


def unshard(local: Tree, mesh: DeviceMesh, layout: SequenceLayout, *, dim: int = 1) -> Tree:
    """Return the whole sequence in natural order, pads dropped, on every cp rank.

    Args:
        local: This rank's part, ``size(dim) == layout.local_seq_len``; or a container, as in ``shard``.
        mesh: 1-D mesh of the cp axis.

    Returns:
        Tensor with ``size(dim) == layout.seq_len``. One all-gather, (cp−1)·S_local slots sent per rank. The
        backward is a reduce-scatter: the gradient is the sum over ranks, so a loss that every rank computes
        alike from the result has to be divided by cp.

    Raises:
        ValueError: If a tensor has another local length than the layout, or differs between ranks in shape.
    """
    _check_layout(mesh, layout, "unshard")
    group_name = mesh.get_group().group_name

    def join(tensor: Tensor) -> Tensor:
        seq_dim = _check_seq_dim(tensor, dim, layout.local_seq_len, "unshard", "layout.local_seq_len")
        if layout.cp == 1:
            return tensor.narrow(seq_dim, 0, layout.seq_len).clone(memory_format=torch.contiguous_format)
        return unshard_op(tensor, layout.state, layout.seq_len, group_name, seq_dim)

    return map_tensors(join, local, dim=dim)


def shift_labels(tokens: Tensor, labels: Tensor | None = None, documents: Any = None, ignore_index: int = -100) -> Tensor:
    """Return the target of every position: the token after it. Call it BEFORE cutting the sequence.

    Args:
        tokens: Whole sequence, (…, S).
        labels: Targets by token, (…, S), where they are not the tokens themselves (a masked prompt, say).
        documents: Not available yet.
        ignore_index: What the last position of each row gets.

    Returns:
        Same shape and dtype as ``labels`` (else ``tokens``); position i holds the label of token i+1.
    """
    if documents is not None:
        raise NotImplementedError("shift_labels does not know documents yet; use documents=None")
    targets = tokens if labels is None else labels
    if targets.shape != tokens.shape or targets.ndim == 0:
        raise ValueError(f"labels must have the shape of tokens, got {tuple(targets.shape)} and {tuple(tokens.shape)}")
    if targets.dtype.is_floating_point or targets.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"labels must be of a signed integer dtype that holds {ignore_index}, got {targets.dtype}")
    return torch.cat([targets[..., 1:], torch.full_like(targets[..., :1], ignore_index)], dim=-1)


def check_same_batch(x: Any, mesh: DeviceMesh) -> None:
    """Raise on every rank of ``mesh``, naming the ranks, if they hold different data.

    A cp group that reads different batches trains on nonsense without any error. This hashes the bytes of
    every tensor in ``x`` (a copy to the host) and all-gathers 32 bytes.

    Args:
        x: Tensor or nested container, as in ``shard``; meant to be equal on every rank.
        mesh: 1-D mesh whose ranks must agree.

    Raises:
        ValueError: If shapes, dtypes or contents differ.
    """
    check_mesh(mesh, "check_same_batch")
    if mesh.size() == 1:
        return
    group, tensors = mesh.get_group(), tensors_of(x)
    if not tensors:
        raise ValueError(f"check_same_batch found no tensor in {type(x).__name__}; pass the batch")
    device = torch.device(mesh.device_type)
    agree("check_same_batch", {}, group, device)
    digests = [digest for (digest,) in all_gather_ints([_digest(tensors)], group, device)]
    if len(set(digests)) > 1:
        by_content: dict[int, list[int]] = {}
        for rank, digest in enumerate(digests):
            by_content.setdefault(digest, []).append(rank)
        parts = " | ".join(f"ranks {ranks}" for ranks in by_content.values())
        raise ValueError(
            f"ranks of the {mesh.mesh_dim_names} group hold different data: {parts}; here {_summary(tensors[0])}. "
            "Ranks of one cp (and tp) group must read the same rows: choose rows by the rank in dims.view('batch')"
        )


def _digest(tensors: list[Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _summary(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, first elements {tensor.detach().flatten()[:4].tolist()}"


def _check_layout(mesh: DeviceMesh, layout: SequenceLayout, caller: str) -> None:
    check_mesh(mesh, caller)
    if mesh.size() != layout.cp:
        raise ValueError(
            f"{caller}: the layout is for cp={layout.cp} but the mesh has {mesh.size()} ranks; "
            f"make it with cp={mesh.size()}"
        )


def _check_seq_dim(x: Tensor, dim: int, expected: int, caller: str, what: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{caller}: dim={dim} is out of range for a tensor of shape {tuple(x.shape)}; give its sequence dim")
    if x.size(dim) != expected:
        raise ValueError(
            f"{caller}: dim {dim} of a tensor of shape {tuple(x.shape)} must have {what}={expected} slots, got "
            f"{x.size(dim)}; make the layout for this length or give another dim"
        )
    return dim % x.ndim


def _cut(x: Tensor, layout: SequenceLayout, rank: int, dim: int, pad_value: float) -> Tensor:
    num_valid = layout.num_valid(rank)
    index = layout.positions(rank)[:num_valid].to(x.device)
    # index_select always copies, so the result never shares storage with x; its backward is the scatter.
    local = x.index_select(dim, index).contiguous()
    num_pads = layout.local_seq_len - num_valid
    if layout.padded_seq_len > layout.seq_len:  # on every rank alike, also on those without pads
        _check_pad_value(pad_value, x.dtype)
    if num_pads == 0:
        return local
    pads = torch.full([*x.shape[:dim], num_pads, *x.shape[dim + 1 :]], pad_value, dtype=x.dtype, device=x.device)
    return torch.cat([local, pads], dim)


def _check_pad_value(pad_value: float, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (low <= pad_value <= high and pad_value == int(pad_value)):
        raise ValueError(f"shard: pad_value={pad_value} does not fit {dtype} ({low}..{high}); give another pad_value")


@torch.library.custom_op("dtcp::unshard", mutates_args=())
def unshard_op(local: Tensor, state: Tensor, seq_len: int, group_name: str, dim: int) -> Tensor:
    """All-gather as an op: ``state`` is ``layout.state``; ``seq_len`` stands beside it for the fake, which has no data."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    beside = [size for d, size in enumerate(local.shape) if d != dim][:7]
    agree(
        "unshard",
        {"dtype": DTYPES.index(local.dtype), "seq_len": seq_len, "local length": local.size(dim), "dim": dim}
        | {f"size {i} beside the sequence": size for i, size in enumerate(beside)},
        group,
        local.device,
    )
    rows = all_gather_rows(local.movedim(dim, 0), group)
    return rows.index_select(0, layout.inverse().to(local.device)).movedim(0, dim).contiguous()


@torch.library.custom_op("dtcp::unshard_backward", mutates_args=())
def unshard_backward_op(grad: Tensor, state: Tensor, local_seq_len: int, group_name: str, dim: int) -> Tensor:
    """Reduce-scatter of the gradient of the whole sequence; half precision is summed in float32."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    rows = grad.movedim(dim, 0)
    sum_dtype = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
    slots = rows.new_zeros(layout.padded_seq_len, *rows.shape[1:], dtype=sum_dtype)
    slots.index_copy_(0, layout.inverse().to(grad.device), rows.to(sum_dtype))
    return reduce_scatter_rows(slots, group).to(grad.dtype).movedim(0, dim).contiguous()


@unshard_op.register_fake
def _(local: Tensor, state: Tensor, seq_len: int, group_name: str, dim: int) -> Tensor:
    return local.new_empty([*local.shape[:dim], seq_len, *local.shape[dim + 1 :]])


@unshard_backward_op.register_fake
def _(grad: Tensor, state: Tensor, local_seq_len: int, group_name: str, dim: int) -> Tensor:
    return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    local, state, _, ctx.group_name, ctx.dim = inputs
    ctx.local_seq_len = local.size(ctx.dim)
    ctx.save_for_backward(state)


def _unshard_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (state,) = ctx.saved_tensors
    return unshard_backward_op(grad, state, ctx.local_seq_len, ctx.group_name, ctx.dim), None, None, None, None


unshard_op.register_autograd(_unshard_autograd, setup_context=_save_for_backward)
