"""Qwen3, dense and sparse, against transformers' own models and PEFT; what depends on the family."""

import copy
import json

import numpy as np
import peft
import pytest
import torch
from test_models_muse_spark import tiny_config
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from sparkrl.config.load import load
from sparkrl.config.schema import LoraConfig
from sparkrl.errors import CheckpointError, ConfigError
from sparkrl.lora import peft_format
from sparkrl.lora.targets import add_adapter, find_groups, resolve_targets
from sparkrl.models.head import token_log_probs
from sparkrl.models.registry import family_of, load_config
from sparkrl.models.routes import validate_routes
from sparkrl.trainer.replay import RouteReplay

VOCAB = 97
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
STOCK = {"qwen3": Qwen3ForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM}
RAW = {
    "qwen3": {**FIELDS, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {**FIELDS, **SPARSE, "model_type": "qwen3_moe", "norm_topk_prob": True},
}


def pair(name, **changes):
    """transformers' model with random weights, and ours with the same."""
    family = family_of(name)
    config = family.parse_config({**RAW[name], **changes})
    plain = copy.deepcopy(config)
    plain._attn_implementation = plain._experts_implementation = "eager"
    stock = STOCK[name](plain).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stock.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            matrix = parameter.ndim > 1
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if matrix else 1 + 0.2 * noise)
    ours = family.build(config, torch.float32).eval()
    ours.load_state_dict(stock.state_dict())
    return family, stock, ours


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_qwen3_packed_row_equals_transformers_on_each_sequence(name, changes):
    _, stock, ours = pair(name, **(changes if name == "qwen3_moe" else {}))
    lengths = [30, 1, 17]
    ids = torch.randint(1, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        got = ours(ids, position_ids=positions).logits[0]
        want = torch.cat([stock(part[None]).logits[0] for part in ids[0].split(lengths)])
    assert want.abs().max() > 1
    assert (got - want).abs().max() <= 1e-5


def test_qwen3_padded_rows_and_cache_equal_transformers():
    _, stock, ours = pair("qwen3_moe")
    ids = torch.randint(1, VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    with torch.no_grad():
        got = ours(ids, attention_mask=mask).logits
        assert (got[1, :12] - stock(ids[1:, :12]).logits[0]).abs().max() <= 1e-5
    settings = {"attention_mask": mask[:1], "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(ids[:1], **settings), stock.generate(ids[:1], **settings))


def test_qwen3_bfloat16_rounds_the_residual_stream_once_a_sum_and_norms_it_before():
    ours = pair("qwen3")[2].bfloat16()
    layer = ours.model.layers[0]
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(3))
    cos_sin = ours.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad():
        a = layer.self_attn(layer.input_layernorm(x), position_embeddings=cos_sin, attention_mask=None)
        total = x.bfloat16().float() + a.float()
        normed = total * torch.rsqrt((total**2).mean(-1, keepdim=True) + 1e-6)
        f = layer.mlp(layer.post_attention_layernorm.weight * normed.bfloat16())
        want = total.bfloat16().float() + f.float()
        got = layer(x, position_embeddings=cos_sin, attention_mask=None)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_qwen3_adapter_in_stock_peft_gives_the_same_logits_and_gradients(name, tmp_path):
    family, stock, ours = pair(name)
    lora = LoraConfig(rank=4, alpha=8, targets=["all_linear"])
    targets = resolve_targets(lora.targets, family, ours)
    ours = add_adapter(ours, lora, targets, family)
    trained = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(4)
    for value in trained.values():
        value.data.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    config = peft_format.adapter_config(lora, targets, family, base_model="tiny")
    tensors = peft_format.to_peft({n: p.detach() for n, p in trained.items()})
    peft_format.save_adapter(tmp_path, tensors, config)
    ids = torch.randint(1, VOCAB, (1, 25), generator=torch.Generator().manual_seed(5))
    pull = torch.randn(1, 25, VOCAB, generator=torch.Generator().manual_seed(6))
    before = stock(ids).logits
    theirs = peft.PeftModel.from_pretrained(stock, tmp_path, is_trainable=True)
    mine, merged = ours(ids).logits, theirs(ids).logits
    assert (merged - before).abs().max() > 0.1
    assert (mine - merged).abs().max() <= 2e-5
    (mine * pull).sum().backward()
    (merged * pull).sum().backward()
    got = peft_format.to_peft({n: p.grad for n, p in trained.items()})
    want = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert set(got) == set(want)
    for n, value in want.items():
        assert (got[n] - value).abs().max() <= 2e-5 * max(1.0, float(value.abs().max())), n


def test_qwen3_moe_replay_replaces_the_choice_and_keeps_live_weights():
    family, stock, ours = pair("qwen3_moe")
    ids = torch.randint(1, VOCAB, (1, 9), generator=torch.Generator().manual_seed(7))
    replay = RouteReplay(ours, family.router_class)
    assert replay.num_layers == 2
    router = ours.model.layers[2].mlp.gate
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(8))
    routes = torch.rand(9, 2, 6, generator=torch.Generator().manual_seed(9)).argsort(-1)[..., :2].to(torch.uint8)
    replay.load(routes, pin=True)
    _, weights, chosen = router(x)
    assert torch.equal(chosen, routes[:, 1].long())
    probs = torch.softmax(x.double() @ router.weight.double().T, -1)
    picked = torch.stack([probs[t, routes[t, 1].long()] for t in range(9)])
    assert (weights - picked / picked.sum(-1, keepdim=True)).abs().max() <= 1e-6
    replay.load(None, pin=False)
    with torch.no_grad():
        assert (ours(ids).logits - stock(ids).logits).abs().max() <= 1e-5


def test_dense_model_has_no_routes_and_replay_does_nothing():
    family, _, ours = pair("qwen3")
    shape = family.routing(ours.config)
    assert (shape.num_layers, shape.top_k, shape.num_experts) == (0, 0, 0)
    empty = np.zeros((12, 0, 0), dtype=np.uint8)
    validate_routes(empty, num_prompt=8, num_response=5, num_layers=0, top_k=0, num_experts=0, uid="r")
    replay = RouteReplay(ours, family.router_class)
    replay.load(torch.from_numpy(empty), pin=True)
    ids = torch.arange(1, 13)[None]
    assert ours(ids).logits.isfinite().all()
    assert replay.take_agreement() == (0, 0)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_head_with_or_without_soft_cap_equals_autograd_over_all_logits(cap):
    generator = torch.Generator().manual_seed(10)
    hidden = torch.randn(11, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, 16, generator=generator, dtype=torch.float64)
    targets, pull = torch.randint(VOCAB, (11,), generator=generator), torch.randn(11, generator=generator)
    mine, theirs = (hidden.float().requires_grad_(), hidden.clone().requires_grad_())
    got, entropy = token_log_probs(
        mine,
        weight.float(),
        targets,
        multiplier=0.7,
        cap=cap,
        temperature=0.8,
        with_entropy=True,
        entropy_grad=True,
    )
    scores = theirs @ weight.T * 0.7
    log_p = torch.log_softmax((scores if cap is None else cap * torch.tanh(scores / cap)) / 0.8, -1)
    want = log_p.gather(1, targets[:, None])[:, 0]
    want_entropy = -(log_p.exp() * log_p).sum(-1)
    assert (got - want).abs().max() <= 1e-5
    assert (entropy - want_entropy).abs().max() <= 1e-5
    ((got + 0.5 * entropy) * pull).sum().backward()
    ((want + 0.5 * want_entropy) * pull).sum().backward()
    assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * float(theirs.grad.abs().max())


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("qwen3", {"attention": 12, "mlp": 9}),
        ("qwen3_moe", {"attention": 12, "experts": 2}),
    ],
)
def test_all_linear_covers_every_group_of_the_family(name, groups):
    family, _, ours = pair(name)
    assert {group: len(names) for group, names in find_groups(family, ours).items()} == groups
    chosen = resolve_targets(["all_linear"], family, ours)
    assert len(chosen.linear_names) + len(chosen.expert_names) == sum(groups.values())
    assert chosen.experts == ("experts" in groups)


