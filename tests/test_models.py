"""The models: published sizes, formulas, positions, initial weights. No parallel code in them, so hardly any here."""

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

import dtcp.models
from dtcp.models import GPT, PRESETS, Llama, RopeScaling, build_model
from dtcp.models.rope import RotaryEmbedding

SMALL = {"dim": 32, "num_layers": 2, "vocab_size": 40, "qk_init_scale": 8.0}
SCALING = RopeScaling(8.0, original_max_seq_len=128)  # some of 4 frequencies kept, some stretched, some between

Model = GPT | Llama


def small_models(**overrides: object) -> list[Model]:
    """Each kind of model, peaked attention, float64, biases and norms that are not their initial 0 and 1."""
    models: list[Model] = [
        build_model("gpt_tiny", **{**SMALL, "max_seq_len": 64, **overrides}),
        build_model("gpt_tiny", **{**SMALL, "max_seq_len": 64, "tie_weights": False, **overrides}),
        build_model("llama_tiny", **{**SMALL, "ffn_dim": 48, "rope_scaling": SCALING, **overrides}),
        build_model("llama_tiny", **{**SMALL, "ffn_dim": 48, "tie_weights": True, **overrides}),
    ]
    for model in models:
        model.to(torch.float64)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) / 4)
    return models


def some_tokens(rows: int = 2, seq_len: int = 24) -> Tensor:
    return torch.randint(0, 40, (rows, seq_len), generator=torch.Generator().manual_seed(7))


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
        ("llama3_8b", 8_030_261_248),
        ("llama3_1_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_1_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_2_3b", 3_212_749_824),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, published: int) -> None:
    model = build_model(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(("titan", "hf"))])
@pytest.mark.parametrize("tied", [True, False])
def test_config_counts_the_parameters_its_model_has(name: str, tied: bool) -> None:
    model = build_model(name, device="meta", tie_weights=tied)
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_llama_presets_stretch_only_what_was_published_stretched() -> None:
    factors = {n: c.rope_scaling and c.rope_scaling.factor for n, c in PRESETS.items() if n.startswith("llama3")}
    assert factors == {
        "llama3_8b": None,
        "llama3_70b": None,
        "llama3_1_8b": 8.0,
        "llama3_1_70b": 8.0,
        "llama3_405b": 8.0,
        "llama3_2_1b": 32.0,
        "llama3_2_3b": 32.0,
    }


