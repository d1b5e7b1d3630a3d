"""Linear layers of one input whose positions are cut over ranks: gather, multiply, and keep the part, not the whole.

Shapes: x (B, S/T, D) on each of T ranks, weights (F_i, D), biases (F_i,), outputs (B, S, F_i) with all positions.

# Note [Gathered again in the backward]
The gradient of a weight needs the whole input. Kept from the forward, the inputs of attention and feed-forward would be
what sequence parallelism does not cut: 4 of 34 bytes per token and feature of a GPT layer in half precision, on each
rank. So the backward gathers them once more, behind the product that gives the gradient of the input, whose
reduce-scatter travels behind the products for the weights. Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dtcp.collectives import resolve_group, start_all_gather_rows, start_reduce_scatter_rows


@torch.library.custom_op("dtcp::gathered_linears", mutates_args=())
def forward_op(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], has_bias: list[bool], group_name: str, num_ranks: int
) -> list[Tensor]:
    """Return ``linear(whole x, weight, bias)`` for each weight. Collective: one all-gather.

    Args:
        biases: Of the layers that have one, in their order.
        has_bias: By layer.
    """
    whole, work = _start_gather(x, resolve_group(group_name))
    work.wait()
    rows, left = _by_row(whole), iter(biases)
    with torch.autocast(x.device.type, enabled=False):
        return [
            F.linear(rows, weight, next(left) if has else None) for weight, has in zip(weights, has_bias, strict=True)
        ]


@forward_op.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], has_bias: list[bool], group_name: str, num_ranks: int
) -> list[Tensor]:
    return [x.new_empty(x.size(0), num_ranks * x.size(1), weight.size(0)) for weight in weights]


@torch.library.custom_op("dtcp::gathered_linears_backward", mutates_args=())
def backward_op(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], needs: list[bool], group_name: str, num_ranks: int
) -> list[Tensor]:
    """Return the gradients that are needed. Collective: an all-gather for those of weights, a reduce-scatter for x's.

    Args:
        needs: Of x, of each weight, of the bias of each weight.
    """
    group, count = resolve_group(group_name), len(weights)
    needs_x, of_weights, of_biases = needs[0], needs[1 : 1 + count], needs[1 + count :]
    results: list[Tensor] = []
    gathering = _start_gather(x, group) if any(of_weights) else None
    flat = [grad.flatten(0, 1) for grad in grads]
    with torch.autocast(x.device.type, enabled=False):
        if needs_x:
            total = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                total.addmm_(grad, weight)
            parts = total.view(x.size(0), num_ranks, *x.shape[1:]).transpose(0, 1)
            grad_x, scattering = start_reduce_scatter_rows(parts.reshape(num_ranks * x.size(0), *x.shape[1:]), group)
            results.append(grad_x)
        if gathering is not None:
            whole, work = gathering
            work.wait()
            rows = _by_row(whole).flatten(0, 1)
            results += [grad.t() @ rows for grad, is_needed in zip(flat, of_weights, strict=True) if is_needed]
        results += [grad.sum(0) for grad, is_needed in zip(flat, of_biases, strict=True) if is_needed]
    if needs_x:
        scattering.wait()
    return results


@backward_op.register_fake
def _(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], needs: list[bool], group_name: str, num_ranks: int
) -> list[Tensor]:
    like = [x, *weights, *(weight[:, 0] for weight in weights)]
    return [x.new_empty(tensor.shape) for tensor, is_needed in zip(like, needs, strict=True) if is_needed]


def _start_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to make (T, B, S/T, D) of x."""
    gathered, work = start_all_gather_rows(x, group)
    return gathered.view(group.size(), *x.shape), work


def _by_row(gathered: Tensor) -> Tensor:
    """(T, B, S/T, D) to (B, S, D); a copy for more than one row."""
    return gathered.transpose(0, 1).flatten(1, 2)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.has_bias, ctx.group_name, ctx.num_ranks = inputs
    ctx.save_for_backward(x, *weights)


def _autograd(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    # Of x, the weights, the biases that there are. Schedules that split backwards ask for x's alone, then for the rest.
    wanted = [_is_wanted(node) for node, _ in ctx.next_functions]
    needs_x, of_weights, of_biases = wanted[0], wanted[1 : 1 + len(weights)], wanted[1 + len(weights) :]
    left = iter(of_biases)
    needs = [needs_x, *of_weights, *(has and next(left) for has in ctx.has_bias)]
    results = iter(backward_op(grads, x, weights, needs, ctx.group_name, ctx.num_ranks))
    grad_x, *others = (next(results) if is_needed else None for is_needed in wanted)
    return grad_x, others[: len(weights)], others[len(weights) :], None, None, None


def _is_wanted(node: Any) -> bool:
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf, of ``autograd.grad``
        return True


forward_op.register_autograd(_autograd, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.dtcp.gathered_linears)
def _flops(x_shape: Any, weight_shapes: Any, *args: Any, **kwargs: Any) -> int:
    """2 FLOPs × tokens × D × F_i, of all ranks' tokens."""
    num_ranks = args[3] if len(args) > 3 else kwargs["num_ranks"]
    return 2 * num_ranks * x_shape[0] * x_shape[1] * sum(weight.numel() for weight in weight_shapes)
