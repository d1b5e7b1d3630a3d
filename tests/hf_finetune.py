"""Fine-tune on packed rows from a JSON-lines file by ContextParallelTrainer; with --eager by transformers' own Trainer.

torchrun --nproc-per-node 4 tests/hf_finetune.py rows.jsonl out.json [--lora] [--eager]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from hf_models import build


def pack(lines: list[str], size: int) -> list[dict[str, list[int]]]:
    """Rows of ``size`` tokens, of whole documents one after the other; positions restart with each."""
    rows: list[dict[str, list[int]]] = []
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for line in lines:
        tokens = [3 + byte % 58 for byte in json.loads(line)["text"].encode()][:size]
        if len(row["input_ids"]) + len(tokens) > size:
            rows.append(row)
            row = {"input_ids": [], "labels": [], "position_ids": []}
        row["input_ids"] += tokens
        row["labels"] += [-100] * (len(tokens) // 4) + tokens[len(tokens) // 4 :]  # a prompt has no loss
        row["position_ids"] += list(range(len(tokens)))
    return rows


def collate(rows):
    """Rows of one length: what is left is a document of padding without labels."""
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": lambda n: [0] * n, "labels": lambda n: [-100] * n, "position_ids": lambda n: list(range(n))}
    return {
        name: torch.tensor([row[name] + more(length - len(row[name])) for row in rows]) for name, more in fill.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--save", action="store_true", help="after each step, of few rows in random order")
    parser.add_argument("--resume", action="store_true", help="from what --save has left")
    given = parser.parse_args()
    from transformers import Trainer, TrainingArguments

    import dtcp
    from dtcp.integrations.trainer import ContextParallelTrainer, dims_of

    torch.set_num_threads(1)
    model = build("qwen3", "eager" if given.eager else "dtcp").float()
    if given.lora:
        import peft

        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    rows = pack(given.rows.read_text().splitlines(), 48)
    is_short = given.save or given.resume  # two steps an epoch, so that the third is in the middle of one
    train, held_out = rows[: 8 if is_short else len(rows) // 8 * 8], rows[-3:]
    args = TrainingArguments(
        output_dir=str(given.out.with_suffix("")), max_steps=4, learning_rate=1e-3, lr_scheduler_type="constant",
        per_device_train_batch_size=2 if given.eager else 1, gradient_accumulation_steps=2, max_grad_norm=1.0,
        per_device_eval_batch_size=1, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="steps" if given.save else "no", save_steps=1,
        report_to=[], use_cpu=True, seed=0, remove_unused_columns=False, gradient_checkpointing=not given.eager,
        disable_tqdm=True, logging_nan_inf_filter=False,
    )  # fmt: skip
    how = {"model": model, "args": args, "train_dataset": train, "eval_dataset": held_out, "data_collator": collate}
    if given.eager:
        trainer = _in_order(Trainer)(**how)
    else:
        from accelerate import ParallelismConfig

        world = int(os.environ.get("WORLD_SIZE", 1))
        dims = dims_of(ParallelismConfig(cp_size=min(world, 2), dp_shard_size=max(world // 2, 1)))
        kind = ContextParallelTrainer if is_short else _in_order(ContextParallelTrainer)
        trainer = kind(**how, dims=dims)
    trainer.train(resume_from_checkpoint=str(given.out.with_suffix("") / "checkpoint-3") if given.resume else None)
    evaluated = trainer.evaluate()
    if given.eager:
        evaluated["eval_loss"] = _mean_over_tokens(model, held_out, dtcp)
    if trainer.is_world_process_zero():
        given.out.write_text(json.dumps({"log": trainer.state.log_history, "eval_loss": evaluated["eval_loss"]}))
    if dist.is_initialized():
        dist.barrier()


def _in_order(kind):
    """The Trainer with rows in the order of the file, so that two samplers need not draw alike."""

    class InOrder(kind):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def get_train_dataloader(self):
            loader = super().get_train_dataloader()
            if hasattr(loader.sampler, "shuffle"):
                loader.sampler.shuffle = False
            return loader

    return InOrder


@torch.no_grad()
def _mean_over_tokens(model, rows, dtcp) -> float:
    """transformers takes the mean of means of batches."""
    model.eval()
    total, count = 0.0, 0
    for row in rows:
        batch = collate([row])
        documents = dtcp.Documents.from_position_ids(batch["position_ids"])
        labels = dtcp.shift_labels(batch["labels"], batch["labels"], documents)
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        total += float(dtcp.token_loss(logits, labels, num_valid_tokens=1))
        count += int((labels != -100).sum())
    return total / count


if __name__ == "__main__":
    main()
