"""Attention sinks where heads are cut over the tp ranks, as an entry of a ``parallelize_module`` plan."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class HeadParallelSinks(ParallelStyle):
    """Cut a module's sinks, a logit of each query head, over the ranks like its heads; the rest is another style's.

    ``{"layers.*.attention": HeadParallelSinks(SharedInputColumns("query", "key", "value"))}``. The module has the
    parameter ``sinks`` (H,), and gives it to the module ``sdpa`` in it, which attends, as the argument ``sinks``: there
    it arrives plain, that of the rank's own heads. Attention sees all positions that the tp ranks have together, also
    under sequence parallelism: each rank's gradient is complete for its heads, and nothing is added up over tp.

    Args:
        style: What else is done to the module.
        name: Of the parameter, and of the argument.
        attends: Name of the module in it that attends.
    """

    def __init__(self, style: ParallelStyle, *, name: str = "sinks", attends: str = "sdpa") -> None:
        super().__init__()
        self.style, self.name, self.attends = style, name, attends

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sinks = getattr(module, self.name, None)
        if not isinstance(sinks, nn.Parameter) or sinks.ndim != 1 or sinks.numel() % device_mesh.size():
            found = tuple(sinks.shape) if isinstance(sinks, nn.Parameter) else type(sinks).__name__
            raise ValueError(
                f"HeadParallelSinks needs the parameter {self.name} (H,) of {type(module).__name__}, with H a multiple "
                f"of tp={device_mesh.size()}, got {found}; leave the entry to its style alone where there are no sinks"
            )
        module = self.style._apply(module, device_mesh)
        cut = distribute_tensor(sinks.detach(), device_mesh, [Shard(0)])
        module.register_parameter(self.name, nn.Parameter(cut, requires_grad=sinks.requires_grad))
        name = self.name

        def make_local(_: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given = options.get(name)
            return inputs, {**options, name: given.to_local()} if isinstance(given, DTensor) else options

        module.get_submodule(self.attends).register_forward_pre_hook(make_local, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return f"HeadParallelSinks({self.style!r}, name={self.name!r}, attends={self.attends!r})"
