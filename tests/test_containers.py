"""Nested containers and TensorDicts: what is visited, in which order, what is rebuilt, and what is refused."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from dtcp.containers import map_tensors, named_tensors
from dtcp.layout import make_layout
from dtcp.mesh import ParallelDims
from dtcp.shard import shard, unshard

Pair = namedtuple("Pair", ["first", "second"])
LONG = torch.arange(16).view(2, 8)
WIDE = torch.arange(48.0).view(2, 8, 3)


@tensorclass
class Batch:
    tokens: torch.Tensor
    source: str
    mask: torch.Tensor | None = None


def head(tree, dim=1, size=4):
    """Keep the first ``size`` of ``dim``, as a cut does."""
    return map_tensors(lambda x, name: x.narrow(dim, 0, size), tree, dim=dim, size=size)


def cp_mesh(world):
    dims = ParallelDims(cp=world)
    dims.build_mesh("cpu")
    return dims.view("cp")


# ---- python containers -----------------------------------------------------------------------------------------------


def test_containers_are_rebuilt_as_what_they_were():
    tree = {
        "list": [LONG, [WIDE, ()]],
        "tuple": (LONG, None),
        "named": Pair(LONG, "text"),
        "ordered": OrderedDict(z=LONG, a=WIDE),
        "user": UserDict(a=LONG),
        "proxy": MappingProxyType({"a": LONG}),
        7: LONG,
        None: 1.5,
        "size": LONG.shape,
        "dtype": torch.int64,
        "flag": True,
        "bytes": b"x",
        "object": SimpleNamespace(a=1),
    }
    result = head(tree)
    assert list(result) == list(tree)
    assert torch.equal(result["list"][0], LONG[:, :4])
    assert result["list"][1][0].shape == (2, 4, 3)
    assert result["list"][1][1] == ()
    assert isinstance(result["tuple"], tuple)
    assert result["tuple"][1] is None
    assert isinstance(result["named"], Pair)
    assert result["named"].second == "text"
    assert isinstance(result["ordered"], OrderedDict)
    assert list(result["ordered"]) == ["z", "a"]
    assert isinstance(result["user"], UserDict)
    assert isinstance(result["proxy"], MappingProxyType)
    assert torch.equal(result["proxy"]["a"], LONG[:, :4])
    assert torch.equal(result[7], LONG[:, :4])
    assert result["size"] == (2, 8)
    assert isinstance(result["size"], torch.Size)
    for key in (None, "dtype", "flag", "bytes", "object"):
        assert result[key] is tree[key]
    # The input holds what it held.
    assert tree["list"][0] is LONG
    assert tree["ordered"]["z"] is LONG
    assert tree["user"]["a"] is LONG


def test_a_defaultdict_keeps_its_factory_and_the_input_its_values():
    tree = defaultdict(list, a=LONG)
    result = head(tree)
    assert isinstance(result, defaultdict)
    assert result["new"] == []
    assert list(tree) == ["a"]
    assert tree["a"] is LONG
    assert torch.equal(result["a"], LONG[:, :4])


def test_a_sequence_type_of_torch_is_rebuilt():
    result = head(torch.max(WIDE, dim=2))
    assert type(result) is torch.return_types.max
    assert result.values.shape == result.indices.shape == (2, 4)


def test_tensors_are_visited_in_the_order_of_their_names_whatever_the_order_of_keys():
    def visited(tree):
        seen = []

        def look(x, name):
            seen.append((name, x))
            return x

        map_tensors(look, tree, dim=1, size=8)
        assert [(name, id(x)) for name, x in seen] == [(name, id(x)) for name, x in named_tensors(tree)]
        return [name for name, _ in seen]

    names = ["1", "1", "b.0", "b.1.x", "b.1.y", "z"]
    first = {"z": LONG, 1: LONG, "1": WIDE, "b": [LONG, {"y": LONG, "x": WIDE}]}
    second = {"b": [LONG, {"x": WIDE, "y": LONG}], "1": WIDE, 1: LONG, "z": LONG}
    assert visited(first) == visited(second) == names
    # Two keys of one text: the name of the type decides.
    assert [x.ndim for _, x in named_tensors(first)][:2] == [x.ndim for _, x in named_tensors(second)][:2] == [2, 3]
    assert visited(TensorDict({"z": LONG, "a": {"y": LONG, "x": WIDE}}, [2, 8])) == ["a.x", "a.y", "z"]
    assert visited(LONG) == [""]


@dataclass
class Plain:
    tokens: torch.Tensor


OTHERS = [numpy.zeros((2, 8)), {LONG}, deque([LONG]), Plain(LONG), {"a": 1}.values()]


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_what_may_hold_tensors_and_cannot_be_rebuilt_is_refused_with_its_place(value):
    message = rf"got {type(value).__name__} at 'batch\.1'; turn it into one of these"
    with pytest.raises(ValueError, match=message):
        head({"batch": [LONG, value]})
    with pytest.raises(ValueError, match=message):
        named_tensors({"batch": [LONG, value]})
    with pytest.raises(ValueError, match=rf"got {type(value).__name__}; turn it"):
        head(value)


# ---- TensorDict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "expected"), [([2, 8], (2, 4)), ([2], (2,)), ([], ())])
def test_the_batch_size_of_a_tensordict_follows(batch_size, expected):
    tree = TensorDict({"z": LONG, "a": WIDE}, batch_size)
    result = head(tree)
    assert isinstance(result, TensorDict)
    assert result.batch_size == expected
    assert list(result.keys()) == ["z", "a"]
    assert torch.equal(result["z"], LONG[:, :4])
    assert torch.equal(result["a"], WIDE[:, :4])
    assert tree.batch_size == tuple(batch_size)
    assert tree["z"] is LONG


def test_nested_tensordicts_keep_their_own_batch_dims():
    inner = TensorDict({"wide": WIDE}, [2, 8, 3])
    tree = TensorDict({"inner": inner, "deep": {"er": {"long": LONG}}, "empty": {}}, [2, 8], names=["batch", "seq"])
    result = head(tree)
    assert result.batch_size == (2, 4)
    assert result.names == ["batch", "seq"]
    assert result["inner"].batch_size == (2, 4, 3)
    assert result["deep", "er"].batch_size == (2, 4)
    assert result["empty"].batch_size == (2, 4)
    result = head(TensorDict({"inner": inner, "row": {"long": LONG}}, [2]))
    assert (result.batch_size, result["inner"].batch_size, result["row"].batch_size) == ((2,), (2, 4, 3), (2,))


def test_the_sequence_may_be_the_first_batch_dim():
    result = head(TensorDict({"a": LONG.t(), "n": {"b": torch.zeros(8)}}, [8]), dim=0)
    assert result.batch_size == result["n"].batch_size == (4,)


def test_data_that_is_no_tensor_stays_in_a_tensordict():
    tree = TensorDict({"x": LONG, "text": "hello", "number": NonTensorData(3)}, [2, 8])
    result = head(tree)
    assert (result["text"], result["number"], result.get("text").batch_size) == ("hello", 3, (2, 4))
    rows = TensorDict({"x": LONG, "names": NonTensorStack("first", "second")}, [2])
    result = head(rows)
    assert result["names"] == ["first", "second"]
    tokens = [NonTensorStack(*"abcdefgh"), NonTensorStack(*"ijklmnop")]
    with pytest.raises(ValueError, match=r"'texts' holds NonTensorStack along the sequence, which cannot be cut; use"):
        head(TensorDict({"x": LONG, "texts": NonTensorStack(*tokens)}, [2, 8]))


def test_a_lazy_stack_of_tensordicts_becomes_a_tensordict_of_the_same_values():
    rows = [TensorDict({"x": row, "n": {"y": row + 1}}, [8]) for row in LONG]
    result = head(LazyStackedTensorDict.lazy_stack(rows))
    assert result.batch_size == (2, 4)
    assert torch.equal(result["x"], LONG[:, :4])
    assert torch.equal(result["n", "y"], LONG[:, :4] + 1)


def test_a_tensorclass_stays_one():
    batch = Batch(tokens=LONG, source="web", batch_size=[2, 8])
    result = head(batch)
    assert isinstance(result, Batch)
    assert (result.batch_size, result.source, result.mask) == ((2, 4), "web", None)
    assert torch.equal(result.tokens, LONG[:, :4])
    result = head(TensorDict({"batch": batch}, [2, 8]))["batch"]
    assert isinstance(result, Batch)
    assert (result.batch_size, result.source) == ((2, 4), "web")


def test_negative_dims_count_from_the_end_of_each_tensor():
    result = head({"a": LONG, "b": LONG[0], "c": LONG.view(2, 1, 8)}, dim=-1)
    assert [tuple(x.shape) for x in result.values()] == [(2, 4), (4,), (2, 1, 4)]
    result = head(TensorDict({"a": LONG, "b": LONG.view(2, 8)}, [2, 8]), dim=-1)
    assert result.batch_size == (2, 4)
    result = head(TensorDict({"a": WIDE, "n": {"b": WIDE}, "empty": {}}, [2, 8]), dim=-2)
    assert result.batch_size == result["n"].batch_size == result["empty"].batch_size == (2, 4)
    # Behind the batch dims, each tensor may have its own.
    result = head(TensorDict({"a": LONG, "b": LONG.view(2, 1, 8)}, [2]), dim=-1)
    assert (result["a"].shape, result["b"].shape, result.batch_size) == ((2, 4), (2, 1, 4), (2,))


def test_a_negative_dim_that_means_different_batch_dims_is_refused():
    square = torch.zeros(2, 8, 8)
    with pytest.raises(ValueError, match=r"dim=-1 means different dims .*batch_size=\(2, 8\); give a dim counted from"):
        head(TensorDict({"a": LONG, "b": square}, [2, 8]), dim=-1)
    with pytest.raises(ValueError, match=r"batch_size=\(2, 8\) at 'x'; give"):
        head({"x": TensorDict({"a": LONG, "n": {"b": square}}, [2, 8])}, dim=-1)


# ---- through shard and unshard ---------------------------------------------------------------------------------------


def cut_and_join_tree(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=7, cp=world)
    x, y = torch.randn(2, 7), torch.arange(42).view(2, 7, 3)
    tree = {
        "plain": x,
        "nested": [Pair(y, None), "text"],
        "td": TensorDict({"x": x, "n": {"y": y}, "source": "web"}, [2, 7]),
        "class": Batch(tokens=y, source="code", mask=x > 0, batch_size=[2]),
    }
    local = shard(tree, mesh, layout)
    assert local["td"].batch_size == (2, layout.local_seq_len)
    assert torch.equal(local["td"]["n", "y"], shard(y, mesh, layout))
    whole = unshard(local, mesh, layout)
    assert torch.equal(whole["plain"], x)
    assert torch.equal(whole["nested"][0].first, y)
    assert whole["nested"][1] == "text"
    assert whole["td"].batch_size == (2, 7)
    assert torch.equal(whole["td"]["x"], x)
    assert torch.equal(whole["td"]["n", "y"], y)
    assert whole["td"]["source"] == "web"
    assert torch.equal(whole["class"].mask, x > 0)
    assert whole["class"].source == "code"
    leaf = torch.randn(2, 7, requires_grad=True)
    result = shard(TensorDict({"a": leaf}, [2, 7]), mesh, layout)
    unshard(result, mesh, layout)["a"].sum().backward()
    assert leaf.grad.sum() == 2 * layout.num_valid(rank) * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nested_containers_and_tensordicts_make_the_round_trip(ranks, world):
    ranks.run(world, cut_and_join_tree)


def join_in_any_order(rank, world):
    mesh, layout = cp_mesh(world), make_layout("striped", seq_len=6, cp=world)
    whole = {name: torch.full((1, 6), i).cumsum(1) for i, name in enumerate("abc")}
    order = ["abc", "cab", "bca"][rank]
    result = unshard(shard({name: whole[name] for name in order}, mesh, layout), mesh, layout)
    assert list(result) == list(order)
    assert all(torch.equal(result[name], whole[name]) for name in whole)
    nested = TensorDict({name: whole[name] for name in order}, [1, 6])
    result = unshard(shard({"td": nested}, mesh, layout), mesh, layout)["td"]
    assert all(torch.equal(result[name], whole[name]) for name in whole)


def test_dicts_whose_keys_come_in_another_order_on_each_rank_are_joined_by_key(ranks):
    ranks.run(3, join_in_any_order)


def join_other_entries(rank, world, ours, theirs):
    """Rank 1 has ``theirs``; all ranks refuse, and work again."""
    mesh, layout = cp_mesh(world), make_layout("contiguous", seq_len=4, cp=world)
    part = torch.ones(1, 2)
    keys = theirs if rank == 1 else ours
    with pytest.raises(ValueError) as info:
        unshard(dict.fromkeys(keys, part), mesh, layout)
    assert torch.equal(unshard(part, mesh, layout), torch.ones(1, 4))
    return str(info.value)


def test_dicts_with_other_entries_are_refused_on_every_rank(ranks):
    for message in ranks.run(2, join_other_entries, "ab", "a"):
        assert "number of tensors in the container differs between the ranks of the group: {0: 2, 1: 1}" in message
    by_rank = ["{0: 'b', 1: '(another)'}", "{0: '(another)', 1: 'c'}"]
    for message, values in zip(ranks.run(2, join_other_entries, "ab", "ac"), by_rank, strict=True):
        assert f"entry differs between the ranks of the group: {values}" in message


def join_second_entry_wrong(rank, world):
    mesh, layout = cp_mesh(world), make_layout("contiguous", seq_len=4, cp=world)
    tree = {"a": torch.ones(1, 2), "b": torch.ones(1, 3 if rank == 1 else 2)}
    with pytest.raises(ValueError) as info:
        unshard(tree, mesh, layout)
    assert torch.equal(unshard(tree["a"], mesh, layout), torch.ones(1, 4))
    return str(info.value)


def test_a_fault_in_a_later_entry_of_one_rank_is_refused_on_every_rank(ranks):
    for message in ranks.run(2, join_second_entry_wrong):
        assert "local length differs between the ranks of the group: {0: 2, 1: 3}" in message
