"""Degrees, the mesh and its views, at worlds 1 to 4. Degree arithmetic needs no processes."""

import math
import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dtcp.mesh import AXES, VIEWS, ParallelDims
from ranks import Ranks

# ---- degrees ---------------------------------------------------------------------------------------------------------


def test_what_is_left_goes_to_the_open_degree():
    dims = ParallelDims(cp=2, tp=2, world_size=12)
    assert dims.degrees == {"pp": 1, "dp_replicate": 1, "dp_shard": 3, "cp": 2, "tp": 2}
    assert (dims.dp, dims.world_size) == (3, 12)
    assert ParallelDims(dp_shard=2, cp=-1, world_size=6).cp == 3
    assert ParallelDims(dp_shard=2, dp_replicate=-1, world_size=6).dp_replicate == 3


def test_without_a_process_group_the_world_is_one_rank():
    assert ParallelDims().world_size == 1
    assert set(ParallelDims().degrees.values()) == {1}


def test_dims_are_frozen_and_compare_by_degrees():
    dims = ParallelDims(cp=2, world_size=4)
    assert dims == ParallelDims(cp=2, dp_shard=2, world_size=4)
    assert replace(dims, cp=4, dp_shard=1).cp == 4
    with pytest.raises(FrozenInstanceError):
        dims.cp = 4


@pytest.mark.parametrize("axis", [*AXES, "world_size"])
@pytest.mark.parametrize("value", [True, False, 2.0, "2", torch.tensor(2)])
def test_degrees_that_are_not_integers_are_refused(axis, value):
    with pytest.raises(ValueError, match=f"{axis} must be an integer, got .* of type {type(value).__name__}"):
        ParallelDims(**{"world_size": 8, axis: value})


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("degree", [0, -2])
def test_degrees_below_one_are_refused_with_the_cure(axis, degree):
    with pytest.raises(ValueError, match=f"{axis} must be >= 1, or -1 .*, got {degree}; use {axis}=1"):
        ParallelDims(**{"world_size": 8, axis: degree})


def test_a_world_below_one_is_refused():
    with pytest.raises(ValueError, match="world_size must be >= 1, got 0"):
        ParallelDims(world_size=0)


def test_two_open_degrees_are_refused_by_name():
    with pytest.raises(ValueError, match="one degree may be -1 .*, got dp_shard and cp; set all but one"):
        ParallelDims(cp=-1, world_size=8)


@pytest.mark.parametrize(
    ("degrees", "world_size", "needs", "nearest", "ranks_to_start"),
    [
        # dp gives way before the model's axes do.
        ({"cp": 2, "tp": 2, "dp_shard": 3}, 8, "12", "tp=2, cp=2, pp=1, dp_replicate=1, dp_shard=2", 12),
        ({"cp": 2, "dp_replicate": 3, "dp_shard": 2}, 8, "12", "tp=1, cp=2, pp=1, dp_replicate=2, dp_shard=2", 12),
        ({"tp": 3}, 8, "a multiple of 3", "tp=4, cp=1, pp=1, dp_replicate=1, dp_shard=2", 9),
        ({"cp": 4}, 6, "a multiple of 4", "tp=1, cp=3, pp=1, dp_replicate=1, dp_shard=2", 8),
        ({"cp": 2}, 1, "a multiple of 2", "tp=1, cp=1, pp=1, dp_replicate=1, dp_shard=1", 2),
        (
            {"tp": 8, "cp": 3, "pp": 16},
            16384,
            "a multiple of 384",
            "tp=8, cp=4, pp=16, dp_replicate=1, dp_shard=32",
            16512,
        ),
    ],
)
def test_a_misfit_names_the_world_and_the_nearest_that_works(degrees, world_size, needs, nearest, ranks_to_start):
    with pytest.raises(ValueError, match="world size = tp·cp·pp·dp") as error:
        ParallelDims(**degrees, world_size=world_size)
    message = str(error.value)
    assert f"needs {needs} ranks, world size is {world_size}" in message
    assert f"nearest that works: {nearest}, or start {ranks_to_start} ranks" in message


