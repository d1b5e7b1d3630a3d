"""Cross-entropy as a sum over tokens divided by the number of tokens of the whole step, never a mean of means.

Shapes: logits (…, V), labels (…) int64. A rank's loss is its share: the shares of all ranks add up to the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtcp.collectives import check_mesh
from dtcp.dtensor import is_dtensor
from dtcp.vocabulary import vocabulary_parallel_cross_entropy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IGNORED = -100  # label of a token without a target, torch's and transformers' default


def count_valid_tokens(labels: Tensor, *, mesh: DeviceMesh | None = None, ignore_index: int = -100) -> Tensor:
    """Return how many labels of all ranks of ``mesh`` are not ``ignore_index``: 0-d int64 tensor.

    Args:
        labels: This rank's labels, any shape.
        mesh: 1-D mesh over which tokens are spread (``dims.view("loss")``); None counts this rank's only.
    """
    count = (labels != ignore_index).sum()
    if mesh is not None:
        check_mesh(mesh, "count_valid_tokens")
        if mesh.size() > 1:
            dist.all_reduce(count, group=mesh.get_group())
    return count


def token_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    ignore_index: int = -100,
    num_valid_tokens: Tensor | int | None = None,
) -> Tensor:
    """Return this rank's share of the loss: Σ of its token losses / Σ of valid tokens of all ranks.

    Args:
        logits: (…, V), this rank's tokens, any float dtype; the softmax is taken in float32 (float64 for float64).
            Vocabulary-parallel logits are a DTensor, Shard(-1) over the 1-D tp mesh: no rank gathers the vocabulary.
        labels: (…), already shifted; ``ignore_index`` counts for nothing. Plain, and equal on tp ranks.
        mesh: 1-D mesh over which tokens are spread (``dims.view("loss")``), where the count is summed. It is not
            used when ``num_valid_tokens`` is given.
        num_valid_tokens: The divisor, for gradient accumulation: the sum of ``count_valid_tokens`` over all
            microbatches of the optimizer step.

    Returns:
        0-d float32 tensor (float64 for float64 logits). Summed over the ranks of ``mesh`` it is the mean loss of
        the valid tokens; with none at all it is 0 and so is its gradient.

    Raises:
        ValueError: If shapes or dtypes do not fit, ``num_valid_tokens`` is not one number of at least 0, a label is
            outside the vocabulary (seen in eager mode on CPU), or logits are a DTensor that is spread in another way.
    """
    check_labels("token_loss", "logits (…, V)", logits, labels)
    num_valid_tokens = resolve_count(num_valid_tokens, labels, mesh=mesh, ignore_index=ignore_index)
    return divide_by_count(_summed_cross_entropy(logits, labels, ignore_index), num_valid_tokens)


def _summed_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    if is_dtensor(logits):
        if type(labels) is Tensor and labels.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_ids(labels, logits.size(-1), ignore_index)
        return vocabulary_parallel_cross_entropy(logits, labels, ignore_index=ignore_index)  # type: ignore[arg-type]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    flat = labels.reshape(-1).to(torch.int64)
    try:
        return F.cross_entropy(
            logits.reshape(-1, logits.size(-1)).to(dtype), flat, ignore_index=ignore_index, reduction="sum"
        )
    except IndexError as error:  # torch names the label only; on an accelerator it asserts on the device
        raise outside_vocabulary("token_loss", labels, logits.size(-1), "last dim of logits", ignore_index) from error


def _check_ids(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    if bool(is_outside_vocabulary(labels, vocab_size, ignore_index).any()):
        raise outside_vocabulary("token_loss", labels, vocab_size, "last dim of logits", ignore_index)


def check_labels(caller: str, scored_name: str, scored: Tensor, labels: Tensor) -> None:
    """Raise ``ValueError`` unless labels (…) belong to ``scored`` (…, K), called ``scored_name`` in the message."""
    if scored.ndim == 0 or scored.shape[:-1] != labels.shape:
        raise ValueError(
            f"{caller} needs {scored_name} and labels (…), got {tuple(scored.shape)} and {tuple(labels.shape)}; "
            "cut both alike"
        )
    if not scored.dtype.is_floating_point or not _is_integer(labels.dtype):
        name = scored_name.split()[0]
        raise ValueError(
            f"{caller} needs {name} of a float dtype and labels of an integer one, got {scored.dtype} and "
            f"{labels.dtype}; swap them, or use labels.to(torch.int64)"
        )


def resolve_count(
    count: Tensor | int | None, labels: Tensor, *, mesh: DeviceMesh | None, ignore_index: int
) -> Tensor | int:
    """Return the divisor of a loss: ``count`` if it is given, else counted over ``mesh``. Raises if it is none."""
    if count is None:
        count = count_valid_tokens(labels, mesh=mesh, ignore_index=ignore_index)
    _check_count(count)
    return count


def divide_by_count(total: Tensor, count: Tensor | int) -> Tensor:
    """Return the share of the loss: ``total`` / ``count``, and 0 where no token of any rank is valid."""
    return total / torch.as_tensor(count, device=total.device).clamp(min=1)


def is_outside_vocabulary(labels: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """Return which labels are neither in ``0..vocab_size - 1`` nor ``ignore_index``."""
    return (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))


def outside_vocabulary(caller: str, labels: Tensor, vocab_size: int, of: str, ignore_index: int) -> ValueError:
    """The error that names the first label outside the vocabulary; there has to be one."""
    position = tuple(is_outside_vocabulary(labels, vocab_size, ignore_index).nonzero()[0].tolist())
    return ValueError(
        f"{caller}: label {labels[position].item()} at {position} is outside the vocabulary of {vocab_size}, the "
        f"{of}; give labels in 0..{vocab_size - 1}, or ignore_index={ignore_index} for no target"
    )


def _check_count(count: Tensor | int) -> None:
    if isinstance(count, Tensor):
        if count.ndim > 0:
            raise ValueError(
                f"num_valid_tokens must be one number, got a tensor of shape {tuple(count.shape)}; give the sum over "
                "all microbatches of the step"
            )
    elif count < 0:
        raise ValueError(f"num_valid_tokens must be at least 0, got {count}; give what count_valid_tokens returns")


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
