#!/usr/bin/env python3
"""Kill a training job with SIGKILL at random moments, resume it, and compare it with a run that nobody killed.

    tools/kill_resume.py                      twenty kills, by turns in training and in a save
    tools/kill_resume.py --kills 4 --json
    tools/kill_resume.py -- model=gpt_tiny mesh.cp=2 training.steps=40      another job (hydra overrides)

Each killed job is resumed twice, from copies of what it left: on the same mesh, where losses, gradient norms, weights
and optimizer states have to be bitwise those of the run without a kill, and on another one, where the losses have to
agree to 1e-5 (relative). To hit a save, its files are written slowly: by a patch in this tool. Exit code 0 if all of
that holds, else 1.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOB = [
    "model=llama_tiny",
    "model.num_layers=2",
    "model.dim=64",
    "model.ffn_dim=160",
    "training.seq_len=65",
    "training.global_batch_size=4",
    "training.steps=20",
    "data.max_bytes=1000000",
    "checkpoint.every=3",
    "lr_scheduler.warmup_steps=3",
    "device=cpu",
]
MESH, OTHER_MESH = ["mesh.cp=2"], ["mesh.cp=1"]
SLOW_SAVE_SECONDS = 0.4
TIMEOUT_SECONDS = 300.0


class Job:
    """The ranks of one job, started as torchrun would start them, but forked from this process, which has loaded torch.

    So a start costs a fraction of a second, and the ranks are known by their process ids.
    """

    def __init__(self, folder: Path, overrides: list[str], *, num_ranks: int, slow_save: float = 0.0) -> None:
        self.folder = folder
        self.log = folder.with_name(f"{folder.name}.log")
        given = [*overrides, f"run.dir={folder.parent}", f"run.name={folder.name}"]
        port = _free_port()
        fork = multiprocessing.get_context("fork")
        self.ranks = [
            fork.Process(target=run_rank, args=(rank, num_ranks, port, self.log, slow_save, given))
            for rank in range(num_ranks)
        ]
        for rank in self.ranks:
            rank.start()

    @property
    def is_running(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    @property
    def num_steps(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, condition: Any) -> None:
        """Return when ``condition()`` holds or the job has ended."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.is_running and not condition():
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the job did not get on for {TIMEOUT_SECONDS:.0f} s; see {self.log}")
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def finish(self) -> None:
        """Wait for the end; a job that fails is an error with the end of its output."""
        self.wait_for(lambda: False)
        for rank in self.ranks:
            rank.join(timeout=60)
        codes = [rank.exitcode for rank in self.ranks]
        if any(code != 0 for code in codes):
            raise RuntimeError(f"the job ended with {codes}:\n{self.log.read_text()[-3000:]}")


