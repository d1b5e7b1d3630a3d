"""Dropout whose mask does not depend on the mesh: a pure function of seed, step, row, token, module and feature.

Nothing is drawn. A *key* stands for a token: a 64-bit hash of the seed, the optimizer step, the row of the global
batch and the token's position. Keys are computed once at the top of a model and go down to its `Dropout` modules as a
tensor, so what holds a part of the tokens holds their keys, and what runs again (recomputation, a pipeline schedule)
drops the same elements. Attention weights are dropped by the same rule, over the query's key, head and key position.

Shapes: B rows held here, S positions held here, ``*F`` any feature dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtcp.dropout_hash import GOLDEN, feature_words, kept, keys_of_place, mix, place_salt
from dtcp.dtensor import is_dtensor, local_part
from dtcp.recompute import restored_in_recomputation


def dropout_keys(seed: int | Tensor, step: int | Tensor, rows: Sequence[int] | Tensor, positions: Tensor) -> Tensor:
    """Return a key for each token: the randomness of every `Dropout` for it.

    Call it once per forward, on the tokens held here. Equal arguments give equal keys everywhere; another seed, step,
    row or position gives an unrelated key, and different positions of a row never share one.

    Args:
        seed: Of the job: any integer, or an int64 tensor of no dims.
        step: Optimizer step, the same for all of its microbatches.
        rows: Row of the global batch for each row held here, B integers.
        positions: Index of each token in the whole sequence, int64 (B, S) or (S,). Not restarted per document: two
            tokens of a row with one position drop the same features. Pad slots may hold anything.

    Returns:
        int64 (B, S) on the positions' device. About 25 small operations, no waiting for a device.

    Raises:
        ValueError: If the shapes do not fit each other, or positions are not int64.
    """
    if not isinstance(rows, Tensor):
        rows = torch.tensor(list(rows), dtype=torch.int64)
    if rows.ndim != 1 or rows.is_floating_point():
        raise ValueError(f"rows must be B integers, got {rows.dtype} {tuple(rows.shape)}; pass the rows of the batch")
    if positions.dtype != torch.int64 or not 1 <= positions.ndim <= 2:
        raise ValueError(f"positions must be int64 (B, S) or (S,), got {positions.dtype} {tuple(positions.shape)}")
    if positions.ndim == 2 and positions.size(0) != rows.size(0):
        raise ValueError(
            f"rows has {rows.size(0)} entries for {positions.size(0)} rows of positions; pass one row of the global "
            "batch for each"
        )
    return _token_keys(_stream(seed, step), rows, positions)


def _token_keys(stream: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    by_row = mix(stream.to(positions.device) ^ rows.to(positions.device, torch.int64))
    return mix(by_row[:, None] ^ positions)


def _stream(seed: int | Tensor, step: int | Tensor) -> Tensor:
    return mix(mix(_as_int64(seed) ^ GOLDEN) ^ _as_int64(step))


def _as_int64(value: int | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(torch.int64)
    return torch.tensor((value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device="cpu")


class NamedPlace(nn.Module):
    """A place in a model that drops with probability ``p``, and by its name what no other place does.

    Raises:
        ValueError: If ``p`` is no probability.
    """

    def __init__(self, p: float, *, name: str | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be in [0, 1], got {p}")
        self.p = p
        self.name = name

    @property
    def name(self) -> str | None:
        """Of the place in the model; None until it is named."""
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        self._name = name
        self._is_named = name is not None  # what forward reads: a graph that reads the name is a graph of its own
        # A tensor: blocks that differ by an int would each be compiled. No buffer: `to_empty` would forget it.
        self._salt = torch.tensor(place_salt(name or ""), dtype=torch.int64, device="cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NamedPlace:
        super()._apply(fn, recurse)
        # Where the model goes, but never through `fn`, which may leave the contents behind.
        device = fn(torch.empty_like(self._salt)).device
        if device != self._salt.device and device.type != "meta":
            self._salt = self._salt.to(device)
        return self

    def _given_or_drawn(self, keys: Tensor | None, x: Tensor) -> Tensor:
        """Return the tokens' keys of a call; drawn for ``x`` where none are given and this is the only rank."""
        if keys is None:
            return draw_keys(x)
        if not self._is_named:
            raise ValueError(
                f"a {type(self).__name__} that gets keys needs a name, or all would drop the same elements; call "
                "dtcp.name_dropouts(model) once the model is built, or give it name=..."
            )
        return keys


