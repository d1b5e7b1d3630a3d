"""What attention calls accept: checks shared by the parallel call and the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dtcp.attention.predict import Rates
from dtcp.attention.scores import CallMasks
from dtcp.collectives import check_mesh
from dtcp.dtensor import is_dtensor
from dtcp.layout import SequenceLayout
from dtcp.mask import NO_WINDOW

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

QKV_FORMATS = ("bhsd", "bshd")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What gradients may travel in: what has less range than float32 would turn some of them into 0 or infinity.
KV_GRAD_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Of each strategy: what runs over the ranks that no all-to-all of heads brings together.
_CORES = {
    "ring": "ring", "all_gather": "all_gather", "exchange": "exchange", "ulysses": "ring", "hybrid": "ring",
    "auto": "auto",
}  # fmt: skip
STRATEGY_NAMES = tuple(_CORES)
# What passes nothing on that could stay inside a node; and ``auto`` predicts for one kind of link.
_WITHOUT_LEVELS = ("exchange", "ulysses", "auto")


def check_inputs(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, qkv_format: str) -> None:
    """Raise ValueError unless query, key and value fit together; lengths are checked by the caller."""
    check_format(qkv_format)
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} has a forward-mode tangent, which attention does not carry on; use reference_attention"
            )
        if is_dtensor(x):
            raise NotImplementedError(
                f"{name} is a DTensor and this call takes a rank's own part; pass {name}.to_local(), or call "
                "F.scaled_dot_product_attention, which takes DTensors"
            )
        if x.ndim != 4 or 0 in x.shape:
            more = "; flatten the dims before the heads into one (x.flatten(0, -4))" if x.ndim > 4 else ""
            raise ValueError(
                f"{name} must be a non-empty 4-D tensor in {qkv_format} order, got shape {tuple(x.shape)}{more}"
            )
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
    for what, of in (("dtype", lambda x: x.dtype), ("device", lambda x: x.device), ("batch size", lambda x: x.size(0))):
        if not of(query) == of(key) == of(value):
            raise ValueError(f"query, key and value must have one {what}, got {of(query)}, {of(key)} and {of(value)}")
    if query.size(3) != key.size(3):
        raise ValueError(f"query and key must have one head dim, got {query.size(3)} and {key.size(3)}")
    head_dim, seq_dim = (1, 2) if qkv_format == "bhsd" else (2, 1)
    if key.size(head_dim) != value.size(head_dim) or key.size(seq_dim) != value.size(seq_dim):
        raise ValueError(
            f"key and value must have the same heads and length, got shapes {tuple(key.shape)} and "
            f"{tuple(value.shape)} in {qkv_format} order"
        )
    _check_heads(query.size(head_dim), key.size(head_dim), enable_gqa)


def check_format(qkv_format: str) -> None:
    """Raise ValueError unless the order of dims is a known one."""
    if qkv_format not in QKV_FORMATS:
        raise ValueError(f"qkv_format must be 'bhsd' or 'bshd', got {qkv_format!r}")


def _check_heads(num_heads: int, num_kv_heads: int, enable_gqa: bool) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {num_heads} and {num_kv_heads}")
    if num_heads != num_kv_heads and not enable_gqa:
        raise ValueError(
            f"{num_heads} query heads with {num_kv_heads} key heads is grouped-query attention; pass enable_gqa=True"
        )


def checked_scale(scale: float | None, head_dim: int) -> float:
    """Return ``scale`` as a number, 1/√D for None; raise ValueError if it is none."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    try:
        return float(scale)
    except (TypeError, ValueError) as error:
        raise ValueError(f"scale must be a number, got {scale!r}; use scale=None for 1/√D") from error


class ResolvedStrategy(NamedTuple):
    """A strategy as it travels through the attention ops.

    Attributes:
        core: ``ring``, ``exchange`` or ``all_gather``; ``auto`` as long as nothing is decided.
        ulysses_degree: Adjacent ranks among which heads are cut first; 1 for none.
        ranks_per_node: Adjacent ranks of the cp axis that share a node, where the core passes inside nodes and between
            them separately: a multiple of ``ulysses_degree``, less than cp. 1 for a core of one level.
        kv_grad_dtype: In which gradients of keys and values travel; None for that of their sums.
        cp, rates: The ranks for which ``auto`` decides, and by what; None for the rates of the device.
    """

    core: str
    ulysses_degree: int
    ranks_per_node: int = 1
    kv_grad_dtype: torch.dtype | None = None
    cp: int = 1
    rates: Rates | None = None


