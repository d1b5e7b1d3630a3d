"""Write the model of a checkpoint as safetensors with Hugging Face's names.

    python -m dtcp.export outputs/demo hf/demo                        the newest checkpoint of a run
    python -m dtcp.export outputs/demo/checkpoints/step_00000100 hf/demo --dtype bfloat16

One process, no torchrun, whatever mesh the job ran on; memory for the weights of the model, and of ``model=hf``, which
``AutoModelForCausalLM.from_pretrained`` loads, for one file of 5 GB. ``model.weights=hf/demo`` starts a job from the
result.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtcp.models import GPTConfig, LlamaConfig, ResolvedHFConfig, RopeScaling, build_model
from dtcp.models.hf import save_safetensors
from dtcp.train.checkpoint import load_tensors
from dtcp.train.checkpoint_files import find_checkpoint, read_description
from dtcp.train.session import one_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(source: Path, out: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write ``config.json`` and the weights of a checkpoint into ``out``.

    Args:
        source: A checkpoint, or a run, whose newest is taken.
        out: Does not exist yet, or is empty; it is there only when it is whole.
        dtype: Of the weights.

    Returns:
        The checkpoint.

    Raises:
        ValueError: If the checkpoint is damaged or none, or ``out`` holds something.
        NotImplementedError: If the model is no Llama and none of transformers.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; give a folder that does not exist")
    checkpoint = find_checkpoint(source)
    description = read_description(checkpoint)
    partial = out.with_name(f"{out.name}.partial")
    config = _model_config(description["model_config"])
    if isinstance(config, ResolvedHFConfig):
        _export_transformers(checkpoint, description, config, partial, dtype)
    else:
        model = build_model(config, device="meta").to_empty(device="cpu")
        load_tensors(checkpoint, description, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
        save_safetensors(model, partial, max_seq_len=description["trained"]["training.seq_len"], dtype=dtype)
    partial.replace(out)
    return checkpoint


def _export_transformers(
    checkpoint: Path, description: dict[str, Any], config: ResolvedHFConfig, out: Path, dtype: torch.dtype
) -> None:
    """Write a model of transformers, file by file; the checkpoint's checksums are compared once."""
    from dtcp.models.transformers_weights import save_folder

    is_checked = False

    def read(tensors: dict[str, Tensor]) -> None:
        nonlocal is_checked
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        load_tensors(checkpoint, description, named, is_checked=is_checked)
        is_checked = True

    save_folder(config, out, read, dtype=dtype)


def _model_config(saved: dict[str, Any]) -> GPTConfig | LlamaConfig | ResolvedHFConfig:
    """The model's config from what the description says of it."""
    fields = {name: value for name, value in saved.items() if name not in ("kind", "name")}
    match saved["kind"]:
        case "LlamaConfig":
            scaling = fields["rope_scaling"]
            return LlamaConfig(**fields | {"rope_scaling": None if scaling is None else RopeScaling(**scaling)})
        case "GPTConfig":
            return GPTConfig(**fields)
        case "ResolvedHFConfig":
            return ResolvedHFConfig(json.dumps(fields["content"], sort_keys=True))
        case kind:
            raise NotImplementedError(f"models of kind {kind} cannot be exported; llama models and model=hf can")


def main() -> int:
    """Read the command line; 0 done, 1 an error, told in one line."""
    parser = argparse.ArgumentParser(
        prog="python -m dtcp.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of a run or of a checkpoint")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    arguments = parser.parse_args()
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        checkpoint = export(arguments.source, arguments.out, dtype=DTYPES[arguments.dtype])
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.out} from {checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
