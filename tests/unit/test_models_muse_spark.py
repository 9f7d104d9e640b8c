"""Our Muse Spark class against transformers' and against float64 formulas."""

import json

import pytest
import torch
from transformers import MuseSparkTextConfig
from transformers.models.muse_spark import modeling_muse_spark as hf

from sparkrl.errors import CheckpointError
from sparkrl.models.head import token_log_probs
from sparkrl.models.muse_spark import DecoderLayer
from sparkrl.models.muse_spark_config import check_config
from sparkrl.models.registry import family_of, load_config

NUM_LAYERS = 4


def tiny_config(**changes):
    fields = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_hidden_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "output_multiplier": 0.7,
        "qk_scale_factor": 2.0,
        "mlp_layer_types": ["dense"] + ["sparse"] * (NUM_LAYERS - 1),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": 96,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = MuseSparkTextConfig(**(fields | changes))
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    return config


def randomize(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * (0.3 if "residual_gate" in name else 0.15))
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.05)


@pytest.fixture(scope="module")
def pair():
    config = tiny_config()
    reference = hf.MuseSparkTextModel(config).float().eval()
    randomize(reference)
    ours = family_of("muse_spark_text").build(config, torch.float32).eval()
    randomize(ours, seed=1)
    ours.model.language_model.load_state_dict(reference.state_dict())
    return reference, ours


def test_muse_spark_float32_equals_transformers(pair):
    reference, ours = pair
    ids = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(2))
    want = reference(input_ids=ids, use_cache=False).last_hidden_state
    got = ours.model(ids).last_hidden_state
    assert want.abs().max() > 0.1
    assert (got - want).abs().max() <= 1e-6


def test_muse_spark_right_padding_leaves_real_tokens_unchanged(pair):
    reference, ours = pair
    ids = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    got = ours.model(ids, attention_mask=mask).last_hidden_state
    assert (got[1, :17] - reference(input_ids=ids[1:, :17]).last_hidden_state[0]).abs().max() <= 1e-5


def test_muse_spark_packed_row_equals_separate_sequences(pair):
    reference, ours = pair
    ids = torch.randint(1, 97, (3, 40), generator=torch.Generator().manual_seed(4))
    lengths = [40, 1, 23]
    packed = torch.cat([ids[i, :n] for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    got = ours.model(packed, position_ids=positions).last_hidden_state[0]
    want = [reference(input_ids=ids[i : i + 1, :n]).last_hidden_state[0] for i, n in enumerate(lengths)]
    assert (got - torch.cat(want)).abs().max() <= 1e-5


def test_muse_spark_cache_generates_what_full_passes_choose(pair):
    _, ours = pair
    ids = torch.randint(1, 96, (1, 9), generator=torch.Generator().manual_seed(5))
    got = ours.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None)
    want = ids
    for _ in range(20):
        want = torch.cat([want, ours(want).logits[:, -1].argmax(-1)[:, None]], 1)
    assert torch.equal(got, want)


def test_muse_spark_bfloat16_keeps_residual_stream_and_router_in_float32():
    model = family_of("muse_spark_text").build(tiny_config(), torch.bfloat16).eval()
    randomize(model)
    seen = []
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            layer.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
            attention_input = layer.self_attn.q_proj
            attention_input.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype,)))
    logits = model(torch.arange(1, 30)[None]).logits
    residuals = [pair for pair in seen if len(pair) == 2]
    assert residuals == [(torch.float32, torch.float32)] * NUM_LAYERS
    assert [entry for entry in seen if len(entry) == 1] == [(torch.bfloat16,)] * NUM_LAYERS
    assert logits.dtype == torch.float32
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {
        name for name, _ in model.named_parameters() if "residual_gate" in name or "mlp.gate.weight" in name
    }


def test_muse_spark_bfloat16_is_closer_to_float32_than_transformers_bfloat16(pair):
    reference, ours = pair
    ids = torch.randint(1, 97, (4, 40), generator=torch.Generator().manual_seed(6))
    want = reference(input_ids=ids).last_hidden_state
    rounded = {k: v.to(torch.bfloat16).float() for k, v in reference.state_dict().items()}
    exact = hf.MuseSparkTextModel(tiny_config()).float().eval()
    exact.load_state_dict(rounded)
    want = exact(input_ids=ids).last_hidden_state
    theirs = hf.MuseSparkTextModel(tiny_config()).to(torch.bfloat16).eval()
    theirs.load_state_dict(rounded)
    ours = family_of("muse_spark_text").build(tiny_config(), torch.bfloat16).eval()
    ours.model.language_model.load_state_dict(rounded)
    mine = (ours.model(ids).last_hidden_state.float() - want).abs().mean()
    stock = (theirs(input_ids=ids).last_hidden_state.float() - want).abs().mean()
    assert mine < stock


