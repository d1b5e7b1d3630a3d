"""What a model of transformers begins with, parameter by parameter: drawn by its own code, from a generator of its own.

transformers draws a whole model at once, from one generator, so that no two ways to cut it would begin alike.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dtcp.models.init import Fill


def initial_values(hf: Any) -> Iterator[tuple[str, Fill]]:
    """Yield what draws each parameter, by its name; to be taken before wrappers change the modules."""
    originals = {path: _stand_in(module) for path, module in hf.named_modules()}
    for path, module in hf.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            yield name, functools.partial(_fill, hf, originals, path, leaf)


def _fill(hf: Any, originals: dict[str, nn.Module], path: str, leaf: str, values: Tensor) -> None:
    """Draw one parameter as transformers does: by its module, then by what is around that, which may draw it again.

    The other parameters of these modules are on the meta device: they take no random numbers.
    """
    values.fill_(torch.nan)
    below: tuple[str, nn.Module] | None = None
    while True:
        module = _stand_in(originals[path])
        module._parameters = {name: _on_meta(p) for name, p in module._parameters.items()}
        if below is None:
            module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
        else:
            module._modules[below[0]] = below[1]
        _nearest_model(hf, path)._init_weights(module)
        if not path:
            break
        path, _, name = path.rpartition(".")
        below = name, module
    if bool(values.isnan().any()):
        raise NotImplementedError(
            f"transformers does not say what {leaf} of {type(hf).__name__} begins with; begin with its weights, "
            "model.weights=FOLDER"
        )


@torch.no_grad()
def fill_buffers(hf: Any) -> None:
    """Fill the buffers of ``hf`` that have storage, as transformers does where it builds a model.

    Raises:
        NotImplementedError: If it does not say what one begins with.
    """
    for path, module in hf.named_modules():
        buffers = {name: x for name, x in module._buffers.items() if x is not None and not x.is_meta}
        if not buffers:
            continue
        stand_in = _stand_in(module)
        stand_in._parameters = {name: _on_meta(p) for name, p in module._parameters.items()}
        filled = []
        for first in (3, 5):  # what neither start shows in is what transformers has put there
            for buffer in buffers.values():
                buffer.fill_(first)
            _nearest_model(hf, path)._init_weights(stand_in)
            filled.append({name: x.clone() for name, x in buffers.items()})
        for name in buffers:
            if not torch.equal(filled[0][name], filled[1][name]):
                raise NotImplementedError(
                    f"transformers does not say what {path}.{name} of {type(hf).__name__} begins with, so it cannot "
                    "be made anew on each rank; such models are not available"
                )


def _stand_in(module: nn.Module) -> nn.Module:
    """The same module with dicts of its own for what is in it."""
    clone = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        clone.__dict__[name] = dict(module.__dict__[name])
    return clone


def _on_meta(parameter: Tensor | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="meta"), requires_grad=False)


def _nearest_model(hf: Any, path: str) -> Any:
    """The `PreTrainedModel` that the module at ``path`` is in, or is."""
    while True:
        module = hf.get_submodule(path)
        if isinstance(module, PreTrainedModel) or not path:
            return module
        path = path.rpartition(".")[0]
