"""All ranks of a cp axis as threads of one process, on one device: to see every rank's attention where there is no
other device. Messages are copies.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dtcp.collectives import OwnGroup

T = TypeVar("T")
_names = itertools.count()


class Abandoned(RuntimeError):
    """Raised in a rank that waits while another one has failed."""


class Loopback:
    """``size`` ranks; ``run`` gives each of them a group that stands for the process group of the cp axis.

    A rank that fails ends all of them, and so does one that waits longer than ``timeout`` seconds. Results do not
    depend on the order in which threads get along: messages between two ranks are matched in their order, and sums
    are made in the order of the ranks.

    On an accelerator all copies are in the one stream that every thread begins with. There autograd runs the
    backwards of all threads in one of its own, where the first would wait for the others forever: call the backward
    op itself.
    """

    def __init__(self, size: int, *, timeout: float = 60) -> None:
        if size < 1:
            raise ValueError(f"a loopback needs at least one rank, got size={size}")
        self.timeout = timeout
        name = f"loopback {next(_names)}"
        self.groups: list[dist.ProcessGroup] = [LoopbackGroup(self, name, rank, size) for rank in range(size)]  # type: ignore[misc]
        self._state = _State()

    def run(self, function: Callable[[dist.ProcessGroup], T]) -> list[T]:
        """Return ``function(group)`` of every rank, in the order of the ranks; raise what the first failing one did."""
        state = self._state = _State()
        results: list[Any] = [None] * len(self.groups)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def work(rank: int) -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                results[rank] = function(self.groups[rank])
            except BaseException as error:
                state.fail(rank, error)

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(len(self.groups))]
        for thread in threads:
            thread.start()
        self._join(threads, state)
        if state.error is None and (left := state.unmatched()):
            raise RuntimeError(f"the ranks of a loopback ended with messages that nobody took or sent: {left}")
        if state.error is not None:
            rank, error = state.error
            error.add_note(f"(on rank {rank} of a loopback of {len(self.groups)})")
            raise error
        return results

    def _join(self, threads: list[threading.Thread], state: _State) -> None:
        """Wait for the threads: without a limit while all of them are at it, within the time-out once some are not."""
        end = None
        while running := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
            threads[running[0]].join(0.05)
            if end is None and (state.error is not None or len(running) < len(threads)):
                end = time.monotonic() + 2 * self.timeout  # a wait in them ends by itself before
            if end is not None and time.monotonic() > end:
                failed = None if state.error is None else state.error[1]
                raise TimeoutError(
                    f"rank(s) {running} of a loopback still run {2 * self.timeout} s after another rank has ended"
                ) from failed


@dataclass
class _Pending:
    """One tensor on its way, or one rank's part in a collective."""

    loopback: Loopback
    what: str
    rank: int
    tensor: Tensor
    target: Tensor | None = None
    done: bool = False

    def wait(self) -> None:
        state = self.loopback._state
        with state.changed:
            if not state.changed.wait_for(lambda: self.done or state.error is not None, self.loopback.timeout):
                raise TimeoutError(
                    f"rank {self.rank} of a loopback waited {self.loopback.timeout} s for {self.what}; every rank must "
                    "make the same calls in the same order"
                )
            if not self.done:
                raise Abandoned(f"rank {self.rank} of a loopback: another rank has failed; see its error")


@dataclass
class _State:
    """What is on its way in one run.

    Attributes:
        messages: By (sender, receiver), what either of them has started and the other has not.
        meetings: By number, collectives in which not all ranks are yet.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[tuple[int, int], deque[tuple[bool, _Pending]]] = field(default_factory=dict)
    meetings: dict[int, list[_Pending]] = field(default_factory=dict)
    num_met: dict[int, int] = field(default_factory=dict)
    error: tuple[int, BaseException] | None = None

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            if self.error is None or (isinstance(self.error[1], Abandoned) and not isinstance(error, Abandoned)):
                self.error = rank, error
            self.changed.notify_all()

    def unmatched(self) -> list[str]:
        return [p.what for queue in self.messages.values() for _, p in queue] + [
            p.what for meeting in self.meetings.values() for p in meeting
        ]


class LoopbackGroup(OwnGroup):
    """What one rank of a ``Loopback`` exchanges by."""

    def __init__(self, loopback: Loopback, name: str, rank: int, size: int) -> None:
        super().__init__(name, rank, size)
        self._loopback = loopback

    def start_messages(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> list[dist.Work]:
        started = [self._post(peer, rows, is_send=True) for peer, rows in sends]
        started += [self._post(peer, rows, is_send=False) for peer, rows in receives]
        return started  # type: ignore[return-value]

    def start_all_gather(self, gathered: Tensor, rows: Tensor) -> dist.Work:
        return self._meet("an all-gather", rows, gathered, _gather)

    def start_reduce_scatter(self, scattered: Tensor, rows: Tensor) -> dist.Work:
        return self._meet("a reduce-scatter", rows, scattered, _sum)

    def _post(self, peer: int, rows: Tensor, *, is_send: bool) -> _Pending:
        """Start one message; whoever of its two ranks comes second copies, before either may touch the tensors."""
        _check_stream(rows)
        state, (sender, receiver) = self._loopback._state, (self._rank, peer) if is_send else (peer, self._rank)
        what = f"a message {tuple(rows.shape)} {rows.dtype} from rank {sender} to rank {receiver}"
        own = _Pending(self._loopback, what, self._rank, rows)
        with state.changed:
            queue = state.messages.setdefault((sender, receiver), deque())
            if not queue or queue[0][0] == is_send:
                queue.append((is_send, own))
                return own
            _, other = queue.popleft()
            if other.tensor.shape != rows.shape or other.tensor.dtype != rows.dtype:
                raise ValueError(f"the ranks of a loopback disagree: {what}, and {other.what}")
            source, target = (rows, other.tensor) if is_send else (other.tensor, rows)
            target.copy_(source)
            own.done = other.done = True
            state.changed.notify_all()
        return own

    def _meet(self, what: str, rows: Tensor, target: Tensor, combine: Callable[[list[_Pending]], None]) -> dist.Work:
        """Start a collective; the last rank to come does it for all."""
        _check_stream(rows)
        state = self._loopback._state
        own = _Pending(self._loopback, f"{what} of {tuple(rows.shape)} {rows.dtype}", self._rank, rows, target)
        with state.changed:
            number = state.num_met[self._rank] = state.num_met.get(self._rank, 0) + 1
            meeting = state.meetings.setdefault(number, [])
            if meeting and meeting[0].what != own.what:
                raise ValueError(f"the ranks of a loopback disagree: {own.what}, and {meeting[0].what}")
            meeting.append(own)
            if len(meeting) == self._size:
                del state.meetings[number]
                combine(sorted(meeting, key=lambda pending: pending.rank))
                for pending in meeting:
                    pending.done = True
                state.changed.notify_all()
        return own  # type: ignore[return-value]


def _gather(meeting: list[_Pending]) -> None:
    for pending in meeting:
        assert pending.target is not None
        torch.cat([other.tensor for other in meeting], out=pending.target)


def _sum(meeting: list[_Pending]) -> None:
    for pending in meeting:
        assert pending.target is not None
        parts = [other.tensor.chunk(len(meeting))[pending.rank] for other in meeting]
        pending.target.copy_(parts[0])
        for part in parts[1:]:
            pending.target.add_(part)


def _check_stream(rows: Tensor) -> None:
    if rows.is_cuda and torch.cuda.current_stream(rows.device) != torch.cuda.default_stream(rows.device):
        raise RuntimeError("a loopback copies in the default stream, and this rank computes in another; leave it")
