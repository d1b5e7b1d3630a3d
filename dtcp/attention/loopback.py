"""All ranks of a cp axis as threads of one process, on one device: to see every rank's attention where there is no
other device. Messages are copies.
"""

from __future__ import annotations

import functools
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

from dtcp.own_group import OwnGroup

T = TypeVar("T")
_names = itertools.count()


class Abandoned(RuntimeError):
    """Raised in a rank that waits while another one has failed."""


class Loopback:
    """``size`` ranks; ``run`` gives each of them a group that stands for the process group of the cp axis.

    A rank that fails ends all of them, and so do ranks of which each waits for another, and one that waits longer than
    ``timeout`` seconds. Results do not depend on the order in which threads get along: messages between two ranks are
    matched in their order, and sums are made in the order of the ranks.

    On an accelerator all copies are in the one stream that every thread begins with. There autograd runs the
    backwards of all threads in one of its own, where the first would wait for the others forever: call the backward
    op itself.

    Args:
        strict: Hand everything over as late as an exchange allows: what is to arrive is NaN until it has been waited
            for, what is sent is read when the receiver waits, and a rank that does not wait for what it has started is
            refused. So a buffer that is read too early, or written to while it is on its way, gives a wrong result
            every time instead of now and then.
    """

    def __init__(self, size: int, *, timeout: float = 60, strict: bool = False) -> None:
        if size < 1:
            raise ValueError(f"a loopback needs at least one rank, got size={size}")
        self.timeout, self.strict = timeout, strict
        name = f"loopback {next(_names)}"
        self.groups: list[dist.ProcessGroup] = [LoopbackGroup(self, name, rank, size) for rank in range(size)]  # type: ignore[misc]
        self._state = _State(size)

    def run(self, function: Callable[[dist.ProcessGroup], T]) -> list[T]:
        """Return ``function(group)`` of every rank, in the order of the ranks; raise what the first failing one did."""
        state = self._state = _State(len(self.groups))
        results: list[Any] = [None] * len(self.groups)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def work(rank: int) -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                results[rank] = function(self.groups[rank])
            except BaseException as error:
                state.fail(rank, error)
            finally:
                state.end()

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(len(self.groups))]
        for thread in threads:
            thread.start()
        self._join(threads, state)
        if state.error is None and (left := state.unmatched()):
            raise RuntimeError(f"the ranks of a loopback ended with messages that nobody took or sent: {left}")
        if state.error is None and self.strict and state.started:
            left = [f"rank {pending.rank}: {pending.what}" for pending in state.started]
            raise RuntimeError(f"the ranks of a loopback ended without waiting for what they had started: {left}")
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
class _Transfer:
    """A message, or a collective, that all its ranks have started; ``num_left`` of them have not taken their part."""

    num_left: int


@dataclass(eq=False)
class _Pending:
    """One tensor on its way, or one rank's part in a collective.

    Attributes:
        target: What is filled; None for a message that is sent.
        take: Fills it; once there is a ``transfer``.
    """

    loopback: Loopback
    what: str
    rank: int
    tensor: Tensor | None
    target: Tensor | None = None
    transfer: _Transfer | None = None
    take: Callable[[], None] | None = None

    def wait(self) -> None:
        state = self.loopback._state
        with state.changed:
            state.wait_until(lambda: self.transfer is not None, self)
            self.take_now()
            state.wait_until(lambda: self.transfer is not None and self.transfer.num_left == 0, self)
            state.started.pop(self, None)
            self.tensor = self.target = None  # whoever measures memory sees them freed

    def take_now(self) -> None:
        """With ``changed`` held."""
        take, self.take = self.take, None
        if take is not None and self.transfer is not None:
            take()
            self.transfer.num_left -= 1
            self.loopback._state.changed.notify_all()


