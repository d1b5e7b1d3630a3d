"""The job that is examined: the trainer's own step on all ranks, with a small batch and weights that hide nothing.

Shapes: B rows, S = seq_len.
"""

import dataclasses
import inspect
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import dtcp
from dtcp.doctor.config import DoctorJobConfig, Door, small_job
from dtcp.doctor.own import call_own, load_plan, narrow_dtype, told_in_one_line, widen
from dtcp.doctor.reached import any_requires_gradient, check_all_reach_the_same, names_of_leaves, reached_leaves
from dtcp.doctor.reference import Batch, check_logits
from dtcp.documents import Documents
from dtcp.dropout import Dropout
from dtcp.dtensor import is_dtensor
from dtcp.layout import SequenceLayout
from dtcp.models import ResolvedHFConfig, build_model
from dtcp.models.init import Init, assign, draw, plain_name
from dtcp.models.transformers_config import is_transformers_model
from dtcp.parallelize.blocks import named_blocks
from dtcp.parallelize.gradients import clip_grad_norm_
from dtcp.train.batch import Microbatch, Rows, deal_microbatches, layout_of, masked_labels
from dtcp.train.config import to_model_config
from dtcp.train.parallel import cut_model
from dtcp.train.session import agreed
from dtcp.train.trainer import Trainer, seed_everything

NOISE = Init(std=0.1)  # added to norms and biases, which start at 1 and 0: a bias that counts twice has to show


def _noise_of(shape: torch.Size) -> Init:
    """What is added to a tensor that starts constant: a matrix of zeros in the residual stream hides what is before."""
    return NOISE if len(shape) < 2 else Init(std=min(0.1, shape[-1] ** -0.5))


