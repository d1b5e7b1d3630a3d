"""The configuration: every preset and group composes, what is unknown is refused, defaults are those of the design."""

import dataclasses
import json

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtcp._paths import conf_dir
from dtcp.models import PRESETS, ResolvedHFConfig, model_config
from dtcp.train.config import Decay, DType, LRSchedulerConfig, compose_job_config, to_data_config, to_model_config
from dtcp.train.data import DataConfig
from dtcp.train.optimizer import lr_factor


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "hf"])
def test_every_preset_is_a_model_choice_with_its_own_values(name):
    job = compose_job_config([f"model={name}"])
    assert job.model.name == name
    assert to_model_config(job.model) == model_config(PRESETS[name])


def test_a_model_of_transformers_is_named_by_its_path_and_what_is_changed(tmp_path):
    job = compose_job_config(["model=hf"])
    with pytest.raises(ValueError, match=r"set model\.path=FOLDER"):
        to_model_config(job.model)
    content = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    changes = ["model.overrides={sliding_window:9,rope_scaling:null}", "+model.overrides.rms_norm_eps=0.5"]
    options = [f"model.path={tmp_path}", "model.num_layers=1", "model.vocab_size=264", *changes]
    config = to_model_config(compose_job_config(["model=hf", *options]).model)
    assert isinstance(config, ResolvedHFConfig)
    changed = {"vocab_size": 264, "num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": 9}
    assert config.content == content | changed | {"rope_scaling": None, "rms_norm_eps": 0.5}
    assert set(config.changed) == {*changed, "rope_scaling", "rms_norm_eps"}


def test_the_command_line_of_the_design_composes():
    line = (
        "mesh.cp=2 mesh.tp=2 attention.strategy=ring attention.layout=head_tail model=gpt_tiny data=stdlib "
        "training.seq_len=2048 training.global_batch_size=2 training.steps=20 run.name=demo debug.seed=7"
    )
    job = compose_job_config(line.split())
    assert (job.mesh.cp, job.mesh.tp, job.mesh.dp_shard, job.mesh.pp) == (2, 2, -1, 1)
    assert (job.attention.strategy, job.attention.layout) == ("ring", "head_tail")
    assert (job.training.seq_len, job.training.global_batch_size, job.training.steps) == (2048, 2, 20)
    assert (job.run.name, job.run.dir, job.debug.seed) == ("demo", "outputs", 7)
    assert job.model.dropout == 0


def test_model_fields_and_data_can_be_overridden():
    job = compose_job_config(
        [
            *("model=llama3_1_8b", "model.dim=64", "model.qk_init_scale=6", "model.rope_scaling.factor=4"),
            *("data=text", "data.paths=[a.txt,b/*.txt]", "training.param_dtype=bfloat16", "lr_scheduler=linear"),
        ]
    )
    model = to_model_config(job.model)
    assert (model.dim, model.qk_init_scale, model.rope_scaling.factor) == (64, 6.0, 4.0)
    assert to_data_config(job.data) == DataConfig("text", ["a.txt", "b/*.txt"])
    assert job.training.param_dtype is DType.bfloat16
    assert job.lr_scheduler.decay is Decay.linear


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=1", "training.stepz"),
        ("+training.stepz=1", "training.stepz; the keys beside it are seq_len"),
        ("+model.windo=1", "model.windo"),
        ("+nonsense=1", "no key nonsense"),
        ("model=gpt9", "gpt_tiny"),
        ("model.num_kv_heads=1", "num_kv_heads"),
        ("training.steps=many", "many"),
        ("training.param_dtype=float16", "bfloat16"),
        ("device=tpu", "cuda"),
        ("attention.stratgy=ring", "stratgy"),
        ("lr_scheduler=exponential", "cosine"),
    ],
)
def test_unknown_keys_and_choices_are_refused_by_name(override, message):
    with pytest.raises((HydraException, OmegaConfBaseException, ValueError)) as caught:
        compose_job_config([override])
    said = f"{caught.value} {caught.value.__cause__}"
    assert message in said


def test_a_model_section_without_a_preset_is_refused(tmp_path):
    from dtcp.train.config import to_job_config

    job = OmegaConf.structured(compose_job_config([]))
    job.model = {"dim": 3}
    with pytest.raises(ValueError, match=r"has to build on a preset.*gpt_tiny"):
        to_job_config(job)


def test_values_live_in_conf_and_nowhere_else():
    """Every scalar of the sections that conf/config.yaml writes out has its value from there."""
    written = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    job = OmegaConf.to_container(OmegaConf.structured(compose_job_config([])), enum_to_str=True)
    for section in ("mesh", "attention", "activation_checkpointing", "training", "run", "debug", "device"):
        assert job[section] == written[section], section


def test_a_saved_configuration_loads_again():
    job = compose_job_config(["model=llama_tiny", "mesh.cp=2", "training.max_norm=inf"])
    text = OmegaConf.to_yaml(OmegaConf.structured(job))
    assert yaml.safe_load(text)["model"]["num_kv_heads"] == 2
    assert OmegaConf.create(text).training.max_norm == float("inf")
    assert dataclasses.asdict(job.model)["name"] == "llama_tiny"


def test_learning_rate_warms_up_and_decays():
    def factors(decay, min_ratio, steps=12):
        config = LRSchedulerConfig(warmup_steps=4, decay=decay, min_ratio=min_ratio)
        return [lr_factor(step, config=config, num_steps=steps) for step in range(steps + 2)]

    cosine = factors(Decay.cosine, 0.1)
    assert cosine[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert cosine[8] == pytest.approx(0.55)  # half way: the middle between 1 and 0.1
    assert cosine[12] == cosine[13] == pytest.approx(0.1)
    assert cosine[3:] == sorted(cosine[3:], reverse=True)
    assert factors(Decay.linear, 0.0)[8] == pytest.approx(0.5)
    assert factors(Decay.constant, 1.0)[3:] == [1.0] * 11
    without_warmup = LRSchedulerConfig(warmup_steps=0, decay=Decay.constant, min_ratio=1.0)
    assert lr_factor(0, config=without_warmup, num_steps=1) == 1.0


def test_a_data_source_is_the_same_for_the_doctor():
    """Its configuration extends the job's, and a choice of a group has to win there too."""
    from dtcp.doctor.config import compose_doctor_config

    overrides = ["data=text", "data.paths=[a.txt]", "optimizer=adamw", "lr_scheduler=linear", "model=llama_tiny"]
    job, doctor = compose_job_config(overrides), compose_doctor_config(overrides)
    for name in ("data", "optimizer", "lr_scheduler", "model"):
        assert getattr(job, name) == getattr(doctor, name), name
    assert job.data.source == "text"


def test_the_data_groups_have_the_same_keys():
    names = ("stdlib", "text", "hf")
    stdlib, *others = (compose_job_config([f"data={name}", "data.paths=[]"]).data for name in names)
    assert all(dataclasses.replace(other, source="stdlib") == stdlib for other in others)