class Dropout(NamedPlace):
    """``nn.Dropout`` that drops by the tokens' keys and its own name: the same elements on any mesh.

    One module for each place in a model: called twice with equal keys it drops the same elements twice.

    Args:
        p: Probability of dropping an element, 0 to 1; resolved to 2⁻³¹.
        name: Stands for this place in the model; the same on every rank. `name_dropouts` names all of a model's.

    Raises:
        ValueError: If ``p`` is no probability.
    """

    def __init__(self, p: float = 0.5, *, name: str | None = None) -> None:
        super().__init__(p, name=name)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Drop elements of ``x`` and divide the others by ``1 - p``; in eval mode return ``x``.

        Args:
            x: (B, S, *F), floating point. May be a DTensor, sharded along any dims, also in uneven parts: each rank
                drops its part of what the whole would lose, and nothing is communicated.
            keys: `dropout_keys` of the tokens, int64 (B, S); for a DTensor those of the whole ``x``. A DTensor of keys
                stands for its local part if ``x`` is plain. None, where this is the only rank: drawn from torch's
                generator, so that every call drops other elements.

        Returns:
            Like ``x``.

        Raises:
            ValueError: If in training ``keys`` do not fit ``x``, or are missing on several ranks, or the module has no
                name.
            NotImplementedError: If ``x`` is a DTensor with a placement other than ``Shard`` and ``Replicate``.
        """
        if not self.training or self.p == 0:
            return x
        keys = self._given_or_drawn(keys, x)
        if is_dtensor(x):
            return self._drop_shards(x, keys)
        keys = local_part(keys)
        _check_keys(keys, x)
        return self._drop(x, keys, feature_words(x.shape[2:], x.device))

    def _drop(self, x: Tensor, keys: Tensor, features: Tensor) -> Tensor:
        if self.p == 1:
            return torch.where(torch.zeros((), dtype=torch.bool, device=x.device), x, 0.0)
        mixed = keys_of_place(keys, self._salt)
        keep = kept(mixed.view(*keys.shape, *[1] * features.ndim), features, self.p)
        return torch.where(keep, x, 0.0) * (1 / (1 - self.p))

    def _drop_shards(self, x: Any, keys: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        mesh, placements = x.device_mesh, x.placements
        if any(isinstance(p, _StridedShard) or not isinstance(p, Shard | Replicate) for p in placements):
            raise NotImplementedError(
                f"Dropout takes a DTensor placed by Shard and Replicate, got {list(placements)}; redistribute it first "
                "(a Partial holds sums that are not there yet)"
            )
        _check_keys(keys, x)

        def part(whole: Any, first_dim: int) -> Tensor:
            """This rank's part of what belongs to the dims of ``x`` from ``first_dim`` on."""
            dims = range(first_dim, first_dim + whole.ndim)
            wanted = [
                Shard(p.dim % x.ndim - first_dim) if isinstance(p, Shard) and p.dim % x.ndim in dims else Replicate()
                for p in placements
            ]
            if not is_dtensor(whole):
                whole = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return whole.redistribute(mesh, wanted).to_local()

        features = part(feature_words(x.shape[2:], x.device), 2)
        out = self._drop(x.to_local(), part(keys, 0), features)
        return DTensor.from_local(out, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"p={self.p}, name={self._name!r}"


class AttentionDropout(NamedPlace):
    """What a module that attends is, to drop attention weights by the tokens' keys, its name, head and key position.

    A base class: it holds ``p`` and the name, and says which keys a call of attention gets.

    Attributes:
        head_shard: Where heads are cut over ranks, which part of them this rank has; the parts are equal.
    """

    head_shard: int = 0

    def call_keys(self, keys: Tensor | None, query: Tensor) -> Tensor | None:
        """Return the keys of one call, int64 (B, S); None if nothing is dropped: in eval mode, and for ``p = 0``.

        Args:
            keys: `dropout_keys` of the tokens of ``query``. None, where this is the only rank: drawn.
            query: (B, S, ...).

        Raises:
            ValueError: If in training ``keys`` do not fit, or are missing on several ranks, or the module has no name.
        """
        if not self.training or self.p == 0:
            return None
        keys = local_part(self._given_or_drawn(keys, query))
        _check_keys(keys, query)
        return keys_of_place(keys, self._salt)


def _check_keys(keys: Tensor, x: Tensor) -> None:
    if x.ndim < 2 or keys.shape != x.shape[:2] or keys.dtype != torch.int64:
        raise ValueError(
            f"keys must be int64 (B, S) = {tuple(x.shape[:2])} for x (B, S, *F) = {tuple(x.shape)}, got {keys.dtype} "
            f"{tuple(keys.shape)}; pass dtcp.dropout_keys(seed, step, rows, positions) of exactly the tokens in x"
        )


def draw_keys(x: Tensor) -> Tensor:
    """Return int64 keys (B, S) for a call that got none, from torch's generator of the device of ``x`` (B, S, ...).

    Raises:
        ValueError: If there are several ranks: their generators know nothing of rows and positions.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"dropout on {dist.get_world_size()} ranks needs to know step, rows and positions, or its mask would "
            "depend on the mesh; pass dropout_keys=dtcp.dropout_keys(seed, step, rows, positions) to the model (keys "
            "to a Dropout), or call dtcp.set_sequence(model, layout, step=..., rows=...) before each forward"
        )
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=x.device)
    rows, positions = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return dropout_keys(seed, 0, rows, positions)


def name_dropouts(model: nn.Module) -> None:
    """Name every `Dropout` of ``model``, and every `AttentionDropout`, by its place in it, as ``named_modules`` has it.

    Call it when the whole model is built: before it is wrapped (`torch.compile`, checkpointing) or taken apart for
    pipeline stages. The library's own models do.
    """
    for name, module in model.named_modules():
        if isinstance(module, NamedPlace):
            module.name = name


class ModelWithDropout(nn.Module):
    """A model that computes the keys of its `Dropout` modules in its forward, from what ``set_sequence`` told it.

    Attributes:
        dropout_seed: Of all masks; read when ``set_sequence`` is called.
        told_rows: Rows of the global batch that it was told, int64 (B,); None: none.
    """

    dropout_seed: int = 0
    told_rows: Tensor | None = None
    _dropout_state: tuple[Tensor, Tensor | None] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has to be told its own step: only then can a recomputation restore it.
        self._dropout_state = self.told_rows = None

    @property
    def has_dropout(self) -> bool:
        """Whether a forward drops anything in training."""
        return any(isinstance(module, NamedPlace) and module.p > 0 for module in self.modules())

    def set_dropout_step(self, step: int | None, rows: Sequence[int] | Tensor | None = None) -> None:
        """Tell the optimizer step and the rows of the global batch of the next forwards.

        Args:
            step: None forgets both.
            rows: B integers; None is ``range(B)``.
        """
        if step is None:
            self._dropout_state = self.told_rows = None
            return
        restored_in_recomputation(self, ("_dropout_state",))
        if rows is not None and not isinstance(rows, Tensor):
            rows = torch.tensor(list(rows), dtype=torch.int64)
        # Tensors, not ints: a compiled model would be compiled again for each step.
        self._dropout_state, self.told_rows = (_stream(self.dropout_seed, step), rows), rows

    def select_told_rows(self, rows: slice) -> None:
        """Say which of the told rows the next forwards hold, as a pipeline does for each microbatch."""
        assert self._dropout_state is not None and self.told_rows is not None
        self._dropout_state = self._dropout_state[0], self.told_rows[rows]

    def keys_of(self, positions: Tensor, num_rows: int) -> Tensor:
        """Return keys (B, S) of a forward that was given none; drawn where nobody told the step.

        Raises:
            ValueError: If nobody told the step and there are several ranks, or the rows told are not ``num_rows``.
        """
        if self._dropout_state is None:
            return draw_keys(positions.expand(num_rows, -1))
        stream, rows = self._dropout_state
        if rows is None:
            rows = torch.arange(num_rows, device=positions.device)
        elif rows.size(0) != num_rows:
            raise ValueError(
                f"set_sequence was told {rows.size(0)} row(s) of the global batch, this forward got {num_rows}; call "
                "it before each microbatch with the rows of that microbatch"
            )
        return _token_keys(stream, rows, positions)