class Subject(Trainer):
    """The trainer, with some labels ignored, norms and biases off their starting values, and any model.

    Attributes:
        options: The section ``doctor``.
        built_in: Of a model of the user's, the dtype narrower than float32 that it was built in, if it was.
        keeps_dtype: Whether it is examined in that; else in float32, so that nothing hides in rounding.
    """

    def __init__(self, config: DoctorJobConfig, device: torch.device, *, keeps_dtype: bool = False) -> None:
        self.built_in: torch.dtype | None = None
        self.keeps_dtype = keeps_dtype
        with agreed():
            small = small_job(config)
            if config.doctor.model is None:
                model_config = to_model_config(small.model)
                check_fits(model_config.num_parameters, device)
                if isinstance(model_config, ResolvedHFConfig):
                    check_reference(model_config, config)
        self.options = config.doctor
        super().__init__(small, device)
        if config.model.weights is None or self.options.model is not None:
            self._disturb()

    def read_rows(self, step: int, row_indices: Sequence[int]) -> Rows:
        """Real rows, with ends of documents here and there, which a short row seldom has.

        Of their labels more are ignored in some rows and places than in others, so that parts differ.
        """
        read = super().read_rows(step, row_indices)
        rows, positions = torch.tensor(list(row_indices))[:, None], torch.arange(read.labels.size(1))[None]
        ignored = (rows * 31 + positions * 17) % 7 < 1 + rows % 3
        ignored |= (positions >= read.labels.size(1) * 3 // 4) & (rows % 2 == 0)
        ends = (rows * 5 + positions * 11) % 23 == 3
        tokens = read.tokens.masked_fill(ends, self.dataset.tokenizer.end_of_document)
        return dataclasses.replace(masked_labels(read, ignored & (positions > 0)), tokens=tokens)

    def make_whole_model(self) -> nn.Module:
        """Return the uncut model, its weights still to be set, on this rank's device.

        Raises:
            ValueError: If a model of the user's is no such model.
        """
        own = self.options.model is not None
        model: Any = self._make_own() if own else build_model(self.model_config, device="meta")
        if is_transformers_model(model):
            model.attend_by_torch()
        return self._materialized(model)

    def take_step(self) -> tuple[float, float]:
        """Forward and backward of the job: its loss and gradient norm. The gradients stay, as the optimizer's."""
        microbatches = self.read_microbatches()
        with self.told(self.model):
            share, _ = self.compute_gradients(microbatches)
        norm = clip_grad_norm_(self.model, math.inf, self.dims).item()
        loss, _ = self._sum_over_ranks(share, False)
        return loss, norm

    @property
    def dtype(self) -> str:
        """In which the job computes."""
        own = self.built_in if self.keeps_dtype else None
        return str(own).removeprefix("torch.") if own is not None else self.config.training.param_dtype.value

    def told(self, model: nn.Module, what: str = "the step") -> AbstractContextManager[None]:
        """Inside it, what a model of the user's raises is told in one line."""
        if self.options.model is None:
            return nullcontext()
        num_ids, seq_len = self.dataset.tokenizer.vocab_size, self.layout.seq_len
        return told_in_one_line(model, what, num_ids=num_ids, seq_len=seq_len)

    def whole_batch(self) -> Batch:
        """Return all rows of the step, uncut."""
        indices = range(self.config.training.global_batch_size)
        rows = self.read_rows(self.step, indices).to(self.device)
        places = torch.arange(rows.tokens.size(1), device=self.device).expand_as(rows.tokens)
        positions = places if rows.positions is None else rows.positions
        microbatch = Microbatch(rows.tokens, rows.labels, positions, places, indices, self.layout, rows.documents)
        more = {name: x for name, x in self.inputs(microbatch).items() if name != "positions"}
        documents = None
        if rows.documents is not None:
            documents = torch.atleast_2d(rows.documents.ids).to(self.device)
        return Batch(rows.tokens, rows.labels, positions, more, documents)

    @property
    def documents(self) -> Documents | None:
        """Of all rows of the step, if they are packed."""
        return self.read_rows(self.step, range(self.config.training.global_batch_size)).documents

    @property
    def layout_of_all_rows(self) -> SequenceLayout:
        """Who holds which tokens of which row of the step."""
        return layout_of(self.config, self.dims, self.layout.seq_len, self.documents)

    @property
    def takes_dropout_keys(self) -> bool:
        """As the trainer; a model of the user's gets keys if it drops and its forward names them."""
        return super().takes_dropout_keys if self.options.model is None else self._own_takes_keys

    @property
    def model_summary(self) -> tuple[str, int]:
        """As the trainer; a model of the user's goes by its import path."""
        return super().model_summary if self.options.model is None else (self.options.model, self._num_own_parameters)

    def rows_of_readers(self) -> list[list[range]]:
        """Rows of the whole batch by data parallel rank, a range for each microbatch."""
        training, size = self.config.training, self.dims.view("batch").size()
        return [
            deal_microbatches(training.global_batch_size, training.local_batch_size, rank, size) for rank in range(size)
        ]

    def named_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks of a model, or of this rank's stages, by plain name."""
        stages = model.stages if isinstance(model, dtcp.Pipeline) else [model]
        return {f"layers.{key}": block for stage in stages for key, block in named_blocks(stage, "the doctor", "…")}

    def row_parallel_layers(self) -> list[str]:
        """Modules here whose weight is cut over tp by columns, so that their outputs are added up."""
        found = []
        for name, x in self.model.named_parameters():
            parameter: Any = x
            if is_dtensor(x) and "tp" in (names := parameter.device_mesh.mesh_dim_names or ()):
                placement = parameter.placements[names.index("tp")]
                if name.endswith(".weight") and getattr(placement, "dim", None) == 1:
                    found.append(plain_name(name).removesuffix(".weight"))
        return found

    def tell_sequence(self, microbatch: Microbatch) -> None:
        """As the trainer, where a plan has to be told."""
        if self.options.door is Door.plan:
            super().tell_sequence(microbatch)

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Logits, as what they have to be."""
        logits = check_logits(super().forward(microbatch), microbatch.tokens)
        if self.options.model is not None and logits.size(-1) < (num_ids := self.dataset.tokenizer.vocab_size):
            raise ValueError(
                f"doctor.model={self.options.model} gives logits of {logits.size(-1)} words, and the data's tokenizer "
                f"has {num_ids} ids; give the model a vocabulary of {num_ids}, or gather the logits that a plan has cut"
            )
        return logits

    def loss(self, microbatch: Microbatch, num_valid_tokens: Tensor | int) -> Tensor:
        """As the trainer, by the door that is examined; the ranks agree on which parameters the backward will reach."""
        mesh = self.dims.view("loss")
        if self.options.model is None or self.config.training.compile or mesh.size() == 1:
            return self._loss_by_door(microbatch, num_valid_tokens)
        with names_of_leaves(self.model) as leaves:
            loss = self._loss_by_door(microbatch, num_valid_tokens)
        check_all_reach_the_same(reached_leaves(loss, leaves), mesh.get_group())
        return loss

    def _loss_by_door(self, microbatch: Microbatch, num_valid_tokens: Tensor | int) -> Tensor:
        if self.options.door is Door.plan or (self.dims.cp == 1 and microbatch.documents is None):
            return super().loss(microbatch, num_valid_tokens)
        attention, layout = self.config.attention, microbatch.layout
        with dtcp.context_parallel(
            self.dims.view("cp"),
            seq_len=layout.seq_len,
            layout=layout.name,
            multiple_of=layout.multiple_of,
            documents=microbatch.documents,
            strategy=attention.strategy,
            ulysses_degree=attention.ulysses_degree,
            ranks_per_node=self.dims.cp_ranks_per_node(self.config.mesh.ranks_per_node),
            kv_grad_dtype=attention.torch_kv_grad_dtype,
            kernel=attention.kernel,
        ):
            return super().loss(microbatch, num_valid_tokens)

    _own_takes_keys = False
    _num_own_parameters = 0

    def plans(self, model: nn.Module) -> dict[str, Any]:
        """Plans that the section names, and none for attention behind a context."""
        plans: dict[str, Any] = {}
        for name in ("tensor_plan", "context_plan"):
            if (path := getattr(self.options, name)) is None:
                continue
            if self.options.model is None:
                raise ValueError(f"doctor.{name} is for a doctor.model; dtcp has plans for its own models")
            plans[name] = load_plan(path, f"doctor.{name}", model)
        if self.options.door is Door.context:
            if self.dims.pp > 1:
                raise ValueError("doctor.door=context is for models without stages, got mesh.pp > 1; use door=plan")
            plans["context_plan"] = {}
        return plans

    def _build_model(self) -> nn.Module:
        if self.options.model is None:
            return super()._build_model()
        seed_everything(self.config.debug.seed, deterministic=self.config.debug.deterministic)
        with agreed():
            whole = self._make_own()
            if self.dims.pp > 1 and _is_on_meta(whole):
                raise ValueError(f"doctor.model={self.options.model} has to have its weights already, with mesh.pp > 1")
            plans = self.plans(whole)
            with self.told(whole, f"making doctor.model={self.options.model} parallel"):
                cut = cut_model(whole, self.dims, self.config, **plans)
            return self._materialized(cut)

    def _materialized(self, model: Any) -> nn.Module:
        """``model`` on this rank's device; one on the meta device with the weights and buffers of its seed."""
        if not _is_on_meta(model):
            return model.to(self.device)
        model.to_empty(device=self.device)
        model.init_weights(self.config.debug.seed)
        return model

    def _make_own(self) -> nn.Module:
        path = self.options.model
        assert path is not None
        torch.manual_seed(self.config.debug.seed)
        model = call_own(path, "doctor.model")
        if not isinstance(model, nn.Module):
            raise ValueError(f"doctor.model={path} has to give an nn.Module, got {type(model).__name__}")
        names = inspect.signature(model.forward).parameters
        if "positions" not in names:
            raise ValueError(
                f"doctor.model={path}: {type(model).__name__}.forward takes {', '.join(names)}; it has to take "
                "arguments named tokens (B, S) and positions (B, S), which a cut sequence needs, and to return logits "
                "(B, S, V): wrap it"
            )
        if _is_on_meta(model) and not hasattr(model, "init_weights"):
            raise ValueError(f"doctor.model={path} is on the meta device; it needs init_weights(seed)")
        if not any_requires_gradient(model):
            raise ValueError(f"doctor.model={path}: nothing requires a gradient: there is nothing to train")
        self._num_own_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.built_in = narrow_dtype(model)
        if self.built_in is not None and not self.keeps_dtype:
            widen(model)
        drops = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout | Dropout) and m.p > 0]
        self._own_takes_keys = "dropout_keys" in names and bool(drops)
        if drops and not self._own_takes_keys:
            raise ValueError(
                f"doctor.model={path} drops elements in {drops[0]}, at random; build it with p=0, or with dtcp.Dropout "
                "and a forward that takes dropout_keys"
            )
        return model

    @torch.no_grad()
    def _disturb(self) -> None:
        """Add noise to norms, biases and all that starts constant, the same on any mesh."""
        for name, parameter in named_as_whole(self.model):
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            full = whole_tensor(parameter.detach()).cpu()
            if full.ndim < 2 or bool((full == full.flatten()[0]).all()):
                noise = draw(full.shape, self.config.debug.seed + 1, name, _noise_of(full.shape)).to(full.dtype)
                assign(parameter, full + noise)


