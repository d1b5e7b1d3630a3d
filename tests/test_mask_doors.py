"""Every door takes every mask: equal to the float64 oracle, and none can be dropped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import dtcp
from contexts import check_right, draw, make_mesh, raises
from dtcp.dispatch.masked import masked_attention
from oracle import relative_error

S = 16
HEADS = 4


def causal_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def causal_but_for_one_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """One pair less, whose query and key are on two ranks in every layout of two ranks here."""
    return (q >= kv) & ~((q == 9) & (kv == 4))


def dense(mask_mod: Any) -> Tensor:
    return mask_mod(0, 0, torch.arange(S)[:, None], torch.arange(S)[None])


# Two masks for each kind: as arguments of the oracle.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "documents": (
        {"is_causal": True},
        {"is_causal": True, "documents": dtcp.Documents.from_lengths([8, 8])},
    ),
    "window_size": ({"is_causal": True}, {"is_causal": True, "window_size": (7, 0)}),
    "key_lengths": ({}, {"key_lengths": [16, 9]}),
    "mask_mod": ({"mask_mod": causal_mod}, {"mask_mod": causal_but_for_one_mod}),
}


class Attention(nn.Module):
    """What a user's attention module is like."""

    is_causal = False
    window_size = (-1, -1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        return masked_attention(
            query, key, value, is_causal=self.is_causal, window_size=self.window_size, sinks=sinks
        )  # fmt: skip


def explicit(mesh: Any, layout: Any, inputs: list[Tensor], masks: dict[str, Any]) -> Tensor:
    return dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout, **masks)


def context(mesh: Any, layout: Any, inputs: list[Tensor], masks: dict[str, Any]) -> Tensor:
    masks = dict(masks)
    is_causal = masks.pop("is_causal", False)
    with dtcp.context_parallel(mesh, seq_len=S, layout=layout.name, **masks):
        return F.scaled_dot_product_attention(*inputs, is_causal=is_causal)


def plan(mesh: Any, layout: Any, inputs: list[Tensor], masks: dict[str, Any]) -> Tensor:
    class PlannedAttention(Attention):
        is_causal = masks.get("is_causal", False)
        window_size = masks.get("window_size", (-1, -1))

        def forward(self, query: Tensor, key: Tensor, value: Tensor, **learned: Any) -> Tensor:
            return dtcp.reference_attention(
                query, key, value, is_causal=self.is_causal, window_size=self.window_size,
                mask_mod=masks.get("mask_mod"), **learned,
            )  # fmt: skip

    model = nn.ModuleDict({"attention": PlannedAttention()})
    parallelize_module(model, mesh, {"attention": dtcp.ContextParallel(mask_mod=masks.get("mask_mod"))})
    dtcp.set_sequence(
        model, layout, documents=masks.get("documents"), key_lengths=masks.get("key_lengths")
    )  # fmt: skip
    return model["attention"](*inputs)


def attn_mask(queries: str, mesh: Any, layout: Any, inputs: list[Tensor], masks: dict[str, Any]) -> Tensor:
    with dtcp.context_parallel(mesh, seq_len=S, layout=layout.name, attn_mask_queries=queries) as cp:
        mask = dense(masks["mask_mod"])
        if queries == "local":
            mask = mask[cp.positions]
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask)


def flex(mesh: Any, layout: Any, inputs: list[Tensor], masks: dict[str, Any]) -> Tensor:
    block_mask = create_block_mask(masks["mask_mod"], None, None, S, S, device="cpu", BLOCK_SIZE=4)
    with dtcp.context_parallel(mesh, seq_len=S, layout=layout.name):
        return flex_attention(*inputs, block_mask=block_mask)


DOORS = {
    "explicit": explicit,
    "context": context,
    "plan": plan,
    "attn_mask, local queries": functools.partial(attn_mask, "local"),
    "attn_mask, global queries": functools.partial(attn_mask, "global"),
    "flex": flex,
}
TAKES = {name: tuple(PAIRS) if name in ("explicit", "context", "plan") else ("mask_mod",) for name in DOORS}


