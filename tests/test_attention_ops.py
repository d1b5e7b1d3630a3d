"""What the attention ops exchange, hold, count and compile to."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from cuts import layout_of
from dtcp import collectives
from dtcp.attention import ops as attention_ops
from dtcp.attention.arguments import RING, resolved_strategy
from dtcp.attention.loopback import Loopback
from dtcp.attention.schedule import ring_schedule
from dtcp.collectives import agree
from dtcp.layout import LAYOUT_NAMES
from dtcp.mask import Mask
from oracle import GRADIENT_NAMES, STRATEGIES, Case, make_problem, options_of, solve
from recorder import Sent, count_exchanges

BATCH, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 2, 16, 8
ROW = BATCH * NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM)  # elements of K and V of one token


def check_bytes(rank: int, world: int, layout_name: str, strategy: str, is_causal: bool) -> tuple[int, int]:
    """Return (bytes sent in the forward, in the backward) by this rank; float32."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout(layout_name, seq_len=24 * world, cp=world)
    case = Case(heads=(8, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM), seq_len=24 * world, is_causal=is_causal, batch=BATCH)
    problem = make_problem(case)
    inputs = [dtcp.shard(x, mesh, layout, dim=2).requires_grad_() for x in (problem.query, problem.key, problem.value)]
    with count_exchanges() as forward:
        out = dtcp.context_parallel_attention(
            *inputs, mesh=mesh, layout=layout, is_causal=is_causal, enable_gqa=True, strategy=strategy
        )
    with count_exchanges() as backward:
        out.sum().backward()
    # The ranks agree by a fixed few bytes to each other rank; that is no part of the exchange of K and V.
    agreement = Sent("all_gather", 8 * collectives._RECORD_SIZE * (world - 1))
    for sent in (forward, backward):
        assert sent[0] == agreement, "before anything is exchanged"
        assert sent.count(agreement) == 1
        sent.remove(agreement)
    if strategy == "ring":
        assert all(s.kind == "send" for s in forward + backward)
        direction = 1 if layout_name == "contiguous" else -1
        assert {s.peer for s in forward} <= {(rank + direction) % world}, "a hop goes to the neighbour"
        assert len(forward) <= world - 1 and len(backward) <= 2 * (world - 1), "one message a hop: K and V together"
    elif strategy == "all_gather":
        assert [s.kind for s in forward] == ["all_gather"]
        assert [s.kind for s in backward] == ["all_gather", "reduce_scatter"]
    return sum(s.num_bytes for s in forward), sum(s.num_bytes for s in backward)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_bytes_are_the_closed_form(ranks, world):
    """Papers: keys and values 2·(P−1)/P·s·b·hkv·e in each direction of full attention; head_tail saves 25 %."""
    shard_bytes = 24 * ROW * 4  # one rank's K and V in float32; key gradients return in float32 too
    full = ranks.run(world, check_bytes, "head_tail", "ring", False)
    assert full == [((world - 1) * shard_bytes, 2 * (world - 1) * shard_bytes)] * world

    causal = ranks.run(world, check_bytes, "head_tail", "ring", True)
    received = [(world - 1) - rank / 2 for rank in range(world)]  # shards; half of those of lower ranks
    sent = [received[(rank - 1) % world] for rank in range(world)]
    returned = received  # the rows that a rank reads are the rows whose gradient it returns
    assert [f for f, _ in causal] == [int(x * shard_bytes) for x in sent]
    assert [b for _, b in causal] == [int((x + y) * shard_bytes) for x, y in zip(sent, returned, strict=True)]
    assert sum(f for f, _ in causal) == 0.75 * sum(f for f, _ in full), "25 % of the bytes are never sent"

    contiguous = ranks.run(world, check_bytes, "contiguous", "ring", True)
    # Keys of rank s go to s+1 … P−1 and stop there: rank r passes on those of ranks 0 … r, the last one nothing.
    assert [f for f, _ in contiguous] == [(r + 1) * shard_bytes if r < world - 1 else 0 for r in range(world)]
    assert sum(f for f, _ in contiguous) == 0.5 * sum(f for f, _ in full)

    # Striped: a rank reads all but the last key of the ranks above it. The hull of what later ranks read is sent.
    striped = ranks.run(world, check_bytes, "striped", "ring", True)
    assert all(f <= (world - 1) * shard_bytes for f, _ in striped)
    assert sum(f for f, _ in striped) > 0.9 * sum(f for f, _ in full)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_all_gather_bytes_are_the_closed_form(ranks, world, is_causal):
    shard_bytes = 24 * ROW * 4
    sent = ranks.run(world, check_bytes, "head_tail", "all_gather", is_causal)
    assert sent == [((world - 1) * shard_bytes, 2 * (world - 1) * shard_bytes)] * world


