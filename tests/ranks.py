"""A pool of ranks for tests: real processes with real gloo between them, started once, used by every test.

    def check(rank, world, size): ...                        # top-level or closure, runs on every rank

    def test_something(ranks):
        results = ranks.run(4, check, 128)                   # what each rank returned, in rank order
        ranks.run_expecting(2, check, ValueError, "seq_len must be", 0)

A *zygote* process imports torch once and forks a worker per rank, one thread each; the workers of a world size form
one gloo world over loopback and stay until the run ends. A run that fails or hangs costs its pool: every worker is
killed and the next run forks a new one, so no test meets the wreck of another. Between runs a worker destroys the
groups that the test made and resets seeds, grad mode, dtypes, threads, environment and Dynamo.

What a ``test_*.py`` defines travels by value; modules that it imports are imported by the ranks (same sys.path).

Measured on 2 cores: the zygote's imports, once in a pytest run, 1.9 s for torch alone and about 5 s with the trainer;
then 4 ranks are up in 0.09 s (2 in 0.05 s), also after a failure. A call costs 2 ms at 2 ranks and 3.2 ms at 4.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

GRACE_SECONDS = 2.0  # after the first failure, how long the other ranks may take to report theirs
EXPECTING_GRACE_SECONDS = 20.0  # the same where every rank is to raise: one may be slower on its way there


class RanksError(AssertionError):
    """A run on the ranks failed; the message has the first failing rank's traceback and what the others did."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank did with one call."""

    rank: int
    kind: str  # "returned", "raised", "died", "waiting"
    value: Any = None  # returned: the result
    error: str = ""  # raised: "Type: message"; died: the signal or exit code
    message: str = ""  # raised: str(exception)
    details: str = ""  # traceback, or the stack dump of a rank that died or hangs
    as_expected: bool = False  # raised: is it of the expected type?


class Ranks:
    """Pools of ranks, one for each world size in use."""

    def __init__(self) -> None:
        self._zygote: _Zygote | None = None
        self._pools: dict[int, _Pool] = {}

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Call ``fn(rank, world, *args)`` on ``world`` ranks and return their results in rank order.

        Raises:
            RanksError: If a rank raises, dies, or has not returned after ``timeout`` seconds.
        """
        outcomes = self._call(world, fn, args, timeout, expected=None)
        if any(outcome.kind != "returned" for outcome in outcomes):
            self._drop(world)
            raise RanksError(_describe(outcomes, timeout))
        return [outcome.value for outcome in outcomes]

    def run_expecting(
        self,
        world: int,
        fn: Callable[..., Any],
        exception: type[BaseException],
        match: str,
        *args: Any,
        timeout: float = 60,
    ) -> list[str]:
        """Call ``fn`` like :meth:`run`; it must raise ``exception`` with a message that has ``match`` on EVERY rank.

        Returns:
            The messages in rank order.
        """
        outcomes = sorted(self._call(world, fn, args, timeout, expected=exception), key=lambda o: o.rank)
        wrong = [o for o in outcomes if not (o.as_expected and re.search(match, o.message))]
        if wrong:
            self._drop(world)
            listing = "\n".join(f"  rank {o.rank} {o.kind}: {o.error or repr(o.value)}" for o in outcomes)
            raise RanksError(
                f"expected {exception.__name__} matching {match!r} on each of {world} ranks, got\n{listing}\n"
                + "".join(o.details for o in wrong[:1])
            )
        if not self._pools[world].is_sound():
            self._drop(world)
        return [outcome.message for outcome in outcomes]

    def renew(self, world: int) -> None:
        """Have the next run on ``world`` ranks start new processes, for tests of what a process keeps for good."""
        self._drop(world)

    def pids(self, world: int) -> list[int]:
        """Return the process ids of a world's ranks, none if it is not up."""
        return list(self._pools[world].pids) if world in self._pools else []

    def close(self) -> None:
        """End all ranks. Never raises: how processes end says nothing about the tests."""
        for world in list(self._pools):
            self._drop(world)
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _call(
        self, world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, expected: Any
    ) -> list[Outcome]:
        payload = _dumps((fn, args, expected), fn)
        if world not in self._pools:
            if self._zygote is None or not self._zygote.is_alive():
                self._zygote = _Zygote()
            self._pools[world] = _Pool(world, self._zygote)
        try:
            grace = GRACE_SECONDS if expected is None else EXPECTING_GRACE_SECONDS
            return self._pools[world].call(payload, timeout, grace)
        except BaseException:  # an interrupt, or a bug here: the ranks are in the middle of something
            self._drop(world)
            raise

    def _drop(self, world: int) -> None:
        if (pool := self._pools.pop(world, None)) is not None:
            pool.kill()


