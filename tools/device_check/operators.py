"""``torch.library.opcheck`` of the attention ops on the device, by a group of one rank."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
from torch.library import opcheck

from device_check.sections import Section
from device_check.solve import STRATEGIES, strategy_of
from dtcp.attention import ops
from dtcp.attention.loopback import Loopback
from dtcp.collectives import agree
from dtcp.documents import Documents
from dtcp.dropout import dropout_keys
from dtcp.layout import make_layout

CASES = ("plain", "dropout", "masks")


def check_operators(device: torch.device, section: Section, *, is_small: bool) -> None:
    """Schema, fake tensors, autograd registration and tracing, of each strategy without an all-to-all of heads.

    With one rank that has no heads to exchange: on two, the tests do that.
    """
    section.columns = ("strategy", "case", "opcheck")
    (group,) = Loopback(1).groups
    strategies = STRATEGIES[:1] if is_small else STRATEGIES[:3]
    for case, strategy in section.within_budget(list(itertools.product(CASES, strategies)), "opchecks"):
        failures = len(section.failures)
        with section.catching(f"opcheck of {strategy}, {case}"):
            _check(device, strategy, case, group.group_name)
            section.num_checks += 1
        verdict = "passes" if len(section.failures) == failures else "FAILS"
        section.rows.append({"strategy": strategy, "case": case, "opcheck": verdict})


def _check(device: torch.device, strategy: str, case: str, group_name: str) -> None:
    layout = make_layout("head_tail", seq_len=13, cp=1)
    q, k, v = (torch.randn(2, layout.local_seq_len, h, d, device=device) for h, d in ((4, 16), (2, 16), (2, 8)))
    masks: tuple[Any, ...] = (None,) * 6
    window, dropped_p, keys = (-1, -1), 0.0, None
    if case == "dropout":
        dropped_p, keys = 0.3, dropout_keys(0, 0, [0, 1], layout.positions(0)).to(device)
    if case == "masks":
        documents, window = Documents.from_lengths([[5, 8], [13]]), (6, -1)
        sinks, bias, slopes = (x.to(device) for x in (torch.randn(4), torch.randn(2, 1, 13, 13), torch.rand(4)))
        masks = (documents.state, torch.tensor([13, 9]), None, sinks, bias, slopes)
    how = strategy_of(strategy, 1)
    constants = (group_name, True, *window, 0.0, 0.25, *how[:4], "auto", dropped_p, 0, "")
    more = (layout.state, layout.state, *masks, keys, *constants)
    # opcheck compares the outputs of two runs, and each call has another number.
    with mock.patch.object(ops, "agree", lambda *args, **kwargs: 7 * bool(agree(*args, **kwargs))):
        opcheck(ops.forward_op, (q, k, v, *more, False, False))
        # With gradients opcheck differentiates the sum of all outputs, lse too, which the op refuses.
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        without_lse = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(ops.forward_op, (*leaves, *more, True, True), test_utils=without_lse)
        out, lse, number, *_ = ops.forward_op(q, k, v, *more, False, False)
        has_bias = case == "masks"
        opcheck(ops.backward_op, (out, q, k, v, out, lse, number, *more, k.size(2), has_bias, has_bias))
