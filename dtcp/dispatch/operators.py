"""Kernels of torch's operators that stand before its own while a context is active anywhere."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dtcp.attention.calls import own_tiles
from dtcp.dispatch.frames import current
from dtcp.dispatch.untraced import untraced

KEYS = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA")

# What `F.scaled_dot_product_attention`, nn.MultiheadAttention and nn.TransformerEncoderLayer end in, below them.
FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention.quantized",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_flash_attention_forward.quantized",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_triton_scaled_dot_attention",
    "_triton_multi_head_attention",
)


# Note [Kernels that other threads are in]
# Torch frees a kernel of ours when it is removed, also under a thread that has found it and waits for the GIL to run
# it. So as soon as one runs in a thread without a context, they stay for good, and pass through. Until then those that
# were removed live on for a while: the very first call of such a thread may wait too.
_NUM_REMOVED_ALIVE = 100  # times that the last context ended; a thread waits for the GIL during a few of them


class Registrations:
    """Kernels put before those of operators in ``aten``, all removed at once; may be filled again.

    One of torch's registration objects for the life of the process: it keeps something of every
    ``torch.library.Library`` (67 bytes measured), and contexts are entered in every step.
    """

    def __init__(self) -> None:
        self._module: Any = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
        self._kernels: list[tuple[str, Any]] = []
        self._overloads: set[Any] = set()
        self._removed: deque[list[Any]] = deque(maxlen=_NUM_REMOVED_ALIVE)
        self._are_for_good = False

    @property
    def is_empty(self) -> bool:
        return not self._kernels

    def put(self, operator: str, key: str, kernel: Callable[..., Any], *, with_keyset: bool = False) -> None:
        self._module.impl(operator, key, kernel, with_keyset)
        self._kernels.append((f"aten::{operator}", torch._C.DispatchKey.__members__[key]))
        # Where torch traces, it looks kernels up in Python and keeps what it found: it would go past ours, or to them.
        self._overloads.add(overload := _overload(operator))
        overload._dispatch_cache.clear()

    def remove(self) -> None:
        """Remove them, unless they have been met in a thread without a context; see the note."""
        if self._are_for_good:
            return
        kernel_of = torch._C._dispatch_get_computed_kernel_for_dispatch_key  # 4 µs, torch.library.get_kernel 15 µs
        self._removed.append([kernel_of(name, key) for name, key in self._kernels])
        self._kernels.clear()
        self._module.reset()
        for overload in self._overloads:
            overload._dispatch_cache.clear()

    def note_call(self) -> None:
        """Called by each kernel: is it in a thread that has no context, and has not left one for a recomputation?"""
        if current.frame is None and not current.is_left:
            self._are_for_good = True


@functools.cache
def _overload(operator: str) -> Any:
    packet, _, name = operator.partition(".")
    return getattr(getattr(torch.ops.aten, packet), name or "default")


registrations = Registrations()


def put_refusals() -> None:
    """Refuse torch's fused attention operators inside a context: they would attend to this rank's tokens only.

    At the key of the device, which every call comes to, in no_grad and inference mode and from a compiled graph or a
    custom op of others too. The tiles of our own op are let through, at 4 µs a tile.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator, key, kernel in _refusing_kernels():
            registrations.put(operator, key, kernel, with_keyset=True)
    for key in KEYS:
        registrations.put("_scaled_dot_product_attention_math", key, _refusing_math)


@functools.cache
def _refusing_kernels() -> list[tuple[str, str, Callable[..., Any]]]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    calls = [(name, key, "") for name in FUSED for key in ("CPU", "CUDA") if has_kernel(f"aten::{name}", key)]
    # All that nested tensors end in. Not at "NestedTensorCPU", for inference mode: torch 2.13 does not find its own
    # kernel any more when one at that key is removed.
    calls.append(("_scaled_dot_product_attention_math", "AutogradNestedTensor", " of nested tensors"))
    get_kernel = torch.library.get_kernel
    return [(name, key, _refusing(name + of, get_kernel(f"aten::{name}", key))) for name, key, of in calls]


def _refusing(what: str, kernel: Any) -> Callable[..., Any]:
    @untraced
    def refusing(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        registrations.note_call()
        if not own_tiles.is_running:
            _refuse(what)
        return kernel.call_boxed(keyset, *args, **kwargs)

    return refusing


def refuse_math() -> None:
    """In a graph nothing is left of this operator to refuse: for Dynamo to trace before it."""
    _refuse("_scaled_dot_product_attention_math")


def _refusing_math(*args: Any, **kwargs: Any) -> Any:
    registrations.note_call()
    refuse_math()
    return torch.ops.aten._scaled_dot_product_attention_math.default.decompose(*args, **kwargs)


def _refuse(what: str) -> None:
    frame = current.frame
    if frame is not None and not frame.is_plain:
        raise NotImplementedError(
            f"torch.ops.aten.{what} inside context_parallel would attend to this rank's tokens only; call "
            "F.scaled_dot_product_attention on dense tensors, or dtcp.context_parallel_attention"
        )
