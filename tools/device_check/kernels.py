"""Every kernel's (out, lse, gradients) against float64: alone, as tiles of a longer row, and under every mask."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from device_check.problems import MASKS, RESULTS, Posed, Problem, errors, pose, right_answer, tolerance
from device_check.sections import Section
from device_check.solve import solve, strategy_of
from dtcp.attention.kernels import _BY_DEVICE, Kernel
from dtcp.attention.loopback import Loopback
from dtcp.attention.merge import Partial
from dtcp.layout import make_layout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = ((8, 2, 64, 64), (4, 4, 128, 128), (4, 2, 128, 64), (4, 1, 24, 16))
COLUMNS = ("kernel", "dtype", "checks", *RESULTS, "worst in")


def check_kernels(device: torch.device, section: Section, *, is_small: bool) -> None:
    """Alone first; then in the op of one rank, with masks."""
    section.columns = COLUMNS
    kernels = _BY_DEVICE[device.type]
    lengths = ((37, 0), (24, 13)) if is_small else ((333, 0), (256, 130), (1024, 0))
    shapes = [("causal", s, 0) for s, keys in lengths if not keys] + [("full", s, keys) for s, keys in lengths]
    heads = HEADS[2:] if is_small else HEADS
    alone = [
        (kernel, Problem(mask, h, s, dtype, keys))
        for (mask, s, keys), h, kernel, dtype in itertools.product(shapes, heads, kernels, DTYPES)
    ]
    masked = [
        (kernel, Problem(mask, heads[0], lengths[0][0], dtype))
        for mask, kernel, dtype in itertools.product(MASKS, kernels, DTYPES)
        if mask not in ("causal", "full")
    ]
    worst: dict[tuple[str, str], dict] = {}
    refused: set[tuple[str, str]] = set()
    loopback = Loopback(1)
    for kernel, problem in section.within_budget(alone + masked, "problems of kernels"):
        named = kernel.name, str(problem.dtype).removeprefix("torch.")
        posed = pose(problem, device)
        reason = kernel.refusal(posed.query, max(problem.heads[2:]))
        if reason is not None or (problem.mask == "mask_mod" and not kernel.takes_masks):
            if reason is not None and named not in refused:
                section.notes.append(f"{named[0]} refuses {named[1]}: {reason}")
                refused.add(named)
            continue
        with section.catching(f"kernel {kernel.name}, {problem}"):
            right = right_answer(posed)
            if problem.mask in ("causal", "full"):
                parts = 1 if problem.mask == "causal" else 2
                found = in_tiles(kernel, posed, problem.mask == "causal", parts)
            else:
                layout = make_layout("contiguous", seq_len=problem.seq_len, cp=1)
                found = solve(posed, layout, strategy_of("ring", 1), loopback, kernel.name)
            by_name = errors(found, right)
            for name, error in by_name.items():
                section.expect(f"kernel {kernel.name}, {problem}, {name}", error, tolerance(name, problem.dtype))
            _keep_worst(worst.setdefault(named, {}), by_name, str(problem))
    section.rows = [{"kernel": k, "dtype": d, **row} for (k, d), row in sorted(worst.items())]


def in_tiles(kernel: Kernel, posed: Posed, is_causal: bool, num_parts: int) -> dict[str, Tensor]:
    """What a rank does: keys in several parts, merged; backwards from the whole row's (out, lse), added up."""
    query, scale = posed.query, posed.query.size(-1) ** -0.5
    parts = list(zip(posed.key.tensor_split(num_parts, 2), posed.value.tensor_split(num_parts, 2), strict=True))
    partial = Partial((*query.shape[:3], posed.value.size(-1)), torch.float32, query.device)
    for key, value in parts:
        partial.merge(slice(None), *kernel.forward(query, key, value, is_causal=is_causal, scale=scale))
    out, lse = partial.result()
    rounded = out.to(query.dtype)
    grads = [
        kernel.backward(posed.grad_out, query, key, value, rounded, lse.contiguous(), is_causal=is_causal, scale=scale)
        for key, value in parts
    ]
    grad_query = torch.stack([grad[0].float() for grad in grads]).sum(0)
    grad_key, grad_value = (torch.cat([grad[i].float() for grad in grads], 2) for i in (1, 2))
    return dict(zip(RESULTS, (rounded, lse, grad_query, grad_key, grad_value), strict=True))


def _keep_worst(row: dict, by_name: dict[str, float], where: str) -> None:
    row["checks"] = row.get("checks", 0) + len(by_name)
    before = max((row.get(name, 0.0) for name in RESULTS if name != "lse"), default=0.0)
    if max(error for name, error in by_name.items() if name != "lse") >= before:
        row["worst in"] = where
    for name in RESULTS:
        row[name] = max(row.get(name, 0.0), by_name[name])
