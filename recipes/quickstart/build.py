"""Rebuild the quickstart's checkpoint and data sets with `python recipes/quickstart/build.py`."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import problems
import sample
import tokenizer as own_tokenizer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from train import Plan, stored_config, stored_tensors, train

from sparkrl.quant.checkpoint import write_checkpoint

TOKENIZER_SAMPLE = 20_000
"""Problems, with a solution each, that the tokenizer learns its merges from."""


def tokenizer_files(plan: Plan) -> dict[str, str]:
    """The tokenizer's files, learnt from the same kind of text as the model."""
    rng = random.Random(f"tokenizer-{plan.seed}")
    texts = []
    for _ in range(TOKENIZER_SAMPLE):
        problem = problems.draw(rng)
        texts += [problem.question, problems.solution(problem, rng, careful=plan.careful, slip=plan.slip)]
    return own_tokenizer.build(texts)


def main() -> None:
    """Write train.parquet and heldout.parquet beside the checkpoint, train the model, store it, measure it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint", help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=Plan().num_steps, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console, plan = Console(), Plan(seed=args.seed, num_steps=args.steps)

    training, heldout = problems.draw_sets(plan.seed)
    for name, rows in (("train", training), ("heldout", heldout)):
        args.out.parent.mkdir(parents=True, exist_ok=True)
        problems.write_parquet(problems.rows(rows, name), args.out.parent / f"{name}.parquet")
    files = tokenizer_files(plan)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=plan.num_steps, loss=float("nan"))

        def report(step: int, loss: float) -> None:
            bar.update(task, completed=step + 1, loss=loss)
            if not console.is_terminal and (step + 1) % 25 == 0:  # a log file shows no bar
                print(f"step {step + 1} of {plan.num_steps}: loss {loss:.3f}", flush=True)

        vocabulary = Tokenizer.from_str(files["tokenizer.json"])
        model = train(plan, vocabulary, {problem.key for problem in heldout}, report=report)
    generation = {"bos_token_id": None, "eos_token_id": own_tokenizer.END_ID, "pad_token_id": own_tokenizer.PAD_ID}
    files["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    write_checkpoint(args.out, stored_tensors(model), stored_config(), files=files, overwrite=True)
    console.print(f"wrote {args.out}; measuring {len(heldout)} held-out problems")
    result = sample.measure(args.out, heldout)
    console.print("\n".join(result.samples), markup=False)
    console.print(
        f"mean@8 {result.mean_at_k:.3f}  pass@8 {result.pass_at_k:.3f}  greedy {result.greedy:.3f}  "
        f"mixed groups {result.mixed:.3f}  tokens {result.mean_tokens:.1f}  cut off {result.truncated:.3f}"
    )


if __name__ == "__main__":
    main()
