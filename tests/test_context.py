"""``with context_parallel(...)``: buffers come back as they were, and misuse ends in an error."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from oracle import relative_error


def check_buffers(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    base = torch.arange(2 * 12.0).reshape(2, 12)
    buffers = [base[:, :9], torch.arange(9).expand(2, 9), torch.randn(9, 3), torch.randn(2, 9, 4).transpose(0, 2)]
    before = [(b.clone(), b.shape, b.stride(), b.data_ptr()) for b in buffers]
    whole = base.clone()
    for error in (None, KeyError):
        entered = dtcp.context_parallel(
            mesh,
            buffers=buffers,
            buffer_seq_dims=[-1, 1, 0, 1],
            buffer_pad_values=[-1, 7, 0, 0],
            expected_attention_calls=0,
        )
        with pytest.raises(KeyError) if error else contextlib.nullcontext(), entered as cp:
            for buffer, dim, pad, (full, *_) in zip(buffers, (1, 1, 0, 1), (-1, 7, 0, 0), before, strict=True):
                assert torch.equal(buffer, dtcp.shard(full, mesh, cp.layout, dim=dim, pad_value=pad))
                buffer.zero_()  # its own memory: nothing of the caller's
            if error:
                raise error
        for buffer, (full, shape, stride, pointer) in zip(buffers, before, strict=True):
            assert torch.equal(buffer, full)
            assert (buffer.shape, buffer.stride(), buffer.data_ptr()) == (shape, stride, pointer)
        assert torch.equal(base, whole)


def test_buffers_are_local_inside_and_untouched_after(ranks):
    ranks.run(2, check_buffers)


def check_kept(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    labels, weight = torch.arange(8)[None], torch.randn(1, 8)
    full, leaf = weight.clone(), torch.ones(1, 4, requires_grad=True)
    with dtcp.context_parallel(
        mesh, buffers=[labels, weight], buffer_seq_dims=[1, 1], no_restore_buffers={labels}, expected_attention_calls=0
    ) as cp:
        loss = (leaf * weight).sum()  # autograd saves the buffer itself
    assert torch.equal(labels, cp.shard(torch.arange(8)[None])) and torch.equal(weight, full)
    loss.backward()
    assert torch.equal(leaf.grad, cp.shard(full)), "saved inside: local contents, also after exit"
    assert cp.positions.tolist() == cp.layout.positions(rank).tolist() and cp.valid.all()


def test_kept_buffers_stay_local_and_saved_tensors_see_local_contents(ranks):
    ranks.run(2, check_kept)


def check_misuse(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))

    def attend(message: str, error: type[Exception], length: int = 8, **options) -> None:
        query = torch.randn(1, 2, length, 8)
        with pytest.raises(error, match=message), dtcp.context_parallel(mesh, seq_len=16):
            F.scaled_dot_product_attention(query, options.pop("key", query), query, **options)

    mask = torch.ones(8, 8).bool()
    attend(r"attn_mask of shape \(8, 8\) .* attn_mask_queries='local'", NotImplementedError, attn_mask=mask)
    attend(r"dropout_p=0.1 inside.*\(\.\.\., step=, rows=\).*use 0.0", NotImplementedError, dropout_p=0.1)
    attend("query: 16 slots, but the layout", ValueError, length=16)
    for expected, message in ((None, "no attention call .* Likely causes"), (2, "expected_attention_calls=2, but 0")):
        entered = dtcp.context_parallel(mesh, seq_len=8, expected_attention_calls=expected)
        with pytest.raises(RuntimeError, match=message), entered:
            pass
    with pytest.raises(ValueError, match="the user's own"), dtcp.context_parallel(mesh, seq_len=8):
        raise ValueError("the user's own")
    for arguments, message in [
        ({}, "give buffers, or seq_len="),
        ({"buffers": [torch.zeros(2, 8)]}, "buffer_seq_dims must name the sequence dim"),
        ({"buffers": [torch.zeros(8), torch.zeros(6)], "buffer_seq_dims": [0, 0]}, r"8 \(buffer 0\), 6 \(buffer 1\)"),
        ({"buffers": [torch.zeros(8, requires_grad=True)], "buffer_seq_dims": [0]}, r"cp\.shard"),
        ({"buffers": [torch.zeros(7).long()], "buffer_seq_dims": [0]}, r"buffer_pad_values=\[-100\]"),
        ({"buffers": [torch.zeros(8)], "buffer_seq_dims": [3]}, "has no dim 3"),
        ({"seq_len": 8, "layout": "zigzag"}, "layout must be one of"),
        ({"seq_len": 8, "strategy": "zigzag"}, "strategy must be one of"),
    ]:
        with pytest.raises(ValueError, match=message), dtcp.context_parallel(mesh, **arguments):
            pass


def test_misuse_ends_in_an_error(ranks):
    ranks.run(2, check_misuse)


def check_multihead(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    module, x = torch.nn.MultiheadAttention(16, 2, batch_first=True).double(), torch.randn(2, 8, 16).double()
    right = module(x, x, x, need_weights=False)[0]
    for is_training in (True, False):  # in eval without gradients torch would take a fused path of its own
        module.train(is_training)
        with torch.set_grad_enabled(is_training), dtcp.context_parallel(mesh, seq_len=8) as cp:
            local = cp.shard(x)
            out = module(local, local, local, need_weights=False)[0]
            with pytest.raises(NotImplementedError, match="pass need_weights=False"):
                module(local, local, local)
        assert relative_error(out.detach(), cp.shard(right.detach())) < 1e-12


def test_multihead_attention_is_exact_or_refused(ranks):
    ranks.run(2, check_multihead)


def check_threads_and_exit(rank: int, world: int) -> None:
    import importlib

    mha = importlib.import_module("torch.backends.mha")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    query = torch.randn(1, 2, 4, 8)
    plain, seen = F.scaled_dot_product_attention(query, query, query), []
    fast_path = mha.get_fastpath_enabled()
    forward = F.multi_head_attention_forward
    for _ in range(200):
        with dtcp.context_parallel(mesh, seq_len=8, expected_attention_calls=0):
            pass
    with dtcp.context_parallel(mesh, seq_len=8) as cp:
        other = threading.Thread(target=lambda: seen.append(F.scaled_dot_product_attention(query, query, query)))
        other.start()
        other.join()
        assert cp.num_attention_calls == 0 and torch.equal(seen[0], plain), "another thread has no context"
        with dtcp.context_parallel(mesh, seq_len=8, layout="striped") as inner:
            F.scaled_dot_product_attention(query, query, query)
        F.scaled_dot_product_attention(query, query, query)
        assert (cp.num_attention_calls, inner.num_attention_calls) == (1, 1)
    assert torch.equal(F.scaled_dot_product_attention(query, query, query), plain)
    assert mha.get_fastpath_enabled() == fast_path and F.multi_head_attention_forward is forward
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")
    assert has_kernel, "the other thread might be in it"


def test_contexts_nest_and_stay_in_their_thread(ranks):
    ranks.run(2, check_threads_and_exit)
