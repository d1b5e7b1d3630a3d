"""Apply a function to every tensor of a nested container: dict, list, tuple, named tuple, TensorDict.

Tensors are visited in an order that does not depend on the order of dict keys: what ranks exchange tensor by tensor
has to meet its own kind, however each rank built its dict.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(fn: Callable[[Tensor, str], Tensor], tree: Any, *, dim: int, size: int, name: str = "") -> Any:
    """Return ``tree`` with ``fn(tensor, name)`` in the place of each tensor; text, numbers and the like stay.

    Args:
        fn: Gives its tensor ``size`` slots in ``dim``. ``name`` says where the tensor is: ``"batch.tokens"``.
        dim: Dim of the tensors, which the batch size of a TensorDict follows.
        size: What ``dim`` has afterwards.

    Raises:
        ValueError: If ``tree`` has a container that cannot be rebuilt with other tensors.
    """
    if isinstance(tree, Tensor):
        return fn(tree, name)
    if _is_tensor_collection(tree):
        return _map_tensordict(fn, tree, dim, size, name)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(fn, tree[key], dim=dim, size=size, name=_join(name, key)) for key in _sorted(tree)}
        return _like_mapping(tree, {key: mapped[key] for key in tree})
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(fn, v, dim=dim, size=size, name=_join(name, i)) for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    _check_leaf(tree, name)
    return tree


def named_tensors(tree: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Return every tensor of ``tree`` and its name, in the order in which ``map_tensors`` visits them.

    Raises:
        ValueError: As ``map_tensors``.
    """
    if isinstance(tree, Tensor):
        return [(name, tree)]
    if _is_tensor_collection(tree):
        if _is_non_tensor(tree):
            return []
        return [pair for key in _sorted(tree.keys()) for pair in named_tensors(tree.get(key), _join(name, key))]
    if isinstance(tree, Mapping):
        return [pair for key in _sorted(tree) for pair in named_tensors(tree[key], _join(name, key))]
    if isinstance(tree, (list, tuple)):
        return [pair for i, value in enumerate(tree) for pair in named_tensors(value, _join(name, i))]
    _check_leaf(tree, name)
    return []


def _sorted(keys: Iterable[Any]) -> list[Any]:
    return sorted(keys, key=lambda key: (str(key), type(key).__name__))


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _like_mapping(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return mapped
    if isinstance(tree, dict):  # a copy keeps what the class adds, such as the factory of a defaultdict
        result = copy.copy(tree)
        result.update(mapped)
        return result
    return type(tree)(mapped)  # type: ignore[call-arg]


def _check_leaf(leaf: Any, name: str) -> None:
    """Refuse what may hold tensors that would pass through uncut: arrays, sets, dataclasses."""
    if leaf is None or isinstance(leaf, (str, bytes, bool, int, float, range, type)):
        return
    if isinstance(leaf, Collection) or dataclasses.is_dataclass(leaf):
        where = f" at {name!r}" if name else ""
        raise ValueError(
            f"expected tensors in dict, list, tuple, named tuple or TensorDict, got {type(leaf).__name__}{where}; "
            "turn it into one of these (torch.from_numpy, list, vars, …) first"
        )


def _is_tensor_collection(tree: Any) -> bool:
    # tensordict costs 1.5 s to import: whoever holds a TensorDict has paid for it already.
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and tensordict.is_tensor_collection(tree)


def _is_non_tensor(tree: Any) -> bool:
    return sys.modules["tensordict"].is_non_tensor(tree)


def _map_tensordict(
    fn: Callable[[Tensor, str], Tensor], tree: Any, dim: int, size: int, name: str, batch_dim: int | None = None
) -> Any:
    """Rebuild a TensorDict or tensorclass; ``batch_dim`` is the batch dim that changes in what holds it."""
    if _is_non_tensor(tree):
        return tree
    batch_dim = _changing_batch_dim(tree, dim, name, batch_dim)
    batch_size = [size if d == batch_dim else n for d, n in enumerate(tree.batch_size)]
    names = tree.names if any(tree.names) else None
    result = sys.modules["tensordict"].TensorDict({}, batch_size, device=tree.device, names=names)
    keys = list(tree.keys())
    values = {}
    for key in _sorted(keys):
        value, inner = tree.get(key), _join(name, key)
        if isinstance(value, Tensor):
            values[key] = fn(value, inner)
        elif _is_tensor_collection(value):
            values[key] = _map_tensordict(fn, value, dim, size, inner, batch_dim)
        else:
            _check_leaf(value, inner)  # a field of a tensorclass that is None
            values[key] = value
    for key in keys:
        _put(result, key, values[key], batch_dim, _join(name, key))
    is_tensordict = isinstance(tree, sys.modules["tensordict"].TensorDictBase)
    return result if is_tensordict else type(tree).from_tensordict(result)


def _put(result: Any, key: str, value: Any, batch_dim: int | None, name: str) -> None:
    if value is None:
        return
    if not (_is_tensor_collection(value) and _is_non_tensor(value)):
        result[key] = value
    elif isinstance(value, sys.modules["tensordict"].NonTensorData):  # one value for the whole batch
        result.set_non_tensor(key, value.data)
    elif batch_dim is None or batch_dim >= value.batch_dims:
        result[key] = value
    else:
        raise ValueError(
            f"{name!r} holds {type(value).__name__} along the sequence, which cannot be cut; use a tensor, or one "
            "value for the batch"
        )


def _changing_batch_dim(tree: Any, dim: int, name: str, outer: int | None) -> int | None:
    """Return which batch dim of ``tree`` is ``dim`` of its tensors; None if it lies behind the batch dims."""
    num = tree.batch_dims
    if dim >= 0:
        return dim if dim < num else None
    seq_dims = {min(dim % leaf.ndim, num) for _, leaf in named_tensors(tree) if leaf.ndim >= -dim} or {outer}
    if len(seq_dims) > 1:
        raise ValueError(
            f"dim={dim} means different dims of the tensors in one TensorDict of batch_size={tuple(tree.batch_size)}"
            f"{f' at {name!r}' if name else ''}; give a dim counted from the front"
        )
    (seq_dim,) = seq_dims
    return None if seq_dim == num else seq_dim
