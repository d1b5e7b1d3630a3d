"""Weights of a model of transformers: from a folder that transformers wrote into a cut model, and back into a folder.

No parallel code: a sharded parameter keeps its part of each tensor that is read.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtcp.models.init import assign, plain_name
from dtcp.models.safetensors_files import CONFIG_FILE, MAX_FILE_BYTES, open_tensors, write_tensors
from dtcp.models.transformers_config import ResolvedHFConfig, describe_content, on_meta, read_config
from dtcp.models.transformers_model import PREFIX, TransformersModel


def check_folder(config: ResolvedHFConfig, folder: str | Path) -> None:
    """Raise ``ValueError`` if the folder's ``config.json`` is of another model, but for what was changed on purpose."""
    theirs = describe_content(read_config(folder))
    ours = config.description
    differing = [
        f"{key} is {theirs.get(key, 'not there')} there and {ours.get(key, 'not there')} here"
        for key in sorted({*theirs, *ours} - {*config.changed})
        if theirs.get(key) != ours.get(key)
    ]
    if differing:
        raise ValueError(
            f"{folder} holds another model than model.path: {'; '.join(differing)}; set model.path={folder}, and what "
            "shall differ by model.overrides"
        )


@torch.no_grad()
def load_folder(model: TransformersModel, folder: str | Path) -> None:
    """Fill the tensors of ``model``, sharded or not, from the safetensors files in ``folder``.

    Each rank reads one whole tensor after the other and keeps its part; no communication. Folders whose tensors have
    other names than the model's parameters (some mixtures of experts) are read by transformers itself, which holds the
    whole model in the memory of each rank meanwhile.

    Raises:
        ValueError: If files or tensors are missing, unknown or of another shape; names them.
    """
    folder = Path(folder).expanduser()
    wanted = {plain_name(name).removeprefix(PREFIX): x for name, x in model.state_dict().items()}
    with ExitStack() as stack:
        found = dict(open_tensors(folder, stack))
        names = _names(model.hf, set(wanted), found)
        if names is None:
            values = _read_by_transformers(model, folder)
            read: Callable[[str], Tensor] = values.__getitem__
        else:
            there = names

            def read(name: str) -> Tensor:
                return found[there[name]].get_tensor(there[name])

        for name, tensor in wanted.items():
            value = read(name)
            if value.shape != tensor.shape:
                raise ValueError(
                    f"{folder}: {name} is {tuple(value.shape)}, the model has {tuple(tensor.shape)}; set the model's "
                    "sizes to those of the folder"
                )
            assign(tensor, value.to(tensor.dtype))


def save_folder(
    config: ResolvedHFConfig,
    folder: str | Path,
    read: Callable[[dict[str, Tensor]], None],
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` loads; memory holds one file's tensors.

    Args:
        config: Of the model.
        folder: Made if missing.
        read: Fills float32 tensors, by their names in the model.
        dtype: Of the weights.
        max_file_bytes: The weights go into several files where they are more.
    """
    model = on_meta(config)
    held = {name.removeprefix(PREFIX): x for name, x in model.state_dict().items()}

    def read_some(names: Iterable[str]) -> dict[str, Tensor]:
        tensors = {PREFIX + name: torch.empty(held[name].shape, dtype=held[name].dtype) for name in names}
        read(tensors)
        return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}

    content: dict[str, Any] = config.content
    for key in ("dtype", "torch_dtype"):
        content.pop(key, None)
    content |= {"architectures": [type(model.hf).__name__], "dtype": str(dtype).removeprefix("torch.")}
    shapes = {name: x.shape for name, x in held.items()}
    write_tensors(folder, shapes, read_some, content, dtype=dtype, max_file_bytes=max_file_bytes)


def _names(hf: Any, wanted: set[str], found: dict[str, Any]) -> dict[str, str] | None:
    """The tensors in the files, by the model's names; None if they do not fit each other one by one."""
    prefix = f"{hf.base_model_prefix}."
    names: dict[str, str] = {}
    unknown: list[str] = []
    for name in found:
        # Some folders are of the model without its head, and have names without the place that it has here.
        own = name if name in wanted else prefix + name
        if own in wanted:
            names[own] = name
        else:
            unknown.append(name)
    ignored = [*(hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$"]
    unknown = [name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)]
    if len(unknown) == 1:  # written by some although the head is tied
        table = hf.get_input_embeddings()
        twin = names.get(next(f"{path}.weight" for path, module in hf.named_modules() if module is table))
        if twin and torch.equal(found[twin].get_tensor(twin), found[unknown[0]].get_tensor(unknown[0])):
            unknown = []
    return names if set(names) == wanted and not unknown else None


def _read_by_transformers(model: TransformersModel, folder: Path) -> dict[str, Tensor]:
    """All tensors, after what transformers renames and joins."""
    from transformers import AutoModelForCausalLM

    config = model.hf.config.__class__.from_dict(model.config.content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # of many kinds
        raise ValueError(f"transformers cannot load {folder}: {' '.join(str(error).split())[:300]}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(what, ()))):
            raise ValueError(
                f"{folder} has {len(names)} {what.replace('_', ' ')}, such as {names[0]}; give the files of the model "
                f"that {CONFIG_FILE} describes"
            )
    return dict(whole.state_dict())
