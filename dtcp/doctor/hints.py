"""What wrong gradients look like: each suspicion is tried out on one rank, until one of them gives the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dtcp.doctor.compare import CLEAR, TOLERANCE, Deviation
from dtcp.doctor.own import hooked_parameters
from dtcp.doctor.probes import (
    adds_gradients,
    counts_tokens,
    depends_on_length,
    depends_on_world,
    is_linear,
    mixes_tokens_elsewhere,
)
from dtcp.doctor.reference import EVERY, Fault, Outcome, Reference
from dtcp.doctor.subject import Subject
from dtcp.layout import SequenceLayout
from dtcp.loss import IGNORED

Gradients = Mapping[str, Tensor]
MOST_SINGLES = 32  # biases that are tried out one by one

_MIXES_TOKENS = (
    "something in the model mixes tokens beside F.scaled_dot_product_attention, and sees this rank's only: attention "
    "written out by hand, a mean or a normalisation over the sequence, a convolution, a shift; have it work on each "
    "token alone"
)
MIXES_ROWS = (
    "something in the model mixes the rows of a batch (a BatchNorm, a mean, a norm or a sort over rows): what a row "
    "gives depends on the rows beside it, and so on dp and on the microbatches; have it work on each row alone"
)
READS_WORLD = (
    "the model asks for the number of ranks or its own rank (dist.get_world_size(), dist.get_rank(), WORLD_SIZE) and "
    "computes by it, in its forward, in a hook or when it is made, where one rank has 1 and 0; leave sums and means "
    "over ranks to parallelize and its losses"
)
ADDS_GRADIENTS = (
    "the model adds a gradient that is not of the loss: with a loss of zero its backward still gives one (an auxiliary "
    "loss by an autograd.Function, as routers of experts have it; a hook). Every rank and microbatch adds its own, of "
    "its own tokens, so it depends on the mesh; add that loss to the model's, as a sum over tokens"
)
_NOT_LINEAR = (
    "the gradients do not double where the loss does: something clips or normalises them on their way (a backward hook "
    "of a module or tensor, an autograd.Function), by what it sees of them on this rank; do it after the backward, to "
    "all of a gradient"
)
_DEPENDS_ON_LENGTH = (
    "what a token gives depends on how long the sequence is (tokens.size(1), x.shape[1]), and a rank has a part of it; "
    "take the length from the config, or compute by positions"
)
_COUNTS_TOKENS = (
    "positions are local in a part of the model: it counts tokens from 0 by itself (torch.arange(tokens.size(1)), a "
    "cumsum, numbers of documents), and a rank's part begins elsewhere; "
)
_GIVE_POSITIONS = "have it use the global ones, layout.positions(rank) or a buffer that context_parallel cuts"


def explain(
    subject: Subject, reference: Reference, right: Outcome, gathered: Gradients, deviations: Sequence[Deviation]
) -> list[str]:
    """Say what the wrong gradients look like. On rank 0; the reference may run many times.

    Args:
        right: The reference's outcome.
        gathered: The job's gradients, added up where shares make the reference.
        deviations: Of all of them.
    """
    wrong = [deviation for deviation in deviations if deviation.is_wrong]
    if subject.options.model is not None and depends_on_world(reference):
        return [READS_WORLD]
    if subject.options.model is not None and adds_gradients(reference):
        return [ADDS_GRADIENTS]
    hints = [*_untied(wrong, reference), *_unreduced(wrong, right)]
    left = {d.name for d in wrong if not d.complete_over}
    if not left:
        return hints
    factor, residual = fit_all(gathered, right.gradients)
    if residual <= CLEAR:
        return [*hints, _factor_hint(factor, subject)]
    for fault in suspicions(subject, reference):
        # The reported number may be a mean where the gradients are sums: any common factor will do.
        # What a bias that counts twice gets itself depends on how it is added: not compared.
        outcome = {n: g for n, g in reference.run(fault).gradients.items() if n not in fault.scaled}
        factor, residual = fit_all(gathered, outcome)
        if residual <= CLEAR:
            common = "" if abs(factor - 1) < 10 * CLEAR else f" (and all gradients {factor_name(factor, subject)})"
            return [*hints, fault.hint + common]
    if subject.dims.cp > 1 and _ignores_positions(subject, reference):
        hint = f"positions are local: the model does not read the positions that it is given; {_GIVE_POSITIONS}"
        return [*hints, hint]
    if subject.dims.cp > 1 and mixes_tokens_elsewhere(reference):
        return [*hints, _MIXES_TOKENS]
    if subject.dims.cp > 1 and depends_on_length(reference):
        return [*hints, _DEPENDS_ON_LENGTH]
    if subject.dims.cp > 1 and counts_tokens(reference):
        return [*hints, _COUNTS_TOKENS + _GIVE_POSITIONS]
    hooked = [*_hooked(wrong, reference)]
    if subject.options.model is not None and not hooked and not is_linear(reference):
        return [*hints, _NOT_LINEAR]
    return [*hints, *hooked, *_factors_of_some(wrong, subject)]


def fit_all(gradients: Gradients, reference: Gradients) -> tuple[float, float]:
    """Return the common factor that brings the reference closest to the gradients, and what distance is left.

    The distance is that of the worst parameter, relative; near 0 by the global norm.
    """
    products = squares = 0.0
    for name, wanted in reference.items():
        g, w = gradients[name].double(), wanted.double()
        products += float((g * w).sum())
        squares += float((w * w).sum())
    factor = products / squares if squares > 0 else 0.0
    scale = 10 * CLEAR * math.sqrt(squares) * abs(factor) + 1e-30
    worst = 0.0
    for name, wanted in reference.items():
        distance = (gradients[name].double() - factor * wanted.double()).norm()
        worst = max(worst, float(distance / (factor * wanted.double().norm() + scale).abs()))
    return factor, worst


def factor_name(factor: float, subject: Subject) -> str:
    """``×cp (2.000)`` where a factor is a degree of the mesh or a product of two, or its inverse; else ``×1.234``."""
    degrees = {axis: n for axis, n in subject.dims.degrees.items() if n > 1} | {"microbatches": len(subject.rows)}
    names = {name: float(n) for name, n in degrees.items() if n > 1}
    names |= {f"{a}·{b}": x * y for a, x in names.items() for b, y in names.items() if a < b}
    for name, value in names.items():
        if math.isclose(factor, value, rel_tol=0.01):
            return f"×{name} ({factor:.4g})"
        if math.isclose(factor, 1 / value, rel_tol=0.01):
            return f"÷{name} ({factor:.4g})"
    return f"×{factor:.4g}"


# ---- without another run ---------------------------------------------------------------------------------------------


def _unreduced(wrong: Sequence[Deviation], right: Outcome) -> Iterator[str]:
    """Shares that were never added up over an axis."""
    for axes in dict.fromkeys(d.complete_over for d in wrong if d.complete_over):
        names = [d.name for d in wrong if d.complete_over == axes]
        over = " and ".join(axes)
        if axes == ("tp",):
            yield (
                f"{_some(names, right)}: the gradient is not added up over tp: every tp rank keeps its share, of the "
                "positions that it saw under sequence parallelism (the missed reduction of norm and bias gradients: "
                "keep such parameters as DTensors, dtcp.ReplicatedParameters(input_layout=Shard(1)) in the plan), or "
                "of the heads and features that it has (cut such a projection over tp as those are that use it)"
            )
        else:
            yield (
                f"{_some(names, right)}: the gradient reduction over {over} is missing: every rank keeps its share, "
                f"and their sum over {over} is right; call dtcp.reduce_gradients(model, dims) after the backward, or "
                "shard with dtcp.apply_fsdp, whose view has the cp ranks in it"
            )


def _untied(wrong: Sequence[Deviation], reference: Reference) -> Iterator[str]:
    """Parameters of the job that are one on one rank."""
    names: dict[int, str] = {}
    for name, parameter in reference.model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and name in {d.name for d in wrong}:
            yield (
                f"{first} and {name} are one parameter on one rank, and two here, each with a part of its gradient: "
                "something has put others in their places (a plan, to_empty); tie them again where that is done"
            )


def _factor_hint(factor: float, subject: Subject) -> str:
    name = factor_name(factor, subject)
    why = (
        "gradients are averaged over ranks or microbatches where shares have to be added: FSDP2's default divisor, "
        "DDP, or scale_grads=True of a pipeline schedule; use dtcp.apply_fsdp, or set_gradient_divide_factor(1.0)"
        if factor < 1
        else "gradients are added up more often than once, or the loss is not divided by all valid tokens"
    )
    return f"every gradient is {name}: {why}"


def _factors_of_some(wrong: Sequence[Deviation], subject: Subject) -> Iterator[str]:
    by_factor: dict[str, list[str]] = {}
    left = [deviation for deviation in wrong if not deviation.complete_over]
    # One times the right one is no factor, and that one gradient of many has a factor says nothing of the others.
    explained = [d for d in left if d.residual <= CLEAR and abs(d.factor - 1) > 0.01]
    if 2 * len(explained) >= len(left):
        for deviation in explained:
            by_factor.setdefault(factor_name(deviation.factor, subject), []).append(deviation.name)
    for name, names in by_factor.items():
        yield (
            f"the gradient of {len(names)} parameter(s), {names[0]} …, is {name}: counted more than once, or averaged "
            "where it has to be added"
        )


def _hooked(wrong: Sequence[Deviation], reference: Reference) -> Iterator[str]:
    names = sorted({d.name for d in wrong} & {*hooked_parameters(reference.model)})
    if names:
        yield (
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}: a hook on the gradient (register_hook) changes "
            "it on one rank, and is lost where FSDP2 puts another parameter in place, or sees a share only; do what it "
            "does to the gradient after the backward, before the optimizer's step"
        )


def _some(names: Sequence[str], right: Outcome) -> str:
    if len(names) == len(right.gradients):
        return "every parameter"
    return f"{len(names)} parameter(s), {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"


# ---- suspicions ------------------------------------------------------------------------------------------------------


def suspicions(subject: Subject, reference: Reference) -> Iterator[Fault]:
    """Yield the known faults that a job on this mesh can have, the likeliest first."""
    batch = reference.batch
    layout = subject.layout_of_all_rows
    parts = owners(layout, batch.tokens.device)
    yield from _wrong_means(subject, batch.labels, parts)
    if batch.documents is not None:
        yield Fault(
            "attention sees the tokens of other documents: it is not told where documents lie; give documents= to "
            "set_sequence, for each microbatch its own, or to context_parallel",
            crosses_documents=True,
        )
    if subject.dims.cp > 1:
        shifted = _labels_shifted_after_cut(layout, batch.tokens)
        for labels in (shifted, shifted.masked_fill(batch.labels == IGNORED, IGNORED)):
            yield Fault(
                "labels are shifted after the cut: the last token of a rank's run gets the first of its next, or none; "
                "call dtcp.shift_labels on the whole sequence, then dtcp.shard",
                labels=labels,
            )
        yield Fault(
            "positions are local: every rank counts its tokens from 0, in RoPE or in the position table; "
            + _GIVE_POSITIONS,
            positions=_local_positions(layout, batch.positions),
        )
        calls = reference.num_attention_calls()
        if calls > 1:
            yield Fault(
                f"all {calls} attention calls bypass dtcp's dispatch: queries see the keys of their own rank only; "
                "have them call F.scaled_dot_product_attention inside dtcp.context_parallel(...), "
                "doctor.door=context, or name their modules in the plan",
                parts=parts,
                layer=EVERY,
            )
        for layer in range(calls):
            yield Fault(
                f"attention call {layer} of {calls} (from 0) bypasses dtcp's dispatch: its queries see the keys of "
                "their own rank only; have it call F.scaled_dot_product_attention, or name it in the plan",
                parts=parts,
                layer=layer,
            )
    if subject.dims.tp > 1:
        yield from _repeated_biases(subject, reference)


def _held(layout: SequenceLayout, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the slots of each cp rank that hold tokens, int64 (n,), and these tokens, (1, n) or (G, n) by row."""
    for rank in range(layout.cp):
        slots = torch.arange(layout.num_valid(rank))
        yield slots.to(device), torch.atleast_2d(layout.positions(rank))[:, slots].to(device)