class _Zygote:
    """The process that has torch loaded and forks ranks on request. It is asked over a socket, in JSON."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # Ranks meet on this machine only; its host name need not resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        script = Path(__file__).with_name("rank_process.py")
        command = [sys.executable, str(script), str(theirs.fileno()), json.dumps(sys.path)]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, end: socket.socket, arguments: dict[str, Any]) -> int:
        """Fork one rank that owns ``end``; return its process id."""
        socket.send_fds(self._socket, [json.dumps({"fork": arguments}).encode()], [end.fileno()])
        return int(self._answer())

    def status(self, pid: int) -> str:
        """Say how a dead rank died."""
        self._socket.sendall(json.dumps({"status": pid}).encode())
        return self._answer()

    def _answer(self) -> str:
        answer = self._socket.recv(4096).decode()
        if not answer:
            raise RuntimeError("the process that forks the test ranks died; its last words are on stderr")
        return answer

    def close(self) -> None:
        self._socket.close()  # its end of file is the order to leave
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Pool:
    """The ranks of one world size."""

    def __init__(self, world: int, zygote: _Zygote) -> None:
        self._zygote = zygote
        self._folder = Path(tempfile.mkdtemp(prefix="dtcp-ranks-"))
        self._connections: list[Connection] = []
        self.pids: list[int] = []
        for rank in range(world):
            ours, theirs = socket.socketpair()
            arguments = {"rank": rank, "world": world, "folder": str(self._folder), "path": sys.path}
            self.pids.append(zygote.fork(theirs, arguments))
            theirs.close()
            self._connections.append(Connection(ours.detach()))

    def call(self, payload: bytes, timeout: float, grace: float) -> list[Outcome]:
        """Hand ``payload`` to every rank; return what each did, in order of time."""
        outcomes: list[Outcome] = []
        waiting = dict(enumerate(self._connections))
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a dead rank is found below, by its end of file
                connection.send_bytes(payload)
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(waiting.values(), timeout=max(0.0, deadline - time.monotonic()))):
            for rank, connection in list(waiting.items()):
                if connection in ready:
                    del waiting[rank]
                    outcomes.append(self._receive(rank, connection))
                    if outcomes[-1].kind in ("raised", "died"):
                        deadline = min(deadline, time.monotonic() + grace)
        outcomes += self._dump_stacks(waiting)
        return sorted(outcomes, key=lambda o: o.rank) if all(o.kind == "returned" for o in outcomes) else outcomes

    def _receive(self, rank: int, connection: Connection) -> Outcome:
        try:
            return Outcome(rank, *cloudpickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            return Outcome(rank, "died", error=self._zygote.status(self.pids[rank]), details=self._dump(rank))

    def _dump_stacks(self, ranks: Iterable[int]) -> list[Outcome]:
        ranks = list(ranks)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(self._dump(rank) for rank in ranks):
            time.sleep(0.02)
        return [Outcome(rank, "waiting", details=self._dump(rank)) for rank in ranks]

    def _dump(self, rank: int) -> str:
        path = self._folder / f"stack{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def is_sound(self) -> bool:
        """Prove by a barrier, and by equal group counts, that a run which raised on every rank left no wreck."""
        outcomes = self.call(_dumps((_prove_sound, (), None)), timeout=2, grace=0)
        return all(o.kind == "returned" for o in outcomes) and len({o.value for o in outcomes}) == 1

    def kill(self) -> None:
        """End the ranks at once: SIGKILL runs no destructor, so gloo's teardown cannot abort."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self._connections:
            connection.close()
        with contextlib.suppress(OSError, RuntimeError):
            for pid in self.pids:
                self._zygote.status(pid)  # reaps it
        shutil.rmtree(self._folder, ignore_errors=True)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps the name of its file, so that tracebacks from the ranks show source lines."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child()

    @staticmethod
    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return make, tuple(code.co_filename if a == "<dynamic-code>" else a for a in arguments)


_Pickler.dispatch_table[CodeType] = _Pickler.reduce_code


def _prove_sound(rank: int, world: int) -> int:
    import torch.distributed as dist

    dist.barrier()
    return dist.distributed_c10d._world.group_count


def _dumps(task: tuple[Any, ...], fn: Callable[..., Any] | None = None) -> bytes:
    """Pickle a task. What a test module defines travels by value, with the assertions that pytest rewrote in it."""
    module = sys.modules.get(getattr(fn, "__module__", ""))
    by_value = module is not None and Path(getattr(module, "__file__", None) or "").name.startswith("test_")
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(task)
        return buffer.getvalue()
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _describe(outcomes: list[Outcome], timeout: float) -> str:
    """Tell a failure: its cause first (a death before an exception: the peers of a dead rank raise too)."""

    def ranks_that(kind: str) -> list[int]:
        return sorted(o.rank for o in outcomes if o.kind == kind)

    counts = ", ".join(f"{kind}: {ranks_that(kind)}" for kind in ("returned", "raised", "died", "waiting"))
    head = f"of {len(outcomes)} ranks {counts}"
    for kind in ("died", "raised"):
        for first in (o for o in outcomes if o.kind == kind):
            return f"rank {first.rank} {kind}: {first.error} ({head})\n{first.details}"
    stacks = "\n".join(f"rank {o.rank} hangs in\n{o.details}" for o in outcomes if o.kind == "waiting")
    return f"ranks {ranks_that('waiting')} did not return within {timeout} s ({head})\n{stacks}"
