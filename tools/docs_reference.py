#!/usr/bin/env python3
"""Write the configuration reference from the schema: every key, its type, its value in conf/, and what it means.

    tools/docs_reference.py            prints the page in Markdown
    mkdocs build --strict              makes it anew: mkdocs.yml names this file as a hook, and the page is kept nowhere

Types come from the dataclasses, values from what hydra composes, meanings from a class's ``Attributes``, else from the
comment in conf/, else from the one beside the field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mkdocs runs from the top of the checkout

from dtcp._paths import conf_dir
from dtcp.doctor.config import DoctorJobConfig, compose_doctor_config
from dtcp.models import PRESETS
from dtcp.train.data import DataConfig

PAGE = "reference/configuration.md"
HEAD = """# Configuration reference

Every key of the [training job](../ecosystems/job.md), and those of the [doctor](../doctor.md) at the end.
They are set on the command line: `mesh.cp=2 training.steps=100 model=llama_tiny`. `null` is no value.
This page is made from the schema whenever the site is built.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A key as the page shows it."""

    key: str
    type: str
    value: str
    meaning: str


# ---- meanings --------------------------------------------------------------------------------------------------------


def yaml_comments(path: Path) -> dict[str, str]:
    """What the comments of a file in conf/ say, by dotted key: on the key's line, or on the lines before it."""
    found: dict[str, str] = {}
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    lines = path.read_text().splitlines()
    while lines and lines[0].startswith("#"):  # what a file begins with is said of the file
        del lines[0]
    for line in lines:
        if match := re.match(r"\s*# ?(.*)", line):
            above.append(match[1])
        elif match := re.match(r"( *)([\w/]+):(?:\s[^#]*)?(?:# (.*))?$", line):
            indent = len(match[1])
            parents = [*((i, name) for i, name in parents if i < indent), (indent, match[2])]
            said = match[3] or " ".join(above)
            if said:
                found[".".join(name for _, name in parents)] = said
            above = []
        else:  # an empty line: what stands above it is of the file
            above = []
    return found


