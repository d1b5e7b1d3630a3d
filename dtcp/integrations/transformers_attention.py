"""What transformers calls of dtcp's, and which batch the calls are about.

Shapes, in transformers' order: query (B, Hq, S_local, D), key (B, Hkv, S_local, D), value (B, Hkv, S_local, Dv).
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from dtcp.attention.api import context_parallel_attention
from dtcp.documents import PADDING, Documents
from dtcp.integrations.transformers_checks import refuse_kwargs
from dtcp.integrations.transformers_masks import Pattern, pattern_of
from dtcp.layout import SequenceLayout
from dtcp.replicas import refuse_ddp

if TYPE_CHECKING:
    from dtcp.mesh import ParallelDims

IMPLEMENTATION = "dtcp"


@dataclasses.dataclass(eq=False)
class Sequence:
    """What `prepare` has told of a batch.

    Attributes:
        documents: None where every row is one document without padding.
        how: Options of ``dtcp.context_parallel_attention``.
        is_causal: Whether a layer that sees the future is refused: the loss is of the next token.
        num_calls: Attention calls so far.
    """

    dims: ParallelDims
    layout: SequenceLayout
    documents: Documents | None
    batch_size: int
    how: dict[str, Any]
    is_causal: bool = False
    num_calls: int = 0
    _chunked: dict[int, Documents] = dataclasses.field(default_factory=dict)

    def documents_for(self, pattern: Pattern) -> Documents | None:
        """Where attention ends: at documents, and at their chunks."""
        if not pattern.chunk_size:
            return self.documents
        if pattern.chunk_size not in self._chunked:
            whole = self.documents or Documents.from_lengths([self.layout.seq_len])
            ids, places = (torch.atleast_2d(x) for x in (whole.ids, whole.positions()))
            ids = torch.where(ids < 0, PADDING, ids * self.layout.seq_len + places // pattern.chunk_size)
            self._chunked[pattern.chunk_size] = Documents.from_ids(ids)
        return self._chunked[pattern.chunk_size]


class _LayerMask:
    """What a layer gets for its attention mask: nothing dense. Kept by a checkpoint, which recomputes with its own.

    No dataclass: FSDP2 would make a new one of it and of all that is in it, where it casts the inputs of blocks.
    """

    def __init__(self, sequence: Sequence, pattern: Pattern) -> None:
        self.sequence, self.pattern = sequence, pattern

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _own_attention(getattr(func, "__name__", str(func)))

    def __getitem__(self, index: Any) -> Any:
        raise _own_attention("a part")

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "dim", "size", "to", "expand"):
            raise _own_attention(name)
        raise AttributeError(name)


def _own_attention(asked: str) -> NotImplementedError:
    return NotImplementedError(
        f"the model computes with its attention mask itself (asks for {asked}), so its attention is not one that "
        "attn_implementation chooses; such models are not available on a cut sequence"
    )


# ---- what transformers calls -----------------------------------------------------------------------------------------


def mask_of_layer(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> _LayerMask:
    """Return what the layers of one kind mask, in transformers' ``AttentionMaskInterface``.

    Raises:
        RuntimeError: If the batch did not come from `prepare`.
        NotImplementedError: If the mask is of a kind that is not known, or there is a cache.
    """
    _refuse_compilation()
    sequence = _announced.get(id(config))
    if sequence is None:
        raise RuntimeError(_NOT_PREPARED)
    if kv_length != q_length or int(q_offset) or int(kv_offset):
        raise NotImplementedError(
            f"dtcp's attention has no cache of keys and no cross attention, got {q_length} queries from "
            f"{int(q_offset)} and {kv_length} keys from {int(kv_offset)}; use_cache=False, and another "
            "attn_implementation to generate"
        )
    _check_shape(sequence, batch_size, q_length)
    if attention_mask is not None:
        raise NotImplementedError(
            "the model makes an attention_mask of its own beside that of the batch, which dtcp cannot cut; give "
            "attention_mask to dtcp.integrations.transformers.prepare only"
        )
    assert mask_function is not None
    pattern = pattern_of(mask_function)
    if sequence.is_causal and not pattern.is_causal:
        raise NotImplementedError(
            "a layer of this model sees the tokens that it has to predict (it is no causal language model); give the "
            "job one that is, is_decoder=True in the config of some encoders"
        )
    return _LayerMask(sequence, pattern)


def attention_of_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return exact attention over the whole sequence, (B, S_local, Hq, Dv), in transformers' ``AttentionInterface``.

    Args:
        softcap: As in Gemma 2; the ``math`` kernel computes it.
        s_aux: Attention sinks, (Hq,), as in GPT-OSS.

    Raises:
        NotImplementedError: If the layer asks for something else.
    """
    _refuse_compilation()
    name = type(module).__name__
    if not isinstance(attention_mask, _LayerMask):
        got = "none" if attention_mask is None else f"a {type(attention_mask).__name__}"
        raise NotImplementedError(
            f"{name} gives its attention a mask that does not come from transformers.masking_utils (got {got}), so "
            "dtcp cannot know what it is of the whole sequence; models that call create_causal_mask are served"
        )
    if dropout:
        raise NotImplementedError(
            f"{name} drops attention weights with probability {dropout}, by a mask that would depend on the mesh; set "
            "attention_dropout (attn_pdrop, attention_probs_dropout_prob) to 0.0 in the config"
        )
    refuse_kwargs(name, kwargs)
    sequence, pattern = attention_mask.sequence, attention_mask.pattern
    _check_shape(sequence, query.size(0), query.size(2), key.size(2))
    mesh = sequence.dims.view("cp")
    if mesh.size() > 1:
        refuse_ddp(mesh.get_group().group_name)
    sequence.num_calls += 1
    out = context_parallel_attention(
        query, key, value, mesh=mesh, layout=sequence.layout, is_causal=pattern.is_causal,
        window_size=pattern.window_size, documents=sequence.documents_for(pattern), sinks=s_aux, softcap=softcap,
        scale=scaling, enable_gqa=key.size(1) != query.size(1), **sequence.how,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, attention_of_layer)
