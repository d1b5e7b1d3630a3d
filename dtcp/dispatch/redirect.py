"""How calls of ``scaled_dot_product_attention`` reach a context, however they were imported.

Eager calls, also those inside ``nn.MultiheadAttention``, in other threads' backward, or in inference mode, end in the
operator ``aten::scaled_dot_product_attention``: while a context is active it has our kernel, which looks for the
current frame of its thread. Under ``torch.compile`` Dynamo asks a handler, which traces ``redirected`` instead of
the builtin function; the graph it makes is guarded by what it read from the frame. What neither reaches (a graph made
before dtcp was asked, traced again by AOTAutograd) is found by the kernel, which refuses to be traced.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import FlexAttentionHOP

from dtcp.dispatch import multihead
from dtcp.dispatch.attend import attend
from dtcp.dispatch.flex import redirected_flex
from dtcp.dispatch.frames import current, is_traced
from dtcp.dispatch.operators import KEYS, put_refusals, refuse_math, registrations
from dtcp.dispatch.untraced import untraced
from dtcp.dtensor import is_dtensor
from dtcp.recompute import checkpoint_patch
from dtcp.replicas import refuse_ddp

_builtin = torch._C._nn.scaled_dot_product_attention
_operator = torch.ops.aten.scaled_dot_product_attention.default


def redirected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What Dynamo traces in the place of ``scaled_dot_product_attention``."""
    frame = current.frame
    if frame is None or frame.is_torchs(dropout_p):
        # The operator, not the builtin, which would bring Dynamo here again.
        return _operator(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        from dtcp.dispatch.dtensors import attend_in_context

        return attend_in_context(frame, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return attend(frame, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@untraced
def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The operator's kernel while a context is active somewhere, or for good where several threads attend."""
    registrations.note_call()
    frame = current.frame
    if frame is None or frame.is_torchs(dropout_p):
        if frame is not None and not is_traced(query):
            frame.counter.num_calls += 1
        return _operator.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_traced(query):
        raise RuntimeError(
            "scaled_dot_product_attention is being compiled inside context_parallel by a route that dtcp does not see, "
            "which would attend to this rank's tokens only; call F.scaled_dot_product_attention or "
            "dtcp.context_parallel_attention in the compiled function, or torch.compile it before entering the context"
        )
    refuse_ddp(frame.group_name)
    return attend(frame, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@untraced
def _transform_kernel(*args: Any, **kwargs: Any) -> Tensor:
    """Under ``torch.vmap`` and other transforms the operator would be taken apart before ``_kernel`` sees it."""
    registrations.note_call()
    frame = current.frame
    if frame is not None and not frame.is_plain:
        raise NotImplementedError(
            "attention under torch.vmap, func.grad, func.vjp or func.jvp (forward mode) inside context_parallel is not "
            "available; give vmap's dim as a batch dim, and use torch.autograd"
        )
    return _operator.decompose(*args, **kwargs)


class _Patches:
    """What is patched in torch while a context is active anywhere; counted, so that the last one ends it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_users = 0
        self._stack = contextlib.ExitStack()

    def acquire(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._install()
            self._num_users += 1
            teach_dynamo()

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._stack.close()

    def _install(self) -> None:
        self._stack.callback(registrations.remove)
        if registrations.is_empty:
            for key in KEYS:
                registrations.put("scaled_dot_product_attention", key, _kernel)
            registrations.put("scaled_dot_product_attention", "FuncTorchDynamicLayerFrontMode", _transform_kernel)
            put_refusals()
        checkpoint_patch.acquire()
        self._stack.callback(checkpoint_patch.release)
        self._stack.enter_context(multihead.checked_multihead())
        # The fused paths of nn.MultiheadAttention and nn.TransformerEncoderLayer never call the operator.
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        # Its operator, for who loads its module inside a context; and a function of its module, for graphs that are
        # older than the context, which are guarded by it.
        self._stack.enter_context(_replaced(FlexAttentionHOP, "__call__", _flex_operator))
        if "torch.nn.attention.flex_attention" in sys.modules:
            flex = sys.modules["torch.nn.attention.flex_attention"]
            self._stack.enter_context(_replaced(flex, "_validate_sdpa_input", _validate_flex))
            self._stack.enter_context(redirected_flex())


_patches = _Patches()


@contextlib.contextmanager
def redirected_attention() -> Iterator[None]:
    """Redirect the attention calls of threads that have a current frame."""
    _patches.acquire()
    try:
        yield
    finally:
        _patches.release()


@contextlib.contextmanager
def _replaced(module: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


def _refuse_flex_attention() -> None:
    frame = current.frame
    if frame is not None and not frame.is_plain:
        raise NotImplementedError(
            "flex_attention inside context_parallel came by a way that dtcp does not see; import "
            "torch.nn.attention.flex_attention before the context, or call F.scaled_dot_product_attention"
        )


_flex_operator_of_torch = FlexAttentionHOP.__call__


def _flex_operator(*args: Any, **kwargs: Any) -> Any:
    _refuse_flex_attention()
    return _flex_operator_of_torch(*args, **kwargs)


def _validate_flex(*args: Any, **kwargs: Any) -> None:
    from torch.nn.attention._utils import _validate_sdpa_input

    _refuse_flex_attention()
    _validate_sdpa_input(*args, **kwargs)


_taught = False


def teach_dynamo() -> None:
    """Have Dynamo trace ``redirected`` for the builtin, whatever name it was imported by, and so on. Once, for good.

    For good, because a graph traced without it carries no guard on the current frame, and would be used again inside
    a context. Graphs that are older than this are forgotten once, for the same reason.
    """
    global _taught
    if _taught or "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()

    def tracing(function: Any) -> Any:
        def trace(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            return tx.inline_user_function_return(VariableTracker.build(tx, function), args, kwargs)

        return trace

    def trace_refusal_of_math(self: Any, tx: Any, *args: Any, **kwargs: Any) -> None:
        tx.inline_user_function_return(VariableTracker.build(tx, refuse_math), [], {})  # and go on as for any operator

    handlers[_builtin] = tracing(redirected)
    handlers[multihead.function] = tracing(multihead.checked)
    get_torch_obj_rule_map()[multihead.function] = TorchInGraphFunctionVariable
    math = torch.ops.aten._scaled_dot_product_attention_math
    for math_attention in (math, math.default, torch._scaled_dot_product_attention_math):
        handlers[math_attention] = trace_refusal_of_math
    torch._dynamo.reset()
    _taught = True
