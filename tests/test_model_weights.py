"""The models' initial weights: a function of seed and name, the same however the model is built, wrapped or sharded."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dtcp.models import build_model
from dtcp.models.init import Init, draw, plain_name
from ranks import Ranks


def some_tokens(rows: int = 2, seq_len: int = 24) -> Tensor:
    return torch.randint(0, 40, (rows, seq_len), generator=torch.Generator().manual_seed(7))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_initial_weights_depend_on_seed_and_name_only(name: str) -> None:
    torch.manual_seed(1)
    expected = weights_of(build_model(name, seed=5))
    torch.manual_seed(2)
    model = build_model(name, device="meta")
    model.to_empty(device="cpu")
    model.init_weights(5)
    assert_same_weights(weights_of(model), expected)
    model.init_weights(6)
    changed = weights_of(model)
    assert all(not torch.equal(changed[n], w) for n, w in expected.items() if w.std() > 0)
    fewer = build_model(name, seed=5)
    del fewer.layers["0"], fewer.layers["2"]
    assert_same_weights(weights_of(fewer), {n: w for n, w in expected.items() if ".0." not in n and ".2." not in n})


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_initial_weights_are_the_same_under_wrappers(name: str) -> None:
    expected = weights_of(build_model(name, seed=5))
    model = build_model(name)
    for key, block in model.layers.items():
        model.layers[key] = torch.compile(checkpoint_wrapper(block))
    names = [n for n, _ in model.named_parameters()]
    assert any("_orig_mod._checkpoint_wrapped_module." in n for n in names)
    model.init_weights(5)
    assert_same_weights(weights_of(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_initial_weights_of_another_dtype_are_the_float32_ones_rounded(dtype: torch.dtype) -> None:
    expected, model = weights_of(build_model("llama_tiny")), build_model("llama_tiny").to(dtype)
    model.init_weights(0)
    assert_same_weights(weights_of(model), {n: w.to(dtype) for n, w in expected.items()})


def test_no_two_parameters_share_their_values() -> None:
    weights = [w.flatten()[:16] for w in weights_of(build_model("llama_tiny")).values() if w.std() > 0]
    assert len({tuple(w.tolist()) for w in weights}) == len(weights)


def test_gpt_scales_residual_outputs_and_starts_with_zero_biases() -> None:
    weights = weights_of(build_model("gpt_tiny"))
    assert weights["token_embedding.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["layers.3.attention.value.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    for name in ("layers.0.attention.output.weight", "layers.3.feed_forward.down.weight"):
        assert weights[name].std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert all(w.eq(0).all() for n, w in weights.items() if n.endswith("bias"))
    assert all(w.eq(1).all() for n, w in weights.items() if n.endswith("norm.weight"))


def test_llama_truncates_and_scales_residual_outputs_by_depth() -> None:
    weights = weights_of(build_model("llama_tiny"))
    assert all(w.abs().max() <= 3 * 0.02 for n, w in weights.items() if "norm" not in n)
    for i in range(4):
        std = weights[f"layers.{i}.feed_forward.down.weight"].std().item()
        assert std == pytest.approx(0.987 * 0.02 / math.sqrt(2 * (i + 1)), rel=0.02)  # 0.987: cut at 3 std


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_qk_init_scale_multiplies_query_and_key_weights_and_nothing_else(name: str) -> None:
    plain, peaked = weights_of(build_model(name)), weights_of(build_model(name, qk_init_scale=10.0))
    for n, w in plain.items():
        factor = 10 if n.endswith(("query.weight", "key.weight")) else 1
        torch.testing.assert_close(peaked[n], factor * w, rtol=1e-5, atol=1e-8)


def test_init_weights_on_meta_names_the_cure() -> None:
    with pytest.raises(ValueError, match=r"token_embedding\.weight is on the meta device.*to_empty"):
        build_model("gpt_tiny", device="meta").init_weights(0)


def test_draw_without_spread_is_the_mean() -> None:
    assert draw(torch.Size((3,)), 0, "x", Init(mean=1.0)).tolist() == [1, 1, 1]


def test_build_model_follows_the_default_device() -> None:
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in build_model("gpt_tiny").parameters())
    assert all(parameter.device.type == "cpu" for parameter in build_model("gpt_tiny").parameters())


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_a_tied_head_stays_tied_when_the_model_is_materialised(name: str) -> None:
    model = build_model(name, device="meta", tie_weights=True)
    model.to_empty(device="cpu")
    model.init_weights(0)
    assert not any("head" in n for n in model.state_dict())
    before = model(some_tokens())
    with torch.no_grad():
        model.token_embedding.weight[263] += 1  # some_tokens never has it: only the head reads this row
    assert (model(some_tokens()) != before).any(dim=(0, 1)).nonzero().flatten().tolist() == [263]


# ---- sharded ---------------------------------------------------------------------------------------------------------


def init_sharded(rank: int, world: int, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    match kind:
        case "fsdp":
            mesh = tensor_mesh = init_device_mesh("cpu", (world,))
        case "hsdp":
            mesh = tensor_mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replica", "shard"))
        case "fsdp_and_tp":
            both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
            mesh, tensor_mesh = both["data"], both["tensor"]
        case _:
            raise AssertionError(kind)
    for name in ("gpt_tiny", "llama_tiny"):
        model = build_model(name, device="meta")
        for block in model.layers.values():
            if kind == "fsdp_and_tp":
                plan = {"attention.query": ColwiseParallel(), "attention.output": RowwiseParallel()}
                parallelize_module(block, tensor_mesh, plan)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with CommDebugMode() as communication:
            model.init_weights(5)
        assert communication.get_total_counts() == 0
        expected = weights_of(build_model(name, seed=5))
        for n, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[n]), n


@pytest.mark.parametrize(("world", "kind"), [(2, "fsdp"), (3, "fsdp"), (4, "hsdp"), (4, "fsdp_and_tp")])
def test_sharded_initial_weights_equal_the_whole_ones_without_communication(
    ranks: Ranks, world: int, kind: str
) -> None:
    ranks.run(world, init_sharded, kind)


def train_sharded(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    tokens = some_tokens(1, 16)
    for name, tied in itertools.product(("gpt_tiny", "llama_tiny"), (True, False)):
        whole, model = build_model(name, tie_weights=tied), build_model(name, device="meta", tie_weights=tied)
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights(0)
        for m in (whole, model):
            m(tokens).logsumexp(-1).sum().backward()
        scale = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        for (n, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert (a.grad.full_tensor() - b.grad).norm() < 1e-6 * scale, f"{name}, tied {tied}: {n}"


def test_fsdp_gradients_of_tied_and_untied_models_are_the_whole_ones(ranks: Ranks) -> None:
    ranks.run(2, train_sharded)
