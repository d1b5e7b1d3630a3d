"""Whether the modules that a plan made context parallel are called at all, seen in the model's first forward."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def watch_planned(model: nn.Module, planned: Mapping[str, nn.Module]) -> None:
    """Have the first forward of ``model`` raise if it called none of these modules, and warn if not all.

    A model may have a module of the planned name and attend past it: its tokens would see their own rank's only.
    Hooks, gone after that forward. One with compiled parts is not looked at: these call no hooks.

    Args:
        planned: Context parallel modules by qualified name.
    """
    _Watch(model, planned)


class _Watch:
    """Of methods, not of closures, so that a model can be copied and pickled before its first forward."""

    def __init__(self, model: nn.Module, planned: Mapping[str, nn.Module]) -> None:
        self.names, self.called = list(planned), set[str]()
        self.handles = [module.register_forward_pre_hook(_Mark(self.called, n)) for n, module in planned.items()]
        self.handles.append(model.register_forward_hook(self.check))

    def check(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """After the first forward."""
        if torch.compiler.is_compiling():
            return
        for handle in self.handles:
            handle.remove()
        missed = [name for name in self.names if name not in self.called]
        if not missed or any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules()):
            return
        kind = type(model).__name__.removeprefix("FSDP")
        names = f"{', '.join(missed[:4])}{', …' if len(missed) > 4 else ''}"
        message = (
            f"planned module(s) {names} not called in the forward of {kind}: if that attends otherwise, "
            "its tokens saw their own rank's only; name the module whose forward(query, key, value) attends in "
            "context_plan=, or call F.scaled_dot_product_attention inside dtcp.context_parallel(...) and give "
            "context_plan={} (in the doctor doctor.door=context)"
        )
        if not self.called:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)


class _Mark:
    def __init__(self, called: set[str], name: str) -> None:
        self.called, self.name = called, name

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.called.add(self.name)