RING = ResolvedStrategy("ring", 1)


def resolved_strategy(
    strategy: str,
    ulysses_degree: int | None,
    cp: int,
    num_heads: int | None = None,
    rates: Rates | None = None,
    *,
    ranks_per_node: int | None = None,
    kv_grad_dtype: torch.dtype | None = None,
) -> ResolvedStrategy:
    """Return what ``strategy`` means for ``cp`` ranks, or raise ValueError if they or the heads do not allow it."""
    check_strategy(strategy, ulysses_degree, rates, ranks_per_node, kv_grad_dtype)
    degree = cp if strategy == "ulysses" else ulysses_degree or 1
    if cp % degree:
        raise ValueError(
            f"ulysses_degree={degree} must divide the {cp} ranks of the cp axis; use one of "
            f"{', '.join(str(d) for d in range(1, cp + 1) if cp % d == 0)}"
        )
    if num_heads is not None:
        check_heads_of_ranks(num_heads, cp, degree)
    levels = _levels(ranks_per_node or 1, degree, cp)
    return ResolvedStrategy(_CORES[strategy], degree, levels, kv_grad_dtype, cp, rates)


def _levels(ranks_per_node: int, degree: int, cp: int) -> int:
    """The ranks of a node as the core takes them: 1 where it has one level, since a node has all ranks or one."""
    if ranks_per_node == 1 or ranks_per_node >= cp:
        return 1
    if cp % ranks_per_node:
        raise ValueError(
            f"ranks_per_node={ranks_per_node} must divide the {cp} ranks of the cp axis, or be at least {cp} (then all "
            f"of them share a node); use one of {', '.join(str(d) for d in range(1, cp + 1) if cp % d == 0)}"
        )
    if ranks_per_node % degree:
        divisors = ", ".join(str(d) for d in range(1, ranks_per_node + 1) if ranks_per_node % d == 0)
        raise ValueError(
            f"ulysses_degree={degree} must divide ranks_per_node={ranks_per_node}, since heads are cut among ranks of "
            f"one node; use one of {divisors}, or leave ranks_per_node None"
        )
    return 1 if ranks_per_node == degree else ranks_per_node


def check_heads_of_ranks(num_heads: int, cp: int, degree: int) -> None:
    """Raise ValueError if there are fewer query heads than ranks that they are cut among."""
    if degree <= num_heads:
        return
    largest = max(d for d in range(1, num_heads + 1) if cp % d == 0)
    other = f"strategy='hybrid' with ulysses_degree={largest}, or " if largest > 1 else ""
    raise ValueError(
        f"{num_heads} query heads cannot be cut among {degree} ranks (strategy='ulysses' takes all ranks of the cp "
        f"axis, 'hybrid' ulysses_degree of them); use {other}strategy='ring' or 'exchange'"
    )


def check_strategy(
    strategy: str,
    ulysses_degree: int | None,
    rates: Rates | None = None,
    ranks_per_node: int | None = None,
    kv_grad_dtype: torch.dtype | None = None,
) -> None:
    """Raise unless ``strategy`` exists, and the others are what it takes."""
    if strategy not in STRATEGY_NAMES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGY_NAMES)}, got {strategy!r}")
    is_degree = isinstance(ulysses_degree, int) and not isinstance(ulysses_degree, bool) and ulysses_degree > 0
    if strategy == "hybrid" and not is_degree:
        raise ValueError(
            f"strategy='hybrid' needs ulysses_degree, the number of adjacent ranks among which heads are cut, got "
            f"{ulysses_degree!r}; use a divisor of cp, 2 say"
        )
    if rates is not None:
        check_rates(strategy, rates)
    if strategy != "hybrid" and ulysses_degree is not None:
        raise ValueError(
            f"ulysses_degree={ulysses_degree} has no meaning for strategy={strategy!r}; leave it None, or use "
            "strategy='hybrid'"
        )
    if ranks_per_node is not None:
        _check_nodes(strategy, ranks_per_node)
    check_kv_grad_dtype(kv_grad_dtype)


