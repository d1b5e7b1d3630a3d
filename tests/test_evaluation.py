"""Evaluation on held-out text: the right rows, each once, and the same loss on any mesh."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dtcp.train.config import EvaluationConfig, compose_job_config
from dtcp.train.corpus import Corpus
from dtcp.train.data import TextDataset
from dtcp.train.evaluation import Evaluation, EvaluationMetrics
from dtcp.train.tokenizer import ByteTokenizer
from dtcp.train.trainer import Trainer
from parity import PEAKED, TINY, TOLERANCE
from resuming import JOB_OF, run_job

# A short text of which no byte changes: some dozen held-out rows of 33, in batches of 4, the last one uneven.
HELD_OUT = 0.4
TEXT = Path(__file__).parent.parent / "LICENSE"
SMALL = ["data=text", f"data.paths=['{TEXT}']", f"data.validation_fraction={HELD_OUT}"]
JOB = [*TINY["llama"], PEAKED, "training.seq_len=33", "training.global_batch_size=4", "training.steps=2", *SMALL]
EVALUATE = ["evaluation.every=1", "evaluation.batches=null"]


def evaluate(rank: int, world: int, overrides: list[str]) -> tuple[EvaluationMetrics, float, EvaluationMetrics]:
    """Before the first step, and after it; and the step's loss, which an evaluation must not change."""
    trainer = Trainer(compose_job_config(overrides))
    before = trainer.evaluate()
    loss = [metrics.loss for metrics in trainer.steps()][-1]
    return before, loss, trainer.evaluate()


def last_loss(rank: int, world: int, overrides: list[str]) -> float:
    return list(Trainer(compose_job_config(overrides)).steps())[-1].loss


def dense_oracle(overrides: list[str]) -> tuple[float, int]:
    """Mean loss of all held-out windows, one at a time, in float64."""
    trainer = Trainer(compose_job_config(overrides))
    model = trainer.model.double()
    tokens = torch.from_numpy(trainer.dataset.corpus.tokens.astype("int64"))
    held_out = tokens[len(tokens) - int(len(tokens) * HELD_OUT) :]
    total, count = 0.0, 0
    for start in range(0, len(held_out) - 33, 33):
        window = held_out[start : start + 34]
        with torch.no_grad():
            total += F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum").item()
        count += 33
    return total / count, count


@pytest.fixture(scope="module")
def one_rank(ranks):
    return ranks.run(1, evaluate, [*JOB, *EVALUATE])[0]


def test_the_loss_is_the_mean_over_all_held_out_tokens(one_rank):
    loss, count = dense_oracle(JOB)
    before, _, after = one_rank
    assert before.eval_loss == pytest.approx(loss, rel=TOLERANCE)
    assert before.eval_perplexity == pytest.approx(math.exp(loss), rel=10 * TOLERANCE)
    assert before.eval_tokens == after.eval_tokens == count
    assert count // 33 % 4 != 0  # so the last batch is uneven
    assert after.eval_loss < before.eval_loss


@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (3, "mesh.cp=3 attention.layout=striped"),
        (4, "mesh.cp=2 mesh.dp_shard=2"),
        (4, "mesh.cp=2 mesh.tp=2 training.loss_chunk_tokens=16"),
        (2, "mesh.pp=2 training.local_batch_size=1 training.loss_chunk_tokens=32"),
        pytest.param(2, "mesh.cp=2", marks=pytest.mark.slow),
        pytest.param(2, "mesh.dp_shard=2 training.local_batch_size=1", marks=pytest.mark.slow),
        pytest.param(4, "mesh.cp=2 mesh.dp_replicate=2 attention.strategy=all_gather", marks=pytest.mark.slow),
        pytest.param(2, "mesh.cp=2 training.compile=true", marks=pytest.mark.slow),
        pytest.param(4, "mesh.dp_shard=4", marks=pytest.mark.slow),
    ],
)
def test_evaluation_is_equal_on_any_mesh(ranks, one_rank, world, mesh):
    for before, loss, after in ranks.run(world, evaluate, [*JOB, *EVALUATE, *mesh.split()], timeout=200):
        for mine, wanted in ((before, one_rank[0]), (after, one_rank[2])):
            assert mine.eval_loss == pytest.approx(wanted.eval_loss, rel=TOLERANCE)
            assert mine.eval_tokens == wanted.eval_tokens
        assert loss == pytest.approx(one_rank[1], rel=TOLERANCE)


