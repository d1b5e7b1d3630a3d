"""Cut a sequence over the cp ranks, join it again, and prepare what has to be done before the cut.

Shapes: any; ``dim`` is the sequence dim. S tokens, S_local slots of a rank.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dtcp.collectives import agree, all_gather_ints, check_mesh
from dtcp.containers import map_tensors, named_tensors
from dtcp.documents import PADDING, Documents, check_documents
from dtcp.layout import SequenceLayout
from dtcp.shard_ops import check_rows, shard_op, unshard_fields, unshard_op

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tree = TypeVar("Tree")


def shard(
    x: Tree,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    *,
    dim: int = 1,
    pad_value: float = 0,
    batch_dim: int = 0,
) -> Tree:
    """Return this rank's part of ``x``, in layout order.

    Args:
        x: Full tensor with ``x.size(dim) == layout.seq_len``, equal on every cp rank; or a nested dict, list,
            tuple or TensorDict of such tensors. Never written to.
        mesh: 1-D mesh of the cp axis.
        layout: Who holds which tokens; ``layout.cp`` is the size of ``mesh``.
        dim: Sequence dim of ``x``; may be negative.
        pad_value: What the pad slots hold.
        batch_dim: Dim of ``x`` whose rows the rows of the layout are, ``x.size(batch_dim) == layout.num_rows``; not
            looked at where all rows are alike (``layout.num_rows == 1``). 3-row position ids (3, B, S) are cut by
            ``dim=2, batch_dim=1``.

    Returns:
        Contiguous copy with ``size(dim) == layout.local_seq_len``. No communication; the backward puts the
        gradient of each slot at its token and zero elsewhere. Text, numbers and None in a container stay.

    Raises:
        ValueError: If a tensor has another sequence length or other rows than the layout, the mesh does not fit,
            ``x`` has no tensor or a container of another kind, or pads are needed and the dtype cannot hold
            ``pad_value``.
    """
    check_layout(mesh, layout, "shard")
    _check_has_tensor(x, "shard")
    rank = mesh.get_local_rank()

    def cut(tensor: Tensor, name: str) -> Tensor:
        check_seq_dim(tensor, dim, layout.seq_len, "shard", "layout.seq_len")
        if layout.padded_seq_len > layout.seq_len:  # on every rank alike, also on those without pads
            check_pad_value(pad_value, tensor.dtype, "shard")
        return shard_op(tensor, layout.state, layout.local_seq_len, rank, dim % tensor.ndim, batch_dim, pad_value)

    return map_tensors(cut, x, dim=dim, size=layout.local_seq_len)


def unshard(local: Tree, mesh: DeviceMesh, layout: SequenceLayout, *, dim: int = 1, batch_dim: int = 0) -> Tree:
    """Return the whole sequence in natural order, pads dropped, on every cp rank. Collective.

    Args:
        local: This rank's part, ``size(dim) == layout.local_seq_len``; or a container, as in ``shard``. Entries of
            dicts meet by key, whatever their order.
        mesh: 1-D mesh of the cp axis.
        batch_dim: Dim of the layout's rows, where they differ, as in ``shard``.

    Returns:
        Contiguous tensor with ``size(dim) == layout.seq_len``. One all-gather, (cp−1)·S_local slots sent per rank.
        The backward is a reduce-scatter, which every rank has to run: the gradient is the sum over ranks, so a
        loss that every rank computes alike from the result has to be divided by cp.

    Raises:
        ValueError: If a tensor has another local length or other rows than the layout, or differs between ranks in
            shape, dtype, layout, its documents, place in its container or ``requires_grad``: on every rank, before
            anything is exchanged.
        RuntimeError: If ranks are in different calls, or the backward of one meets that of another or none.
    """
    check_mesh(mesh, "unshard")
    group = mesh.get_group()
    group_name, num_tensors = group.group_name, 0

    def join(tensor: Tensor, name: str) -> Tensor:
        try:
            check_seq_dim(tensor, dim, layout.local_seq_len, "unshard", "layout.local_seq_len")
        except ValueError as error:
            refuse(error, unshard_fields(tensor, layout, dim, batch_dim, num_tensors, needs_grad(tensor)), name)
            raise
        seq_dim = dim % tensor.ndim
        if layout.cp == 1:
            if not torch.compiler.is_compiling():
                check_rows(tensor, layout, seq_dim, batch_dim, "unshard")
            return tensor.narrow(seq_dim, 0, layout.seq_len).clone(memory_format=torch.contiguous_format)
        where = (group_name, seq_dim, batch_dim)
        whole, _ = unshard_op(tensor, layout.state, layout.seq_len, *where, name, num_tensors, needs_grad(tensor))
        return whole

    def refuse(error: Exception, fields: dict[str, int], name: str = "") -> None:
        """Let the other ranks know, so that they raise too instead of waiting for this one."""
        if mesh.size() > 1 and not torch.compiler.is_compiling():
            agree("unshard", fields, group, torch.device(mesh.device_type), error=error, entry=name)

    try:
        check_layout(mesh, layout, "unshard")
        num_tensors = _check_has_tensor(local, "unshard")
    except ValueError as error:
        refuse(error, {})
        raise
    return map_tensors(join, local, dim=dim, size=layout.seq_len)


def shift_labels(
    tokens: Tensor,
    labels: Tensor | None = None,
    documents: Documents | None = None,
    ignore_index: int = -100,
    shift: int = 1,
) -> Tensor:
    """Return the target of every position: the token ``shift`` places later in its document.

    Call it BEFORE cutting the sequence.

    Args:
        tokens: Whole sequence, (…, S).
        labels: Targets by token, (…, S), where they are not the tokens themselves (a masked prompt, say).
        documents: Where documents lie; the last tokens of one do not predict the next one. Rows that differ are those
            of the first dim of ``tokens``. Padding predicts nothing and is predicted by nothing.
        ignore_index: What positions without a target get.
        shift: How far ahead the target is; 2 and more for multi-token prediction.

    Returns:
        Same shape and dtype as ``labels`` (else ``tokens``); position i holds the label of token i + shift.

    Raises:
        ValueError: If shapes differ, the documents are of another length or of other rows, ``shift`` is not 1 or
            more, or the dtype is no integer one or cannot hold ``ignore_index``.
    """
    targets = tokens if labels is None else labels
    _check_labels(tokens, targets, ignore_index, shift)
    later = targets[..., shift:]
    if (documents := check_documents(documents)) is not None:
        documents.check_fits(tokens.size(-1), tokens.size(0) if tokens.ndim > 1 else 1)
        # From the state and not by ``documents.ids``: torch.compile can trace it, and has it for an input.
        ids = documents.state[-documents.num_rows * documents.seq_len :].view(documents.num_rows, -1)
        ids = ids.view(documents.num_rows, *[1] * (tokens.ndim - 2), -1) if tokens.ndim > 1 else ids[0]
        ids = ids.to(targets.device)
        is_inside = (ids[..., shift:] == ids[..., :-shift]) & (ids[..., shift:] != PADDING)
        later = torch.where(is_inside, later, torch.full_like(later, ignore_index))
    return torch.cat([later, torch.full_like(targets[..., :shift], ignore_index)], dim=-1)


def _check_labels(tokens: Tensor, targets: Tensor, ignore_index: int, shift: int) -> None:
    if targets.shape != tokens.shape or targets.ndim == 0:
        raise ValueError(
            f"shift_labels needs tokens (…, S) and labels of the same shape, got {tuple(tokens.shape)} and "
            f"{tuple(targets.shape)}; pass whole rows"
        )
    if isinstance(shift, bool) or not isinstance(shift, int) or shift < 1:
        raise ValueError(f"shift must be an int of at least 1, got {shift!r}; 1 predicts the next token")
    if not (_is_integer(targets.dtype) and _fits(ignore_index, targets.dtype)):
        raise ValueError(
            f"labels must be of an integer dtype that holds ignore_index={ignore_index}, got {targets.dtype}; "
            "use labels.to(torch.int64)"
        )


def check_same_batch(x: Any, mesh: DeviceMesh) -> None:
    """Raise on every rank of ``mesh``, naming the ranks, if they hold different data. Collective.

    A cp group that reads different batches trains on nonsense without any error. This hashes shape, dtype, name and
    bytes of every tensor in ``x`` (a copy to the host) and all-gathers 24 bytes; what is no tensor is not compared.
    Bytes: equal NaNs are equal, 0.0 and −0.0 are not.

    Args:
        x: Tensor or nested container, as in ``shard``; meant to be equal on every rank.
        mesh: 1-D mesh whose ranks must agree.

    Raises:
        ValueError: If shapes, dtypes or contents differ, or there is no tensor in ``x``.
    """
    check_mesh(mesh, "check_same_batch")
    if mesh.size() == 1:
        _check_has_tensor(x, "check_same_batch")
        return
    group, device = mesh.get_group(), torch.device(mesh.device_type)
    refusal: ValueError | None = None
    try:
        _check_has_tensor(x, "check_same_batch")
        tensors = named_tensors(x)
        digests = [_digest(tensor) for _, tensor in tensors]
    except ValueError as error:
        refusal = error
    agree("check_same_batch", {}, group, device, error=refusal)
    names = [name for name, _ in tensors]
    # The numbers of ranks that hold different trees need not be equally many, so all of a rank go in three first.
    sums = [len(names), _hash(repr(names).encode()), _hash(repr(digests).encode())]
    by_rank = all_gather_ints(sums, group, device)
    if by_rank.count(sums) == len(by_rank):
        return
    if len({tuple(total[:2]) for total in by_rank}) > 1:
        what = f"tensors {_group_ranks([total[:2] for total in by_rank])}; here {names}"
    else:
        columns = list(zip(*all_gather_ints(digests, group, device), strict=True))
        what = "; ".join(
            f"{name or 'the tensor'} {_group_ranks(list(column))}; here {_summary(tensor)}"
            for (name, tensor), column in zip(tensors, columns, strict=True)
            if len(set(column)) > 1
        )
    raise ValueError(
        f"check_same_batch: ranks of the {mesh.mesh_dim_names} group hold different data: {what}. Ranks of one cp "
        "(and tp) group must read the same rows: choose rows by the rank in dims.view('batch')"
    )


def _group_ranks(values: list[Any]) -> str:
    """Show which ranks hold equal values: ``ranks [0, 2] | ranks [1]``."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), []).append(rank)
    return " | ".join(f"ranks {ranks}" for ranks in groups.values())