def owners(layout: SequenceLayout, device: torch.device) -> Tensor:
    """Return the cp rank of each token, int64 (1, S), or (G, S) where rows differ."""
    owner = torch.empty(layout.num_rows, layout.seq_len, dtype=torch.int64, device=device)
    for rank, (_, tokens) in enumerate(_held(layout, device)):
        owner.scatter_(1, tokens, rank)
    return owner


def _wrong_means(subject: Subject, labels: Tensor, parts: Tensor) -> Iterator[Fault]:
    """Losses divided by the valid tokens of a part, and then added or averaged."""
    rows = torch.empty(labels.size(0), dtype=torch.int64)
    microbatch = torch.empty_like(rows)
    for reader, batches in enumerate(subject.rows_of_readers()):
        for number, indices in enumerate(batches):
            rows[list(indices)] = reader
            microbatch[list(indices)] = number
    is_valid = labels != IGNORED
    by_rank = rows[:, None].to(labels.device) * subject.dims.cp + parts
    by_both = by_rank * int(microbatch.max() + 1) + microbatch[:, None].to(labels.device)
    for what, group in (
        ("each rank", by_rank),
        ("each microbatch", microbatch[:, None].to(labels.device).expand_as(labels)),
        ("each rank's microbatch", by_both),
    ):
        if int(group.max()) == int(group.min()):
            continue
        counts = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device=labels.device)
        counts.scatter_add_(0, group.flatten(), is_valid.double().flatten())
        yield Fault(
            f"the loss is a mean of means: the tokens of {what} are divided by their own number, and not by that of "
            "all valid tokens of the step; use dtcp.token_loss with mesh=dims.view('loss') or num_valid_tokens=",
            token_weights=1 / counts.clamp(min=1)[group],
        )


