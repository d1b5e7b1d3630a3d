"""``strategy="auto"``: the strategy that is predicted to take least, decided once for calls of one kind."""

from __future__ import annotations

import logging

import torch

from dtcp.attention.predict import CPU_RATES, DEVICE_RATES, Candidate, Prediction, Rates, Shape, name_of, predict
from dtcp.layout import SequenceLayout, make_layout
from dtcp.mask import Mask

# What is simpler comes first: another one has to be predicted to save this share of the time.
_LEAST_SAVING = 0.02
logger = logging.getLogger(__name__)
_chosen: dict[tuple[object, ...], Candidate] = {}


def candidates(cp: int, num_heads: int) -> list[Candidate]:
    """Every strategy that ``cp`` ranks and the query heads allow, the simplest first."""
    found = [Candidate("ring", 1), Candidate("exchange", 1)]
    if cp <= num_heads:
        found.append(Candidate("ring", cp))
    found += [Candidate("ring", d) for d in range(2, cp) if cp % d == 0 and d <= num_heads]
    return [*found, Candidate("all_gather", 1)]


def choose_strategy(
    shape: Shape, layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, rates: Rates
) -> Candidate:
    """Return the candidate for calls of this kind: of the first one's documents and key lengths, then of all like it.

    So it stays the same from step to step, for compiled graphs and for ranks, which all see the same calls.
    """
    kind = (
        shape, _kind_of(layout), _kind_of(kv_layout), mask.is_causal, mask.window_size, mask.documents is None,
        mask.key_lengths is None, rates,
    )  # fmt: skip
    if kind not in _chosen:
        possible = candidates(layout.cp, shape.num_heads)
        predictions = [predict(c, shape, layout, kv_layout, mask, rates) for c in possible]
        best = min(p.seconds for p in predictions)
        taken = next(p for p in predictions if p.seconds <= best * (1 + _LEAST_SAVING))
        _chosen[kind] = taken.candidate
        logger.info(
            "strategy='auto' takes %s for %s: %s",
            name_of(*taken.candidate, layout.cp),
            _described(shape, layout, mask),
            ", ".join(f"{name_of(*p.candidate, layout.cp)} {_figures(p)}" for p in predictions),
        )  # fmt: skip
    return _chosen[kind]


def choose_in_graph(
    sizes: tuple[int, ...],
    local_lengths: list[int],
    cp: int,
    is_causal: bool,
    window: tuple[int, int],
    rates: Rates | None,
    device_type: str,
) -> tuple[str, int]:
    """The same where a graph is being made, which knows no layout and no documents: balanced ones are assumed.

    Args:
        sizes: Of a ``Shape``.
    """
    name = "head_tail" if is_causal else "contiguous"
    layout, kv_layout = (make_layout(name, seq_len=length * cp, cp=cp) for length in local_lengths)
    mask, shape = Mask(is_causal, window), Shape(*sizes)
    chosen = choose_strategy(shape, layout, kv_layout, mask, rates or rates_of(device_type))
    return chosen.core, chosen.ulysses_degree


# Dynamo puts the choice into the graph as it is.
choose_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rates_of(device_type: str) -> Rates:
    """Rates from data sheets; ``measure_rates`` has those of the machine that it runs on."""
    if device_type != "cuda":
        return CPU_RATES
    name = torch.cuda.get_device_name()
    return next((rates for known, rates in DEVICE_RATES.items() if known in name), DEVICE_RATES["H100"])


def _kind_of(layout: SequenceLayout) -> tuple[object, ...]:
    return layout.name, layout.seq_len, layout.cp, layout.multiple_of, layout.num_rows


def _described(shape: Shape, layout: SequenceLayout, mask: Mask) -> str:
    masks = ["causal"] * mask.is_causal + [f"window {mask.window_size}"] * (mask.window_size != (-1, -1))
    masks += ["documents"] * (mask.documents is not None) + ["key padding"] * (mask.key_lengths is not None)
    return (
        f"{layout.seq_len} tokens over {layout.cp} ranks ({layout.name}), {shape.batch_size} row(s) of "
        f"{shape.num_heads}:{shape.num_kv_heads} heads, {', '.join(masks) or 'no mask'}"
    )


def _figures(prediction: Prediction) -> str:
    return f"{prediction.seconds * 1e3:.3g} ms ({prediction.sent_bytes / 2**20:.3g} MiB)"
