"""transformers' models on a cut sequence: padding, recomputation, FSDP2, peft, compile; and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtcp
from hf_models import build, make_batch
from test_hf_models import parallel_dims

pytest.importorskip("transformers")


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted, tolerance=5e-5):
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        difference = float((found[name] - gradient).norm())
        assert difference < tolerance * float(gradient.norm()) + 1e-7 * float(norm), name


def eager_gradients(name, batches, masks=(None, None), dtype=torch.float64):
    """Of the mean over all tokens of several batches."""
    model = build(name, "eager").to(dtype)
    labels = [dtcp.shift_labels(batch["labels"]) for batch in batches]
    count = sum((x != -100).sum() for x in labels)
    for batch, targets, mask in zip(batches, labels, masks, strict=False):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        logits = model(**inputs, attention_mask=mask).logits
        dtcp.token_loss(logits, targets, num_valid_tokens=count).backward()
    return gradients_of(model)


def pad_and_compare(rank, world):
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    for name, side in (("llama", "right"), ("mistral with a window", "left"), ("gpt2", "right")):
        batch = make_batch([22])
        mask = torch.ones(2, 22, dtype=torch.int64)
        mask[1, slice(15, None) if side == "right" else slice(0, 7)] = 0
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
        if side == "left":
            batch["labels"][1, 7] = -100  # which transformers would let padding predict
        # In float64 transformers' own softmax, in float32, gives NaN for rows of padding.
        wanted = eager_gradients(name, [batch], (mask,), torch.float32)
        model = build(name, "dtcp").float()
        part = dtcp_hf.prepare(model, batch | {"attention_mask": mask}, dims)
        part.loss(model(**part).logits).backward()
        dtcp.reduce_gradients(model, dims)
        assert_same(gradients_of(model), wanted)


def recompute_and_accumulate(rank, world):
    """Two prepared batches of other lengths, both forward before both backward: each layer recomputes its own."""
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    batches = [make_batch([21]), make_batch([26])]
    wanted = eager_gradients("gemma2", batches)
    model = build("gemma2", "dtcp")
    model.gradient_checkpointing_enable()
    model.train()
    parts, logits = [], []
    for batch in batches:
        parts.append(dtcp_hf.prepare(model, batch, dims))
        logits.append(model(**parts[-1]).logits)
    count = sum(part.num_valid_tokens for part in parts)
    for part, out in zip(parts, logits, strict=True):
        part.loss(out, num_valid_tokens=count).backward()
    dtcp.reduce_gradients(model, dims)
    assert_same(gradients_of(model), wanted)


def shard_parameters(rank, world):
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    batch = make_batch([22])
    wanted = eager_gradients("llama", [batch])
    model = build("llama", "dtcp")
    dtcp.apply_fsdp(model, dims, blocks=model.model.layers)
    part = dtcp_hf.prepare(model, batch, dims)
    part.loss(model(**part).logits).backward()
    found = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients_of(model).items()}
    assert_same(found, wanted)


def adapt(rank, world):
    peft = pytest.importorskip("peft")
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    batch = make_batch([22])

    def adapted(attention):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(build("llama", attention), config)

    one = adapted("eager")
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    dtcp.token_loss(one(**inputs).logits, dtcp.shift_labels(batch["labels"])).backward()
    model = adapted("dtcp")
    part = dtcp_hf.prepare(model, batch, dims)
    part.loss(model(**part).logits).backward()
    dtcp.reduce_gradients(model, dims)
    assert_same(gradients_of(model), gradients_of(one))
    assert len(gradients_of(model)) == 8


def mix_models(rank, world):
    """Two models of one config, each with a batch prepared ahead; and a model without its head."""
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    one, other = build("llama", "dtcp"), build("llama", "dtcp")
    config = one.config
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = config
    batches = [make_batch([22]), make_batch([9, 13])]
    parts = [dtcp_hf.prepare(model, batch, dims) for model, batch in zip((one, other), batches, strict=True)]
    ahead = dtcp_hf.prepare(one, batches[1], dims, layout="striped")
    eager = build("llama", "eager")
    for model, part, batch in ((one, parts[0], 0), (one, ahead, 1), (other, parts[1], 1)):
        inputs = {k: v for k, v in batches[batch].items() if k != "labels"}
        # With a cache transformers does not look for documents.
        hidden = eager.model(**inputs, use_cache=False).last_hidden_state.detach()
        found = dtcp.unshard(model.model(**part).last_hidden_state.detach(), dims.view("cp"), part.layout)
        assert float((found - hidden).norm() / hidden.norm()) < 5e-5
    # Its body prepared by itself, and then the whole again.
    part = dtcp_hf.prepare(one.model, {k: v for k, v in batches[0].items() if k != "labels"}, dims)
    one.model(**part)
    one(**dtcp_hf.prepare(one, batches[0], dims))
    with pytest.raises(RuntimeError, match="did not come from"):
        one.model(input_ids=parts[0]["input_ids"].clone(), position_ids=parts[0]["position_ids"])
    wrapped = nn.parallel.DistributedDataParallel(one)
    with pytest.raises(NotImplementedError, match="DistributedDataParallel over the context parallel ranks"):
        wrapped(**dtcp_hf.prepare(one, batches[0], dims))


def misuse(rank, world):
    import dtcp.integrations.transformers as dtcp_hf

    dims = parallel_dims(world)
    batch, model = make_batch([22]), build("llama", "dtcp")
    tokens, positions = batch["input_ids"], batch["position_ids"]
    with pytest.raises(RuntimeError, match="did not come from dtcp.integrations.transformers.prepare"):
        model(input_ids=tokens)
    part = dtcp_hf.prepare(model, batch, dims)
    with pytest.raises(ValueError, match="cut already"):
        dtcp_hf.prepare(model, part, dims)
    with pytest.raises(RuntimeError, match="did not come from"):
        model(**part | {"input_ids": part["input_ids"].clone()})
    with pytest.raises(RuntimeError, match="did not come from"):
        model.generate(input_ids=tokens, max_new_tokens=2)
    with pytest.raises(ValueError, match="labels must not be given to a model with a cut sequence"):
        model(**part, labels=part.labels)
    with pytest.raises(NotImplementedError, match="use_cache=True"):
        model(**part | {"use_cache": True})
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        model(**part, output_attentions=True)
    with pytest.raises(ValueError, match="labels are shifted already"):
        dtcp_hf.prepare(model, batch | {"labels": dtcp.shift_labels(tokens)}, dims)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        dtcp_hf.prepare(build("llama", "sdpa"), batch, dims)
    with pytest.raises(ValueError, match="padding has labels"):
        dtcp_hf.prepare(model, batch | {"attention_mask": (positions < 20).long(), "labels": tokens}, dims)
    holes = torch.ones_like(tokens)
    holes[:, 5] = 0
    with pytest.raises(NotImplementedError, match="between tokens of one document"):
        dtcp_hf.prepare(model, {"input_ids": tokens, "attention_mask": holes}, dims)
    with pytest.raises(NotImplementedError, match="does not know how to cut pixel_values"):
        dtcp_hf.prepare(model, batch | {"pixel_values": torch.zeros(2, 22, 3)}, dims)
    with pytest.raises(ValueError, match="no option 'stratgy'"):
        dtcp_hf.prepare(model, batch, dims, stratgy="ring")
    with pytest.raises(ValueError, match="differ"):
        dtcp_hf.prepare(model, batch | {"input_ids": tokens + rank}, dims)
    cut = dtcp.shard(batch["position_ids"], dims.view("cp"), dtcp.make_layout("head_tail", seq_len=22, cp=world))
    with pytest.raises(ValueError, match="hold different data"):
        dtcp_hf.prepare(model, {"input_ids": tokens[:, :11], "position_ids": cut[:, :11]}, dims)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    part = dtcp_hf.prepare(model, batch, dims)
    with pytest.raises(NotImplementedError, match="drops attention weights with probability 0.1"):
        model(**part)
    refuse_models(dtcp_hf, dims)


def refuse_models(dtcp_hf, dims):
    import transformers
    from transformers import masking_utils

    from dtcp.integrations.transformers_checks import check_rotary
    from dtcp.integrations.transformers_masks import pattern_of

    base = {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    }  # fmt: skip
    batch = {"input_ids": torch.randint(3, 61, (2, 22), generator=torch.Generator().manual_seed(0))}
    # An attention of their own, which is never asked for its mask.
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    )
    lfm = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**base, layer_types=["conv", "full_attention"]))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=61, d_model=32, num_layers=1, num_heads=4, d_ff=48, decoder_start_token_id=0)
    )
    for model, message in (
        (bloom, "computes with its attention mask itself|makes an attention_mask of its own"),
        (mamba, "attends by|mixes|dtcp"), (lfm, "conv"),
        (t5, "encoder-decoder"),
    ):  # fmt: skip
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            config._attn_implementation = "dtcp"
        with pytest.raises((NotImplementedError, RuntimeError, ValueError), match=message):
            model(**dtcp_hf.prepare(model, batch, dims, shift_labels=False))
    with pytest.raises(NotImplementedError, match="does not know the mask 'or_masks'"):
        pattern_of(masking_utils.or_masks(masking_utils.causal_mask_function))
    with pytest.raises(NotImplementedError, match="'<lambda>'|'refuse_models'"):
        pattern_of(lambda b, h, q, k: q >= k)
    phi = transformers.Phi3Config(
        **base, pad_token_id=0, max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        },
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="longrope.*beyond 16 positions, got 17"):
        check_rotary(transformers.Phi3ForCausalLM(phi), 17)
    check_rotary(transformers.Phi3ForCausalLM(phi), 16)


def test_padding_recomputation_sharding_and_adapters_have_the_gradients_of_one_rank(ranks):
    for task in (pad_and_compare, recompute_and_accumulate, shard_parameters, adapt, mix_models):
        ranks.run(2, task)


def test_what_cannot_be_exact_is_refused_by_name(ranks):
    ranks.run(2, misuse)


def test_patterns_are_read_from_what_a_mask_is_made_of():
    from transformers import masking_utils as m

    from dtcp.integrations.transformers_masks import Pattern, pattern_of

    packed = m.packed_sequence_mask_function(torch.zeros(1, 4))
    assert pattern_of(m.causal_mask_function) == Pattern(is_causal=True)
    assert pattern_of(m.bidirectional_mask_function) == Pattern()
    window = m.sliding_window_causal_mask_function(5)
    assert pattern_of(window) == Pattern(is_causal=True, window_size=(4, -1))
    assert pattern_of(m.and_masks(window, packed)) == pattern_of(window)
    if remap := getattr(m, "remap_positions_for_packed_sequence", None):
        assert pattern_of(m.and_masks(remap(window, torch.zeros(1, 4)), packed)) == pattern_of(window)
    assert pattern_of(m.sliding_window_bidirectional_mask_function(3)) == Pattern(window_size=(3, 3))
    assert pattern_of(m.chunked_causal_mask_function(7, torch.zeros(2))) == Pattern(is_causal=True, chunk_size=7)
    with pytest.raises(NotImplementedError, match="left padding"):
        pattern_of(m.chunked_causal_mask_function(7, torch.ones(2)))
