"""The uncut model on one rank: its loss and gradients, right ones and those of known faults.

Written without the library's own loss, layouts in the model or attention, so that a fault of those shows.
Shapes: G rows of the whole batch, S = seq_len, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtcp.doctor.alone import alone
from dtcp.doctor.dense import Within, attend_densely, confined
from dtcp.loss import IGNORED


@dataclass(frozen=True, slots=True)
class Batch:
    """All rows of the step, whole."""

    tokens: Tensor  # int64 (G, S)
    labels: Tensor  # int64 (G, S)
    positions: Tensor  # int64 (G, S)
    more: Mapping[str, Tensor]  # what else the model takes, by rows
    documents: Tensor | None = None  # int64 (G, S), of each token; None: a row is one text


@dataclass(frozen=True, slots=True)
class Outcome:
    """A loss and the gradient of every parameter, by plain name, in the dtype of the weights."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def grad_norm(self) -> float:
        """2-norm of all gradients together."""
        return float(sum(g.double().square().sum() for g in self.gradients.values()) ** 0.5)


@dataclass(frozen=True, slots=True)
class Fault:
    """What one rank has to do otherwise to look like a faulty job.

    Attributes:
        hint: What the fault is, and the cure.
        token_weights: Of each token's loss, (G, S); None: one divided by all valid tokens.
        tokens, labels, positions: Instead of the batch's.
        parts: Which rank holds each token, (1, S) or (G, S); attention number ``layer`` sees tokens of the same part
            only.
        scaled: Biases that are added ``factor`` times.
        crosses_documents: Attention sees the tokens of other documents.
        sees_world: The model is told the job's number of ranks where it asks for it.
    """

    hint: str
    token_weights: Tensor | None = None
    tokens: Tensor | None = None
    labels: Tensor | None = None
    positions: Tensor | None = None
    parts: Tensor | None = None
    layer: int = -1
    scaled: frozenset[str] = frozenset()
    factor: float = 1.0
    crosses_documents: bool = False
    sees_world: bool = False


RIGHT = Fault("")
EVERY = -2  # attention call


