"""Hugging Face transformers' models over a cut sequence: ``attn_implementation="dtcp"``, by transformers' interfaces.

    import dtcp.integrations.transformers as dtcp_hf

    model = AutoModelForCausalLM.from_config(config, attn_implementation="dtcp")
    for batch in loader:                                 # whole rows, the same on every rank of the cp axis
        batch = dtcp_hf.prepare(model, batch, dims)      # this rank's part
        loss = batch.loss(model(**batch).logits)         # its share: the sum over dims.view("loss") is the mean
        loss.backward()
        dtcp.reduce_gradients(model, dims)

Importing this module registers ``"dtcp"``. Models are not changed: what a layer masks is read from what the model tells
transformers about it, and where documents lie from the whole batch, before it is cut.

Shapes: B rows, S tokens of a row, S_local of them on a rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtcp.documents import PADDING, Documents
from dtcp.integrations.transformers_attention import IMPLEMENTATION, Sequence, announce
from dtcp.integrations.transformers_checks import (
    check_config,
    check_modules,
    check_rotary,
    check_temperature,
    has_shifted_labels,
    shifts_labels,
    warn_of_untested,
)
from dtcp.integrations.transformers_positions import default_positions, refuse_own_positions
from dtcp.layout import SequenceLayout, make_layout
from dtcp.loss import IGNORED, count_valid_tokens, token_loss
from dtcp.shard import check_same_batch, shard
from dtcp.shard import shift_labels as shift_labels_of

if TYPE_CHECKING:
    from dtcp.mesh import ParallelDims


class PreparedBatch(dict[str, Any]):
    """What ``model(**batch)`` takes: this rank's part of a batch. Labels are kept apart, since they are shifted.

    Attributes:
        labels: Target of each token here, int64 (B, S_local), −100 where there is none; None without labels.
        layout: Who holds which tokens.
        num_valid_tokens: What the loss is divided by: targets of all ranks of ``dims.view("loss")``, 0-d, or what
            `prepare` was given; None without labels.
    """

    def __init__(
        self, inputs: Mapping[str, Any], labels: Tensor | None, layout: SequenceLayout, count: Tensor | int | None
    ) -> None:
        super().__init__(inputs)
        self.labels, self.layout, self.num_valid_tokens = labels, layout, count

    def loss(self, logits: Tensor, *, num_valid_tokens: Tensor | int | None = None) -> Tensor:
        """Return this rank's share of the loss: the sum over the ranks of ``dims.view("loss")`` is the mean.

        Args:
            logits: (B, S_local, V), of this batch.
            num_valid_tokens: The divisor, where several batches make one step: the sum of theirs.

        Raises:
            ValueError: If the batch had no labels.
        """
        if self.labels is None:
            raise ValueError("this batch has no loss, since it had no labels; give prepare a batch with labels")
        count = self.num_valid_tokens if num_valid_tokens is None else num_valid_tokens
        return token_loss(logits, self.labels, num_valid_tokens=count)


def prepare(
    model: nn.Module,
    batch: Mapping[str, Any],
    dims: ParallelDims,
    *,
    layout: str | SequenceLayout = "head_tail",
    documents: Documents | None = None,
    shift_labels: bool | None = None,
    num_valid_tokens: Tensor | int | None = None,
    pad_value: int = 0,
    **how: Any,
) -> PreparedBatch:
    """Return this rank's part of ``batch``, and tell ``model`` what it is a part of. Collective over the mesh.

    Args:
        model: With ``attn_implementation="dtcp"``; also one that peft, FSDP2 or gradient checkpointing has changed.
        batch: Tensors of whole rows, (B, S, …), the same on every rank of the cp axis: ``input_ids`` or
            ``inputs_embeds``, and maybe ``labels`` (by token, as transformers has them: not shifted), ``position_ids``
            (which restart where a document begins), ``attention_mask`` (0 at padding), ``token_type_ids``.
        dims: Built mesh with tp=1 and pp=1.
        layout: Name for ``dtcp.make_layout``, or a layout of this sequence.
        documents: Where documents lie, instead of by ``position_ids``; without ``position_ids`` positions restart with
            each.
        shift_labels: Whether the target of a token is the label of the next one; None asks the model: yes for causal
            language models, no for masked ones.
        num_valid_tokens: What the loss is divided by, where several batches make one step: the sum of their
            `count_targets`, over ``dims.view("batch")``. None: the targets of this batch on all ranks, counted here.
        pad_value: Token that fills a sequence that does not divide. Nothing sees it, and it has no label.
        how: ``strategy``, ``ulysses_degree``, ``ranks_per_node``, ``kv_grad_dtype``, ``rates`` and ``kernel`` of
            ``dtcp.context_parallel_attention``.

    Raises:
        ValueError: If model, batch and mesh do not fit together, ranks have different batches, or the batch was cut or
            its labels shifted before.
        NotImplementedError: If something of the model cannot be computed exactly on a cut sequence.
    """
    base = _base(model)
    check_config(base, IMPLEMENTATION, dims)
    check_modules(base)
    warn_of_untested(base.config.model_type)
    _check_how(how)
    if isinstance(batch, PreparedBatch):
        raise ValueError("this batch is cut already; give prepare the whole rows, once")
    shape = _whole_shape(batch)
    mesh = dims.view("cp")
    check_same_batch({name: x for name, x in batch.items() if isinstance(x, Tensor)}, mesh)
    documents, positions = _documents(base, batch, documents, shape)
    check_rotary(base, int(positions.max()) + 1)
    check_temperature(base, shape[1])
    whole = _make_layout(layout, shape[1], dims.cp, documents)
    labels = _labels(base, batch, documents, shift_labels)
    _check_inputs(batch, shape)
    inputs = {name: x for name, x in batch.items() if name not in ("labels", "attention_mask")}
    inputs["position_ids"] = positions
    cut = {
        name: shard(x, mesh, whole, pad_value=pad_value if name == "input_ids" else 0) if isinstance(x, Tensor) else x
        for name, x in inputs.items()
    }
    if "use_cache" in inspect.signature(base.forward).parameters:
        cut["use_cache"] = False
    local_labels = None
    if labels is None:
        num_valid_tokens = None
    else:
        local_labels = shard(labels, mesh, whole, pad_value=IGNORED)
        if num_valid_tokens is None:
            num_valid_tokens = count_valid_tokens(local_labels, mesh=dims.view("loss"))
    announce(base, Sequence(dims, whole, documents, shape[0], how), cut)
    return PreparedBatch(cut, local_labels, whole, num_valid_tokens)


def count_targets(model: nn.Module, batch: Mapping[str, Any], documents: Documents | None = None) -> int:
    """Return the targets in whole rows, as `prepare` makes them: what several batches of one step are divided by.

    Raises:
        ValueError: If the batch has no labels.
    """
    base = _base(model)
    documents, _ = _documents(base, batch, documents, _whole_shape(batch))
    labels = _labels(base, batch, documents, None)
    if labels is None:
        raise ValueError(f"a batch without labels has no loss, got {sorted(batch)}")
    return int((labels != IGNORED).sum())


_HOW = ("strategy", "ulysses_degree", "ranks_per_node", "kv_grad_dtype", "rates", "kernel")


def _check_how(how: Mapping[str, Any]) -> None:
    if unknown := sorted({*how} - {*_HOW}):
        raise ValueError(f"prepare has no option {unknown[0]!r}; those of attention are {', '.join(_HOW)}")


def _base(model: nn.Module) -> Any:
    """The model inside of peft's."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    get_base_model: Any = getattr(model, "get_base_model", None)  # of peft
    found = model if get_base_model is None else get_base_model()
    if not hasattr(found, "config") or not hasattr(found, "set_attn_implementation"):
        raise ValueError(
            f"prepare needs a transformers model, got {type(model).__name__}; give it the model itself, not a wrapper"
        )
    return found


