"""A training script as it is written for torch's own context parallelism. It knows nothing of dtcp."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCAB, DIM, HEADS, SEQ_LEN, STEPS = 17, 16, 2, 16, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis).flatten(-2)
            for y in (query * 3, key)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Attention() for _ in range(num_layers))
        angles = torch.arange(SEQ_LEN)[:, None] / torch.tensor([1.0, 4.0, 16.0, 64.0])
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, self.freqs_cis)
        return self.head(x)


def train(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Losses, whole logits and parameters of a few steps; without a mesh on one rank, without context parallelism."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, all_logits = [], []
    for _ in range(STEPS):
        tokens, labels = torch.randint(0, VOCAB, (2, 2, SEQ_LEN)).unbind()
        context: Any = contextlib.nullcontext()
        if mesh is not None:
            context = context_parallel(
                mesh,
                buffers=[tokens, labels, model.freqs_cis],
                buffer_seq_dims=[1, 1, 0],
                no_restore_buffers={tokens, labels},
            )
        with context:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            if mesh is not None:
                (logits,) = context_parallel_unshard(mesh, [logits], [1])
        if mesh is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group())
                parameter.grad /= mesh.size()
            dist.all_reduce(loss, group=mesh.get_group())
            loss = loss / mesh.size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        all_logits.append(logits.detach())
    parameters = dict(model.named_parameters())
    return {"losses": torch.stack(losses), "logits": torch.stack(all_logits), "parameters": parameters}
