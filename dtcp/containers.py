"""Apply a function to every tensor of a nested container: dict, list, tuple, named tuple, TensorDict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any, *, dim: int) -> Any:
    """Return ``tree`` with ``fn`` applied to each tensor; what is no tensor stays as it is.

    Args:
        dim: The dim whose size ``fn`` changes; the batch size of a TensorDict follows it.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    if _is_tensor_collection(tree):
        return _map_tensordict(fn, tree, dim)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, value, dim=dim) for key, value in tree.items()}
        return mapped if type(tree) is dict else type(tree)(mapped)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(fn, value, dim=dim) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(fn, value, dim=dim) for value in tree)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor of ``tree`` in a fixed order (dict keys sorted by their text)."""
    if isinstance(tree, Tensor):
        return [tree]
    if _is_tensor_collection(tree):
        tree = {str(key): value for key, value in tree.items(include_nested=True, leaves_only=True)}
    if isinstance(tree, Mapping):
        return [t for key in sorted(tree, key=str) for t in tensors_of(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [t for value in tree for t in tensors_of(value)]
    return []


def _is_tensor_collection(tree: Any) -> bool:
    # tensordict costs 1.5 s to import: whoever holds a TensorDict has paid for it already.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and tensordict.is_tensor_collection(tree)


def _map_tensordict(fn: Callable[[Tensor], Tensor], tree: Any, dim: int) -> Any:
    batch_size = list(tree.batch_size)
    changed: set[tuple[int, int]] = set()

    def apply(leaf: Tensor) -> Tensor:
        result = fn(leaf)
        leaf_dim = dim % leaf.ndim
        if leaf_dim < len(batch_size):
            changed.add((leaf_dim, result.size(leaf_dim)))
        return result

    leaves = {key: apply(leaf) for key, leaf in tree.items(include_nested=True, leaves_only=True) if isinstance(leaf, Tensor)}
    if len(changed) > 1:
        raise ValueError(
            f"dim={dim} means different batch dims of one TensorDict (batch_size={tuple(batch_size)}); "
            "give a dim counted from the front"
        )
    for leaf_dim, size in changed:
        batch_size[leaf_dim] = size
    return tree.apply(lambda key, leaf: leaves[key], named=True, nested_keys=True, batch_size=batch_size)
