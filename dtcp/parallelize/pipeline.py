"""Pipeline parallelism: the layers of a model cut into stages, and a schedule of ``torch.distributed.pipelining``.

Shapes: B rows of this data parallel rank's part of the step, S_local slots of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtcp.collectives import agree
from dtcp.documents import Documents
from dtcp.dropout import ModelWithDropout
from dtcp.layout import SequenceLayout
from dtcp.loss import token_loss
from dtcp.mesh import ParallelDims
from dtcp.parallelize.context import set_sequence
from dtcp.parallelize.shared import ConstantBuffers
from dtcp.parallelize.stages import check_num_microbatches, check_zero_bubble, find_schedule
from dtcp.parallelize.tied import TiedParameters

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule

Loss = Callable[..., Tensor]
Sequences = Sequence[tuple[SequenceLayout, Documents | None]]
_NUMBER = "_microbatch_number"  # by this name a stage's forward gets the number of its microbatch, int64 (B,)


class Pipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them.

    What ``dtcp.parallelize`` returns with pp > 1. It is a module for everything that looks at parameters
    (optimizers, ``clip_grad_norm_``, ``set_sequence``, checkpoints); instead of calling it, call
    ``forward_backward`` or ``evaluate`` on every rank of the mesh.

    Attributes:
        num_stages: Of the whole pipeline.
        stage_indices: Those of this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        dims: ParallelDims,
        *,
        num_stages: int,
        width: int,
        seq_len_divisor: int = 1,
        schedule: str = "1F1B",
        dtype: torch.dtype = torch.float32,
        loss: Loss = token_loss,
        tied: Sequence[str] | Mapping[str, str] = (),
        constant_buffers: Collection[str] = (),
    ) -> None:
        """Take this rank's stages, cut, compiled and sharded already.

        Args:
            stages: By index; `split_into_stages` makes them.
            dims: Built mesh.
            num_stages: Of the whole pipeline.
            width: Of the residual stream, that stages hand on as (B, S_local / seq_len_divisor, width).
            seq_len_divisor: tp, where sequence parallelism cuts the residual stream.
            schedule: A name in ``SCHEDULES``.
            dtype: Of the residual stream.
            loss: ``loss(output of the last stage, labels, num_valid_tokens=…)``, a microbatch's share of the sum.
            tied: Parameters that the first and the last stage both have, and that stay equal: their gradients are
                added up. A mapping where the last stage has them by other names than the first.
            constant_buffers: Names of those that several stages have: a forward that changes one raises.

        Raises:
            ValueError: If the schedule does not exist or does not fit the stages.
            NotImplementedError: For a zero-bubble schedule of compiled stages.
        """
        super().__init__()
        self._kind = find_schedule(schedule)
        self._group = dims.view("pp").get_group()
        self._width, self._seq_len_divisor, self._dtype = width, seq_len_divisor, dtype
        self._loss = loss
        self.num_stages = num_stages
        self.stage_indices = sorted(stages)
        # Parameters keep the names of the whole model: `dtcp.models.init.plain_name` takes this one away.
        self._pipeline_stages = nn.ModuleList([stages[index] for index in self.stage_indices])
        self._schedules: dict[tuple[int, ...], _PipelineSchedule] = {}
        if self._kind.splits_backward:
            check_zero_bubble(self._pipeline_stages, schedule)
        self._sequences: Sequences = ()
        names = tied if isinstance(tied, Mapping) else dict(zip(tied, tied, strict=True))
        end = self.stages[0 if self.is_first else -1] if self.is_first or self.is_last else None
        self._tied = TiedParameters(end, names, self._group, is_first=self.is_first)
        for stage in self.stages:
            # Before FSDP2's hook, which would move the number to the device, and this one wait for it.
            stage.register_forward_pre_hook(self._tell_sequence, prepend=True, with_kwargs=True)
            ConstantBuffers(constant_buffers).watch(stage)

    @property
    def stages(self) -> list[nn.Module]:
        """This rank's stages, in the order of ``stage_indices``."""
        return list(self._pipeline_stages)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self.stage_indices

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so the loss."""
        return self.num_stages - 1 in self.stage_indices

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise: a stage alone has no output; call ``forward_backward`` or ``evaluate`` instead."""
        raise TypeError(
            "a pipeline is run by its schedule: call pipeline.forward_backward(tokens, labels, num_microbatches=…) or "
            "pipeline.evaluate(…) on every rank instead of pipeline(tokens)"
        )

    def forward_backward(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        num_microbatches: int,
        num_valid_tokens: Tensor | int,
        constants: Mapping[str, Any] | None = None,
        sequences: Sequences | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """Add the gradient of this rank's share of the loss to its parameters. Call it on every rank of the mesh.

        Args:
            tokens: int64 (B, S_local), equal on every pp rank; B is a multiple of ``num_microbatches``.
            labels: int64 (B, S_local).
            num_microbatches: Into which the rows are split, in order.
            num_valid_tokens: Of the whole optimizer step, over the loss view: the divisor of every token's loss.
            constants: What every stage's forward takes as it is, by name.
            sequences: Layout and documents of each microbatch, of which ``set_sequence`` tells each stage before its
                forward of that microbatch. None: they have been told, and are the same for all. Rows that it was told
                for dropout are those of all microbatches.
            inputs: What it takes by rows, (B, …) each: positions, dropout keys.

        Returns:
            This rank's share of the loss, 0-d float32 (0 on ranks without the last stage): the loss is the sum over
            the loss view and the ``pp`` axis. Nothing is scaled by the number of microbatches.

        Raises:
            ValueError: On every rank, before anything is sent, if the pp ranks differ in shapes or numbers.
        """
        inputs |= self._take_sequences(sequences, tokens.size(0), num_microbatches)
        self._agree(True, tokens, labels, num_microbatches, inputs)
        schedule = self._schedule(tokens.size(0) // num_microbatches, tokens.size(1), num_microbatches, tokens.device)
        losses: list[Tensor] = []
        before = self._tied.set_gradients_aside()
        schedule.step(
            *([tokens] if self.is_first else []),
            target=labels,
            losses=losses,
            loss_kwargs={"num_valid_tokens": num_valid_tokens},
            return_outputs=False,
            **inputs,
            **(constants or {}),
        )
        self._tied.add_gradients(before)
        return _sum_of_shares(losses, tokens.device)

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Tensor,
        labels: Tensor,
        *,
        num_microbatches: int,
        num_valid_tokens: Tensor | int,
        constants: Mapping[str, Any] | None = None,
        sequences: Sequences | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """Return this rank's share of the loss, as ``forward_backward``, without gradients."""
        inputs |= self._take_sequences(sequences, tokens.size(0), num_microbatches)
        self._agree(False, tokens, labels, num_microbatches, inputs)
        microbatches = [
            dict(zip(inputs, values, strict=True))
            for values in zip(*(x.chunk(num_microbatches) for x in inputs.values()), strict=True)
        ] or [{} for _ in range(num_microbatches)]
        hidden, sends = list(tokens.chunk(num_microbatches)), []
        shape = (tokens.size(0) // num_microbatches, tokens.size(1) // self._seq_len_divisor, self._width)
        for index, stage in zip(self.stage_indices, self.stages, strict=True):
            # All microbatches through a stage, then the next of this rank: so a rank is never waited for twice.
            for number, given in enumerate(microbatches):
                if index > 0 and index - 1 not in self.stage_indices:
                    hidden[number] = torch.empty(shape, dtype=self._dtype, device=tokens.device)
                    dist.recv(hidden[number], group=self._group, group_src=self._rank_of(index - 1))
                hidden[number] = stage(hidden[number], **given, **(constants or {}))
                if index + 1 < self.num_stages and index + 1 not in self.stage_indices:
                    peer = self._rank_of(index + 1)
                    send = dist.isend(hidden[number].contiguous(), group=self._group, group_dst=peer)
                    assert send is not None  # this rank is in the group
                    sends.append(send)
        for send in sends:
            send.wait()
        if not self.is_last:
            return _sum_of_shares([], tokens.device)
        by_microbatch = zip(hidden, labels.chunk(num_microbatches), strict=True)
        return _sum_of_shares(
            [self._loss(out, wanted, num_valid_tokens=num_valid_tokens) for out, wanted in by_microbatch], tokens.device
        )

    def _take_sequences(self, sequences: Sequences | None, num_rows: int, num_microbatches: int) -> dict[str, Tensor]:
        """Keep what stages will be told, and return what says to them which microbatch they run: an input by rows."""
        self._sequences = () if sequences is None else tuple(sequences)
        if not self._sequences and not any(True for _ in _told_models(self)):
            return {}
        return {_NUMBER: torch.arange(num_microbatches).repeat_interleave(num_rows // max(1, num_microbatches))}

    def _tell_sequence(self, stage: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before a stage's forward. Its backward, and a recomputation, find what their own forward was told."""
        numbers = kwargs.pop(_NUMBER, None)
        if numbers is not None:
            number, num_rows = int(numbers[0]), numbers.size(0)
            if self._sequences:
                layout, documents = self._sequences[number]
                set_sequence(stage, layout, documents=documents)
            for model in _told_models(stage):
                model.select_told_rows(slice(number * num_rows, (number + 1) * num_rows))
        return args, kwargs

    def _rank_of(self, index: int) -> int:
        """The rank in the pp group that holds a stage."""
        pp = self._group.size()
        return 2 * pp - 1 - index if self._kind.is_v_shaped and index >= pp else index % pp

    def _agree(
        self, is_training: bool, tokens: Tensor, labels: Tensor, num_microbatches: int, inputs: dict[str, Tensor]
    ) -> None:
        """Check this rank's arguments, and that the pp ranks give the same: another shape would abort or hang."""
        # On the ranks with the ends, which both come here: the others hear of it.
        error: Exception | None = self._tied.check_once() if is_training else None
        try:
            self._check(is_training, tokens, num_microbatches, {"labels": labels, **inputs})
        except ValueError as refused:
            error = refused
        fields = {
            "is_training": int(is_training),
            "rows": tokens.size(0),
            "local_seq_len": tokens.size(1),
            "num_microbatches": num_microbatches,
            "num_inputs": len(inputs),
        }
        agree("pipeline step", fields, self._group, tokens.device, error, entry=" ".join(inputs))

    def _check(self, is_training: bool, tokens: Tensor, num_microbatches: int, others: dict[str, Tensor]) -> None:
        if is_training:
            check_num_microbatches(self._kind.name, num_microbatches, self._group.size())
        if num_microbatches < 1 or tokens.size(0) % num_microbatches:
            raise ValueError(
                f"a pipeline splits the rows into equal microbatches, got {tokens.size(0)} rows and "
                f"num_microbatches={num_microbatches}; use one of {_divisors(tokens.size(0))}"
            )
        if len(self._sequences) not in (0, num_microbatches):
            raise ValueError(
                f"sequences must have (layout, documents) of each of {num_microbatches} microbatches, got "
                f"{len(self._sequences)}; None: set_sequence has told what holds for all"
            )
        for model in _told_models(self):
            if model.told_rows.size(0) != tokens.size(0) and "dropout_keys" not in others:  # type: ignore[union-attr]
                raise ValueError(
                    f"set_sequence was told {len(model.told_rows)} row(s) of the global batch, this step has "  # type: ignore[arg-type]
                    f"{tokens.size(0)} in {num_microbatches} microbatches; tell it all of them, "
                    "set_sequence(pipeline, layout, step=…, rows=…), or give the pipeline dropout_keys="
                )
        if tokens.size(1) % self._seq_len_divisor:
            raise ValueError(
                f"sequence parallelism needs a local length divisible by tp={self._seq_len_divisor}, got "
                f"{tokens.size(1)}; use make_layout(..., multiple_of={self._seq_len_divisor})"
            )
        for name, x in others.items():
            if x.size(0) != tokens.size(0):
                raise ValueError(
                    f"{name} must have the {tokens.size(0)} rows of the tokens, got {tuple(x.shape)}; expand it: the "
                    "pipeline cuts every input by rows"
                )

    def _schedule(self, rows: int, seq_len: int, num_microbatches: int, device: torch.device) -> _PipelineSchedule:
        """The schedule for microbatches of ``rows`` rows; torch's stages hold buffers of one shape."""
        key = (rows, seq_len, num_microbatches)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(rows, seq_len, num_microbatches, device)
        return self._schedules[key]

    def _make_schedule(self, rows: int, seq_len: int, num_microbatches: int, device: torch.device) -> _PipelineSchedule:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        stages = []
        shape = (rows, seq_len // self._seq_len_divisor, self._width)
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        for index, stage in zip(self.stage_indices, self.stages, strict=True):
            given = torch.empty(rows, seq_len, dtype=torch.int64, device="meta") if index == 0 else hidden
            # All shapes are given: torch would find them out by a real forward and backward.
            stages.append(
                PipelineStage(
                    stage, index, self.num_stages, device, input_args=given, output_args=hidden, group=self._group
                )
            )
        make = functools.partial(
            get_schedule_class(self._kind.name), n_microbatches=num_microbatches, loss_fn=self._loss, scale_grads=False
        )
        return make(stages) if self._kind.is_looped else make(stages[0])

    def tied_copies(self) -> set[nn.Parameter]:
        """Parameters here that another stage has too, and counts: not to be counted twice in a norm."""
        return self._tied.copies()

    def name_in_first_stage(self, name: str) -> str:
        """What the first stage calls the parameter of the last stage that it is tied to; other names as they are."""
        if self.is_first:
            return name
        return next((first for first, last in self._tied.names.items() if last == name), name)


def _told_models(module: nn.Module) -> Iterator[ModelWithDropout]:
    """Those that were told rows of the global batch: of all microbatches."""
    return (m for m in module.modules() if isinstance(m, ModelWithDropout) and m.told_rows is not None)


def _sum_of_shares(losses: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(losses).detach().float().sum() if losses else torch.zeros((), device=device)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
