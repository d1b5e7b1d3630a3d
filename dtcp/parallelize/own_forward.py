"""Whether a module that a plan makes context parallel does nothing but attend."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dtcp.attention.reference import reference_attention
from dtcp.dispatch.frames import current
from dtcp.dropout import AttentionDropout


def check_own_forward(
    module: nn.Module, qkv_format: str, *, is_causal: bool, scale: float | None, **masks: Any
) -> None:
    """Raise unless the forward that an entry takes the place of is attention and nothing else, as far as can be seen.

    On a small example; a module that cannot be called with one (of other heads, on another device) is taken at its
    word.
    """
    name = type(module).__name__
    own = next((n for n, _ in itertools.chain(module.named_parameters(), module.named_buffers())), None)
    cure = "give the entry to a module whose forward(query, key, value) is the attention call alone"
    if own is not None:
        raise ValueError(
            f"ContextParallel takes the place of the forward of {name}, and would leave {own} out of it; {cure}"
        )
    if current.frame is not None:
        return
    numbers = torch.arange(3 * 2 * 5 * 8, device="cpu", dtype=torch.float32)  # whatever the default dtype is
    query, key, value = torch.sin(numbers.square()).view(3, 1, 2, 5, 8).unbind()
    expected = reference_attention(query, key, value, is_causal=is_causal, scale=scale, **masks)
    is_swapped = qkv_format == "bshd"
    inputs = [x.transpose(1, 2) if is_swapped else x for x in (query, key, value)]
    try:
        # In training, where it may drop; but for what we drop by given keys.
        with torch.no_grad(), _training(module, not isinstance(module, AttentionDropout)):
            out = type(module).forward(module, *inputs)
    except Exception:
        return
    if isinstance(out, Tensor):
        out = out.transpose(1, 2) if is_swapped and out.ndim == 4 else out
        if out.shape == expected.shape and torch.allclose(out.float(), expected, rtol=1e-2, atol=1e-2):
            return
    raise ValueError(
        f"ContextParallel takes the place of the forward of {name}, which is not attention alone with is_causal="
        f"{is_causal}, scale={'1/√D' if scale is None else scale} and {masks}: on a small example it gives something "
        "else; say is_causal=, scale=, window_size= and so on as it attends, derive its class from "
        f"dtcp.AttentionDropout if it drops, or {cure}"
    )


@contextlib.contextmanager
def _training(module: nn.Module, mode: bool) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = mode
    try:
        yield
    finally:
        for part, was in modes:
            part.training = was
