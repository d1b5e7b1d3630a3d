"""Collectives on the rows (dim 0) of a tensor, and the check that ranks agree before they exchange anything."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dtcp.own_group import ALONE, find_own_group, own_group
from dtcp.recompute import Restore, captures_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip

# torch 2.13 renamed the tensor collectives; 2.11 has only the former names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_RECORD_SIZE = 32
_OPERATIONS = (
    "context_parallel_attention", "unshard", "check_same_batch", "backward of context_parallel_attention",
    "backward of unshard", "pipeline step", "linear_token_loss", "halo_exchange", "backward of halo_exchange",
)  # fmt: skip
_CURE = "every rank must make the same calls and run the same backwards in the same order, with requires_grad alike"
_AXIS = "mesh axis"
_agreed: set[tuple[str, str, tuple[int, ...]]] = set()
_Counts = weakref.WeakKeyDictionary[dist.ProcessGroup, int]
_num_agreements: _Counts = weakref.WeakKeyDictionary()


class _Recomputing(threading.local):
    """What groups had agreed on before the block that is being recomputed was checkpointed; None outside of that."""

    counts: _Counts | None = None


_recomputing = _Recomputing()


def check_mesh(mesh: DeviceMesh, caller: str) -> None:
    """Raise unless ``mesh`` is the 1-D mesh of the cp axis."""
    if mesh.ndim != 1:
        raise ValueError(
            f"{caller} needs the 1-D mesh of the cp axis, got a {mesh.ndim}-D mesh with axes "
            f"{mesh.mesh_dim_names}; pass mesh['cp']"
        )


@functools.lru_cache(maxsize=256)
def describe_axis(mesh: DeviceMesh, axis: int) -> str:
    """A name of the group of ``axis`` that is the same on every rank, and that ``resolve_group`` knows.

    For graphs that torch caches by their inputs, a mesh among them: it would give one rank, or another program, the
    graph of a rank whose group has another name.
    """
    with _disable_current_modes():  # made while tracing too
        return json.dumps([_AXIS, mesh.mesh.tolist(), axis])


@functools.lru_cache(maxsize=256)
def _ranks_of_axis(description: str, rank: int) -> list[int]:
    """The global ranks that share the axis with ``rank``."""
    _, mesh, axis = json.loads(description)
    ranks = np.moveaxis(np.array(mesh), axis, -1)
    return ranks[(ranks == rank).any(axis=-1)][0].tolist()


def resolve_group(group_name: str) -> dist.ProcessGroup:
    """Return the process group of that name, `ALONE` for "": a name is what travels through compiled graphs."""
    if group_name == ALONE.group_name:
        return ALONE
    if (own := find_own_group(group_name)) is not None:
        return own
    from torch.distributed.distributed_c10d import _find_pg_by_ranks_and_tag, _resolve_process_group

    if group_name.startswith(f'["{_AXIS}"'):
        ranks = _ranks_of_axis(group_name, dist.get_rank())
        group = _find_pg_by_ranks_and_tag("", ranks)
        if group is None:
            raise RuntimeError(f"the process group of ranks {ranks}, for which a graph was compiled, does not exist")
        return group
    return _resolve_process_group(group_name)  # type: ignore[arg-type]  # a NewType of str


@captures_state
def _capture_counts() -> Restore:
    """Let a recomputation know its block: two blocks of one shape would mix their sequences without an error."""
    counts = _num_agreements.copy() if _recomputing.counts is None else _recomputing.counts

    @contextlib.contextmanager
    def restore() -> Iterator[None]:
        outer = _recomputing.counts
        if torch.is_grad_enabled():  # the reentrant kind restores around its forward too, without gradients
            _recomputing.counts = counts
        try:
            yield
        finally:
            _recomputing.counts = outer

    return restore


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return (P·n, …): the (n, …) rows of every rank, in rank order. Sends (P−1)·n rows. Any dtype."""
    gathered, work = start_all_gather_rows(rows, group)
    work.wait()
    return gathered