class Reference:
    """A whole model with the job's weights, to be run as often as there are suspicions."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], batch: Batch) -> None:
        """Take the weights.

        Args:
            model: Of plain tensors; its parameters have the keys of ``weights`` as names.
            weights: Of the job, whole.
        """
        self.batch = batch
        self.model = model
        attend_densely(model, has_documents=batch.documents is not None)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if weights[name].shape != parameter.shape:
                    raise ValueError(
                        f"{name} is {tuple(parameter.shape)} in the model, {tuple(weights[name].shape)} on all "
                        "ranks together: a plan has cut it without making it a DTensor; use distribute_tensor, or a "
                        "style of torch.distributed.tensor.parallel"
                    )
                parameter.copy_(weights[name])
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def run_in(self, dtype: torch.dtype) -> Outcome:
        """`run` in another dtype; not of a copy, which would lose hooks that the model has on its parameters."""
        held = [*self.model.parameters(), *self.model.buffers()]
        before = [x.clone() for x in held]
        self.model.to(dtype)
        try:
            with torch.enable_grad():
                return self.run()
        finally:
            for x, value in zip([*self.model.parameters(), *self.model.buffers()], before, strict=True):
                x.data = value

    def run(self, fault: Fault = RIGHT, *, num_at_once: int = 1) -> Outcome:
        """Forward and backward, so many rows at a time: their gradients are added in float32 at least."""
        labels = self.batch.labels if fault.labels is None else fault.labels
        weights = even_weights(labels) if fault.token_weights is None else fault.token_weights
        total = 0.0
        gradients: dict[str, Tensor] = {}
        for row in range(0, labels.size(0), num_at_once):
            self.model.zero_grad(set_to_none=True)
            with alone(sees_world=fault.sees_world):
                loss = self._loss_of_rows(slice(row, row + num_at_once), labels, weights.to(labels.device), fault)
                loss.backward()
            total += float(loss.detach())
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    wide = parameter.grad.to(torch.promote_types(parameter.dtype, torch.float32))
                    gradients[name] = gradients[name] + wide if name in gradients else wide
        self.model.zero_grad(set_to_none=True)
        return Outcome(total, gradients)

    @functools.cached_property
    def outcome(self) -> Outcome:
        """The right one, in the dtype of the weights."""
        return self.run()

    def check_repeatable(self) -> list[str]:
        """Return the buffers that a forward changes and does not read.

        Raises:
            ValueError: If another run gives something else: then there is no gradient to compare.
        """
        outcome = self.outcome
        changed = [name for name, x in self.model.named_buffers() if not torch.equal(x, self._buffers[name])]
        gives_same = is_same(outcome, self.run())
        self._set_buffers(self._buffers)
        if changed:
            # What was changed by little may be read and make no difference this time.
            reads = not gives_same and is_same(self._run_anew(), self._run_anew())
            if reads or (gives_same and not is_same(outcome, self._run_anew(disturbed=changed))):
                raise ValueError(
                    f"the forward changes the buffer(s) {_first(changed)} and reads them, so it does not give the same "
                    "twice, and each rank changes them by its own tokens; update them after the step, from sums over "
                    "all ranks, or freeze them for the examination"
                )
        if not gives_same:
            raise ValueError(
                "the model does not give the same twice on one rank: it draws random numbers (F.dropout, randn), which "
                "would differ on every mesh, keeps something from one call to the next (a counter, a parameter that "
                "its forward changes: max_norm), or gives NaN; draw and keep nothing, or use dtcp.Dropout with keys"
            )
        return changed

    def _run_anew(self, disturbed: Sequence[str] = ()) -> Outcome:
        """`run` from the buffers of the start, some of them ``disturbed``; and leave them so."""
        generator = torch.Generator().manual_seed(0)
        noise = {n: torch.rand(self._buffers[n].shape, generator=generator) for n in disturbed}
        noisy = {n: (self._buffers[n] + x.to(self._buffers[n].device) + 0.5) for n, x in noise.items()}
        self._set_buffers(self._buffers | noisy)
        outcome = self.run()
        self._set_buffers(self._buffers)
        return outcome

    @torch.no_grad()
    def _set_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])

    @contextlib.contextmanager
    def keeping_buffers(self) -> Iterator[None]:
        """What the forward changes of them inside is undone."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            yield
        finally:
            self._set_buffers(before)

    def num_attention_calls(self) -> int:
        """How often a forward calls ``F.scaled_dot_product_attention``."""
        mode = AttentionMode()
        with mode:
            self.forward(slice(0, 1))
        return len(mode.callers)

    def count_attention_calls(self, blocks: Mapping[str, nn.Module]) -> dict[str, int]:
        """How often each block calls ``F.scaled_dot_product_attention`` when it is used first."""
        counts = dict.fromkeys(blocks, 0)
        mode = AttentionMode()
        handles = []
        entered: set[str] = set()

        def enter(name: str) -> None:
            mode.enter(None if name in entered else name)  # of a block that is used several times, the first use
            entered.add(name)

        for name, block in blocks.items():
            handles.append(block.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            handles.append(block.register_forward_hook(lambda *_: mode.enter(None)))
        with mode:
            self.forward(slice(0, 1))
        for handle in handles:
            handle.remove()
        for caller in mode.callers:
            if caller in counts:
                counts[caller] += 1
        return counts

    def _loss_of_rows(self, rows: slice, labels: Tensor, weights: Tensor, fault: Fault) -> Tensor:
        parts = fault.parts
        with AttentionMode(parts if parts is None or parts.size(0) == 1 else parts[rows], fault.layer):
            logits = self.forward(rows, fault)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), ignore_index=IGNORED, reduction="none")
        return (losses * weights[rows].flatten().to(losses.dtype)).sum()

    def forward(self, rows: slice, fault: Fault = RIGHT, *, span: slice = slice(None)) -> Tensor:
        """Logits of some rows, or of a span of their tokens alone, with everything kept for a backward."""
        batch = self.batch
        seq_len = batch.tokens.size(1)
        positions = batch.positions if fault.positions is None else fault.positions
        tokens = batch.tokens if fault.tokens is None else fault.tokens

        def part(x: Tensor) -> Tensor:
            return x[rows, span] if x.ndim > 1 and x.size(1) == seq_len else x[rows]

        inputs = {"positions": part(positions)} | {name: part(value) for name, value in batch.more.items()}
        documents = None if fault.crosses_documents else batch.documents
        within = contextlib.nullcontext() if documents is None else Within(part(documents))
        with alone(sees_world=fault.sees_world), within:
            return self._call(part(tokens), inputs, fault)

    def _call(self, tokens: Tensor, inputs: dict[str, Tensor], fault: Fault) -> Tensor:
        if not fault.scaled:
            return check_logits(self.model(tokens, **inputs), tokens)
        scaled = {
            name: parameter * fault.factor for name, parameter in self.model.named_parameters() if name in fault.scaled
        }
        return torch.func.functional_call(self.model, scaled, (tokens,), inputs)


def _first(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def even_weights(labels: Tensor) -> Tensor:
    """Return what each token's loss counts in the mean over all valid ones, float64 (G, S)."""
    return torch.full(labels.shape, 1 / max(1, int((labels != IGNORED).sum())), dtype=torch.float64)


def is_same(one: Outcome, other: Outcome) -> bool:
    """Whether loss and gradients agree bitwise."""
    return one.loss == other.loss and all(
        torch.equal(other.gradients[name], gradient) for name, gradient in one.gradients.items()
    )


def check_logits(output: Any, tokens: Tensor) -> Tensor:
    """Return ``output``.

    Raises:
        ValueError: If it is no tensor (B, S, V).
    """
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != tokens.shape:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"the model has to return logits (B, S, V) = ({', '.join(map(str, tokens.shape))}, …), got {found}; wrap it"
        )
    return output


class AttentionMode(TorchFunctionMode):
    """Counts attention calls by the block they are made in, and confines one of them to the tokens of a part."""

    def __init__(self, parts: Tensor | None = None, layer: int = -1) -> None:
        super().__init__()
        self.parts, self.layer = parts, layer
        self.callers: list[str | None] = []
        self._block: str | None = None

    def enter(self, block: str | None) -> None:
        """Whose calls come next."""
        self._block = block

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            number = len(self.callers)
            self.callers.append(self._block)
            if self.parts is not None and self.layer in (number, EVERY):
                kwargs = confined(self.parts, args[1].size(-2), kwargs)
        return func(*args, **kwargs)
