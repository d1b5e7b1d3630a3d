"""Cut a model by layers into the stages of a pipeline.

A stage is the model itself with only some of its layers. Its forward has to take the residual stream where it has no
embedding, and give it back where it has no head, as `dtcp.models` do.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dtcp.mesh import ParallelDims
from dtcp.parallelize.shared import refuse_untied, tied_parameters

# Of models that do not say so themselves, by attributes `first_modules` and `last_modules`.
FIRST = ("token_embedding", "position_embedding", "embedding_dropout")
LAST = ("final_norm", "head")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a schedule of ``torch.distributed.pipelining`` asks of the stages."""

    name: str  # as ``torch.distributed.pipelining.schedules.get_schedule_class`` knows it
    is_looped: bool  # several stages a rank
    is_v_shaped: bool  # the last stage is on the first rank
    splits_backward: bool  # gradients of inputs and of weights apart ("zero bubble")


SCHEDULES = {
    kind.name: kind
    for kind in (
        Schedule("GPipe", False, False, False),
        Schedule("1F1B", False, False, False),
        Schedule("Interleaved1F1B", True, False, False),
        Schedule("InterleavedZeroBubble", True, False, True),
        Schedule("ZBVZeroBubble", True, True, True),
    )
}


def deal_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage: consecutive, sizes that differ by one at most.

    Middle stages have the layer more, if there is one: embedding and head cost the ends something already.

    Raises:
        ValueError: If a stage would have no layer.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers are too few for {num_stages} pipeline stages: each needs one; use a smaller mesh.pp, "
            "or fewer stages a rank: one, of GPipe and 1F1B"
        )
    size, num_larger = divmod(num_layers, num_stages)
    first_larger = (num_stages - num_larger) // 2
    sizes = [size + (first_larger <= i < first_larger + num_larger) for i in range(num_stages)]
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(num_stages)]


def check_num_microbatches(schedule: str, num_microbatches: int, pp: int) -> None:
    """Raise ``ValueError`` unless the schedule can run so many microbatches.

    1F1B and the V need one for each pp rank at least, the interleaved ones equal rounds of about ``pp``.
    """
    kind = find_schedule(schedule)
    if kind.is_looped and not kind.is_v_shaped:
        is_allowed = num_microbatches % max(1, num_microbatches // pp) == 0
    else:
        is_allowed = schedule == "GPipe" or num_microbatches >= pp
    if not is_allowed or num_microbatches < 1:
        raise ValueError(
            f"schedule {schedule} with pp={pp} cannot run {num_microbatches} microbatches; use {pp} or a multiple of "
            "it (of a job: a rank's rows of training.global_batch_size over training.local_batch_size)"
        )


def stages_of_rank(rank: int, pp: int, stages_per_rank: int, *, is_v_shaped: bool) -> list[int]:
    """Return the indices of a pp rank's stages: ``rank``, ``rank + pp``, …, or there and back again in a V."""
    if is_v_shaped:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * i for i in range(stages_per_rank)]


def make_stage(
    model: nn.Module,
    layers: Collection[int],
    *,
    is_first: bool,
    is_last: bool,
    first: Sequence[str] = FIRST,
    last: Sequence[str] = LAST,
    tied: Sequence[str] = (),
) -> nn.Module:
    """Return ``model`` with only some of its parts; those that it has are the model's own, not copies.

    Args:
        model: Has ``layers``, an ``nn.ModuleDict`` keyed "0", "1", … so that a layer keeps its name among fewer.
        layers: Positions of those to keep.
        is_first: Whether to keep the modules and parameters named in ``first``.
        is_last: Whether to keep those named in ``last``.
        tied: Of ``first``, those whose parameters the last stage needs too; it has them as ``model`` does, or under
            the names of its own modules that share them all.

    Raises:
        ValueError: If ``model.layers`` is no ModuleDict with these keys.
    """
    blocks = getattr(model, "layers", None)
    if not isinstance(blocks, nn.ModuleDict) or list(blocks) != [str(i) for i in range(len(blocks))]:
        raise ValueError(
            f"a pipeline wants the layers of {type(model).__name__} in model.layers, an nn.ModuleDict with the keys "
            f"'0', '1', …, got {type(blocks).__name__}: a layer keeps its name when others are taken out"
        )
    stage = copy.copy(model)  # the tables of a module are its own, or a hook would be on all stages
    stage.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | set) else value for name, value in model.__dict__.items()
    }
    dropped = {*(() if is_first else first), *(() if is_last else last)}
    kept = {name: stage._modules.get(name) for name in tied if is_last}
    for name in dropped & set(stage._modules):
        stage._modules[name] = None
    for name in dropped & set(stage._parameters):
        stage._parameters[name] = None
    stage.layers = nn.ModuleDict({str(i): blocks[str(i)] for i in layers})
    held = {id(parameter) for parameter in stage.parameters()}
    for name, module in kept.items():
        # A head whose weight is the embedding's has it already: without the embedding the stage does not embed.
        if module is not None and not all(id(parameter) in held for parameter in module.parameters()):
            stage._modules[name] = module
    return stage


