"""The documentation: it builds without a warning, and what it says of keys, names, commands and messages is so."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import logging
import re
import sys
from pathlib import Path

import pytest

import dtcp
from dtcp.doctor.config import DoctorJobConfig, compose_doctor_config
from dtcp.models import PRESETS
from dtcp.sweep import expand

ROOT = Path(__file__).resolve().parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))}
EVERYWHERE = PAGES | {"README.md": (ROOT / "README.md").read_text()}
MESSAGES = re.findall(r"^```text\n(.*?)\n```$", PAGES["docs/troubleshooting.md"], flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def reference():
    """``tools/docs_reference.py``."""
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "tools" / "docs_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- the site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. ``strict`` raises where there was a warning: a dead link or anchor, a page that is not in nav."""
    for name in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(name)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder, before = tmp_path_factory.mktemp("site"), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(ROOT)  # where mkdocstrings looks for the sources
        try:
            build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
        finally:
            sys.path[:] = before
            logging.getLogger("mkdocs").handlers.clear()
    return folder


def test_the_site_has_every_page(site):
    built = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    assert {page.removeprefix("docs/").removesuffix(".md") for page in PAGES} | {"reference/configuration"} <= built


def test_a_page_loads_nothing_from_the_net(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img|iframe)\b[^>]*(?:src|href)=\"(https?:[^\"]*)", path.read_text())
        assert not loaded, (path, loaded)


def test_every_public_name_is_in_the_api_reference(site):
    ids = set(re.findall(r'id="(dtcp\.[\w.]+)"', (site / "reference" / "api.html").read_text()))
    full = {"shard": "shard.shard", "parallelize": "parallelize.model.parallelize"}
    names = {f"dtcp.{full.get(name, name)}" for name in dtcp.__all__ if name != "__version__"}
    assert names <= ids, names - ids


def test_every_public_name_in_the_api_reference_is_public():
    listed = re.findall(r"^::: dtcp\.([\w.]+)$", PAGES["docs/reference/api.md"], flags=re.MULTILINE)
    assert sorted(name.rpartition(".")[2] for name in listed) == sorted({*dtcp.__all__} - {"__version__"})


# ---- the configuration reference -------------------------------------------------------------------------------------


def leaves(section, prefix=""):
    """Every key of a composed configuration, with its value."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", value


@pytest.fixture(scope="module")
def rows(reference):
    """Key, type, value and meaning of each row of the page. Kinds of models have keys of one name."""
    return re.findall(r"^\| `(.*?)` \| (.*) \| (.*) \| (.*) \|$", reference.reference(), flags=re.MULTILINE)


def test_the_reference_has_every_key_with_its_value_and_a_meaning(reference, rows):
    for key, value in leaves(composed()):
        if key not in ("model.name", "model.weights"):  # of the group itself, which the text above its tables has
            assert reference.value_words(value) in [row[2] for row in rows if row[0] == key], key
    for key, type_, _, meaning in rows:
        assert type_ and len(meaning) > 3, f"say beside {key}, in conf/ or in its dataclass, what it means"


def test_a_key_that_is_added_to_the_schema_is_in_the_reference(reference):
    @dataclasses.dataclass
    class Added:
        number: int | None = None  # of things
        name: str = "x"

    assert reference.rows_of(Added, Added(), "added.", {"added.name": "how it is called"}) == [
        reference.Row("added.number", "int or null", "`null`", "of things"),
        reference.Row("added.name", "str", "`x`", "how it is called"),
    ]


def test_comments_of_a_file_are_read_by_key(reference, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "# of the file\na: # of a\n  b: 1 # of b\n  # of c,\n  # in two lines\n  c: [x]\nd:\n  b: no comment\n"
    )
    assert reference.yaml_comments(file) == {"a": "of a", "a.b": "of b", "a.c": "of c, in two lines"}


def test_what_the_reference_lists_as_choices_can_be_chosen(reference):
    listed = re.findall(r"`(model|data|optimizer|lr_scheduler)=(\w+)`", reference.reference())
    assert {name for group, name in listed if group == "model"} == set(PRESETS)
    composed(*{group: f"{group}={name}" for group, name in listed if group != "model"}.values())  # the last of each


# ---- keys, names and commands in the text ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", EVERYWHERE)
def test_commands_are_those_of_the_job_and_the_doctor(page):
    """Every command that a page shows composes."""
    text = EVERYWHERE[page].replace("\\\n", " ")
    for line in re.findall(r"^.*\bdtcp[. ](?:train|doctor) +(.*)$", text, flags=re.MULTILINE):
        words = re.split(r"  +#|`|  +the ", line)[0].split()
        # A launcher of hydra is a package of its own, which need not be there.
        overrides = [word for word in words if "=" in word and not word.startswith("hydra")]
        if any("…" in word for word in overrides):
            continue
        common, choices = expand(overrides) if "--multirun" in words else (overrides, [[]])
        for swept in choices:
            composed(*common, *swept)


@functools.cache
def composed(*overrides):
    return compose_doctor_config([*overrides])


@pytest.mark.parametrize("page", EVERYWHERE)
def test_keys_in_the_text_are_keys_of_the_schema(page, rows):
    sections = {f.name for f in dataclasses.fields(DoctorJobConfig)}
    known = {row[0] for row in rows} | {"model.weights"}
    for code in re.findall(r"`([^`\n]+)`", EVERYWHERE[page]):
        for key in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)=", code):
            if key.split(".")[0] in sections:
                assert key in known, key


@pytest.mark.parametrize("page", EVERYWHERE)
def test_names_in_the_text_are_names_of_dtcp(page):
    for path in set(re.findall(r"(?<![\w./-])dtcp((?:\.\w+)+)", EVERYWHERE[page])):
        assert exists(path[1:].split(".")), path


def test_names_that_are_not_there_are_noticed():
    assert exists(["shard", "shard"]) and exists(["integrations", "transformers", "prepare"])
    for path in ("shards", "layout.make_layouts", "attention.no", "integrations.transformers.prepared"):
        assert not exists(path.split(".")), path


def exists(names):
    """Whether ``dtcp.<names>`` is a module or an attribute of one. Modules in folders are read, not loaded."""
    depth = max(n for n in range(len(names) + 1) if is_module(names[:n]))
    module, rest = ".".join(["dtcp", *names[:depth]]), names[depth:]
    if depth > 1:
        source = Path(importlib.util.find_spec(module).origin).read_text()
        return not rest or re.search(rf"^(?:def|class) {rest[0]}\b", source, flags=re.MULTILINE) is not None
    found = importlib.import_module(module)
    return not rest or all((found := getattr(found, name, None)) is not None for name in rest)


def is_module(names):
    path = ROOT.joinpath("dtcp", *names)
    return path.is_dir() or path.with_suffix(".py").is_file()


# ---- messages --------------------------------------------------------------------------------------------------------


def template(node):
    """What a string is in the source, with "…" for what is filled in; None if it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


@functools.cache
def templates():
    paths = sorted((ROOT / "dtcp").rglob("*.py"))
    found = (template(node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return {text for text in found if text and len(text) > 20}


def is_said(message):
    """Whether some string of the source has all fixed parts of ``message``, in this order."""
    return any(has_in_order(text, message.split("…")) for text in templates())


def has_in_order(text, parts):
    at = 0
    for part in parts:
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_a_quoted_message_is_one_of_the_source(message):
    assert sum(len(part) for part in message.split("…")) > 30, "too little of it is fixed"
    assert is_said(message)


def test_a_message_that_nothing_says_is_noticed():
    assert len(MESSAGES) > 60
    assert not is_said(MESSAGES[0].replace("no process group", "no group"))
