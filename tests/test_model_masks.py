"""Windows and sinks of the models, on one rank, beside attention that is written out densely."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

import dtcp
from dtcp.models import PRESETS, build_model, model_config
from dtcp.models.attention import ScaledDotProductAttention
from dtcp.models.config import training_flops_per_token, window_of_layer
from dtcp.models.hf import from_hf_config, load_safetensors, save_safetensors, to_hf_config

SMALL = {"dim": 32, "num_layers": 4, "vocab_size": 40, "qk_init_scale": 8.0}
SIZES = {"gpt_tiny_window": SMALL, "llama_tiny_window": {**SMALL, "ffn_dim": 48}}


def densely(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """One head group at a time, one query at a time: (B, H, S, D)."""
    out = torch.zeros_like(query)
    for head in range(query.size(1)):
        of_keys = head * key.size(1) // query.size(1)
        for i in range(query.size(2)):
            first = 0 if window is None else max(0, i - window + 1)
            keys, values = key[:, of_keys, first : i + 1], value[:, of_keys, first : i + 1]
            scores = (keys @ query[:, head, i, :, None])[..., 0] / query.size(-1) ** 0.5
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks[head].exp())
            out[:, head, i] = ((weights / total)[:, None] @ values)[:, 0]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_windows_and_sinks_equal_attention_written_out(window: int | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    inputs = [x.requires_grad_() for x in (query, key, value, *([] if sinks is None else [sinks]))]
    module = ScaledDotProductAttention(window_size=(-1, -1) if window is None else (window - 1, 0))
    out = module(query, key, value, **({} if sinks is None else {"sinks": sinks}))
    expected = densely(query, key, value, window, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", SIZES)
def test_a_token_reaches_as_far_as_the_windows_of_the_layers_let_it(name: str) -> None:
    tokens = torch.randint(0, 40, (1, 24), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 0] = (tokens[0, 0] + 1) % 40
    for every, reach in ((0, 4 * 2), (2, 23)):  # four layers of a window of 3: each sees two tokens back
        model = build_model(name, **SIZES[name], window_size=3, full_attention_every=every).double()
        differs = (model(tokens) != model(changed)).any(-1)[0]
        assert differs[0]
        assert int(differs.nonzero().max()) == reach


@pytest.mark.parametrize("name", SIZES)
def test_sinks_begin_at_0_and_are_trained_and_counted(name: str) -> None:
    model = build_model(name, **SIZES[name])
    sinks = {n: p for n, p in model.named_parameters() if n.endswith("attention.sinks")}
    assert list(sinks) == [f"layers.{i}.attention.sinks" for i in range(4)]
    assert all(p.shape == (4,) and (p == 0).all() for p in sinks.values())
    model(torch.arange(24)[None]).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).all() for p in sinks.values())
    assert model.config.num_parameters == sum(p.numel() for p in model.parameters())
    without = build_model(name, **SIZES[name], sinks=False)
    assert without.config.num_parameters == model.config.num_parameters - 16
    assert without.config.num_matmul_parameters == model.config.num_matmul_parameters


def test_every_nth_layer_is_full() -> None:
    assert [window_of_layer(i, 8, 3) for i in range(6)] == [(7, 0), (7, 0), (-1, -1)] * 2
    assert [window_of_layer(i, 8, 0) for i in range(2)] == [(7, 0)] * 2
    assert window_of_layer(0, None, 0) == (-1, -1)


def test_operations_are_counted_by_the_window() -> None:
    whole = training_flops_per_token(10, 4, 32, 1024)
    assert whole == 60 + 6 * 4 * 32 * 1024
    assert training_flops_per_token(10, 4, 32, 1024, window_size=1024) == whole
    assert training_flops_per_token(10, 4, 32, 1024, window_size=4096) == whole
    half = training_flops_per_token(10, 4, 32, 1024, window_size=64, full_attention_every=2)
    assert half == 60 + 6 * 32 * (2 * 1024 + 2 * 64 * (2048 - 64) // 1024)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_size": 0}, "window_size must be an integer >= 1, got 0"),
        ({"full_attention_every": -1}, "full_attention_every must be an integer >= 0, got -1"),
        ({"window_size": None}, "full_attention_every=2 is for layers with a window between, got window_size=None"),
        ({"full_attention_every": 1}, "full_attention_every=1 makes every layer full"),
    ],
)
@pytest.mark.parametrize("name", SIZES)
def test_windows_that_mean_nothing_are_refused(name: str, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(name, **fields)


# ---- Hugging Face's form ---------------------------------------------------------------------------------------------


def test_windows_and_sinks_travel_through_hugging_faces_form(tmp_path) -> None:
    model = build_model("llama_tiny_window", **SIZES["llama_tiny_window"], window_size=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    save_safetensors(model, tmp_path, max_seq_len=64)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_type"] == "dtcp_llama"  # transformers refuses it: its Llama would leave both out
    assert content["sliding_window"] == 5
    assert content["layer_types"] == ["sliding_attention", "full_attention"] * 2
    again = build_model(model.config, seed=1)
    load_safetensors(again, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="window_size is 5 there and 6 here"):
        load_safetensors(build_model(model.config, window_size=6), tmp_path)


def test_a_llama_without_them_is_written_as_before() -> None:
    content = to_hf_config(PRESETS["llama_tiny"], max_seq_len=64, dtype=torch.float32)  # type: ignore[arg-type]
    assert content["model_type"] == "llama"
    assert not {"sliding_window", "layer_types", "attention_sinks"} & set(content)
    assert from_hf_config(content).window_size is None


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def sinks_over_tp(rank: int, world: int, name: str, sequence_parallel: bool) -> tuple[float, dict[str, Tensor]]:
    dims = dtcp.ParallelDims(tp=world)
    dims.build_mesh("cpu")
    model = build_model(name, **SIZES[name], window_size=5)
    if world > 1:
        dtcp.apply_tensor_parallel(model, dims, sequence_parallel=sequence_parallel)
        assert model.layers["0"].attention.sinks.to_local().numel() == 4 // world
    tokens = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))
    loss = dtcp.token_loss(model(tokens), dtcp.shift_labels(tokens))
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if n.endswith("sinks")}
    return loss.item(), {n: g.full_tensor() if world > 1 else g for n, g in gradients.items()}


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [("llama_tiny_window", True), pytest.param("gpt_tiny_window", False, marks=pytest.mark.slow)],
)
def test_sinks_are_cut_over_heads_and_their_gradients_are_complete(ranks, name, sequence_parallel):
    loss, expected = ranks.run(1, sinks_over_tp, name, sequence_parallel)[0]
    for found, gradients in ranks.run(2, sinks_over_tp, name, sequence_parallel):
        assert abs(found - loss) < 1e-6 * loss
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            assert (gradient - expected[key]).norm() < 1e-5 * expected[key].norm()


def test_sinks_that_ranks_cannot_share_are_refused() -> None:
    class Mesh:
        @staticmethod
        def size() -> int:
            return 3

    attention = build_model("llama_tiny_window", device="meta").layers["0"].attention
    with pytest.raises(ValueError, match=r"sinks \(H,\) of LlamaAttention, with H a multiple of tp=3, got \(4,\)"):
        dtcp.HeadParallelSinks(dtcp.SharedInputColumns("query"))._apply(attention, Mesh())  # type: ignore[arg-type]


# ---- compiled --------------------------------------------------------------------------------------------------------


def check_compiled_blocks(rank: int, world: int, door: str) -> None:
    """Blocks with and without a window, and sinks, under other documents in each step: a graph for either kind."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = dtcp.ParallelDims(cp=world).build_mesh("cpu")["cp"]
    model = build_model("llama_tiny_window", num_layers=2).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.add_(torch.arange(parameter.numel()) * 0.3)
    tokens, positions = torch.randint(0, 256, (2, 97)), torch.arange(97).expand(2, 97)
    layout = dtcp.make_layout("head_tail", seq_len=97, cp=world)
    if door == "plan":
        for block in model.layers.values():
            parallelize_module(block, mesh, {"attention.sdpa": dtcp.ContextParallel()})

    def outputs() -> list[Tensor]:
        found = []
        for step in range(4):
            documents = dtcp.Documents.from_lengths([10 + step, 87 - step])
            local = [dtcp.shard(x, mesh, layout) for x in (tokens, positions)]
            if door == "plan":
                dtcp.set_sequence(model, layout, documents=documents)
                found.append(model(*local).detach())
            else:
                with dtcp.context_parallel(mesh, seq_len=97, documents=documents):
                    found.append(model(*local).detach())
        return found

    eager = outputs()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    for compiled, right in zip(outputs(), eager, strict=True):
        torch.testing.assert_close(compiled, right, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 2


SLOW_CELLS = [pytest.param(*cell, marks=pytest.mark.slow) for cell in (("context", 2), ("context", 1), ("plan", 1))]


@pytest.mark.parametrize(("door", "world"), [("plan", 2), *SLOW_CELLS])
def test_compiled_blocks_with_windows_and_sinks_are_compiled_once(ranks, door, world):
    ranks.run(world, check_compiled_blocks, door, timeout=120)
