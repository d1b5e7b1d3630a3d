"""torchtitan's models with dtcp's attention: numerics, doors, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dtcp
from dtcp.models import Llama, LlamaConfig, RopeScaling, build_model, model_config
from parity import whole

PUBLISHED = {
    "titan_llama3_1b": 1_235_814_400,
    "titan_llama3_3b": 3_212_749_824,
    "titan_llama3_8b": 8_030_261_248,
    "titan_llama3_70b": 70_553_706_496,
    "titan_llama3_405b": 405_853_388_800,
    "titan_qwen3_0_6b": 596_049_920,
    "titan_qwen3_8b": 8_190_735_360,
    "titan_qwen3_30b_a3b": 30_532_122_624,
    "titan_gpt_oss_20b": 20_914_757_184,
    "titan_gpt_oss_120b": 116_829_156_672,
}


def some_tokens(rows: int = 2, seq_len: int = 33) -> Tensor:
    return torch.randint(0, 257, (rows, seq_len), generator=torch.Generator().manual_seed(7))


def small(**options: object) -> nn.Module:
    """A `TitanDecoder` with peaked attention and weights, gains of norms too."""
    from dtcp.models.titan import TitanDecoder
    from titans import small_llama3

    model = TitanDecoder(small_llama3(**options), qk_init_scale=8.0)
    model.init_weights(3)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model


# ---- what is built ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [pytest.param(*item, marks=[pytest.mark.slow] * (item[0] != "titan_llama3_8b")) for item in PUBLISHED.items()],
)
def test_presets_are_of_the_published_sizes(name, published):
    from dtcp.models.titan_registry import REGISTRIES

    config = model_config(name)
    assert config.num_parameters == published
    if config.family != "llama3":  # torchtitan counts experts and windows in another way
        return
    theirs = REGISTRIES[config.family][1][config.flavor]("varlen")
    with torch.device("meta"):
        num_parameters, flops = theirs.get_nparams_and_flops(theirs.build(), 8192)
    assert num_parameters == published
    attention = 6 * len(theirs.layers) * theirs.dim * 8192  # torchtitan counts the whole square
    assert config.flops_per_token(8192) == flops - attention


def test_sizes_can_be_overridden():
    model = build_model("titan_llama3_debug", device="meta", num_layers=2, vocab_size=300, max_seq_len=64)
    assert len(model.layers) == 2
    assert model.tok_embeddings.weight.shape == model.lm_head.weight.shape == (300, 256)
    assert {block.attention.rope.cache.size(0) for block in model.layers.values()} == {64}
    with pytest.raises(ValueError, match=r"max_seq_len=64 positions, got a sequence of 65; override max_seq_len=65"):
        model_config("titan_llama3_debug", max_seq_len=64).check_seq_len(65)


def test_initial_weights_depend_on_seed_and_name_and_are_torchtitans_distributions():
    torch.manual_seed(1)
    one = build_model("titan_llama3_debug", seed=5)
    torch.manual_seed(2)
    other = build_model("titan_llama3_debug", device="meta", num_layers=2)
    other.to_empty(device="cpu")
    del other.layers["0"]
    other.init_weights(5)
    weights = dict(one.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in other.named_parameters())
    assert torch.equal(other.layers["1"].attention.rope.cache, one.layers["0"].attention.rope.cache)
    expected = {
        "tok_embeddings": 1.0,
        "lm_head": 256**-0.5,
        "layers.2.attention.qkv_linear.wqkv": 0.02,
        "layers.2.attention.wo": 0.02 / 6**0.5,
        "layers.2.feed_forward.w1": 0.02,
        "layers.2.feed_forward.w3": 0.02 / 6**0.5,
    }
    for name, std in expected.items():
        assert weights[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.02), name
    assert bool((weights["norm.weight"] == 1).all())
    with pytest.raises(NotImplementedError, match=r"call init_weights\(seed\) instead"):
        one.init_states()


@pytest.mark.parametrize("fused", [True, False])
def test_peaked_attention_scales_queries_and_keys_only(fused):
    from dtcp.models.titan import TitanDecoder
    from titans import small_llama3

    plain, peaked = (TitanDecoder(small_llama3(fused=fused), qk_init_scale=scale) for scale in (1.0, 8.0))
    for model in (plain, peaked):
        model.init_weights(0)
    for (name, before), after in zip(plain.named_parameters(), peaked.parameters(), strict=True):
        factor = torch.ones(1)
        if "wqkv" in name:  # a group: two query heads, a key head, a value head of 8
            factor = torch.tensor([8.0, 8, 8, 1]).repeat_interleave(8).repeat(4)[:, None]
        elif "wq" in name or "wk" in name:
            factor = torch.tensor(8.0)
        assert torch.equal(after, before * factor), name


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"fused": False}], ids=["fused", "tied", "separate"])
def test_it_computes_what_torchtitans_own_model_computes(options):
    """Bitwise; torchtitan's has the same attention, and takes the weights in the form of its checkpoints."""
    from dtcp.integrations.torchtitan import with_dtcp_attention
    from titans import small_llama3

    ours, theirs = small(**options), with_dtcp_attention(small_llama3(**options)).build()
    theirs.init_states()
    weights = ours.state_dict()
    if options.get("tied"):
        weights["lm_head.weight"] = weights["tok_embeddings.weight"]
    assert not theirs.load_state_dict(weights).missing_keys
    tokens, positions = some_tokens(), torch.arange(33).expand(2, 33)
    assert torch.equal(ours(tokens, positions), theirs(tokens, positions))
    with torch.no_grad():
        ours.layers["0"].attention.wo.weight.zero_()
    ours.load_state_dict(theirs.state_dict())
    hidden_sum = ours(tokens, positions, head_fn=lambda hidden, weight: (hidden @ weight.T).sum())
    torch.testing.assert_close(hidden_sum, theirs(tokens, positions).sum(), rtol=1e-5, atol=1e-3)