@given(st.lists(st.integers(1, 6), min_size=5, max_size=5), st.integers(1, 96), st.sampled_from([None, *AXES]))
def test_any_degrees_fit_the_world_or_name_some_that_do(degrees, world_size, open_axis):
    asked = dict(zip(AXES, degrees, strict=True)) | ({open_axis: -1} if open_axis else {})
    try:
        dims = ParallelDims(**asked, world_size=world_size)
    except ValueError as error:
        named = str(error).split("nearest that works: ")[1].split(", or start")[0]
        suggested = {axis: int(degree) for axis, degree in (part.split("=") for part in named.split(", "))}
        ParallelDims(**suggested, world_size=world_size)
        known = math.prod(d for d in asked.values() if d != -1)
        assert world_size % known != 0 if open_axis else world_size != known
    else:
        assert math.prod(dims.degrees.values()) == world_size
        assert all(asked[axis] in (-1, degree) for axis, degree in dims.degrees.items())


# ---- before the mesh -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_before_build_mesh_says_so(name):
    with pytest.raises(ValueError, match=rf"'{name}' of the mesh asked for before .*call dims\.build_mesh"):
        ParallelDims().view(name)


def test_the_mesh_before_build_mesh_says_so():
    with pytest.raises(ValueError, match="before the mesh was built"):
        _ = ParallelDims().mesh


def test_an_unknown_view_lists_those_there_are():
    with pytest.raises(ValueError, match="no view 'dp' of the mesh; the views are fsdp, batch, loss, hsdp, pp"):
        ParallelDims().view("dp")


@pytest.mark.parametrize("device_type", ["cuda:0", "", torch.device("cpu"), None])
def test_a_device_type_is_a_kind_of_device(device_type):
    with pytest.raises(ValueError, match="without an index, got"):
        ParallelDims().build_mesh(device_type)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")
def test_a_device_type_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'cuda' is not available on this machine; use \"cpu\""):
        ParallelDims().build_mesh("cuda")


def test_many_ranks_without_a_process_group_are_refused_with_the_command():
    with pytest.raises(ValueError, match="need 4 ranks .*torchrun --nproc-per-node 4"):
        ParallelDims(cp=4, world_size=4).build_mesh("cpu")


# ---- one rank, no set-up ---------------------------------------------------------------------------------------------

ONE_RANK = """
import torch, torch.distributed as dist
from dtcp.mesh import VIEWS, ParallelDims
dims = ParallelDims()
mesh = dims.build_mesh("cpu")
assert mesh is dims.build_mesh("cpu") is dims.mesh
for name in VIEWS:
    x = torch.ones(3)
    for axis in range(dims.view(name).ndim):
        dist.all_reduce(x, group=dims.view(name).get_group(axis))
    assert x.tolist() == [1, 1, 1] and dims.view(name).size() == 1
import os
os._exit(0)  # gloo's teardown at the end of the interpreter aborts now and then
"""


