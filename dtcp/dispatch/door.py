"""The way of DTensors into attention: one kernel, registered when dtcp is imported, that plain tensors hardly meet.

``PythonTLSSnapshot`` is the first dispatch key that a DTensor has and a plain tensor has not. It comes before
autograd, so the call is met whole, in training and in inference, and when AOTAutograd traces a compiled one. A plain
tensor has it under a mode that sees operators (``FlopCounterMode``). In inference mode the kernels of a context come
after such a mode, which may take the call apart first; so it attends from here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtcp.dispatch.frames import current, is_traced
from dtcp.dispatch.untraced import untraced
from dtcp.dtensor import is_dtensor

_operator = torch.ops.aten.scaled_dot_product_attention.default
_KEY = "PythonTLSSnapshot"


@untraced
def _kernel(
    keyset: torch._C.DispatchKeySet,
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
    frame = current.frame
    if any(is_dtensor(x) for x in (query, key, value)):
        from dtcp.dispatch.dtensors import attend_dtensors

        out = attend_dtensors(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    elif (
        frame is not None
        and not frame.is_torchs(dropout_p)
        and torch.is_inference_mode_enabled()
        and not is_traced(query)
    ):
        from dtcp.dispatch.attend import attend

        return attend(frame, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    rest = keyset.remove(getattr(torch._C.DispatchKey, _KEY))
    return _operator.redispatch(
        rest, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_library = torch.library.Library("aten", "IMPL")
_library.impl("scaled_dot_product_attention", _kernel, _KEY, with_keyset=True)
