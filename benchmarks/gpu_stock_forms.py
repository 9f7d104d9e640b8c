"""Whether stock vLLM serves what `sparkrl quantize` writes: `python -m benchmarks.gpu_stock_forms --out F`.

A random Qwen3-MoE, which stock vLLM knows, in each form; every form is served by a process without this package's
plugin, and scored by transformers in float32 over the weights that `sparkrl dequantize` reads back. Neither side
replays routes, so the BF16 form's own distance is the yardstick.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sparkrl.quant.convert import dequantize_checkpoint, quantize_checkpoint

FORMS = ("modelopt", "compressed-tensors", "compressed-tensors-mxfp4")
SEQUENCES, PROMPT, NEW, VOCAB = 32, 32, 32, 512


def build(folder: Path) -> None:
    """Write the BF16 checkpoint: 4 layers of 8 experts, wide enough for Marlin."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=1,
        pad_token_id=0,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    model = Qwen3MoeForCausalLM(config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim >= 2 else 1 + 0.2 * noise)
    model.to(torch.bfloat16).save_pretrained(folder)


def serve(folder: Path, out: Path) -> None:
    """Sample with stock vLLM in this process, and write prompts, tokens and log-probs."""
    from vllm import LLM, SamplingParams

    on_gpu: dict[str, Any] = {"attention_config": {"backend": "FLASH_ATTN"}, "gpu_memory_utilization": 0.05}
    engine = LLM(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        skip_tokenizer_init=True,
        max_model_len=PROMPT + NEW,
        max_num_seqs=SEQUENCES,
        **(on_gpu if torch.cuda.is_available() else {}),
    )
    random = torch.Generator().manual_seed(5)
    prompts = torch.randint(2, VOCAB, (SEQUENCES, PROMPT), generator=random).tolist()
    sampling = SamplingParams(
        temperature=1.0, max_tokens=NEW, min_tokens=NEW, ignore_eos=True, seed=1, logprobs=0, detokenize=False
    )
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    rows = []
    for ids, answer in zip(prompts, answers, strict=True):
        found = answer.outputs[0]
        log_probs = [chosen[token].logprob for token, chosen in zip(found.token_ids, found.logprobs, strict=True)]
        rows.append({"ids": [*ids, *found.token_ids], "log_probs": log_probs})
    out.write_text(json.dumps(rows))


@torch.no_grad()
def distance(folder: Path, rows: list[dict[str, list]]) -> dict[str, float]:
    """k3 and size of the difference between served log-probs and transformers' in float32, nats."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    ids = torch.tensor([row["ids"] for row in rows], device=device)
    log_probs = model(ids).logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(2, ids[:, PROMPT:, None])[..., 0].cpu()
    gap = log_probs - torch.tensor([row["log_probs"] for row in rows])
    return {
        "tokens": float(gap.numel()),
        "k3": float((gap.exp() - 1 - gap).mean()),
        "dlogp_mean": float(gap.abs().mean()),
        "dlogp_median": float(gap.abs().median()),
        "dlogp_max": float(gap.abs().max()),
    }


def measure(scratch: Path, forms: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Each form after the other; a form that stock vLLM does not load keeps the end of its message."""
    build(scratch / "bf16")
    result: dict[str, Any] = {}
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for form in ("bf16", *forms):
        folder, back = scratch / form, scratch / f"{form}.back"
        if form != "bf16":
            quantize_checkpoint(scratch / "bf16", folder, form=form)
            dequantize_checkpoint(folder, back)
        served = scratch / f"{form}.json"
        command = [sys.executable, "-m", "benchmarks.gpu_stock_forms", "--serve", str(folder), "--out", str(served)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if served.exists():
            result[form] = distance(back if back.exists() else folder, json.loads(served.read_text()))
        else:
            result[form] = {"failed": (done.stdout + done.stderr)[-1500:]}
        print(form, json.dumps(result[form]), flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_stock_forms", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench_gpu_stock_forms.json"), help="JSON file to write")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), help="keys of sparkrl.quant.form.FORMS")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch), tuple(arguments.forms), arguments.out)


if __name__ == "__main__":
    main()
