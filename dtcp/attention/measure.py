"""Measure the rates by which ``strategy="auto"`` decides, on the ranks that will attend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from dtcp.attention.comm import Message, start_exchange
from dtcp.attention.kernels import choose_kernel, lse_dtype
from dtcp.attention.merge import Partial
from dtcp.attention.predict import Rates
from dtcp.collectives import all_gather_rows, check_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MESSAGE_BYTES = 8 << 20
_REPEATS = 5


def measure_rates(
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    tokens: int = 1024,
    kernel: str = "auto",
) -> Rates:
    """Return the rates of the slowest rank and link of ``mesh``, the same on every rank. Collective; takes about 1 s.

    Args:
        mesh: 1-D mesh of the cp axis.
        dtype, num_heads, num_kv_heads, head_dim, kernel: Of the attention that will be computed.
        tokens: Of the call whose rate is measured: about those of a rank.

    Raises:
        ValueError: If ``mesh`` is not 1-D, or the kernel cannot run such inputs.
    """
    check_mesh(mesh, "measure_rates")
    device = torch.device(mesh.device_type)

    def inputs(length: int) -> list[torch.Tensor]:
        heads = (num_heads, num_kv_heads or num_heads, num_kv_heads or num_heads)
        return [torch.randn(1, h, length, head_dim, dtype=dtype, device=device) for h in heads]

    scale = head_dim**-0.5
    chosen = choose_kernel(kernel, torch.empty(0, dtype=dtype, device=device), head_dim, scale)
    long, short = inputs(tokens), inputs(32)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        out, lse = chosen.forward(query, key, value, is_causal=False, scale=scale)
        partial = Partial((*query.shape[:3], head_dim), lse_dtype(dtype), device)
        for _ in range(2):
            partial.merge(slice(None), out.clone(), lse.clone())

    of_call = _seconds(lambda: attend(*short), device)
    of_tokens = _seconds(lambda: chosen.forward(*long, is_causal=False, scale=scale), device)
    link, of_message = _link(mesh, device)
    flops = 4 * head_dim * num_heads * tokens**2 / max(of_tokens - of_call, of_tokens / 2)
    own = torch.tensor([[flops, link, of_call, of_message]], dtype=torch.float64, device=device)
    every = all_gather_rows(own, mesh.get_group()).cpu()
    slowest, longest = every.amin(0).tolist(), every.amax(0).tolist()
    return Rates(slowest[0], slowest[1], longest[2], longest[3])


def _link(mesh: DeviceMesh, device: torch.device) -> tuple[float, float]:
    """(bytes/s, seconds of a short message) to the next rank, while every rank sends."""
    group = mesh.get_group()
    if group.size() == 1:
        return 1e30, 0.0
    after, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()

    def pass_on(num_bytes: int) -> Callable[[], None]:
        sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: start_exchange([Message(after, sent)], [Message(before, received)], group).wait()

    of_message, of_bytes = (_seconds(pass_on(num_bytes), device) for num_bytes in (1, _MESSAGE_BYTES))
    return _MESSAGE_BYTES / max(of_bytes - of_message, 1e-9), of_message


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of some runs, after one that is not counted."""
    found = []
    for index in range(_REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index:
            found.append(time.perf_counter() - start)
    return statistics.median(found)
