"""The loss of the output layer without the logits of the whole sequence: linear layer and cross-entropy by chunks.

Shapes: hidden (…, D), weight (V, D), bias (V,), labels (…) int64. A rank's loss is its share, as in ``token_loss``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtcp.collectives import agree, resolve_group
from dtcp.dtensor import is_dtensor, local_part
from dtcp.linear_loss_op import NAME, forward_op
from dtcp.loss import check_labels, divide_by_count, resolve_count

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Axes whose ranks hold other tokens, or parts of every parameter, but never a part of the vocabulary each.
_OTHER_AXES = ("fsdp", "hsdp", "dp", "dp_shard", "dp_replicate", "cp", "pp", "batch", "loss")


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mesh: DeviceMesh | None = None,
    ignore_index: int = -100,
    num_valid_tokens: Tensor | int | None = None,
    chunk_tokens: int = 1024,
    tp_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Return ``token_loss(linear(hidden, weight, bias), labels, …)`` while only ``chunk_tokens`` tokens have logits.

    The same share of the loss and the same gradients, exact to rounding. Beside the inputs there are at a time
    ``chunk_tokens × V`` logits in float32, and from the forward on the gradients of ``hidden`` and, in float32 (float64
    for float64), of ``weight`` and ``bias``: the backward only scales them. Tokens without a label cost nothing. One
    graph under ``torch.compile``, where ``num_valid_tokens`` is given.

    Note [The vocabulary over tp ranks]. ``weight`` (and ``bias``) may be DTensors, ``Shard(0)`` on the 1-D tp mesh,
    or this rank's rows with ``tp_mesh``; some ranks may hold more rows than others. Every tp rank passes the same
    labels, and gets the same loss. ``hidden`` is either whole on each rank, plain or ``Replicate``, and so is its
    gradient, summed over tp once, here; or a DTensor that is cut (``Shard(1)`` under sequence parallelism), which
    is gathered, and its gradient is cut alike by a reduce-scatter. Sent per chunk of C tokens: an all-reduce of C
    numbers (the largest logit) and one of 2·C (Σ exp and the label's logit); once: 8 bytes per rank, and the
    gradient of ``hidden``.

    Args:
        hidden: (…, D), this rank's tokens, any float dtype; the softmax is taken in float32 (float64 for float64).
        weight: (V, D) in the dtype of ``hidden``, whole inside the forward of a model that FSDP2 has sharded: call
            this there, ``model(tokens, positions, head_fn=…)``.
        labels: (…), already shifted; ``ignore_index`` counts for nothing.
        bias: (V,).
        mesh, ignore_index, num_valid_tokens: As in ``token_loss``.
        chunk_tokens: Tokens whose logits exist at a time, at least 1. Fewer save memory; some hundred keep matrix
            products efficient.
        tp_mesh: 1-D mesh over whose ranks the rows of ``weight`` are spread, for plain tensors.

    Returns:
        0-d float32 tensor (float64 for float64 ``hidden``), as ``token_loss``.

    Raises:
        ValueError: If shapes, dtypes, meshes or placements do not fit, a label is outside the vocabulary, or tp ranks
            pass different labels (seen on CPU) or shapes. On CPU the other tp ranks raise too.
        NotImplementedError: In a double backward.
    """
    vocabulary_mesh = _vocabulary_mesh(hidden, weight, bias, tp_mesh)
    group_name = "" if vocabulary_mesh is None else vocabulary_mesh.get_group().group_name
    try:
        _check(hidden, weight, labels, bias, chunk_tokens)
        hidden, weight, bias = _autocast(hidden, weight, bias)
        _check_alike(hidden, weight, bias, labels)
        labels = local_part(labels)
        num_valid_tokens = resolve_count(num_valid_tokens, labels, mesh=mesh, ignore_index=ignore_index)
    except ValueError as error:
        _tell_others(group_name, hidden, error)
        raise
    hidden, sums_hidden = _whole_hidden(hidden, group_name)
    weight, bias = local_part(weight), None if bias is None else local_part(bias)
    # Inside the op nothing requires grad.
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    total = forward_op(hidden, weight, bias, labels, ignore_index, chunk_tokens, group_name, sums_hidden, *needs)[0]
    return divide_by_count(total, num_valid_tokens)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk_tokens: int) -> None:
    """What can be said before anything is gathered."""
    check_labels(NAME, "hidden (…, D)", hidden, labels)
    if weight.ndim != 2 or weight.size(1) != hidden.size(-1):
        raise ValueError(
            f"{NAME} needs weight (V, D) for hidden (…, D), got {tuple(weight.shape)} and {tuple(hidden.shape)}; pass "
            "the weight of the linear layer as it is, a row per word"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{NAME} needs bias (V,) for weight (V, D), got {tuple(bias.shape)} and {tuple(weight.shape)}; pass the "
            "rows that belong together"
        )
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be an integer of at least 1, got {chunk_tokens!r}; 1024 is the default")


