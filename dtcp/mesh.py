"""The mesh: which degree of parallelism each axis has, and the views that the rest of the library asks for.

Axes, outer to inner: ``pp``, ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``. Neighbouring ranks differ in ``tp`` first,
so the axes that talk most stay on one host. World size = tp·cp·pp·dp, with dp = dp_replicate·dp_shard.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# View → the axes it flattens into one.
_FLATTENED = {
    "fsdp": ("dp_shard", "cp"),
    "batch": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}
VIEWS = (*_FLATTENED, "hsdp", *AXES)


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism, checked against the world, and the device mesh made from them.

    Args:
        pp: Pipeline stages.
        dp_replicate: Replicas of the model (the outer degree of HSDP).
        dp_shard: Ranks that parameters are sharded over by FSDP, besides cp.
        cp: Ranks that the sequence is cut over.
        tp: Ranks that heads and features are cut over.
        world_size: Number of ranks. None: that of the initialised process group, else 1.

    One degree may be −1 and becomes what is left of the world. The attributes hold the numbers that result.

    Raises:
        ValueError: If a degree is not an integer ≥ 1, or the degrees do not multiply to the world size. The message
            names the nearest degrees that do.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    world_size: int | None = None
    # Empty until build_mesh, then every view by name.
    _views: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size is None:
            object.__setattr__(self, "world_size", dist.get_world_size() if _group_is_initialized() else 1)
        world_size = _check_integer("world_size", self.world_size)
        if world_size < 1:
            raise ValueError(f"world_size must be >= 1, got {world_size}; leave it None for the initialised world")
        for axis, degree in self.degrees.items():
            if _check_integer(axis, degree) < 1 and degree != -1:
                raise ValueError(
                    f"{axis} must be >= 1, or -1 for what is left of the world, got {degree}; "
                    f"use {axis}=1 to switch it off"
                )
        open_axes = [axis for axis, degree in self.degrees.items() if degree == -1]
        if len(open_axes) > 1:
            raise ValueError(
                f"one degree may be -1 (what is left of the world), got {' and '.join(open_axes)}; set all but one"
            )
        known = math.prod(degree for degree in self.degrees.values() if degree != -1)
        if open_axes and world_size % known == 0:
            object.__setattr__(self, open_axes[0], world_size // known)
        elif known != world_size or open_axes:
            raise ValueError(_explain_misfit(self.degrees, world_size))

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis name, outer to inner."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def dp(self) -> int:
        """Ranks that read different data: dp_replicate·dp_shard, the size of the ``batch`` view."""
        return self.dp_replicate * self.dp_shard

    @property
    def mesh(self) -> DeviceMesh:
        """The 5-D mesh.

        Raises:
            ValueError: Before `build_mesh`.
        """
        return self._built("mesh")

    def cp_ranks_per_node(self, ranks_per_node: int | None) -> int | None:
        """Return how many adjacent ranks of the cp axis share a node of ``ranks_per_node`` ranks; None for None.

        What the strategies of attention take. Neighbours on the cp axis are tp ranks apart.

        Raises:
            ValueError: If nodes do not hold a whole number of them, the same of every cp group.
        """
        if ranks_per_node is None:
            return None
        if _check_integer("ranks_per_node", ranks_per_node) < 1:
            raise ValueError(f"ranks_per_node must be >= 1, got {ranks_per_node}; use None where all links are alike")
        assert self.world_size is not None
        if ranks_per_node >= self.world_size:
            return self.cp
        per_node, rest = divmod(ranks_per_node, self.tp)
        if rest or (per_node % self.cp and self.cp % per_node):
            raise ValueError(
                f"ranks_per_node={ranks_per_node} with tp={self.tp} and cp={self.cp}: a node has to hold whole tp "
                "groups, and whole cp groups or an equal part of each (ranks_per_node / tp a divisor or a multiple of "
                "cp); change tp or cp, or use ranks_per_node=None"
            )
        return min(per_node, self.cp)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh and all its views. Collective: every rank of the world calls it, once.

        With no process group and a world of one, a group of one rank is made; nothing has to be set up. Under torchrun
        the group is made from what torchrun says. Later calls return the mesh made first.

        Args:
            device_type: ``"cpu"``, ``"cuda"`` or another accelerator, without an index.

        Returns:
            The mesh with axes ``("pp", "dp_replicate", "dp_shard", "cp", "tp")``.

        Raises:
            ValueError: If the device type is not usable here, or the process group has another size than the degrees.
        """
        _check_device_type(device_type)
        if self._views:
            if self.mesh.device_type != device_type:
                raise ValueError(
                    f"the mesh of these ParallelDims was built for {self.mesh.device_type!r}, got {device_type!r}; "
                    "make new ParallelDims for another device type"
                )
            return self.mesh
        self._join_world(device_type)
        mesh = init_device_mesh(device_type, tuple(self.degrees.values()), mesh_dim_names=AXES)
        views = {"mesh": mesh} | {axis: mesh[axis] for axis in AXES}
        for name, axes in _FLATTENED.items():
            views[name] = _flatten(mesh[axes], name)
        views["hsdp"] = _hsdp(mesh, views["dp_replicate"], views["fsdp"])
        self._views.update(views)
        return mesh

    def view(self, name: str) -> DeviceMesh:
        """Return a part of the mesh by what it is for.

        ``fsdp``: 1-D, dp_shard×cp, what parameters are sharded over. ``hsdp``: 2-D (dp_replicate, fsdp), what
        ``fully_shard`` takes when dp_replicate > 1; it reads any 2-D mesh that way, so give it no other. ``batch``:
        1-D, dp_replicate×dp_shard, who reads which data. ``loss``: 1-D, batch×cp, where loss sums and token counts are
        added. An axis name: that axis, 1-D. Not collective.

        Raises:
            ValueError: If there is no such view, or before `build_mesh`.
        """
        if name not in VIEWS:
            raise ValueError(f"no view {name!r} of the mesh; the views are {', '.join(VIEWS)}")
        return self._built(name)

    def _built(self, name: str) -> DeviceMesh:
        if not self._views:
            raise ValueError(
                f"{name!r} of the mesh asked for before the mesh was built; "
                'call dims.build_mesh("cpu") or dims.build_mesh("cuda") on every rank first'
            )
        return self._views[name]

    def _join_world(self, device_type: str) -> None:
        """Make the default process group where there is none, and check its size."""
        assert self.world_size is not None
        backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{_backend(device_type)}"
        if not dist.is_available():
            raise ValueError("dtcp needs a torch that was built with torch.distributed; install another build")
        if not dist.is_initialized():
            if dist.is_torchelastic_launched():
                dist.init_process_group(backend)
            elif self.world_size == 1:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
                if device_type == "cuda":
                    torch.cuda.init()  # keeps init_device_mesh from choosing a device, with a warning
            else:
                raise ValueError(
                    f"these degrees need {self.world_size} ranks ({_product(self.degrees)}), and no process group is "
                    f"initialised; launch with `torchrun --nproc-per-node {self.world_size} ...`, "
                    "or call torch.distributed.init_process_group() first"
                )
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                f"world size = tp·cp·pp·dp: the degrees make {self.world_size} ({_product(self.degrees)}), the process "
                f"group has {dist.get_world_size()} ranks; nearest that works: "
                f"{_nearest(self.degrees, dist.get_world_size())}. ParallelDims with world_size=None reads the world "
                "when it is made: call torch.distributed.init_process_group() before"
            )