@pytest.mark.parametrize("name", LAYOUT_NAMES)
@pytest.mark.parametrize("cp", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("is_causal", [True, False])
def test_ring_schedules_of_all_ranks_fit_together(name, cp, is_causal):
    layout = layout_of(name, 7 * cp - 2, cp)
    schedules = [ring_schedule(layout, layout, Mask(is_causal), True, rank) for rank in range(cp)]
    for rank, own in enumerate(schedules):
        assert sorted(s.source for s in own.steps) == list(range(cp)) and own.steps[0].source == rank
        assert schedules[own.next_rank].previous_rank == rank
        held = (0, layout.local_seq_len)
        for index, step in enumerate(own.steps):
            hop = own.hops[index]
            for start, stop in (step.keys.hull(), hop.send):
                assert start == stop or (held[0] <= start and stop <= held[1]), "reads and sends what is here"
            assert hop.send == schedules[own.next_rank].hops[index].receive
            if index + 1 < cp:
                assert schedules[own.next_rank].steps[index + 1].source == step.source
            assert schedules[step.reader].steps[index].source == rank
            assert schedules[step.reader].steps[index].keys == step.reader_keys
            held = hop.receive


def check_peak(group: Any, strategy_name: str) -> tuple[int, int]:
    """Peak of live bytes that forward and backward allocate, with 64 tokens on each rank.

    The strategy is called without its op around it: a custom op hides what happens inside from a dispatch mode. On a
    loopback: a thread of gloo may hold tensors for a moment after they have been waited for.
    """
    from dtcp.attention.call import Call
    from dtcp.attention.kernels import choose_kernel
    from dtcp.attention.strategies import CORES
    from live_bytes import peak_live_bytes

    layout = dtcp.make_layout("head_tail", seq_len=64 * group.size(), cp=group.size())
    query, key, value = (torch.randn(1, 8, 64, 16) for _ in range(3))
    call = Call(group, layout, layout, Mask(is_causal=True), scale=0.25, kernel=choose_kernel("flash", query, 16))
    strategy = CORES[strategy_name]
    strategy.forward(call, query, key, value)  # layouts and schedules are cached by now
    with peak_live_bytes() as forward:
        out, lse = strategy.forward(call, query, key, value)
    with peak_live_bytes() as backward:
        strategy.backward(call, out, query, key, value, out, lse)
    return forward.peak, backward.peak


@pytest.mark.parametrize("strategy", ["ring", "exchange"])
def test_memory_of_a_step_by_step_strategy_does_not_grow_with_cp(strategy):
    def of_ranks(world: int, strategy: str) -> list[tuple[int, int]]:
        return Loopback(world, strict=True).run(lambda group: check_peak(group, strategy))

    by_world = [of_ranks(world, strategy) for world in (2, 3, 4)]
    # Of the rank that needs most: the last one reads only halves of the others' keys.
    peaks = [tuple(map(max, zip(*by_rank, strict=True))) for by_rank in by_world]
    assert peaks[1] == peaks[2], by_world
    # Two ranks have one part of a gradient to return, and no other one meanwhile.
    assert all(two <= more for two, more in zip(peaks[0], peaks[1], strict=True)), by_world
    # The measure does see memory that grows: all_gather holds every rank's keys.
    gathered = [of_ranks(world, "all_gather")[0] for world in (2, 3, 4)]
    shard_bytes = 64 * 8 * 32 * 4
    assert [later[0] - gathered[0][0] for later in gathered[1:]] == [shard_bytes, 2 * shard_bytes]


def check_flops(rank: int, world: int, strategy: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for name, is_causal in itertools.product(LAYOUT_NAMES, (True, False)):
        layout = layout_of(name, 29, world)
        q, k, v = (
            torch.randn(2, h, layout.local_seq_len, d, requires_grad=True) for h, d in ((4, 16), (2, 16), (2, 8))
        )
        with FlopCounterMode(display=False) as counter:
            out = dtcp.context_parallel_attention(
                q, k, v, mesh=mesh, layout=layout, is_causal=is_causal, enable_gqa=True,
                documents=layout.documents, **options_of(strategy, world),
            )  # fmt: skip
            forward = counter.get_total_flops()
            out.backward(torch.ones_like(out))
        by_rank = layout.attended_pairs(is_causal, documents=layout.documents)
        # Half the heads of both ranks' tokens, or all heads of its own.
        pairs = sum(by_rank) / 2 if strategy in ("ulysses", "hybrid") else by_rank[rank]
        assert forward == 2 * 2 * 4 * pairs * (16 + 8)
        assert counter.get_total_flops() - forward == 2 * 2 * 4 * pairs * (3 * 16 + 2 * 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flop_counter_counts_the_work_of_this_rank(ranks, strategy):
    ranks.run(2, check_flops, strategy)


def check_opcheck(rank: int, world: int, strategy: str) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=13, cp=world)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, layout.local_seq_len, h, d) for h, d in ((4, 16), (2, 16), (2, 8)))
    group_name = mesh.get_group().group_name
    keys = dtcp.dropout_keys(0, 0, [0, 1], layout.positions(rank))
    documents = dtcp.Documents.from_lengths([[5, 8], [13]])
    bias = torch.randn(2, 1, layout.local_seq_len, 13)
    # Without a mask_mod: what opcheck wraps its tests in cannot be entered by vmap.
    masks = (documents.state, torch.tensor([13, 9]), None, torch.randn(4), bias, torch.rand(4))
    none = (None,) * 6
    for given, window, dropout_keys, p, head_offset in (
        (none, (-1, -1), None, 0.0, 0),
        (none, (-1, -1), keys, 0.3, 4),
        (masks, (6, -1), None, 0.0, 0),
    ):
        sent_in = None if given is none else torch.bfloat16
        how = resolved_strategy(
            **{"ulysses_degree": None, **options_of(strategy, world)}, cp=world, kv_grad_dtype=sent_in
        )
        constants = (group_name, True, *window, 0.0, 0.25, *how[:4], "auto", p, head_offset, "")
        check_opcheck_of((q, k, v), (layout.state, layout.state, *given, dropout_keys, *constants))


