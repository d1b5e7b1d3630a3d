"""tools/gpu_check.py without a GPU: what it checks on small sizes, what it finds, and that it keeps its time."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import gpu_check
from device_check.memory import peak_bytes
from device_check.prepared import PreparedGroup
from device_check.sections import Section

from dtcp.attention.gradients import Gradients
from dtcp.attention.kernels.cpu import CpuFlashKernel
from dtcp.collectives import all_gather_rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_checked_and_that_is_said(capsys):
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out == "no GPU: nothing checked\n"


def run(tmp_path, *arguments: str) -> tuple[int, dict]:
    file = tmp_path / "record.json"
    code = gpu_check.main(["--device", "cpu", "--json", str(file), *arguments])
    return code, json.loads(file.read_text())


def test_a_short_run_checks_something_of_everything_and_says_what_it_left_out(tmp_path, capsys):
    code, record = run(tmp_path, "--seconds", "2.5")
    output = capsys.readouterr().out
    assert code == 0, output
    sections = {section["section"]: section for section in record["sections"]}
    assert list(sections) == list(gpu_check.SHARES)
    assert record["environment"]["torch"] == torch.__version__
    for name, section in sections.items():
        assert not section["failures"] and section["num_checks"] and section["rows"], section
        assert re.search(rf"== {name}: {section['num_checks']} checks, all within tolerance; [\d.]+ s", output)
    cut = [name for name, section in sections.items() if any(n.startswith("CUT SHORT") for n in section["notes"])]
    assert "strategies" in cut and output.count("CUT SHORT") == len(cut)
    assert output.rstrip().endswith(f"; cut short: {', '.join(cut)}")


@pytest.mark.slow
def test_a_whole_run_fits_and_checks_every_strategy_on_every_layout(tmp_path):
    code, record = run(tmp_path, "--seconds", "120")
    assert code == 0, record
    sections = {section["section"]: section for section in record["sections"]}
    assert not any("CUT SHORT" in note for section in sections.values() for note in section["notes"])
    assert len(sections["strategies"]["rows"]) == 25 and len(sections["memory"]["rows"]) == 15
    gathered = [row["forward MiB"] for row in sections["memory"]["rows"] if row["strategy"] == "all_gather"]
    assert gathered == sorted(gathered) and gathered[0] < gathered[-1]


def test_a_wrong_kernel_is_found_and_named(tmp_path, monkeypatch, capsys):
    right = CpuFlashKernel.backward

    def wrong(self, *args, **options):
        grad_query, grad_key, grad_value = right(self, *args, **options)
        return grad_query, grad_key * (1 + 1e-4), grad_value

    monkeypatch.setattr(CpuFlashKernel, "backward", wrong)
    code, record = run(tmp_path, "--only", "kernels", "--seconds", "1")
    (section,) = record["sections"]
    assert code == 1 and section["failures"]
    for failure in section["failures"]:
        assert failure.startswith("kernel flash, ") and "float32" in failure and ", grad_key: " in failure
    assert "FAILED: kernel flash" in capsys.readouterr().out


def test_a_strategy_whose_gradients_do_not_come_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Gradients, "add_returned", lambda *args: None)
    code, record = run(tmp_path, "--only", "strategies", "--seconds", "1")
    (section,) = record["sections"]
    assert code == 1
    found = {failure.split(", ")[-1].split(":")[0].split(" beside")[0] for failure in section["failures"]}
    assert found == {"grad_key", "grad_value"}
    assert not any("ulysses" in failure for failure in section["failures"]), "which has none to return"


def test_what_raises_is_a_failure_and_hides_nothing(tmp_path, monkeypatch):
    def broken(self, *args, **options):
        raise RuntimeError("no such kernel image\nmore")

    monkeypatch.setattr(CpuFlashKernel, "forward", broken)
    code, record = run(tmp_path, "--only", "kernels", "--seconds", "1")
    (section,) = record["sections"]
    assert code == 1
    assert all(f.endswith("raised RuntimeError: no such kernel image") for f in section["failures"])
    assert {row["kernel"] for row in section["rows"]} == {"math"}


def test_a_section_stops_in_time_and_says_after_what():
    section, done = Section("slow", 0.3), []
    for check in section.within_budget(list(range(100)), "naps"):
        time.sleep(0.05)
        done.append(check)
    section.finish()
    assert section.notes == [f"CUT SHORT: {len(done)} of 100 naps fitted into 0.3 s"]
    assert 1 < len(done) < 7 and section.seconds < 0.4


def test_the_first_check_is_made_whatever_it_costs():
    section = Section("late", 0.0)
    assert list(section.within_budget([1, 2, 3], "naps")) == [1]
    assert section.notes == ["CUT SHORT: 1 of 3 naps fitted into 0.0 s"]


def test_nan_is_beyond_every_tolerance():
    section = Section("x", 1)
    assert not section.expect("something", float("nan"), 1.0) and section.expect("other", 1.0, 1.0)
    assert section.failures == ["something: nan is beyond its tolerance 1"] and section.num_checks == 2


def test_peak_bytes_are_those_that_live_together():
    def work():
        torch.zeros(1000)
        x = torch.zeros(500)
        return x + x.view(-1).narrow(0, 0, 1)

    assert peak_bytes(work, torch.device("cpu")) == 4000


def test_a_prepared_group_gathers_its_own_rows_for_everyone():
    group = PreparedGroup(1, 3, torch.bfloat16)
    assert all_gather_rows(torch.tensor([[5, 6]]), group).tolist() == [[5, 6]] * 3


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--only", "nothing"], ["--device", "tpu"]])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments)
    assert ended.value.code == 2
