"""The examination: the job's step on all ranks, one rank's step, and what to make of the difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dtcp
from dtcp.doctor.alone import alone
from dtcp.doctor.compare import (
    NOISE,
    TOLERANCE,
    Deviation,
    different_buffers,
    digests_of_buffers,
    error_of,
    gather_gradients,
    gather_weights,
)
from dtcp.doctor.config import DoctorJobConfig, Door, ReferenceDType
from dtcp.doctor.hints import ADDS_GRADIENTS, MIXES_ROWS, READS_WORLD, backward_of_attention, explain
from dtcp.doctor.probes import adds_gradients_by_rows, mixes_rows
from dtcp.doctor.reached import unexamined
from dtcp.doctor.record import Recording, record
from dtcp.doctor.reference import Outcome, Reference
from dtcp.doctor.report import NUM_WORST, Comparison, Report, largest
from dtcp.doctor.subject import Subject
from dtcp.train.config import AttentionConfig, DType
from dtcp.train.session import agreed
from dtcp.train.traffic import most_of_ranks

HALF_FACTOR = 2.0  # of one rank's own error in bfloat16: both round, and not alike
HALF_FLOOR = 0.02  # relative; gradients of few elements are chance in bfloat16
MOST_HALF = 0.5  # relative, at all: what is farther off is wrong, whatever one rank's own error
MOST_ROUNDING = 1e-3  # that float32 is forgiven: a model that amplifies it more cannot be told from a wrong one
NOTHING = 1e-7  # of the global norm: a gradient so small is rounding, and its errors are not seen
ROUNDING_FACTOR = 4.0  # of one rank's own error in float32, where that is near the limit


_PROBES = ((mixes_rows, MIXES_ROWS), (adds_gradients_by_rows, ADDS_GRADIENTS))


def examine(config: DoctorJobConfig, device: torch.device | str = "cpu") -> Report:
    """Compare one step of the job on this mesh with one rank's. Collective; the verdict is the same on every rank.

    Args:
        config: See ``conf/doctor.yaml``; ``compose_doctor_config`` makes one.
        device: Where this rank computes.

    Raises:
        ValueError, NotImplementedError: If the configuration is refused; JobError on all ranks of several.
    """
    examination = _Examination(config, torch.device(device))
    examination.in_float32()
    if examination.report.is_right:
        narrowed = config.training.param_dtype, config.training.reduce_dtype, config.attention.kv_grad_dtype
        if DType.bfloat16 in narrowed:
            examination.in_narrow(torch.bfloat16)
        elif examination.built_in is not None:
            examination.in_narrow(examination.built_in)
    return examination.report


class _Examination:
    """One configuration; attributes of rank 0 are None elsewhere."""

    def __init__(self, config: DoctorJobConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.reference: Reference | None = None
        self.right: Outcome | None = None
        self.is_made_by_world = False  # whether the model asks for the number of ranks when it is made
        self.built_in: torch.dtype | None = None
        self.report = Report("")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which has the reference; asked when the job has made the process group."""
        return dist.get_rank() == 0

    def in_float32(self) -> None:
        """The strict comparison, and everything that is measured beside it."""
        attention = dataclasses.replace(self.config.attention, kv_grad_dtype=None)
        subject = self._subject(attention, param_dtype=DType.float32, reduce_dtype=DType.float32)
        self.report.job = subject.describe()
        self.built_in = subject.built_in
        if self.built_in is not None:
            dtype = str(self.built_in).removeprefix("torch.")
            self.report.job += f"\nbuilt in {dtype}: compared in float32 first, then in {dtype}"
        self._take_weights(subject)
        loss, norm = subject.take_step()
        self._run_reference(subject)
        gathered, comparison = self._compare(subject, loss, norm, {})
        if not comparison.is_right:
            limits = self._limits_of_rounding(subject)
            gathered, comparison = self._compare(subject, loss, norm, limits)
        self.report.comparisons.append(comparison)
        self._record(subject)
        if not comparison.is_right:
            self._explain(subject, gathered, comparison)

    def in_narrow(self, dtype: torch.dtype) -> None:
        """The job in its own precision; one rank's own error in it is the measure."""
        subject = self._subject(self.config.attention, keeps_dtype=True)
        loss, norm = subject.take_step()
        limits: dict[str, float] = {}
        number_limit = 0.0
        with agreed():
            if self.is_first:
                assert self.reference is not None and self.right is not None
                half = self.reference.run_in(dtype)
                scale = self.right.grad_norm
                errors = {n: error_of(half.gradients[n], g, scale) for n, g in self.right.gradients.items()}
                typical = sorted(errors.values())[len(errors) // 2]
                limits = {n: min(HALF_FACTOR * max(e, typical) + HALF_FLOOR, MOST_HALF) for n, e in errors.items()}
                number_limit = HALF_FACTOR * abs(half.loss / self.right.loss - 1) + HALF_FLOOR
        limits, number_limit = _from_first((limits, number_limit))
        _, comparison = self._compare(subject, loss, norm, limits, number_limit)
        self.report.comparisons.append(comparison)
        if not comparison.is_right:
            self.report.hints.append(
                f"the same mesh is right in float32: look for sums over ranks in {subject.dtype} "
                "or on their way (training.reduce_dtype, attention.kv_grad_dtype), or parts that compute in another "
                "precision than on one rank"
            )

    # ---- steps ----

    def _subject(self, attention: AttentionConfig, *, keeps_dtype: bool = False, **dtypes: Any) -> Subject:
        training = dataclasses.replace(self.config.training, **dtypes)
        config = dataclasses.replace(self.config, training=training, attention=attention)
        return Subject(config, self.device, keeps_dtype=keeps_dtype)

    def _take_weights(self, subject: Subject) -> None:
        weights, different = gather_weights(subject)
        if different:
            self.report.problems.append(
                f"ranks begin with different weights: {len(different)} parameter(s), {different[0]} …; seed all ranks "
                "alike, or broadcast the first rank's"
            )
        buffers, different = different_buffers(subject)
        if different:
            self.report.problems.append(
                f"ranks begin with different buffers: {', '.join(different[:NUM_WORST])}; make them alike on all ranks "
                "(from a seed that does not depend on the rank), or broadcast the first rank's"
            )
        anew: list[str] = []
        with agreed():
            if self.is_first:
                with alone() as asked:
                    model = subject.make_whole_model()
                self.is_made_by_world = bool(asked)
                self.reference = Reference(model, weights, subject.whole_batch())
                digests = digests_of_buffers(self.reference.model)
                anew = [n for n, digest in digests.items() if buffers.get(n, digest) != digest and n not in different]
        if anew := _from_first(anew):
            self.report.problems.append(
                f"every call of doctor.model gives other buffers: {', '.join(anew[:NUM_WORST])}; draw them from a "
                "seed, and make them of nothing that depends on the number of ranks"
            )

    def _run_reference(self, subject: Subject) -> None:
        found: tuple[list[str], list[str], int] = [], [], 0
        problems: list[str] = []
        with agreed():
            if self.is_first:
                assert self.reference is not None
                is_wide = self.config.doctor.reference_dtype is ReferenceDType.float64
                model = self.reference.model
                with subject.told(model):
                    self.right = self.reference.run_in(torch.float64) if is_wide else self.reference.outcome
                    if self.config.doctor.model is not None:
                        problems = [text for probe, text in _PROBES if probe(self.reference)]
                    changed = self.reference.check_repeatable()
                names = unexamined(model, self.right.gradients, self.right.grad_norm, NOTHING)
                found = changed, names, sum(parameter.requires_grad for parameter in model.parameters())
        self.report.changed_buffers, self.report.unexamined, self.report.num_trainable = _from_first(found)
        self.report.problems += _from_first(problems)

    def _limits_of_rounding(self, subject: Subject) -> dict[str, float]:
        """What float32 can do at all: one rank's own distance from float64, which then becomes the reference."""
        limits: dict[str, float] = {}
        with agreed():
            if self.is_first:
                assert self.reference is not None and self.right is not None
                if self.right is self.reference.outcome:
                    self.right = self.reference.run_in(torch.float64)
                scale = self.right.grad_norm
                for name, wanted in self.right.gradients.items():
                    own = error_of(self.reference.outcome.gradients[name], wanted, scale)
                    limits[name] = min(max(TOLERANCE, ROUNDING_FACTOR * own), MOST_ROUNDING)
        return _from_first(limits)

    def _compare(
        self,
        subject: Subject,
        loss: float,
        norm: float,
        limits: Mapping[str, float],
        number_limit: float = TOLERANCE,
    ) -> tuple[dict[str, Tensor], Comparison]:
        right = self.right
        numbers = (right.loss, right.grad_norm, list(right.gradients)) if right is not None else None
        right_loss, right_norm, names = _from_first(numbers)
        wanted = right.gradients if right is not None else {}
        gathered, deviations = gather_gradients(subject, wanted, right_norm, limits)
        arrived = {deviation.name for deviation in deviations}
        dtype = self.config.doctor.reference_dtype.value if not limits or number_limit > TOLERANCE else "float64"
        comparison = Comparison(
            dtype=subject.dtype,
            reference_dtype=dtype,
            loss=loss,
            reference_loss=right_loss,
            grad_norm=norm,
            reference_grad_norm=right_norm,
            number_limit=max(number_limit, min(limits.values(), default=0.0)),
            deviations=deviations,
            missing=[name for name in names if name not in arrived],
        )
        return gathered, comparison

    def _explain(self, subject: Subject, gathered: dict[str, Tensor], comparison: Comparison) -> None:
        if any(text in self.report.problems for _, text in _PROBES):
            return  # which is enough: the reference takes rows one by one
        hints: list[str] = []
        attention = _errors_of_attention(subject)
        with agreed():
            if self.is_first:
                assert self.reference is not None and self.right is not None
                if attention is not None and (hint := backward_of_attention(subject, *attention)):
                    hints.append(hint)
                elif not comparison.missing:
                    hints += explain(subject, self.reference, self.right, gathered, comparison.deviations)
                if self.is_made_by_world and READS_WORLD not in hints:
                    hints.append(READS_WORLD)
        self.report.hints += _from_first(hints)
        if not self.report.hints and not self.report.problems:
            self.report.hints.append(_where(comparison.deviations))

    def _record(self, subject: Subject) -> None:
        """Take the step once more, all compiled by now, and measure it."""
        subject.model.zero_grad()
        _, recording = record(subject.take_step, subject.named_blocks(subject.model), subject.dims)
        recordings: list[Recording] = [recording] * subject.dims.mesh.size()
        dist.all_gather_object(recordings, recording)
        report = self.report
        report.traffic = most_of_ranks(one.traffic for one in recordings)
        report.kept_bytes = largest([one.kept_bytes for one in recordings])
        report.attention_calls = largest([one.attention_calls for one in recordings])
        report.pairs = subject.layout_of_all_rows.attended_pairs(is_causal=True, documents=subject.documents)
        self._compare_attention_calls(subject)

    def _compare_attention_calls(self, subject: Subject) -> None:
        """Blocks whose attention never reached the op, though they attend; and what the whole model keeps."""
        problems: list[str] = []
        kept: dict[str, int] = {}
        with agreed():
            if self.is_first:
                assert self.reference is not None
                model = self.reference.model
                blocks = subject.named_blocks(model)
                wanted = self.reference.count_attention_calls(blocks)
                rows = len(subject.rows[0])
                _, whole = record(lambda: self.reference.forward(slice(0, rows)), blocks, None)  # type: ignore[union-attr]
                kept = whole.kept_bytes
                if subject.dims.cp > 1:
                    problems = _missed(wanted, self.report.attention_calls, self.config.doctor.door)
        problems, self.report.whole_kept_bytes = _from_first((problems, kept))
        self.report.problems += problems


def _missed(wanted: Mapping[str, int], found: Mapping[str, int], door: Door) -> list[str]:
    missed = [name for name, count in wanted.items() if found.get(name, 0) < count]
    if not missed:
        return []
    return [
        f"attention of {', '.join(missed)} bypasses dtcp: {sum(wanted[n] for n in missed)} call(s) of "
        f"F.scaled_dot_product_attention on one rank, {sum(found.get(n, 0) for n in missed)} of dtcp's here; their "
        f"queries see the tokens of their own rank only; {_CURES[door]}"
    ]


_CURES = {
    Door.plan: (
        "name the module whose forward(query, key, value) they are in the plan (context_plan= of dtcp.parallelize, "
        "doctor.context_plan=), or take the other door: context_plan={} and with dtcp.context_parallel(...) around "
        "the step, which doctor.door=context examines"
    ),
    Door.context: "have them call F.scaled_dot_product_attention by that name, in the thread of the context",
}


def _errors_of_attention(subject: Subject) -> tuple[float, dict[str, float]] | None:
    """Errors of the attention op alone, of random heads: of its output, and by input of the gradients."""
    if subject.dims.cp == 1:
        return None
    mesh, layout, attention = subject.dims.view("cp"), subject.layout, subject.config.attention
    generator = torch.Generator().manual_seed(subject.config.debug.seed)
    num_heads = 2 * max(2, -(-layout.cp // 2))  # at least as many as ranks, which ulysses cuts them among
    whole = [
        torch.randn(2, heads, layout.seq_len, 32, generator=generator).to(subject.device)
        for heads in (num_heads, 2, 2, num_heads)
    ]
    exact = [x.double().requires_grad_() for x in whole[:3]]
    right = dtcp.reference_attention(*exact, is_causal=True, enable_gqa=True)
    right.backward(whole[3].double())
    local = [dtcp.shard(x, mesh, layout, dim=2).requires_grad_() for x in whole[:3]]
    try:
        out = dtcp.context_parallel_attention(
            *local,
            mesh=mesh,
            layout=layout,
            is_causal=True,
            enable_gqa=True,
            strategy=attention.strategy,
            ulysses_degree=attention.ulysses_degree,
            ranks_per_node=subject.dims.cp_ranks_per_node(subject.config.mesh.ranks_per_node),
            kernel=attention.kernel,
        )
    except (ValueError, NotImplementedError):  # a kernel that takes no float32
        return None
    out.backward(dtcp.shard(whole[3], mesh, layout, dim=2))

    def error(x: Tensor, wanted: Tensor) -> float:
        found = dtcp.unshard(x.detach(), mesh, layout, dim=2)
        return error_of(found, wanted, float(wanted.norm()) / NOISE * 1e-6)

    names = ("query", "key", "value")
    errors = {n: error(x.grad, e.grad) for n, x, e in zip(names, local, exact, strict=True)}  # type: ignore[arg-type]
    return error(out, right.detach()), errors


def _where(deviations: list[Deviation]) -> str:
    wrong = [d for d in deviations if d.is_wrong]
    return (
        f"none of the known faults gives these numbers; the gradient of {wrong[0].name} is farthest off, and "
        f"{len(deviations) - len(wrong)} of {len(deviations)} are right"
        if wrong
        else "none of the known faults gives these numbers; the gradients are right, the loss or the norm is not"
    )


def _from_first(value: Any) -> Any:
    """Rank 0's value on every rank."""
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
