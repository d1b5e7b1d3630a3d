"""The processes behind ``ranks.py``: the zygote, which has torch loaded and forks, and the ranks, which run tests.

Started as ``python rank_process.py <fd of a socket> <sys.path as JSON>``. The zygote answers JSON on that socket:
``{"fork": arguments}`` with a rank's connection attached, and ``{"status": pid}``. A rank gets pickled
``(fn, args, expected exception or None)`` and answers ``(kind, value, error, message, details, as_expected)``.
"""

import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import socket
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import cloudpickle

GROUP_TIMEOUT = timedelta(minutes=10)  # gloo's own; that of a run is shorter and says more
PRELOADED = ("_pytest.assertion.rewrite", "numpy", "torch.distributed.tensor.debug", "dtcp", "dtcp.train.trainer")


def _serve_zygote(control: socket.socket) -> None:
    """Load what tests need, then fork a rank for each request until the socket closes."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    for module in PRELOADED:
        with contextlib.suppress(Exception):  # what is broken is for the test to meet
            __import__(module)
    gc.freeze()  # what all ranks share is not looked at again: a collection takes 0.2 ms
    while True:
        request, fds, *_ = socket.recv_fds(control, 65536, 1)
        if not request:
            os._exit(0)
        message = json.loads(request)
        if "status" in message:
            control.sendall(_status(message["status"]).encode())
            continue
        if (pid := os.fork()) == 0:
            control.close()
            _serve_rank(Connection(fds[0]), **message["fork"])
        os.close(fds[0])
        control.sendall(str(pid).encode())


def _status(pid: int) -> str:
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return "reaped before"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _serve_rank(connection: Connection, rank: int, world: int, folder: str, path: list[str]) -> None:
    """Run tasks until the connection closes. Never returns, and runs no destructor on the way out."""
    dump = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115, faulthandler writes to it as long as we live
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=False)
    sys.path[:] = path
    tasks: SimpleQueue[bytes] = SimpleQueue()
    # A thread of its own reads, so that a rank which hangs in gloo still leaves when pytest is gone.
    Thread(target=_read_tasks, args=(connection, tasks), daemon=True).start()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
        environment, cwd = dict(os.environ), os.getcwd()
        while True:
            payload = tasks.get()
            _reset(environment, cwd)
            connection.send_bytes(_run_task(payload, rank, world))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _read_tasks(connection: Connection, tasks: "SimpleQueue[bytes]") -> None:
    try:
        while True:
            tasks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _run_task(payload: bytes, rank: int, world: int) -> bytes:
    expected = None
    try:
        fn, args, expected = cloudpickle.loads(payload)
        return cloudpickle.dumps(("returned", fn(rank, world, *args)))
    except BaseException as error:
        name, as_expected = f"{type(error).__name__}: {error}", expected is not None and isinstance(error, expected)
        return cloudpickle.dumps(("raised", None, name, str(error), traceback.format_exc(), as_expected))


def _reset(environment: dict[str, str], cwd: str) -> None:
    """Undo what the last test may have left. Every rank is idle here, as pytest has all their answers."""
    import numpy
    import torch
    import torch.distributed as dist

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        del group, groups
        _forget_meshes()
        gc.collect()  # gloo's sockets and threads go with the last reference, which meshes hold in cycles
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch._C._set_deterministic_algorithms(False, warn_only=False)  # the public one imports Inductor, 1.2 s
    torch.set_float32_matmul_precision("highest")
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _forget_meshes() -> None:
    """Empty the caches that keep meshes, and with them hundreds of groups, whose threads wake up all the time."""
    import torch

    if "torch.distributed.tensor.debug" in sys.modules:
        # DTensor caches specs by the mesh's shape and names: the next test would meet groups that are gone.
        torch.distributed.tensor.debug._clear_sharding_prop_cache()
    if redistribute := sys.modules.get("torch.distributed.tensor._redistribute"):
        getattr(redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor"):
            continue
        own = [x for x in vars(module).values() if getattr(x, "__module__", None) == name]
        members = [m for cls in own if isinstance(cls, type) for m in vars(cls).values()]
        for cached in (*own, *(getattr(member, "__func__", member) for member in members)):
            if isinstance(cached, functools._lru_cache_wrapper):
                cached.cache_clear()
    if collectives := sys.modules.get("dtcp.collectives"):
        collectives.describe_axis.cache_clear()


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    _serve_zygote(socket.socket(fileno=int(sys.argv[1])))