def test_token_log_probs_and_entropy_equal_float64_and_their_gradients():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 24, generator=generator, requires_grad=True)
    weight = torch.randn(51, 24, generator=generator)
    targets = torch.randint(0, 51, (37,), generator=generator)
    pull = torch.randn(2, 37, generator=generator)
    log_probs, entropy = token_log_probs(
        hidden, weight, targets, multiplier=0.8, cap=5.0, temperature=0.7, with_entropy=True, entropy_grad=True
    )
    (got,) = torch.autograd.grad((log_probs * pull[0]).sum() + (entropy * pull[1]).sum(), hidden)
    wide = hidden.detach().double().requires_grad_()
    log_p = torch.log_softmax(5.0 * torch.tanh(wide @ weight.double().T * 0.8 / 5.0) / 0.7, -1)
    want = log_p.gather(1, targets[:, None])[:, 0]
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    (want_grad,) = torch.autograd.grad((want * pull[0]).sum() + (want_entropy * pull[1]).sum(), wide)
    assert (log_probs - want).abs().max() <= 1e-5
    assert (entropy - want_entropy).abs().max() <= 1e-5
    assert (got - want_grad).abs().max() <= 1e-5 * want_grad.abs().max()


def test_token_log_probs_chunks_do_not_change_the_result(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(20, 8, generator=generator), torch.randn(30, 8, generator=generator)
    targets = torch.randint(0, 30, (20,), generator=generator)
    settings = {"multiplier": 1.0, "cap": 10.0, "temperature": 1.0, "with_entropy": True}
    whole = token_log_probs(hidden, weight, targets, **settings)
    monkeypatch.setattr("sparkrl.models.head.CHUNK_BYTES", 4 * 30 * 7)
    parts = token_log_probs(hidden, weight, targets, **settings)
    assert (whole[0] - parts[0]).abs().max() <= 1e-6 and (whole[1] - parts[1]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_rope_theta": [1.0, 2.0, 0, 0]}, "layer_rope_theta"),
        ({"layer_rope_theta": [500.0, 500.0, 0, 0]}, "rope_theta"),
        ({"sliding_window": None}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_check_config_broken_rule_names_the_field(changes, field):
    with pytest.raises(CheckpointError, match=field):
        check_config(tiny_config(**changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["full_attention"] * 3),
        ("mlp_layer_types", ["sparse"] * 3 + ["routed"]),
        ("mlp_layer_types", ["sparse"] * 3),
        ("hidden_size", 65),
        ("num_hidden_layers", "four"),
    ],
)
def test_load_config_field_that_transformers_refuses_is_a_checkpoint_error(tmp_path, field, value):
    fields = {k: v for k, v in tiny_config().to_dict().items() if k not in ("architectures", "transformers_version")}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "muse_spark_text", field: value}))
    with pytest.raises(CheckpointError, match=field.replace("hidden_size", "hidden size")):
        load_config(tmp_path)


def test_check_config_shared_experts_are_refused():
    with pytest.raises(CheckpointError, match="num_shared_experts"):
        check_config(tiny_config(), {"num_shared_experts": 1})


def test_load_config_reads_flat_and_nested_forms_alike(tmp_path):
    fields = {k: v for k, v in tiny_config().to_dict().items() if k not in ("architectures", "transformers_version")}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "muse_spark_text"}))
    family, flat = load_config(tmp_path)
    nested = {"model_type": "muse_spark", "text_config": fields, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert load_config(tmp_path)[1].to_dict() == flat.to_dict()
    shape = family.routing(flat)
    assert (shape.num_layers, shape.top_k, shape.num_experts) == (3, 2, 8)


def test_load_config_unknown_family_lists_those_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "muse_sparc"}')
    with pytest.raises(CheckpointError, match="muse_sparc") as caught:
        load_config(tmp_path)
    assert "muse_spark_text" in str(caught.value) and "did you mean `muse_spark" in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]", "\xff"])
def test_load_config_missing_or_broken_file_is_a_checkpoint_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError):
        load_config(tmp_path)
