"""What the tests of cutting and joining share: layouts, inputs, and a cut made by hand."""

import pytest
import torch

from dtcp.documents import Documents
from dtcp.layout import LAYOUT_NAMES, make_layout
from dtcp.mesh import ParallelDims

LENGTHS = (1, 2, 5, 6, 7)


def cp_mesh(world):
    dims = ParallelDims(cp=world)
    dims.build_mesh("cpu")
    return dims.view("cp")


def some_documents(seq_len, rows=1, is_padded=False):
    """Documents of one token and of several, others in each row; padding inside the last row if asked for."""
    ids = [torch.arange(seq_len) ** 2 // (seq_len + 3 * row) for row in range(1, rows + 1)]
    if is_padded:
        start = seq_len // 3
        ids[-1][start + 2 :] += seq_len  # what follows padding is another document
        ids[-1][start : start + 2] = -1
    return Documents.from_ids(torch.stack(ids))


def layout_of(name, seq_len, cp, rows=1, **options):
    """Any layout; ``per_document`` places some documents, others in each row."""
    documents = some_documents(seq_len, rows) if name == "per_document" else None
    return make_layout(name, seq_len=seq_len, cp=cp, documents=documents, **options)


def layouts(cp, lengths=LENGTHS):
    return [
        layout_of(name, seq_len, cp, multiple_of=multiple_of)
        for name in LAYOUT_NAMES
        for seq_len, multiple_of in [*((length, 1) for length in lengths), (lengths[-1], 3)]
    ]


def cut_by_hand(x, layout, rank, dim, pad_value=0, batch_dim=0):
    """What ``shard`` has to return, one slot at a time."""
    if layout.num_rows > 1:
        rows = [layout.select_rows([row]) for row in range(layout.num_rows)]
        parts = [cut_by_hand(x.narrow(batch_dim, row, 1), rows[row], rank, dim, pad_value) for row in range(len(rows))]
        return torch.cat(parts, batch_dim)
    slots = []
    for position in layout.positions(rank).tolist():
        slot = x.narrow(dim, min(position, layout.seq_len - 1), 1).clone()
        slots.append(slot if position < layout.seq_len else torch.full_like(slot, pad_value))
    return torch.cat(slots, dim)


def same(a, b):
    """Equal in dtype, shape and every bit."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def raises(fn, match, error=ValueError):
    with pytest.raises(error, match=match):
        fn()


def inputs(seq_len):
    """(tensor, dim): each dim, counted from both ends, and 1-D."""
    generator = torch.Generator().manual_seed(seq_len)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    return [
        (random(seq_len), 0),
        (random(seq_len), -1),
        (random(seq_len, 2), 0),
        (random(2, seq_len), 1),
        (random(2, seq_len), -1),
        (random(2, seq_len, 3), -2),
        (random(2, 2, 3, seq_len), -1),
        (random(seq_len, 2, 3), -3),
    ]
