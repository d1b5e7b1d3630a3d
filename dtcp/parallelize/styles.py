"""Parallel styles beside torch's own: parameters that stay whole, linear layers of one cut input, and an embedding.

Shapes: B batch, S positions that the tp ranks share, T = tp ranks.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from dtcp.dtensor import local_part
from dtcp.parallelize.columns_op import forward_op as gathered_linears


class ReplicatedParameters(ParallelStyle):
    """Keep a module's parameters whole on every rank, as DTensors, whatever its input is: norms and position tables.

    Like torch's ``SequenceParallel``, but for any layout of the input, and frozen parameters stay frozen. Where ranks
    see different positions the gradient is ``Partial``: the value is right, ``to_local()`` is not. FSDP2,
    ``reduce_gradients``, ``clip_grad_norm_`` and ``apply_tensor_parallel`` make it whole.

    Args:
        input_layout: What a plain first input is: ``Replicate()``, or ``Shard(1)`` where each rank holds its positions.
        desired_input_layout: What the module computes on; None is ``input_layout``. Of ``Shard(d)`` every rank gets an
            equal part.
        use_local_output: Give a plain tensor, this rank's part, instead of a DTensor.
    """

    def __init__(
        self,
        *,
        input_layout: Placement,
        desired_input_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layout = input_layout
        self.desired_input_layout = input_layout if desired_input_layout is None else desired_input_layout
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for submodule in module.modules():
            for name, parameter in submodule.named_parameters(recurse=False):
                whole = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
                submodule.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(lambda _, inputs: self._prepare_input(inputs, device_mesh))
        module.register_forward_hook(lambda _, inputs, output: self._prepare_output(output))
        return module

    def _prepare_input(self, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x, layout = inputs[0], self.desired_input_layout
        if not isinstance(x, DTensor):
            if isinstance(layout, Shard) and layout != self.input_layout:
                check_positions(x.size(layout.dim), mesh.size())
            x = DTensor.from_local(x, mesh, [self.input_layout], run_check=False)
        if x.placements != (layout,):
            x = x.redistribute(placements=[layout])
        return (x, *inputs[1:])

    def _prepare_output(self, output: DTensor) -> Tensor:
        return output.to_local() if self.use_local_output else output

    def __repr__(self) -> str:
        return (
            f"ReplicatedParameters(input_layout={self.input_layout}, desired_input_layout={self.desired_input_layout}, "
            f"use_local_output={self.use_local_output})"
        )


class SharedInputColumns(ParallelStyle):
    """Cut linear layers that a module calls on its first input by columns; of the input each rank holds its positions.

    ``{"layers.*.attention": SharedInputColumns("query", "key", "value")}`` in place of an all-gather of the module's
    input and a ``ColwiseParallel`` of each layer. The input (B, S/T, D) is gathered once for all of them in the
    forward, and once in the backward (Note [Gathered again in the backward]): what is kept is the part. Their outputs
    are plain (B, S, F/T). The module may use its first input for nothing else.

    Args:
        *names: Of the layers in the module; its forward calls each of them on its input.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        if not names:
            raise ValueError("SharedInputColumns needs the names of the linear layers; SharedInputColumns('up')")
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for index, name in enumerate(self.names):
            layer = module.get_submodule(name)
            if type(layer) is not nn.Linear:
                raise ValueError(
                    f"SharedInputColumns is for nn.Linear, got {type(layer).__name__} as {name} of "
                    f"{type(module).__name__}; gather the input with PrepareModuleInput and cut it by its own style"
                )
            for kind, parameter in list(layer.named_parameters()):
                cut = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
                layer.register_parameter(kind, nn.Parameter(cut, requires_grad=parameter.requires_grad))
            layer.__class__, layer._index = _Column, index  # type: ignore[assignment]
        # What a deep copy of the module has to take from itself comes as an argument.
        module.register_forward_pre_hook(functools.partial(_multiply, names=self.names, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        return f"SharedInputColumns({', '.join(map(repr, self.names))})"


class _Column(nn.Linear):
    """One of the layers: gives what has been computed for it."""

    _index: int

    def forward(self, outputs: Any) -> Tensor:
        """Its own of the ``outputs`` that the module around got in place of its input."""
        if not isinstance(outputs, tuple):
            raise ValueError(
                "a layer of SharedInputColumns needs the first input of the module around it as it is, got "
                f"{type(outputs).__name__}; use ColwiseParallel for a layer that is called on something else"
            )
        return outputs[self._index]


def _multiply(module: nn.Module, inputs: tuple[Any, ...], names: tuple[str, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    x = inputs[0].redistribute(placements=[Shard(1)]).to_local() if isinstance(inputs[0], DTensor) else inputs[0]
    layers = cast(list[nn.Linear], [module.get_submodule(name) for name in names])
    weights = [local_part(layer.weight) for layer in layers]
    biases = [local_part(layer.bias) for layer in layers if layer.bias is not None]
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # a custom op is none of its concern
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights, biases = x.to(dtype), [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
    has_bias = [layer.bias is not None for layer in layers]
    return tuple(gathered_linears(x, weights, biases, has_bias, mesh.get_group().group_name, mesh.size())), *inputs[1:]


class VocabularyParallelEmbedding(ParallelStyle):
    """Cut an embedding's rows over the ranks, which all look up the same tokens; the vocabulary need not divide.

    torch's ``RowwiseParallel`` with two differences. A sequence that the ranks cannot share evenly is refused: under
    ``Shard(1)`` what follows would take parts of another size for it. And the output has arrived when it is given: a
    compiled block that got one still on its way would hand back a gradient that torch cannot use.

    Args:
        output_layout: ``Replicate()``, or ``Shard(1)`` for a part of the positions (B, S/T, D) on each rank.
        use_local_output: Give a plain tensor, this rank's part, instead of a DTensor.
    """

    def __init__(self, *, output_layout: Placement, use_local_output: bool = True) -> None:
        super().__init__()
        self.output_layout, self.use_local_output = output_layout, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise ValueError(f"VocabularyParallelEmbedding is for nn.Embedding, got {type(module).__name__}")
        weight = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight, requires_grad=module.weight.requires_grad))
        module.register_forward_pre_hook(lambda _, inputs: self._prepare_input(inputs, device_mesh))
        module.register_forward_hook(lambda _, inputs, output: self._prepare_output(output))
        return module

    def _prepare_input(self, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        tokens = inputs[0]
        if isinstance(self.output_layout, Shard):
            check_positions(tokens.size(self.output_layout.dim), mesh.size())
        if not isinstance(tokens, DTensor):
            tokens = DTensor.from_local(tokens, mesh, [Replicate()], run_check=False)
        return (tokens, *inputs[1:])

    def _prepare_output(self, output: DTensor) -> Tensor:
        output = output.redistribute(placements=[self.output_layout])
        return output.to_local() if self.use_local_output else output

    def __repr__(self) -> str:
        return (
            f"VocabularyParallelEmbedding(output_layout={self.output_layout}, use_local_output={self.use_local_output})"
        )


def check_positions(num_positions: int, tp: int) -> None:
    """Raise ``ValueError`` unless ``tp`` ranks can share ``num_positions`` evenly."""
    if num_positions % tp:
        raise ValueError(
            f"sequence parallelism cuts the positions of a rank evenly over tp={tp}, got {num_positions}; pad them: "
            f"dtcp.make_layout(..., multiple_of={tp}) does, also at cp=1, or switch it off with sequence_parallel=False"
        )
