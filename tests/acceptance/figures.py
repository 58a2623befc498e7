"""Figures on real models, by hand on a quiet machine: `python -m tests.acceptance.figures PART`.

packed: one packed pass against the same tokens through transformers' DynamicCache.
draw: the coupled draw's share of a pass at 8 rows x 5 tokens, one thread.
transformers: `generate` with and without `assistant_model`, prompt by prompt.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from outrider.actors.messages import Sampling
from outrider.actors.model import Model
from outrider.actors.verify import Block, coupled
from outrider.cluster.config import TargetSpec

ROWS, TOKENS, REPEATS = 8, 5, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["packed", "draw", "transformers"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"packed": packed, "draw": draw, "transformers": generate}[options.part](options)


def load(options: argparse.Namespace) -> Model:
    spec = TargetSpec(model=options.model, dtype=options.dtype, max_model_len=1024)
    return Model.load(spec, rows=ROWS, report=lambda _: None)


def least(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def packed(options: argparse.Namespace) -> None:
    """Alternate both forms; the ratio of their least times."""
    model = load(options)
    reference = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    context = torch.randint(5, 5000, (ROWS, options.context))
    block = torch.randint(5, 5000, (ROWS, TOKENS))
    rows = list(range(ROWS))
    for row in rows:
        model.forward([row], [0], [context[row].tolist()], [0])
    cache = DynamicCache()
    with torch.inference_mode():
        reference(input_ids=context, cache=cache, use_cache=True, logits_to_keep=1)

    def ours() -> None:
        model.forward(rows, [options.context] * ROWS, block.tolist(), [TOKENS] * ROWS)

    def theirs() -> None:
        with torch.inference_mode():
            reference(input_ids=block, cache=cache, use_cache=True)
        cache.crop(-TOKENS)

    times = [(least(ours), least(theirs)) for _ in range(REPEATS)]
    a, b = (min(column) for column in zip(*times, strict=True))
    print(f"packed {1e3 * a:.1f} ms, DynamicCache {1e3 * b:.1f} ms, ratio {a / b:.3f}")


def draw(options: argparse.Namespace) -> None:
    """Time a pass, and the draws of all its positions (every drafted id agrees)."""
    model = load(options)
    rows = list(range(ROWS))
    text = [[(31 * r + 7 * i) % 5000 + 10 for i in range(200)] for r in rows]
    for row in rows:
        model.forward([row], [0], [text[row]], [0])
    block = [[100 + r, 11, 12, 13, 14] for r in rows]

    def run() -> torch.Tensor:
        return model.forward(rows, [200] * ROWS, block, [TOKENS] * ROWS)

    logits = run()
    forward = min(least(run) for _ in range(REPEATS))
    for sampling in (Sampling(1.0, 0, 1.0, 5), Sampling(0.7, 0, 0.9, 5), Sampling(1.0, 50, 1.0, 5)):
        singles = [Block([], i % TOKENS, sampling) for i in range(ROWS * TOKENS)]
        seconds = min(least(lambda s=singles: coupled(logits, s)) for _ in range(REPEATS))
        print(
            f"{sampling[:3]}: pass {1e3 * forward:.0f} ms, {ROWS * TOKENS} draws "
            f"{1e3 * seconds:.1f} ms, share {seconds / forward:.3f}"
        )


def generate(options: argparse.Namespace) -> None:
    """Tokens/s of transformers, one prompt at a time."""
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    ends = model.generation_config.eos_token_id
    config = GenerationConfig(
        eos_token_id=ends, pad_token_id=0, max_new_tokens=options.max_tokens, do_sample=False
    )
    for name, kwargs in (("plain", {}), ("assistant_model", {"assistant_model": draft})):
        tokens, begin = 0, time.perf_counter()
        for line in lines:
            chat = [{"role": "user", "content": line["turns"][0]}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                **kwargs,
            )
            tokens += out.shape[1] - ids.shape[1]
        seconds = time.perf_counter() - begin
        print(f"transformers {name}: {tokens} tokens, {tokens / seconds:.2f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
