"""What the tests of ``context_parallel`` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dtcp
from oracle import relative_error

TOLERANCE = 1e-5  # float32, against one rank
NOTHING: dict[str, Any] = {"expected_attention_calls": 0}


def make_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


def new_mesh(world: int) -> DeviceMesh:
    """A mesh with a group of its own, which ``init_device_mesh`` over the whole world does not make."""
    return DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu", mesh_dim_names=("cp",))


@contextlib.contextmanager
def raises(error: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def part(x: Tensor, mesh: DeviceMesh, dim: int = 1, layout: str = "head_tail", pad_value: float = 0) -> Tensor:
    """This rank's part by indexing, without the library's ``shard``."""
    sequence = dtcp.make_layout(layout, seq_len=x.size(dim), cp=mesh.size())
    shape = [sequence.padded_seq_len if d == dim % x.ndim else n for d, n in enumerate(x.shape)]
    padded = torch.full(shape, pad_value).to(x.dtype)
    padded.narrow(dim, 0, x.size(dim)).copy_(x)
    return padded.index_select(dim, sequence.positions(mesh.get_local_rank()))


def place(x: Tensor) -> tuple[Any, ...]:
    """Where the contents of a tensor are."""
    return x.untyped_storage()._cdata, x.data_ptr(), x.shape, x.stride(), x.storage_offset(), x.dtype


def attend_once(local_seq_len: int) -> None:
    x = torch.randn(1, 1, local_seq_len, 8)
    F.scaled_dot_product_attention(x, x, x, is_causal=True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_right(cp: Any, call: Any, heads: int = 2, **masks: Any) -> None:
    """``call(q, k, v)`` inside ``cp`` is attention over the whole sequence, gradients too; causal by default."""
    masks = {"is_causal": True} | masks
    query, key, value, grad_out = draw(4, 2, heads, cp.layout.seq_len, 8) * 2
    whole = [x.double().requires_grad_() for x in (query, key, value)]
    right = dtcp.reference_attention(*whole, **masks)
    right_grads = torch.autograd.grad(right, whole, grad_out.double())
    local = [cp.shard(x, dim=2).requires_grad_() for x in (query, key, value)]
    out = call(*local)
    grads = torch.autograd.grad(out, local, cp.shard(grad_out, dim=2))
    for x, wanted in zip((out, *grads), (right, *right_grads), strict=True):
        assert relative_error(cp.unshard(x.detach(), dim=2), wanted.detach()) < TOLERANCE


def scripted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
