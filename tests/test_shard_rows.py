"""Cut and join where rows hold their tokens in places of their own; and embeddings that are cut with their graph."""

import pytest
import torch

import dtcp
from cuts import cp_mesh, cut_by_hand, layout_of, raises, same, some_documents
from dtcp.documents import Documents
from dtcp.layout import make_layout
from dtcp.shard import shard, unshard

ROWS = 3


def inputs_with_rows(seq_len):
    """(tensor, dim, batch_dim): the sequence before and behind the rows, beside them and not; 3-row position ids."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [
        ((ROWS, seq_len), 1, 0),
        ((ROWS, seq_len, 2), -2, -3),
        ((seq_len, ROWS), 0, 1),
        ((seq_len, 2, ROWS), 0, -1),
        ((3, ROWS, seq_len), 2, 1),
        ((2, ROWS, 2, seq_len, 2), 3, 1),
    ]
    return [(torch.randn(*shape, generator=generator), dim, batch_dim) for shape, dim, batch_dim in shapes]


def layouts_with_rows(world):
    layouts = [layout_of("per_document", s, world, ROWS, multiple_of=m) for s, m in ((5, 1), (6, 2), (12, 1), (13, 3))]
    assert {layout.num_rows for layout in layouts} == {ROWS}
    return layouts


def cut_rows(rank, world):
    mesh = cp_mesh(world)
    for layout in layouts_with_rows(world):
        for x, dim, batch_dim in inputs_with_rows(layout.seq_len):
            local = shard(x, mesh, layout, dim=dim, batch_dim=batch_dim, pad_value=-7)
            assert same(local, cut_by_hand(x, layout, rank, dim, -7, batch_dim)), (layout, dim)
            assert local.is_contiguous()
            whole = unshard(local, mesh, layout, dim=dim, batch_dim=batch_dim)
            assert same(whole, x), (layout, dim)
            assert whole.is_contiguous()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_row_is_cut_and_joined_by_its_own_positions(ranks, world):
    ranks.run(world, cut_rows)


def differentiate_rows(rank, world):
    mesh = cp_mesh(world)
    for layout in layouts_with_rows(world)[1:]:
        for data, dim, batch_dim in inputs_with_rows(layout.seq_len):
            where = {"dim": dim, "batch_dim": batch_dim}
            x = data.double().requires_grad_()
            local = shard(x, mesh, layout, pad_value=float("nan"), **where)
            weight = torch.rand_like(data.double()) + 1
            local_weight = cut_by_hand(weight, layout, rank, dim, 0, batch_dim)
            mine = cut_by_hand(torch.arange(x.numel()).view(x.shape), layout, rank, dim, -1, batch_dim)
            is_mine = torch.isin(torch.arange(x.numel()), mine).view(x.shape)
            (grad,) = torch.autograd.grad(local, x, local_weight)
            assert torch.equal(grad, torch.where(is_mine, weight, 0.0)), (layout, dim)
            # The sum over ranks of losses of their own, each rank's 2^rank times the same.
            local = shard(x.detach(), mesh, layout, pad_value=5, **where).requires_grad_()
            whole = unshard(local, mesh, layout, **where)
            (grad,) = torch.autograd.grad((whole**3 / 3 * weight).sum() * 2**rank, local, create_graph=True)
            expected = cut_by_hand(x.detach() ** 2 * weight, layout, rank, dim, 0, batch_dim) * (2**world - 1)
            assert torch.allclose(grad, expected, rtol=1e-14, atol=0), (layout, dim)
            (second,) = torch.autograd.grad(grad.sum(), local)
            expected = cut_by_hand(2 * x.detach() * weight, layout, rank, dim, 0, batch_dim) * sum(
                2**r for r in range(world)
            )
            assert torch.allclose(second, expected, rtol=1e-14, atol=0), (layout, dim)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_and_second_derivatives_go_to_the_tokens_of_each_row(ranks, world):
    ranks.run(world, differentiate_rows)


def cut_rows_of_every_dtype(rank, world):
    from dtcp.collectives import DTYPES

    mesh, layout = cp_mesh(world), layout_of("per_document", 7, world, ROWS, multiple_of=2)
    for dtype in DTYPES:
        if dtype == torch.float8_e8m0fnu:  # has no zero, for the pads
            continue
        numbers = torch.arange(ROWS * 7 * 2.0).reshape(ROWS, 7, 2)
        x = numbers % 3 == 0 if dtype == torch.bool else numbers.to(dtype)
        local = shard(x, mesh, layout)
        assert same(local, cut_by_hand(x, layout, rank, 1)), dtype
        assert same(unshard(local, mesh, layout), x), dtype
    for shape in ((ROWS, 7, 0), (0, ROWS, 7)):
        x = torch.zeros(shape, requires_grad=True)
        where = {"dim": shape.index(7), "batch_dim": shape.index(ROWS)}
        whole = unshard(shard(x, mesh, layout, **where), mesh, layout, **where)
        whole.sum().backward()
        assert whole.shape == x.grad.shape == shape


def test_rows_of_every_dtype_and_of_no_element_make_the_round_trip(ranks):
    ranks.run(2, cut_rows_of_every_dtype)


def cut_containers(rank, world):
    from tensordict import TensorDict

    mesh, layout = cp_mesh(world), layout_of("per_document", 7, world, ROWS)
    batch = {"tokens": torch.arange(ROWS * 7).view(ROWS, 7), "extra": [torch.randn(ROWS, 7, 2), None, "text"]}
    local = shard(batch, mesh, layout)
    assert same(local["tokens"], cut_by_hand(batch["tokens"], layout, rank, 1))
    assert same(local["extra"][0], cut_by_hand(batch["extra"][0], layout, rank, 1))
    assert same(unshard(local, mesh, layout)["extra"][0], batch["extra"][0])
    tree = TensorDict({"tokens": batch["tokens"], "inner": {"x": batch["extra"][0]}}, [ROWS, 7])
    local = shard(tree, mesh, layout)
    assert local.batch_size == (ROWS, layout.local_seq_len)
    assert same(local["inner", "x"], cut_by_hand(batch["extra"][0], layout, rank, 1))
    assert same(unshard(local, mesh, layout)["tokens"], batch["tokens"])


def test_containers_and_tensordicts_are_cut_row_by_row(ranks):
    ranks.run(2, cut_containers)


def cut_shared_rows(rank, world):
    mesh = cp_mesh(world)
    one = layout_of("per_document", 7, world)
    same_twice = make_layout(
        "per_document", seq_len=7, cp=world, documents=some_documents(7).from_lengths([[3, 4]] * 2)
    )
    for layout in (one, same_twice, make_layout("head_tail", seq_len=7, cp=world)):
        assert layout.num_rows == 1
        for x, dim in ((torch.randn(7), 0), (torch.randn(5, 7), 1)):
            local = shard(x, mesh, layout, dim=dim, batch_dim=9)
            assert same(local, cut_by_hand(x, layout, rank, dim))
            assert same(unshard(local, mesh, layout, dim=dim, batch_dim=9), x)


def test_batch_dim_is_not_looked_at_where_all_rows_are_alike(ranks):
    ranks.run(2, cut_shared_rows)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_rows(rank, world):
    mesh, layout = cp_mesh(world), layout_of("per_document", 6, world, ROWS)
    x = torch.zeros(2, 6)
    wrong = r"batch_dim=0 of a tensor of shape \(2, {}\) must have layout.num_rows=3 rows, got 2; .*select_rows"
    raises(lambda: shard(x, mesh, layout), "shard: " + wrong.format(6))
    local = torch.zeros(2, layout.local_seq_len)
    raises(lambda: unshard(local, mesh, layout), "unshard: " + wrong.format(layout.local_seq_len))
    no_dim = r"rows differently, and batch_dim={} is no dim of a tensor of shape .* beside its sequence dim {}; give"
    raises(lambda: shard(x, mesh, layout, batch_dim=1), no_dim.format(1, 1))
    raises(lambda: shard(x, mesh, layout, batch_dim=2), no_dim.format(2, 1))
    raises(lambda: shard(x[0], mesh, layout, dim=0), no_dim.format(0, 0))
    raises(lambda: unshard(local[0], mesh, layout, dim=0), no_dim.format(0, 0))
    assert shard(x, mesh, layout.select_rows([0, 2])).shape == local.shape


@pytest.mark.parametrize("world", [1, 2])
def test_other_rows_than_the_layouts_are_refused_with_both_numbers(ranks, world):
    ranks.run(world, refuse_rows)


def join_differing_rows(rank, world):
    mesh = cp_mesh(world)
    one, other = (
        make_layout("per_document", seq_len=8, cp=world, documents=some_documents(8).from_lengths(lengths))
        for lengths in ([[4, 4], [8]], [[3, 5], [8]])
    )
    local = shard(torch.randn(2, 8), mesh, one)
    last = rank == world - 1
    differs = r"documents of the layout \(hash\) differs between the ranks of the group"
    raises(lambda: unshard(local, mesh, other if last else one), differs)
    # A rank with other rows says so; the others say who it was.
    if last:
        raises(lambda: unshard(local[:1], mesh, one), "layout.num_rows=2 rows, got 1")
    else:
        raises(lambda: unshard(local, mesh, one), r"size of dim 0 differs between the ranks of the group: .*1: 1")
    square = torch.zeros(2, one.local_seq_len, 2)
    raises(lambda: unshard(square, mesh, one, batch_dim=2 if last else 0), "batch_dim differs between .*: {0: 0, 1: 2}")
    assert unshard(local, mesh, one).shape == (2, 8)


def test_ranks_with_other_documents_or_rows_are_refused_on_all_of_them(ranks):
    ranks.run(2, join_differing_rows)


# ---- compiled --------------------------------------------------------------------------------------------------------


def compile_rows(rank, world):
    import torch._dynamo.testing

    from dtcp import Documents

    mesh = cp_mesh(world)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, layout):
        local = shard(x * 2, mesh, layout, pad_value=1)
        return local, unshard(local, mesh, layout) * x

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for lengths in ([[7], [3, 4]], [[1, 6], [2, 2, 3]], [[7], [7]], [[0, 7], [1, 1, 1, 1, 1, 1, 1]], [[5, 2], [2, 5]]):
        layout = make_layout("per_document", seq_len=7, cp=world, documents=Documents.from_lengths(lengths))
        results = []
        for fn in (step, compiled):
            x = torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7).requires_grad_()
            local, whole = fn(x, layout)
            (grad,) = torch.autograd.grad(whole.sum() + local.sum() / 8, x)
            results.append((local, whole, grad))
        for eager, traced in zip(*results, strict=True):
            assert same(eager, traced)
        assert torch.equal(results[1][1], 2 * x * x)
    wrong = make_layout("per_document", seq_len=7, cp=world, documents=Documents.from_lengths(lengths[:1] * 2))
    assert wrong.num_rows == 1
    return counter.frame_count


def test_other_documents_in_each_step_cost_no_recompilation(ranks):
    assert ranks.run(2, compile_rows) == [1, 1]


# ---- embeddings as input ---------------------------------------------------------------------------------------------


class Multimodal(torch.nn.Module):
    """Text and image tokens merged into one sequence; the model sees embeddings and 3-row position ids (3, B, S)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 6, dtype=torch.float64)
        self.project = torch.nn.Linear(4, 6, dtype=torch.float64)
        self.axes = torch.nn.Parameter(torch.randn(3, 6, dtype=torch.float64))
        self.out = torch.nn.Linear(6, 11, dtype=torch.float64)

    def merge(self, tokens, is_image, patches):
        return self.table(tokens).masked_scatter(is_image.unsqueeze(-1), self.project(patches))

    def forward(self, embeddings, position_ids):
        angles = torch.einsum("kbs,kd->bsd", position_ids.double(), self.axes)
        return self.out(torch.tanh(embeddings) * angles.cos())


