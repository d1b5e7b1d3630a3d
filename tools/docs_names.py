"""For mkdocstrings, which reads the source without importing it: two things of ``dtcp`` that it would not find.

A function that is named like the module it lives in, ``shard`` and ``parallelize``, would be an alias of itself: the
name stays the module's here, and the reference lists these two by their full path. And a folder without an
``__init__`` inside of the package, ``dtcp/parallelize``, is made a module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class KeepModules(griffe.Extension):
    """Leave out names imported from a submodule of the same name, and add folders without an ``__init__``."""

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        for name, member in list(mod.members.items()):
            if member.is_alias and member.target_path.startswith(f"{mod.path}.{name}."):  # type: ignore[union-attr]
                mod.del_member(name)
        if mod.is_package and isinstance(mod.filepath, Path):
            for folder in sorted({path.parent for path in mod.filepath.parent.glob("*/*.py")}):
                if not (folder / "__init__.py").exists():
                    mod.set_member(folder.name, griffe.Module(folder.name, filepath=[folder], parent=mod))