def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().view(-1)
    return _hash(f"{tuple(tensor.shape)} {tensor.dtype};".encode(), flat.view(torch.uint8).numpy().data)


def _hash(*parts: bytes | memoryview) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _summary(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, first elements {tensor.detach().flatten()[:4].tolist()}"


def _check_has_tensor(x: Any, caller: str) -> int:
    """Return how many tensors ``x`` has."""
    num_tensors = 1 if isinstance(x, Tensor) else len(named_tensors(x))
    if num_tensors == 0:
        raise ValueError(f"{caller} found no tensor in {type(x).__name__}; pass a tensor, or a container with one")
    return num_tensors


def needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def check_layout(mesh: DeviceMesh, layout: SequenceLayout, caller: str) -> None:
    check_mesh(mesh, caller)
    if mesh.size() != layout.cp:
        raise ValueError(
            f"{caller}: the layout is for cp={layout.cp} but the mesh has {mesh.size()} ranks; "
            f"make it with cp={mesh.size()}"
        )


def check_seq_dim(x: Tensor, dim: int, expected: int, caller: str, what: str) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{caller}: dim={dim} is out of range for a tensor of shape {tuple(x.shape)}; give its sequence dim"
        )
    if x.size(dim) != expected:
        raise ValueError(
            f"{caller}: dim {dim} of a tensor of shape {tuple(x.shape)} must have {what}={expected} slots, got "
            f"{x.size(dim)}; make the layout for this length or give another dim"
        )


def check_pad_value(pad_value: float, dtype: torch.dtype, caller: str) -> None:
    if not _fits(pad_value, dtype):
        limits = "False or True" if dtype == torch.bool else "{0.min}..{0.max}".format(_info(dtype))
        raise ValueError(f"{caller}: pad_value={pad_value} does not fit {dtype} ({limits}); give another pad_value")


def _fits(number: float, dtype: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` can hold ``number``, for floats but for rounding."""
    if dtype == torch.bool:
        return number in (0, 1)
    if _is_integer(dtype):
        return math.isfinite(number) and number == int(number) and _info(dtype).min <= number <= _info(dtype).max
    return not math.isfinite(number) or abs(number) <= _info(dtype).max


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _info(dtype: torch.dtype) -> torch.finfo | torch.iinfo:
    return torch.iinfo(dtype) if _is_integer(dtype) else torch.finfo(dtype)
