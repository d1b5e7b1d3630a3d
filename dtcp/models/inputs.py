"""What a model accepts: tokens and explicit positions, checked without waiting for a device.

Shapes: B batch, S positions held here (the local part when the sequence is cut).
"""

import torch
from torch import Tensor


def is_residual_stream(x: Tensor) -> bool:
    """Whether a model's input is (B, S, dim) from layers that another stage of a pipeline holds, and no tokens."""
    return x.ndim == 3 and x.is_floating_point()


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ``ValueError`` unless ``tokens`` is an int64 (B, S) tensor of ids below ``vocab_size``.

    The ids themselves are read only where that is free of a device wait: eagerly, for a plain CPU tensor. On CUDA and
    inside ``torch.compile`` an id out of range ends in the embedding's own device assert; compare the tokenizer's
    ``vocab_size`` with the model's once, before the first step.
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be int64 (B, S), got {tokens.dtype} {tuple(tokens.shape)}; use tokens.long()")
    if can_read(tokens):
        low, high = (int(x) for x in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"tokens must be in [0, {vocab_size}), got values in [{low}, {high}]; "
                "set the model's vocab_size to the tokenizer's, or fill the pad slots with a valid id"
            )


def resolve_positions(positions: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the int64 global position of every token, (B, S) or (S,).

    Args:
        positions: (B, S), or (S,) when all rows agree, or None for ``arange(S)``: the whole sequence, in order.
        tokens: (B, S); or the residual stream, which may be a share of the positions: its shape is not compared.

    Raises:
        ValueError: If ``positions`` has another shape, dtype or device than the tokens ask for.
    """
    if positions is None:
        return torch.arange(tokens.size(1), device=tokens.device)
    if positions.dtype != torch.int64:
        raise ValueError(f"positions must be int64, got {positions.dtype}; use positions.long()")
    if not is_residual_stream(tokens) and positions.shape != tokens.shape and positions.shape != tokens.shape[1:]:
        raise ValueError(
            f"positions must be (B, S) = {tuple(tokens.shape)} or (S,) = {tuple(tokens.shape[1:])} like the tokens, "
            f"got {tuple(positions.shape)}; pass the global position of each local token, e.g. layout.positions(rank)"
        )
    if positions.device != tokens.device:
        raise ValueError(f"positions must be on the tokens' device {tokens.device}, got {positions.device}")
    return positions


def check_position_range(positions: Tensor, max_seq_len: int) -> None:
    """Raise ``ValueError`` for positions that a table of ``max_seq_len`` rows does not have.

    The number of positions is always checked; their values only where that costs no device wait (see `check_tokens`).
    """
    if positions.size(-1) > max_seq_len:
        raise position_error(positions.size(-1), max_seq_len)
    if can_read(positions):
        low, high = (int(x) for x in torch.aminmax(positions))
        if low < 0:
            raise ValueError(f"positions must be >= 0, got {low}; pad slots take position 0")
        if high >= max_seq_len:
            raise position_error(high + 1, max_seq_len)


def position_error(seq_len: int, max_seq_len: int) -> ValueError:
    """The error for a sequence longer than a learned position table."""
    return ValueError(
        f"the model has max_seq_len={max_seq_len} learned positions, got a sequence of {seq_len}; "
        f"override max_seq_len={seq_len} (model.max_seq_len={seq_len} on the command line), or use a llama model; "
        "pad slots take position 0"
    )


def table_error(seq_len: int, max_seq_len: int) -> ValueError:
    """The error for a sequence longer than the rotary table."""
    return ValueError(
        f"the model has a rotary table of max_seq_len={max_seq_len} positions, got a sequence of {seq_len}; override "
        f"max_seq_len={seq_len} (model.max_seq_len={seq_len} on the command line)"
    )


def can_read(x: Tensor) -> bool:
    """Whether the values are at hand: not traced, no subclass (FakeTensor, DTensor), on the CPU, not empty."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu" and x.numel() > 0