def check_opcheck_of(inputs: tuple[torch.Tensor, ...], constants: tuple[Any, ...]) -> None:
    from torch.library import opcheck

    q, k, v = inputs
    # opcheck compares the outputs of two runs, and each call has another number.
    with mock.patch.object(attention_ops, "agree", lambda *args, **kwargs: 7 * bool(agree(*args, **kwargs))):
        opcheck(attention_ops.forward_op, (q, k, v, *constants, False, False))
        # With gradients opcheck differentiates the sum of ALL outputs, lse too, which the op refuses: the rest of its
        # checks here, and compiled gradients against eager ones in the test below.
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        without_lse = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(attention_ops.forward_op, (*leaves, *constants, True, True), test_utils=without_lse)
    out, lse, number, *kept = attention_ops.forward_op(q, k, v, *constants, False, False)
    has_bias = constants[6] is not None
    saved = kept if kept[0].numel() else (q, k, v, out, lse)
    opcheck(attention_ops.backward_op, (out, *saved, number, *constants, k.size(2), has_bias, has_bias))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2])
def test_opcheck_passes(ranks, world, strategy):
    ranks.run(world, check_opcheck, strategy)


def check_compile(rank: int, world: int, strategy: str, backend: str) -> None:
    import torch._dynamo.testing

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))

    how = options_of(strategy, world)

    def block(query, key, value, layout):
        out, lse = dtcp.context_parallel_attention(
            query * 2, key, value, mesh=mesh, layout=layout, is_causal=True, return_lse=True, **how
        )
        return out.sin(), lse.detach()

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    torch.manual_seed(rank)
    for step in range(20):
        # A layout made anew each step, other numbers of tokens in the same number of slots.
        layout = dtcp.make_layout("head_tail", seq_len=8 * world - step % 2, cp=world)
        inputs = [torch.randn(1, 2, layout.local_seq_len, 16, requires_grad=True) for _ in range(3)]
        results = []
        for run in (compiled, block) if step < 3 else (compiled,):
            out, lse = run(*inputs, layout)
            results.append((out, lse, *torch.autograd.grad(out.sum(), inputs)))
        for by_step in zip(*results, strict=True):
            torch.testing.assert_close(by_step[0], by_step[-1], rtol=1e-5, atol=1e-5)
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert counter.frame_count == 1, "one graph, and no recompilation from step to step"
    assert targets.count("dtcp.attention_forward.default") == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_attention_is_one_graph_and_equals_eager(ranks, strategy, backend):
    ranks.run(2, check_compile, strategy, backend, timeout=120)


