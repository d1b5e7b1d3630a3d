"""What reaches ``context_parallel``, by which way, and what is refused: never a number that is silently wrong."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention as by_name_after
from torch.nn.functional import scaled_dot_product_attention as by_name_before  # before dtcp is loaded

import dtcp
from oracle import relative_error

TOLERANCE = 1e-5  # float32, against one rank
S = 13
OF_PART = functools.partial(by_name_before, is_causal=True)


def make_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


@contextlib.contextmanager
def raises(error: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_right(cp: Any, call: Any, heads: int = 2) -> None:
    """``call(q, k, v)`` inside ``cp`` is causal attention over the whole sequence, gradients too."""
    query, key, value, grad_out = draw(4, 2, heads, cp.layout.seq_len, 8) * 2
    whole = [x.double().requires_grad_() for x in (query, key, value)]
    right = dtcp.reference_attention(*whole, is_causal=True)
    right_grads = torch.autograd.grad(right, whole, grad_out.double())
    local = [cp.shard(x, dim=2).requires_grad_() for x in (query, key, value)]
    out = call(*local)
    grads = torch.autograd.grad(out, local, cp.shard(grad_out, dim=2))
    for x, wanted in zip((out, *grads), (right, *right_grads), strict=True):
        assert relative_error(cp.unshard(x.detach(), dim=2), wanted.detach()) < TOLERANCE


# ----------------------------------------------------------------------------------------------------------- arguments

MASK = {
    "local": lambda local: torch.ones(local, local).tril().bool(),
    "local × all": lambda local: torch.zeros(local, S),
    "float": lambda local: torch.zeros(local, local),
    "broadcast": lambda local: torch.ones(1, 1, 1, local).bool(),
}


def check_arguments(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        local = cp.layout.local_seq_len
        x, whole = draw(2, 4, local, 8), draw(2, 4, S, 8)
        for make in MASK.values():
            mask = make(local)
            with raises(NotImplementedError, f"attn_mask of shape {tuple(mask.shape)}", "use is_causal"):
                F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        with raises(NotImplementedError, "dropout_p=0.1", "use 0.0"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with raises(ValueError, "as many keys as queries"):
            F.scaled_dot_product_attention(x, whole, whole, is_causal=True)
        with raises(ValueError, f"{S} slots", "seq_len=13"):
            F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)  # not cut
        with raises(ValueError, f"{S} slots"):
            F.scaled_dot_product_attention(x, whole, whole)
        with raises(ValueError, "4 query heads with 2 key heads", "enable_gqa=True"):
            F.scaled_dot_product_attention(x, x[:, :2], x[:, :2])
        with raises(ValueError, "float32"):
            F.scaled_dot_product_attention(x, x.double(), x)
        check_right(cp, functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=8**-0.5))
        assert cp.num_attention_calls == 1


def test_arguments_are_exact_or_refused(ranks: Any) -> None:
    ranks.run(2, check_arguments)


def check_refusal_travels(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        x = draw(2, 2, cp.layout.local_seq_len, 8)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if rank == 1 else 0.0)


def test_the_refusal_of_one_rank_reaches_the_others(ranks: Any) -> None:
    ranks.run_expecting(3, check_refusal_travels, Exception, r"dropout_p=0.5|rank\(s\) \[1\] of the group refused")


def check_own_arguments(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    for error, words, options in [
        (ValueError, "layout must be one of", {"layout": "zigzag"}),
        (ValueError, "strategy must be one of", {"strategy": "rings"}),
        (NotImplementedError, "strategy='ulysses'", {"strategy": "ulysses"}),
        (ValueError, "kernel must be one of", {"kernel": "fast"}),
    ]:
        with raises(error, words), dtcp.context_parallel(mesh, seq_len=S, **options):
            raise AssertionError("entered")


def test_options_of_the_context_are_checked_at_once(ranks: Any) -> None:
    ranks.run(2, check_own_arguments)


# ------------------------------------------------------------------------------------------------------ number of calls


def check_calls(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    with (
        raises(RuntimeError, "no attention call", "flash_attn", "another thread", "expected_attention_calls=0"),
        dtcp.context_parallel(mesh, seq_len=S),
    ):
        pass
    with raises(ZeroDivisionError), dtcp.context_parallel(mesh, seq_len=S):
        raise ZeroDivisionError  # the user's own is never replaced
    with raises(ZeroDivisionError), dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=5):
        raise ZeroDivisionError
    for expected in (0, 1, 2):
        guard: Any = contextlib.nullcontext() if expected == 1 else raises(RuntimeError, f"={expected}, but 1")
        with guard, dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=expected) as cp:
            check_right(cp, OF_PART)


def test_the_number_of_calls_is_checked(ranks: Any) -> None:
    ranks.run(2, check_calls)


# ---------------------------------------------------------------------------------------------------- ways of calling


def scripted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def ways() -> list[Any]:
    operator = getattr(torch, "ops").aten.scaled_dot_product_attention  # noqa: B009, cloudpickle would follow torch.ops
    return [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        scripted,
        lambda q, k, v: by_name_before(q, k, v, is_causal=True),
        lambda q, k, v: by_name_after(q, k, v, is_causal=True),
        OF_PART,
        lambda q, k, v: operator(q, k, v, is_causal=True),
        lambda q, k, v: operator.default(q, k, v, None, 0.0, True),
        lambda q, k, v: torch.stack([by_name_before(*x, is_causal=True) for x in zip(q, k, v, strict=True)]),  # 3-D
    ]


def check_ways(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    for strategy in ("ring", "all_gather"):
        with dtcp.context_parallel(mesh, seq_len=S, strategy=strategy, expected_attention_calls=9) as cp:
            for way in ways():
                check_right(cp, way)


@pytest.mark.parametrize("world", [2, 3])
def test_every_way_of_calling_is_redirected(ranks: Any, world: int) -> None:
    ranks.run(world, check_ways)


def check_leaves_nothing(rank: int, world: int) -> None:
    torch_checkpoint, mha = (importlib.import_module(f"torch.{name}") for name in ("utils.checkpoint", "backends.mha"))
    c_api = importlib.import_module("torch._C")

    def attributes() -> list[Any]:
        return [
            F.scaled_dot_product_attention, F.multi_head_attention_forward, c_api._nn.scaled_dot_product_attention,
            torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction,
            torch_checkpoint.checkpoint, mha.get_fastpath_enabled(),
        ]  # fmt: skip

    def kernels() -> list[bool]:
        keys = ("AutogradCPU", "CPU", "AutogradCUDA", "CUDA", "CompositeImplicitAutograd")
        name = "aten::scaled_dot_product_attention"
        return [c_api._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys]

    before, kernels_before = attributes(), kernels()
    mesh = make_mesh(world)
    x = draw(3, 2, 2, S, 8)
    for leave in (None, ZeroDivisionError):
        with contextlib.suppress(ZeroDivisionError), dtcp.context_parallel(mesh, seq_len=S) as cp:
            assert kernels() != kernels_before
            check_right(cp, OF_PART)
            if leave:
                raise leave
        assert all(a is b for a, b in zip(attributes(), before, strict=True)) and kernels() == kernels_before
        out = by_name_before(*x, is_causal=True)
        assert relative_error(out, dtcp.reference_attention(*x.double(), is_causal=True)) < TOLERANCE
    mha.set_fastpath_enabled(False)
    try:
        with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=0):
            pass
        assert mha.get_fastpath_enabled() is False
    finally:
        mha.set_fastpath_enabled(True)


def test_the_last_context_leaves_torch_as_it_was(ranks: Any) -> None:
    ranks.run(2, check_leaves_nothing)


# --------------------------------------------------------------------------------------------------- multi-head modules


def check_multihead(rank: int, world: int, is_training: bool) -> None:
    """Module and gradients in double precision; a causal mask goes with is_causal, as torch wants it."""
    mesh = make_mesh(world)
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, batch_first=True).double().train(is_training)
    nn.init.normal_(module.in_proj_weight, std=0.7)
    x = draw(2, S, 16).double()

    def attend(x: Tensor) -> Tensor:
        mask = torch.ones(x.size(1), x.size(1)).triu(1).bool()
        return module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    with torch.set_grad_enabled(is_training):
        right = attend(x)
        with dtcp.context_parallel(mesh, seq_len=S, expected_attention_calls=1) as cp:
            local = cp.shard(x)
            out = attend(local)
            for options in ({}, {"need_weights": True}, {"average_attn_weights": False}):
                with raises(NotImplementedError, "need_weights=False"):
                    module(local, local, local, **options)
            with raises(NotImplementedError, "attn_mask"):
                module(local, local, local, key_padding_mask=~cp.valid.expand(2, -1), need_weights=False)
        assert relative_error(cp.unshard(out.detach()), right.detach()) < 1e-12
    if is_training:
        weight = draw(2, S, 16, seed=1).double()
        right_grads = torch.autograd.grad((right * weight).sum(), list(module.parameters()))
        grads = torch.autograd.grad((out * cp.shard(weight)).sum(), list(module.parameters()))
        for grad, wanted in zip(grads, right_grads, strict=True):
            dist.all_reduce(grad)
            assert (grad - wanted).norm() < 1e-12 * wanted.norm() + 1e-12


@pytest.mark.parametrize("is_training", [True, False])
def test_multihead_attention(ranks: Any, is_training: bool) -> None:
    ranks.run(2, check_multihead, is_training)


def check_encoder(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).double()
    x = draw(2, S, 16).double()
    for module in (layer, encoder):
        for is_training, has_grad in ((True, True), (False, False), (False, True)):
            module.train(is_training)
            with torch.set_grad_enabled(has_grad), torch.inference_mode(not has_grad):
                for is_causal in (False, True):

                    def run(x: Tensor, module: nn.Module = module, is_causal: bool = is_causal) -> Tensor:
                        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), dtype=x.dtype)
                        if not is_causal:
                            return module(x)
                        return module(x, mask, is_causal=True)

                    right = run(x)
                    with dtcp.context_parallel(mesh, seq_len=S) as cp:
                        out = run(cp.shard(x))
                        assert relative_error(cp.unshard(out.detach().clone()), right.detach()) < 1e-10


def test_transformer_encoder_layers(ranks: Any) -> None:
    ranks.run(2, check_encoder)


# -------------------------------------------------------------------------------------------------------- kernels, flex


def kernels_of(call: Any) -> set[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = {event.name for event in profiled.events()}
    return {"flash" if any("flash_attention_for_cpu" in name for name in names) else "math"}


def check_kernels(rank: int, world: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = make_mesh(world)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        x = draw(2, 2, cp.layout.local_seq_len, 8)

        def call() -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

        assert kernels_of(call) == {"flash"}
        for backends, wanted in (
            ([SDPBackend.MATH], "math"),
            ([SDPBackend.FLASH_ATTENTION], "flash"),
            ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "math"),
        ):
            with sdpa_kernel(backends):
                assert kernels_of(call) == {wanted}
                check_right(cp, OF_PART)
        for backends in ([SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.CUDNN_ATTENTION]):
            with sdpa_kernel(backends), raises(ValueError, "sdpa_kernel", "allow another backend"):
                call()
    with dtcp.context_parallel(mesh, seq_len=S, kernel="math") as cp:
        assert kernels_of(call) == {"math"}
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), raises(ValueError, "kernel='math'", "excludes it"):
            call()


def test_the_choice_of_a_kernel_is_honoured_or_refused(ranks: Any) -> None:
    ranks.run(2, check_kernels)


def check_flex(rank: int, world: int) -> None:
    import torch.nn.attention.flex_attention as flex
    from torch.nn.attention.flex_attention import flex_attention

    mesh = make_mesh(world)
    compiled = torch.compile(flex_attention, backend="eager")
    x = draw(1, 2, 8, 16)
    before = compiled(x, x, x)
    with dtcp.context_parallel(mesh, seq_len=16) as cp:
        for call in (flex_attention, flex.flex_attention, functools.partial(flex_attention, scale=1.0)):
            with raises(NotImplementedError, "flex_attention", "scaled_dot_product_attention"):
                call(x, x, x)
        with raises(Exception, "flex_attention inside context_parallel is not available yet"):
            compiled(x, x, x)
        check_right(cp, OF_PART)
    assert torch.equal(compiled(x, x, x), before)


def check_flex_loaded_inside(rank: int, world: int) -> None:
    name = "torch.nn.attention.flex_attention"
    loaded = sys.modules.pop(name, None)
    mesh, x = make_mesh(world), draw(1, 2, 8, 16)
    try:
        with dtcp.context_parallel(mesh, seq_len=16, expected_attention_calls=0):
            flex_attention = importlib.import_module(name).flex_attention
            for call in (flex_attention, torch.compile(flex_attention, backend="aot_eager")):
                with raises(Exception, "flex_attention inside context_parallel is not available yet"):
                    call(x, x, x)
        assert flex_attention(x, x, x).shape == x.shape
    finally:
        if loaded is not None:
            sys.modules[name] = loaded


@pytest.mark.parametrize("check", [check_flex, check_flex_loaded_inside])
def test_flex_attention_is_refused(ranks: Any, check: Any) -> None:
    ranks.run(2, check)


# ------------------------------------------------------------------------------ transforms, export, double backward


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def transformed(name: str, cp: Any, local: Tensor, loss: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the transform gives, and what is right if that is not attention itself."""
    query = local[0].clone()
    match name:
        case "vmap":
            return torch.vmap(OF_PART)(*(y[:, None] for y in local)).squeeze(1), None
        case "func.grad":
            return torch.func.grad(loss)(query), grad
        case "func.vjp":
            return torch.func.vjp(OF_PART, *local)[0], None
        case "func.jvp":
            return torch.func.jvp(loss, (query,), (query,))[1], (grad * query).sum()
        case "forward mode":
            forward_ad = importlib.import_module("torch.autograd.forward_ad")
            with forward_ad.dual_level():
                tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(query, query))).tangent
                return torch.zeros(()) if tangent is None else tangent, (grad * query).sum()
        case "functional_call":
            return torch.func.functional_call(Attention(), {}, tuple(local)), None
        case "double backward":
            (first,) = torch.autograd.grad(loss(query.requires_grad_()), query, create_graph=True)
            return torch.autograd.grad(first.sum(), query)[0], torch.tensor(float("nan"))
        case "export strict" | "export":
            export = importlib.import_module("torch.export").export
            return export(Attention(), tuple(local), strict=name == "export strict").module()(*local), None
        case "make_fx real" | "make_fx fake":
            make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
            return make_fx(OF_PART, tracing_mode=name.split()[1])(*local)(*local), None
        case "jit.trace" | "jit.script":
            jit = importlib.import_module("torch.jit")
            traced = jit.script(scripted) if name == "jit.script" else jit.trace(scripted, tuple(local))
            return traced(*local), None
    raise AssertionError(name)