def cut_merged_embeddings(rank, world, name):
    from dtcp import token_loss

    mesh = cp_mesh(world)
    generator = torch.Generator().manual_seed(1)
    tokens, position_ids = (torch.randint(11, shape, generator=generator) for shape in ((2, 13), (3, 2, 13)))
    labels = torch.randint(11, (2, 13), generator=generator)
    is_image = torch.zeros(2, 13, dtype=torch.bool)
    is_image[0, 2:6] = is_image[1, 7:12] = True
    patches = torch.randn(9, 4, dtype=torch.float64, generator=generator)

    whole = Multimodal()
    logits = whole(whole.merge(tokens, is_image, patches), position_ids)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    model, layout = Multimodal(), layout_of(name, 13, world, rows=2)
    embeddings = shard(model.merge(tokens, is_image, patches), mesh, layout)
    logits = model(embeddings, shard(position_ids, mesh, layout, dim=2, batch_dim=1))
    token_loss(logits, shard(labels, mesh, layout, pad_value=-100), mesh=mesh).backward()
    for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.distributed.all_reduce(parameter.grad)
        assert torch.allclose(parameter.grad, expected.grad, rtol=1e-12, atol=1e-15)
        assert expected.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["head_tail", "per_document"])
def test_embeddings_merged_before_the_cut_get_the_gradients_of_the_whole(ranks, name):
    for world in (1, 2, 3):
        ranks.run(world, cut_merged_embeddings, name)