def field_comments(kind: type) -> dict[str, str]:
    """What the comments beside a dataclass's fields say."""
    found = {}
    source = textwrap.dedent(inspect.getsource(kind))
    fields = {f.name for f in dataclasses.fields(kind)}
    names = {
        node.lineno: node.target.id
        for node in ast.parse(source).body[0].body  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in fields
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.start[0] in names:
            found[names[token.start[0]]] = token.string.removeprefix("#").strip()
    return found


def attributes(kind: type) -> dict[str, str]:
    """The section ``Attributes`` of a class's docstring, by name."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", inspect.getdoc(kind) or "", flags=re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.*)(?:\n        .*)*)", section[1] if section else "", flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


# ---- types and values ------------------------------------------------------------------------------------------------


def type_words(annotation: Any) -> str:
    """A type for people: ``int or null``, or the members of an enum."""
    members = get_args(annotation)
    if members and (get_origin(annotation) is Union or "|" in str(annotation)):
        words = [type_words(m) for m in members if m is not type(None)]
        return " or ".join([*words, "null"] if type(None) in members else words)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.name}`" for member in annotation)
    if annotation is Any:
        return "any"
    return getattr(annotation, "__name__", str(annotation)) if not members else str(annotation)


def value_words(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value.name if isinstance(value, Enum) else value}`"


def rows_of(kind: type, values: Any, prefix: str, said: dict[str, str]) -> list[Row]:
    """A row for each field; a field that is a dataclass itself gives one for each of its own too.

    Args:
        values: An instance, or None for a section that is null: then the rows have no values.
        said: Comments in conf/ by dotted key.
    """
    documented, comments, types, rows = attributes(kind), field_comments(kind), get_type_hints(kind), []
    for f in dataclasses.fields(kind):
        key, type_ = f"{prefix}{f.name}", types[f.name]
        value = "" if values is None else value_words(getattr(values, f.name))
        meaning = documented.get(f.name) or said.get(key) or comments.get(f.name, "")
        inner = [member for member in get_args(type_) if dataclasses.is_dataclass(member)]
        rows.append(Row(key, "section or null" if inner else type_words(type_), value, meaning))
        if inner:
            rows += rows_of(inner[0], getattr(values, f.name, None), f"{key}.", said)
    return rows


# ---- the page --------------------------------------------------------------------------------------------------------


def sections() -> Iterator[tuple[str, str, list[Row]]]:
    """Title, introduction and rows of every part of the page but the models'."""
    said = yaml_comments(conf_dir() / "config.yaml") | yaml_comments(conf_dir() / "doctor.yaml")
    job, types = compose_doctor_config([]), get_type_hints(DoctorJobConfig) | {"data": DataConfig}
    names = [f.name for f in dataclasses.fields(DoctorJobConfig) if f.name not in ("model", "doctor")]
    alone = [name for name in names if not dataclasses.is_dataclass(types[name])]
    rows = [Row(name, type_words(types[name]), value_words(getattr(job, name)), said.get(name, "")) for name in alone]
    yield "Keys without a section", "", rows
    for name in [*(name for name in names if name not in alone), "doctor"]:
        intro = _section_doc(types[name], said.get(name, ""))
        if choices := sorted(path.stem for path in (conf_dir() / name).glob("*.yaml")):
            chosen = _default_choice(name)
            listed = ", ".join(f"`{name}={choice}`" for choice in choices)
            intro += f" Choices: {listed}; the values below are those of `{name}={chosen}`."
            of_file = yaml_comments(conf_dir() / name / f"{chosen}.yaml")
            said |= {f"{name}.{key}": text for key, text in of_file.items()}
        yield name, intro.strip(), rows_of(types[name], getattr(job, name), f"{name}.", said)


def _default_choice(group: str) -> str:
    found = re.search(rf"^  - {group}: (\w+)$", (conf_dir() / "config.yaml").read_text(), flags=re.MULTILINE)
    assert found is not None, group
    return found[1]


def _section_doc(kind: Any, said: str) -> str:
    doc = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    doc = "" if doc.startswith(f"{kind.__name__}(") else doc  # what a dataclass without one is given
    return " ".join(f"{sentence(text).rstrip('.')}." for text in (doc, said) if text)


def table(rows: list[Row]) -> str:
    lines = ["| key | type | value | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.key}`", row.type, row.value, sentence(row.meaning))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def sentence(text: str) -> str:
    """A comment as Markdown: it begins as a sentence does, its code is marked once, and its ``<name>`` is no HTML."""
    text = re.sub(r"\bNone\b", "null", text.replace("``", "`").replace("<", "&lt;").strip())
    return text[:1].upper() + text[1:] if re.match(r"(?!or )[a-z]+\b(?![._:(=])", text) else text


def models() -> Iterator[str]:
    """The model group: the fields of each kind of config, and the choices."""
    yield (
        "## model\n\nA choice of the group fills all fields of one kind of model, and each can be set: "
        "`model=llama_tiny model.num_layers=2`. `model.weights`, of all kinds, is a folder with a model in Hugging "
        "Face's form; `null`: weights are drawn from `debug.seed`. Of `model=hf` also `true`: those in `model.path`."
    )
    for kind in dict.fromkeys(type(preset) for preset in PRESETS.values()):
        names = [name for name, preset in PRESETS.items() if type(preset) is kind]
        listed = ", ".join(f"`model={name}`" for name in names)
        rows = rows_of(kind, PRESETS[names[0]], "model.", {})
        yield f"### {kind.__name__}\n\nChoices: {listed}; the values are those of the first.\n\n{table(rows)}"


def reference() -> str:
    """Return the page."""
    parts = [HEAD, *models()]
    parts += [f"## {title}\n\n{intro}\n\n{table(rows)}" for title, intro, rows in sections()]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: put the page among the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=reference()))
    return files


if __name__ == "__main__":
    print(reference(), end="")
