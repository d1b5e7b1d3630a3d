"""Code written for ``torch.distributed.tensor.experimental``: with the imports changed it runs, and is right."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from oracle import relative_error

SCRIPT = Path(__file__).parent / "torch_context_parallel_script.py"
MIGRATION = Path(__file__).parent.parent / "docs" / "migration.md"
IMPORTS = {
    "from torch.distributed.tensor.experimental import context_parallel\n": "from dtcp import context_parallel\n",
    "from torch.distributed.tensor.experimental._attention import context_parallel_unshard\n": (
        "from dtcp import context_parallel_unshard\n"
    ),
}


def changed_script() -> str:
    text = SCRIPT.read_text()
    for torchs, ours in IMPORTS.items():
        assert text.count(torchs) == 1
        text = text.replace(torchs, ours)
    return text


def check_script(rank: int, world: int, text: str) -> None:
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(text, "script.py", "exec"), script)
    right = script["train"](None)
    trained = script["train"](init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)))
    for name in ("losses", "logits"):
        assert trained[name].shape == right[name].shape
        assert relative_error(trained[name], right[name]) < 1e-5, name
    for name, wanted in right["parameters"].items():
        # AdamW divides by the size of a gradient, of which a small one has a larger error.
        assert relative_error(trained["parameters"][name].detach(), wanted.detach()) < 1e-4, name


@pytest.mark.parametrize("world", [2, 4])
def test_a_script_for_torchs_context_runs_with_the_imports_changed(ranks, world):
    ranks.run(world, check_script, changed_script())


def check_unshard(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    x, y = torch.randn(2, 13, 3), torch.arange(13)
    for layout in ("head_tail", "striped", "contiguous"):
        with dtcp.context_parallel(mesh, seq_len=13, layout=layout, expected_attention_calls=0) as cp:
            local = cp.shard(x).requires_grad_(), cp.shard(y, dim=0)
            inside = dtcp.context_parallel_unshard(mesh, local, (1, 0))
        after = dtcp.context_parallel_unshard(mesh, list(local), [-2, -1], layout=cp.layout)
        assert isinstance(inside, list) and not inside[0].requires_grad
        for whole, joined, again in zip((x, y), inside, after, strict=True):
            assert torch.equal(whole, joined) and torch.equal(whole, again)
    one = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "cp"))["cp"]
    with dtcp.context_parallel(one, seq_len=13, expected_attention_calls=0):
        with pytest.raises(ValueError, match="outside the context of its mesh .* layout=cp.layout"):
            dtcp.context_parallel_unshard(mesh, local, [1, 0])
        assert torch.equal(dtcp.context_parallel_unshard(one, [x], [1])[0], x)
    with pytest.raises(ValueError, match="outside the context of its mesh .* layout=cp.layout"):
        dtcp.context_parallel_unshard(mesh, local, [1, 0])
    with pytest.raises(ValueError, match=r"each of 2 buffers, got \[1\]"):
        dtcp.context_parallel_unshard(mesh, local, [1], layout=cp.layout)
    with pytest.raises(NotImplementedError, match="takes no load balancer, got str; pass layout="):
        dtcp.context_parallel_unshard(mesh, local, [1, 0], "balancer")


def test_unshard_knows_the_layout_or_says_so(ranks):
    ranks.run(3, check_unshard)


def test_signatures_begin_with_those_of_torch():
    from torch.distributed.tensor.experimental import _attention as torchs

    for name in ("context_parallel", "context_parallel_unshard"):
        theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (torchs, dtcp))
        assert all(ours[key].kind == theirs[key].kind for key in theirs)
        positional = [key for key in theirs if theirs[key].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional


def test_set_rotate_method_says_what_to_write_instead():
    with pytest.raises(ImportError, match="strategy='all_gather'.*for set_rotate_method"):
        from dtcp import set_rotate_method  # noqa: F401
    with pytest.raises(ImportError, match="strategy='ring'"):
        dtcp.set_rotate_method("alltoall")


def test_the_table_of_the_docs_has_every_public_name_of_torchs():
    from torch.distributed.tensor.experimental import _attention as torchs

    section = MIGRATION.read_text().split("## torch's `context_parallel`")[1].split("\n## ")[0]
    for name in torchs.__all__:
        if not name.startswith("_") or name in ("_HeadTailLoadBalancer", "_PerDocumentHeadTailLoadBalancer"):
            assert name in section, name