AttentionMaskInterface.register(IMPLEMENTATION, mask_of_layer)

_NOT_PREPARED = (
    "this batch did not come from dtcp.integrations.transformers.prepare, so its tokens have no places in the whole "
    "sequence; call model(**prepare(model, batch, dims)). To generate, or to use a model on one device, choose another "
    "attention: model.set_attn_implementation('sdpa')"
)

# By the id of a config, which is what a mask function is given.
_announced: dict[int, Sequence] = {}


def _refuse_compilation() -> None:
    """Raise while a graph is traced, which would keep this batch's documents and layout for all that follow.

    Without ``fullgraph=True`` Dynamo leaves what raises uncompiled, and calls it as it is.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "attention of transformers' models over a cut sequence is not compiled; leave torch.compile out, or "
            "compile parts of the model without attention, its feed-forward modules say"
        )


def _check_shape(sequence: Sequence, batch_size: int, *lengths: int) -> None:
    expected = sequence.batch_size, sequence.layout.local_seq_len
    for length in lengths:
        if (batch_size, length) != expected:
            raise RuntimeError(
                f"attention has {batch_size} rows of {length} tokens, and the batch that was prepared last has "
                f"{expected[0]} rows of {expected[1]} on this rank; {_NOT_PREPARED}"
            )


# ---- one forward for each prepared batch -----------------------------------------------------------------------------

# (tokens, what they are a part of), of batches that were prepared and may still run.
_prepared: deque[tuple[weakref.ref[Tensor], Sequence]] = deque(maxlen=256)


def announce(base: Any, sequence: Sequence, inputs: Mapping[str, Any]) -> None:
    """Let ``base`` know of a batch that it may be given."""
    watch = _watches.get(base)
    if watch is None:
        watch = _watches[base] = _Watch()
        base.register_forward_pre_hook(watch.before, with_kwargs=True)
        base.register_forward_hook(watch.after, always_call=True)
        inner = getattr(base, "base_model", base)
        if inner is not base:  # called without its head
            inner.register_forward_pre_hook(watch.before_inner, with_kwargs=True)
    watch.configs = {id(module.config): module.config for module in base.modules() if hasattr(module, "config")}
    for key, config in watch.configs.items():
        if key not in _announced:
            weakref.finalize(config, _announced.pop, key, None)
        _announced[key] = sequence
    tokens = inputs.get("input_ids")
    _prepared.append((weakref.ref(inputs["inputs_embeds"] if tokens is None else tokens), sequence))


class _Watch:
    """Sees to it that a model is given batches that were prepared, and that its layers attend by dtcp."""

    def __init__(self) -> None:
        self.configs: dict[int, Any] = {}
        self._running: Sequence | None = None
        self._calls_before = 0

    def before(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if base.config._attn_implementation != IMPLEMENTATION:
            return
        given = dict(zip(inspect.signature(base.forward).parameters, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        sequence = _find(given.get("inputs_embeds") if tokens is None else tokens)
        if sequence is None or given.get("position_ids") is None:
            raise RuntimeError(_NOT_PREPARED)
        _refuse_inputs(given)
        for key in self.configs:
            _announced[key] = sequence
        self._running, self._calls_before = sequence, sequence.num_calls

    def before_inner(self, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running is None:
            self.before(inner, args, kwargs)
            self._running = None

    def after(self, base: Any, args: tuple[Any, ...], output: Any) -> None:
        sequence, self._running = self._running, None
        if sequence is None or output is None:  # None: the forward has raised
            return
        config = base.config.get_text_config() if hasattr(base.config, "get_text_config") else base.config
        layers, calls = getattr(config, "num_hidden_layers", None), sequence.num_calls - self._calls_before
        if calls == 0 or (layers is not None and calls % layers):
            raise NotImplementedError(
                f"{type(base).__name__} has {layers} layers and asked dtcp for attention {calls} times: the others mix "
                "the tokens of a rank by something else (attention of their own, a recurrence), which is not what the "
                "model does; such models are not available"
            )


def _find(tokens: Any) -> Sequence | None:
    """What was prepared with these tokens, or with those that they are a view of, as wrappers make them."""
    if not isinstance(tokens, Tensor):
        return None
    for reference, sequence in reversed(_prepared):
        prepared = reference()
        if prepared is not None and (
            prepared is tokens
            or (prepared.shape == tokens.shape and prepared.data_ptr() == tokens.data_ptr() and tokens.numel() > 0)
        ):
            return sequence
    return None


def _refuse_inputs(given: Mapping[str, Any]) -> None:
    for name in ("labels", "attention_mask"):
        if given.get(name) is not None:
            raise ValueError(
                f"{name} must not be given to a model with a cut sequence, which would "
                f"{'shift them within a part of it' if name == 'labels' else 'take it for one of a whole'}; they "
                "belong into the batch that prepare gets, and the loss is batch.loss(model(**batch).logits)"
            )
    for name in ("output_attentions", "use_cache"):
        if given.get(name):
            raise NotImplementedError(f"{name}=True is not available with a cut sequence; leave it out")


_watches: weakref.WeakKeyDictionary[Any, _Watch] = weakref.WeakKeyDictionary()
