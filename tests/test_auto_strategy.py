"""``strategy="auto"``: what it predicts, where one strategy overtakes another as the papers say, what it takes."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from contexts import raises
from dtcp.attention.auto import candidates, choose_strategy
from dtcp.attention.predict import Candidate, Rates, Shape, name_of, predict
from dtcp.mask import Mask
from oracle import relative_error

FULL, CAUSAL = Mask(), Mask(is_causal=True)
RING, EXCHANGE, ALL_GATHER = Candidate("ring", 1), Candidate("exchange", 1), Candidate("all_gather", 1)
ONLY_LINKS = Rates(1e30, 1e9)
ONLY_KERNELS = Rates(1e12, 1e30)


def shape(num_heads: int = 16, num_kv_heads: int = 16, element_bytes: int = 4, summed_bytes: int = 4) -> Shape:
    return Shape(1, num_heads, num_kv_heads, 64, 64, element_bytes, summed_bytes)


def layout_of(name: str, local: int, cp: int) -> dtcp.SequenceLayout:
    return dtcp.make_layout(name, seq_len=local * cp, cp=cp)


def seconds(candidate: Candidate, of: Shape, layout: dtcp.SequenceLayout, mask: Mask, rates: Rates) -> float:
    return predict(candidate, of, layout, layout, mask, rates).seconds


@pytest.mark.parametrize("group_size", [1, 4, 8, 16])
def test_ulysses_overtakes_the_ring_where_the_papers_say(group_size):
    """b3: with gradients as wide as keys, at P > (2/3)(1 + 1/g): 1.33, 3.33, 6 and 11.3 ranks, while P ≤ Hkv."""
    crossover = 2 / 3 * (1 + group_size)
    of = shape(32 * group_size, 32)
    for cp in (2, 4, 8, 16, 32):
        layout = layout_of("contiguous", 32, cp)
        ring, ulysses = (seconds(c, of, layout, FULL, ONLY_LINKS) for c in (RING, Candidate("ring", cp)))
        assert (ulysses < ring) == (cp > crossover), (cp, crossover)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(16, 16), (16, 4), (16, 1)])
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize(("e", "summed"), [(2, 4), (2, 2), (4, 2)])
def test_bytes_are_those_of_the_papers(num_heads, num_kv_heads, cp, e, summed):
    """b3: ring and all-gather 2(P−1)/P·s·hkv·e forward, as much and gradients backward; ulysses row 5."""
    of, layout = shape(num_heads, num_kv_heads, e, summed), layout_of("head_tail", 64, cp)
    keys = 2 * (cp - 1) / cp * layout.seq_len * num_kv_heads * 64
    for candidate in (RING, EXCHANGE, ALL_GATHER):
        assert predict(candidate, of, layout, layout, FULL, ONLY_LINKS).sent_bytes == keys * (e + e + summed)
    heads = (cp - 1) / cp**2 * layout.seq_len * 64
    returned = summed if num_kv_heads < cp else min(summed, e)
    kv_heads = max(num_kv_heads, cp)
    right = heads * ((2 * num_heads + 2 * kv_heads) * e + 2 * num_heads * e + 2 * kv_heads * returned)
    found = predict(Candidate("ring", cp), of, layout, layout, FULL, ONLY_LINKS).sent_bytes
    assert found == pytest.approx(right, rel=1e-12)


def test_a_causal_ring_hides_its_keys_from_the_papers_threshold_on():
    """b4: c ≥ e·g·F/B tokens per rank; here 2 · 1/4 · 10¹² / 10⁹ = 500 for the forward, 2.4/e times that for both."""
    rates, of = Rates(1e12, 1e9), shape(16, 4, element_bytes=2)
    busy = dataclasses.replace(of)
    for local, is_hidden in ((2000, True), (64, False)):
        layout = layout_of("head_tail", local, 4)
        whole = seconds(RING, busy, layout, CAUSAL, rates)
        alone = seconds(RING, busy, layout, CAUSAL, rates._replace(link_bytes=1e30))
        assert (whole <= alone * 1.0001) == is_hidden, (local, whole / alone)


def test_with_free_links_a_balanced_layout_costs_its_share_of_the_pairs():
    of, layout = shape(), layout_of("head_tail", 64, 4)
    pairs = 256 * 257 / 2
    whole = 4 * 64 * 16 * pairs * 3.5 / 1e12
    for candidate in (EXCHANGE, ALL_GATHER, Candidate("ring", 4)):
        assert seconds(candidate, of, layout, CAUSAL, ONLY_KERNELS) == pytest.approx(whole / 4, rel=0.02)
    contiguous = layout_of("contiguous", 64, 4)
    assert seconds(ALL_GATHER, of, contiguous, CAUSAL, ONLY_KERNELS) > 1.7 * whole / 4, "the busiest rank counts"
    assert seconds(Candidate("ring", 4), of, contiguous, CAUSAL, ONLY_KERNELS) == pytest.approx(whole / 4, rel=0.02)


def test_candidates_are_what_ranks_and_heads_allow_and_the_simplest_come_first():
    names = [name_of(*c, 8) for c in candidates(8, 4)]
    assert names == ["ring", "exchange", "hybrid(ulysses_degree=2)", "hybrid(ulysses_degree=4)", "all_gather"]
    assert "ulysses" in [name_of(*c, 8) for c in candidates(8, 8)]
    assert [name_of(*c, 3) for c in candidates(3, 2)] == ["ring", "exchange", "all_gather"]


def chosen(of: Shape, layout: dtcp.SequenceLayout, mask: Mask, rates: Rates) -> str:
    return name_of(*choose_strategy(of, layout, layout, mask, rates), layout.cp)


def test_each_strategy_is_taken_where_it_is_best(caplog):
    fast, slow = Rates(400e12, 450e9, 5e-6, 10e-6), Rates(400e12, 5e9, 5e-6, 10e-6)
    long_sequence = layout_of("head_tail", 16384, 8)
    with caplog.at_level(logging.INFO, "dtcp.attention.auto"):
        assert chosen(shape(32, 8, 2), long_sequence, CAUSAL, fast) == "ring", "all of them hide everything"
    assert "takes ring" in caplog.text and "ulysses" in caplog.text and "ms" in caplog.text and "MiB" in caplog.text
    assert chosen(shape(32, 32, 2), layout_of("head_tail", 2048, 8), CAUSAL, slow) == "ulysses"
    window = Mask(is_causal=True, window_size=(511, 0))
    assert chosen(shape(32, 8, 2), layout_of("contiguous", 16384, 8), window, slow) == "exchange"
    # One key head: its ring is cheap, and cut among eight ranks it would have to be sent to each.
    assert chosen(shape(32, 1, 2), layout_of("head_tail", 2048, 8), CAUSAL, slow) in ("ring", "exchange")


def test_a_choice_is_kept_for_other_documents_of_the_same_kind():
    first, second = (dtcp.Documents.from_lengths(x) for x in ([4096, 4096], [1] * 8192))
    of, rates = shape(8, 8, 2), Rates(1e12, 1e9, 1e-4, 1e-4)
    layout = layout_of("head_tail", 4096, 2)
    taken = choose_strategy(of, layout, layout, Mask(True, documents=first), rates)
    assert choose_strategy(of, layout, layout, Mask(True, documents=second), rates) is taken


# ---- the doors -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def check_doors(rank: int, world: int) -> None:
    """Every door takes what ``rates`` say is best, which the messages show, and computes the same."""
    from recorder import count_exchanges

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=29, cp=world)
    torch.manual_seed(0)
    whole = [torch.randn(2, h, 29, 8, dtype=torch.float64) for h in (4, 4, 4)]
    right = dtcp.reference_attention(*whole, is_causal=True)
    # Slow links: Ulysses sends fewest bytes. Slow messages: the ring sends fewest of them.
    for rates, num_messages in ((dtcp.Rates(1e30, 1.0), 4), (dtcp.Rates(1e30, 1e30, 0.0, 1.0), 1)):
        ways = explicit, context, plan, compiled
        for way in ways:
            with count_exchanges() as sent:
                out = way(mesh, layout, [dtcp.shard(x, mesh, layout, dim=2) for x in whole], rates)
            kinds = [s.kind for s in sent[1:]]  # the first is what ranks agree by
            assert kinds == ["send"] * num_messages, "of ulysses two halves of heads, there and back"
            assert relative_error(dtcp.unshard(out, mesh, layout, dim=2), right) < 1e-12, way.__name__


def explicit(mesh: Any, layout: Any, inputs: list[Tensor], rates: dtcp.Rates) -> Tensor:
    return dtcp.context_parallel_attention(
        *inputs, mesh=mesh, layout=layout, is_causal=True, strategy="auto", rates=rates
    )


def context(mesh: Any, layout: Any, inputs: list[Tensor], rates: dtcp.Rates) -> Tensor:
    with dtcp.context_parallel(mesh, seq_len=29, layout=layout.name, strategy="auto", rates=rates):
        return F.scaled_dot_product_attention(*inputs, is_causal=True)


def plan(mesh: Any, layout: Any, inputs: list[Tensor], rates: dtcp.Rates) -> Tensor:
    style = dtcp.ContextParallel(strategy="auto", rates=rates)
    model = parallelize_module(nn.ModuleDict({"sdpa": Attention()}), mesh, {"sdpa": style})
    dtcp.set_sequence(model, layout)
    return model["sdpa"](*inputs)


def compiled(mesh: Any, layout: Any, inputs: list[Tensor], rates: dtcp.Rates) -> Tensor:
    return torch.compile(explicit, fullgraph=True, backend="aot_eager")(mesh, layout, inputs, rates)


def check_compiled(rank: int, world: int) -> None:
    """With the rates of the device, in a context, and lengths that change from step to step."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sin()

    for seq_len in (29, 33, 47):
        documents = dtcp.Documents.from_lengths([9, seq_len - 9])
        whole = [torch.randn(2, h, seq_len, 8, dtype=torch.float64) for h in (4, 2, 2)]
        for given in (None, documents):
            right = dtcp.reference_attention(*whole, is_causal=True, enable_gqa=True, documents=given).sin()
            with dtcp.context_parallel(mesh, seq_len=seq_len, strategy="auto", documents=given) as cp:
                local = [cp.shard(x, dim=2).requires_grad_() for x in whole]
                out = attend(*local)
                out.sum().backward()
                assert relative_error(cp.unshard(out.detach(), dim=2), right) < 1e-12


