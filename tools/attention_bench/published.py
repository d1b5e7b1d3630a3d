"""Published figures, the fit of the kernel's three numbers on some of them, and predictions of the others.

Fitted on: ring-flash-attention's forward+backward percentages on 8 H800 (its README; benchmark_kvpacked_func.py: 8192
tokens a rank, causal, bf16, 32:8 heads of 128). Given, as measured inputs: the iterations/s of its single flash
call, by which it divides (they are the kernel's rate on each machine), and the bandwidth that the Llama 3 paper's
all-gathers achieved. Everything else is predicted.

Assumed: the A100 has 80 GB; a message takes 10 µs beside its bytes; H100 and H800 compute alike. Llama 3's figures are
of the forward, its "achieved" bandwidth is that of the bytes which enter a rank, and its calls are those of one rank
of 8-way tensor parallelism, 16:1 heads of 128: 40 GB/s at 4096 tokens is what NVLink gives a message of 1 MiB, and not
one of 8. The other reading, 128:8, is in the comparison too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attention_bench.problem import BenchmarkError
from attention_bench.rates import FITTED, Call, Kernel, Machine
from attention_bench.simulate import Work, ideal_seconds, predict

TOLERANCE_POINTS = 8.0

_LATENCY = 10e-6
# Specified bf16 FLOP/s; NVLink bytes/s one way; bytes/s of memory; multiprocessors.
_SPEC_FLOPS = {"a100": 312e12, "h800": 989e12, "h100": 989e12}
_LINK = {"a100": 300e9, "h800": 200e9, "h100": 450e9}
_MEMORY = {"a100": 2.039e12, "h800": 3.35e12, "h100": 3.35e12}
_MULTIPROCESSORS = {"a100": 108, "h800": 132, "h100": 132}
MACHINE_NAMES = tuple(_LINK)

# ring-flash-attention @01c8baf README, "batch api": flash iterations/s forward, and with backward.
_FLASH_PER_SECOND = {"h800": (591.5, 154.7), "a100": (373.4, 94.7)}
_RING_TOKENS = 8192  # of a rank, and of the flash call
RING_WORK = Work(seq_len=8 * _RING_TOKENS, cp=8, num_heads=32, num_kv_heads=8, head_dim=128)
_RING_LAYOUTS = ("contiguous", "head_tail", "striped")  # its ring, zigzag and stripe
_RING_PERCENT = {
    ("h800", "forward"): (52.1, 85.2, 74.4),
    ("h800", "forward+backward"): (53.9, 90.2, 82.9),
    ("a100", "forward"): (51.4, 81.7, 69.6),
    ("a100", "forward+backward"): (52.5, 89.8, 82.6),
}
_FITTED_ON = ("h800", "forward+backward")

# Scaling Llama 3 Training (ISCA 2025), figures 11 to 13, read off: causal, 4096 tokens and doubling, by cp.
_GATHER_PERCENT = {2: (74.2, 82.1, 85.9, 91.1, 93.5, 94.2), 4: (49.9, 68.3, 81.5, 88.4, 91.2, 94.6)}
_GATHER_GIGABYTES = {2: (40, 43, 79, 127, 168, 190), 4: (50, 46, 71, 135, 208, 249)}
_GATHER_PERCENT_HBM3 = {2: (78.8, 85.7, 90.4, 90.7, 98.2, 98.1), 4: (53.7, 73.6, 85.0, 92.1, 95.7, 97.3)}
_GATHERS = (  # source, role, percentages, query and key heads of a call
    ("Llama 3 (ISCA 2025), h100 HBM2e", "predicted", _GATHER_PERCENT, (16, 1)),
    ("Llama 3 (ISCA 2025), h100 HBM2e", "of 128:8 heads", _GATHER_PERCENT, (128, 8)),
    ("Llama 3 (ISCA 2025), h100 HBM3", "bandwidth of HBM2e", _GATHER_PERCENT_HBM3, (16, 1)),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published percentage of the ideal, and the model's.

    Attributes:
        role: ``"fitted"``, ``"predicted"``, or by what a prediction differs that has less to go by:
            ``"specified FLOP/s"`` (the kernel's rate is scaled from the H800's by them, instead of measured),
            ``"of 128:8 heads"`` (the other reading of Llama 3's calls), ``"bandwidth of HBM2e"`` (none is published for
            that machine).
    """

    source: str
    what: str
    passes: str
    role: str
    published_percent: float
    model_percent: float

    @property
    def difference_points(self) -> float:
        return self.model_percent - self.published_percent