def check_nothing_is_dropped(rank: int, world: int, door: str) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole = list(2 * draw(3, 2, HEADS, S, 8).double())
    for name in ("contiguous", "head_tail"):
        layout = dtcp.make_layout(name, seq_len=S, cp=world)
        inputs = [dtcp.shard(x, mesh, layout, dim=2) for x in whole]
        for kind in TAKES[door]:
            right, mine = [], []
            for masks in PAIRS[kind]:
                right.append(dtcp.reference_attention(*whole, **masks))
                mine.append(dtcp.unshard(DOORS[door](mesh, layout, inputs, masks), mesh, layout, dim=2))
                assert relative_error(mine[-1], right[-1]) < 1e-12, (door, kind, name)
            affected = (right[0] != right[1]).any(-1)
            assert affected.any() and not affected.all()
            assert torch.equal((mine[0] - mine[1]).abs().amax(-1) > 1e-9, affected), (door, kind, name)


@pytest.mark.parametrize("door", DOORS)
def test_masks_that_differ_across_ranks_change_exactly_the_rows_that_they_should(ranks, door):
    ranks.run(2, check_nothing_is_dropped, door)


def check_attn_masks(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    bias = draw(2, 2, 13, 13)
    allowed = bias > -0.5
    for whole in (
        bias,
        bias[:1],
        bias[0, 0],
        bias[:, :, :1],
        allowed,
        allowed[:, :1],
        allowed[0, 0],
        allowed[..., :1, :],
    ):
        as_bias = torch.where(whole, 0.0, float("-inf")) if whole.dtype == torch.bool else whole
        as_bias = as_bias[(None,) * (4 - as_bias.ndim)].expand(-1, -1, 13, -1)
        for queries in ("local", "global"):
            with dtcp.context_parallel(mesh, seq_len=13, attn_mask_queries=queries) as cp:
                mask = whole
                if queries == "local" and whole.size(-2) > 1:
                    mask = cp.shard(whole, dim=-2)
                call = functools.partial(F.scaled_dot_product_attention, attn_mask=mask)
                check_right(cp, call, is_causal=False, attn_bias=as_bias.double())
    with dtcp.context_parallel(mesh, seq_len=13, attn_mask_queries="global", expected_attention_calls=0) as cp:
        x = draw(2, 2, cp.layout.local_seq_len, 8)
        for shape in ((7, 7), (13, 7), (12, 13), (3, 1, 13, 13), (13,)):
            with raises(ValueError, "got (1, 1, 8, 7)" if shape == (13, 7) else "attn_"):
                F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(shape))
    wrong = dtcp.context_parallel(mesh, seq_len=13, attn_mask_queries="rows")
    with raises(ValueError, "attn_mask_queries must be 'local', 'global' or None, got 'rows'"), wrong:
        pass


def test_attn_mask_is_cut_as_it_was_declared(ranks):
    ranks.run(2, check_attn_masks)


def in_documents(ids: Tensor) -> Any:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[b, q] == ids[b, kv]) & (q >= kv)

    return mask_mod


