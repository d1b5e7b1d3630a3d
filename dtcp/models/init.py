"""Initial weights that depend on a seed and a parameter's name, and on nothing else.

Each parameter has a random generator of its own, so sharding, the order of construction, pipeline stages and the
number of ranks cannot change a value.
"""

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What ``torch.compile`` and the checkpoint wrapper insert into qualified names."""


@dataclass(frozen=True, slots=True)
class Init:
    """Distribution of a parameter's initial values.

    Attributes:
        mean: Mean; the value itself when ``std`` is 0.
        std: Standard deviation before truncation.
        cutoff: Values farther than this many ``std`` from the mean are drawn anew; None keeps all.
    """

    mean: float = 0.0
    std: float = 0.0
    cutoff: float | None = None


Fill = Callable[[Tensor], object]
"""Draws the values of a parameter into a float32 CPU tensor, from torch's default generator."""


def initialize(model: nn.Module, seed: int, rule: Callable[[str], Init | Fill]) -> None:
    """Fill every parameter of ``model`` in place, and the buffers of modules that have an ``init_buffers()``.

    Values are drawn in float32 on the CPU, one full parameter at a time, then rounded to the parameter's dtype. A
    ``DTensor`` keeps its own slice of the full draw: no communication, peak memory of one full parameter. Every rank
    draws everything: about 10 ns a parameter and core.

    Args:
        model: Materialised model, sharded or not.
        seed: Any integer.
        rule: Distribution for a qualified name, wrapper prefixes removed.

    Raises:
        ValueError: If a parameter is still on the meta device.
    """
    with torch.no_grad():
        for qualified_name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {qualified_name} is on the meta device and has no storage; "
                    "call model.to_empty(device=...) before init_weights"
                )
            name = plain_name(qualified_name)
            assign(parameter, draw(parameter.shape, seed, name, rule(name)))
    for module in model.modules():
        if callable(init_buffers := getattr(module, "init_buffers", None)):
            init_buffers()


def draw(shape: torch.Size, seed: int, name: str, init: Init | Fill) -> Tensor:
    """Return the float32 CPU tensor of ``shape`` that ``seed`` and ``name`` stand for."""
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    if not isinstance(init, Init):
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(_stable_hash(seed, name))
            init(values)
        return values
    if init.std == 0:
        return values.fill_(init.mean)
    generator = torch.Generator("cpu").manual_seed(_stable_hash(seed, name))
    if init.cutoff is None:
        return values.normal_(init.mean, init.std, generator=generator)
    reach = init.cutoff * init.std
    return nn.init.trunc_normal_(values, init.mean, init.std, init.mean - reach, init.mean + reach, generator=generator)


def plain_name(qualified_name: str) -> str:
    """Return a parameter's name without what wrappers inserted into it."""
    for prefix in WRAPPER_PREFIXES:
        qualified_name = qualified_name.replace(prefix, "")
    return re.sub(r"^_pipeline_stages\.\d+\.", "", qualified_name)


def _stable_hash(seed: int, name: str) -> int:
    # 32 bits: torch's CPU generator ignores the rest of its seed. Not hash(): that differs from process to process.
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "little")


def assign(parameter: Tensor, full: Tensor) -> None:
    """Put ``full`` into ``parameter``; into a DTensor this rank's part of it, without communication."""
    # Not imported here: whoever made a DTensor has imported the module, and nobody else should pay for it.
    tensor_module = sys.modules.get("torch.distributed.tensor")
    if tensor_module is None or not isinstance(parameter, tensor_module.DTensor):
        parameter.copy_(full)
        return
    local = tensor_module.distribute_tensor(
        full, parameter.device_mesh, parameter.placements, src_data_rank=None
    ).to_local()
    parameter.to_local().copy_(local)
