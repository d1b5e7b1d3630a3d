"""Context parallelism as an entry of a ``parallelize_module`` plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

import dtcp.attention.sharding  # DTensor is loaded here: teach it the attention ops
import dtcp.dispatch.entry  # noqa: F401  # what it remembers at a checkpoint, also at those before the first context
from dtcp.attention.api import check_kernel, is_plain, prepare_inputs, report_refusal
from dtcp.attention.arguments import ResolvedStrategy, check_format, check_strategy, resolved_strategy
from dtcp.attention.dropout import CallDropout, check_probability
from dtcp.attention.kernels import KERNEL_NAMES
from dtcp.attention.masks import check_mask_shapes, checked_masks
from dtcp.attention.ops import attention_forward
from dtcp.attention.predict import Rates
from dtcp.attention.scores import CallMasks, MaskMod
from dtcp.collectives import check_mesh
from dtcp.dispatch.dtensors import attend_over_group
from dtcp.dispatch.frames import current
from dtcp.documents import Documents, check_documents
from dtcp.dropout import AttentionDropout, ModelWithDropout
from dtcp.dtensor import is_dtensor, local_part
from dtcp.layout import SequenceLayout, is_same_layout
from dtcp.mask import NO_WINDOW, check_window
from dtcp.parallelize.own_forward import check_own_forward
from dtcp.parallelize.unmatched import refuse_unmatched_entries
from dtcp.recompute import restored_in_recomputation
from dtcp.replicas import refuse_ddp


@dataclass(frozen=True, slots=True)
class _Plan:
    """What stays the same from step to step for one module."""

    group_name: str
    cp: int
    is_causal: bool | None  # None: as the module's attribute says when it is called
    strategy: ResolvedStrategy
    kernel: str
    window_size: tuple[int, int] | None  # None: as the module's attribute says, no window if it has none
    softcap: float | None
    mask_mod: Tensor | None  # a handle


class ContextParallel(ParallelStyle):
    """Make a module ``forward(query, key, value)`` attend over the whole sequence.

    ``parallelize_module(block, mesh["cp"], {"attention.sdpa": ContextParallel(strategy="ring")})``, then
    ``set_sequence(model, layout)`` before each step. The module takes and gives (B, H, S_local, D) in layout
    order, or (B, S_local, H, D) with ``qkv_format="bshd"``; query heads may be a multiple of key heads. With one
    cp rank its own forward runs. A plan key that matches no module is a ValueError of ``parallelize_module``.

    A module that is an `AttentionDropout`, as those of the models here are, takes the tokens' keys as a fourth argument
    ``dropout_keys`` and drops the same weights on any mesh.

    Args:
        strategy, ulysses_degree, ranks_per_node, kv_grad_dtype, rates, kernel, qkv_format: As in
            ``context_parallel_attention``.
        is_causal: Whether the module masks the future; None reads the module's attribute ``is_causal`` at each call.
        scale: Of the scores; None is 1/√D.
        window_size: Of the module's attention; None reads its attribute ``window_size`` at each call, and is no window
            if it has none.
        softcap, mask_mod: As in ``context_parallel_attention``.

    Sinks, slopes and a bias, those of this rank's heads, are passed with the call:
    ``attention(q, k, v, sinks=..., alibi_slopes=..., attn_bias=...)``. Documents and key padding are told by
    ``set_sequence``.
    """

    def __init__(
        self,
        *,
        strategy: str = "ring",
        ulysses_degree: int | None = None,
        ranks_per_node: int | None = None,
        kv_grad_dtype: torch.dtype | None = None,
        rates: Rates | None = None,
        kernel: str = "auto",
        is_causal: bool | None = None,
        scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        softcap: float | None = None,
        mask_mod: MaskMod | None = None,
        qkv_format: str = "bhsd",
    ) -> None:
        super().__init__()
        masks = checked_masks(
            is_causal=bool(is_causal), window_size=window_size or NO_WINDOW, mask_mod=mask_mod, softcap=softcap
        )
        self.window_size, self.softcap, self.mask_mod = window_size, softcap, mask_mod
        self._mask_mod_handle = masks.mask_mod
        check_strategy(strategy, ulysses_degree, rates, ranks_per_node, kv_grad_dtype)
        check_format(qkv_format)
        if kernel not in KERNEL_NAMES:
            raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {kernel!r}")
        self.strategy, self.ulysses_degree = strategy, ulysses_degree
        self.ranks_per_node, self.kv_grad_dtype, self.rates = ranks_per_node, kv_grad_dtype, rates
        self.kernel, self.is_causal = kernel, is_causal
        self.scale, self.qkv_format = scale, qkv_format

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh, "ContextParallel")
        if isinstance(module, _ContextParallelModule):
            raise ValueError(f"{type(module).__name__} is context parallel already; give one plan entry for it")
        is_causal = getattr(module, "is_causal", None) if self.is_causal is None else self.is_causal
        if not isinstance(is_causal, bool):
            raise ValueError(
                f"ContextParallel cannot tell whether {type(module).__name__} is causal; pass "
                "ContextParallel(is_causal=True) or False"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} has a forward of its own instance (by torch.compile, or a library that "
                "replaces it), which would hide the context parallel one; apply the plan before, or undo it: "
                "del module.forward"
            )
        if isinstance(module, AttentionDropout):
            _check_dropout(module, self.kernel)
        window = getattr(module, "window_size", NO_WINDOW) if self.window_size is None else self.window_size
        check_window(window, is_causal)
        check_own_forward(
            module, self.qkv_format, is_causal=is_causal, scale=self.scale, window_size=window, softcap=self.softcap,
            mask_mod=self.mask_mod,
        )  # fmt: skip
        group_name = device_mesh.get_group().group_name
        how = resolved_strategy(
            self.strategy, self.ulysses_degree, device_mesh.size(), rates=self.rates,
            ranks_per_node=self.ranks_per_node, kv_grad_dtype=self.kv_grad_dtype,
        )  # fmt: skip
        module._dtcp_plan = _Plan(  # type: ignore[assignment]
            group_name, device_mesh.size(), self.is_causal, how, self.kernel, self.window_size, self.softcap,
            self._mask_mod_handle,
        )  # fmt: skip
        module._dtcp_scale, module._dtcp_format = self.scale, self.qkv_format  # type: ignore[assignment]
        module._dtcp_state, module._dtcp_is_plain = None, False  # type: ignore[assignment]
        module._dtcp_documents = module._dtcp_key_lengths = None  # type: ignore[assignment]
        # A subclass rather than a replaced `forward`: state dict, hooks, wrappers and Dynamo see an ordinary module.
        module.__class__ = _context_parallel_class(type(module))  # type: ignore[arg-type]  # mypy: no Hashable in nn.Module
        return module


refuse_unmatched_entries(ContextParallel)


def _check_dropout(module: AttentionDropout, kernel: str) -> None:
    check_probability(module.p)
    if module.p > 0 and kernel not in ("auto", "math"):
        raise ValueError(
            f"ContextParallel(kernel={kernel!r}) for {type(module).__name__} with dropout {module.p}: that kernel "
            "draws its masks, which would depend on the mesh; use kernel='auto' or 'math', or dropout 0"
        )


class _ContextParallelModule(nn.Module):
    """Mixed in before a module's own class."""

    _dtcp_plan: _Plan
    _dtcp_scale: float | None
    _dtcp_format: str
    _dtcp_state: Tensor | None
    _dtcp_is_plain: bool
    _dtcp_documents: Tensor | None
    _dtcp_key_lengths: Tensor | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has to be told its own sequence: only then is it among those that a recomputation restores.
        self._dtcp_state, self._dtcp_is_plain = None, False
        self._dtcp_documents = self._dtcp_key_lengths = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made here and has no name that pickle could find it by.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_module, (type(self).__mro__[2],), *reduced[2:]

    @property
    def _dtcp_is_causal(self) -> bool:
        is_causal = self._dtcp_plan.is_causal
        return bool(self.is_causal) if is_causal is None else is_causal

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_keys: Tensor | None = None, **learned: Tensor | None
    ) -> Tensor:
        if self._dtcp_is_plain:
            # Only a module that may drop takes keys.
            return super().forward(query, key, value, *() if dropout_keys is None else (dropout_keys,), **learned)
        if unknown := set(learned) - {"sinks", "alibi_slopes", "attn_bias"}:
            raise TypeError(
                f"{type(self).__name__} is context parallel and got {', '.join(sorted(unknown))}, which would be left "
                "out; it takes sinks=, alibi_slopes= and attn_bias="
            )
        if self._dtcp_state is None:
            raise RuntimeError(
                f"{type(self).__name__} does not know the sequence; call dtcp.set_sequence(model, layout) before the "
                "step"
            )
        plan, state = self._dtcp_plan, self._dtcp_state
        if not torch.compiler.is_compiling():
            state = _state_in_context(plan, state, self._dtcp_documents)
            refuse_ddp(plan.group_name)
        if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
            return self._attend_dtensors(query, key, value, dropout_keys, learned)
        try:
            query, key, value, scale = prepare_inputs(
                query, key, value, scale=self._dtcp_scale, enable_gqa=True, qkv_format=self._dtcp_format
            )
            dropout = self._dtcp_dropout(dropout_keys, query)
            masks = self._dtcp_masks(learned, query.size(2))
            check_mask_shapes(masks, query.size(0), query.size(2), query.size(1))
            check_kernel(plan.kernel, query, value, scale, 0.0 if dropout is None else dropout.p, masks)
        except (ValueError, NotImplementedError) as error:
            report_refusal(error, plan.group_name, query)
            raise
        out, _ = attention_forward(
            query, key, value, state, state, plan.group_name, self._dtcp_is_causal, scale, plan.strategy, plan.kernel,
            dropout, masks,
        )  # fmt: skip
        return out.transpose(1, 2) if self._dtcp_format == "bhsd" else out

    def _dtcp_masks(self, learned: Mapping[str, Tensor | None], num_heads: int) -> CallMasks:
        """What a call masks and adds; ``learned`` are its sinks, slopes and bias, ``num_heads`` those of this rank."""
        plan = self._dtcp_plan
        window = getattr(self, "window_size", NO_WINDOW) if plan.window_size is None else plan.window_size
        sinks, slopes, bias = (
            None if (x := learned.get(name)) is None else local_part(x)
            for name in ("sinks", "alibi_slopes", "attn_bias")
        )
        masks = checked_masks(
            is_causal=self._dtcp_is_causal, window_size=window, softcap=plan.softcap, sinks=sinks, alibi_slopes=slopes,
            attn_bias=bias, head_offset=getattr(self, "head_shard", 0) * num_heads,
        )  # fmt: skip
        return masks._replace(
            documents=self._dtcp_documents, key_lengths=self._dtcp_key_lengths, mask_mod=plan.mask_mod
        )

    def _dtcp_dropout(self, keys: Tensor | None, query: Tensor) -> CallDropout | None:
        """What a call of ``query`` (B, S_local, Hq, D) drops."""
        if not isinstance(self, AttentionDropout):
            if keys is not None:
                raise ValueError(
                    f"dropout_keys for {type(self).__name__}, which is no AttentionDropout and drops nothing; derive "
                    "its class from dtcp.AttentionDropout, or leave them out"
                )
            return None
        keys = self.call_keys(keys, query)
        return None if keys is None else CallDropout(self.p, keys, self.head_shard * query.size(2))

    def _attend_dtensors(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_keys: Tensor | None,
        learned: Mapping[str, Tensor | None],
    ) -> Tensor:
        """Each rank its heads and rows."""
        is_swapped = self._dtcp_format == "bshd"
        by_position = query if is_swapped else query.transpose(1, 2)
        dropout = self._dtcp_dropout(dropout_keys, by_position.to_local())  # type: ignore[attr-defined]
        if is_swapped:
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        plan, state = self._dtcp_plan, self._dtcp_state
        assert state is not None
        names = plan.group_name, plan.strategy, plan.kernel, ""
        masks = self._dtcp_masks(learned, by_position.to_local().size(2))  # type: ignore[attr-defined]
        out = attend_over_group(
            names, state, masks, dropout, query, key, value, None, self._dtcp_is_causal, self._dtcp_scale, True
        )
        return out.transpose(1, 2) if is_swapped else out


