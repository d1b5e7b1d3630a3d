"""Parameters that a model has under several names: they stay one where it is cut, or are refused by name.

A plan puts other parameters in their places, and stages on different ranks would each move a copy of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dtcp.dtensor import local_part

_OWN = "use pp=1, or give each stage a parameter of its own"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model has a parameter."""

    name: str
    module: nn.Module
    leaf: str  # its name in the module


def shared_parameters(model: nn.Module) -> list[list[Place]]:
    """Return the places of each parameter that several modules of ``model`` have."""
    places: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append(Place(f"{prefix}.{leaf}".lstrip("."), module, leaf))
    return [of_one for of_one in places.values() if len(of_one) > 1]


def keep_shared(shared: Sequence[Sequence[Place]]) -> None:
    """Put one parameter into all places of each again, after a plan has put one into each of them.

    Raises:
        ValueError: If the plan has cut them in different ways.
    """
    for first, *others in shared:
        kept: Any = getattr(first.module, first.leaf)
        for place in others:
            other: Any = getattr(place.module, place.leaf)
            if _placed(other) != _placed(kept):
                raise ValueError(
                    f"{first.name} and {place.name} are one parameter, and the plan cuts the first as {_placed(kept)} "
                    f"and the second as {_placed(other)}: there would be two, which the optimizer moves apart; give "
                    "both modules entries that cut it alike, or give the weight to one module's forward as an "
                    "argument, as dtcp.models do with a tied head's"
                )
            place.module._parameters[place.leaf] = kept


def _placed(parameter: Any) -> str:
    return str(getattr(parameter, "placements", "whole"))


# ---- stages of a pipeline --------------------------------------------------------------------------------------------


def tied_parameters(first: nn.Module, last: nn.Module, tied: Sequence[str]) -> dict[str, str]:
    """Return the parameters that the two stages keep equal: names in the last by names in the first.

    Args:
        tied: Modules of the first stage. The last one has them too, or has all of their parameters elsewhere, as a
            head does whose weight is the embedding's.

    Raises:
        ValueError: If the first stage has no such module, or the last one not all of its parameters; if they are on the
            meta device and one by identity alone, which ends there.
    """
    theirs = {id(parameter): name for name, parameter in last.named_parameters()}
    names: dict[str, str] = {}
    for module_name in tied:
        module = getattr(first, module_name, None)
        found = module.named_parameters() if isinstance(module, nn.Module) else ()
        own = {f"{module_name}.{leaf}": parameter for leaf, parameter in found}
        if not own or not all(id(parameter) in theirs for parameter in own.values()):
            there = ", ".join(_modules_with_parameters(first)) or "none"
            raise ValueError(
                f"tied names modules with parameters that belong to the first stage and that the last one needs too, "
                f"got {module_name!r}; {type(first).__name__} has there {there}"
            )
        for name, parameter in own.items():
            names[name] = theirs[id(parameter)]
            if names[name] != name and parameter.is_meta:
                raise ValueError(
                    f"{name} and {names[name]} are one parameter on the meta device, and to_empty would make two of "
                    "it, on different stages, each with weights of its own; build the model on a device that holds it, "
                    "or give the weight to the head's forward as an argument, as dtcp.models do"
                )
    return names


def _modules_with_parameters(stage: nn.Module) -> list[str]:
    found = (name for name, child in stage.named_children() if any(True for _ in child.parameters()))
    return [name for name in found if name != "layers"]


def refuse_untied(stages: Sequence[nn.Module], tied: Collection[str]) -> None:
    """Raise ``ValueError`` if two stages have one parameter and nothing keeps their copies equal.

    Args:
        stages: All of them, on every rank.
        tied: Names, in the first stage, of what it shares with the last and keeps equal.
    """
    names: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            names.setdefault(id(parameter), {})[index] = name
    ends = {0, len(stages) - 1}
    kept_equal = {id(stages[0].get_parameter(name)) for name in tied}
    for key, places in names.items():
        if len(places) == 1 or (set(places) == ends and key in kept_equal):
            continue
        (one, name), (other, other_name) = list(places.items())[:2]
        cure = _OWN
        module = name.split(".")[0]
        if set(places) == ends and module != "layers" and "." in name:
            cure = (
                f"give parallelize pipeline=PipelineOptions(tied=({module!r},)), or the model an attribute "
                f"tied_modules=({module!r},), which keeps both equal; or {_OWN}"
            )
        raise ValueError(
            f"{name} of pipeline stage {one} and {other_name} of stage {other} are one parameter of "
            f"{type(stages[0]).__name__}: each stage would get a copy, with a part of the gradient, and the optimizer "
            f"would move them apart; {cure}"
        )


