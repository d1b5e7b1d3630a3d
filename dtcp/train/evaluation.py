"""Loss and perplexity on held-out text, the same on any mesh.

Shapes: B rows of a microbatch, S = seq_len.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtcp.loss import IGNORED
from dtcp.mesh import ParallelDims
from dtcp.parallelize.fsdp import free_full_parameters
from dtcp.train.batch import Microbatch, Rows, masked_labels
from dtcp.train.config import EvaluationConfig
from dtcp.train.data import TextDataset


@dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """One evaluation; the names are keys of the step's line in ``metrics.jsonl``."""

    eval_loss: float  # mean over all held-out tokens that were read, nats
    eval_perplexity: float  # exp of it
    eval_tokens: int  # that counted

    def __str__(self) -> str:
        return f"loss: {self.eval_loss:8.5f}  perplexity: {self.eval_perplexity:.4f}  tokens: {self.eval_tokens:,}"


class Evaluation:
    """Which held-out rows are read, and their loss. The rows are the same each time; no row is read twice.

    The held-out text is the end of the corpus, which no training row reaches; see `TextDataset`.
    """

    def __init__(self, config: EvaluationConfig, dataset: TextDataset, global_batch_size: int) -> None:
        """Choose the rows.

        Args:
            config: With ``every`` 0 there is no evaluation, and no held-out text is needed.
            dataset: The training split.
            global_batch_size: G, rows of an evaluation batch over all ranks.

        Raises:
            ValueError: If a number makes no sense or the held-out text is shorter than a row.
        """
        if config.every < 0:
            raise ValueError(f"evaluation.every has to be at least 0, got {config.every}; 0 never evaluates")
        if config.batches is not None and config.batches < 1:
            raise ValueError(
                f"evaluation.batches has to be at least 1, got {config.batches}; null reads all held-out text, "
                "evaluation.every=0 never evaluates"
            )
        self.every = config.every
        self.global_batch_size = global_batch_size
        self.num_rows = 0
        if self.every:
            self.dataset = dataset.with_split("validation")
            wanted = math.inf if config.batches is None else config.batches * global_batch_size
            self.num_rows = int(min(wanted, self.dataset.num_windows))

    @property
    def num_batches(self) -> int:
        """Evaluation batches; the last may hold fewer than G rows."""
        return -(-self.num_rows // self.global_batch_size)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after ``step`` steps: every so many, and after the last."""
        return self.every > 0 and (step % self.every == 0 or step == num_steps)

    def read_rows(self, batch: int, row_indices: Sequence[int]) -> Rows:
        """Return rows of an evaluation batch.

        Rows past the last one are there so that every rank has as many microbatches, and count for nothing: all of
        their labels are ignored.
        """
        start = batch * self.global_batch_size
        exists = [start + index < self.num_rows for index in row_indices]
        rows = [index if there else 0 for index, there in zip(row_indices, exists, strict=True)]
        read = Rows(**self.dataset.batch(batch, rows, self.global_batch_size))
        return masked_labels(read, ~torch.tensor(exists)[:, None])

    @torch.no_grad()  # not inference_mode, whose tensors FSDP2 could not use in the next step
    def run(
        self,
        model: nn.Module,
        loss_sum: Callable[[Microbatch], Tensor],
        microbatches: Iterator[Microbatch],
        dims: ParallelDims,
    ) -> EvaluationMetrics:
        """Return Σ token losses / Σ tokens over all microbatches of all ranks. Collective.

        Args:
            model: Put into evaluation mode meanwhile.
            loss_sum: Sum of this rank's token losses of a microbatch, 0-d; 0 without the last stage of a pipeline.
            microbatches: This rank's parts, as many on every rank.
            dims: Built mesh.
        """
        was_training = model.training
        model.eval()
        try:
            sums = torch.zeros(2, dtype=torch.float64)
            for microbatch in microbatches:
                total = loss_sum(microbatch)
                num_tokens = (microbatch.labels != IGNORED).sum()
                sums = sums.to(total.device) + torch.stack([total.double(), num_tokens.double()])
        finally:
            free_full_parameters(model)
            model.train(was_training)
        if dims.pp > 1:  # every stage has counted the tokens
            dist.all_reduce(sums[:1], group=dims.view("pp").get_group())
        if dims.view("loss").size() > 1:
            dist.all_reduce(sums, group=dims.view("loss").get_group())
        total_loss, num_tokens = sums.tolist()
        loss = total_loss / num_tokens
        return EvaluationMetrics(loss, _exp(loss), int(num_tokens))


def as_record(metrics: EvaluationMetrics | None) -> dict[str, float]:
    """The keys that an evaluation adds to its step's line; none without one."""
    return {} if metrics is None else asdict(metrics)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # math.exp raises above 709
