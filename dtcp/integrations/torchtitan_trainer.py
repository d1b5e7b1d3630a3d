"""torchtitan's own trainer, with dtcp's context parallelism in place of its own.

A module of your own, and the line that starts it:

    from torchtitan.models.llama3.config_registry import llama3_8b
    from dtcp.integrations.torchtitan_trainer import with_dtcp

    def llama3_8b_dtcp():
        return with_dtcp(llama3_8b())

    torchrun --nproc-per-node 8 -m torchtitan.train --module my_configs --config llama3_8b_dtcp --context.degree 4
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer

from dtcp.documents import Documents
from dtcp.integrations.torchtitan import DtcpAttention, with_dtcp_attention
from dtcp.layout import make_layout
from dtcp.parallelize.context import ContextParallel, set_sequence
from dtcp.shard import shard

_PLAN = "attention.inner_attention.sdpa"


@dataclass(kw_only=True, slots=True)
class ContextConfig:
    """dtcp's context parallelism of a run: ``--context.degree`` and so on.

    Attributes:
        degree: Ranks that share a sequence, in place of ``--parallelism.context_parallel_degree``, which stays 1.
        layout: As in ``dtcp.make_layout``.
        strategy: As in ``dtcp.ContextParallel``.
    """

    degree: int = 1
    layout: str = "head_tail"
    strategy: str = "ring"


class DtcpTrainer(Trainer):
    """torchtitan's ``Trainer``, whose sequences are cut and attended to by dtcp.

    FSDP2, tensor parallelism, activation checkpointing, compilation, optimizer and checkpoints are torchtitan's. Packed
    documents, which its data loaders mark by positions that begin again, do not see each other.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, with ``context``; `with_dtcp` makes one of another."""

        context: ContextConfig = field(default_factory=ContextConfig)

        def __post_init__(self) -> None:
            """Raise ValueError for what does not go together."""
            Trainer.Config.__post_init__(self)
            _check(self)

    def __init__(self, config: Config) -> None:
        """Build everything.

        Raises:
            ValueError: If the config says what cannot be done with dtcp; the message names it.
        """
        _check(config)  # a config may have been changed since it was made
        assert config.model_spec is not None
        original = config.model_spec.parallelize_fn

        def parallelize(model: Any, *, parallel_dims: ParallelDims, **options: Any) -> Any:
            mesh = _context_mesh(parallel_dims)
            for block in model.layers.values():
                parallelize_module(block, mesh, {_PLAN: ContextParallel(strategy=config.context.strategy)})
            return original(model, parallel_dims=_without_context(parallel_dims), **options)

        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)
        self._labels_are_checked = False
        super().__init__(config)

    def train(self) -> None:
        """Train to the end."""
        with _set_timeout():
            super().train()

    def init_distributed(self) -> ParallelDims:
        """Return the dims with the ranks of ``context.degree`` as "cp", by which losses and gradients are added up."""
        config: Any = self.config
        dims = config.parallelism
        parallelism = dataclasses.replace(dims, context_parallel_degree=config.context.degree)
        config.parallelism = parallelism
        try:
            return super().init_distributed()
        finally:
            config.parallelism = dims

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Cut a batch, and tell the model where the documents lie.

        Args:
            input_dict: "input", int64 (B, S), and maybe "positions", (B, S).
            labels: (B, S), of each token the next one.

        Raises:
            ValueError: In the first batch, if the labels are the inputs themselves.
            NotImplementedError: For other inputs; for a layout with pad slots where experts' loads are balanced.
        """
        config: Any = self.config
        inputs, positions = input_dict["input"], input_dict.get("positions")
        if others := set(input_dict) - {"input", "positions"}:
            raise NotImplementedError(
                f"dtcp cuts tokens and positions, got {', '.join(sorted(others))} too; leave it out"
            )
        self._check_labels(inputs, labels)
        documents = None if positions is None else Documents.from_position_ids(positions)
        if positions is None:
            positions = torch.arange(inputs.size(1), device=inputs.device).expand_as(inputs)
        cp, tp = self.parallel_dims.cp, self.parallel_dims.tp
        multiple = tp if config.parallelism.enable_sequence_parallel else 1
        layout = make_layout(
            config.context.layout, seq_len=inputs.size(1), cp=cp, documents=documents, multiple_of=multiple
        )
        (model,) = self.model_parts
        if layout.padded_seq_len != inputs.size(1) and _balances(model):
            raise NotImplementedError(
                f"layout={config.context.layout} pads {inputs.size(1)} tokens to {layout.padded_seq_len}, and the pad "
                "slots would count among the loads of the experts; use --context.layout head_tail, or "
                "load_balance_coeff=None in the model's config"
            )
        set_sequence(model, layout, documents=documents)
        mesh = _context_mesh(self.parallel_dims)
        inputs, labels, positions = (
            shard(x, mesh, layout, pad_value=pad) for x, pad in ((inputs, 0), (labels, IGNORE_INDEX), (positions, 0))
        )
        self.ntokens_seen += int(inputs.numel())
        return inputs, labels, {"positions": positions}

    def _check_labels(self, inputs: Tensor, labels: Tensor) -> None:
        """Once: a run that learns to copy has the best of losses."""
        if self._labels_are_checked:
            return
        self._labels_are_checked = True
        counts = labels != IGNORE_INDEX
        if inputs[counts].unique().numel() > 1 and torch.equal(labels[counts], inputs[counts]):
            raise ValueError(
                "the labels are the inputs themselves; shift them in the data loader, whole, before a rank cuts them: "
                "dtcp.shift_labels(tokens), or rows[:, 1:] for rows[:, :-1]"
            )


