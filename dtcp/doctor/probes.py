"""What a model does that no mesh can get right: each is looked for on one rank, and named.

Shapes: G rows of the whole batch, S = seq_len.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtcp.doctor.compare import CLEAR, error_of
from dtcp.doctor.reference import EVERY, RIGHT, AttentionMode, Fault, Outcome, Reference, even_weights, is_same

ROUNDING = 1e-5  # relative, of float32 sums in another order


def mixes_tokens_elsewhere(reference: Reference) -> bool:
    """Whether tokens change others where every ``F.scaled_dot_product_attention`` sees its own token only."""
    tokens = reference.batch.tokens
    changed = tokens.clone()
    changed[0, ::2] = (tokens[0, ::2] + 1) % (int(tokens.max()) + 1)
    before, after = (_of_each_token_alone(reference, Fault("", tokens=x)) for x in (tokens, changed))
    return not torch.equal(before[:, 1::2], after[:, 1::2])


def counts_tokens(reference: Reference) -> bool:
    """Whether the second half of a row gives something else where the row begins there, each token seeing itself."""
    half = slice(reference.batch.tokens.size(1) // 2, None)
    whole, second = (_of_each_token_alone(reference, RIGHT, span) for span in (slice(None), half))
    return not _is_near(second, whole[:, half])


def depends_on_length(reference: Reference) -> bool:
    """Whether the first half of a row gives something else where the row ends there."""
    half = slice(reference.batch.tokens.size(1) // 2)
    whole, first = (_of_each_token_alone(reference, RIGHT, span) for span in (slice(None), half))
    if not _is_near(first, whole[:, half]):
        return True
    # Once more with attention, where no token sees a later one.
    tokens = reference.batch.tokens.clone()
    tokens[:, half.stop :] = (tokens[:, half.stop :] + 1) % (int(tokens.max()) + 1)
    with reference.keeping_buffers():
        whole, other = (reference.forward(slice(0, 1), Fault("", tokens=x)).detach()[:, half] for x in (None, tokens))
        first = reference.forward(slice(0, 1), span=half).detach()
    return _is_near(other, whole) and not _is_near(first, whole)


def mixes_rows(reference: Reference) -> bool:
    """Whether a row's logits change with the row beside it, where the batch has two."""
    tokens = reference.batch.tokens
    if tokens.size(0) < 2:
        return False
    changed = tokens.clone()
    changed[1] = (tokens[1] + 1) % (int(tokens.max()) + 1)
    with reference.keeping_buffers():
        before, after = (reference.forward(slice(0, 2), Fault("", tokens=x))[0].detach() for x in (tokens, changed))
    return not _is_near(after, before)


def adds_gradients(reference: Reference) -> bool:
    """Whether the backward gives gradients where the loss is zero times that of each token."""
    return any(g.isfinite().all() and g.any() for g in _beside_the_loss(reference, 1).gradients.values())


def adds_gradients_by_rows(reference: Reference) -> bool:
    """Whether these are others where all rows are in one forward: their sum over ranks depends on the mesh then.

    Each cp rank adds its own, as each row does: with as many rows as cp ranks the numbers of both agree.
    """
    if reference.batch.tokens.size(0) < 2 or not adds_gradients(reference):
        return False
    by_rows, at_once = (_beside_the_loss(reference, n) for n in (1, reference.batch.tokens.size(0)))
    return not _are_near(at_once, by_rows, ROUNDING)


def is_linear(reference: Reference) -> bool:
    """Whether all gradients double where the loss does."""
    with reference.keeping_buffers():
        doubled = reference.run(Fault("", token_weights=2 * even_weights(reference.batch.labels)))
    wanted = Outcome(0.0, {name: 2 * gradient for name, gradient in reference.outcome.gradients.items()})
    return _are_near(doubled, wanted, CLEAR)


def depends_on_world(reference: Reference) -> bool:
    """Whether the model computes something else where it is told the job's number of ranks."""
    return not is_same(reference.outcome, reference.run(Fault("", sees_world=True)))


def _of_each_token_alone(reference: Reference, fault: Fault, span: slice = slice(None)) -> Tensor:
    """Logits of the first row, or of a span of it alone, with attention of each token to itself."""
    tokens = reference.batch.tokens[:1, span]
    parts = torch.arange(tokens.size(1), device=tokens.device)[None]
    with reference.keeping_buffers(), AttentionMode(parts, EVERY):
        return reference.forward(slice(0, 1), fault, span=span).detach()


def _beside_the_loss(reference: Reference, num_at_once: int) -> Outcome:
    """What the backward adds to a loss of zero."""
    with reference.keeping_buffers():
        return reference.run(Fault("", token_weights=0 * even_weights(reference.batch.labels)), num_at_once=num_at_once)


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    """Whether logits agree; false for NaN."""
    return error_of(found, wanted, 0.0) <= ROUNDING


def _are_near(found: Outcome, wanted: Outcome, tolerance: float) -> bool:
    """Whether all gradients agree; false for NaN."""
    norm = wanted.grad_norm
    return all(error_of(found.gradients[name], g, norm) <= tolerance for name, g in wanted.gradients.items())
