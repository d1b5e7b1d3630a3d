"""Models of transformers that the training job has built, over the cp ranks of its mesh.

The job cuts rows itself, before the model sees them; what `prepare` says of a batch is said here of each forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from dtcp.integrations.transformers_attention import IMPLEMENTATION, Sequence, announce
from dtcp.integrations.transformers_checks import check_config, check_modules, warn_of_untested
from dtcp.integrations.transformers_positions import refuse_own_positions
from dtcp.layout import SequenceLayout, make_layout

if TYPE_CHECKING:
    from dtcp.documents import Documents
    from dtcp.mesh import ParallelDims
    from dtcp.models.transformers_model import TransformersModel


def attend_over(model: TransformersModel, dims: ParallelDims, **how: Any) -> None:
    """From now on have ``model`` attend over the cp ranks of a mesh; call `tell_sequence` before a forward.

    Args:
        dims: Built mesh, tp=1 and pp=1.
        how: ``strategy``, ``kernel`` and the like, of ``dtcp.context_parallel_attention``.

    Raises:
        NotImplementedError: If something of the model cannot be computed exactly on a cut sequence; names it.
    """
    hf = model.hf
    hf.set_attn_implementation(IMPLEMENTATION)
    check_config(hf, IMPLEMENTATION, dims)
    check_modules(hf)
    refuse_own_positions(hf)
    warn_of_untested(hf.config.model_type)
    model.on_forward = _Announcing(hf, dims, how)


def tell_sequence(model: TransformersModel, layout: SequenceLayout, documents: Documents | None) -> None:
    """Say how the tokens of the next forward are cut, and where their documents lie."""
    assert isinstance(model.on_forward, _Announcing), "attend_over comes first"
    model.on_forward.told = layout, documents


class _Announcing:
    """Lets a model's layers know, before each forward, what its tokens are a part of."""

    def __init__(self, hf: Any, dims: ParallelDims, how: dict[str, Any]) -> None:
        self.hf, self.dims, self.how = hf, dims, how
        self.told: tuple[SequenceLayout, Documents | None] | None = None

    def __call__(self, tokens: Tensor) -> None:
        # Never told on one rank: the tokens are whole rows of one document.
        layout, documents = self.told or (make_layout("contiguous", seq_len=tokens.size(1), cp=1), None)
        sequence = Sequence(self.dims, layout, documents, tokens.size(0), self.how, is_causal=True)
        announce(self.hf, sequence, {"input_ids": tokens})