def test_an_evaluation_leaves_training_alone(ranks, one_rank):
    assert one_rank[1] == ranks.run(1, last_loss, JOB)[0]


def dataset(num_tokens: int, seq_len: int, fraction: float) -> TextDataset:
    corpus = Corpus("numbers", np.arange(num_tokens, dtype=np.int32), np.array([0]))
    return TextDataset(corpus, ByteTokenizer(), seq_len=seq_len, validation_fraction=fraction)


@pytest.mark.parametrize(("num_tokens", "seq_len", "fraction"), [(1000, 10, 0.1), (997, 7, 0.25), (64, 3, 0.5)])
@pytest.mark.parametrize("batches", [1, 3, None])
@pytest.mark.parametrize("global_batch_size", [1, 4, 5])
def test_held_out_rows_come_once_and_never_in_training(num_tokens, seq_len, fraction, batches, global_batch_size):
    training = dataset(num_tokens, seq_len, fraction)
    evaluation = Evaluation(EvaluationConfig(1, batches), training, global_batch_size)
    seen: list[int] = []
    for batch in range(evaluation.num_batches):
        rows = evaluation.read_rows(batch, range(global_batch_size))
        tokens, labels = rows.tokens, rows.labels
        counted = labels[:, 0] != -100
        assert ((labels != -100) == counted[:, None]).all()
        assert (labels == tokens + 1)[counted].all()
        seen += labels[counted].flatten().tolist()
    assert len(seen) == len(set(seen))
    available = (num_tokens - training.num_tokens - 1) // seq_len
    wanted = available if batches is None else min(available, batches * global_batch_size)
    assert len(seen) == wanted * seq_len
    assert min(seen) > training.num_tokens  # the first held-out token is only an input
    trained = {int(token) for row in range(training.num_windows) for token in training.row(row, 0, 1)}
    assert not trained & set(seen)


def test_held_out_text_that_is_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"5 of them for validation; a row of seq_len=10 needs 11. Use seq_len <= 4"):
        Evaluation(EvaluationConfig(1, None), dataset(50, 10, 0.1), 4)
    assert Evaluation(EvaluationConfig(0, None), dataset(50, 10, 0.1), 4).num_batches == 0


def test_evaluations_are_keys_of_their_steps_lines_also_after_a_resume(ranks, tmp_path):
    overrides = [*JOB_OF["llama"], *SMALL, f"run.dir={tmp_path}", "evaluation.every=2", "training.steps=5"]
    ranks.run(2, run_job, [*overrides, "run.name=whole", "mesh.cp=2"])
    ranks.run(2, run_job, [*overrides, "run.name=cut", "checkpoint.every=3", "mesh.cp=2"], 3)
    ranks.run(2, run_job, [*overrides, "run.name=cut", "checkpoint.every=3", "mesh.cp=2"])
    runs = {}
    for name in ("whole", "cut"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 5]
        runs[name] = [(line["loss"], line.get("eval_loss"), line.get("eval_perplexity")) for line in lines]
    assert runs["cut"] == runs["whole"]


def test_dropout_is_off_while_evaluating(ranks):
    def twice(rank: int, world: int) -> tuple[float, float, bool]:
        dropout = ["model=gpt_tiny", "model.num_layers=1", "model.dim=32", "model.dropout=0.5", *JOB[-6:], *EVALUATE]
        trainer = Trainer(compose_job_config(dropout))
        return trainer.evaluate().eval_loss, trainer.evaluate().eval_loss, trainer.model.training

    first, second, is_training = ranks.run(1, twice)[0]
    assert first == second
    assert is_training
