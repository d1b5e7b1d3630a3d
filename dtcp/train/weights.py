"""The weights that a job begins with, where a folder in Hugging Face's form has them."""

from pathlib import Path
from typing import Any

from torch import nn

from dtcp.models import ModelConfig, ResolvedHFConfig
from dtcp.models.hf import check_hf_config, load_safetensors


def weights_folder(section: Any) -> Path | None:
    """Return the folder that ``model.weights`` names; None: weights are drawn from the seed.

    Args:
        section: Of the configuration. For ``model=hf``, ``weights=true`` is the folder of ``model.path``.

    Raises:
        ValueError: If ``weights=true`` has no folder to stand for.
    """
    if section.weights is None or section.weights.lower() == "false":
        return None
    if section.weights.lower() != "true":
        return Path(section.weights).expanduser()
    folder = Path(getattr(section, "path", None) or "").expanduser()
    if not getattr(section, "path", None) or not folder.is_dir():
        raise ValueError(
            f"model.weights=true is the folder model.path of model=hf, got model={section.name} with "
            f"path={getattr(section, 'path', None)!r}; name the folder: model.weights=FOLDER"
        )
    return folder


def check_weights(section: Any, config: ModelConfig) -> None:
    """Raise ``ValueError`` if the folder holds another model than the one that is trained."""
    folder = weights_folder(section)
    if folder is None:
        return
    if isinstance(config, ResolvedHFConfig):
        from dtcp.models.transformers_weights import check_folder

        check_folder(config, folder)
    else:
        check_hf_config(config, folder)


def load_weights(model: nn.Module, section: Any, *, whole: nn.Module) -> None:
    """Fill ``model``, cut or not, from the folder; nothing without one.

    Args:
        whole: The model whose stages ``model`` holds some of, where that is a pipeline.
    """
    folder = weights_folder(section)
    if folder is None:
        return
    if isinstance(whole.config, ResolvedHFConfig):
        from dtcp.models.transformers_weights import load_folder

        load_folder(model, folder)  # type: ignore[arg-type]
    else:
        load_safetensors(model, folder, whole=whole)
