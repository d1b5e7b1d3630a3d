"""Positions that transformers' models give to tokens by themselves, heads that look at one token, compiled models."""

from __future__ import annotations

import pytest
import torch

import dtcp
from hf_models import build, make_batch
from test_hf_models import TOLERANCE, parallel_dims
from test_hf_uses import assert_same, gradients_of

pytest.importorskip("transformers")

PAD = 1  # of the RoBERTa here
LENGTHS = [9, 1, 12]


def run(model, batch, dims, **options):
    """(logits of whole rows, gradients) by dtcp."""
    import dtcp.integrations.transformers as dtcp_hf

    part = dtcp_hf.prepare(model, batch, dims, **options)
    logits = model(**part).logits
    part.loss(logits).backward()
    dtcp.reduce_gradients(model, dims)
    return dtcp.unshard(logits.detach(), dims.view("cp"), part.layout), gradients_of(model)


def run_eager(model, batch, *, targets=None, lengths=None):
    """The same by transformers, which makes the positions; with ``lengths`` document by document."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    lengths = lengths or [batch["input_ids"].size(1)]
    pieces = zip(*(x.split(lengths, dim=1) for x in inputs.values()), strict=True)
    logits = torch.cat([model(**dict(zip(inputs, piece, strict=True))).logits for piece in pieces], dim=1)
    dtcp.token_loss(logits, batch["labels"] if targets is None else targets).backward()
    return logits.detach(), gradients_of(model)


def assert_equal_outcomes(found, wanted, *, where=None):
    logits, expected = found[0], wanted[0]
    if where is not None:
        logits, expected = logits[where], expected[where]
    assert float((logits - expected).norm() / expected.norm()) < TOLERANCE
    assert_same(found[1], wanted[1])


def batch_without_positions(pad_value, is_padding):
    batch = make_batch([sum(LENGTHS)])
    del batch["position_ids"]
    batch["input_ids"] = batch["input_ids"].masked_fill(is_padding, pad_value)
    batch["labels"] = batch["labels"].masked_fill(is_padding, -100)
    return batch


def count_as_the_model(rank, world):
    import dtcp.integrations.transformers  # registers "dtcp"

    dims = parallel_dims(world)
    places = torch.arange(sum(LENGTHS)).expand(2, -1)
    packed = dtcp.Documents.from_lengths(LENGTHS)
    # RoBERTa counts from 2 and leaves out padding, be it before or after; anew in each document.
    for side in ("left", "right"):
        is_padding = torch.stack([places[0] < 0, places[1] < 5 if side == "left" else places[1] > 15])
        batch = batch_without_positions(PAD, is_padding) | {"attention_mask": (~is_padding).long()}
        wanted = run_eager(build("roberta", "eager").float(), batch)
        assert_equal_outcomes(run(build("roberta", "dtcp").float(), batch, dims), wanted, where=~is_padding)
    batch = batch_without_positions(PAD, places < 0)
    wanted = run_eager(build("roberta", "eager"), batch, lengths=LENGTHS)
    assert_equal_outcomes(run(build("roberta", "dtcp"), batch, dims, documents=packed), wanted)
    with pytest.raises(ValueError, match="counts positions from 2.*documents="):
        run(build("roberta", "dtcp"), make_batch(LENGTHS), dims)
    # OPT counts what the attention mask lets through.
    is_padding = torch.stack([places[0] < 0, places[1] < 5])
    batch = batch_without_positions(3, is_padding) | {"attention_mask": (~is_padding).long()}
    batch["labels"][1, 5] = -100  # which transformers would let padding predict
    wanted = run_eager(build("opt", "eager").float(), batch, targets=dtcp.shift_labels(batch["labels"]))
    assert_equal_outcomes(run(build("opt", "dtcp").float(), batch, dims), wanted, where=~is_padding)


def refuse_what_looks_at_one_token_or_at_places(rank, world):
    import transformers

    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "pad_token_id": 0,
    }  # fmt: skip
    tokens = {"input_ids": make_batch([22])["input_ids"]}

    def make(name, **more):
        kind = getattr(transformers, name)
        return kind._from_config(kind.config_class(**sizes | more), attn_implementation="dtcp")

    llama4 = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "floor_scale": 22}
    for model, message in (
        (make("LlamaForSequenceClassification"), "looks at the first or last token of a row"),
        (make("BertForSequenceClassification"), "looks at the first or last token of a row"),
        (make("BertModel"), "pooler of BertModel looks at the first token"),
        (make("BertForPreTraining"), "bert.pooler of BertForPreTraining looks at the first token"),
        (make("MobileBertForMaskedLM", embedding_size=16), "neighbouring tokens side by side"),
        (make("EsmForMaskedLM", token_dropout=True, mask_token_id=4), "set token_dropout=False"),
        (make("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5).train(), "set layerdrop=0.0"),
        (make("Llama4ForCausalLM", **llama4), "from 22 tokens on, got 22"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            dtcp_hf.prepare(model, tokens, dims)
    dtcp_hf.prepare(make("Llama4ForCausalLM", **llama4), {"input_ids": tokens["input_ids"][:, :20]}, dims)
    dtcp_hf.prepare(make("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5).eval(), tokens, dims)


def compile_and_compare(rank, world):
    """One compiled model over batches of other documents, lengths and layouts: none is kept in a graph."""
    import dtcp.integrations.transformers  # registers "dtcp"

    dims = parallel_dims(world)
    batches = [
        ([22], "head_tail"),
        ([9, 13], "head_tail"),
        ([22], "striped"),
        ([4, 18], "contiguous"),
        ([15, 11], "head_tail"),
    ]
    for whole in (True, False):
        model, eager = build("mistral with a window", "dtcp"), build("mistral with a window", "eager")
        if whole:
            model.compile(backend="aot_eager")
        else:
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        for lengths, layout in batches:
            batch = make_batch(lengths)
            documents = dtcp.Documents.from_lengths(lengths)
            wanted = run_eager(
                eager, batch, targets=dtcp.shift_labels(batch["labels"], batch["labels"], documents), lengths=lengths
            )
            assert_equal_outcomes(run(model, batch, dims, layout=layout), wanted)
            model.zero_grad()
            eager.zero_grad()


def test_models_that_count_positions_themselves_count_the_whole_row(ranks):
    ranks.run(2, count_as_the_model)


def test_what_looks_at_one_token_or_at_places_in_the_row_is_refused(ranks):
    ranks.run(2, refuse_what_looks_at_one_token_or_at_places)


@pytest.mark.slow
def test_compiled_models_have_the_gradients_of_one_rank_for_every_batch(ranks):
    ranks.run(2, compile_and_compare, timeout=120)
