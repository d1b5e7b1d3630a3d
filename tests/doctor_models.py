"""Models and plans of a user's own, that the doctor's tests name by import path."""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size

import dtcp

VOCAB_SIZE, WIDTH, NUM_HEADS = 264, 32, 4
CONTEXT_PLAN = {"attend": dtcp.ContextParallel(strategy="all_gather")}


class Attend(nn.Module):
    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = Attend()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.attend(query, key, value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Takes its positions from the caller, or counts on its own from 0 on each rank."""

    def __init__(self, counts_on_its_own: bool = False) -> None:
        super().__init__()
        self.counts_on_its_own = counts_on_its_own
        self.embedding, self.positions = nn.Embedding(VOCAB_SIZE, WIDTH), nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.counts_on_its_own:
            positions = torch.arange(tokens.size(1)).expand_as(tokens)
        x = self.embedding(tokens) + self.positions(positions)
        for block in self.layers:
            x = block(x)
        return self.head(x)


class Centred(Model):
    """Takes the mean over the sequence away, which on a rank is that of its own tokens."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = super().forward(tokens, positions)
        return logits - logits.mean(1, keepdim=True)


def make_centred() -> nn.Module:
    return Centred()


class Noisy(Model):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens, positions), 0.1, self.training)


def make_noisy() -> nn.Module:
    return Noisy()


def make_that_communicates() -> nn.Module:
    """Averages its gradients over ranks itself."""
    model = Model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: torch.distributed.all_reduce(p.grad))
    return model


def make_with_hooks() -> nn.Module:
    """Halves some gradients by hooks, which FSDP2 loses with the parameters that it puts in place of these."""
    model = Model()
    for parameter in model.layers[0].parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    return model


class Pair(Model):
    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, None]:
        return super().forward(tokens, positions), None


def make_pair() -> nn.Module:
    return Pair()


def make() -> nn.Module:
    return Model()


def make_with_local_positions() -> nn.Module:
    return Model(counts_on_its_own=True)


def make_without_positions() -> nn.Module:
    return nn.Embedding(VOCAB_SIZE, WIDTH)


def make_with_torchs_dropout() -> nn.Module:
    model = Model()
    model.layers.append(nn.Dropout(0.1))
    return model


def make_centred_behind_zeros() -> nn.Module:
    """A head of zeros, as some start with: before it no gradient arrives, and no fault shows."""
    model = Centred()
    nn.init.zeros_(model.head.weight)
    return model


class Detached(Model):
    """Trains the head alone, though everything else asks for gradients."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) + self.positions(positions)).detach())


def make_detached() -> nn.Module:
    return Detached()


def make_in_bfloat16() -> nn.Module:
    return Model().bfloat16()


def make_of_one_block() -> nn.Module:
    """The same block twice, and attends in it."""
    model = Model()
    model.layers[1] = model.layers[0]
    return model


class WithExpert(Model):
    """Has a part that only the rank with the first token uses."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = super().forward(tokens, positions)
        return logits + self.expert(self.embedding(tokens)) if bool((positions[:, 0] == 0).any()) else logits


def make_with_expert() -> nn.Module:
    return WithExpert()


class WithBuffer(Model):
    """Adds a buffer to the logits; may change it in the forward, and may read what it has changed."""

    def __init__(self, start: float = 1.0, changes: bool = False, reads: bool = True) -> None:
        super().__init__()
        self.changes, self.reads = changes, reads
        self.register_buffer("state", torch.full((WIDTH,), start))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.reads:
            x = x * self.state.clone()
        x = x + self.positions(positions)
        for block in self.layers:
            x = block(x)
        if self.changes and self.training:
            with torch.no_grad():
                self.state.add_(x.mean((0, 1)))
        return self.head(x)


def make_with_buffer_of_the_rank() -> nn.Module:
    return WithBuffer(start=1.0 + torch.distributed.get_rank())


def make_with_running_state() -> nn.Module:
    return WithBuffer(changes=True)


def make_that_counts() -> nn.Module:
    return WithBuffer(changes=True, reads=False)


def make_with_clipping_hook() -> nn.Module:
    model = Model()
    model.layers[0].qkv.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    return model