PRESETS = {
    "reference": {"muse_spark": {"attention", "latent", "experts"}},
    "attention_only": {name: {"attention"} for name in ("muse_spark", "qwen3", "qwen3_moe")},
    "experts_only": {name: {"experts"} for name in ("muse_spark", "qwen3_moe")},
    "all_linear": {
        "muse_spark": {"attention", "latent", "experts", "mlp"},
        "qwen3": {"attention", "mlp"},
        "qwen3_moe": {"attention", "experts"},
    },
}


@pytest.mark.parametrize("name", ["muse_spark", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("preset", PRESETS)
def test_lora_preset_covers_its_groups_or_is_refused(preset, name):
    if name == "muse_spark":
        family = family_of("muse_spark_text")
        with torch.device("meta"):
            model = family.build(tiny_config(), torch.float32)  # its first layer is dense
    else:
        family, _, model = pair(name)
    targets = load(["recipe=quickstart", f"lora={preset}"]).lora.targets
    groups = PRESETS[preset].get(name)
    if groups is None:
        with pytest.raises(ConfigError, match="has no module of the group"):
            resolve_targets(targets, family, model)
        return
    chosen = resolve_targets(targets, family, model)
    names = find_groups(family, model)
    assert {*chosen.linear_names, *chosen.expert_names} == {n for group in groups for n in names[group]}


def test_group_of_another_family_lists_the_groups_that_exist():
    family, _, ours = pair("qwen3")
    with pytest.raises(ConfigError, match="qwen3 model has no module of the group `latent`") as raised:
        resolve_targets(["attention", "latent", "experts"], family, ours)
    assert "groups: attention, mlp, all_linear" in raised.value.hint and "lora=all_linear" in raised.value.hint
    moe, _, sparse = pair("qwen3_moe")
    with pytest.raises(ConfigError, match=r"`up_proj` names a Linear .* cannot carry an adapter"):
        resolve_targets(["up_proj"], moe, sparse)  # PEFT would take it for an expert's
    with pytest.raises(ConfigError, match=r"near names: .*attention"):
        resolve_targets(["atention"], family, ours)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3", "use_sliding_window", True),
        ("qwen3", "attention_bias", True),
        ("qwen3", "hidden_act", "gelu"),
        ("qwen3", "num_key_value_heads", 3),
        ("qwen3_moe", "num_experts_per_tok", 7),
        ("qwen3_moe", "mlp_only_layers", [0, 1, 2]),
        ("qwen3_moe", "rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "head_dim", None),
        ("qwen3_moe", "head_dim", ...),  # left out
        ("qwen3_moe", "intermediate_size", -1),
        ("qwen3", "head_dim", 0),
        ("qwen3", "num_key_value_heads", -1),
        ("muse_spark", "vocab_size", 0),
        ("muse_spark", "num_key_value_heads", 0),
    ],
)
def test_config_that_breaks_a_rule_is_refused_with_its_field(name, field, value, tmp_path):
    raw = {**RAW.get(name, {"model_type": name}), field: value}
    (tmp_path / "config.json").write_text(json.dumps({key: item for key, item in raw.items() if item is not ...}))
    reported = {"mlp_only_layers": "decoder_sparse_step", "rope_parameters": "rope_parameters.rope_type"}
    with pytest.raises(CheckpointError, match=f"`{reported.get(field, field)}` of a {name} model"):
        load_config(tmp_path)
