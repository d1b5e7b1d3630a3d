"""Whether a tensor is a DTensor, and this rank's part of one; told without loading the module, which takes long."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is a DTensor, or one with a layout (``as_dtensor``)."""
    return isinstance(x, Tensor) and hasattr(x, "placements")


def local_part(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    return x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