def as_llama(model: nn.Module) -> Llama:
    """The same model as one of ours: separate projections, rotary pairs (d, d + D/2) instead of neighbours."""
    config = LlamaConfig(257, 64, 2, 8, 4, 160, rope_scaling=RopeScaling(8.0))
    llama = build_model(config, device="meta").to_empty(device="cpu")
    state = {}
    names = {"attention_norm": "attention_norm", "ffn_norm": "feed_forward_norm", "attention.wo": "attention.output"}
    names |= {f"feed_forward.{a}": f"feed_forward.{b}" for a, b in (("w1", "gate"), ("w3", "up"), ("w2", "down"))}
    theirs = model.state_dict()
    for i in ("0", "1"):
        query, key, value = theirs[f"layers.{i}.attention.qkv_linear.wqkv.weight"].view(4, 4, 8, 64).split([2, 1, 1], 1)
        for name, rows in (("query", query), ("key", key)):
            halves = rows.reshape(-1, 4, 2, 64).transpose(1, 2)  # heads, pairs, first and second of a pair
            state[f"layers.{i}.attention.{name}.weight"] = halves.reshape(-1, 64)
        state[f"layers.{i}.attention.value.weight"] = value.reshape(-1, 64)
        for a, b in names.items():
            state[f"layers.{i}.{b}.weight"] = theirs[f"layers.{i}.{a}.weight"]
    for a, b in (("tok_embeddings", "token_embedding"), ("norm", "final_norm"), ("lm_head", "head")):
        state[f"{b}.weight"] = theirs[f"{a}.weight"]
    llama.load_state_dict(state)
    return llama