def with_dtcp(config: Trainer.Config) -> DtcpTrainer.Config:
    """Return the config of a run of torchtitan's with dtcp's attention and context parallelism.

    Everything else stays, but ``parallelism.spmd_backend``, which is "partial_dtensor", and CUDA graphs, which are off:
    each step has its own documents.

    Raises:
        NotImplementedError: If dtcp's attention cannot take the place of the model's; see `with_dtcp_attention`.
        ValueError: See `DtcpTrainer`.
    """
    spec = config.model_spec
    if spec is None or not isinstance(spec.model, Decoder.Config):
        raise NotImplementedError(
            f"dtcp's attention is for torchtitan's language models, got {None if spec is None else spec.name}"
        )
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    values |= {
        "model_spec": dataclasses.replace(spec, model=with_dtcp_attention(spec.model)),
        "parallelism": dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor"),
        "training": dataclasses.replace(config.training, disable_cuda_graphs=True),
    }
    return DtcpTrainer.Config(**values)


def _check(config: Any) -> None:
    parallelism, context = config.parallelism, config.context
    if (degree := parallelism.context_parallel_degree) > 1:
        raise ValueError(
            f"torchtitan's own context parallelism would cut the sequence again, got context_parallel_degree={degree}; "
            f"use --context.degree {degree} and --parallelism.context_parallel_degree 1"
        )
    if context.degree < 1:
        raise ValueError(f"context.degree must be >= 1, got {context.degree}")
    cures = [
        (parallelism.spmd_backend != "partial_dtensor", "parallelism.spmd_backend", "partial_dtensor"),
        (parallelism.pipeline_parallel_degree > 1, "parallelism.pipeline_parallel_degree", 1),
        (parallelism.expert_parallel_degree > 1, "parallelism.expert_parallel_degree", 1),
        (not config.training.disable_cuda_graphs, "training.disable_cuda_graphs", True),
        (config.validator.enable, "validator.enable", False),
    ]
    for is_wrong, name, value in cures:
        if is_wrong:
            section, key = name.split(".")
            raise ValueError(
                f"dtcp in torchtitan's trainer needs {name}={value}, got {getattr(getattr(config, section), key)}; set "
                f"it so, or train by `dtcp train model=titan_…`"
            )
    spec = config.model_spec
    if spec is not None and not all(
        isinstance(layer.attention.inner_attention, DtcpAttention.Config) for layer in spec.model.layers
    ):
        raise ValueError(f"model {spec.name} has attention that is not dtcp's; make the config by with_dtcp(config)")


@contextlib.contextmanager
def _set_timeout() -> Iterator[None]:
    """torchtitan 0.3.0 calls ``torch.distributed.set_timeout`` after its first step, which torch 2.13 has not yet."""
    if hasattr(dist, "set_timeout"):
        yield
        return
    setattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)  # noqa: B010  # mypy knows no such name
    try:
        yield
    finally:
        delattr(dist, "set_timeout")


def _balances(model: nn.Module) -> bool:
    return any(isinstance(module, MoE) and module.load_balance_coeff is not None for module in model.modules())


def _context_mesh(dims: ParallelDims) -> DeviceMesh:
    mesh = dims.get_optional_mesh("cp")  # builds all of them, and gives none of one rank
    return dims._single_axis_meshes["cp"] if mesh is None else mesh


class _DimsWithoutContext(ParallelDims):
    """Ranks of "cp" are in the FSDP mesh as ever, and nobody else is to cut for them."""

    cp_enabled = property(lambda self: False)


def _without_context(dims: ParallelDims) -> ParallelDims:
    dims = copy.copy(dims)
    dims.__class__ = _DimsWithoutContext
    return dims