def _state_in_context(plan: _Plan, state: Tensor, documents: Tensor | None) -> Tensor:
    """What a planned module attends by, inside a context over the same ranks: its calls count as the context's.

    Raises:
        ValueError: If the two have different layouts or documents, or the context masks by something else.
    """
    frame = current.frame
    if frame is None or frame.is_plain or frame.group_name != plan.group_name:
        return state
    if not is_same_layout(frame.state, state):
        raise ValueError(
            f"a planned module was told another sequence by set_sequence than the context_parallel around it has "
            f"({frame.layout.name}, {frame.layout.seq_len} tokens); use set_sequence(model, cp.layout) inside it, or "
            "the plan without a context"
        )
    theirs = frame.masks.documents
    if (theirs is None) != (documents is None) or (
        theirs is not None and documents is not None and not torch.equal(theirs, documents)
    ):
        raise ValueError(
            "a planned module and the context_parallel around it know of different documents; give both the same: "
            "set_sequence(model, cp.layout, documents=documents)"
        )
    if not frame.masks._replace(documents=None).are_none:
        raise ValueError(
            "a planned module does not see the masks of the context_parallel around it (window_size, key_lengths, "
            "mask_mod, sinks, alibi_slopes, softcap); give them to the plan and to set_sequence"
        )
    return frame.state


