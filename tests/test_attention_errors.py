"""Bad input ends in an error that names the value and the cure, on every rank, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp

KEYS = dtcp.dropout_keys(0, 0, [0, 1], torch.arange(8))
DROPPED: dict[str, Any] = {"dropout_p": 0.1, "dropout_keys": KEYS, "dropout_name": "layers.0"}


PER_DOCUMENT = dtcp.make_layout("per_document", seq_len=16, cp=2, documents=dtcp.Documents.from_lengths([5, 11]))


def number_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q - kv


def failing_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    raise KeyError("missing")


def attend(world: int, *, layout: Any = "default", shapes: Any = None, change: Any = None, **options: Any) -> Any:
    """Call with good inputs of 8 slots for each rank but for what is given; ``change(q, k, v)`` replaces them."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    if layout == "default":
        layout = dtcp.make_layout("head_tail", seq_len=8 * world, cp=world)
    inputs = [torch.randn(shape) for shape in shapes or [(2, 4, 8, 16)] * 3]
    if change:
        inputs = list(change(*inputs))
    return dtcp.context_parallel_attention(*inputs, **({"mesh": mesh, "layout": layout} | options))


# (what is passed on every rank, error, message)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"shapes": [(4, 8, 16)] * 3},
        ValueError,
        r"query must be a non-empty 4-D tensor in bhsd order, got shape \(4, 8, 16\)",
    ),
    ({"shapes": [(2, 0, 8, 16)] * 3}, ValueError, r"non-empty 4-D .*\(2, 0, 8, 16\)"),
    ({"change": lambda q, k, v: (q, k.tolist(), v)}, ValueError, "key must be a tensor, got list"),
    ({"change": lambda q, k, v: (q.int(), k, v)}, ValueError, "query must be float32.*got torch.int32"),
    ({"change": lambda q, k, v: (q, k.double(), v)}, ValueError, "one dtype, got torch.float32, torch.float64"),
    ({"change": lambda q, k, v: (q, k.to("meta"), v)}, ValueError, "one device, got cpu, meta and cpu"),
    ({"shapes": [(2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16)]}, ValueError, "one batch size, got 2, 1 and 1"),
    ({"shapes": [(2, 4, 8, 16), (2, 4, 8, 8), (2, 4, 8, 16)]}, ValueError, "one head dim, got 16 and 8"),
    ({"shapes": [(2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16)]}, ValueError, "multiple of key heads, got 4 and 3"),
    (
        {"shapes": [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]},
        ValueError,
        "4 query heads with 2 key heads .*enable_gqa=True",
    ),
    ({"shapes": [(2, 4, 8, 16), (2, 4, 8, 16), (2, 2, 8, 16)]}, ValueError, "key and value must have the same heads"),
    (
        {"shapes": [(2, 4, 6, 16)] * 3},
        ValueError,
        r"query: 6 slots, but the layout \(head_tail, seq_len=16, cp=2\) has 8",
    ),
    ({"shapes": [(2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16)]}, ValueError, "key and value: 6 slots.*give kv_layout"),
    (
        {"layout": dtcp.make_layout("head_tail", seq_len=32, cp=4)},
        ValueError,
        "cp=4 but the mesh has 2 ranks; make it with cp=2",
    ),
    ({"qkv_format": "sbhd"}, ValueError, "qkv_format must be 'bhsd' or 'bshd', got 'sbhd'"),
    (
        {"strategy": "rings"},
        ValueError,
        "strategy must be one of ring, all_gather, exchange, ulysses, hybrid, auto, got 'rings'",
    ),
    (
        {"strategy": "ulysses", "shapes": [(2, 1, 8, 16)] * 3},
        ValueError,
        "1 query heads cannot be cut among 2 ranks.*use strategy='ring' or 'exchange'",
    ),
    ({"strategy": "hybrid"}, ValueError, "strategy='hybrid' needs ulysses_degree.*got None; use a divisor of cp, 2"),
    ({"strategy": "hybrid", "ulysses_degree": 0}, ValueError, "strategy='hybrid' needs ulysses_degree.*got 0"),
    (
        {"strategy": "hybrid", "ulysses_degree": 3},
        ValueError,
        "ulysses_degree=3 must divide the 2 ranks of the cp axis; use one of 1, 2",
    ),
    ({"kernel": "flash", "scale": 0.0}, ValueError, "kernel='flash' needs a positive scale, got 0.0"),
    ({"ulysses_degree": 2}, ValueError, "ulysses_degree=2 has no meaning for strategy='ring'"),
    ({"kv_grad_dtype": torch.float16}, ValueError, "must be torch.bfloat16, .*got torch.float16; use torch.bfloat16"),
    ({"kv_grad_dtype": torch.int32}, ValueError, "kv_grad_dtype must be .* got torch.int32; use torch.bfloat16"),
    ({"kv_grad_dtype": "bfloat16"}, ValueError, "kv_grad_dtype must be .* got 'bfloat16'; use torch.bfloat16"),
    ({"kv_grad_dtype": torch.float64}, ValueError, "torch.float64 is wider than torch.float32, .*; use None"),
    ({"kernel": "cudnn"}, ValueError, "kernel='cudnn' does not exist on cpu; use auto"),
    (
        {"is_causal": True, "kv_layout": dtcp.make_layout("striped", seq_len=16, cp=2)},
        ValueError,
        "queries and keys in one layout",
    ),
    ({"window_size": 4}, ValueError, r"window_size must be a pair \(left, right\) of ints.*got 4; use \(-1, -1\)"),
    ({"window_size": (1, 2, 3)}, ValueError, r"a pair \(left, right\).*got \(1, 2, 3\)"),
    ({"window_size": (4, 3), "is_causal": True}, ValueError, r"looks 3 tokens ahead.*use \(4, 0\) or is_causal=False"),
    (
        {"window_size": (4, 0), "kv_layout": dtcp.make_layout("striped", seq_len=16, cp=2)},
        ValueError,
        "window_size needs queries and keys in one layout",
    ),
    ({"documents": [8, 8]}, ValueError, r"documents must be dtcp.Documents, got list; make them with .*from_lengths"),
    ({"documents": dtcp.Documents.from_lengths([12])}, ValueError, "add up to 12 tokens, but the sequence has 16"),
    ({"documents": dtcp.Documents.from_lengths([[16], [8, 8], [16]])}, ValueError, "3 rows, but the batch has 2"),
    ({"layout": PER_DOCUMENT}, ValueError, "the call does not know of them; pass documents=layout.documents"),
    ({"key_lengths": [3]}, ValueError, r"key_lengths must be \(2,\), one per row, got shape \(1,\)"),
    ({"key_lengths": [3, 17]}, ValueError, r"key_lengths must be in 0..16, the keys of the sequence, got \[3, 17\]"),
    ({"key_lengths": torch.ones(2, 16)}, ValueError, r"key_lengths must be integers \(B,\).*mask.sum\(1\)"),
    ({"mask_mod": torch.ones(16, 16)}, ValueError, r"mask_mod must be a function .*lambda b, h, q, kv: mask\[q, kv\]"),
    ({"mask_mod": number_mask}, ValueError, r"mask_mod must return a bool tensor, got torch.int64"),
    ({"mask_mod": failing_mask}, ValueError, "mask_mod raised KeyError: 'missing'"),
    ({"sinks": 1.0}, ValueError, "sinks must be a plain float tensor, got float"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(4,\), one logit for each query head here, got \(3,\)"),
    ({"attn_bias": torch.zeros(2, 4, 8, 8)}, ValueError, r"\(2 or 1, 4 or 1, 8, 16\).*got \(2, 4, 8, 8\); cut its"),
    ({"alibi_slopes": torch.zeros(2, 1)}, ValueError, r"alibi_slopes must be \(4,\) or \(2, 4\).*got \(2, 1\)"),
    ({"softcap": 0}, ValueError, "softcap must be a positive number, got 0; use softcap=None"),
    ({"softcap": 30.0, "kernel": "flash"}, ValueError, "kernel='flash' does not know softcap; use kernel='math'"),
    (
        {"attn_bias": torch.zeros(1, 1, 8, 16, requires_grad=True), "kernel": "flash"},
        ValueError,
        "kernel='flash' has no gradient of attn_bias; use kernel='math' or 'auto'",
    ),
    ({"scale": "x"}, ValueError, "scale must be a number, got 'x'; use scale=None"),
    ({"layout": None}, ValueError, r"layout must be a SequenceLayout, got None; make .*cp=2\)"),
    ({"kv_layout": 16}, ValueError, "kv_layout must be a SequenceLayout, got 16; make one with dtcp.make_layout"),
    ({"dropout_p": 0.1}, ValueError, r"needs dropout_keys and a dropout_name.*pass dropout_keys=dtcp.dropout_keys\("),
    ({"dropout_p": 0.1, "dropout_keys": KEYS}, ValueError, "dropout_name=None; pass .*another one for each call"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
    ({**DROPPED, "dropout_keys": KEYS[:1]}, ValueError, r"int64 \(B, S_local\) = \(2, 8\).*got torch.int64 \(1, 8\)"),
    ({**DROPPED, "dropout_keys": KEYS.int()}, ValueError, r"got torch.int32 \(2, 8\); pass dtcp.dropout_keys"),
    ({**DROPPED, "kernel": "flash"}, ValueError, "kernel='flash' draws its dropout masks.*use kernel='math'"),
]


def expect(rank: int, world: int, index: int, only_rank: int | None) -> None:
    options, error, message = WRONG[index]
    if only_rank is None or rank == only_rank:
        with pytest.raises(error, match=message):
            attend(world, **options)
    else:
        with pytest.raises(
            (RuntimeError, ValueError), match=rf"rank\(s\) \[{only_rank}\].*refused|differs between the ranks"
        ):
            attend(world)


def expect_all(rank: int, world: int, only_rank: int | None) -> None:
    """All wrong calls in a row: after each the group still works, as the right call at the end shows."""
    for index in range(len(WRONG)):
        expect(rank, world, index, only_rank)
    assert attend(world, is_causal=True).shape == (2, 4, 8, 16)


def test_wrong_arguments_name_the_value_and_the_cure_on_every_rank(ranks):
    ranks.run(2, expect_all, None)


def test_one_rank_with_wrong_arguments_stops_all_and_the_group_lives_on(ranks):
    ranks.run(2, expect_all, 1)


def check_differing(rank: int, world: int) -> None:
    wide = {"enable_gqa": True, "shapes": [(2, 8, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)]}
    for field, options, shown in [
        ("batch size", {"shapes": [(3, 4, 8, 16)] * 3}, "{0: 3, 1: 2, 2: 2}"),
        ("dtype", {"change": lambda *x: (t.bfloat16() for t in x)}, "{0: 'bfloat16', 1: 'float32', 2: 'float32'}"),
        ("query heads", wide, "{0: 8, 1: 4, 2: 4}"),
        ("head dim", {"shapes": [(2, 4, 8, 32), (2, 4, 8, 32), (2, 4, 8, 16)]}, "{0: 32, 1: 16, 2: 16}"),
        ("value head dim", {"shapes": [(2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 8)]}, "{0: 8, 1: 16, 2: 16}"),
        (r"query layout \(.*\)", {"layout": dtcp.make_layout("striped", seq_len=24, cp=3)}, "{0: 2, 1: 1, 2: 1}"),
        ("query seq_len", {"layout": dtcp.make_layout("head_tail", seq_len=23, cp=3)}, "{0: 23, 1: 24, 2: 24}"),
        ("is_causal", {"is_causal": True}, "{0: 1, 1: 0, 2: 0}"),
        (r"scale \(.*\)", {"scale": 0.5}, ""),
        ("window_size, left", {"window_size": (3, -1)}, "{0: 3, 1: -1, 2: -1}"),
        (r"documents \(their hash.*\)", {"documents": dtcp.Documents.from_lengths([24])}, ""),
        (r"key_lengths \(.*\)", {"key_lengths": [3, 24]}, ""),
        (r"which of mask_mod, sinks, .* are given \(bits\)", {"sinks": torch.zeros(4)}, "{0: 2, 1: 0, 2: 0}"),
        (r"softcap \(.*\)", {"softcap": 5.0}, ""),
        (r"mask_mod \(checksum of some of its values\)", {"mask_mod": lambda b, h, q, kv: q // 4 == kv // 4}, ""),
        (r"dropout_p \(.*\)", DROPPED, ""),
        (r"strategy \(.*\)", {"strategy": "all_gather"}, "{0: 'all_gather', 1: 'ring', 2: 'ring'}"),
        (r"strategy \(.*\)", {"strategy": "ulysses"}, "{0: 'ulysses', 1: 'ring', 2: 'ring'}"),
    ]:
        with pytest.raises(ValueError, match=f"{field} differs between the ranks") as caught:
            others = {"mask_mod": lambda b, h, q, kv: q // 8 == kv // 8} if "mask_mod" in options else {}
            attend(world, **(options if rank == 0 else others))
        assert shown in str(caught.value)
    # Other lengths: the ranks that fit the layout hear of the one that does not.
    with pytest.raises(
        (ValueError, RuntimeError), match="query: 12 slots" if rank == 0 else r"rank\(s\) \[0\] .*refused"
    ):
        attend(world, **({"shapes": [(2, 4, 12, 16)] * 3} if rank == 0 else {}))
    # Rank 0 is in another operation altogether.
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=8 * world, cp=world)
    with pytest.raises(RuntimeError, match=r"different operations: \{0: 'unshard', 1: 'context_parallel_attention'"):
        if rank == 0:
            dtcp.unshard(torch.zeros(2, 8), mesh, layout)
        else:
            inputs = [torch.randn(2, 4, 8, 16)] * 3
            dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout)


def test_ranks_that_differ_are_named_before_anything_is_exchanged(ranks):
    ranks.run(3, check_differing)


def check_two_dimensional_mesh(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    layout = dtcp.make_layout("head_tail", seq_len=16, cp=2)
    inputs = [torch.randn(2, 4, 8, 16)] * 3
    message = r"needs the 1-D mesh of the cp axis, got a 2-D mesh with axes \('cp', 'tp'\); pass mesh\['cp'\]"
    for call in (
        lambda: dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout),
        lambda: dtcp.shard(torch.zeros(2, 16), mesh, layout),
        lambda: dtcp.unshard(torch.zeros(2, 8), mesh, layout),
        lambda: dtcp.check_same_batch(torch.zeros(2), mesh),
        lambda: dtcp.count_valid_tokens(torch.zeros(2, dtype=torch.int64), mesh=mesh),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_two_dimensional_mesh_is_refused_everywhere(ranks):
    ranks.run(2, check_two_dimensional_mesh)


def check_dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    with pytest.raises(NotImplementedError, match=r"query is a DTensor .* pass query.to_local\(\), or call F\."):
        attend(world, change=lambda *x: (distribute_tensor(t, mesh, [Shard(1)]) for t in x))


def test_dtensors_are_refused(ranks):
    ranks.run(2, check_dtensors)


def check_compiled_length(rank: int, world: int) -> None:
    """In a compiled graph the layout is data: the op itself finds that it does not fit."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=16, cp=world)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(x, layout):
        return dtcp.context_parallel_attention(x, x, x, mesh=mesh, layout=layout)

    block(torch.randn(2, 4, 8, 16), layout)
    with pytest.raises(ValueError, match="query: 6 slots, but the layout"):
        block(torch.randn(2, 4, 6, 16), layout)


def test_a_compiled_call_with_another_length_is_refused(ranks):
    ranks.run(2, check_compiled_length)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_size": (1, 0)}, ValueError, "window_size needs as many keys as queries, got 5 and 3"),
        ({"window_size": 4}, ValueError, "got 4; use"),
        ({"scale": [1]}, ValueError, r"scale must be a number, got \[1\]"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \(4,\)"),
        ({"attn_bias": torch.zeros(1, 1, 5, 3)}, ValueError, r"\(1 or 1, 4 or 1, 3, 5\)"),
        ({"documents": dtcp.Documents.from_lengths([3])}, ValueError, "documents needs as many keys as queries"),
        ({"enable_gqa": False}, ValueError, "pass enable_gqa=True"),
        ({"qkv_format": "thd"}, ValueError, "got 'thd'"),
        ({"is_causal": True}, ValueError, "as many keys as queries, got 5 and 3"),
    ],
)
def test_reference_refuses_the_same(options, error, message):
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(error, match=message):
        dtcp.reference_attention(query, key, key, **({"enable_gqa": True} | options))


def test_reference_is_torchs_attention_and_differentiates_twice():
    query, key, value = (torch.randn(2, h, 7, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    for is_causal, scale in ((True, None), (False, 0.3)):
        out = dtcp.reference_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)
        plain = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True
        )
        torch.testing.assert_close(out, plain)
        swapped = dtcp.reference_attention(
            *(x.transpose(1, 2) for x in (query, key, value)), is_causal=is_causal, scale=scale, enable_gqa=True,
            qkv_format="bshd",
        )  # fmt: skip
        assert torch.equal(swapped.transpose(1, 2), out)
    small = [x[:1, :, :3, :2].detach().requires_grad_() for x in (query, key, value)]
    assert torch.autograd.gradgradcheck(lambda *x: dtcp.reference_attention(*x, is_causal=True, enable_gqa=True), small)