def check_kv_grad_dtype(kv_grad_dtype: torch.dtype | None, summed_in: torch.dtype | None = None) -> None:
    """Raise ValueError unless gradients can travel in this dtype; ``summed_in`` is that of their sums, where known."""
    if kv_grad_dtype is None:
        return
    if kv_grad_dtype not in KV_GRAD_DTYPES:
        raise ValueError(
            f"kv_grad_dtype must be torch.bfloat16, torch.float32 or torch.float64, in which a gradient neither "
            f"overflows nor vanishes, got {kv_grad_dtype!r}; use torch.bfloat16 for half the bytes, or None for no "
            "rounding on the way"
        )
    if summed_in is not None and kv_grad_dtype.itemsize > summed_in.itemsize:
        raise ValueError(
            f"kv_grad_dtype={kv_grad_dtype} is wider than {summed_in}, in which gradients of these inputs are summed, "
            "and would only cost bytes; use None"
        )


def check_rates(strategy: str, rates: Rates) -> None:
    """Raise ValueError unless these are rates, and something that ``strategy`` looks at."""
    if strategy != "auto":
        raise ValueError(f"rates have no meaning for strategy={strategy!r}; leave them None, or use strategy='auto'")
    if not (isinstance(rates, Rates) and min(rates[:2]) > 0 and min(rates[2:]) >= 0 and max(rates) < math.inf):
        raise ValueError(
            f"rates must be dtcp.Rates(kernel_flops, link_bytes, call_seconds=0.0, message_seconds=0.0) of positive "
            f"numbers, got {rates!r}; dtcp.measure_rates(mesh) makes some"
        )


def _check_nodes(strategy: str, ranks_per_node: int) -> None:
    """Raise ValueError unless it is a number of ranks, and something that ``strategy`` looks at."""
    if strategy in _WITHOUT_LEVELS:
        why = "which predicts for one kind of link" if strategy == "auto" else "which sends straight from rank to rank"
        raise ValueError(
            f"ranks_per_node={ranks_per_node} has no meaning for strategy={strategy!r}, {why}; leave it None, or use "
            "strategy='ring', 'all_gather' or 'hybrid'"
        )
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
        raise ValueError(
            f"ranks_per_node must be the number of adjacent ranks of the cp axis that share a node, got "
            f"{ranks_per_node!r}; use a divisor of cp, or None for one level"
        )


def check_layouts(
    mesh: DeviceMesh,
    layout: SequenceLayout,
    kv_layout: SequenceLayout | None,
    positional: str,
) -> None:
    """Raise ValueError unless mesh and layouts fit together; the op itself checks the lengths.

    Args:
        positional: What the call compares positions by (``is_causal``, say); "" if by nothing.
    """
    check_mesh(mesh, "context_parallel_attention")
    for name, of in (("layout", layout), ("kv_layout", layout if kv_layout is None else kv_layout)):
        if not isinstance(of, SequenceLayout):
            raise ValueError(
                f"{name} must be a SequenceLayout, got {of!r}; make one with "
                f"dtcp.make_layout('head_tail', seq_len=…, cp={mesh.size()})"
            )
        if of.cp != mesh.size():
            raise ValueError(
                f"{name} is for cp={of.cp} but the mesh has {mesh.size()} ranks; make it with cp={mesh.size()}"
            )
    if positional and kv_layout is not None and kv_layout != layout:
        raise ValueError(
            f"{positional} needs queries and keys in one layout; leave it out for cross attention, or drop kv_layout"
        )


def positional_argument(is_causal: bool, masks: CallMasks) -> str:
    """The name of an argument that compares positions of queries and keys; "" if there is none."""
    if is_causal:
        return "is_causal"
    if masks.documents is not None:
        return "documents"
    if masks.window_size != NO_WINDOW:
        return "window_size"
    return "alibi_slopes" if masks.alibi_slopes is not None else ""


def length_error(
    query_length: int, key_length: int, layout: SequenceLayout, kv_layout: SequenceLayout
) -> ValueError | None:
    """The error to raise if local lengths are not those of the layouts."""
    for name, length, of in (("query", query_length, layout), ("key and value", key_length, kv_layout)):
        if length != of.local_seq_len:
            return ValueError(
                f"{name}: {length} slots, but the layout ({of.name}, seq_len={of.seq_len}, cp={of.cp}) has "
                f"{of.local_seq_len} on each rank; cut with shard(x, mesh, layout), and give kv_layout if the keys "
                "have another length"
            )
    return None
