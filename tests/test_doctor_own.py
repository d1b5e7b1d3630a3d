"""What is wrong with a model of one's own, and not with the mesh: WRONG by its own name, or told in one line."""

import types
from typing import Any

import pytest
import torch
from torch import nn

from dtcp.doctor import Report, compose_doctor_config, examine
from dtcp.doctor.compare import Deviation
from dtcp.doctor.hints import _untied
from dtcp.doctor.own import told_in_one_line
from ranks import Ranks


def run_doctor(rank: int, world: int, overrides: str) -> Report:
    return examine(compose_doctor_config(overrides.split()))


OWN_FAULTS = [  # of models of the user's, by the context's door
    ("make_centred_behind_zeros", "something in the model mixes tokens", "layers.0.qkv.weight have no"),
    ("make_with_buffer_of_the_rank", "problem: ranks begin with different buffers: state;", "none of the known faults"),
    ("make_with_normalised_gradient", "the gradients do not double where the loss does", "counted more"),
    ("make_divided_by_length", "what a token gives depends on how long the sequence is", "counted more"),
    ("make_scaled_by_length", "what a token gives depends on how long the sequence is", "counted more"),
    ("make_that_counts_documents", "something in the model mixes tokens", "counted more"),
    ("make_with_own_places", "positions are local in a part of the model: it counts tokens", "counted more"),
    ("make_with_clipping_hook", "it looks like this: layers.0.qkv.weight: a hook on the gradient", "counted more than"),
]


@pytest.mark.parametrize(("model", "hint", "unsaid"), OWN_FAULTS)
def test_a_fault_of_ones_own_model_is_found_and_no_other_cause_is_named(
    ranks: Ranks, model: str, hint: str, unsaid: str
):
    overrides = f"doctor.model=doctor_models:{model} mesh.cp=2 doctor.door=context doctor.seq_len=61"
    report = ranks.run(2, run_doctor, overrides)[0]
    assert report.exit_code == 1 and report.is_wrong
    assert hint in str(report) and unsaid not in str(report), str(report)


OVER_ROWS = [  # of models of the user's, where data parallel ranks have rows of their own
    ("make_that_mixes_rows", "problem: something in the model mixes the rows of a batch", "none of the known faults"),
    ("make_by_world_in_forward", "it looks like this: the model asks for the number of ranks", "known faults"),
    ("make_by_world_in_backward", "it looks like this: the model asks for the number of ranks", "averaged over"),
    ("make_by_world", "it looks like this: the model asks for the number of ranks", "known faults"),
]


@pytest.mark.parametrize(("model", "hint", "unsaid"), OVER_ROWS)
def test_what_depends_on_other_rows_or_on_the_number_of_ranks_is_wrong(
    ranks: Ranks, model: str, hint: str, unsaid: str
):
    report = ranks.run(2, run_doctor, f"doctor.model=doctor_models:{model} mesh.dp_shard=2 doctor.seq_len=13")[0]
    assert report.exit_code == 1 and report.is_wrong
    assert hint in str(report) and unsaid not in str(report), str(report)


def test_rows_that_are_mixed_are_wrong_with_one_row_a_rank_too(ranks: Ranks):
    """Where the numbers are those of one rank that takes rows one by one."""
    overrides = "doctor.model=doctor_models:make_that_mixes_rows mesh.dp_shard=2 doctor.seq_len=13 doctor.rows=2"
    report = ranks.run(2, run_doctor, overrides)[0]
    assert report.comparisons[0].is_right and report.exit_code == 1 and "mixes the rows" in str(report)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_gradient_that_is_not_of_the_loss_is_wrong_with_as_many_rows_as_ranks_too(ranks: Ranks, rows: int):
    """Where both add the same: each rank its own, and one rank one for each row."""
    model = "doctor.model=doctor_models:make_with_mean_beside_the_loss"
    report = ranks.run(2, run_doctor, f"{model} mesh.cp=2 doctor.door=context doctor.rows={rows}")[0]
    assert report.comparisons[0].is_right == (rows == 2)
    assert report.exit_code == 1 and "the model adds a gradient that is not of the loss" in str(report), str(report)
    assert "none of the known faults" not in str(report)


@pytest.mark.parametrize("model", ["make_with_sum_beside_the_loss", "make_with_hook_on_output"])
def test_a_gradient_of_each_token_alone_and_one_that_is_looked_at_are_right(ranks: Ranks, model: str):
    overrides = f"doctor.model=doctor_models:{model} mesh.cp=2 doctor.door=context doctor.rows=2"
    assert ranks.run(2, run_doctor, overrides)[0].exit_code == 0


@pytest.mark.parametrize(("model", "mesh"), [("make_that_tells_the_world", "dp_shard"), ("make_staged", "pp")])
def test_asking_for_the_rank_and_tied_stages_of_ones_own_are_right(ranks: Ranks, model: str, mesh: str):
    for report in ranks.run(2, run_doctor, f"doctor.model=doctor_models:{model} mesh.{mesh}=2 doctor.seq_len=13"):
        assert report.exit_code == 0, str(report)


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return {}[x]
        except KeyError as error:
            raise RuntimeError("the table is empty") from error


def test_a_stage_that_fails_is_told_by_its_innermost_module_and_cause():
    model = nn.ModuleDict({"block": nn.Sequential(Failing())})
    scope: dict[str, Any] = {"__name__": "torch.distributed.pipelining.stage"}
    source = """def forward(run):
        try:
            run()
        except Exception as error:
            raise RuntimeError("[Stage 0] failed to run forward: args: …") from error"""
    exec(source, scope)  # as torch's stages do
    with (
        pytest.raises(ValueError) as caught,
        told_in_one_line(model, "the step", num_ids=1, seq_len=1),
    ):
        scope["forward"](lambda: model["block"](torch.ones(())))
    assert str(caught.value).startswith("the forward of block.0 (Failing) failed with RuntimeError: the table is empty")
    assert "from KeyError: tensor(1.)" in str(caught.value) and "Stage" not in str(caught.value)


def test_a_rank_whose_peer_is_gone_says_that_it_is_a_consequence():
    with (
        pytest.raises(ValueError, match=r"the step ended here because another rank's did, which says why \(Runtime"),
        told_in_one_line(nn.Linear(1, 1), "the step", num_ids=1, seq_len=1),
    ):
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:30593. This is typically caused by …")


def test_an_embedding_that_a_later_stage_has_and_gives_the_stream_to_is_explained():
    with (
        pytest.raises(ValueError, match="it is given the residual stream and no ids: .* tied_modules names it"),
        told_in_one_line(model := nn.ModuleDict({"embedding": nn.Embedding(3, 2)}), "the step", num_ids=3, seq_len=1),
    ):
        model["embedding"](torch.zeros(1, 1, 2))


def test_two_parameters_that_are_one_on_one_rank_are_named():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    wrong = [Deviation(name, 1.0, 1e-5, 0.3, 0.9) for name in ("a.weight", "b.weight")]
    reference: Any = types.SimpleNamespace(model=model)
    (hint,) = _untied(wrong, reference)
    assert hint.startswith("a.weight and b.weight are one parameter on one rank, and two here")
    assert list(_untied(wrong[:1], reference)) == []
