"""The package as a whole: what imports what, what `import dtcp` costs, its files."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dtcp
from dtcp._paths import conf_dir

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dtcp"

# Imports point one way: a module imports from the lines above its own, and inside its line without a cycle.
# A new module has to be put into a line (the longest prefix counts) before this test passes.
LAYERS = [
    ["_paths", "containers", "dropout_hash", "dtensor", "own_group", "ranges", "recompute"],
    ["collectives", "dropout"],
    ["replicas"],
    ["remembered"],
    ["documents"],
    ["mask", "tiles", "placement", "auto_layout", "needed"],
    ["seen"],
    ["layout"],
    ["shard_ops"],
    ["vocabulary"],
    ["shard", "mesh", "loss"],
    ["halo_plan"],
    ["halo_ops"],
    ["halo"],
    ["linear_loss_op"],
    ["linear_loss"],
    ["attention.dropout", "attention.blocks"],
    ["attention.scores"],
    ["attention.kernels", "attention.merge", "attention.comm", "attention.schedule", "attention.calls"],
    ["attention.loopback", "attention.two_level_schedule"],
    ["attention.held", "attention.heads"],
    ["attention.call"],
    ["attention.gradients", "attention.head_exchange"],
    ["attention.strategies"],
    ["attention.two_level"],
    ["attention.ulysses", "attention.predict"],
    ["attention.auto", "attention.measure"],
    ["attention.arguments", "attention.masks"],
    ["attention.agreement"],
    ["attention.ops", "attention.sharding"],
    ["attention", "attention.api", "attention.reference"],
    ["attention.single"],
    ["dispatch"],
    # Its attention is the models', and one of them is built with it, another with what refuses models.
    ["models", "integrations.torchtitan", "integrations.transformers_checks"],
    ["parallelize"],
    ["integrations", "plan"],
    ["train"],
    ["train.__main__", "doctor", "export"],
    ["sweep"],
    ["cli", "__main__"],
]

FORBIDDEN_ON_IMPORT = ["torchtitan", "transformers", "hydra", "omegaconf", "tensordict", "torch.distributed.pipelining"]


# ---- imports ---------------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """``dtcp/attention/__init__.py`` → ``attention``; the package itself → ````."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it. For ``from a import b`` that is ``a.b`` if it may be one."""
    package = list(path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for name in (f"{base}.{alias.name}" for alias in node.names):
                found.add(base if base.split(".")[0] == "dtcp" and not is_module(name) else name)
    return found


def foreign(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] != "dtcp"}


def import_graph() -> dict[str, set[str]]:
    """Module → the modules of dtcp that it imports, names without ``dtcp.``; ``""`` is the package itself."""
    graph = {
        module_name(path): {name.removeprefix("dtcp").removeprefix(".") for name in imports(path) - foreign(path)}
        for path in PACKAGE.rglob("*.py")
    }
    del graph[""]  # the package only names where its public names live
    return {module: others - {module} for module, others in graph.items()}


def layer(module: str) -> int:
    levels = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in levels:
            return levels[prefix]
    raise AssertionError(f"dtcp.{module} is in no line of LAYERS in {Path(__file__).name}; put it where it belongs")


def test_imports_point_one_way():
    upward = [
        f"dtcp.{module} imports dtcp.{other}"
        for module, others in sorted(import_graph().items())
        for other in sorted(others - {""})
        if layer(other) > layer(module)
    ]
    assert not upward, "\n".join(upward)


def test_every_module_is_in_a_layer():
    for module in import_graph():
        layer(module)


def test_no_module_below_the_command_line_imports_the_whole_package():
    bottom = [module for module, others in import_graph().items() if "" in others and layer(module) < layer("train")]
    assert not bottom


