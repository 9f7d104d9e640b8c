"""Measure a checkpoint: sample answers to held-out problems and score them by their last `Answer: N` line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import problems
import torch
from tokenizers import Tokenizer
from transformers import MuseSparkTextConfig
from transformers.cache_utils import DynamicCache

from sparkrl.models.muse_spark import MuseSparkForCausalLM
from sparkrl.quant.checkpoint import CheckpointReader

MAX_TOKENS = 96
"""Response budget, tokens."""
_END_ID = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What sampling k answers to each problem showed."""

    mean_at_k: float
    """Mean accuracy."""
    pass_at_k: float
    """Share of problems with a right answer among k."""
    greedy: float
    """Accuracy at temperature 0."""
    mixed: float
    """Share of problems with both right and wrong answers among k: those that GRPO learns from."""
    mean_tokens: float
    truncated: float
    """Share of responses that used up the budget."""
    samples: tuple[str, ...]
    """Some responses."""


def load(checkpoint: Path) -> MuseSparkForCausalLM:
    """The model of a checkpoint in float32, experts dequantized."""
    reader = CheckpointReader(checkpoint)
    model = MuseSparkForCausalLM(MuseSparkTextConfig(**reader.config))
    model.load_state_dict({name: reader.read(name, dtype=torch.float32) for name in reader.names})
    return model.float().eval()


def measure(checkpoint: Path, heldout: list[problems.Problem], *, k: int = 8, seed: int = 0) -> Measured:
    """Sample k answers to each problem at temperature 1, and one greedily."""
    model, tokenizer = load(checkpoint), Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    torch.manual_seed(seed)
    sampled = [answer for _ in range(k) for answer in generate(model, tokenizer, heldout, temperature=1.0)]
    right = torch.tensor([is_right(p, text) for p, (text, _) in zip(heldout * k, sampled, strict=True)]).view(k, -1)
    greedy = generate(model, tokenizer, heldout, temperature=0.0)
    lengths = torch.tensor([n for _, n in sampled], dtype=torch.float32)
    return Measured(
        mean_at_k=right.float().mean().item(),
        pass_at_k=right.any(0).float().mean().item(),
        greedy=sum(is_right(p, text) for p, (text, _) in zip(heldout, greedy, strict=True)) / len(heldout),
        mixed=(right.any(0) & ~right.all(0)).float().mean().item(),
        mean_tokens=lengths.mean().item(),
        truncated=(lengths >= MAX_TOKENS).float().mean().item(),
        samples=tuple(f"{p.question} -> {text}" for p, (text, _) in zip(heldout, sampled[:6], strict=False)),
    )


def is_right(problem: problems.Problem, text: str) -> bool:
    """The rule of verl's math_dapo for integers: what follows the last `Answer:` equals the reference."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text)
    return bool(found) and found[-1].strip() == str(problem.answer)


@torch.no_grad()
def generate(
    model: MuseSparkForCausalLM, tokenizer: Tokenizer, asked: Iterable[problems.Problem], *, temperature: float
) -> list[tuple[str, int]]:
    """Answer each problem once, in one left-padded batch.

    Returns:
        Text and number of tokens (the end token included) of each answer.
    """
    prompts = [e.ids for e in tokenizer.encode_batch([f"<|user|>{p.question}<|end|><|assistant|>" for p in asked])]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    out: list[torch.Tensor] = []
    open_rows = torch.ones(len(prompts), dtype=torch.bool)
    while open_rows.any() and len(out) < MAX_TOKENS:
        step = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        logits = step.logits[:, -1]
        ids = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature else logits.argmax(-1, True)
        out.append(ids[:, 0])
        open_rows &= ids[:, 0] != _END_ID
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
    answers = []
    for row in torch.stack(out, 1).tolist():
        length = row.index(_END_ID) + 1 if _END_ID in row else len(row)
        answers.append((tokenizer.decode(row[:length], skip_special_tokens=True), length))
    return answers
