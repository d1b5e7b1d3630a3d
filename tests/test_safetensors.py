"""Llama weights in Hugging Face's form: its names, its configuration, its arithmetic; out, and back in on any mesh."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import dtcp
from dtcp.export import export
from dtcp.models import RopeScaling, build_model
from dtcp.models.hf import from_hf_config, to_hf_config
from dtcp.models.presets import PRESETS
from dtcp.train.config import compose_job_config
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from parity import JOB, PEAKED, TINY, whole
from resuming import JOB_OF, run_job, saved

SCALED = RopeScaling(8.0, original_max_seq_len=16)
SIZES = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 160, "qk_init_scale": 8.0}


def published_llama(folder: Path, tokens: Tensor) -> Tensor:
    """Logits from the files alone, by Hugging Face's names and convention (rotate_half), in float64.

    An implementation of its own: nothing of the models is used.
    """
    c = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    inverse = c["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
    if (s := c["rope_scaling"]) is not None:
        old, low, high = s["original_max_position_embeddings"], s["low_freq_factor"], s["high_freq_factor"]
        for i, f in enumerate(inverse.tolist()):
            length = 2 * torch.pi / f
            if length > old / low:
                inverse[i] = f / s["factor"]
            elif length > old / high:
                smooth = (old / length - low) / (high - low)
                inverse[i] = (1 - smooth) * f / s["factor"] + smooth * f
    angles = torch.outer(torch.arange(tokens.size(1)).double(), inverse)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))

    def norm(x: Tensor, name: str) -> Tensor:
        return w[name] * x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt()

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1) * sin

    def project(x: Tensor, name: str, num: int) -> Tensor:
        return (x @ w[name].T).unflatten(-1, (num, dim)).transpose(1, 2)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        query = rotate(project(h, at + "self_attn.q_proj.weight", heads))
        key = rotate(project(h, at + "self_attn.k_proj.weight", kv_heads)).repeat_interleave(heads // kv_heads, 1)
        value = project(h, at + "self_attn.v_proj.weight", kv_heads).repeat_interleave(heads // kv_heads, 1)
        scores = query @ key.transpose(-1, -2) / dim**0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = h @ w[at + "mlp.gate_proj.weight"].T, h @ w[at + "mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


CASES = [
    {},
    {"tie_weights": True, "rope_theta": 500_000.0},
    {"rope_scaling": SCALED, "num_kv_heads": 4},
    {"num_kv_heads": 1, "tie_weights": True, "rope_scaling": SCALED},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_exported_weights_mean_the_same_in_the_published_convention(tmp_path, options):
    model = build_model("llama_tiny", **SIZES | options)
    dtcp.save_safetensors(model, tmp_path, max_seq_len=64)
    tokens = torch.randint(0, 264, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens)
    wanted = published_llama(tmp_path, tokens)
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) != options.get("tie_weights", False)
    assert sum(tensor.numel() for tensor in tensors.values()) == model.config.num_parameters


@pytest.mark.parametrize("options", CASES, ids=str)
def test_what_was_saved_loads_bitwise(tmp_path, options):
    model = build_model("llama_tiny", seed=1, **SIZES | options)
    dtcp.save_safetensors(model, tmp_path, max_seq_len=64, max_file_bytes=100_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    other = build_model("llama_tiny", seed=2, **SIZES | options)
    dtcp.load_safetensors(other, tmp_path)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * model.config.num_parameters
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("llama")])
def test_the_configuration_of_every_preset_comes_back(name):
    content = to_hf_config(PRESETS[name], max_seq_len=8192, dtype=torch.bfloat16)
    read = from_hf_config(json.loads(json.dumps(content)))
    assert read == PRESETS[name]
    newer = dict(content)  # where transformers 5 keeps the rotary settings
    scaling = newer.pop("rope_scaling") or {"rope_type": "default"}
    newer["rope_parameters"] = {"rope_theta": newer.pop("rope_theta")} | scaling
    assert from_hf_config(newer) == PRESETS[name]


def save_sharded(rank: int, world: int, overrides: list[str], folder: Path) -> None:
    model = Trainer(compose_job_config(overrides)).model
    dtcp.save_safetensors(model, folder, max_seq_len=33, is_writer=rank == world - 1)


def load_sharded(rank: int, world: int, overrides: list[str]) -> dict[str, Tensor]:
    model = Trainer(compose_job_config(overrides)).model
    return {name: whole(p).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (3, "mesh.dp_shard=3"),
        pytest.param(2, "mesh.cp=2", marks=pytest.mark.slow),
        pytest.param(4, "mesh.dp_replicate=2", marks=pytest.mark.slow),
    ],
)
def test_sharded_models_save_and_jobs_begin_from_a_folder_on_any_mesh(ranks, tmp_path, world, mesh):
    llama = [*TINY["llama"], *JOB, PEAKED, "training.seq_len=33", "training.global_batch_size=12"]
    ranks.run(world, save_sharded, [*llama, *mesh.split(), "debug.seed=5"], tmp_path)
    expected = ranks.run(1, load_sharded, [*llama, "debug.seed=5"])[0]
    for loaded in ranks.run(world, load_sharded, [*llama, *mesh.split(), f"model.weights={tmp_path}"]):
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), name


def test_a_checkpoint_of_any_mesh_is_exported_by_one_process(ranks, tmp_path):
    overrides = [*JOB_OF["llama"], *saved(tmp_path), "mesh.cp=2", "training.steps=2"]
    run = ranks.run(2, run_job, overrides)[0]
    command = [sys.executable, "-m", "dtcp.export", tmp_path / "a", tmp_path / "hf"]
    root = Path(dtcp.__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (result.stdout.count("\n"), result.stderr) == (1, "")
    model = build_model("llama_tiny", dim=64, num_layers=2, ffn_dim=160)
    dtcp.load_safetensors(model, tmp_path / "hf")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, run.tensors[f"model.{name}"]), name
    with pytest.raises(ValueError, match="hf exists and is not empty; give a folder that does not exist"):
        export(tmp_path / "a", tmp_path / "hf")
    with pytest.raises(ValueError, match="is neither a checkpoint nor a run with one"):
        export(tmp_path, tmp_path / "more")


def start_from(rank: int, world: int, overrides: list[str]) -> float:
    return next(Trainer(compose_job_config(overrides)).steps()).loss


def test_pipeline_stages_begin_from_a_folder_too(ranks, tmp_path):
    job = [*TINY["llama"], *JOB, "training.seq_len=17", "training.steps=1"]
    model = build_model("llama_tiny", seed=9, num_layers=2, dim=64, ffn_dim=160)
    dtcp.save_safetensors(model, tmp_path / "hf", max_seq_len=64)
    overrides = [*job, f"model.weights={tmp_path / 'hf'}"]
    expected = ranks.run(1, start_from, overrides)[0]
    assert expected != ranks.run(1, start_from, job)[0]
    for loss in ranks.run(2, start_from, [*overrides, "mesh.pp=2", "training.local_batch_size=1"]):
        assert loss == pytest.approx(expected, rel=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_gpt_is_refused_by_name(tmp_path, ranks):
    gpt = build_model("gpt_tiny", num_layers=1)
    with pytest.raises(NotImplementedError, match=r"exist for llama models only, got GPTConfig; use a llama_\* model"):
        dtcp.save_safetensors(gpt, tmp_path, max_seq_len=64)
    with pytest.raises(NotImplementedError, match="for llama models only"):
        dtcp.load_safetensors(gpt, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "mistral", "has model_type='mistral'; only model_type='llama' can be read"),
        ("hidden_act", "gelu", "has hidden_act='gelu'"),
        ("attention_bias", True, "has attention_bias=True; only attention_bias=False"),
        ("head_dim", 128, "has head_dim=128; only hidden_size / num_attention_heads = 16"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "has rope_type='yarn'; only 'llama3' and 'default'"),
        ("rope_scaling", {"type": "linear", "factor": 4.0}, "has rope_type='linear'"),
        ("rope_theta", 1e6, r"holds another model: rope_theta is 1000000.0 there and 10000.0 here; set the model's"),
        ("hidden_size", None, "has no hidden_size; it is not that of a Llama"),
    ],
)
def test_a_configuration_that_is_not_this_model_is_refused(tmp_path, key, value, message):
    model = build_model("llama_tiny", **SIZES)
    dtcp.save_safetensors(model, tmp_path, max_seq_len=64)
    content = json.loads((tmp_path / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(ValueError, match=message):
        dtcp.load_safetensors(model, tmp_path)


def damage_missing(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def damage_unknown(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)


def damage_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"lacks 1 tensors, such as model.norm.weight"),
        (damage_unknown, r"has unknown 1 tensors, such as model.layers.7.mlp.up_proj.weight"),
        (damage_shape, r"model.norm.weight is \(3,\), the model has \(64,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named_on_all_ranks(ranks, tmp_path, damage, message):
    llama = [*TINY["llama"], *JOB, "training.seq_len=33", "mesh.cp=2"]
    ranks.run(1, save_sharded, llama[:-1], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    ranks.run_expecting(2, load_sharded, JobError, message, [*llama, f"model.weights={tmp_path}"])


def test_a_head_that_is_tied_and_written_too_is_read_only_if_equal(tmp_path):
    model = build_model("llama_tiny", **SIZES, tie_weights=True)
    dtcp.save_safetensors(model, tmp_path, max_seq_len=64)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    dtcp.load_safetensors(model, tmp_path)
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unknown 1 tensors, such as lm_head.weight"):
        dtcp.load_safetensors(model, tmp_path)


def test_files_that_are_missing_or_damaged_are_named(tmp_path):
    model = build_model("llama_tiny", **SIZES)
    with pytest.raises(ValueError, match=r"has no config.json; give a folder with a model"):
        dtcp.load_safetensors(model, tmp_path)
    dtcp.save_safetensors(model, tmp_path, max_seq_len=64)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: "):
        dtcp.load_safetensors(model, tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        dtcp.load_safetensors(model, tmp_path)