@dataclass
class _State:
    """What is on its way in one run.

    Attributes:
        num_running: Ranks that have not ended.
        waiting: By rank, what has to become true for it to go on.
        started: What a rank has not waited for yet, in order.
        messages: By (sender, receiver), what either of them has started and the other has not.
        meetings: By number, collectives in which not all ranks are yet.
    """

    num_running: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    started: dict[_Pending, None] = field(default_factory=dict)
    messages: dict[tuple[int, int], deque[tuple[bool, _Pending]]] = field(default_factory=dict)
    meetings: dict[int, list[_Pending]] = field(default_factory=dict)
    num_met: dict[int, int] = field(default_factory=dict)
    error: tuple[int, BaseException] | None = None
    is_stuck: bool = False

    def wait_until(self, condition: Callable[[], bool], pending: _Pending) -> None:
        """With ``changed`` held; raises if the condition will never be true."""
        rank, timeout = pending.rank, pending.loopback.timeout
        self.waiting[rank] = condition
        self._look_whether_stuck()
        came = self.changed.wait_for(lambda: condition() or self.error is not None or self.is_stuck, timeout)
        del self.waiting[rank]
        if condition():
            return
        cure = "every rank must make the same calls in the same order"
        if not came:
            raise TimeoutError(f"rank {rank} of a loopback waited {timeout} s for {pending.what}; {cure}")
        if self.error is None:
            raise RuntimeError(
                f"rank {rank} of a loopback waits for {pending.what}, which will never come, since every rank that "
                f"still runs waits; {cure}"
            )
        raise Abandoned(f"rank {rank} of a loopback: another rank has failed; see its error")

    def _look_whether_stuck(self) -> None:
        conditions = self.waiting.values()
        if conditions and len(conditions) == self.num_running and not any(is_met() for is_met in conditions):
            self.is_stuck = True
            self.changed.notify_all()

    def end(self) -> None:
        """A rank has ended."""
        with self.changed:
            self.num_running -= 1
            self._look_whether_stuck()

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
        sent = [self._post(peer, rows, is_send=True) for peer, rows in sends]
        received = [self._post(peer, rows, is_send=False) for peer, rows in receives]
        # First what arrives: two ranks that send to each other would wait for each other to take it.
        return [*received, *sent]  # type: ignore[list-item]

    def start_all_gather(self, gathered: Tensor, rows: Tensor) -> dist.Work:
        return self._meet("an all-gather", rows, gathered, _gather)

    def start_reduce_scatter(self, scattered: Tensor, rows: Tensor) -> dist.Work:
        return self._meet("a reduce-scatter", rows, scattered, _sum)

    def _post(self, peer: int, rows: Tensor, *, is_send: bool) -> _Pending:
        """Start one message; whoever of its two ranks comes second finds the other's part."""
        sender, receiver = (self._rank, peer) if is_send else (peer, self._rank)
        what = f"a message {tuple(rows.shape)} {rows.dtype} from rank {sender} to rank {receiver}"
        if peer == self._rank or not rows.is_contiguous():
            raise ValueError(f"{what}: a process group sends contiguous rows to other ranks only")
        state = self._loopback._state
        with state.changed:
            own = self._started(what, rows, None if is_send else rows)
            queue = state.messages.setdefault((sender, receiver), deque())
            if not queue or queue[0][0] == is_send:
                queue.append((is_send, own))
                return own
            _, other = queue.popleft()
            assert other.tensor is not None
            if other.tensor.shape != rows.shape or other.tensor.dtype != rows.dtype:
                raise ValueError(f"the ranks of a loopback disagree: {what}, and {other.what}")
            source, target = (rows, other.tensor) if is_send else (other.tensor, rows)
            taker = other if is_send else own
            taker.take = functools.partial(_copy, target, source)
            self._transfer([own, other], [taker])
        return own

    def _meet(
        self, what: str, rows: Tensor, target: Tensor, combine: Callable[[_Pending, list[Tensor]], None]
    ) -> dist.Work:
        """Start a collective, of which each rank takes its part."""
        state = self._loopback._state
        with state.changed:
            own = self._started(f"{what} of {tuple(rows.shape)} {rows.dtype}", rows, target)
            number = state.num_met[self._rank] = state.num_met.get(self._rank, 0) + 1
            meeting = state.meetings.setdefault(number, [])
            if meeting and meeting[0].what != own.what:
                raise ValueError(f"the ranks of a loopback disagree: {own.what}, and {meeting[0].what}")
            meeting.append(own)
            if len(meeting) == self._size:
                del state.meetings[number]
                meeting.sort(key=lambda pending: pending.rank)
                parts = [pending.tensor for pending in meeting if pending.tensor is not None]
                for pending in meeting:
                    pending.take = functools.partial(combine, pending, parts)
                self._transfer(meeting, meeting)
        return own  # type: ignore[return-value]

    def _started(self, what: str, rows: Tensor, target: Tensor | None) -> _Pending:
        _check_stream(rows)
        pending = _Pending(self._loopback, what, self._rank, rows, target)
        self._loopback._state.started[pending] = None
        if self._loopback.strict and target is not None:
            target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
        return pending

    def _transfer(self, pendings: list[_Pending], takers: list[_Pending]) -> None:
        """All are there: the takers fill their targets, now or when they wait for them."""
        transfer = _Transfer(len(takers))
        for pending in pendings:
            pending.transfer = transfer
        if not self._loopback.strict:
            for pending in takers:
                pending.take_now()
        self._loopback._state.changed.notify_all()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _gather(own: _Pending, parts: list[Tensor]) -> None:
    assert own.target is not None
    torch.cat(parts, out=own.target)


def _sum(own: _Pending, parts: list[Tensor]) -> None:
    assert own.target is not None
    first, *others = (part.chunk(len(parts))[own.rank] for part in parts)
    own.target.copy_(first)
    for part in others:
        own.target.add_(part)


def _check_stream(rows: Tensor) -> None:
    if rows.is_cuda and torch.cuda.current_stream(rows.device) != torch.cuda.default_stream(rows.device):
        raise RuntimeError("a loopback copies in the default stream, and this rank computes in another; leave it")