def find_schedule(name: str) -> Schedule:
    """Return what is known of the schedule.

    Raises:
        ValueError: If there is none of this name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no pipeline schedule {name!r}; schedules: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def split_into_stages(
    model: nn.Module,
    dims: ParallelDims,
    *,
    schedule: str = "1F1B",
    stages_per_rank: int | None = None,
    tied: Sequence[str] = (),
) -> tuple[dict[int, nn.Module], int]:
    """Return this rank's stages by index, and how many there are on all ranks together.

    Args:
        model: See `make_stage`; on the meta device nothing is ever held that is not kept. Its attributes
            ``first_modules`` and ``last_modules`` name its children and its own parameters that belong to the first
            and to the last stage alone, where they are not ``FIRST`` and ``LAST``.
        stages_per_rank: 1 or 2 as the schedule needs by default; more for the interleaved ones.
        tied: Modules of the first stage whose parameters the last one needs too.

    Raises:
        ValueError: If layers, stages and schedule do not fit each other, a child with parameters belongs to no stage,
            or two stages have one parameter that is not tied.
    """
    every = all_stages(model, dims.pp, schedule=schedule, stages_per_rank=stages_per_rank, tied=tied)
    rank = dims.view("pp").get_local_rank()
    is_v_shaped = find_schedule(schedule).is_v_shaped
    mine = stages_of_rank(rank, dims.pp, len(every) // dims.pp, is_v_shaped=is_v_shaped)
    return {index: every[index] for index in mine}, len(every)


def all_stages(
    model: nn.Module, pp: int, *, schedule: str = "1F1B", stages_per_rank: int | None = None, tied: Sequence[str] = ()
) -> list[nn.Module]:
    """Return the stages of all ranks, as in `split_into_stages`: they hold parts of ``model``, and no copies."""
    kind = find_schedule(schedule)
    stages_per_rank = (2 if kind.is_looped else 1) if stages_per_rank is None else stages_per_rank
    is_allowed = stages_per_rank == 2 if kind.is_v_shaped else (stages_per_rank > 1) == kind.is_looped
    if stages_per_rank < 1 or not is_allowed:
        wanted = "2" if kind.is_v_shaped else "2 or more" if kind.is_looped else "1"
        raise ValueError(f"schedule {schedule} has {wanted} stages a rank, got stages_per_rank={stages_per_rank}")
    if tied and kind.is_v_shaped:
        raise ValueError(
            f"schedule {schedule} puts the first and the last stage on one rank, where tied weights are two "
            f"parameters; use tie_weights=False, or another schedule: "
            f"{', '.join(name for name, other in SCHEDULES.items() if not other.is_v_shaped)}"
        )
    first, last = getattr(model, "first_modules", FIRST), getattr(model, "last_modules", LAST)
    if both := sorted({*first} & {*last}):
        raise ValueError(
            f"first_modules and last_modules of {type(model).__name__} both name {both[0]}, which one stage has; name "
            "it in first_modules, and in tied_modules of the model too if the last stage needs it"
        )
    if unknown := [name for name in tied if name not in first]:
        raise ValueError(
            f"tied names modules of the first stage, got {unknown[0]!r}; those of {type(model).__name__} are "
            f"{', '.join(first)}"
        )
    _refuse_parts_of_every_stage(model, {"layers", *first, *last})
    num_stages = pp * stages_per_rank
    stages = [
        make_stage(
            model,
            layers,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            first=first,
            last=last,
            tied=tied,
        )
        for index, layers in enumerate(deal_layers(len(model.layers), num_stages))  # type: ignore[arg-type]
    ]
    if num_stages > 1:
        refuse_untied(stages, tied_parameters(stages[0], stages[-1], tied))
    return stages


def _refuse_parts_of_every_stage(model: nn.Module, known: Collection[str]) -> None:
    """A norm at the end whose name nobody knows would be applied by every stage, in the middle of the model."""
    own = [name for name, _ in model.named_parameters(recurse=False) if name not in known]
    others = [(name, child) for name, child in model.named_children() if name not in known]
    of_children = [name for name, child in others if any(True for _ in child.parameters())]
    if own or of_children:
        raise ValueError(
            f"a pipeline has to know which stage {', '.join(own + of_children)} of {type(model).__name__} belongs to, "
            f"or every stage would have it; name it {', '.join((*FIRST, *LAST))}, or list the names of your own "
            "modules and parameters in the model's attributes first_modules and last_modules, each with all of that "
            "stage"
        )


def check_zero_bubble(stages: nn.ModuleList, schedule: str) -> None:
    """Refuse stages whose backward cannot be taken apart, and warn of recomputation twice.

    Raises:
        NotImplementedError: If stages are compiled or checkpointed selectively.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    for name, module in stages.named_modules():
        if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule):
            raise NotImplementedError(
                f"schedule {schedule} takes the backward of a stage apart, which torch.compile does not allow, got "
                f"compiled {name}; use training.compile=false, or schedule 1F1B or Interleaved1F1B"
            )
    wrappers = [module for module in stages.modules() if isinstance(module, CheckpointWrapper)]
    if any("context_fn" in getattr(wrapper.checkpoint_fn, "keywords", {}) for wrapper in wrappers):
        raise NotImplementedError(
            f"schedule {schedule} goes through a stage's backward twice, once for the gradients of inputs and once for "
            "those of weights, and activation checkpointing 'selective' gives what it has saved only once; use 'full' "
            "or 'none' (activation_checkpointing.mode in a training job), or schedule 1F1B or Interleaved1F1B"
        )
    if wrappers:
        warnings.warn(
            f"schedule {schedule} with activation checkpointing recomputes the layers twice, once for the gradients of "
            "inputs and once for those of weights; 1F1B and Interleaved1F1B do so once",
            stacklevel=3,
        )