def _whole_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    given = [name for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)]
    if len(given) != 1 or batch[given[0]].ndim < 2:
        raise ValueError(f"prepare needs a batch with input_ids (B, S) or inputs_embeds (B, S, C), got {sorted(batch)}")
    batch_size, seq_len = batch[given[0]].shape[:2]
    return int(batch_size), int(seq_len)


_BY_TOKEN = ("input_ids", "inputs_embeds", "labels", "position_ids", "attention_mask", "token_type_ids")


def _check_inputs(batch: Mapping[str, Any], shape: tuple[int, int]) -> None:
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            if x is not None and name in ("past_key_values", "cache"):
                raise NotImplementedError(f"{name} is a cache of keys, which a cut sequence has none of; leave it out")
            continue
        if name not in _BY_TOKEN:
            raise NotImplementedError(
                f"prepare does not know how to cut {name} {tuple(x.shape)}; it knows {', '.join(_BY_TOKEN)}"
            )
        if tuple(x.shape[:2]) != shape and not (name == "position_ids" and tuple(x.shape) == (1, shape[1])):
            raise ValueError(f"{name} must be (B, S, …) = {shape}, as the tokens are, got {tuple(x.shape)}")


def _documents(
    base: nn.Module, batch: Mapping[str, Any], documents: Documents | None, shape: tuple[int, int]
) -> tuple[Documents | None, Tensor]:
    """Where documents and padding lie, and the position of each token, (B, S)."""
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    assert tokens is not None
    positions = batch.get("position_ids")
    if positions is not None and (positions.ndim != 2 or positions.size(1) != shape[1]):
        raise NotImplementedError(f"position_ids must be (B, S) = {shape}, got {tuple(positions.shape)}")
    if documents is not None:
        documents.check_fits(shape[1], shape[0])
    elif positions is not None:
        found = Documents.from_position_ids(positions)
        documents = found if found.num_documents > found.num_rows else None
    padding, whole = batch.get("attention_mask"), documents
    if padding is not None:
        documents = _padded(documents, padding, shape)
    if positions is None:
        positions = default_positions(base, batch, whole, shape[1]).to(tokens.device)
    else:
        refuse_own_positions(base)
    return documents, positions.expand(shape[0], -1)


