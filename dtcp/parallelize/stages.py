"""Cut a model by layers into the stages of a pipeline.

A stage is the model itself with only some of its layers. Its forward has to take the residual stream where it has no
embedding, and give it back where it has no head, as `dtcp.models` do.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

from torch import nn

FIRST = ("token_embedding", "position_embedding", "embedding_dropout")
LAST = ("final_norm", "head")


def deal_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage: consecutive, sizes that differ by one at most.

    Middle stages have the layer more, if there is one: embedding and head cost the ends something already.

    Raises:
        ValueError: If a stage would have no layer.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers are too few for {num_stages} pipeline stages: each needs one; use a smaller mesh.pp, "
            "or a schedule with one stage a rank (1F1B)"
        )
    size, num_larger = divmod(num_layers, num_stages)
    first_larger = (num_stages - num_larger) // 2
    sizes = [size + (first_larger <= i < first_larger + num_larger) for i in range(num_stages)]
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(num_stages)]


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
        is_first: Whether to keep the modules named in ``first``.
        is_last: Whether to keep those named in ``last``.
        tied: Of ``first``, those whose weights the last stage needs too.

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
    dropped = {*(() if is_first else first), *(() if is_last else last)} - {*(tied if is_last else ())}
    for name in dropped & set(stage._modules):
        stage._modules[name] = None
    stage.layers = nn.ModuleDict({str(i): blocks[str(i)] for i in layers})
    return stage