def check_dtensor(rank: int, world: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dtcp.ContextParallel()  # loading it teaches DTensor the ops

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    layout = dtcp.make_layout("head_tail", seq_len=13, cp=2)
    torch.manual_seed(0)
    local = [dtcp.shard(torch.randn(2, 13, h, 8), mesh["cp"], layout) for h in (4, 2, 2)]
    inputs = [x.clone().requires_grad_() for x in local]
    right = dtcp.context_parallel_attention(
        *inputs, mesh=mesh["cp"], layout=layout, is_causal=True, enable_gqa=True, scale=0.3, qkv_format="bshd"
    )
    right.sum().backward()
    state = distribute_tensor(layout.state, mesh["tp"], [Replicate()])
    constants = (state, state, mesh["cp"].get_group().group_name, True, 0.3, RING, "auto")
    for given, kept in ((Shard(2), Shard(2)), (Shard(0), Shard(0)), (Replicate(), Replicate())):
        cut = [distribute_tensor(x, mesh["tp"], [given]).requires_grad_() for x in local]
        out, lse = attention_ops.attention_forward(*cut, *constants)
        assert out.placements == (kept,), "no gather of what the op can take as it is"
        assert lse.placements == ({2: Shard(1), 0: Shard(0)}.get(getattr(kept, "dim", None), Replicate()),)
        torch.testing.assert_close(out.full_tensor(), right, rtol=1e-6, atol=1e-6)
        out.sum().backward()
        for x, expected in zip(cut, inputs, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), expected.grad, rtol=1e-6, atol=1e-6)


def test_dtensor_rule_keeps_heads_and_rows_where_they_are(ranks):
    ranks.run(4, check_dtensor)


def check_refused_gradients(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=8, cp=world)
    inputs = [torch.randn(1, 2, layout.local_seq_len, 8, requires_grad=True) for _ in range(3)]
    options: dict[str, Any] = {"mesh": mesh, "layout": layout, "kernel": "math", "return_lse": True}
    out, lse = dtcp.context_parallel_attention(*inputs, **options)
    with pytest.raises(NotImplementedError, match=r"no gradient with respect to lse; use lse\.detach"):
        (out.sum() + lse.sum()).backward()
    out, lse = dtcp.context_parallel_attention(*inputs, **options)
    with pytest.raises(NotImplementedError, match="no gradient with respect to lse"):
        lse.sum().backward()
    out, lse = dtcp.context_parallel_attention(*inputs, **options)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"double backward.*reference_attention"):
        sum(g.square().sum() for g in grads).backward()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_do_not_exist_are_refused(ranks, world):
    ranks.run(world, check_refused_gradients)


def check_layouts_in_flight(rank: int, world: int) -> None:
    """Two forwards with different layouts, then their backwards in reverse order."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    cases = [Case(layout="head_tail", seq_len=24), Case(layout="striped", seq_len=30, strategy="all_gather")]
    alone, pending = [], []
    for case in cases:
        problem, layout = make_problem(case), dtcp.make_layout(case.layout, seq_len=case.seq_len, cp=world)
        alone.append(solve(case, problem, mesh, layout))
        inputs = [
            dtcp.shard(x, mesh, layout, dim=2).requires_grad_() for x in (problem.query, problem.key, problem.value)
        ]
        how = options_of(case.strategy, world)
        out = dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout, is_causal=True, **how)
        pending.append((inputs, out, dtcp.shard(problem.grad_out, mesh, layout, dim=2)))
    for (inputs, out, grad_out), right in reversed(list(zip(pending, alone, strict=True))):
        for grad, name in zip(torch.autograd.grad(out, inputs, grad_out), GRADIENT_NAMES, strict=True):
            assert torch.equal(grad, right[name])


def test_backward_uses_the_layout_of_its_own_forward(ranks):
    ranks.run(3, check_layouts_in_flight)
