"""The training job of one rank: data, model, optimizer and the step.

Shapes: B rows of a microbatch, S = seq_len, S_local slots of this rank, V vocabulary.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import dtcp
from dtcp.dropout import dropout_keys
from dtcp.linear_loss import linear_token_loss
from dtcp.loss import count_valid_tokens, token_loss
from dtcp.mesh import ParallelDims
from dtcp.models import build_model
from dtcp.models.hf import check_hf_config, load_safetensors
from dtcp.parallelize.context import set_sequence
from dtcp.parallelize.fsdp import set_last_microbatch
from dtcp.parallelize.gradients import clip_grad_norm_
from dtcp.parallelize.pipeline import Pipeline
from dtcp.parallelize.stages import check_num_microbatches
from dtcp.shard import check_same_batch
from dtcp.train.batch import Microbatch, Rows, cut_into_microbatches, deal_microbatches, layout_of
from dtcp.train.checkpoint import Checkpointer, check_checkpoint_config, load_tensors, state_tensors
from dtcp.train.checkpoint_files import read_description
from dtcp.train.checks import check_documents_are_packed, check_numbers, check_vocabulary
from dtcp.train.config import JobConfig, to_data_config, to_model_config
from dtcp.train.data import make_dataset
from dtcp.train.description import changed_settings, check_description, describe_job
from dtcp.train.evaluation import Evaluation, EvaluationMetrics, as_record
from dtcp.train.metrics import MetricsLog, StepMetrics, speed
from dtcp.train.nonfinite import refuse_non_finite
from dtcp.train.optimizer import make_lr_scheduler, make_optimizer, set_schedule_step
from dtcp.train.parallel import parallelize_for_training
from dtcp.train.run_folder import CONFIG_FILE, METRICS_FILE
from dtcp.train.session import agreed
from dtcp.train.summary import resolved_config, summary


class Trainer:
    """One job on this rank. Every rank makes one, with equal configuration, and calls the same methods.

    The results do not depend on the mesh: row i of step n is the same row everywhere, a rank's loss is its share, and
    shares are added, never averaged.

    Attributes:
        step: Optimizer steps taken.
        tokens_seen: Real tokens of the global batches so far.
    """

    def __init__(self, config: JobConfig, device: torch.device | str = "cpu") -> None:
        """Open the data and build the model.

        Args:
            config: See ``conf/config.yaml``; ``compose_job_config`` makes one.
            device: Where this rank computes.

        Raises:
            ValueError: If values do not fit each other or the world; names a cure.
            JobError: Instead of these when there are several ranks, equal on all of them.
        """
        self.config = config
        self.device = torch.device(device)
        with agreed():
            self.dims = ParallelDims(**config.mesh.degrees())
            self.model_config = to_model_config(config.model)
            check_numbers(config)
            data_config = to_data_config(config.data)
            check_documents_are_packed(config, data_config)
            num_readers = self.dims.dp_replicate * self.dims.dp_shard
            self.model_config.check_seq_len(config.training.seq_len)
            deal_microbatches(config.training.global_batch_size, config.training.local_batch_size, 0, num_readers)
            self.layout = layout_of(config, self.dims, config.training.seq_len)
            self.dataset = make_dataset(data_config, seq_len=config.training.seq_len, seed=config.debug.seed)
            vocab_size = self.model_config.vocab_size
            assert vocab_size is not None  # of a resolved config
            check_vocabulary(self.dataset.tokenizer.vocab_size, vocab_size, config.model.name)
            check_checkpoint_config(config.checkpoint)
            if config.model.weights is not None:
                check_hf_config(self.model_config, Path(config.model.weights).expanduser())
            self.evaluation = Evaluation(config.evaluation, self.dataset, config.training.global_batch_size)
        self.dims.build_mesh(self.device.type)
        self.rows = deal_microbatches(
            config.training.global_batch_size,
            config.training.local_batch_size,
            self.dims.view("batch").get_local_rank(),
            num_readers,
        )
        if self.dims.pp > 1:
            with agreed():
                check_num_microbatches(config.pipeline.schedule, len(self.rows), self.dims.pp)
        self.model = self._build_model()
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.scheduler = make_lr_scheduler(self.optimizer, config.lr_scheduler, config.training.steps)
        self.step = 0
        self.tokens_seen = 0
        self.changed_settings: list[str] = []

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, made on any mesh; the data and the learning rate follow from its step. Collective.

        What the job was configured to do otherwise than the one that saved, and may, goes to ``changed_settings``.

        Raises:
            ValueError: If the checkpoint is damaged, or of a job whose loss curve would be another one; names the keys.
                JobError on all ranks of several.
        """
        with agreed():
            saved = read_description(checkpoint)
            mine = describe_job(self.config, self.model_config, self.dataset, self.optimizer)
            check_description(checkpoint, saved, mine, self.dataset)
        load_tensors(checkpoint, saved, state_tensors(self.model, self.optimizer))
        self.changed_settings = changed_settings(saved, mine)
        self.step, self.tokens_seen = saved["step"], saved["tokens_seen"]
        set_schedule_step(self.scheduler, self.optimizer, self.step)

    def description(self) -> dict[str, Any]:
        """What is said about a checkpoint of this job beside its tensors; JSON types."""
        job = describe_job(self.config, self.model_config, self.dataset, self.optimizer)
        return job | {"version": dtcp.__version__, "step": self.step, "tokens_seen": self.tokens_seen}

    def evaluate(self) -> EvaluationMetrics:
        """Return the loss of the held-out rows that the configuration asks for; needs ``evaluation.every`` > 0."""

        def loss_sum(microbatch: Microbatch) -> Tensor:
            if isinstance(self.model, Pipeline):
                return self._run_pipeline(self.model.evaluate, [microbatch], 1)
            return self.loss(microbatch, 1)

        return self.evaluation.run(self.model, loss_sum, self._read_evaluation(), self.dims)

    def _read_evaluation(self) -> Iterator[Microbatch]:
        for batch in range(self.evaluation.num_batches):
            for row_indices in self.rows:
                yield from self.cut(self.evaluation.read_rows(batch, row_indices), [row_indices])

    def _build_model(self) -> nn.Module:
        """The model, or this rank's stages of it."""
        seed_everything(self.config.debug.seed, deterministic=self.config.debug.deterministic)
        whole = build_model(self.model_config, device="meta")
        with agreed():
            model = parallelize_for_training(whole, self.dims, self.config, self.device, **self.plans(whole))
            if self.config.model.weights is not None:
                load_safetensors(model, self.config.model.weights, whole=whole)
        return model

    def plans(self, model: nn.Module) -> dict[str, Any]:
        """Plans of `parallelize` other than its own."""
        return {}

    def read_rows(self, step: int, row_indices: Sequence[int]) -> Rows:
        """Return rows of the global batch of ``step`` (from 0), on the CPU.

        Labels are the next tokens: rows hold one token more than they show, so the shift comes before the cut.
        """
        return Rows(**self.dataset.batch(step, row_indices, self.config.training.global_batch_size))

    def read_microbatches(self) -> list[Microbatch]:
        """Return this rank's part of the global batch of the coming step."""
        rows = self.read_rows(self.step, [index for row_indices in self.rows for index in row_indices])
        check_every = self.config.debug.check_same_batch_every
        if check_every and self.step % check_every == 0:
            for axis in ("tp", "cp", "pp"):
                check_same_batch(rows.to(self.device).tensors(), self.dims.view(axis))
        return self.cut(rows, self.rows)

    def cut(self, rows: Rows, ranges: Sequence[Sequence[int]]) -> list[Microbatch]:
        """Return this rank's part of rows that all cp ranks have, by microbatch; see `cut_into_microbatches`."""
        layout = self.layout
        if rows.documents is not None:
            layout = layout_of(self.config, self.dims, layout.seq_len, rows.documents)
        return cut_into_microbatches(rows.to(self.device), ranges, mesh=self.dims.view("cp"), layout=layout)

    def tell_sequence(self, microbatch: Microbatch) -> None:
        """Tell the planned attention how these rows are cut and where their documents lie, before their forward."""
        if self.dims.cp > 1 or microbatch.documents is not None:
            set_sequence(self.model, microbatch.layout, documents=microbatch.documents)

    def forward(self, microbatch: Microbatch) -> Tensor:
        """Return this rank's logits, (B, S_local, V); with tp > 1 a DTensor, ``Shard(-1)`` over tp."""
        self.tell_sequence(microbatch)
        return self.model(microbatch.tokens, **self.inputs(microbatch))

    @property
    def takes_dropout_keys(self) -> bool:
        """Whether the model drops anything, by keys that it is given."""
        return getattr(self.model_config, "has_dropout", False)

    @property
    def model_summary(self) -> tuple[str, int]:
        """The model's name and its number of parameters."""
        return self.config.model.name, self.model_config.num_parameters

    def inputs(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return what the model takes beside the tokens, (B, S_local) each."""
        inputs = {"positions": microbatch.positions}
        if self.takes_dropout_keys:
            # Of the step to come: a second forward before it drops the same elements.
            seed, rows = self.config.debug.seed, microbatch.row_indices
            # Of the token's place in its row: positions restart, and tokens of one position would drop the same.
            inputs["dropout_keys"] = dropout_keys(seed, self.step, rows, microbatch.token_indices)
        return inputs

    def loss(self, microbatch: Microbatch, num_valid_tokens: Tensor | int) -> Tensor:
        """Return this rank's share of the loss, by chunks where the configuration says so; its count is given."""
        if self.config.training.loss_chunk_tokens is None:
            return token_loss(self.forward(microbatch), microbatch.labels, num_valid_tokens=num_valid_tokens)
        head_fn = functools.partial(self.head_loss, num_valid_tokens=num_valid_tokens)
        self.tell_sequence(microbatch)
        return self.model(microbatch.tokens, **self.inputs(microbatch), head_fn=head_fn, head_inputs=microbatch.labels)

    def head_loss(self, hidden: Tensor, weight: Tensor, labels: Tensor, *, num_valid_tokens: Tensor | int) -> Tensor:
        """Return the share of the loss from the last hidden states and the head's weight, by chunks of tokens."""
        if self.dims.tp > 1 and self.config.tensor_parallel.sequence_parallel:
            # This rank's positions; the labels are of all.
            hidden = DTensor.from_local(hidden, self.dims.view("tp"), [Shard(1)], run_check=False)
        chunk_tokens = self.config.training.loss_chunk_tokens
        assert chunk_tokens is not None
        return linear_token_loss(hidden, weight, labels, num_valid_tokens=num_valid_tokens, chunk_tokens=chunk_tokens)

    def _run_pipeline(
        self, run: Callable[..., Tensor], microbatches: Sequence[Microbatch], num_valid_tokens: Tensor | int
    ) -> Tensor:
        """``forward_backward`` or ``evaluate`` of the pipeline, for all of these microbatches."""
        all_inputs = [self.inputs(microbatch) for microbatch in microbatches]
        inputs = {name: torch.cat([inputs[name] for inputs in all_inputs]) for name in all_inputs[0]}
        labels = torch.cat([microbatch.labels for microbatch in microbatches])
        constants = {}
        if self.config.training.loss_chunk_tokens is not None:
            constants["head_fn"] = functools.partial(self.head_loss, num_valid_tokens=num_valid_tokens)
            inputs["head_inputs"] = labels
        is_told = self.dims.cp > 1 or microbatches[0].documents is not None
        return run(
            torch.cat([microbatch.tokens for microbatch in microbatches]),
            labels,
            num_microbatches=len(microbatches),
            num_valid_tokens=num_valid_tokens,
            constants=constants,
            sequences=[(m.layout, m.documents) for m in microbatches] if is_told else None,
            **inputs,
        )

    def compute_gradients(self, microbatches: list[Microbatch]) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the global batch in the parameters.

        Returns:
            This rank's share of the loss, 0-d float64, and the valid tokens of the global batch, 0-d int64.
        """
        labels = torch.cat([microbatch.labels for microbatch in microbatches])
        num_valid_tokens = count_valid_tokens(labels, mesh=self.dims.view("loss"))
        share = torch.zeros((), dtype=torch.float64, device=self.device)
        if isinstance(self.model, Pipeline):
            share += self._run_pipeline(self.model.forward_backward, microbatches, num_valid_tokens)
            return share, num_valid_tokens
        for number, microbatch in enumerate(microbatches, start=1):
            set_last_microbatch(self.model, number == len(microbatches))
            loss = self.loss(microbatch, num_valid_tokens)
            loss.backward()
            share += loss.detach()
        return share, num_valid_tokens

    def train_step(self, *, stop_requested: bool = False) -> tuple[StepMetrics, bool]:
        """Take one optimizer step.

        Args:
            stop_requested: Whether this rank wants to stop.

        Returns:
            The step's metrics, equal on every rank but for times and memory, and whether any rank wants to stop.

        Raises:
            NonFiniteError: On every rank, before the optimizer step, if the loss or the gradient norm is not finite.
            ValueError: If cp, tp or pp ranks hold different rows.
        """
        start = time.perf_counter()
        microbatches = self.read_microbatches()
        share, num_valid_tokens = self.compute_gradients(microbatches)
        grad_norm = clip_grad_norm_(self.model, self.config.training.max_norm, self.dims).item()
        loss, num_stops = self._sum_over_ranks(share, stop_requested)
        forward = None if isinstance(self.model, Pipeline) else self.forward
        refuse_non_finite(self.step + 1, loss, grad_norm, model=self.model, microbatches=microbatches, forward=forward)
        lr = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        num_tokens = self.config.training.global_batch_size * self.layout.seq_len
        self.tokens_seen += num_tokens
        flops = self.model_config.flops_per_token(self.layout.seq_len)
        metrics = StepMetrics(
            step=self.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_seen=self.tokens_seen,
            num_valid_tokens=int(num_valid_tokens),
            **speed(num_tokens, time.perf_counter() - start, self.dims.mesh.size(), flops, self.device),
        )
        return metrics, num_stops > 0

    def steps(self, *, stop_requested: Callable[[], bool] = lambda: False) -> Iterator[StepMetrics]:
        """Take the steps of the configuration that are left, yielding the metrics of each.

        Args:
            stop_requested: Asked once a step; all ranks stop after the step in which one of them says yes.
        """
        stop = False
        while self.step < self.config.training.steps and not stop:
            metrics, stop = self.train_step(stop_requested=stop_requested())
            yield metrics

    def train(self, folder: Path, *, stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Take the steps that are left, evaluate and save; rank 0 prints and writes config.yaml and metrics.jsonl.

        Args:
            folder: Exists; see `dtcp.train.run_folder.open_run_folder`.
            stop_requested: As in `steps`.
        """
        is_writer = not dist.is_initialized() or dist.get_rank() == 0
        if is_writer:
            (folder / CONFIG_FILE).write_text(resolved_config(self.config, self.dims, folder.name))
        metrics_file = folder / METRICS_FILE if is_writer else None
        with MetricsLog(metrics_file, num_steps=self.config.training.steps, device=self.device) as log:
            log.say(self.describe())
            self._train(folder, log, stop_requested)
            if self.step < self.config.training.steps:
                log.say(f"stopped by a signal after step {self.step}")

    def _train(self, folder: Path, log: MetricsLog, stop_requested: Callable[[], bool]) -> None:
        for line in ([f"resumed after step {self.step}"] if self.step else []) + self.changed_settings:
            log.say(line)
        checkpoint, num_steps = self.config.checkpoint, self.config.training.steps
        with Checkpointer(checkpoint, folder, self.model, self.optimizer, step=self.step) as checkpoints:
            # A rank whose save in the background failed has all stop; `finish` then raises on all of them.
            for metrics in self.steps(stop_requested=lambda: stop_requested() or checkpoints.has_failed):
                evaluated = self.evaluate() if self.evaluation.is_due(self.step, num_steps) else None
                log.write(metrics, as_record(evaluated))
                if evaluated is not None:
                    log.say(f"held out after step {self.step}:  {evaluated}")
                checkpoints.save_if_due(self.step, self.description)
            checkpoints.finish(self.step, self.description)

    def describe(self) -> str:
        """The job in two lines: what is trained, and how it is cut."""
        return summary(
            self.config,
            self.dims,
            self.layout,
            model=self.model_summary,
            num_microbatches=len(self.rows),
            device=self.device,
        )

    def _sum_over_ranks(self, share: Tensor, stop_requested: bool) -> tuple[float, float]:
        sums = torch.stack([share, share.new_tensor(float(stop_requested))])
        loss_mesh = self.dims.view("loss")
        if loss_mesh.size() > 1:
            dist.all_reduce(sums, group=loss_mesh.get_group())
        if self.dims.pp > 1:  # the loss is on the last stage
            dist.all_reduce(sums, group=self.dims.view("pp").get_group())
        if self.dims.tp > 1:  # tp ranks have the same loss, but not the same signals
            dist.all_reduce(sums[1], group=self.dims.view("tp").get_group())
        loss, num_stops = sums.tolist()
        return loss, num_stops


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed torch, and have it refuse operations that are not deterministic where that is asked for."""
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
