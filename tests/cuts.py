"""What the tests of cutting and joining share: layouts, inputs, and a cut made by hand."""

import pytest
import torch

from dtcp.layout import LAYOUT_NAMES, make_layout
from dtcp.mesh import ParallelDims

LENGTHS = (1, 2, 5, 6, 7)


def cp_mesh(world):
    dims = ParallelDims(cp=world)
    dims.build_mesh("cpu")
    return dims.view("cp")


def layouts(cp, lengths=LENGTHS):
    return [
        make_layout(name, seq_len=seq_len, cp=cp, multiple_of=multiple_of)
        for name in LAYOUT_NAMES
        for seq_len, multiple_of in [*((length, 1) for length in lengths), (lengths[-1], 3)]
    ]


def cut_by_hand(x, layout, rank, dim, pad_value=0):
    """What ``shard`` has to return, one slot at a time."""
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