class MixingRows(Model):
    """Adds to each row a little of all rows that are in the batch with it."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = super().forward(tokens, positions)
        return logits + 0.3 * logits.mean(0, keepdim=True)


def make_that_mixes_rows() -> nn.Module:
    return MixingRows()


class Divided(torch.autograd.Function):
    """The identity, with a gradient that is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad / get_world_size()


class Auxiliary(torch.autograd.Function):
    """The identity, with a gradient beside the loss's: that of an auxiliary loss, a mean over tokens or a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_mean: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.is_mean = is_mean
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad + 0.01 * x / (x[..., 0].numel() if ctx.is_mean else 100), None


class Normalised(torch.autograd.Function):
    """The identity, with a gradient of length 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-12)


class CountsDocuments(Model):
    """Embeds the number of a token's document, by the ends (256) that this rank has seen."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions) + self.head(self.positions((tokens == 256).cumsum(1)))


class ScaledByLength(Attend):
    """With queries that grow with the sequence."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query * torch.log(torch.tensor(float(query.size(2)))), key, value)


class WithOwnPlaces(Model):
    """Takes positions, and counts once more by itself."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions) + self.head(self.positions(torch.arange(tokens.size(1))))


def make_with_own_places() -> nn.Module:
    return WithOwnPlaces()


def make_that_counts_documents() -> nn.Module:
    return CountsDocuments()


def make_scaled_by_length() -> nn.Module:
    model = Model()
    for block in model.layers:
        block.attend = ScaledByLength()
    return model


class WithLast(Model):
    """Does something to its logits."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.last = last

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.last(super().forward(tokens, positions))


def make_with_mean_beside_the_loss() -> nn.Module:
    return WithLast(lambda x: Auxiliary.apply(x, True))


def make_with_sum_beside_the_loss() -> nn.Module:
    return WithLast(lambda x: Auxiliary.apply(x, False))


def make_with_normalised_gradient() -> nn.Module:
    return WithLast(Normalised.apply)


def make_divided_by_length() -> nn.Module:
    return WithLast(lambda x: x / x.size(1) ** 0.5)


def make_with_hook_on_output() -> nn.Module:
    """Looks at gradients by a hook on what a block gives, which has to require them."""
    model = Model()
    model.layers[0].register_forward_hook(lambda module, args, output: output.register_hook(lambda g: None) and None)
    return model


class ByWorld(Model):
    """Scales its logits by what it is told of the world: in the forward, in the backward, or when it was made."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.size = where, get_world_size()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = super().forward(tokens, positions)
        match self.where:
            case "forward":
                return logits * get_world_size()
            case "backward":
                return Divided.apply(logits)
            case _:
                return logits * self.size


def make_by_world_in_forward() -> nn.Module:
    return ByWorld("forward")


def make_by_world_in_backward() -> nn.Module:
    return ByWorld("backward")


def make_by_world() -> nn.Module:
    return ByWorld("construction")


def make_that_tells_the_world() -> nn.Module:
    """Asks for its rank and computes nothing by it."""
    model = Model()
    model.seen = []
    model.register_forward_hook(lambda *_: model.seen.append(get_rank()))
    return model


class Staged(Model):
    """Can be cut into pipeline stages; its head is the embedding."""

    first_modules, last_modules, tied_modules = ("embedding", "positions"), ("head",), ("embedding",)
    config = types.SimpleNamespace(dim=WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(self.layers)})
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens) + self.positions(positions)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def make_staged() -> nn.Module:
    return Staged()


def make_frozen() -> nn.Module:
    return Model().requires_grad_(False)


def make_with_few_words() -> nn.Module:
    model = Model()
    model.embedding, model.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
    return model


def make_with_small_head() -> nn.Module:
    model = Model()
    model.head = nn.Linear(WIDTH, 100)
    return model


def make_that_raises() -> nn.Module:
    raise KeyError("no such file")


def make_of_sizes_that_do_not_fit() -> nn.Module:
    model = Model()
    model.layers[1].norm = nn.LayerNorm(WIDTH + 1)
    return model


def plan_that_raises(model: nn.Module) -> dict[str, object]:
    raise KeyError("no such module")


def plan_of_nothing(model: nn.Module) -> None:
    return None


PLAN_OF_A_LIST = [1, 2]
PLAN_OF_NAMES = {"layers.0": "column"}
