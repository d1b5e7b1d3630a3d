"""AdamW and its learning rate: linear warm-up, then a decay to a share of the peak."""

import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dtcp.train.config import Decay, LRSchedulerConfig, OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trained parameters; weight decay only on matrices, not on biases and norms."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one call for all parameters: with DTensors on CPU, a call each costs as much as a tiny step
    )


def make_lr_scheduler(optimizer: torch.optim.Optimizer, config: LRSchedulerConfig, num_steps: int) -> LambdaLR:
    """Learning rate of step s (from 0) is ``optimizer.lr * lr_factor(s)``."""
    return LambdaLR(optimizer, partial(lr_factor, config=config, num_steps=num_steps))


def set_schedule_step(scheduler: LambdaLR, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put the schedule where it is after ``step`` steps: the learning rate is a function of the step alone."""
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    position = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | position)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def lr_factor(step: int, *, config: LRSchedulerConfig, num_steps: int) -> float:
    """Share of the peak learning rate at ``step``.

    Warm-up: (step + 1) / warmup_steps, so the first step moves and the last warm-up step has the peak. After it the
    rate falls from the peak towards ``min_ratio``, which it would reach at ``num_steps``, and stays there.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    match config.decay:
        case Decay.cosine:
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        case Decay.linear:
            remaining = 1.0 - progress
        case Decay.constant:
            remaining = 1.0
        case _:
            raise AssertionError(config.decay)
    return config.min_ratio + (1.0 - config.min_ratio) * remaining
