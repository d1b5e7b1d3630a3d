"""A run of torchtitan's own trainer on CPU ranks: ``torchrun tests/titan_trainer_run.py OUT CONFIG [--flags]``.

torchtitan wants an accelerator: it takes the CPU for one here, of which some numbers are made up.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

SEQ_LEN, VOCAB_SIZE = 64, 257


def take_the_cpu_for_an_accelerator() -> None:
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    numbers = types.SimpleNamespace(total_memory=1, name="cpu")
    made_up: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: numbers,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *_: {},
        "set_device": lambda *_: None,
        "device_count": lambda: 1,
    }
    for name, value in made_up.items():
        setattr(torch.cpu, name, value)


take_the_cpu_for_an_accelerator()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import titans  # noqa: E402
from dtcp.integrations.torchtitan_trainer import DtcpTrainer, with_dtcp  # noqa: E402
from dtcp.models.init import Init, initialize  # noqa: E402


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE


class Rows(BaseDataLoader):
    """Row i of the run is the same on any mesh: packed documents of 23, 1 and 40 tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        is_shifted: bool = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.is_shifted = config.is_shifted
        self.stride, self.first, self.count = (
            dp_world_size * local_batch_size,
            dp_rank * local_batch_size,
            local_batch_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.cat([torch.arange(n) for n in (23, 1, 40)]).expand(self.count, SEQ_LEN)
        for start in range(0, 10**9, self.stride):
            rows = []
            for row in range(start + self.first, start + self.first + self.count):
                generator = torch.Generator().manual_seed(row)
                rows.append(torch.randint(0, VOCAB_SIZE, (SEQ_LEN + 1,), generator=generator))
            tokens = torch.stack(rows)
            labels = tokens[:, 1:] if self.is_shifted else tokens[:, :-1]
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions.clone()}, labels.contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def llama() -> DtcpTrainer.Config:
    titans.register()
    config = Trainer.Config(
        model_spec=llama3.model_registry("small"),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=4, seq_len=SEQ_LEN, steps=3, mixed_precision_param="float32"
        ),
        parallelism=ParallelismConfig(),
    )
    config.debug.seed = 1
    config.metrics.log_freq = 1
    return with_dtcp(config)


def unshifted() -> DtcpTrainer.Config:
    config = llama()
    config.dataloader.is_shifted = False
    return config


def main(out: str, name: str, flags: list[str]) -> None:
    config = ConfigManager().parse_args(["--module", "titan_trainer_run", "--config", name, *flags])
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    # torchtitan's own initial weights depend on the mesh.
    initialize(trainer.model_parts[0], 0, lambda name: Init(mean=float("norm" in name), std=0.1))
    history: list[dict[str, float]] = []
    trainer.metrics_processor.log = lambda step, loss, _, norm, **__: history.append({"loss": loss, "norm": norm})
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(history))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
