"""transformers' ``Trainer`` over a cut sequence: the same arguments, and a mesh.

    dims = dtcp.ParallelDims(cp=2, dp_replicate=2)
    trainer = ContextParallelTrainer(model, args, train_dataset=rows, data_collator=collator, dims=dims)
    trainer.train()

The ranks of a cp axis get the same rows, ``per_device_train_batch_size`` for each rank of ``dims.view("batch")``. Loss
and gradients are sums over all tokens of the step, in whatever rank and microbatch they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from transformers import Trainer

from dtcp.integrations.transformers import PreparedBatch, count_targets, prepare
from dtcp.loss import IGNORED
from dtcp.mesh import ParallelDims
from dtcp.parallelize.gradients import reduce_gradients
from dtcp.shard import check_same_batch


def dims_of(parallelism_config: Any) -> ParallelDims:
    """Return the degrees of accelerate's ``ParallelismConfig``, for ``ContextParallelTrainer(dims=)``.

    Raises:
        NotImplementedError: If it asks for more than cp and dp.
    """
    sizes = {name: int(getattr(parallelism_config, f"{name}_size", 1)) for name in ("tp", "sp")}
    if other := [name for name, size in sizes.items() if size > 1]:
        raise NotImplementedError(f"ContextParallelTrainer has cp and dp, got {other[0]}_size={sizes[other[0]]}")
    # Parameters are whole on every rank here, so what accelerate would shard is replicated.
    num_replicas = parallelism_config.dp_replicate_size * parallelism_config.dp_shard_size
    return ParallelDims(cp=parallelism_config.cp_size, dp_replicate=num_replicas, dp_shard=1)


class ContextParallelTrainer(Trainer):
    """``Trainer`` for a model with ``attn_implementation="dtcp"``. Parameters are whole on every rank.

    Args:
        dims: Degrees with tp=1, pp=1 and dp_shard=1, of all ranks; built here if it is not yet.
        layout, how: As in ``dtcp.integrations.transformers.prepare``.

    Raises:
        ValueError: If ranks start from different weights, or ``args`` shard or average by themselves.
    """

    control: Any  # which Trainer declares nowhere

    def __init__(
        self,
        *args: Any,
        dims: ParallelDims,
        layout: str = "head_tail",
        how: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._dims, self._layout, self._how = dims, layout, dict(how or {})
        if (
            getattr(self.args, "parallelism_config", None) is not None
            or self.is_fsdp_enabled
            or self.is_deepspeed_enabled
        ):
            raise ValueError(
                "TrainingArguments(parallelism_config=, fsdp=, deepspeed=) would cut or shard once more; leave them "
                "out, and give dims= (dims_of(parallelism_config) makes them)"
            )
        _refuse_unused(self)
        if dims.dp_shard > 1:
            raise ValueError(
                f"ContextParallelTrainer keeps parameters whole, got dp_shard={dims.dp_shard}; use dp_replicate"
            )
        dims.build_mesh(self.args.device.type)
        weights = {name: x.detach() for name, x in self.model.named_parameters()}
        check_same_batch(weights, dims.view("loss"))
        # Losses come divided by all tokens of the step.
        self.model_accepts_loss_kwargs = True
        # Without DistributedDataParallel, which would average what are shares of a sum.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    # ---- data: rows by the rank in the batch axis, not by the rank -------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset")
        return self._loader(self.train_dataset, self._train_batch_size, is_training=True)

    def _loader(self, dataset: Any, batch_size: int, *, is_training: bool) -> DataLoader:
        if isinstance(dataset, IterableDataset):
            raise NotImplementedError(
                "ContextParallelTrainer deals rows out by their index, got an IterableDataset; give it one with a "
                "length, list(dataset) say"
            )
        batch_view = self._dims.view("batch")
        sampler: Any = _EpochSampler(
            dataset, num_replicas=batch_view.size(), rank=batch_view.get_local_rank(), shuffle=is_training,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            drop_last=is_training and self.args.dataloader_drop_last,
        )  # fmt: skip
        sampler.trainer = self
        return DataLoader(
            dataset, batch_size=batch_size, sampler=sampler, collate_fn=self.data_collator,
            drop_last=is_training and self.args.dataloader_drop_last, num_workers=self.args.dataloader_num_workers,
        )  # fmt: skip

    # ---- a step ----------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor]:
        """The microbatches of a step, and the targets in those of all ranks."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        count = torch.tensor(sum(count_targets(self.model, batch) for batch in batches), device=device)
        return batches, self._total(count, "batch")

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        share = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            reduce_gradients(model, self._dims)
        # What Trainer takes the mean of over the ranks.
        return self._total(share.detach(), "loss")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This rank's share of the step's loss."""
        batch = self._prepared(inputs, num_items_in_batch)
        outputs = model(**batch)
        loss = batch.loss(outputs.logits)
        return (loss, outputs) if return_outputs else loss

    def _prepared(self, inputs: dict[str, Any], num_valid_tokens: Any) -> PreparedBatch:
        return prepare(
            self.model, inputs, self._dims, layout=self._layout, num_valid_tokens=num_valid_tokens, **self._how
        )

    def _total(self, share: Tensor, view: str) -> Tensor:
        """The sum over the ranks of a view of the mesh."""
        total, mesh = share.clone(), self._dims.view(view)
        if mesh.size() > 1:
            dist.all_reduce(total, group=mesh.get_group())
        return total

    # ---- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Dataset[Any] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return loss and perplexity: the mean over all tokens of the set, each row once, on any mesh."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset")
        if isinstance(dataset, Mapping):
            found: dict[str, float] = {}
            for name, part in dataset.items():
                found |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        batch_view, size = self._dims.view("batch"), self.args.per_device_eval_batch_size
        was_training = self.model.training
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        # Ranks take turns; one without rows in the last round joins with rows that do not count.
        for start in range(0, len(dataset), size * batch_view.size()):
            own = range(start + size * batch_view.get_local_rank(), len(dataset))[:size]
            batch = self._prepare_inputs(self.data_collator([dataset[i] for i in own or range(start, start + 1)]))
            if not own:
                batch["labels"] = torch.full_like(batch["labels"], IGNORED)
            part = self._prepared(batch, 1)
            with self.compute_loss_context_manager():
                loss = part.loss(self.model(**part).logits)
            assert part.labels is not None
            total += torch.stack([loss.double(), (part.labels != IGNORED).sum()])
        self.model.train(was_training)
        total = self._total(total, "loss")
        mean = total[0].item() / max(total[1].item(), 1)
        metrics = {f"{metric_key_prefix}_loss": mean, f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700.0))}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "ContextParallelTrainer evaluates the loss (evaluate()); to predict, use Trainer and another "
            "attn_implementation"
        )


class _EpochSampler(DistributedSampler[Any]):
    """Shuffles by the epoch that the trainer is in, also where it goes on in the middle of one."""

    trainer: Trainer

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(int((self.trainer.state.epoch or 0.0) + 1e-6))
        return super().__iter__()


def _refuse_unused(trainer: Any) -> None:
    """Raise for options of Trainer's loss and data that this one would leave out."""
    given = {
        "label_smoothing_factor": trainer.args.label_smoothing_factor,
        "compute_loss_func": trainer.compute_loss_func,
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics,
        "group_by_length": getattr(trainer.args, "group_by_length", False)
        or getattr(trainer.args, "train_sampling_strategy", "random") not in ("random", None),
    }
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"ContextParallelTrainer does not know {name}; leave it out")