def check_buffers_of_rows(rank, world):
    """In a context whose rows have places of their own, 3-row position ids say which dim their rows are in."""
    mesh = cp_mesh(world)
    documents = Documents.from_lengths([[4, 8], [12], [7, 5]])
    layout = make_layout("per_document", seq_len=12, cp=world, documents=documents)
    ids = torch.arange(108).view(3, 3, 12)
    tokens = torch.arange(36).view(3, 12)
    expected = dtcp.shard(ids, mesh, layout, dim=2, batch_dim=1)
    options = {"buffers": [tokens, ids], "buffer_seq_dims": [1, 2], "buffer_pad_values": 0, "documents": documents}
    options |= {"layout": "per_document", "expected_attention_calls": 0}
    with dtcp.context_parallel(mesh, **options, buffer_batch_dims=[0, 1]) as cp:
        assert torch.equal(ids, expected)
        assert torch.equal(tokens, dtcp.shard(torch.arange(36).view(3, 12), mesh, layout))
        assert torch.equal(cp.positions, torch.where(cp.valid, layout.positions(rank), 0))
        assert torch.equal(cp.unshard(ids.clone(), dim=2, batch_dim=1), torch.arange(108).view(3, 3, 12))
    with pytest.raises(ValueError, match=r"buffer 1 of shape \(3, 3, 12\) has 2 dims before .* buffer_batch_dims="):
        dtcp.context_parallel(mesh, **options).__enter__()


def test_buffers_whose_rows_stand_elsewhere_say_so(ranks):
    ranks.run(2, check_buffers_of_rows)