def shared_buffers(stages: Sequence[nn.Module]) -> set[str]:
    """Return the names of buffers that several stages have, each a copy on its own rank: right while they are constant.

    They are tables of all layers, as of rotary angles, so nothing is refused before a forward changes one.
    """
    names: dict[int, set[str]] = {}
    counts: dict[int, int] = {}
    for stage in stages:
        for name, buffer in stage.named_buffers():
            names.setdefault(id(buffer), set()).add(name)
            counts[id(buffer)] = counts.get(id(buffer), 0) + 1
    return {name for key, count in counts.items() if count > 1 for name in names[key]}


class ConstantBuffers:
    """Raises where a forward of a stage changes a buffer that other stages have a copy of."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._before: Mapping[str, tuple[Tensor, int]] = {}

    def watch(self, stage: nn.Module) -> None:
        """From now on, with hooks."""
        if self._names:
            stage.register_forward_pre_hook(self._look)
            stage.register_forward_hook(self._check)

    def _held(self, stage: nn.Module) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in stage.named_buffers() if name in self._names}

    def _look(self, stage: nn.Module, args: Any) -> None:
        self._before = {name: (buffer, buffer._version) for name, buffer in self._held(stage).items()}

    def _check(self, stage: nn.Module, args: Any, output: Any) -> None:
        for name, buffer in self._held(stage).items():
            before, version = self._before.get(name, (buffer, buffer._version))
            # A table made anew, for more positions say, holds what every stage makes by itself.
            is_other = buffer is not before and buffer.shape == before.shape and not bool((buffer == before).all())
            if is_other or (buffer is before and buffer._version != version):
                raise ValueError(
                    f"the forward changes the buffer {name}, which several pipeline stages have: each changes a copy "
                    "of its own, and one rank would change the one; use pp=1, or give each stage a buffer of its own"
                )


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ValueError if a parameter lies in the memory of another one, or of a buffer, and is another object.

    On one rank each optimizer step moves such memory for both. Sharded, cut or given to a stage they become two,
    without an error and with other numbers from the second step on.
    """
    found: list[tuple[str, int, int, bool, str, Tensor]] = []
    named = [(name, x, True) for name, x in model.named_parameters()]
    for name, x, is_parameter in [*named, *((name, x, False) for name, x in model.named_buffers())]:
        own = local_part(x).detach()
        if own.device.type == "meta" or isinstance(own, FakeTensor) or own.layout != torch.strided or not own.numel():
            continue
        last = sum((num - 1) * stride for num, stride in zip(own.shape, own.stride(), strict=True))
        start = own.data_ptr()
        found.append((str(own.device), start, start + (last + 1) * own.element_size(), is_parameter, name, own))
    found.sort(key=lambda entry: entry[:3])
    for index, (device, _, stop, is_parameter, name, own) in enumerate(found):
        for other in itertools.islice(found, index + 1, None):
            if (other[0], other[1]) >= (device, stop):
                break
            if (is_parameter or other[3]) and _overlap(own, other[5]):
                raise ValueError(
                    f"{name} and {other[4]} lie in the same memory (the .data of one is that of the other) and are two "
                    "as soon as the model is cut or sharded; tie the parameter itself: a.weight = b.weight, or give "
                    "one of them a copy: .data.clone()"
                )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors, the second of which begins within the first, have an element in common."""
    size = first.element_size()
    offset = second.data_ptr() - first.data_ptr()
    if first.dtype != second.dtype or offset % size:
        return True
    spans = [1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in (first, second)]
    used = torch.zeros(max(spans[0], offset // size + spans[1]), dtype=torch.bool)
    used.as_strided(first.shape, first.stride()).fill_(True)
    return bool(used.as_strided(second.shape, second.stride(), offset // size).any())