# Right, or an error with these words: also where another call of the same context was counted.
TRANSFORMS: dict[str, str | None] = {
    "vmap": "vmap",
    "func.grad": "func",
    "func.vjp": "func",
    "func.jvp": "forward",
    "forward mode": "forward",
    "functional_call": None,
    "double backward": "no second derivative (double backward)",
    "export strict": None,
    "export": "by a route that dtcp does not see",
    "make_fx real": None,
    "make_fx fake": "by a route that dtcp does not see",
    "jit.trace": None,
    "jit.script": None,
}


def check_transform(rank: int, world: int, name: str) -> None:
    mesh, refusal = make_mesh(world), TRANSFORMS[name]
    whole = draw(3, 2, 2, S, 8)
    right = dtcp.reference_attention(*whole.double(), is_causal=True)
    with dtcp.context_parallel(mesh, seq_len=S) as cp:
        check_right(cp, OF_PART)
        local = cp.shard(whole, dim=3)

        def loss(query: Tensor) -> Tensor:
            return OF_PART(query, local[1], local[2]).square().sum()

        query = local[0].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(query), query)
        try:
            out, wanted = transformed(name, cp, local, loss, grad)
        except Exception as error:
            assert refusal is not None and refusal in str(error), f"{type(error).__name__}: {error}"
            return
        assert refusal is None, "expected a refusal"
        wanted = cp.shard(right, dim=2) if wanted is None else wanted
        assert relative_error(out.detach(), wanted) < TOLERANCE, (out.flatten()[:4], wanted.flatten()[:4])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_is_right_or_refused(ranks: Any, name: str) -> None:
    ranks.run(2, check_transform, name)