def run_python(code, *launcher, **environment):
    without = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    clean = {name: value for name, value in os.environ.items() if name not in without}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([root, *filter(None, [clean.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *launcher, *([] if launcher else ["-c"]), code],
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_one_rank_needs_no_launcher_and_no_environment():
    result = run_python(ONE_RANK)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@pytest.mark.slow
def test_under_torchrun_the_group_is_made_from_what_it_says(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "from dtcp.mesh import ParallelDims\n"
        "dims = ParallelDims(cp=2, world_size=2)\n"
        "dims.build_mesh('cpu')\n"
        "print('coordinate', dims.view('cp').get_local_rank(), flush=True)\n"
        "try:\n    ParallelDims(world_size=1).build_mesh('cpu')\n"
        "except ValueError as error:\n    assert 'process group has 2 ranks' in str(error)\n    print('refused')\n"
    )
    result = run_python(str(script), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert result.returncode == 0, result.stderr
    words = sorted(re.findall("[01]|coordinate|refused", result.stdout))  # lines of two ranks may run together
    assert words == ["0", "1", "coordinate", "coordinate", "refused", "refused"]


# ---- views at every world --------------------------------------------------------------------------------------------

# Every way to put 1 to 4 ranks on the five axes that has at most one axis of each degree > 1, and the pairs of 2.
DEGREES = [
    {},
    *({axis: world} for world in (2, 3, 4) for axis in AXES),
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "cp": 2},
    {"dp_shard": 2, "cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 2, "cp": 2},
    {"pp": 2, "tp": 2},
]

VIEW_AXES = {
    "fsdp": [("dp_shard", "cp")],
    "hsdp": [("dp_replicate",), ("dp_shard", "cp")],
    "batch": [("dp_replicate", "dp_shard")],
    "loss": [("dp_replicate", "dp_shard", "cp")],
} | {axis: [(axis,)] for axis in AXES}


def build_and_read(rank, world, degrees):
    """Build the mesh; for each view and axis, return the ranks of its group in order, and prove it by a sum."""
    dims = ParallelDims(**{"dp_shard": 1, **degrees})
    assert dims.world_size == world
    mesh = dims.build_mesh("cpu")
    assert mesh.mesh_dim_names == AXES
    groups = {}
    for name in VIEWS:
        view = dims.view(name)
        assert view is dims.view(name)
        groups[name] = []
        for axis in range(view.ndim):
            ranks = dist.get_process_group_ranks(view.get_group(axis))
            total = torch.tensor([float(2**rank)])
            dist.all_reduce(total, group=view.get_group(axis))
            assert total.item() == sum(2**member for member in ranks)
            assert ranks[view.get_local_rank(axis)] == rank
            groups[name].append(ranks)
    return groups


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda d: ",".join(f"{k}={v}" for k, v in d.items()) or "one rank")
def test_views_hold_the_ranks_that_differ_in_their_axes(ranks: Ranks, degrees):
    world = math.prod(degrees.values())
    shape = [degrees.get(axis, 1) for axis in AXES]
    coordinates = [dict(zip(AXES, map(int, index), strict=True)) for index in torch.ones(shape).nonzero()]

    def expected(rank, axes):
        same = [axis for axis in AXES if axis not in axes]
        return [r for r, c in enumerate(coordinates) if all(c[axis] == coordinates[rank][axis] for axis in same)]

    for rank, groups in enumerate(ranks.run(world, build_and_read, degrees)):
        assert groups == {name: [expected(rank, axes) for axes in VIEW_AXES[name]] for name in VIEWS}


def shard_with_views(rank, world):
    """A linear layer under FSDP over ``hsdp`` with dp_replicate=2, cp=2: whole parameters are sharded over cp."""
    from torch.distributed.fsdp import fully_shard

    dims = ParallelDims(dp_replicate=2, cp=2)
    dims.build_mesh("cpu")
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 6, bias=False)
    weight = layer.weight.detach().clone()
    fully_shard(layer, mesh=dims.view("hsdp"))
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    x = torch.full((1, 4), float(rank + 1))
    layer(x).sum().backward()
    assert torch.equal(layer.weight.full_tensor(), weight)
    return tuple(layer.weight.to_local().shape), layer.weight.grad.full_tensor().unique().tolist()


def test_fully_shard_takes_the_hsdp_view_and_sums_over_all_its_ranks(ranks: Ranks):
    assert ranks.run(4, shard_with_views) == [((3, 4), [1.0 + 2 + 3 + 4])] * 4


def build_with_tp(rank, world):
    """FSDP and TP must have one root mesh: a 2-D parameter over (fsdp, tp) is its proof."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dims = ParallelDims(tp=2, cp=2)
    dims.build_mesh("cpu")
    layer = torch.nn.Linear(4, 8, bias=False)
    parallelize_module(layer, dims.view("tp"), ColwiseParallel())
    fully_shard(layer, mesh=dims.view("fsdp"))
    layer(torch.ones(1, 4)).sum().backward()
    return tuple(layer.weight.to_local().shape), layer.weight.device_mesh.mesh_dim_names


def test_the_fsdp_view_and_the_tp_view_have_one_root(ranks: Ranks):
    assert ranks.run(4, build_with_tp) == [((2, 4), ("fsdp", "tp"))] * 4


# ---- errors on every rank --------------------------------------------------------------------------------------------


def build(rank, world, degrees):
    ParallelDims(**degrees).build_mesh("cpu")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_misfit_raises_on_every_rank(ranks: Ranks, world):
    ranks.run_expecting(world, build, ValueError, f"world size is {world}; nearest that works", {"cp": 5})


def test_dims_made_for_another_world_are_refused_on_every_rank(ranks: Ranks):
    pattern = r"world size = tp·cp·pp·dp: the degrees make 4 .* group has 2 ranks; nearest that works: tp=1, cp=2"
    ranks.run_expecting(2, build, ValueError, pattern, {"cp": 4, "world_size": 4})


@pytest.mark.slow
def test_meshes_in_a_row_leave_nothing_behind(ranks: Ranks):
    def num_files(rank, world):
        build(rank, world, {"cp": 2, "tp": 2})
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    first = ranks.run(4, num_files)
    for _ in range(10):
        last = ranks.run(4, num_files)
    assert max(last) <= max(first) + 4