def run_rank(rank: int, num_ranks: int, port: int, log: Path, slow_save: float, overrides: list[str]) -> None:
    """Be one rank of the job, with slow saves; ends the process."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from dtcp.train import __main__ as command_line
    from dtcp.train.checkpoint_files import AtomicWriter

    write_data, finish = AtomicWriter.write_data, AtomicWriter.finish

    def slow_write_data(self: Any, *args: Any) -> Any:
        time.sleep(slow_save / 3)
        written = write_data(self, *args)
        time.sleep(slow_save / 3)
        return written

    def slow_finish(self: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(slow_save / 3)
        finish(self, *args, **kwargs)

    if slow_save:
        AtomicWriter.write_data, AtomicWriter.finish = slow_write_data, slow_finish
    sys.argv = ["dtcp.train", *overrides]
    command_line.run()


def kill_in_training(job: Job, rng: random.Random, num_steps: int) -> None:
    """Kill a random time after a random step."""
    step = rng.randrange(1, num_steps - 2)
    job.wait_for(lambda: job.num_steps >= step)
    time.sleep(rng.uniform(0, 0.05))
    job.kill()


def kill_in_save(job: Job, rng: random.Random, num_steps: int) -> None:
    """Kill at a random moment of a save after the first half of the steps at most."""
    step = rng.randrange(0, num_steps // 2)
    job.wait_for(lambda: job.num_steps >= step and any(job.folder.glob("checkpoints/*.partial")))
    time.sleep(rng.uniform(0, SLOW_SAVE_SECONDS))
    job.kill()


def read_steps(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; a step that comes twice is an error."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}
    assert len(steps) == len(lines), f"{folder} has steps twice"
    return steps


def last_state(folder: Path) -> dict[str, list[int]]:
    """Size and checksum of every file of tensors in the newest checkpoint: weights and optimizer states."""
    newest = max((folder / "checkpoints").glob("step_????????"))
    files = json.loads((newest / "checkpoint.json").read_text())["body"]["files"]
    return {f"{newest.name}/{name}": what for name, what in files.items() if name != ".metadata"}


def largest_difference(run: Path, reference: Path) -> float:
    """Of the losses, relative; infinite if the steps are not the same."""
    losses, wanted = read_steps(run), read_steps(reference)
    if losses.keys() != wanted.keys():
        return float("inf")
    return max(abs(losses[step][0] - wanted[step][0]) / abs(wanted[step][0]) for step in wanted)


def is_bitwise_equal(run: Path, reference: Path) -> bool:
    """Whether all losses, gradient norms, final weights and optimizer states are the same bits."""
    return read_steps(run) == read_steps(reference) and last_state(run) == last_state(reference)


def what_is_left(folder: Path) -> dict[str, Any]:
    """Steps logged, newest whole checkpoint, and whether a half-written one is there."""
    logged = (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0
    whole = sorted(path.name for path in (folder / "checkpoints").glob("step_????????"))
    partial = any((folder / "checkpoints").glob("*.partial"))
    return {"logged": logged, "newest": whole[-1] if whole else "none", "half_written": partial}


def try_one(number: int, base: Path, overrides: list[str], meshes: Any, rng: random.Random) -> dict[str, Any]:
    """Kill one job and resume it on both meshes."""
    (mesh, num_ranks), (other, num_other) = meshes
    num_steps = len(read_steps(base / "reference"))
    in_save = number % 2 == 1
    folder = base / f"kill_{number}"
    job = Job(folder, [*overrides, *mesh], num_ranks=num_ranks, slow_save=SLOW_SAVE_SECONDS if in_save else 0.0)
    (kill_in_save if in_save else kill_in_training)(job, rng, num_steps)
    left = what_is_left(folder)
    elsewhere = base / f"kill_{number}_other"
    shutil.copytree(folder, elsewhere)
    Job(folder, [*overrides, *mesh], num_ranks=num_ranks).finish()
    Job(elsewhere, [*overrides, *other], num_ranks=num_other).finish()
    return {
        "kill": "save" if in_save else "training",
        **left,
        "bitwise": is_bitwise_equal(folder, base / "reference"),
        "difference": largest_difference(elsewhere, base / "reference"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="jobs to kill (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("overrides", nargs="*", help="further overrides of the job; its mesh has two ranks")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    overrides = [*JOB, *arguments.overrides]
    meshes = ((MESH, 2), (OTHER_MESH, 1))
    _load_everything()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        Job(base / "reference", [*overrides, *MESH], num_ranks=2).finish()
        rows = []
        for number in range(arguments.kills):
            rows.append(try_one(number, base, overrides, meshes, rng))
            if not arguments.json:
                print_row(number, rows[-1])
    is_right = all(row["bitwise"] and row["difference"] <= 1e-5 for row in rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "is_right": is_right}))
    else:
        print("every resumed job is the one nobody killed" if is_right else "DIFFERENT")
    return 0 if is_right else 1


def print_row(number: int, row: dict[str, Any]) -> None:
    if number == 0:
        print(
            f"{'kill':>4}{'in':>10}{'logged':>8}{'newest':>15}{'half-written':>14}{'same mesh':>11}{'other mesh':>12}"
        )
    print(
        f"{number + 1:4d}{row['kill']:>10}{row['logged']:8d}{row['newest']:>15}"
        f"{'yes' if row['half_written'] else 'no':>14}{'bitwise' if row['bitwise'] else 'DIFFERENT':>11}"
        f"{row['difference']:12.1e}",
        flush=True,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _load_everything() -> None:
    """What every rank would load; with one thread, because a fork has no others."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))
    import dtcp.train.__main__  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