def named_as_whole(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter with its name in the whole model: of the last stage's tied ones that in the first stage."""
    for name, parameter in model.named_parameters():
        plain = plain_name(name)
        yield (model.name_in_first_stage(plain) if isinstance(model, dtcp.Pipeline) else plain), parameter


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def check_reference(model_config: ResolvedHFConfig, config: DoctorJobConfig) -> None:
    """Refuse a model of transformers that there is no reference for, or another door than its own."""
    if config.doctor.door is Door.context:
        raise ValueError("doctor.door=context is not for model=hf, whose attention has its own door; use door=plan")
    model: Any = build_model(model_config, device="meta")
    model.attend_by_torch()
    if model.splits_documents and config.data.pack_documents and config.data.reset_positions is False:
        raise NotImplementedError(
            f"one rank's {model.hf.config.model_type} is run a document after the other, by where positions restart; "
            "got data.reset_positions=false; examine it with null: documents are told apart in the same way"
        )


def check_fits(num_parameters: int, device: torch.device) -> None:
    """Refuse a model that one rank cannot hold three times: weights, gradients, and the job's gradients beside them.

    Raises:
        ValueError: Naming the bytes.
    """
    needed = 3 * 4 * num_parameters
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > free:
        raise ValueError(
            f"the doctor compares with the whole model on one rank, {num_parameters:,} parameters in float32 take "
            f"{needed / 2**30:.0f} GiB and {free / 2**30:.0f} GiB are here; use model.num_layers=2: faults show "
            "there too"
        )


def whole_tensor(x: Tensor) -> Tensor:
    """Return a DTensor's whole value, plain tensors as they are. Collective over its mesh."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