def start_all_gather_rows(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Like ``all_gather_rows``, but return at once; neither tensor may be touched before ``work.wait()``."""
    gathered = rows.new_empty(group.size() * rows.size(0), *rows.shape[1:])
    # As bytes: gloo and NCCL refuse some dtypes (bool, int16, float8), and a gather need not know them.
    if (own := own_group(group)) is not None:
        return gathered, own.start_all_gather(_bytes(gathered), _bytes(rows.contiguous()))
    return gathered, _all_gather(_bytes(gathered), _bytes(rows.contiguous()), group=group, async_op=True)


def start_reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start the sum over ranks of the (P·n, …) rows, in their dtype; return this rank's (n, …) and the work."""
    scattered = rows.new_empty(rows.size(0) // group.size(), *rows.shape[1:])
    if (own := own_group(group)) is not None:
        return scattered, own.start_reduce_scatter(scattered.view(-1), rows.contiguous().view(-1))
    return scattered, _reduce_scatter(scattered.view(-1), rows.contiguous().view(-1), group=group, async_op=True)


def reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum over ranks of ``rows``, as ``start_reduce_scatter_rows``."""
    scattered, work = start_reduce_scatter_rows(rows, group)
    work.wait()
    return scattered


def exchange_rows(rows: Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``num_sent[r]`` of ``rows``, in order, to each rank r; return those received, in rank order. Any dtype."""
    received = rows.new_empty(sum(num_received), *rows.shape[1:])
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    sent_bytes, received_bytes = ([n * row_bytes for n in numbers] for numbers in (num_sent, num_received))
    dist.all_to_all_single(_bytes(received), _bytes(rows.contiguous()), received_bytes, sent_bytes, group=group)
    return received


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def all_gather_ints(numbers: list[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Return every rank's ``numbers``, in rank order; blocks the host."""
    gathered = all_gather_rows(torch.tensor([numbers], dtype=torch.int64, device=device), group)
    return gathered.tolist()


def agree(
    operation: str,
    fields: dict[str, int],
    group: dist.ProcessGroup,
    device: torch.device,
    error: Exception | None = None,
    entry: str = "",
    readable: Mapping[str, Callable[[int], str]] | None = None,
) -> int:
    """Raise on every rank if ranks are about to exchange different things, or if one of them has an ``error``.

    A size mismatch aborts the process under gloo and hangs under NCCL, so shapes are compared first. On CPU
    this happens at every call (some 100 µs); on an accelerator, where it blocks the host, at the first call
    with these fields in this group.

    A recomputed call is a new one, but ranks that recompute different blocks are found, where ``dtcp.recompute`` sees
    the checkpoint.

    Args:
        fields: What has to be equal, by name; at most 27 int64 numbers, the same names on each rank. On an accelerator
            those with "hash" or "checksum" in their name are compared when another one is new.
        entry: Text that has to be equal too: the place of a tensor in its container.
        readable: Of a field, what to show of its value.
        error: This rank's own verdict on its arguments: raised here, and reported by the others.

    Returns:
        The number of this call among those that the group has agreed on, from 1; for ``agree_on_backward``.
    """
    if group is ALONE:
        if error is not None:
            raise error
        return 0
    fields = {"entry": zlib.crc32(entry.encode()), **fields} if fields else fields
    # Not by contents that differ from step to step (documents, key lengths): each would block the host, or hang if one
    # rank had met its own before and another not.
    lasting = tuple(value for name, value in fields.items() if "hash" not in name and "checksum" not in name)
    signature = (group.group_name, operation, lasting)
    if device.type != "cpu" and error is not None:
        raise error
    if device.type == "cpu" or signature not in _agreed:
        names = zlib.crc32("/".join(fields).encode())
        records = _gather_records(operation, [int(error is None), names, *fields.values()], group, device)
        if error is not None or any(record != records[0] for record in records):
            difference = _difference(list(fields), records, entry, readable or {})
            if error is not None:
                if isinstance(error, ValueError) and difference:
                    raise ValueError(f"{error} ({difference})") from error
                raise error
            _compare(operation, difference, records)
    if device.type != "cpu":
        _agreed.add(signature)
    # Equal on every rank without being sent: a group agrees on a call together or not at all.
    number = _num_agreements[group] = _num_agreements.get(group, 0) + 1
    return number


def agree_on_backward(operation: str, number: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise on every rank if ranks are about to run the backwards of different calls.

    Two calls of one shape would mix their gradients without an error. On CPU only: every backward has another
    number, so on an accelerator each would block the host.

    Args:
        number: int64 (1,), what ``agree`` returned in the forward.
    """
    if device.type != "cpu" or group is ALONE:
        return
    records = _gather_records(f"backward of {operation}", [1, 0, int(number)], group, device)
    _compare_operations(records)
    numbers = {rank: record[4] for rank, record in enumerate(records)}
    if len(set(numbers.values())) > 1:
        raise RuntimeError(
            f"{operation}: the ranks of the group run the backwards of different calls, by rank {numbers} (calls of "
            f"this group, counted from 1); {_CURE}"
        )


def _gather_records(operation: str, record: list[int], group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return [operation, block recomputed, no error, names of fields, *fields] of every rank; waits for all of them."""
    counts = _recomputing.counts
    recomputed = 0 if counts is None else 1 + counts.get(group, 0)
    record = [_OPERATIONS.index(operation), recomputed, *record]
    assert len(record) <= _RECORD_SIZE, record
    try:
        return all_gather_ints(record + [0] * (_RECORD_SIZE - len(record)), group, device)
    except RuntimeError as error:  # gloo's time-out, or a rank that has left
        raise RuntimeError(
            f"{operation}: rank {group.rank()} waited for the other ranks of its group, and not all of them came "
            f"({error}); {_CURE}, unless one of them has failed: see its error"
        ) from error


def _compare_operations(records: list[list[int]]) -> None:
    running = [_OPERATIONS[record[0]] for record in records]
    if len(set(running)) > 1:
        raise RuntimeError(f"ranks of one group are in different operations: {dict(enumerate(running))}; {_CURE}")
    recomputed = {rank: record[1] for rank, record in enumerate(records)}
    if len(set(recomputed.values())) > 1:
        raise RuntimeError(
            f"{running[0]}: the ranks of the group recompute different checkpointed blocks, by rank {recomputed} (the "
            f"block's first call in this group, 0 for none); {_CURE}"
        )


def _compare(operation: str, difference: str, records: list[list[int]]) -> None:
    _compare_operations(records)
    refused = [rank for rank, record in enumerate(records) if not record[2]]
    also = f"rank(s) {refused} of the group refused their arguments; see their error" if refused else ""
    if difference:
        raise ValueError(
            f"{operation}: {difference}; every rank must pass its part of the same sequence (same batch, length, "
            f"heads, dtype, requires_grad and options){'; ' + also if also else ''}"
        )
    if refused:
        raise RuntimeError(f"{operation}: {also}")
    if len({record[3] for record in records}) > 1:
        raise ValueError(f"{operation}: the ranks of the group pass different sets of arguments; pass the same on each")


def _difference(
    names: list[str], records: list[list[int]], entry: str, readable: Mapping[str, Callable[[int], str]]
) -> str:
    """Say which field differs first, and its value by rank; nothing if records have no common fields."""
    if len({(record[0], record[3]) for record in records}) > 1:
        return ""
    for column, name in enumerate(names, start=4):
        values = [record[column] for record in records]
        if len(set(values)) > 1:
            shown: list[Any] = values
            if name.endswith("dtype"):
                shown = [str(DTYPES[v]).removeprefix("torch.") for v in values]
            elif name in readable:
                shown = [readable[name](v) for v in values]
            elif name == "entry":  # only its checksum has travelled
                shown = [entry if v == zlib.crc32(entry.encode()) else "(another)" for v in values]
            return f"{name} differs between the ranks of the group: {dict(enumerate(shown))}"
    return ""
