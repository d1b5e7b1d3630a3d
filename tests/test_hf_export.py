"""Models of transformers out of checkpoints of the job, and back in: plain transformers loads the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_models
from dtcp.export import export
from dtcp.models import build_model
from dtcp.models.safetensors_files import INDEX_FILE
from dtcp.models.transformers_config import ResolvedHFConfig
from dtcp.models.transformers_weights import load_folder, save_folder
from dtcp.train.config import compose_job_config
from dtcp.train.session import JobError
from dtcp.train.trainer import Trainer
from hf_job import config_folder, job
from resuming import run_job, saved

TOKENS = torch.randint(3, 264, (2, 24), generator=torch.Generator().manual_seed(0))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def small(tmp_path: Path, name: str, **more: Any) -> Any:
    return build_model("hf", path=str(config_folder(name, tmp_path / "config", **more)), vocab_size=264, seed=3)


def write(model: Any, folder: Path, **options: Any) -> None:
    tensors = dict(model.state_dict())

    def read(wanted: dict[str, torch.Tensor]) -> None:
        for name, tensor in wanted.items():
            tensor.copy_(tensors[name])

    save_folder(model.config, folder, read, **{"dtype": torch.float32} | options)


NAMES = ["llama", *(pytest.param(x, marks=pytest.mark.slow) for x in (
    "gpt2", "qwen3", "mistral with a window", "gemma3", "gpt_oss", "gemma2", "olmo2", "phi3", "opt", "llama4"
))]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_written_folder_is_the_model_for_transformers_and_comes_back(tmp_path, name):
    model = small(tmp_path, name).eval()
    write(model, tmp_path / "out", max_file_bytes=40_000)
    assert (tmp_path / "out" / INDEX_FILE).is_file(), "several files"
    assert torch.equal(loaded(tmp_path / "out")(TOKENS).logits, model(TOKENS))
    other = build_model("hf", path=str(tmp_path / "out"), seed=4).eval()
    assert not torch.equal(other(TOKENS), model(TOKENS))
    load_folder(other, tmp_path / "out")
    assert torch.equal(other(TOKENS), model(TOKENS))


@torch.no_grad()
def test_a_tied_head_is_one_tensor_on_disk(tmp_path):
    model = small(tmp_path, "llama", tie_word_embeddings=True).eval()
    write(model, tmp_path / "out")
    theirs = loaded(tmp_path / "out")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert torch.equal(theirs(TOKENS).logits, model(TOKENS))
    assert not any("lm_head" in name for name in model.state_dict())


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_folder_with_other_names_is_read_by_transformers(tmp_path, name):
    """Which splits the experts of its models into a tensor each where it saves them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"num_experts": 4, "moe_intermediate_size": 16} if name == "qwen3_moe" else {"num_local_experts": 4}
    config = AutoConfig.for_model(name, **hf_models._BASE | {"vocab_size": 264, "num_experts_per_tok": 2} | more)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = build_model("hf", path=str(tmp_path / "theirs"), seed=4).eval()
    load_folder(model, tmp_path / "theirs")
    assert torch.equal(model(TOKENS), theirs(TOKENS).logits)
    write(model, tmp_path / "out")
    assert torch.equal(loaded(tmp_path / "out")(TOKENS).logits, model(TOKENS))


def weights_after_load(rank: int, world: int, overrides: list[str]) -> dict[str, torch.Tensor]:
    from parity import whole

    model = Trainer(compose_job_config(overrides)).model
    return {name: whole(x).clone() for name, x in model.state_dict().items()}


def test_a_checkpoint_is_exported_generates_and_begins_a_job(ranks, tmp_path):
    folder = config_folder("llama", tmp_path / "config")
    overrides = [*job(folder, "llama", steps=2), *saved(tmp_path, "run")]
    run = ranks.run(2, run_job, [*overrides, "mesh.cp=2"], timeout=200)[0]
    export(tmp_path / "run", tmp_path / "out")
    theirs = loaded(tmp_path / "out")
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, run.tensors[f"model.hf.{name}"]), name
    generated = theirs.generate(TOKENS[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert generated.shape == (2, 7)
    start = ["model=hf", f"model.path={tmp_path / 'out'}", "model.weights=true", "data.max_bytes=60000", "mesh.cp=2"]
    start += ["training.seq_len=97"]
    for weights in ranks.run(2, weights_after_load, start, timeout=200):
        assert weights.keys() == {f"hf.{name}" for name in theirs.state_dict()}
        assert all(torch.equal(weights[f"hf.{name}"], value) for name, value in theirs.state_dict().items())


@pytest.mark.slow
def test_an_export_in_bfloat16_rounds_and_says_so(ranks, tmp_path):
    folder = config_folder("llama", tmp_path / "config")
    run = ranks.run(1, run_job, [*job(folder, "llama", steps=1), *saved(tmp_path, "run")], timeout=200)[0]
    export(tmp_path / "run", tmp_path / "out", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, value in loaded(tmp_path / "out").state_dict().items():
        assert torch.equal(value, run.tensors[f"model.hf.{name}"].bfloat16()), name


def test_folders_that_do_not_fit_are_refused_by_name(tmp_path):
    model = small(tmp_path, "llama")
    write(model, tmp_path / "out")
    content = model.config.content
    config = ResolvedHFConfig(json.dumps(content | {"rms_norm_eps": 0.5}))
    from dtcp.models.transformers_weights import check_folder

    with pytest.raises(ValueError, match=r"rms_norm_eps is 1e-06 there and 0.5 here; set model.path="):
        check_folder(config, tmp_path / "out")
    check_folder(ResolvedHFConfig(config.text, ("rms_norm_eps",)), tmp_path / "out")  # on purpose
    wider = build_model("hf", path=str(tmp_path / "out"), overrides={"intermediate_size": 64})
    with pytest.raises(ValueError, match=r"gate_proj.weight is \(48, 32\), the model has \(64, 32\)"):
        load_folder(wider, tmp_path / "out")
    deeper = build_model("hf", path=str(tmp_path / "out"), overrides={"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="missing keys, such as model.layers.2"):
        load_folder(deeper, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        load_folder(model, tmp_path / "out")


def start_with(rank: int, world: int, overrides: list[str]) -> None:
    Trainer(compose_job_config(overrides))


@pytest.mark.slow
def test_weights_true_needs_a_folder(ranks, tmp_path):
    file = config_folder("llama", tmp_path / "config") / "config.json"
    overrides = [*job(file, "llama"), "model.weights=true"]
    ranks.run_expecting(2, start_with, JobError, r"model.weights=true is the folder model.path", overrides)