# ---- torch ----------------------------------------------------------------------------------------------------------


def _group_is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _backend(device_type: str) -> str:
    return dist.get_default_backend_for_device(device_type)


def _check_device_type(device_type: str) -> None:
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise ValueError(
            f'device_type must be a kind of device such as "cpu" or "cuda", without an index, got {device_type!r}'
        )
    if device_type == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        here = '"cpu"' if accelerator is None else f'"cpu" or "{accelerator.type}"'
        raise ValueError(f"device_type {device_type!r} is not available on this machine; use {here}")


def _flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make one axis of all axes of ``mesh``. Private in torch 2.11 to 2.13, though named in its tutorials."""
    flatten = mesh.flatten if hasattr(mesh, "flatten") else mesh._flatten
    return flatten(name)


def _hsdp(mesh: DeviceMesh, replicate: DeviceMesh, fsdp: DeviceMesh) -> DeviceMesh:
    """Make a 2-D mesh of two 1-D ones, with ``mesh`` as its root: FSDP2 wants the root that the tp mesh has too."""
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([replicate, fsdp])
    # Before _concatenate a flattened axis could be sliced from its root by name.
    return mesh["dp_replicate", "fsdp"]


# ---- arithmetic of degrees ------------------------------------------------------------------------------------------


def _check_integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}; write {name}=1")
    return value


def _product(degrees: dict[str, int]) -> str:
    """Write degrees as the equation reads: ``tp=2 · cp=2 · pp=1 · dp_replicate=1 · dp_shard=2``."""
    shown = {axis: "what is left" if degree == -1 else str(degree) for axis, degree in degrees.items()}
    return (
        f"tp={shown['tp']} · cp={shown['cp']} · pp={shown['pp']} · "
        f"dp_replicate={shown['dp_replicate']} · dp_shard={shown['dp_shard']}"
    )


def _explain_misfit(degrees: dict[str, int], world_size: int) -> str:
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    is_open = -1 in degrees.values()
    num_ranks = math.ceil(world_size / known) * known if is_open else known
    need = f"a multiple of {known}" if is_open else str(known)
    hint = ""
    if not _group_is_initialized() and world_size == 1:
        hint = (
            f" (no process group is initialised: start with torchrun --nproc-per-node {num_ranks}, and in a script of "
            "your own call torch.distributed.init_process_group() first)"
        )
    return (
        f"world size = tp·cp·pp·dp: {_product(degrees)} needs {need} ranks, world size is {world_size}{hint}; "
        f"nearest that works: {_nearest(degrees, world_size)}, or start {num_ranks} ranks"
    )


def _nearest(degrees: dict[str, int], world_size: int) -> str:
    """Name the degrees that fit the world and change the least: dp before the others, few axes, small factors."""

    def distance(candidate: tuple[int, ...]) -> tuple[float, ...]:
        changes = {
            axis: abs(math.log(new / degrees[axis]))
            for axis, new in zip(AXES, candidate, strict=True)
            if degrees[axis] not in (-1, new)
        }
        num_model_changes = sum(axis in ("pp", "cp", "tp") for axis in changes)
        return num_model_changes, len(changes), sum(changes.values())

    best = min(_factorizations(world_size, len(AXES)), key=distance)
    fitting = dict(zip(AXES, best, strict=True))
    return ", ".join(f"{axis}={fitting[axis]}" for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard"))


def _factorizations(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered way to write ``number`` as a product of ``num_factors`` (3,060 ways for 16,384 and five)."""
    if num_factors == 1:
        yield (number,)
        return
    for factor in _divisors(number):
        for rest in _factorizations(number // factor, num_factors - 1):
            yield (factor, *rest)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
