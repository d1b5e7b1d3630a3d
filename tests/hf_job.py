"""A small model of transformers as a job: its config.json, and the overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
from parity import JOB

STEPS = 5
# Standard deviations that make attention peaked, where 0.02 is flat.
_PEAKED = "initializer_range:0.15"
_OF_MODEL = {
    "mistral with a window": ",sliding_window:3",
    "gpt_oss": ",sliding_window:3",
    "gemma3": ",sliding_window:5",
}


def config_folder(name: str, folder: Path, **more: Any) -> Path:
    """``folder``, with the config.json of a model of ``hf_models``, and documents so short that a row holds several."""
    config, kind = (hf_models.MODELS | hf_models.OTHERS)[name]()
    config.update({"architectures": [kind.__name__], **more})
    config.save_pretrained(folder)
    texts = [f"{i} " + "".join(chr(97 + (i * i + 7 * j) % 26) for j in range(1 + (i * 37) % 53)) for i in range(400)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def job(path: Path, model: str, packed: bool = False, steps: int = STEPS) -> list[str]:
    """Overrides of a job that trains it, attention peaked, on a little of the standard library or packed documents."""
    changes = f"model.overrides={{{_PEAKED}{_OF_MODEL.get(model, '')}}}"
    sizes = ["model=hf", f"model.path={path}", "model.vocab_size=264", changes, *JOB]
    rows = packed_documents(path) if packed else ["data.max_bytes=60000"]
    # Behind a norm the scale of a query has no gradient but rounding, of which Adam's usual epsilon makes a whole step.
    more = ["optimizer.eps=1e-5"] if model == "qwen3" else []
    return [*sizes, *more, *rows, "training.seq_len=97", f"training.steps={steps}"]


def packed_documents(folder: Path) -> list[str]:
    """Overrides of a job whose rows hold several documents, those of `config_folder`."""
    paths = [f"data.paths=[{folder / 'documents.jsonl'}]", f"data.cache={folder / 'tokens'}"]
    return ["data=hf", *paths, "data.pack_documents=true"]