def preset(name: str, kernel: Kernel = FITTED) -> Machine:
    """The machine of that name: specified links and memory, and the rate of one published flash call."""
    if name not in MACHINE_NAMES:
        raise BenchmarkError(f"--machine must be of {', '.join(MACHINE_NAMES)}, got {name!r}")
    unit = Machine(name, 1.0, 1.0, _LINK[name], _MEMORY[name], _MULTIPROCESSORS[name], _LATENCY, kernel=kernel)
    forward, total = (1 / rate for rate in _FLASH_PER_SECOND["a100" if name == "a100" else "h800"])
    return unit.calibrated(_flash_call(), RING_WORK.num_heads, RING_WORK.head_dim, forward, total)


def _flash_call() -> Call:
    n = _RING_TOKENS
    return Call(n, n, n * (n + 1) // 2, n)


def _scaled_by_specification(kernel: Kernel) -> Machine:
    """An A100 whose kernel reaches the same share of its specified FLOP/s as the H800's."""
    of, scale = preset("h800", kernel), _SPEC_FLOPS["a100"] / _SPEC_FLOPS["h800"]
    flops = {"forward_flops": of.forward_flops * scale, "backward_flops": of.backward_flops * scale}
    return replace(preset("a100", kernel), **flops)


def _ring_percent(layout: str, machine: Machine) -> tuple[float, float]:
    """Of its ideal, which is the time of as many flash calls of one rank's tokens as there are ranks."""
    one = replace(RING_WORK, seq_len=_RING_TOKENS, cp=1)
    forward, total = (seconds * RING_WORK.cp for seconds in ideal_seconds(one, machine))
    ring = predict("plain_ring", layout, RING_WORK, machine)
    return 100 * forward / ring.forward_seconds, 100 * total / ring.total_seconds


def _gather_percent(work: Work, gigabytes: float, kernel: Kernel) -> float:
    machine = replace(preset("h100", kernel), link_bytes=gigabytes * 1e9, latency_seconds=0.0)  # the rate includes it
    gather = predict("exposed_all_gather", "head_tail", work, machine)
    return 100 * ideal_seconds(work, machine)[0] / gather.forward_seconds


def fit_kernel() -> Kernel:
    """Fit the three numbers on three percentages, by Newton's method.

    Raises:
        BenchmarkError: If it finds none, or one that makes no sense.
    """
    numbers = np.array([500.0, 0.5, 100.0])

    def residuals(x: np.ndarray) -> np.ndarray:
        machine = preset("h800", Kernel(*x.tolist()))
        model = [_ring_percent(layout, machine)[1] for layout in _RING_LAYOUTS]
        return np.array(model) - _RING_PERCENT[_FITTED_ON]

    for _ in range(20):
        found = residuals(numbers)
        if np.abs(found).max() < 1e-9:
            break
        steps = np.diag(1e-4 * np.abs(numbers) + 1e-6)
        slopes = np.stack([(residuals(numbers + step) - found) / step.sum() for step in steps], axis=1)
        numbers = numbers - np.linalg.solve(slopes, found)
    else:
        raise BenchmarkError(f"the fit does not converge, it is at {numbers.tolist()}")
    if (numbers < 0).any():
        raise BenchmarkError(f"the fit gives a negative number, which means nothing: {numbers.tolist()}")
    return Kernel(*numbers.tolist())


def compare(kernel: Kernel = FITTED) -> list[Comparison]:
    """Every published figure beside the model's."""
    found = []
    machines = {name: preset(name, kernel) for name in ("h800", "a100")}
    for (name, passes), published in _RING_PERCENT.items():
        role = "fitted" if (name, passes) == _FITTED_ON else "predicted"
        for layout, percent in zip(_RING_LAYOUTS, published, strict=True):
            model = _ring_percent(layout, machines[name])[passes != "forward"]
            found.append(Comparison(f"ring-flash-attention, 8 {name}", layout, passes, role, percent, model))
    for layout, percent in zip(_RING_LAYOUTS, _RING_PERCENT["a100", "forward+backward"], strict=True):
        model = _ring_percent(layout, _scaled_by_specification(kernel))[1]
        source, role = "ring-flash-attention, 8 a100", "specified FLOP/s"
        found.append(Comparison(source, layout, "forward+backward", role, percent, model))
    for source, role, by_cp, heads in _GATHERS:
        for cp, published in by_cp.items():
            for i, (percent, gigabytes) in enumerate(zip(published, _GATHER_GIGABYTES[cp], strict=True)):
                work = Work(4096 << i, cp, *heads, head_dim=128)
                what = f"all_gather, cp {cp}, {work.seq_len} tokens"
                model = _gather_percent(work, gigabytes, kernel)
                found.append(Comparison(source, what, "forward", role, percent, model))
    return found