def _new_module(cls: type[nn.Module]) -> nn.Module:
    made = _context_parallel_class(cls)  # type: ignore[arg-type]  # mypy: no Hashable in nn.Module
    return made.__new__(made)


@functools.cache
def _context_parallel_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"ContextParallel{cls.__name__}", (_ContextParallelModule, cls), {})


def set_sequence(
    model: nn.Module,
    layout: SequenceLayout,
    documents: Documents | None = None,
    step: int | None = None,
    rows: Sequence[int] | Tensor | None = None,
    *,
    key_lengths: Tensor | Sequence[int] | None = None,
) -> None:
    """Tell the context parallel modules of ``model``, and what drops, what comes next. Call it before each microbatch.

    Costs no recompilation: modules hold the layout as a tensor of constant shape. A backward, and a recomputation
    within it, uses the layout, step and rows of its own forward.

    Args:
        layout: Who holds which tokens of the sequence.
        documents: Of this microbatch's rows: a token sees its own document only, on one cp rank too.
        step: Optimizer step, for models whose forward computes the keys of their `Dropout` modules, and of what drops
            attention weights; ``dropout_seed`` of the model is their seed. None, without rows: dropout is told nothing.
        rows: Rows of the global batch that this rank holds, for the same. None: rows 0 to B - 1, all that there are.
        key_lengths: Tokens of each row that are no padding, as in ``context_parallel_attention``.

    Raises:
        ValueError: If no module of ``model`` is context parallel and nothing is told to a dropout; if the layout is
            for another cp degree; if the model drops and ``step`` is given without the rows, while the ranks are more
            than hold one sequence.
    """
    if check_documents(documents) is not None:
        documents.check_fits(layout.seq_len)  # type: ignore[union-attr]
    elif layout.placed_by is not None:
        raise ValueError(
            "a per_document layout says where documents lie, and set_sequence got none; pass "
            "set_sequence(model, layout, documents=layout.documents)"
        )
    lengths = checked_masks(is_causal=False, key_lengths=key_lengths).key_lengths
    modules = [module for module in model.modules() if isinstance(module, _ContextParallelModule)]
    if step is None and rows is not None:
        step = 0
    with_dropout = [module for module in model.modules() if isinstance(module, ModelWithDropout) and module.has_dropout]
    if not modules and (step is None or not with_dropout):
        raise ValueError(
            "set_sequence found no context parallel module; give ContextParallel to parallelize_module for the "
            "module that attends, for instance {'attention.sdpa': dtcp.ContextParallel()}"
        )
    _check_rows(with_dropout, layout, step, rows)
    for module in modules:
        if module._dtcp_plan.cp != layout.cp:
            raise ValueError(
                f"the layout is for cp={layout.cp}, the model was parallelized over {module._dtcp_plan.cp} ranks; "
                f"make it with cp={module._dtcp_plan.cp}"
            )
        restored_in_recomputation(module, ("_dtcp_state", "_dtcp_is_plain", "_dtcp_documents", "_dtcp_key_lengths"))
        module._dtcp_state = layout.state
        module._dtcp_documents = None if documents is None else documents.state
        module._dtcp_key_lengths = lengths
        module._dtcp_is_plain = is_plain(layout, layout) and documents is None and lengths is None
    for source in with_dropout:
        source.set_dropout_step(step, rows)


def _check_rows(
    models: list[ModelWithDropout], layout: SequenceLayout, step: int | None, rows: Sequence[int] | Tensor | None
) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if step is not None and rows is None and world != layout.cp and any(model.training for model in models):
        raise ValueError(
            f"on {world} ranks with cp={layout.cp} dropout has to know which rows of the global batch this rank holds, "
            "got rows=None; pass set_sequence(..., rows=range(first_row, first_row + B))"
        )