def test_imports_have_no_cycle():
    graph = import_graph()
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join([*trail, module])
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_models_contain_no_parallel_code():
    for module, others in import_graph().items():
        if module.startswith("models"):
            # Dropout, also of attention weights, is to a model what attention is: a call that is exact however the
            # model is cut.
            allowed = (
                "dropout", "mask", "dispatch.masked", "integrations.torchtitan", "integrations.transformers_checks"
            )  # fmt: skip
            assert all(other.startswith("models") or other in allowed for other in others), module
    for name in ("torchtitan.py", "transformers_checks.py"):
        assert not any(x.startswith("torch.distributed") for x in foreign(PACKAGE / "integrations" / name)), name
    for path in (PACKAGE / "models").rglob("*.py"):
        assert not any(name.startswith("torch.distributed") for name in foreign(path)), path


def test_torchtitan_and_transformers_are_imported_only_in_integrations_and_models():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("integrations", "models"):
            assert not {name.split(".")[0] for name in foreign(path)} & {"torchtitan", "transformers"}, path


# ---- what an import loads --------------------------------------------------------------------------------------------


def run_python(code: str, cwd: Path, path: Path = ROOT) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


IMPORT = f"""
import json, sys, time, torch
def heavy():
    return [name for name in {FORBIDDEN_ON_IMPORT} if name in sys.modules]
start = time.perf_counter()
import dtcp
report = {{"seconds": time.perf_counter() - start, "after_import": heavy()}}
for name in dtcp.__all__:
    getattr(dtcp, name)
print(json.dumps(report | {{"after_use": heavy()}}))
"""


@pytest.fixture(scope="module")
def import_report(tmp_path_factory) -> dict:
    return json.loads(run_python(IMPORT, tmp_path_factory.mktemp("import")))


def test_import_dtcp_loads_nothing_heavy(import_report):
    assert import_report["after_import"] == []


def test_the_public_names_load_nothing_heavy_either(import_report):
    assert set(import_report["after_use"]) <= {"torch.distributed.pipelining"}  # part of torch's FSDP on some versions


def test_import_dtcp_adds_under_a_second_to_import_torch(import_report, tmp_path):
    seconds = [import_report["seconds"]]
    if seconds[0] >= 1:  # on a busy machine: the median of three
        seconds += [json.loads(run_python(IMPORT, tmp_path))["seconds"] for _ in range(2)]
    assert statistics.median(seconds) < 1, f"import dtcp adds {seconds} s to import torch"


# ---- metadata and files ----------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert dtcp.__version__ == declared == importlib.metadata.version("dtcp")


def test_type_hints_are_shipped():
    assert (PACKAGE / "py.typed").is_file()


def test_every_public_name_is_listed_once_and_in_order():
    assert sorted(set(dtcp.__all__)) == sorted(dtcp.__all__) == sorted(dir(dtcp))


def test_constraints_pin_every_declared_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    names = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in declared} - {"dtcp"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    assert names <= pinned
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][\w.]*", line) for line in lines if line and not line.startswith("#"))


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_no_file_names_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    machine_path = re.compile(r"(?<![\w.])/(?:" + "work|root" + r")(?![\w-])")
    for name in filter(None, listed.decode().split("\0")):
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        assert not (found := machine_path.search(text)), f"{name}: {text[found.start() :][:60]!r}"


# ---- configuration files, in a checkout ----------------------------------------------------------------------------


def test_a_checkout_uses_its_own_conf():
    assert conf_dir() == ROOT / "conf"


def test_a_package_without_conf_is_an_error_with_the_cure(tmp_path):
    (tmp_path / "dtcp").mkdir()
    (tmp_path / "dtcp" / "__init__.py").touch()
    (tmp_path / "conf").mkdir()  # somebody else's: no pyproject.toml of ours beside it
    shutil.copy(PACKAGE / "_paths.py", tmp_path / "dtcp")
    code = """
from dtcp._paths import conf_dir
try:
    conf_dir()
except FileNotFoundError as error:
    print(error)"""
    message = run_python(code, tmp_path, tmp_path)
    assert f"expected dtcp's configuration in {tmp_path / 'conf'}" in message
    assert "reinstall with `pip install" in message
