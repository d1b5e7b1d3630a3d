"""Processes for the ranks: started here, asked over pipes, ended whatever happens. No torch in here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

from attention_bench.problem import BenchmarkError

GRACE_SECONDS = 1.0  # after the first failure, how long the other ranks may take to report theirs


def serve(rank: int, make: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    """Answer requests until the other end of ``connection`` closes. Never returns: teardown of gloo can abort."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    try:
        served = make(rank, *arguments)
        connection.send(("done", None))
        while True:
            try:
                method, *values = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send(("done", getattr(served, method)(*values)))
    except BaseException:
        connection.send(("raised", traceback.format_exc()))
        os._exit(1)


class Ranks:
    """The processes of all ranks. While they wait for a request they sleep in a read from a pipe.

    Args:
        make: Called as ``make(rank, *arguments)`` in each process; the methods of what it returns can be asked for.
        timeout: Seconds that one request may take.
    """

    def __init__(self, num_ranks: int, make: Callable[..., Any], *arguments: Any, timeout: float) -> None:
        self._timeout = timeout
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        loopback = os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
        with mock.patch.dict(os.environ, environment):
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(rank, make, arguments, theirs), daemon=True)
                self._processes.append(process)
                process.start()
                theirs.close()
                self._connections.append(ours)

    def __enter__(self) -> Ranks:
        """Wait until every rank is made."""
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Have every rank call a method; return the results in rank order.

        Raises:
            BenchmarkError: If a rank raised, died, or said nothing in time.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a dead rank is found below, by its end of file
                connection.send((method, *arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Wait for one answer of each rank."""
        answers: dict[int, Any] = {}
        failures: list[str] = []
        waiting = dict(enumerate(self._connections))
        deadline = time.monotonic() + self._timeout
        while waiting and (ready := wait(waiting.values(), timeout=max(0.0, deadline - time.monotonic()))):
            for rank in [r for r, connection in waiting.items() if connection in ready]:
                kind, answer = self._receive(rank, waiting.pop(rank))
                if kind == "done":
                    answers[rank] = answer
                    continue
                # One that died comes first: what the others raise is its consequence.
                failures.insert(0 if kind == "died" else len(failures), f"rank {rank} {kind}: {answer}")
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise BenchmarkError("\n".join(failures))
        if waiting:
            raise BenchmarkError(
                f"rank(s) {sorted(waiting)} gave no answer within {self._timeout:g} s; --timeout allows more"
            )
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int, connection: Connection) -> tuple[str, Any]:
        try:
            return connection.recv()
        except (EOFError, OSError):
            self._processes[rank].join(GRACE_SECONDS)
            return "died", f"exit code {self._processes[rank].exitcode}"
