"""A causal language model of transformers as the training job takes its models; loading this loads transformers.

Its code, parameter names (after ``hf.``) and initial distributions are transformers' own, and so is its attention;
over a mesh it attends by `dtcp.integrations.transformers_job`. No parallel code.

Shapes: B batch, S positions held here, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dtcp.integrations.transformers_checks import check_rotary, check_temperature, configs_of
from dtcp.models.init import Fill, initialize
from dtcp.models.inputs import check_tokens, position_error, resolve_positions
from dtcp.models.transformers_init import fill_buffers, initial_values

PREFIX = "hf."
"""Of every parameter's name; the rest is transformers' own."""


class TransformersModel(nn.Module):
    """``model(tokens, positions)`` of a model of transformers, with a loss in place of the head and weights of a seed.

    A tied head has no weight of its own: two names for one parameter come apart in ``to_empty``.
    """

    def __init__(self, config: Any, theirs: Any) -> None:
        """Build on the current default device; call ``init_weights`` before use.

        Args:
            config: Of the job, a `ResolvedHFConfig`.
            theirs: The same as transformers' own object.

        Raises:
            NotImplementedError: If the model drops elements at random, ties weights beside the head's, or has no
                blocks to be found.
        """
        super().__init__()
        self.config = config
        _refuse_dropout(theirs)
        hf = AutoModelForCausalLM.from_config(copy.deepcopy(theirs), attn_implementation="eager", dtype=torch.float32)
        self.hf: Any = hf.train()
        if getattr(hf.config, "is_encoder_decoder", False) or "position_ids" not in _takes(hf):
            raise NotImplementedError(
                f"{type(hf).__name__} takes no position_ids, which a cut sequence needs; such models are not available"
            )
        self._fills = {PREFIX + name: fill for name, fill in initial_values(hf)}
        self._head = _own_head(hf)
        self._blocks = _find_blocks(hf)
        _refuse_other_ties(hf)
        self.splits_documents = False
        self.on_forward: Callable[[Tensor], None] | None = None  # what is to know of the tokens before they run

    @property
    def layers(self) -> nn.ModuleList:
        """Its blocks, which activation checkpointing and FSDP2 take one by one."""
        return self.hf.get_submodule(self._blocks)

    def attend_by_torch(self) -> None:
        """From now on attend uncut, by transformers' own code and masks: what a cut model is compared with.

        By ``F.scaled_dot_product_attention``, where documents are the caller's to see to. Models with sinks or a soft
        cap, which it leaves out, take transformers' eager attention, a document after the other, by where positions
        restart: some (GPT-OSS) do not look for documents.
        """
        has_cap = getattr(self.hf.config.get_text_config(), "attn_logit_softcapping", None) is not None
        self.splits_documents = has_cap or not self.hf._supports_sdpa
        self.hf.set_attn_implementation("eager" if self.splits_documents else "sdpa")
        if hasattr(self.hf, "set_experts_implementation"):
            self.hf.set_experts_implementation("eager")  # the others take no float64

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        head_fn: Callable[..., Tensor] | None = None,
        head_inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token, or what ``head_fn`` makes instead.

        Args:
            tokens: int64 (B, S).
            positions: Of each token in its document or row, int64 (B, S) or (S,); pad slots take 0.
            head_fn: As in `dtcp.models.Llama`.
            head_inputs: A third argument of ``head_fn``, by rows.

        Returns:
            (B, S, V); with ``head_fn``, what that returns.

        Raises:
            NotImplementedError: For ``head_fn`` where the model does more to logits than its head.
        """
        check_tokens(tokens, self.config.vocab_size)
        positions = resolve_positions(positions, tokens).expand(tokens.shape)
        if self.on_forward is not None:
            self.on_forward(tokens)
        if self.splits_documents:
            return torch.cat([self._by_document(*of_row) for of_row in zip(tokens, positions, strict=True)])
        if head_fn is None:
            return self.hf(input_ids=tokens, position_ids=positions, use_cache=False).logits
        if self._head is None:
            raise self._no_chunks("has a head that is no linear layer")
        head: Any = self.hf.get_submodule(self._head)
        made: list[Tensor] = []
        head.in_place = functools.partial(_put, made, head_fn, head_inputs)
        try:
            logits = self.hf(input_ids=tokens, position_ids=positions, use_cache=False).logits
        finally:
            head.in_place = None
        if len(made) != 1 or logits is not made[0]:
            raise self._no_chunks("changes its logits after the head (a soft cap, a scale)")
        return logits

    def _by_document(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits of one row, (1, S, V), of documents that do not see each other."""
        starts = (positions.diff() != 1).nonzero().flatten().add(1).tolist()
        parts = [slice(a, b) for a, b in itertools.pairwise([0, *starts, tokens.numel()])]
        pieces = (self.hf(input_ids=tokens[None, x], position_ids=positions[None, x], use_cache=False) for x in parts)
        return torch.cat([piece.logits for piece in pieces], dim=1)

    def _no_chunks(self, why: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self.hf).__name__} {why}, so a loss by chunks of tokens would be another one; use "
            "training.loss_chunk_tokens=null"
        )

    def is_lookup(self, name: str) -> bool:
        """Whether the parameter called ``name`` is a table whose rows are taken, and multiplies nothing."""
        owner, _, leaf = name.rpartition(".")
        module = self.get_submodule(owner)
        if leaf != "weight" or not isinstance(module, nn.Embedding):
            return False
        is_head = self._head is not None and self.hf.get_submodule(self._head).is_tied
        return not (is_head and module is self.hf.get_input_embeddings())

    def check_seq_len(self, seq_len: int) -> None:
        """Raise if there is no row for a position, or angles and scales change with the length of a row."""
        config = self.hf.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        embeddings = self.hf.get_input_embeddings()
        tables = [m for m in self.hf.modules() if isinstance(m, nn.Embedding) and m is not embeddings]
        if limit is not None and seq_len > limit and any(limit <= m.num_embeddings <= limit + 8 for m in tables):
            error = position_error(seq_len, limit)
            raise ValueError(str(error).split(";")[0] + "; use a shorter training.seq_len, or another model")
        check_rotary(self.hf, seq_len)
        check_temperature(self.hf, seq_len)

    # ---- initial weights ----

    def init_weights(self, seed: int) -> None:
        """Draw every parameter from ``seed`` and its name, by transformers' own distributions; fill the buffers.

        See `dtcp.models.init.initialize`: the values do not depend on the mesh.
        """
        initialize(self, seed, self.weight_init)

    def weight_init(self, name: str) -> Fill:
        """Return what draws the initial values of the parameter called ``name``."""
        return self._fills[name]

    def init_buffers(self) -> None:
        """Fill the tables that are no parameters (rotary angles, say), which ``to_empty`` leaves as they come."""
        fill_buffers(self.hf)


def _takes(hf: nn.Module) -> set[str]:
    return set(inspect.signature(hf.forward).parameters)


def _put(
    made: list[Tensor], head_fn: Callable[..., Tensor], inputs: Tensor | None, x: Tensor, weight: Tensor
) -> Tensor:
    made.append(head_fn(x, weight) if inputs is None else head_fn(x, weight, inputs))
    return made[-1]


# ---- what of a model of transformers has to be found -----------------------------------------------------------------


class _Head(nn.Module):
    """The output head: linear, by a weight of its own or by the token embedding's, or what is put in its place."""

    def __init__(self, head: nn.Linear, embedding: nn.Module) -> None:
        super().__init__()
        self.is_tied = head.weight is embedding.weight
        # Its weight is asked for at each call: FSDP2 puts another parameter into its place.
        self._embedding = (embedding,)
        if not self.is_tied:
            self.weight = head.weight
        self.bias: Any = head.bias  # None of most
        self.in_place: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self._embedding[0].weight if self.is_tied else self.weight
        if self.in_place is None:
            return F.linear(x, weight, self.bias)
        if self.bias is not None:
            raise NotImplementedError(
                "the head of this model has a bias, which a loss by chunks of tokens would leave out; use "
                "training.loss_chunk_tokens=null"
            )
        return self.in_place(x, weight)


def _own_head(hf: Any) -> str | None:
    """Put a `_Head` into the place of a linear one and return its path; None for another one."""
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    if type(head) is not nn.Linear:
        return None
    path = _name_of(hf, head)
    parent, _, leaf = path.rpartition(".")
    setattr(hf.get_submodule(parent), leaf, _Head(head, embedding))
    return path


def _name_of(hf: nn.Module, sought: nn.Module) -> str:
    return next(name for name, module in hf.named_modules() if module is sought)


def _find_blocks(hf: Any) -> str:
    """The path of the list of blocks: of modules that transformers does not split over devices."""
    whole = set(hf._no_split_modules or ())
    found = [
        path
        for path, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(type(block).__name__ in whole for block in module)
    ]
    if len(found) != 1:
        raise NotImplementedError(
            f"{type(hf).__name__} has {len(found)} lists of the blocks that it names ({', '.join(sorted(whole))}), "
            "and the job cuts models with one; such models are not available"
        )
    return found[0]


def _refuse_other_ties(hf: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        if (other := names.setdefault(id(parameter), name)) != name:
            raise NotImplementedError(
                f"{other} and {name} of {type(hf).__name__} are one parameter, and only a linear head may be tied to "
                "the embedding here; such models are not available"
            )


def _refuse_dropout(theirs: Any) -> None:
    for config in configs_of(theirs):
        for name, value in config.to_dict().items():
            drops = ("drop" in name or name.endswith("_pdrop")) and isinstance(value, float) and value > 0
            # Of heads that this model has none of.
            if drops and not name.startswith(("classifier", "summary")):
                raise NotImplementedError(
                    f"{type(config).__name__} drops elements at random, {name}={value}, others on each mesh; set "
                    f"model.overrides={{{name}:0.0}}"
                )
