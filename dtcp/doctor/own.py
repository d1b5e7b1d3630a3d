"""A model and plans of the user's own: called, checked, and what they raise told in one line that names them."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from dtcp.doctor.config import load, load_function
from dtcp.models.init import plain_name
from dtcp.parallelize.pipeline import Pipeline
from dtcp.train.session import EXPECTED_ERRORS, JobError, one_line

_IS_GONE = re.compile(  # as gloo and NCCL say it
    r"connection (closed|reset) by peer|broken pipe|gloo/transport.*(read|write) error|remote process exited", re.I
)


def call_own(path: str, key: str, *args: Any) -> Any:
    """Call the function that ``path`` stands for.

    Raises:
        ValueError: If it raises anything, naming ``key``, that gave the path, and the kind of error.
    """
    function = load_function(path, key)
    try:
        return function(*args)
    except Exception as error:
        raise ValueError(f"{key}={path} raised {type(error).__name__}: {one_line(error)}") from error


def load_plan(path: str, key: str, model: nn.Module) -> dict[str, ParallelStyle]:
    """Return a plan that is a mapping, or what a function of the model makes.

    Raises:
        ValueError: If it is neither, or not of names and styles.
    """
    plan = load(path, key)
    if not isinstance(plan, Mapping):
        if not callable(plan):
            raise ValueError(
                f"{key}={path} has to be a mapping from module names to parallel styles, or a function of the model "
                f"that returns one, got {type(plan).__name__}"
            )
        plan = call_own(path, key, model)
        if not isinstance(plan, Mapping):
            raise ValueError(f"{key}={path} has to return a mapping, got {type(plan).__name__}")
    for name, style in plan.items():
        if not isinstance(name, str) or not isinstance(style, ParallelStyle):
            raise ValueError(
                f"{key}={path} has to be a mapping from module names to parallel styles, got {name!r}: "
                f"{type(style).__name__}"
            )
    return dict(plan)


def narrow_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of most parameters among those narrower than float32; None where there is none."""
    narrow = Counter(p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() < 4)
    return narrow.most_common(1)[0][0] if narrow else None


def widen(model: nn.Module) -> None:
    """Make float32 of everything narrower, in place; parameters keep their hooks."""
    model._apply(lambda x: x.float() if x.is_floating_point() and x.element_size() < 4 else x)


def hooked_parameters(model: nn.Module) -> list[str]:
    """Names of parameters with a hook on their gradient."""
    return [
        name
        for name, x in model.named_parameters()
        if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None)
    ]


@contextlib.contextmanager
def told_in_one_line(model: nn.Module, what: str, *, num_ids: int, seq_len: int) -> Iterator[None]:
    """Name the module whose forward fails, in place of a traceback.

    Args:
        what: Is done, for failures outside of any module.
        num_ids: Of the data's tokenizer.
        seq_len: Positions that there are.

    Raises:
        ValueError: In place of whatever the model raises; refusals of the library stay what they are.
    """
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        told = _innermost(error)
        if _is_refusal(told):
            if told is error and isinstance(error, EXPECTED_ERRORS):
                raise
            raise ValueError(one_line(told)) from error
        name, module = _failing_module(told, model)
        is_outside = module is None or isinstance(module, Pipeline)
        where = what if is_outside else f"the forward of {name} ({type(module).__name__})"
        if is_outside and _IS_GONE.search(str(told)):
            raise ValueError(
                f"{what} ended here because another rank's did, which says why ({type(told).__name__}: "
                f"{one_line(told)[:100]})"
            ) from error
        more = ""
        if isinstance(module, nn.Embedding) and "scalar types" in str(told):
            more = (
                "; it is given the residual stream and no ids: a stage has it beside the first one because tied= or "
                "tied_modules names it, and nothing else there has its weight; tie the head's to it (head.weight = "
                "embedding.weight), or leave the name out"
            )
        elif isinstance(module, nn.Embedding):
            more = (
                f"; it has {module.num_embeddings} rows, and the data's tokenizer has {num_ids} ids and the sequence "
                f"{seq_len} positions: give the model more rows, or the job another data.tokenizer or a shorter "
                "doctor.seq_len"
            )
        raise ValueError(f"{where} failed with {type(told).__name__}: {_with_causes(told)}{more}") from error


def _innermost(error: BaseException) -> BaseException:
    """What torch's pipeline stages have wrapped: they print their arguments, and leave the reason to the cause."""
    while _raised_in(error).startswith("torch.distributed.pipelining") and error.__cause__ is not None:
        error = error.__cause__
    return error


def _with_causes(error: BaseException) -> str:
    """The message, and those of what it was raised from."""
    text = one_line(error)
    while (cause := error.__cause__) is not None:
        text += f", from {type(cause).__name__}: {one_line(cause)}"
        error = cause
    return text


def _is_refusal(error: BaseException) -> bool:
    """Whether the library itself raised: then the message says everything."""
    return _raised_in(error).startswith("dtcp.")


def _raised_in(error: BaseException) -> str:
    """The module that raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))


def _failing_module(error: BaseException, model: nn.Module) -> tuple[str, nn.Module | None]:
    """The innermost module of ``model`` in whose methods the error was raised."""
    names = {id(module): plain_name(f"{name}.").rstrip(".") for name, module in model.named_modules()}
    found: tuple[str, nn.Module | None] = "", None
    frame = error.__traceback__
    while frame is not None:
        inside = frame.tb_frame.f_locals.get("self")
        if isinstance(inside, nn.Module) and id(inside) in names:
            found = names[id(inside)] or "the model", inside
        frame = frame.tb_next
    return found