def _vocabulary_mesh(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tp_mesh: DeviceMesh | None
) -> DeviceMesh | None:
    """The mesh over which the vocabulary is spread, None where each rank has all of it."""
    if not is_dtensor(weight):
        if is_dtensor(hidden) or is_dtensor(bias):
            raise ValueError(
                f"{NAME} got a plain weight beside a DTensor; pass the weight as a DTensor on the same mesh too, or "
                "all of them plain (to_local(), with tp_mesh= for rows of the vocabulary)"
            )
        if tp_mesh is not None and tp_mesh.ndim != 1:
            raise ValueError(
                f"{NAME} needs the 1-D mesh of the tp axis, got {tp_mesh.ndim}-D with axes {tp_mesh.mesh_dim_names}; "
                "pass mesh['tp']"
            )
        return tp_mesh if tp_mesh is not None and tp_mesh.size() > 1 else None
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or ()
    if mesh.ndim != 1 or any(name in _OTHER_AXES for name in names):
        raise ValueError(
            f"{NAME} got a weight that is spread over the mesh axes {names}, not over tp alone; FSDP2 has sharded it: "
            "call the loss inside the model's forward, where the weight is whole: model(tokens, positions, head_fn="
            f"lambda hidden, weight: dtcp.{NAME}(hidden, weight, labels, …))"
        )
    if tp_mesh is not None and tp_mesh != mesh:
        raise ValueError(f"{NAME} got tp_mesh={tp_mesh}, but weight is on {mesh}; leave tp_mesh out for DTensors")
    for name, x in (("hidden", hidden), ("bias", bias)):
        if is_dtensor(x) and x.device_mesh != mesh:  # type: ignore[union-attr]
            raise ValueError(f"{NAME} got {name} on another mesh than weight: {x.device_mesh} and {mesh}")  # type: ignore[union-attr]
    if bias is not None and (not is_dtensor(bias) or bias.placements != placements):  # type: ignore[attr-defined]
        raise ValueError(f"{NAME} needs bias placed like weight, a DTensor with {placements}")
    if mesh.size() == 1 or placements[0].is_replicate():
        return None
    if not placements[0].is_shard(0) or type(placements[0]).__name__ != "Shard":
        raise ValueError(
            f"{NAME} takes a weight that is Shard(0) or Replicate on tp, got {placements}; redistribute it"
        )
    return mesh


def _whole_hidden(hidden: Tensor, group_name: str) -> tuple[Tensor, bool]:
    """Return ``hidden`` whole and plain, and whether its gradient is still to be added up over the tp group."""
    if not is_dtensor(hidden):
        return hidden, bool(group_name)
    from torch.distributed.tensor import Partial, Replicate

    is_whole = hidden.placements[0].is_replicate()  # type: ignore[attr-defined]
    if not is_whole:
        _tell_others(group_name, hidden, None)
    sums_hidden = bool(group_name) and is_whole
    # Of a hidden that is cut, each rank's share of the gradient goes back as it is: a reduce-scatter adds them up.
    share = Partial() if group_name and not is_whole else Replicate()
    whole = hidden.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
    return whole.to_local(grad_placements=[share]), sums_hidden


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would do to the arguments of a linear layer: a custom op is none of its concern."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check_alike(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    """Devices and dtypes, as autocast leaves them, and that labels and ``hidden`` can be made whole."""
    others = [("weight", weight), ("labels", labels), *([] if bias is None else [("bias", bias)])]
    for name, x in others:
        if x.device != hidden.device:
            raise ValueError(f"{NAME} needs {name} on the device of hidden, {hidden.device}, got {x.device}; move it")
        if name != "labels" and x.dtype != hidden.dtype:
            raise ValueError(
                f"{NAME} needs {name} in the dtype of hidden, {hidden.dtype}, got {x.dtype}; use hidden.to({x.dtype})"
            )
    if is_dtensor(labels) and not all(p.is_replicate() for p in labels.placements):  # type: ignore[attr-defined]
        raise ValueError(
            f"{NAME} needs the labels of all tokens on each tp rank, got {labels.placements}; use "  # type: ignore[attr-defined]
            "labels.redistribute(placements=[Replicate()])"
        )
    if is_dtensor(hidden) and not hasattr(hidden, "redistribute"):
        raise ValueError(f"{NAME} does not take a {type(hidden).__name__}; use its to_local(), with labels cut like it")


def _tell_others(group_name: str, hidden: Tensor, error: Exception | None) -> None:
    """Let the other tp ranks of a CPU group know of an ``error``, so that they raise too instead of waiting."""
    if group_name and not torch.compiler.is_compiling() and hidden.device.type == "cpu":
        agree(NAME, {}, resolve_group(group_name), torch.device("cpu"), error=error)