def test_auto_is_decided_in_compiled_graphs_also_of_other_lengths(ranks):
    ranks.run(2, check_compiled)


def test_every_door_takes_the_strategy_that_rates_say(ranks):
    ranks.run(2, check_doors)


def check_measured(rank: int, world: int) -> tuple[float, ...]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    rates = dtcp.measure_rates(mesh, tokens=256, num_heads=2)
    assert rates.kernel_flops > 1e8 and rates.link_bytes > 1e6 and 0 < rates.call_seconds < 1
    assert (0 < rates.message_seconds < 1) == (world > 1)
    return tuple(rates)


@pytest.mark.parametrize("world", [1, 3])
def test_measured_rates_are_equal_on_every_rank(ranks, world):
    assert len(set(ranks.run(world, check_measured))) == 1


def check_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=8, cp=world)
    inputs = [torch.randn(1, 2, 8 // world, 8)] * 3
    good = dtcp.Rates(1e12, 1e9)
    for options, message in (
        ({"strategy": "ring", "rates": good}, "rates have no meaning for strategy='ring'"),
        ({"strategy": "auto", "rates": good._replace(link_bytes=0.0)}, "rates must be dtcp.Rates(kernel_flops"),
        ({"strategy": "auto", "rates": (1.0, 1.0, 0.0, 0.0)}, "rates must be dtcp.Rates"),
        ({"strategy": "auto", "ulysses_degree": 2}, "ulysses_degree=2 has no meaning for strategy='auto'"),
    ):
        with raises(ValueError, message):
            dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout, **options)
    # Ranks with other rates may come to another choice: found before anything is sent.
    rates = dtcp.Rates(1e30, 1.0) if rank == 0 else dtcp.Rates(1e30, 1e30, 0.0, 1.0)
    found = r"the same rates\) differs between the ranks of the group: \{0: 'ulysses', 1: 'ring'\}"
    with pytest.raises(ValueError, match=found):
        dtcp.context_parallel_attention(*inputs, mesh=mesh, layout=layout, strategy="auto", rates=rates)


def test_rates_that_are_none_or_that_nobody_looks_at_are_refused(ranks):
    ranks.run(2, check_refused)