class ExplicitAttention(nn.Module):
    """Causal attention by two matrix products, which the flop counter knows."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.mT / math.sqrt(query.size(-1))
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(unseen, -math.inf).softmax(-1) @ value


@pytest.mark.parametrize("index", range(4))
def test_flops_per_token_are_the_counted_ones_with_half_the_attention(index: int) -> None:
    model, tokens = small_models()[index], some_tokens(1, 48)
    for block in model.layers.values():
        block.attention.sdpa = ExplicitAttention()
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n)
    matrices += 40 * 32 if model.config.tie_weights else 0
    attention = 12 * 2 * 32 * 48  # of the full square: layers x dim x seq_len
    assert counter.get_total_flops() / 48 == 6 * matrices + attention
    vectors = model.config.num_matmul_parameters - matrices
    assert model.flops_per_token(48) == 6 * (matrices + vectors) + attention // 2
    assert vectors < 0.05 * matrices


# ---- formulas --------------------------------------------------------------------------------------------------------


def attend_explicitly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One row: query (S, H, D), key and value (S, Hkv, D); position by position."""
    group = query.size(1) // key.size(1)
    out = torch.empty_like(query)
    for i in range(query.size(0)):
        for head in range(query.size(1)):
            scores = key[: i + 1, head // group] @ query[i, head] / math.sqrt(query.size(-1))
            out[i, head] = scores.softmax(0) @ value[: i + 1, head // group]
    return out


def gpt_explicitly(weights: dict[str, Tensor], tokens: Tensor, *, num_heads: int, num_layers: int) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = weights["token_embedding.weight"][tokens] + weights["position_embedding.weight"][: len(tokens)]
    for i in range(num_layers):
        name = f"layers.{i}"
        h = norm(x, f"{name}.attention_norm")
        q, k, v = (
            linear(h, f"{name}.attention.{part}").unflatten(-1, (num_heads, -1)) for part in ("query", "key", "value")
        )
        x = x + linear(attend_explicitly(q, k, v).flatten(1), f"{name}.attention.output")
        h = gelu(linear(norm(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward.up"))
        x = x + linear(h, f"{name}.feed_forward.down")
    return norm(x, "final_norm") @ weights.get("head.weight", weights["token_embedding.weight"]).T


def llama_explicitly(weights: dict[str, Tensor], tokens: Tensor, config: dtcp.models.LlamaConfig) -> Tensor:
    half = config.head_dim // 2

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def frequency(d: int) -> float:
        f = config.rope_theta ** (-2 * d / config.head_dim)
        s = config.rope_scaling
        if s is None:
            return f
        wavelength = 2 * math.pi / f
        if wavelength < s.original_max_seq_len / s.high_freq_factor:
            return f
        if wavelength > s.original_max_seq_len / s.low_freq_factor:
            return f / s.factor
        smooth = s.original_max_seq_len / wavelength - s.low_freq_factor
        smooth /= s.high_freq_factor - s.low_freq_factor
        return (1 - smooth) * f / s.factor + smooth * f

    def rotated(x: Tensor) -> Tensor:  # as multiplication of complex numbers
        turns = torch.tensor([[position * frequency(d) for d in range(half)] for position in range(len(tokens))])
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), turns)[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["token_embedding.weight"][tokens]
    for i in range(config.num_layers):
        name = f"layers.{i}"
        h = norm(x, f"{name}.attention_norm")
        q, k, v = (
            (h @ weights[f"{name}.attention.{part}.weight"].T).unflatten(-1, (-1, config.head_dim))
            for part in ("query", "key", "value")
        )
        out = attend_explicitly(rotated(q), rotated(k), v).flatten(1)
        x = x + out @ weights[f"{name}.attention.output.weight"].T
        h = norm(x, f"{name}.feed_forward_norm")
        gate = h @ weights[f"{name}.feed_forward.gate.weight"].T
        h = gate / (1 + torch.exp(-gate)) * (h @ weights[f"{name}.feed_forward.up.weight"].T)
        x = x + h @ weights[f"{name}.feed_forward.down.weight"].T
    return norm(x, "final_norm") @ weights.get("head.weight", weights["token_embedding.weight"]).T


@pytest.fixture
def _float64() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("index", range(4))
def test_logits_match_the_explicit_formula_in_float64(index: int) -> None:
    model, tokens = small_models()[index], some_tokens()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if isinstance(model, GPT):
        expected = [gpt_explicitly(weights, row, num_heads=4, num_layers=2) for row in tokens]
    else:
        expected = [llama_explicitly(weights, row, model.config) for row in tokens]
    assert relative_error(model(tokens), torch.stack(expected)) < 1e-13


def test_rope_scaling_of_the_small_models_covers_all_three_cases() -> None:
    plain, scaled = (RotaryEmbedding(8, 10_000.0, s).frequencies(torch.device("cpu")) for s in (None, SCALING))
    ratio = plain / scaled
    assert ratio[0] == 1
    assert 1 < ratio[1] < 8
    assert ratio[-1] == 8


# ---- positions -------------------------------------------------------------------------------------------------------


class GatheredAttention(nn.Module):
    """Stands for any exact context parallel attention: batch rows are ``parts`` slices of each sequence.

    Everything is gathered into natural order, attended to at once and cut again.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions  # (parts, S / parts)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts, order = len(self.positions), self.positions.flatten()

        def joined(x: Tensor) -> Tensor:  # (parts * B, H, S / parts, D) to (B, H, S, D)
            x = x.unflatten(0, (parts, -1)).movedim(0, 2).flatten(2, 3)
            return x[:, :, order.argsort()]

        out = F.scaled_dot_product_attention(
            joined(query), joined(key), joined(value), is_causal=True, enable_gqa=query.size(1) != key.size(1)
        )
        return out[:, :, order].unflatten(2, (parts, -1)).movedim(2, 0).flatten(0, 1)


@pytest.mark.parametrize("index", range(4))
def test_everything_but_sdpa_is_pointwise_along_the_sequence(index: int) -> None:
    whole, cut = small_models()[index], small_models()[index]
    tokens = some_tokens(2, 24)
    positions = torch.randperm(24, generator=torch.Generator().manual_seed(3)).view(3, 8)
    for block in cut.layers.values():
        block.attention.sdpa = GatheredAttention(positions)
    logits = cut(tokens[:, positions].movedim(1, 0).flatten(0, 1), positions.repeat_interleave(2, 0))
    expected = whole(tokens)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(upstream)
    logits.backward(upstream[:, positions].movedim(1, 0).flatten(0, 1))
    got = logits.unflatten(0, (3, 2)).movedim(0, 1).flatten(1, 2)[:, positions.flatten().argsort()]
    assert relative_error(got, expected) < 1e-13
    scale = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
    for (name, a), b in zip(cut.named_parameters(), whole.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 1e-13 * scale, name


@pytest.mark.parametrize("index", range(4))
def test_positions_default_to_arange_and_may_be_shared_by_the_rows(index: int) -> None:
    model, tokens = small_models()[index], some_tokens()
    expected = model(tokens, torch.arange(24).expand(2, 24))
    assert torch.equal(model(tokens), expected)
    assert torch.equal(model(tokens, torch.arange(24)), expected)
    assert not torch.allclose(model(tokens, torch.arange(24).flip(0)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_is_right_at_a_million(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(128, 500_000.0)
    positions = torch.tensor([[1_048_575, 999_983, 65_537, 0]])
    query = torch.randn(1, 2, 4, 128, dtype=dtype)
    got, _ = rotary(query, query, positions)
    for slot, position in enumerate(positions[0].tolist()):
        for d in (0, 1, 17, 63):
            angle = position * 500_000.0 ** (-2 * d / 128)
            first, second = query[0, 0, slot, d].item(), query[0, 0, slot, d + 64].item()
            expected = first * math.cos(angle) - second * math.sin(angle)
            assert abs(got[0, 0, slot, d].item() - expected) < (1e-6 if dtype == torch.float32 else 1e-9)


def test_rotation_of_bfloat16_rounds_once() -> None:
    query = torch.randn(1, 2, 16, 32).bfloat16()
    rotary, positions = RotaryEmbedding(32, 10_000.0), torch.arange(100_000, 100_016)
    got, _ = rotary(query, query, positions)
    expected, _ = rotary(query.float(), query.float(), positions)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())


# ---- compile, checkpointing, dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_one_compiled_graph_serves_all_positions_and_equals_eager(index: int) -> None:
    torch._dynamo.reset()
    eager, model = small_models()[index], small_models()[index]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(3):
        tokens = some_tokens()
        positions = torch.randperm(24, generator=torch.Generator().manual_seed(step)).expand(2, 24)
        logits, expected = compiled(tokens, positions), eager(tokens, positions)
        assert relative_error(logits, expected) < 1e-13
        logits.square().sum().backward()
        expected.square().sum().backward()
    assert counter.frame_count == 1
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("index", range(4))
def test_checkpointed_blocks_give_the_same_gradients(index: int) -> None:
    plain, model = small_models()[index], small_models()[index]
    for key, block in model.layers.items():
        model.layers[key] = checkpoint_wrapper(block)
    for m in (plain, model):
        m(some_tokens()).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", range(4))
def test_logits_have_the_dtype_of_the_parameters(index: int, dtype: torch.dtype) -> None:
    reference = small_models(qk_init_scale=1.0)[index]
    logits = small_models(qk_init_scale=1.0)[index].to(dtype)(some_tokens())
    assert logits.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float64: 0}[dtype]
    assert relative_error(logits.double(), reference(some_tokens())) <= tolerance


def test_dropout_acts_in_training_only() -> None:
    tokens, build = some_tokens(), {**SMALL, "max_seq_len": 64}
    model = build_model("gpt_tiny", dropout=0.5, **build)
    expected = build_model("gpt_tiny", **build)(tokens)
    assert not torch.allclose(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), expected)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 2])
def test_bad_inputs_are_named_with_a_cure(index: int) -> None:
    model, tokens = small_models()[index], some_tokens()
    with pytest.raises(ValueError, match=r"tokens must be int64 .*float32 \(2, 24\); use tokens\.long"):
        model(tokens.float())
    with pytest.raises(ValueError, match=r"tokens must be int64 \(B, S\), got torch.int64 \(24,\)"):
        model(tokens[0])
    with pytest.raises(
        ValueError, match=r"tokens must be in \[0, 40\), got values in \[.*40\]; set the model's vocab_size"
    ):
        model(torch.full_like(tokens, 40))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 40\), got values in \[-100"):
        model(torch.full_like(tokens, -100))
    with pytest.raises(ValueError, match=r"positions must be int64, got torch.float32; use positions\.long"):
        model(tokens, torch.arange(24.0))
    with pytest.raises(ValueError, match=r"positions must be \(B, S\) = \(2, 24\) .* got \(23,\); .*layout\.positions"):
        model(tokens, torch.arange(23))


def test_gpt_refuses_positions_beyond_its_table_and_names_the_override() -> None:
    model = small_models()[0]
    with pytest.raises(ValueError, match=r"max_seq_len=64 .* sequence of 65; override max_seq_len=65"):
        model(some_tokens(1, 65))
    with pytest.raises(ValueError, match=r"max_seq_len=64 .* sequence of 101; override max_seq_len=101"):
        model(some_tokens(1, 2), torch.tensor([3, 100]))
    with pytest.raises(ValueError, match=r"positions must be >= 0, got -1"):
        model(some_tokens(1, 2), torch.tensor([3, -1]))
    with pytest.raises(ValueError, match=r"override max_seq_len=65 \(model\.max_seq_len=65 on the command line\)"):
        model.config.check_seq_len(65)
    model.config.check_seq_len(64)
    small_models()[2].config.check_seq_len(1 << 20)


def test_empty_sequences_give_empty_logits() -> None:
    for model in small_models():
        assert model(some_tokens(2, 0)).shape == (2, 0, 40)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gpt_tyni", {}, r"no model 'gpt_tyni' \(did you mean 'gpt_tiny'\?\); models: gpt_tiny"),
        ("gpt_tiny", {"vocab_sise": 3}, r"GPTConfig has no field 'vocab_sise' \(did you mean 'vocab_size'\?\)"),
        ("gpt_tiny", {"vocab_size": None}, r"vocab_size must be an integer >= 1, got None"),
        ("llama_tiny", {"num_layers": 0}, r"num_layers must be an integer >= 1, got 0"),
        ("gpt_tiny", {"num_heads": 3}, r"num_heads must divide dim, got num_heads=3 and dim=128; .*num_heads=2 or 4"),
        ("llama_tiny", {"num_kv_heads": 3}, r"num_kv_heads must divide num_heads, got num_kv_heads=3"),
        ("llama_tiny", {"dim": 4}, r"even head dim, got dim/num_heads = 1"),
        ("gpt_tiny", {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ("gpt_tiny", {"attention_dropout": 1.0}, r"attention_dropout must be in \[0, 1\), got 1.0"),
        ("llama_tiny", {"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\), got -0.1"),
        ("llama_tiny", {"rope_scaling": {"factor": 0.0}}, r"rope_scaling needs factor > 0"),
        (
            "llama_tiny",
            {"rope_scaling": {"factor": 8.0, "low_freq_factor": 4.0}},
            r"low_freq_factor < high_freq_factor",
        ),
    ],
)
def test_bad_configs_are_named_with_a_cure(name: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, **overrides)


def test_models_contain_no_parallel_code() -> None:
    for path in Path(dtcp.models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith("torch.distributed"), f"{path.name} imports {name}"
                allowed = name.startswith("dtcp.models") or name in (
                    "dtcp.dropout",
                    "dtcp.dispatch.masked",
                    "dtcp.mask",
                    "dtcp.integrations.torchtitan",
                    "dtcp.integrations.transformers_checks",
                )
                assert not name.startswith("dtcp") or allowed, f"{path.name} imports {name}"
