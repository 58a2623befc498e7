"""Drafts of another vocabulary on real models: `python -m tests.acceptance.vocabularies`.

Ids with the draft must equal those of plain decoding, greedy and coupled, by every method; in
float64 without exception, else each first divergence is fed to the float64 model. Prints tokens
per pass for each method and kind of prompt; exits with 1 if any id differs in float64.
"""

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.actors.drafter import Drafter
from outrider.actors.messages import Sampling
from outrider.actors.method_choice import MethodChoice
from outrider.actors.model import Model
from outrider.actors.pairing import pair_up
from outrider.actors.philox import Tag, uniform, words
from outrider.cluster.config import DraftModelSpec, TargetSpec
from tests.engine import Engine, EngineDraft, Job

ROWS = 8
TOKENS = 48
LENGTH = 4
KINDS = {
    "coding": ("coding",),
    "chat": ("writing", "roleplay", "reasoning", "stem", "humanities", "qa"),
    "translation": ("translation",),
    "summarising": ("summarization",),
}
LONGEST = 1400  # characters of a prompt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of a draft of another vocabulary")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL with `turns`")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--temperatures", default="0,0.7,1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load(TargetSpec, options.target, options.dtype)
    draft = load(DraftModelSpec, options.draft, options.dtype, method="draft_model")
    pair, examined = pair_up(target.describe(), draft.describe(), "auto")
    print(f"draft: {examined}", flush=True)
    drafter = Drafter(draft, ROWS, 64, pair=pair)
    prompts = list(load_prompts(target, options.prompts, options.num_prompts))
    failures = 0
    for temperature in map(float, options.temperatures.split(",")):
        jobs = [
            Job(ids, TOKENS, Sampling(temperature, seed=1000 + i), frozenset(target.end_ids))
            for i, (_, ids) in enumerate(prompts)
        ]
        begin = time.time()
        expected = Engine(target).run(jobs, ROWS)
        print(f"temperature {temperature:g}: plain ({time.time() - begin:.0f} s)", flush=True)
        for name in ("string", "token", "auto"):
            choice = MethodChoice(examined.methods) if name == "auto" else None
            method = "string" if name == "auto" else name
            source = EngineDraft(name, LENGTH, drafter, method=method, choice=choice)
            engine = Engine(target, [source])
            begin = time.time()
            ids = engine.run(jobs, ROWS)
            wrong = [i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b]
            failures += len(wrong)
            report(name, engine, [kind for kind, _ in prompts], wrong, begin)
            for i in wrong:
                explain(target, jobs[i], expected[i], ids[i])
    return 1 if failures and options.dtype == "float64" else 0


def load(spec: type, model: str, dtype: str, **fields: Any) -> Model:
    settings = spec(model=model, dtype=dtype, max_model_len=768, **fields)
    return Model.load(settings, rows=ROWS, report=lambda _: None)


def load_prompts(target: Model, path: Path, number: int) -> Iterator[tuple[str, list[int]]]:
    """The first short prompts of every kind in turn, as chats."""
    texts: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        item = json.loads(line)
        for kind, categories in KINDS.items():
            if item["category"] in categories and len(item["turns"][0]) <= LONGEST:
                texts[kind].append(item["turns"][0])
    ranked = [
        (kind, of[rank]) for rank in range(number) for kind, of in texts.items() if rank < len(of)
    ]
    for kind, text in ranked[:number]:
        chat = [{"role": "user", "content": text}]
        prompt = target.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        yield kind, target.tokenizer.encode(prompt, add_special_tokens=False)


def interleave(texts: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    for rank in itertools.count():
        for kind, of in texts.items():
            if rank < len(of):
                yield kind, of[rank]


def report(name: str, engine: Engine, kinds: list[str], wrong: list[int], begin: float) -> None:
    passes: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    for kind, sequence in zip(kinds, engine.sequences, strict=True):
        passes[kind] += sequence.num_passes
        tokens[kind] += sequence.position
    by_kind = " ".join(f"{kind} {tokens[kind] / passes[kind]:.2f}" for kind in passes)
    (stats,) = engine.stats.drafts.values()
    methods = {
        method: f"{of.num_accepted_tokens}/{of.num_draft_tokens} in {of.seconds:.0f} s"
        for method, of in stats.methods.items()
    }
    print(
        f"  {name:>6} differing={len(wrong)} tokens/pass "
        f"{sum(tokens.values()) / sum(passes.values()):.2f} ({by_kind}) "
        f"accepted {methods} ({time.time() - begin:.0f} s)",
        flush=True,
    )


def explain(target: Model, job: Job, expected: list[int], ids: list[int]) -> None:
    """The score gap of the first divergence in one plain pass of the same model.

    In bfloat16 a gap up to 4 units in the last place of the logits, over the temperature, is
    numerics.
    """
    at = next(k for k, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b)
    text = [*job.prompt, *expected[:at]]
    logits = target.forward([0], [0], [text], [1])[0].double().numpy()
    sampling, scores, temperature = job.sampling, logits, 1.0
    if sampling.temperature > 0:
        temperature = sampling.temperature
        noise = uniform(words(sampling.seed, sampling.choice, Tag.GUMBEL, at, len(logits)))
        scores = logits / temperature - np.log(-np.log(noise))
    unit = 2.0 ** (np.floor(np.log2(abs(logits[[ids[at], expected[at]]]).max())) - 7)
    gap = abs(scores[ids[at]] - scores[expected[at]])
    verdict = "numerics" if gap <= 4 * unit / temperature else "A BUG"
    print(f"    token {at}: score gap {gap:.3g}, unit {unit:g}: {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
