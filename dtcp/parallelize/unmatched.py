"""A plan entry of ours that matches no module is an error: torch warns and goes on, and attention would stay local."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.utils import parametrize


def refuse_unmatched_entries(style: type[ParallelStyle]) -> None:
    """Have ``parallelize_module`` raise where a plan's key with an entry of this kind matches nothing at all.

    A style is not asked when its key matches nothing, and torch's function is imported by name: its warning is the
    one place to notice.
    """
    sys.modules[parallelize_module.__module__].warnings = _Warnings(style)  # type: ignore[attr-defined]


def refuse_unmatched_keys(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    """Raise ``ValueError`` if a key of ``plan``, whatever its entry, matches no module of ``model``."""
    for key in plan:
        if not _matches(model, key.split(".") if key else []):
            raise ValueError(
                f"plan key {key!r} matches no module of {type(model).__name__}, and its part would stay whole on every "
                f"rank; its modules are {_some_names(model)}"
            )


def refuse_parametrized(model: nn.Module, plan: Mapping[str, ParallelStyle], passing: tuple[type, ...]) -> None:
    """Raise ``ValueError`` if an entry would cut a weight that is computed from others at each use.

    Args:
        passing: Kinds of entries that leave parameters alone.
    """
    for name, module in model.named_modules():
        key = next((k for k, style in plan.items() if not isinstance(style, passing) and _is_name_of(name, k)), None)
        if key is not None and parametrize.is_parametrized(module):
            computed: Any = module.parametrizations
            raise ValueError(
                f"plan key {key!r} cuts {name}, whose {', '.join(computed)} is parametrized "
                "(torch.nn.utils.parametrize: weight_norm, spectral_norm): computed from other "
                "tensors at each use, by all of them; torch.nn.utils.parametrize.remove_parametrizations before, or "
                "leave it out of the plan"
            )


def visit_once(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return ``plan``; for a model that has a module under several names, with one name for each module.

    A key of patterns is then spelled out. A module that two entries name by the same name stays torch's to refuse.
    """
    names_of: dict[int, str] = {}
    names = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    for name, module in names:
        names_of.setdefault(id(module), name)
    if len(names_of) == len(names):
        return dict(plan)
    spelled: dict[str, ParallelStyle] = {}
    for key, style in plan.items():
        matching = [(name, module) for name, module in names if _is_name_of(name, key)]
        for name in dict.fromkeys(names_of[id(module)] for _, module in matching) or [key]:  # torch refuses that one
            if type(spelled.setdefault(name, style)) is not type(style):
                raise ValueError(f"plan key {key!r} gives {name}, which has an entry already, another: {style!r}")
    return spelled


def _is_name_of(name: str, key: str) -> bool:
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


class _Warnings:
    """The module ``warnings`` for the module of ``parallelize_module``."""

    def __init__(self, style: type[ParallelStyle]) -> None:
        self._style = style

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: str, *, stacklevel: int = 1, **kwargs: Any) -> None:
        caller = sys._getframe(1)
        if isinstance(caller.f_locals.get("parallelize_style"), self._style):
            _check_key(caller, self._style.__name__)
        warnings.warn(message, stacklevel=stacklevel + 1, **kwargs)


def _check_key(frame: FrameType, style: str) -> None:
    """Raise unless the whole key matches something: of ``layers.*.attention`` some layers may have none."""
    while frame.f_back is not None and frame.f_back.f_code is frame.f_code:  # it goes down by calling itself
        frame = frame.f_back
    module, key = frame.f_locals["module"], frame.f_locals["module_path"]
    if not _matches(module, key.split(".")):
        raise ValueError(
            f"plan key {key!r} of {style} matches no module of {type(module).__name__}, whose attention would see this "
            f"rank's tokens only; its modules are {_some_names(module)}"
        )


def _matches(module: nn.Module, tokens: list[str]) -> bool:
    return not tokens or any(
        _matches(child, tokens[1:]) for name, child in module.named_children() if fnmatch(name, tokens[0])
    )


def _some_names(module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules() if name]
    return ", ".join(names[:20]) + (f", … ({len(names)})" if len(names) > 20 else "") if names else "none"
