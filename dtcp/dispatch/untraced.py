"""Functions that torch's C++ calls, and that Dynamo must not trace.

Between two graphs of one compiled function operators run eagerly, and Dynamo looks at every Python frame that starts
then: also at hooks and kernels called from C++. Traced, they would read versions and types of stand-ins.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_dynamo: Any = torch._C._dynamo.eval_frame
_SKIP = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)  # itself and what it calls


def untraced(function: Function) -> Function:
    """Keep Dynamo out of ``function`` and what it calls.

    ``torch.compiler.disable`` would do the same and load Dynamo, also for those who do not compile.
    """
    _dynamo.set_code_exec_strategy(function.__code__, _SKIP)
    return function