def test_it_is_our_llama_with_the_same_weights_in_float64():
    """To 3e-6: torchtitan's rotary table and its rotation are float32, at any dtype of the model."""
    titan = small()
    llama = as_llama(titan).to(torch.float64)
    titan.to(torch.float64)
    tokens = some_tokens()
    positions = torch.stack([torch.arange(33), torch.arange(40, 73).flip(0)])
    right = llama(tokens, positions)
    out = titan(tokens, positions)
    assert out.dtype == torch.float64
    assert ((out - right).norm() / right.norm()).item() < 3e-6
    assert ((titan(tokens) - right).norm() / right.norm()).item() > 1e-3  # positions are read
    assert torch.equal(titan(tokens, torch.arange(33)), titan(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_rotary_table_survives_another_dtype(dtype):
    model = small()
    table = model.layers["0"].attention.rope.cache.clone()
    model.to(dtype)
    assert torch.equal(model.layers["0"].attention.rope.cache, table)
    assert model.layers["1"].attention.rope.cache is model.layers["0"].attention.rope.cache


def small_gpt_oss(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Ours, and torchtitan's own layers with the same weights; peaked, with sinks that matter."""
    from dtcp.integrations.torchtitan import with_dtcp_attention
    from dtcp.models.titan import TitanDecoder
    from titans import small_gpt_oss

    config = with_dtcp_attention(small_gpt_oss())
    for layer in config.layers:
        layer.moe.load_balance_coeff = None
    ours, theirs = TitanDecoder(config, qk_init_scale=8.0), config.build()
    ours.init_weights(3)
    theirs.init_states()
    with torch.no_grad():
        for layer in ours.layers.values():
            layer.attention.sinks.add_(1.0)
    theirs.load_state_dict(ours.state_dict())
    return ours.to(dtype), theirs.to(dtype)


def test_gpt_oss_in_bfloat16_is_torchtitans_own_bitwise():
    ours, theirs = small_gpt_oss(torch.bfloat16)
    for mine, other in zip(ours.layers.values(), theirs.layers.values(), strict=True):
        other.attention.rope.cache = mine.attention.rope.cache  # which `to` has rounded
    tokens, positions = some_tokens(2, 64), torch.arange(64).expand(2, 64)
    assert torch.equal(ours(tokens, positions), theirs(tokens, positions))


def test_gpt_oss_attention_is_torchtitans_formula_with_sinks_and_window():
    """Its output rescaled by sigmoid(lse - sink), as behind torchtitan's own kernels; YaRN's factor in the scale."""
    ours, _ = small_gpt_oss(torch.float64)
    positions = torch.arange(64)[None]
    for layer, left in (("0", 19), ("1", 64)):
        attention = ours.layers[layer].attention
        x = torch.randn(1, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        query, key, value = attention.qkv_linear(x)
        query, key = attention.rope(query, key, positions)
        key, value = (t.repeat_interleave(query.size(2) // t.size(2), 2) for t in (key, value))
        scores = torch.einsum("blnh,bmnh->bnlm", query, key) * attention.softmax_scale
        distance = torch.arange(64)[:, None] - torch.arange(64)
        scores = scores.masked_fill((distance < 0) | (distance > left), float("-inf"))
        out = torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), value)
        right = attention.wo(attention._apply_sinks(out, scores.logsumexp(-1).transpose(1, 2)).flatten(2))
        assert abs(attention.softmax_scale * 8 - 1) > 0.1
        torch.testing.assert_close(attention(x, None, positions), right, rtol=1e-6, atol=1e-9)


def test_experts_whose_loads_an_optimizer_balances_are_refused():
    from dtcp.models.titan import TitanDecoder
    from titans import small_gpt_oss

    with pytest.raises(NotImplementedError, match=r"layers.0.moe of the config has load_balance_coeff=0.001: a bias"):
        TitanDecoder(small_gpt_oss())


# ---- torchtitan's own models, by the doors ---------------------------------------------------------------------------


def torchtitans_own(kind: str) -> nn.Module:
    from torchtitan.models.qwen3 import qwen3_configs

    from dtcp.integrations.torchtitan import with_dtcp_attention
    from dtcp.models.titan_experts import keep_dtype
    from titans import small_gpt_oss, small_llama3

    match kind:
        case "llama3":
            config = small_llama3("flex")
        case "gpt_oss":
            config = small_gpt_oss(attn_backend="flex")  # whose windows are of the layer, not of its attention
        case _:
            config = qwen3_configs[kind]("varlen")
    config.layers = config.layers[:2]
    model = with_dtcp_attention(config).build()
    torch.manual_seed(0)
    model.init_states()
    for layer in model.layers.values():
        if kind == "gpt_oss":  # whose experts take nothing but bfloat16
            keep_dtype(layer.moe.routed_experts)
    with torch.no_grad():  # peaked
        for name, parameter in model.named_parameters():
            if "wqkv" in name or "wq." in name or "wk." in name:
                parameter.mul_(8)
            elif "q_norm" in name:
                parameter.mul_(4)
    return model


def train_once(model: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    loss = dtcp.token_loss(model(tokens, positions), labels, num_valid_tokens=labels.numel())
    loss.backward()
    return loss.detach()


def by_a_door(rank: int, world: int, kind: str, door: str, fn: Callable = train_once) -> list[float]:
    """Relative errors of the loss and of every gradient; the sequence of 97 is padded."""
    from torch.distributed.tensor.parallel import parallelize_module

    dims = dtcp.ParallelDims(cp=world)
    mesh = dims.build_mesh("cpu")
    tokens, labels = some_tokens(2, 97), some_tokens(2, 97).roll(-1, 1)
    positions = torch.arange(97).expand(2, 97)
    right = torchtitans_own(kind)
    right_loss = fn(right, tokens, labels, positions)
    model = torchtitans_own(kind)
    if door == "context":
        buffers = [tokens, labels, positions]
        with dtcp.context_parallel(
            mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], buffer_pad_values=[0, -100, 0]
        ) as cp:
            loss = dtcp.token_loss(model(tokens, positions), labels, num_valid_tokens=2 * 97)
            loss.backward()
        assert cp.num_attention_calls == 2
    else:
        if door == "plan":
            for block in model.layers.values():
                parallelize_module(block, mesh["cp"], {"attention.inner_attention.sdpa": dtcp.ContextParallel()})
        else:
            dtcp.parallelize(model, dims, activation_checkpointing="selective")
        layout = dtcp.make_layout("head_tail", seq_len=97, cp=world)
        dtcp.set_sequence(model, layout)
        parts = [
            dtcp.shard(x, mesh["cp"], layout, pad_value=pad) for x, pad in ((tokens, 0), (labels, -100), (positions, 0))
        ]
        loss = dtcp.token_loss(model(parts[0], parts[2]), parts[1], num_valid_tokens=2 * 97)
        loss.backward()
    if door != "parallelize":  # which has FSDP2
        dtcp.reduce_gradients(model, dims)
    loss = loss.detach().clone()
    torch.distributed.all_reduce(loss)
    errors = [((loss - right_loss) / right_loss).abs().item()]
    for p, q in zip(model.parameters(), right.parameters(), strict=True):
        errors.append(((whole(p.grad) - q.grad).norm() / q.grad.norm()).item())
    return errors


@pytest.mark.parametrize(
    ("kind", "door", "world"),
    [
        ("llama3", "context", 2),
        pytest.param("llama3", "plan", 2, marks=pytest.mark.slow),
        pytest.param("llama3", "context", 3, marks=pytest.mark.slow),
        pytest.param("debugmodel", "context", 2, marks=pytest.mark.slow),  # Qwen 3
        pytest.param("gpt_oss", "context", 2, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "plan", 3, marks=pytest.mark.slow),
        pytest.param("debugmodel", "parallelize", 2, marks=pytest.mark.slow),
        pytest.param("debugmodel_non_fused_qkv", "plan", 3, marks=pytest.mark.slow),
    ],
)
def test_torchtitans_own_models_are_context_parallel_by_the_doors(ranks, kind, door, world):
    for errors in ranks.run(world, by_a_door, kind, door):
        assert max(errors) < 1e-5, errors


def by_dtensors(rank: int, world: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    from dtcp.integrations.torchtitan import DtcpAttention

    mesh = dtcp.ParallelDims(cp=world).build_mesh("cpu")["cp"]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 13, heads, 16, generator=generator) for heads in (4, 2, 2))
    right = dtcp.reference_attention(query, key, value, is_causal=True, enable_gqa=True, qkv_format="bshd")
    parts = [distribute_tensor(x, mesh, [Shard(1)]) for x in (query, key, value)]
    out = DtcpAttention.Config().build()(*parts, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out.full_tensor(), right, rtol=1e-5, atol=1e-5)


def test_its_attention_takes_dtensors(ranks):
    ranks.run(2, by_dtensors)


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_what_dtcps_attention_is_not_is_refused_by_name():
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.deepseek_v3 import deepseekv3_configs

    from dtcp.integrations.torchtitan import DtcpAttention, with_dtcp_attention
    from titans import small_llama3

    window = small_llama3()
    window.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(16, 2))
    for config, pattern in [
        (window, r"layer 1 of Llama3Model.Config has window_size=\(16, 2\), which"),
        (deepseekv3_configs["debugmodel"]("flex", "standard"), r"layer 0 of DeepSeekV3Model.Config has Attention.Conf"),
    ]:
        with pytest.raises(NotImplementedError, match=pattern):
            with_dtcp_attention(config)
    with pytest.raises(NotImplementedError, match=r"is causal, got window_size=\(16, 2\); use \(16, 0\)"):
        DtcpAttention.Config(window_size=(16, 2)).build()


def check_packed_windows(rank: int, world: int) -> None:
    """torchtitan's model with a window in one layer and packed documents, beside each document alone on one rank."""
    from torch.distributed.tensor.parallel import parallelize_module
    from torchtitan.models.common.attention import VarlenAttention

    from dtcp.integrations.torchtitan import with_dtcp_attention
    from titans import small_llama3

    config = small_llama3()
    config.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(6, 0))
    torch.manual_seed(0)
    model = with_dtcp_attention(config).build()
    model.init_states()
    model = model.double()
    documents = dtcp.Documents.from_lengths([9, 1, 23])
    tokens = torch.randint(0, 257, (1, 33), generator=torch.Generator().manual_seed(7))
    parts, start = [], 0
    for length in (9, 1, 23):
        parts.append(model(tokens[:, start : start + length], torch.arange(length)[None]))
        start += length
    mesh = dtcp.ParallelDims(cp=world).build_mesh("cpu")["cp"]
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"attention.inner_attention.sdpa": dtcp.ContextParallel()})
    for name in ("head_tail", "per_document"):
        layout = dtcp.make_layout(name, seq_len=33, cp=world, documents=documents)
        dtcp.set_sequence(model, layout, documents=documents)
        positions = documents.positions()[None]
        logits = model(dtcp.shard(tokens, mesh, layout), dtcp.shard(positions, mesh, layout))
        torch.testing.assert_close(dtcp.unshard(logits, mesh, layout), torch.cat(parts, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world", [1, 2])
def test_packed_documents_and_windows_are_right(ranks, world):
    ranks.run(world, check_packed_windows)


def test_what_a_layer_asks_of_attention_is_done_or_refused():
    from dtcp.integrations.torchtitan import DtcpAttention

    attend = DtcpAttention.Config().build()
    query, key, value = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 8)
    out = attend(query, key, value, scale=0.25, enable_gqa=True)
    right = dtcp.reference_attention(query, key, value, is_causal=True, enable_gqa=True, qkv_format="bshd")
    torch.testing.assert_close(out, right)
    right = dtcp.reference_attention(query, key, value, is_causal=True, enable_gqa=True, qkv_format="bshd", scale=0.3)
    torch.testing.assert_close(attend(query, key, value, scale=0.3), right)
    with pytest.raises(NotImplementedError, match=r"nothing else, got out_transform"):
        attend(query, key, value, out_transform=lambda out, lse: out)
    with pytest.raises(NotImplementedError, match=r"nothing else, got score_mod"):
        attend(query, key, value, score_mod=lambda score, *_: score, out_transform=None)
    model, tokens, positions = small(), some_tokens(), torch.arange(33).expand(2, 33) % 20
    with pytest.raises(NotImplementedError, match=r"got attention_masks=VarlenMetadata; call model\(tokens, positions"):
        model(tokens, positions, model.get_attention_masks(positions))  # what torchtitan's trainer does


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        ({"flavor": "9B"}, r"no Llama 3 flavor '9B'; flavors: debugmodel"),
        ({"num_layers": 7}, r"debugmodel has 6 layers, got num_layers=7; use at most those"),
        ({"num_layers": 0}, r"num_layers must be an integer >= 1, got 0"),
        ({"dropout": 0.1}, r"no field 'dropout'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(overrides, pattern):
    with pytest.raises(ValueError, match=pattern):
        model_config("titan_llama3_debug", **overrides)


def test_positions_and_tokens_out_of_range_are_refused():
    model, tokens = small(), some_tokens()
    with pytest.raises(ValueError, match=r"rotary table of max_seq_len=256 positions, got a sequence of 257"):
        model(tokens, torch.arange(224, 257))
    with pytest.raises(ValueError, match=r"positions must be >= 0, got -1"):
        model(tokens, torch.arange(-1, 32))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 257\)"):
        model(tokens + 200)


def test_a_config_without_initial_distributions_is_refused():
    from dtcp.models.titan import TitanDecoder
    from titans import small_llama3

    config = small_llama3()
    config.norm.param_init = None
    with pytest.raises(ValueError, match=r"no initial distribution of norm.weight"):
        TitanDecoder(config)


def test_modules_that_a_plan_would_cut_in_another_way_are_refused():
    from torchtitan.models.llama3 import llama3_configs

    from dtcp.models.titan import TitanDecoder

    config = llama3_configs["debugmodel"]("varlen", tp_gemm_backend="dist_gemm")
    with pytest.raises(NotImplementedError, match=r"qkv_linear of the config is AllGatherFusedQKVLinear.Config; Tita"):
        TitanDecoder(config)
