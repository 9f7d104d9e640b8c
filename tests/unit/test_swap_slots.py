"""An adapter in parts, put into vLLM's own LoRA layers, against the layers' own `set_lora` of the whole tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.model_executor.models.utils import WeightsMapper

from sparkrl.errors import AdapterError
from sparkrl.lora.peft_format import from_peft, pack
from sparkrl.lora.plan import shard_rows
from sparkrl.lora.shared_memory import Outbox
from sparkrl.lora.wire import PartWriter
from sparkrl.rollout.plugin.cuda.swap import SharedIntake
from sparkrl.rollout.plugin.loading import AdapterLoader, HostIntake
from sparkrl.types import AdapterPart

E, R, RMAX, H, INNER, Q, KV, SLOTS = 8, 3, 4, 12, 8, 16, 8, 2  # KV: two heads of 4
SCALE = 5 / 3
AT = "base_model.model.model.layers.0"
INTAKES = {
    "host": HostIntake,
    "device": lambda: SharedIntake(torch.device("cpu")),
    "device in pieces": lambda: SharedIntake(torch.device("cpu"), piece_bytes=1000),
}
CONFIG = {"r": R, "lora_alpha": 5, "target_modules": [], "peft_type": "LORA"}


def layer(kind, rank, ranks, *, width_in, outs, **fields):
    """One of vLLM's LoRA layers as it is after its construction, without a base layer around which to build it."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.tp_rank, made.tp_size, made.n_slices = rank, ranks, len(outs)
    made.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, RMAX, width_in) for _ in outs)
    made.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, out, RMAX) for out in outs)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def experts(kind, rank, ranks, *, by_expert):
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    local, inner = (E // ranks, INNER) if by_expert else (E, INNER // ranks)
    made.tp_rank, made.tp_size = (0, 1) if by_expert else (rank, ranks)
    parallel = SimpleNamespace(use_ep=by_expert, ep_rank=rank if by_expert else 0)
    made.moe_config = SimpleNamespace(
        num_experts=E, num_local_experts=local, intermediate_size_per_partition=inner, moe_parallel_config=parallel
    )
    made.fully_sharded, made.enable_moe_shared_loras, made._base_model = False, False, "MuseSpark1xForCausalLM"
    fused = kind is FusedMoE3DWithLoRA
    made._w13_slices = 1 if fused else 2
    made.adapter_enabled = torch.zeros(SLOTS + 1, dtype=torch.int)
    made.w13_lora_a_stacked = tuple(torch.zeros(SLOTS, local, RMAX, H) for _ in range(made._w13_slices))
    width = 2 * inner if fused else inner
    made.w13_lora_b_stacked = tuple(torch.zeros(SLOTS, local, width, RMAX) for _ in range(made._w13_slices))
    made.w2_lora_a_stacked = (torch.zeros(SLOTS, local, RMAX, inner),)
    made.w2_lora_b_stacked = (torch.zeros(SLOTS, local, H, RMAX),)
    return made


def modules(rank, ranks, *, by_expert=False, fused=True):
    """A layer's modules on one of `ranks` workers; two workers share a key-value head when there are four."""
    kv_ranks = min(ranks, 2)
    qkv = {"output_slices": (Q // ranks, KV // kv_ranks, KV // kv_ranks)}
    qkv["output_ids"] = (rank, rank * kv_ranks // ranks, rank * kv_ranks // ranks)
    half = INNER // ranks
    made = {
        "self_attn.qkv_proj": layer(
            MergedQKVParallelLinearWithLoRA, rank, ranks, width_in=H, outs=qkv["output_slices"], **qkv
        ),
        "self_attn.gate_proj": layer(
            ColumnParallelLinearWithLoRA,
            rank,
            ranks,
            width_in=H,
            outs=[Q // ranks],
            is_merged_col_linear=False,
            output_size=Q // ranks,
        ),
        "self_attn.o_proj": layer(
            RowParallelLinearWithLoRA, rank, ranks, width_in=Q // ranks, outs=[H], input_size=Q // ranks
        ),
        "mlp.gate_up_proj": layer(
            MergedColumnParallelLinearWithLoRA,
            rank,
            ranks,
            width_in=H,
            outs=[half, half],
            output_slices=(half, half),
            output_ids=(rank, rank),
        ),
        "mlp.pre_expert_proj": layer(ReplicatedLinearWithLoRA, 0, 1, width_in=H, outs=[H]),
        "mlp.experts": experts(FusedMoE3DWithLoRA if fused else FusedMoEWithLoRA, rank, ranks, by_expert=by_expert),
    }
    return {f"model.layers.0.{name}": module for name, module in made.items()}


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def manager(held):
    made = SimpleNamespace(
        model=SimpleNamespace(),
        modules=held,
        packed_modules_mapping=PACKED,
        lora_config=SimpleNamespace(max_lora_rank=RMAX),
        lora_index_to_id=[None] * SLOTS,
        _registered_adapters={},
        _active_adapters={},
    )

    def remove_adapter(lora_id):
        made._registered_adapters.pop(lora_id)
        made._active_adapters.pop(lora_id)
        made.lora_index_to_id[made.lora_index_to_id.index(lora_id)] = None

    made.remove_adapter = remove_adapter
    return made


def loader_of(target, **settings):
    return AdapterLoader(target, **{"worker": 0, "num_workers": 1, "intake": HostIntake(), **settings})


def factors(seed=0, *, without=()):
    """An adapter in PEFT's form, B not scaled."""
    random = torch.Generator().manual_seed(seed)
    widths = {"self_attn.q_proj": (H, Q), "self_attn.k_proj": (H, KV), "self_attn.v_proj": (H, KV)}
    widths |= {"self_attn.gate_proj": (H, Q), "self_attn.o_proj": (Q, H), "mlp.pre_expert_proj": (H, H)}
    widths |= {"mlp.gate_proj": (H, INNER), "mlp.up_proj": (H, INNER)}
    out = {}
    for name, (width, rows) in widths.items():
        out[f"{AT}.{name}.lora_A.weight"] = torch.randn(R, width, generator=random)
        out[f"{AT}.{name}.lora_B.weight"] = torch.randn(rows, R, generator=random)
    for name, width, rows in (("mlp.experts.base_layer", H, 2 * INNER), ("mlp.experts", INNER, H)):
        out[f"{AT}.{name}.lora_A.weight"] = torch.randn(E * R, width, generator=random)
        out[f"{AT}.{name}.lora_B.weight"] = torch.randn(rows, R * E, generator=random)
    return {name: value for name, value in out.items() if not any(part in name for part in without)}


def as_parts(tensors, num_ranks, dtype="float32"):
    """Parts as `num_ranks` trainer ranks write them, and the memory that must be kept."""
    trained = from_peft(tensors, rank=R)
    parts, boxes = [], []
    for rank in range(num_ranks):
        rows = {}
        for name, value in trained.items():
            start, end = shard_rows(len(value), rank, num_ranks)
            rows[name] = (value[start:end], start, len(value))
        writer, box = PartWriter(rows, CONFIG, dtype), Outbox("test")
        parts.append(writer.write(box.room(writer.num_bytes), memory=box.handle()))
        boxes.append(box)
    return parts, boxes


def whole_part(tensors):
    """One part with PEFT's own layout, as an adapter from disk is sent."""
    packed, box = pack(tensors, CONFIG, 0), Outbox("test")
    np.copyto(box.room(packed.buffer.nbytes), packed.buffer)
    size, sums = packed.buffer.nbytes, (int(packed.checksum, 16),)
    part = AdapterPart(manifest=packed.manifest, num_bytes=size, block_bytes=size, checksums=sums, memory=box.handle())
    return [part], [box]


def by_vllm(held, tensors, slot):
    """vLLM's own `set_lora`, handed what its manager hands it."""
    for name, module in held.items():
        parent, _, last = name.rpartition(".")
        at = f"base_model.model.{name}"
        if last == "experts":
            a = [tensors[f"{at}{part}.lora_A.weight"].unflatten(0, (E, R)) for part in (".base_layer", "")]
            b = [
                (tensors[f"{at}{part}.lora_B.weight"] * SCALE).unflatten(1, (R, E)).permute(2, 0, 1)
                for part in (".base_layer", "")
            ]
            first = module.ep_rank * module.local_num_experts if module.use_ep else 0
            a, b = ([t[first : first + module.local_num_experts] for t in pair] for pair in (a, b))
            if not isinstance(module, FusedMoE3DWithLoRA):  # w1, w2, w3
                gate, up = b[0].chunk(2, dim=1)
                a, b = [a[0], a[1], a[0]], [gate, b[1], up]
            module.set_lora(slot, a, b)
            continue
        parts = [f"base_model.model.{parent}.{part}" for part in PACKED.get(last, [last])]
        a = [tensors.get(f"{part}.lora_A.weight") for part in parts]
        b = [tensors.get(f"{part}.lora_B.weight") for part in parts]
        b = [None if value is None else value * SCALE for value in b]
        module.set_lora(slot, *((a, b) if len(parts) > 1 else (a[0], b[0])))


def buffers(held):
    stacked = ("lora_a_stacked", "lora_b_stacked", *(f"w{n}_lora_{f}_stacked" for n in (13, 2) for f in "ab"))
    return {
        f"{name}.{field}.{i}": value
        for name, module in held.items()
        for field in stacked
        for i, value in enumerate(getattr(module, field, ()))
    }


def assert_same(held, expected):
    found, wanted = buffers(held), buffers(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert value.any(), name


@pytest.mark.parametrize("fused", [True, False], ids=["3d", "2d"])
@pytest.mark.parametrize("intake", INTAKES.values(), ids=INTAKES)
@pytest.mark.parametrize(("ranks", "by_expert"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_load_fills_every_workers_buffers_as_vllm_does(ranks, by_expert, intake, fused):
    tensors, older = factors(1), factors(2)
    for send in (lambda t: as_parts(t, 1), lambda t: as_parts(t, 3), whole_part):
        for worker in range(ranks):
            held, expected = (modules(worker, ranks, by_expert=by_expert, fused=fused) for _ in range(2))
            target = manager(held)
            loader = loader_of(target, intake=intake(), worker=worker, num_workers=ranks)
            for number, sent in ((1, older), (2, tensors)):  # the second one finds its copies planned
                parts, boxes = send(sent)
                loader.load(1, number, parts, CONFIG, scaled=send is not whole_part)
                assert boxes
            by_vllm(expected, tensors, 1)
            assert_same(held, expected)
            assert target.lora_index_to_id == [None, 2] and list(target._registered_adapters) == [2]
            assert held["model.layers.0.mlp.experts"].adapter_enabled.tolist() == [0, 1, 0]


def test_load_of_bfloat16_has_the_bits_of_rounding_in_the_server():
    tensors = factors(1)
    held, expected = modules(0, 1), modules(0, 1)
    parts, boxes = as_parts(tensors, 2, dtype="bfloat16")
    loader_of(manager(held)).load(0, 1, parts, CONFIG, scaled=True)
    by_vllm(expected, tensors, 0)
    for name, value in buffers(expected).items():
        assert torch.equal(buffers(held)[name], value.bfloat16().float()), name
    assert boxes


def test_load_of_a_smaller_adapter_leaves_nothing_of_the_larger_one():
    held, expected = modules(0, 1), modules(0, 1)
    loader = loader_of(manager(held))
    first, boxes = as_parts(factors(1), 1)
    loader.load(0, 1, first, CONFIG, scaled=True)
    rest = factors(2, without=("o_proj", "k_proj"))
    second, more = as_parts(rest, 1)
    loader.load(0, 2, second, CONFIG, scaled=True)
    by_vllm({name: module for name, module in expected.items() if "o_proj" not in name}, rest, 0)
    for name, value in buffers(expected).items():
        assert torch.equal(buffers(held)[name], value), name
    assert not held["model.layers.0.self_attn.o_proj"].lora_a_stacked[0].any()
    assert boxes and more


def test_up_half_and_down_follow_the_scale_that_marlin_folds_away():
    tensors, ratio_E = factors(1), torch.linspace(0.5, 2, E)
    trained = from_peft(tensors, rank=R)
    for by_expert, worker, ranks in ((False, 0, 1), (True, 1, 2), (False, 1, 2)):
        held = modules(worker, ranks, by_expert=by_expert)
        parts, boxes = as_parts(tensors, 3)
        local = slice(worker * E // ranks, (worker + 1) * E // ranks) if by_expert else slice(None)
        loader = loader_of(manager(held), ratio_of=lambda _, local=local: ratio_E[local])
        loader.load(0, 1, parts, CONFIG, scaled=True)
        module, at = held["model.layers.0.mlp.experts"], f"{AT}.mlp.experts.lora_"
        inner = (
            slice(0, INNER)
            if by_expert or ranks == 1
            else slice(worker * INNER // ranks, (worker + 1) * INNER // ranks)
        )
        ratio_E11 = ratio_E[:, None, None]
        gate, up = (trained[f"{at}gate_up_B.default"] * SCALE).chunk(2, dim=1)
        want = torch.cat([gate[:, inner], (up / ratio_E11)[:, inner]], dim=1)[local]
        assert torch.equal(module.w13_lora_b_stacked[0][0, :, :, :R], want)
        want = (trained[f"{at}down_A.default"] * ratio_E11)[local, :, inner]
        assert torch.equal(module.w2_lora_a_stacked[0][0, :, :R], want)
        assert boxes


class Shuffled(MergedQKVParallelLinearWithLoRA):
    """Wants the rows of query and key in another order, as the fused projection on CUDA does."""

    def reorder_rows(self, part, rows):
        return rows.unflatten(0, (-1, 2, 2)).transpose(1, 2).reshape(rows.shape) if part < 2 else rows


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_in_another_order_come_from_whichever_part_has_them(ranks, num_ranks):
    tensors = factors(1)
    for worker in range(ranks):
        held = modules(worker, ranks)
        name = "model.layers.0.self_attn.qkv_proj"
        held[name].__class__ = Shuffled
        parts, boxes = as_parts(tensors, num_ranks)
        loader_of(manager(held)).load(0, 1, parts, CONFIG, scaled=True)
        for i, (part, rows) in enumerate((("q", Q), ("k", KV), ("v", KV))):
            whole = tensors[f"{AT}.self_attn.{part}_proj.lora_B.weight"] * SCALE
            order = [h * 4 + c for h in range(rows // 4) for c in ((0, 2, 1, 3) if i < 2 else range(4))]
            mine = order[worker * rows // ranks : (worker + 1) * rows // ranks]
            assert torch.equal(held[name].lora_b_stacked[i][0, 0, :, :R], whole[mine])
        assert boxes


def refused(match, parts, *, config=CONFIG, **place):
    held = modules(0, 1)
    target = manager(held)
    loader = loader_of(target, **place)
    first, boxes = as_parts(factors(5), 1)
    loader.load(0, 1, first, CONFIG, scaled=True)
    with pytest.raises(AdapterError, match=match):
        loader.load(0, 2, parts, config, scaled=True)
    assert boxes
    return target


def test_damaged_byte_in_any_workers_share_is_found_and_nothing_answers():
    parts, boxes = as_parts(factors(1), 2)
    boxes[1].room(parts[1].num_bytes)[70] ^= 1
    target = refused("wrong checksum of block 0 in part 1", parts)
    assert target.lora_index_to_id == [None, None] and not target._active_adapters
    # of two workers each verifies one of the two blocks
    refused("wrong checksum", parts, worker=1, num_workers=2)
    held = modules(0, 1)
    loader_of(manager(held), num_workers=2).load(0, 1, parts, CONFIG, scaled=True)


def test_version_that_a_newer_one_was_written_over_is_refused():
    trained, box = from_peft(factors(1), rank=R), Outbox("test")
    writer = PartWriter({name: (value, 0, len(value)) for name, value in trained.items()}, CONFIG, "float32")
    memory = box.room(writer.num_bytes)
    older = writer.write(memory, memory=box.handle())
    next(iter(trained.values())).add_(1)
    newer = writer.write(memory, memory=box.handle())
    refused("wrong checksum of block 0 in part 0", [older])
    held = modules(0, 1)
    loader_of(manager(held)).load(0, 1, [newer], CONFIG, scaled=True)


def test_adapter_of_another_model_is_refused_by_what_does_not_fit():
    renamed = {name.replace("o_proj", "p_proj"): value for name, value in factors(1).items()}
    kept = refused(
        r"1 of the adapter's 10 modules do not exist .* `model.layers.0.self_attn.p_proj`", as_parts(renamed, 1)[0]
    )
    assert kept.lora_index_to_id == [1, None]  # found before anything was touched
    wide = factors(1) | {f"{AT}.self_attn.o_proj.lora_A.weight": torch.zeros(R, 2 * Q)}
    refused(r"o_proj.lora_A.weight` has shape \(3, 32\), which does not fit", as_parts(wide, 2)[0])
    for experts, shape in ((E // 2, r"\(4, 3, 12\)"), (2 * E, r"\(16, 3, 12\)")):
        changed = factors(1)
        for part in ("", ".base_layer"):
            a, b = (f"{AT}.mlp.experts{part}.lora_{factor}.weight" for factor in "AB")
            changed[a] = changed[a].repeat(2, 1)[: experts * R]
            changed[b] = changed[b].unflatten(1, (R, E)).repeat(1, 1, 2)[..., :experts].flatten(1)
        refused(rf"experts.base_layer.lora_A.weight` has shape {shape}, which does not fit", as_parts(changed, 2)[0])
    broad = factors(1)
    broad[f"{AT}.mlp.experts.lora_A.weight"] = broad[f"{AT}.mlp.experts.lora_A.weight"].repeat(1, 2)
    b = broad[f"{AT}.mlp.experts.base_layer.lora_B.weight"]
    broad[f"{AT}.mlp.experts.base_layer.lora_B.weight"] = b.repeat(2, 1)
    refused(r"experts.lora_A.weight` has shape \(8, 3, 16\), which does not fit", as_parts(broad, 2)[0])
    refused(
        "only one of the two factors of `model.layers.0.self_attn.o_proj`",
        as_parts(factors(1, without=["o_proj.lora_B"]), 1)[0],
    )
    refused("needs factors for both gate_up_proj and down_proj", as_parts(factors(1, without=["base_layer"]), 1)[0])


def test_adapter_that_vllm_lets_go_of_is_not_replaced_by_the_base_model():
    target = manager(modules(0, 1))
    parts, boxes = as_parts(factors(1), 1)
    loader_of(target).load(0, 5, parts, CONFIG, scaled=True)
    with pytest.raises(AdapterError, match="let go of adapter 5"):
        target._registered_adapters[5].get_lora("model.layers.0.mlp.experts")
    assert boxes


def test_names_are_mapped_as_vllm_maps_the_checkpoints():
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "model."},
        # stacking must be left alone: it would fold the projections into one name
        orig_to_new_stacked={".q_proj.": (".qkv_proj.", "q"), ".k_proj.": (".qkv_proj.", "k")},
    )
    tensors = factors(1)
    held, expected = modules(0, 1), modules(0, 1)
    target = manager(held)
    target.model.hf_to_vllm_mapper = mapper
    renamed = {name.replace(".layers.", ".language_model.layers."): value for name, value in tensors.items()}
    parts, boxes = as_parts(renamed, 1)
    loader_of(target).load(0, 1, parts, CONFIG, scaled=True)
    by_vllm(expected, tensors, 0)
    assert_same(held, expected)
    assert boxes


def test_part_that_is_missing_is_named_by_its_rows():
    refused(r"the parts of the adapter hold rows \[\(0, 1\), \(2, 3\)\] of the 3", as_parts(factors(1), 3)[0][::2])


def test_rank_above_the_servers_is_refused_by_vllm():
    loader = loader_of(manager(modules(0, 1)))
    with pytest.raises(ValueError, match="LoRA rank 5 is greater than max_lora_rank 4"):
        loader.load(0, 1, as_parts(factors(1), 1)[0], CONFIG | {"r": 5}, scaled=True)