def _padded(documents: Documents | None, attention_mask: Tensor, shape: tuple[int, int]) -> Documents | None:
    """The documents without the tokens that are padding."""
    if tuple(attention_mask.shape) != shape:
        raise NotImplementedError(
            f"attention_mask must be (B, S) = {shape} with 0 at padding, got {tuple(attention_mask.shape)}; say where "
            "documents lie by position_ids or documents="
        )
    mask = attention_mask.cpu()
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("attention_mask must be 0 or 1; numbers of documents belong into Documents.from_ids(...)")
    if bool(mask.all()):
        return documents
    ids = torch.zeros(shape, dtype=torch.int64) if documents is None else torch.atleast_2d(documents.ids)
    try:
        return Documents.from_ids(torch.where(mask.bool(), ids.expand(shape), PADDING))
    except ValueError as error:
        raise NotImplementedError(
            "attention_mask has 0 between tokens of one document; padding has to stand before or after it"
        ) from error


def _make_layout(layout: str | SequenceLayout, seq_len: int, cp: int, documents: Documents | None) -> SequenceLayout:
    if isinstance(layout, str):
        return make_layout(layout, seq_len=seq_len, cp=cp, documents=documents)
    if (layout.seq_len, layout.cp) != (seq_len, cp):
        raise ValueError(
            f"the layout is of {layout.seq_len} tokens over cp={layout.cp}, and the batch has {seq_len} over cp={cp}"
        )
    return layout


def _labels(
    base: nn.Module, batch: Mapping[str, Any], documents: Documents | None, shift: bool | None
) -> Tensor | None:
    """Targets by token of whole rows."""
    labels = batch.get("labels")
    if labels is None:
        return None
    if (padding := batch.get("attention_mask")) is not None and bool(((padding == 0) & (labels != IGNORED)).any()):
        raise ValueError(f"padding has labels: where attention_mask is 0, labels must be {IGNORED}")
    if not (shifts_labels(base) if shift is None else shift):
        return labels
    tokens = batch.get("input_ids")
    if tokens is not None and has_shifted_labels(tokens, labels):
        raise ValueError(
            "labels are shifted already: the label of a token is the next one; give them by token, as transformers "
            "has them, or say shift_labels=False"
        )
    return shift_labels_of(labels, labels, documents)
