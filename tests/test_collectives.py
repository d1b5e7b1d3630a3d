"""Ranks that agree before they exchange, gathers of any dtype, and the check that all read the same batch."""

import pytest
import torch
import torch.distributed as dist

from dtcp.collectives import DTYPES, agree, all_gather_ints, all_gather_rows, reduce_scatter_rows
from dtcp.mesh import ParallelDims
from dtcp.shard import check_same_batch

CPU = torch.device("cpu")


def mesh_of(world):
    dims = ParallelDims(cp=world)
    dims.build_mesh("cpu")
    return dims.view("cp")


def caught(fn):
    """What ``fn`` raised: (type, message)."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def still_works(world):
    """The group is in step: a sum comes out right."""
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item() == world


# ---- rows ------------------------------------------------------------------------------------------------------------


def exchange_rows(rank, world):
    group = mesh_of(world).get_group()
    for dtype in DTYPES:
        rows = torch.arange(6).view(3, 2).add(rank).remainder(7).float()
        gathered = all_gather_rows(rows.to(dtype), group)
        expected = torch.cat([torch.arange(6).view(3, 2).add(r).remainder(7).float().to(dtype) for r in range(world)])
        assert gathered.dtype == dtype
        assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8)), dtype
    strided = torch.arange(6).view(2, 3).add(rank).t()
    assert all_gather_rows(strided, group).tolist() == [[i + r, i + 3 + r] for r in range(world) for i in range(3)]
    rows = torch.arange(2.0 * world).view(-1, 1).expand(-1, 3) * (rank + 1)
    assert torch.equal(
        reduce_scatter_rows(rows, group),
        torch.tensor([[2.0 * rank], [2.0 * rank + 1]]).expand(2, 3) * sum(range(1, world + 1)),
    )
    assert all_gather_ints([rank, -(2**63)], group, CPU) == [[r, -(2**63)] for r in range(world)]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_of_any_dtype_and_stride_are_gathered_in_rank_order_and_summed(ranks, world):
    ranks.run(world, exchange_rows)


# ---- agreement -------------------------------------------------------------------------------------------------------


def agree_on(rank, world, fields_of, operation_of=None, error_of=None, entry_of=None):
    group = mesh_of(world).get_group()
    operation = operation_of[rank] if operation_of else "unshard"
    error = error_of.get(rank) if error_of else None
    entry = entry_of[rank] if entry_of else ""
    result = caught(lambda: agree(operation, fields_of[rank], group, CPU, error=error, entry=entry))
    agree("unshard", {"length": 4}, group, CPU)
    assert still_works(world)
    return result


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_that_agree_go_on(ranks, world):
    assert ranks.run(world, agree_on, [{"length": 3, "rows": 2**62}] * world) == [None] * world
    assert ranks.run(world, agree_on, [{}] * world) == [None] * world


def test_a_field_that_differs_is_named_with_the_values_by_rank_on_every_rank(ranks):
    fields = [{"rows": 1, "length": 3}, {"rows": 1, "length": 3}, {"rows": 1, "length": 5}]
    for kind, message in ranks.run(3, agree_on, fields):
        assert kind == "ValueError"
        assert message.startswith("unshard: length differs between the ranks of the group: {0: 3, 1: 3, 2: 5}; every")
    dtypes = [{"dtype": DTYPES.index(dtype)} for dtype in (torch.float32, torch.bfloat16)]
    for kind, message in ranks.run(2, agree_on, dtypes):
        assert kind == "ValueError"
        assert "dtype differs between the ranks of the group: {0: 'float32', 1: 'bfloat16'}" in message


def test_another_entry_is_named_by_each_rank_that_has_it(ranks):
    messages = [message for _, message in ranks.run(3, agree_on, [{"n": 1}] * 3, None, None, ["a", "b", "a"])]
    assert "entry differs between the ranks of the group: {0: 'a', 1: '(another)', 2: 'a'}" in messages[0]
    assert "{0: '(another)', 1: 'b', 2: '(another)'}" in messages[1]


def test_other_sets_of_fields_are_refused_though_their_values_are_alike(ranks):
    for kind, message in ranks.run(2, agree_on, [{"rows": 1}, {"length": 1}]):
        assert kind == "ValueError"
        assert message.startswith("unshard: the ranks of the group pass different sets of arguments")


def test_ranks_in_different_operations_are_told_which(ranks):
    operations = ["unshard", "context_parallel_attention", "unshard"]
    for kind, message in ranks.run(3, agree_on, [{"a": 1}, {"a": 1, "b": 2}, {"a": 1}], operations):
        assert kind == "RuntimeError"
        assert f"ranks of one group are in different operations: {dict(enumerate(operations))}; every" in message


def test_the_refusal_of_one_rank_is_raised_there_and_reported_by_the_others(ranks):
    refusals = {1: KeyError("own verdict"), 3: ValueError("my own")}
    results = ranks.run(4, agree_on, [{"length": 3}] * 4, None, refusals)
    told = ("RuntimeError", "unshard: rank(s) [1, 3] of the group refused their arguments; see their error")
    assert results == [told, ("KeyError", "'own verdict'"), told, ("ValueError", "my own")]
    # A rank that cannot say what it has.
    results = ranks.run(2, agree_on, [{"length": 3}, {}], None, {1: ValueError("no length")})
    assert results[0] == ("RuntimeError", "unshard: rank(s) [1] of the group refused their arguments; see their error")
    assert results[1] == ("ValueError", "no length")


def test_a_refusal_beside_a_difference_names_both_on_every_rank(ranks):
    results = ranks.run(2, agree_on, [{"length": 3}, {"length": 0}], None, {1: ValueError("length must be > 0")})
    differs = "length differs between the ranks of the group: {0: 3, 1: 0}"
    assert results[1] == ("ValueError", f"length must be > 0 ({differs})")
    assert results[0][0] == "ValueError"
    assert differs in results[0][1]
    assert results[0][1].endswith("rank(s) [1] of the group refused their arguments; see their error")


# ---- one batch -------------------------------------------------------------------------------------------------------


def check_equal_batches(rank, world):
    mesh = mesh_of(world)
    torch.manual_seed(0)
    tokens = torch.randint(100, (2, 9))
    nan = torch.tensor([float("nan"), 1.0])
    cases = [
        tokens,
        {"tokens": tokens, "labels": [tokens, 1]} if rank % 2 else {"labels": [tokens, "text"], "tokens": tokens},
        nan,
        torch.zeros(0, 3),
        torch.tensor(3.5),
        tokens > 50,
        tokens.to(torch.bfloat16),
        tokens.to(torch.float8_e4m3fn),
        torch.complex(nan, nan).conj(),
        torch.nn.Parameter(torch.ones(3)),
        # How a tensor lies in memory is a rank's own affair.
        tokens.t().contiguous().t() if rank == 0 else tokens,
        torch.ones(1, 3).expand(4, 3) if rank == 0 else torch.ones(4, 3),
        torch.arange(20).view(2, 10)[:, 1:] if rank == 0 else torch.arange(20).view(2, 10)[:, 1:].clone(),
    ]
    for case in cases:
        assert check_same_batch(case, mesh) is None
    with torch.inference_mode():
        check_same_batch(tokens + 1, mesh)
    assert still_works(world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_batches_pass_however_they_lie_in_memory(ranks, world):
    ranks.run(world, check_equal_batches)


def check_differing_batches(rank, world):
    """In each case rank 1 holds another batch."""
    mesh = mesh_of(world)
    tokens = torch.arange(16).view(2, 8)
    one = tokens.clone()
    one[1, 5] += 1
    tree = {"tokens": tokens, "more": [tokens, tokens.float()]}
    cases = {
        "a single element": (tokens, one),
        "shape": (tokens, tokens.view(4, 4)),
        "dtype": (torch.zeros(2, dtype=torch.int32), torch.zeros(2)),
        "one entry": (tree, {**tree, "more": [one, tokens.float()]}),
        "two entries": (tree, {"tokens": one, "more": [tokens, one.float()]}),
        "names": (tree, {"ids": tokens, "more": tree["more"]}),
        "swapped": ({"a": tokens, "b": one}, {"a": one, "b": tokens}),
        "number": ([tokens, tokens], [tokens]),
        "grouping": ([tokens, [tokens]], [[tokens], tokens]),
        "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
        "none": (tokens, {"a": None}),
    }
    messages = {}
    for name, (ours, theirs) in cases.items():
        messages[name] = caught(lambda: check_same_batch(theirs if rank == 1 else ours, mesh))  # noqa: B023
        check_same_batch(tokens, mesh)
    assert still_works(world)
    return messages


@pytest.mark.parametrize("world", [2, 3, 4])
def test_differing_batches_are_refused_on_every_rank_with_the_ranks_and_the_entry(ranks, world):
    results = ranks.run(world, check_differing_batches)
    groups = f"ranks {[r for r in range(world) if r != 1]} | ranks [1]"
    for rank, result in enumerate(results):
        here = {name: message for name, (_, message) in result.items()}
        kinds = {name: kind for name, (kind, _) in result.items()}
        assert kinds.pop("none") == ("ValueError" if rank == 1 else "RuntimeError")
        assert set(kinds.values()) == {"ValueError"}
        for name in ("a single element", "shape", "dtype", "sign of zero"):
            assert f"('cp',) group hold different data: the tensor {groups}; here shape" in here[name]
        assert f"different data: more.0 {groups}; here shape (2, 8), torch.int64" in here["one entry"]
        assert f"more.1 {groups}" not in here["one entry"]
        assert f"more.1 {groups}; here shape (2, 8), torch.float32" in here["two entries"]
        assert f"tokens {groups}" in here["two entries"]
        assert f"a {groups}" in here["swapped"]
        assert f"b {groups}" in here["swapped"]
        for name, mine, theirs in (
            ("names", "['more.0', 'more.1', 'tokens']", "['ids', 'more.0', 'more.1']"),
            ("number", "['0', '1']", "['0']"),
            ("grouping", "['0', '1.0']", "['0.0', '1']"),
        ):
            assert f"different data: tensors {groups}; here {theirs if rank == 1 else mine}" in here[name]
        assert "choose rows by the rank in dims.view('batch')" in here["shape"]
        shape = "(4, 4)" if rank == 1 else "(2, 8)"
        assert f"here shape {shape}, torch.int64, first elements [0, 1, 2, 3]" in here["shape"]
        told = "found no tensor in dict" if rank == 1 else "rank(s) [1] of the group refused"
        assert told in here["none"]


def check_by_axis(rank, world):
    """cp 2 × dp 2: cp ranks read one batch, dp ranks different ones."""
    dims = ParallelDims(dp_shard=2, cp=2)
    dims.build_mesh("cpu")
    rows = torch.arange(8) + 100 * dims.view("batch").get_local_rank()
    check_same_batch(rows, dims.view("cp"))
    return caught(lambda: check_same_batch(rows, dims.view("batch"))), caught(lambda: check_same_batch(rows, dims.mesh))


def test_only_the_ranks_of_the_mesh_have_to_agree_and_it_has_one_axis(ranks):
    for across, plane in ranks.run(4, check_by_axis):
        assert "ranks [0] | ranks [1]" in across[1]
        assert plane[0] == "ValueError"
        assert "check_same_batch needs the 1-D mesh" in plane[1]


def check_nothing(rank, world):
    return caught(lambda: check_same_batch({"text": "x"}, mesh_of(world)))


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_without_tensors_is_refused(ranks, world):
    refused = ("ValueError", "check_same_batch found no tensor in dict; pass a tensor, or a container with one")
    assert ranks.run(world, check_nothing) == [refused] * world
