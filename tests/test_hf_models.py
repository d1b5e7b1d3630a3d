"""transformers' models with attn_implementation="dtcp" equal themselves on one rank, or are refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch

import dtcp
from hf_models import MODELS, build, eager_outcome, make_batch

pytest.importorskip("transformers")

STRATEGIES = ({"strategy": "ring"}, {"strategy": "exchange"}, {"strategy": "all_gather"}, {"strategy": "ulysses"})
HYBRID = {"strategy": "hybrid", "ulysses_degree": 2}
TOLERANCE = 5e-5  # float64 models (GPT-OSS: float32), whose eager softmax and norms are float32
PACKINGS = ([23], [5, 11, 1, 9])


def parallel_dims(world):
    dims = dtcp.ParallelDims(cp=world, dp_shard=1, world_size=world)
    dims.build_mesh("cpu")
    return dims


def compare(rank, world, cases):
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    for name, lengths, layout, how in cases:
        batch = make_batch(lengths)
        logits, loss, gradients = eager_outcome(build(name, "eager"), batch, lengths)
        model = build(name, "dtcp")
        part = dtcp_hf.prepare(model, batch, dims, layout=layout, **how)
        out = model(**part).logits
        share = part.loss(out)
        share.backward()
        dtcp.reduce_gradients(model, dims)
        whole = dtcp.unshard(out.detach(), dims.view("cp"), part.layout)
        total = share.detach().clone()
        torch.distributed.all_reduce(total)
        case = (name, lengths, layout, how)
        assert float((whole - logits).norm() / logits.norm()) < TOLERANCE, case
        assert abs(float(total - loss)) < TOLERANCE * float(loss), case
        found = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == gradients.keys(), case
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        for path, wanted in gradients.items():
            difference = float((found[path] - wanted).norm())
            assert difference < TOLERANCE * float(wanted.norm()) + 1e-7 * float(norm), (case, path)


def all_cases(hows):
    layouts = ("head_tail", "contiguous", "striped", "auto", "head_tail", "per_document")
    cases = itertools.product(MODELS, PACKINGS)
    return [
        (name, lengths, layouts[(i + i // len(layouts)) % 6 if len(lengths) > 1 else i % 4], hows[i % len(hows)])
        for i, (name, lengths) in enumerate(cases)
    ]


def test_every_model_has_its_own_logits_loss_and_gradients_on_two_ranks(ranks):
    ranks.run(2, compare, all_cases(STRATEGIES))


@pytest.mark.slow
@pytest.mark.parametrize("shift", range(5))
def test_every_model_has_its_own_logits_loss_and_gradients_on_four_ranks(ranks, shift):
    hows = (*STRATEGIES, HYBRID)
    ranks.run(4, compare, all_cases(hows[shift:] + hows[:shift]))