def _labels_shifted_after_cut(layout: SequenceLayout, tokens: Tensor) -> Tensor:
    """What a rank gets that takes the next of its own tokens as the target of each."""
    shifted = torch.full_like(tokens, IGNORED)
    for _, held in _held(layout, tokens.device):
        held = held.expand(tokens.size(0), -1)
        shifted.scatter_(1, held[:, :-1], tokens.gather(1, held[:, 1:]))
    return shifted


def _local_positions(layout: SequenceLayout, positions: Tensor) -> Tensor:
    local = positions.clone()
    for slots, held in _held(layout, positions.device):
        local.scatter_(1, held.expand(local.size(0), -1), slots.expand(local.size(0), -1))
    return local


def _ignores_positions(subject: Subject, reference: Reference) -> bool:
    """Whether other positions change nothing at all: then a model that needs some makes its own."""
    other = reference.run(Fault("", positions=_local_positions(subject.layout_of_all_rows, reference.batch.positions)))
    return other.loss == reference.outcome.loss


def _repeated_biases(subject: Subject, reference: Reference) -> Iterator[Fault]:
    """Biases of row-parallel layers, all of them, then kind by kind, then one by one, that each tp rank adds."""
    kinds = sorted({name.split(".")[-1] for name in subject.row_parallel_layers()})
    biases = [n for n, _ in reference.model.named_parameters() if n.endswith(".bias") and n.split(".")[-2] in kinds]
    of_kinds = [[name for name in biases if name.split(".")[-2] == kind] for kind in kinds]
    singles = [[name] for name in biases[:MOST_SINGLES]]
    for names in [biases, *(of_kinds if len(kinds) > 1 else ()), *(singles if len(biases) > 1 else ())]:
        if names:
            yield Fault(
                f"the bias of a row-parallel layer is added tp times, once by each rank before the sum: "
                f"{', '.join(names[:3])}; let it be added after the reduction, as RowwiseParallel does",
                scaled=frozenset(names),
                factor=float(subject.dims.tp),
            )


def backward_of_attention(subject: Subject, error_forward: float, errors: Mapping[str, float]) -> str | None:
    """What the attention op alone shows: right forward, wrong backward."""
    bad = [name for name, error in errors.items() if error > 10 * TOLERANCE]
    if not bad or error_forward > 10 * TOLERANCE:
        return None
    return (
        f"attention itself, strategy {subject.config.attention.strategy} and layout {subject.layout.name}, is right in "
        f"the forward and wrong in the backward, in the gradient of {', '.join(bad)}: the backward uses the keys and "
        "values of another hop than the forward's (the first hop's, say: at cp=2 that cannot be seen), or key "
        "gradients do not travel home"
    )
