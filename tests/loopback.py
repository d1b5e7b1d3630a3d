"""Ranks as threads of one process, whose messages are handed over as late as their exchanges allow.

A strategy runs in each of them, as it does on real ranks. Matched as gloo and NCCL do: the k-th message from one rank
to another is the k-th that the latter asks for. What is to arrive is NaN until it has been waited for, and what is sent
is read when the receiver waits: a buffer that is read too early, or written while it is on its way, gives a wrong
result every time instead of now and then.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from dtcp.attention import strategies, two_level
from dtcp.attention.comm import Message


class Group:
    """In the place of a process group."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world


class _Post:
    """All messages on their way, by (sender, receiver, how many before it), and what the ranks are waiting for."""

    def __init__(self, num_ranks: int) -> None:
        self.num_running = num_ranks
        self.waiting: list[Callable[[], bool]] = []
        self.changed = threading.Condition()
        self.on_their_way: dict[tuple[int, int, int], Tensor] = {}
        self.num_sent: Counter[tuple[int, int]] = Counter()
        self.num_asked: Counter[tuple[int, int]] = Counter()
        self.is_lost = False  # some message will never be sent or taken

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """With ``changed`` held."""
        self.waiting.append(condition)
        self.look_for_deadlock()
        self.changed.wait_for(lambda: condition() or self.is_lost)
        self.waiting.remove(condition)
        if not condition():
            raise RuntimeError("a message was not sent, or not taken: every rank that still runs waits for one")

    def look_for_deadlock(self) -> None:
        """With ``changed`` held."""
        if len(self.waiting) == self.num_running and not any(condition() for condition in self.waiting):
            self.is_lost = True
            self.changed.notify_all()

    def stop(self, *, has_failed: bool) -> None:
        """A rank has ended."""
        with self.changed:
            self.num_running -= 1
            self.is_lost |= has_failed
            self.look_for_deadlock()
            self.changed.notify_all()


class _Exchange:
    def __init__(self, post: _Post, sends: list[tuple[int, int, int]], receives: list[tuple[Any, Tensor]]) -> None:
        self._post, self._sends, self._receives = post, sends, receives

    def wait(self) -> None:
        post = self._post
        with post.changed:
            while self._receives:
                letter, rows = self._receives.pop(0)
                post.wait_until(lambda letter=letter: letter in post.on_their_way)
                sent = post.on_their_way.pop(letter)
                assert sent.shape == rows.shape and sent.dtype == rows.dtype, (letter, sent.shape, rows.shape)
                rows.copy_(sent)
                del sent, rows  # so that the one who measures sees them freed
                post.changed.notify_all()
            post.wait_until(lambda: not any(letter in post.on_their_way for letter in self._sends))


def _start_exchange(post: _Post, sends: list[Message], receives: list[Message], group: Group) -> _Exchange:
    rank, sent, asked = group.rank(), [], []
    with post.changed:
        for message in sends:
            if message.rows.size(0):  # the rest is not sent
                assert message.rows.is_contiguous() and message.peer != rank
                pair = rank, message.peer
                letter = (*pair, post.num_sent[pair])
                post.num_sent[pair] += 1
                post.on_their_way[letter] = message.rows
                sent.append(letter)
        for message in receives:
            if message.rows.size(0):  # the rest is not sent
                assert message.rows.is_contiguous() and message.peer != rank
                pair = message.peer, rank
                message.rows.fill_(float("nan"))
                asked.append(((*pair, post.num_asked[pair]), message.rows))
                post.num_asked[pair] += 1
        post.changed.notify_all()
    return _Exchange(post, sent, asked)


@contextlib.contextmanager
def _patched(post: _Post) -> Iterator[None]:
    def start(sends: list[Message], receives: list[Message], group: Any) -> _Exchange:
        return _start_exchange(post, sends, receives, group)

    with mock.patch.object(strategies, "start_exchange", start), mock.patch.object(two_level, "start_exchange", start):
        yield


def run_in_threads(world: int, function: Callable[[Any], Any]) -> list[Any]:
    """What ``function(group)`` returns for each rank; raises what the first of them raised."""
    post, results, errors = _Post(world), [None] * world, []

    def run(rank: int) -> None:
        try:
            results[rank] = function(Group(rank, world))
        except BaseException as error:
            errors.append(error)
            post.stop(has_failed=True)
        else:
            post.stop(has_failed=False)

    with _patched(post):
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    assert not post.on_their_way, "messages that nobody asked for"
    return results