def check_flex(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    ids = torch.tensor([[0] * 5 + [1] * 8, [0] * 13])
    documents = dtcp.Documents.from_ids(ids)
    packed = create_block_mask(in_documents(ids), 2, None, 13, 13, device="cpu", BLOCK_SIZE=4)
    by_head = create_block_mask(lambda b, h, q, kv: (q + kv + h) % 3 != 0, None, 2, 13, 13, device="cpu", BLOCK_SIZE=4)
    # The blocks themselves are the mask: nothing says so but the lists of blocks.
    indices = torch.tensor([[0, 1], [1, 0]]).view(1, 1, 2, 2).int()
    blocks = BlockMask.from_kv_blocks(torch.ones(1, 1, 2).int(), indices, BLOCK_SIZE=8, seq_lengths=(13, 13))
    diagonal = (torch.arange(13)[:, None] // 8) == (torch.arange(13)[None] // 8)
    with dtcp.context_parallel(mesh, seq_len=13) as cp:
        check_right(cp, functools.partial(flex_attention, block_mask=packed), documents=documents)
        check_right(
            cp, functools.partial(flex_attention, block_mask=by_head), is_causal=False,
            mask_mod=lambda b, h, q, kv: (q + kv + h) % 3 != 0,
        )  # fmt: skip
        bias = torch.where(diagonal, 0.0, float("-inf")).double()[None, None]
        check_right(cp, functools.partial(flex_attention, block_mask=blocks), is_causal=False, attn_bias=bias)
        check_right(cp, functools.partial(flex_attention, scale=8**-0.5), is_causal=False)
        x = draw(2, 2, cp.layout.local_seq_len, 8)
        local = create_block_mask(causal_mod, None, None, x.size(2), x.size(2), device="cpu")
        with raises(ValueError, "the sequence has 13 tokens", "create_block_mask(mask_mod, B, H, 13, 13)"):
            flex_attention(x, x, x, block_mask=local)
        with raises(NotImplementedError, "score_mod", "attn_bias="):
            flex_attention(x, x, x, score_mod=lambda score, b, h, q, kv: score * 2)
        _, lse = flex_attention(x, x, x, block_mask=packed, return_lse=True)
        assert lse.shape == x.shape[:3] and not lse.requires_grad


def test_flex_block_masks_are_of_global_positions(ranks):
    ranks.run(2, check_flex)
    ranks.run(1, check_flex_on_one_rank)


def check_flex_on_one_rank(rank: int, world: int) -> None:
    mesh, x = make_mesh(world), draw(1, 2, 13, 16)
    mask = create_block_mask(causal_mod, None, None, 13, 13, device="cpu")
    right = flex_attention(x, x, x, block_mask=mask)
    with dtcp.context_parallel(mesh, seq_len=13, expected_attention_calls=None):
        assert torch.equal(flex_attention(x, x, x, block_mask=mask), right), "torch's own where nothing is cut"
        F.scaled_dot_product_attention(x, x, x)


def check_module_and_context(rank: int, world: int) -> None:
    """A module's window and sinks, and a context's documents: both hold."""
    mesh = make_mesh(world)
    documents = dtcp.Documents.from_lengths([4, 9])
    for layout in ("head_tail", "per_document"):
        with dtcp.context_parallel(mesh, seq_len=13, layout=layout, documents=documents) as cp:
            sinks = draw(2)
            call = functools.partial(masked_attention, is_causal=True, window_size=(2, 0), sinks=sinks)
            check_right(cp, call, window_size=(2, 0), sinks=sinks.double(), documents=documents)
    with dtcp.context_parallel(mesh, seq_len=13, window_size=(3, 0), expected_attention_calls=0) as cp:
        x = draw(2, 2, cp.layout.local_seq_len, 8)
        with raises(ValueError, "window_size is given by the module that attends and by the context around it"):
            masked_attention(x, x, x, is_causal=True, window_size=(2, 0))
    ahead = dtcp.context_parallel(mesh, seq_len=13, window_size=(3, 2), expected_attention_calls=0)
    with ahead, raises(ValueError, "looks 2 tokens ahead, which is_causal=True forbids"):
        F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("world", [1, 2])
def test_masks_of_a_module_and_of_the_context_around_it_hold_both(ranks, world):
    ranks.run(world, check_module_and_context)


def check_plan_refusals(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model = nn.ModuleDict({"attention": Attention()})
    model["attention"].window_size = (2, 0)
    with raises(ValueError, "window_size=", "on a small example it gives something else"):
        parallelize_module(model, mesh, {"attention": dtcp.ContextParallel(window_size=(3, 0))})
    parallelize_module(model, mesh, {"attention": dtcp.ContextParallel()})
    documents = dtcp.Documents.from_lengths([5, 8])
    packed = dtcp.make_layout("per_document", seq_len=13, cp=world, documents=documents)
    with raises(ValueError, "set_sequence(model, layout, documents=layout.documents)"):
        dtcp.set_sequence(model, packed)
    with raises(ValueError, "documents add up to 13 tokens, but the sequence has 12"):
        dtcp.set_sequence(model, dtcp.make_layout("head_tail", seq_len=12, cp=world), documents=documents)
    dtcp.set_sequence(model, packed, documents=documents)
    x = draw(2, 2, packed.local_seq_len, 8)
    with raises(TypeError, "got mask, which would be left out; it takes sinks=, alibi_slopes= and attn_bias="):
        model["attention"](x, x, x, mask=x)
    with dtcp.context_parallel(mesh, seq_len=13, layout="per_document", documents=documents) as cp:
        model["attention"](x, x, x)
        assert cp.num_attention_calls == 1
    other = dtcp.Documents.from_lengths([6, 7])
    with raises(ValueError, "know of different documents", "set_sequence(model, cp.layout, documents=documents)"):
        dtcp.set_sequence(model, dtcp.make_layout("head_tail", seq_len=13, cp=world), documents=documents)
        with dtcp.context_parallel(mesh, seq_len=13, documents=other):
            model["attention"](x, x, x)
    capped = dtcp.context_parallel(mesh, seq_len=13, documents=documents, softcap=3.0)
    with raises(ValueError, "does not see the masks of the context_parallel", "give them to the plan"), capped:
        model["attention"](x, x, x)


def test_what_a_plan_cannot_know_is_refused(ranks):
    ranks.run(2, check_plan_refusals)