# -------------------------------------------------------------------------------------------------------------- compile


def check_compile(rank: int, world: int, inside_first: bool) -> None:
    """One compiled function outside and inside, in either order, is right in both."""
    mesh, x = make_mesh(world), draw(3, 2, 2, S, 8)
    right = dtcp.reference_attention(*x.double(), is_causal=True)
    compiled = torch.compile(lambda q, k, v: by_name_before(q, k, v, is_causal=True), backend="aot_eager")

    def outside() -> None:
        assert relative_error(compiled(*x), right) < TOLERANCE

    def inside(layout: str) -> None:
        with dtcp.context_parallel(mesh, seq_len=S, layout=layout, expected_attention_calls=1) as cp:
            check_right(cp, compiled)

    for _ in range(2):
        if not inside_first:
            outside()
        inside("head_tail")
        inside("striped")
        outside()


@pytest.mark.parametrize("inside_first", [True, False])
def test_compiled_outside_and_inside(ranks: Any, inside_first: bool) -> None:
    ranks.run(2, check_compile, inside_first)


def check_autocast(rank: int, world: int) -> None:
    """Autocast casts the inputs of attention, eager and compiled, of one dtype or of several."""
    mesh, x = make_mesh(world), draw(3, 2, 2, S, 8)
    compiled = torch.compile(OF_PART, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16), dtcp.context_parallel(mesh, seq_len=S) as cp:
        local = cp.shard(x, dim=3)
        eager, again = OF_PART(*local), compiled(*local)
        assert eager.dtype == again.dtype == torch.bfloat16 and torch.equal(eager, again)
        assert torch.equal(OF_PART(local[0], local[1], local[2].bfloat16()), eager)
        assert torch.equal(compiled(local[0], local[1], local[2].bfloat16()), eager)


def test_autocast(ranks: Any) -> None:
    ranks.run(2, check_autocast)
