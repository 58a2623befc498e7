"""Exactness on a real model (SmolLM2-135M), run by hand: `python -m tests.acceptance.exactness`.

Greedy ids must equal `transformers`' own `generate` prompt by prompt, coupled ids those of plain
sampling with the same seed, for every draft and draft length, in float64. Prints one line per
configuration; exits with 1 if any id differs.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from outrider.actors.draft import Drafter
from outrider.actors.lookup import PromptLookup
from outrider.actors.messages import Sampling
from outrider.actors.model import Model
from outrider.cluster.config import DraftModelSpec, TargetSpec
from tests.engine import Engine, EngineDraft, Job

ROWS = 8
TOKENS = 48
LENGTHS = (1, 4, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["greedy", "coupled"])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL with `turns`")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--noise", type=float, default=0.12, help="of the noisy draft's weights")
    parser.add_argument("--temperature", type=float, help="coupled: only this one")
    parser.add_argument("--num-prompts", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load(options, TargetSpec)
    prompts = load_prompts(target, options.prompts, options.num_prompts)
    drafters = {
        "self": Drafter(load(options, DraftModelSpec), 2 * ROWS, 64),
        "noisy": Drafter(add_noise(load(options, DraftModelSpec), options.noise), 2 * ROWS, 64),
    }
    part = greedy if options.part == "greedy" else coupled
    return part(options, target, prompts, drafters)


def load(options: argparse.Namespace, spec: type) -> Model:
    fields: dict[str, Any] = {"model": options.model, "dtype": options.dtype}
    if spec is DraftModelSpec:
        fields["method"] = "draft_model"
    return Model.load(spec(**fields, max_model_len=512), rows=2 * ROWS, report=lambda _: None)


def load_prompts(target: Model, path: Path, number: int) -> list[list[int]]:
    """The first prompts of every category in turn, as chats: ragged lengths."""
    by_category: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        item = json.loads(line)
        by_category.setdefault(item["category"], []).append(item["turns"][0])
    texts = []
    for rank in range(number):
        texts += [texts_of[rank] for texts_of in by_category.values() if rank < len(texts_of)]
    prompts = []
    for text in texts:
        chat = [{"role": "user", "content": text}]
        prompt = target.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        ids = target.tokenizer.encode(prompt, add_special_tokens=False)
        if len(ids) <= 400:
            prompts.append(ids)
    return prompts[:number]


def add_noise(model: Model, scale: float) -> Model:
    """Perturb every matrix by a share of its own spread."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model._network.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter += scale * parameter.std() * noise
    return model


def configurations(drafters: dict[str, Drafter], lengths: tuple[int, ...]) -> Iterator[Any]:
    yield "none", 0, []
    for length in lengths:
        yield "lookup", length, [EngineDraft("lookup", length, PromptLookup(2, 5))]
        for name, drafter in drafters.items():
            yield name, length, [EngineDraft(name, length, drafter)]


def report(name: str, length: int, engine: Engine, wrong: list[int], begin: float) -> None:
    counts = [d.counts for d in engine.stats.drafts.values()]
    drafted = sum(c.num_draft_tokens for c in counts)
    accepted = sum(c.num_accepted_tokens for c in counts)
    rate = f"{accepted / drafted:.4f}" if drafted else "-"
    print(
        f"{name:>16} g={length} differing={len(wrong)} {wrong[:5]} acceptance={rate} "
        f"drafted={drafted} rounds={engine.stats.num_rounds} "
        f"tokens={engine.stats.emitted_tokens} ({time.time() - begin:.0f} s)",
        flush=True,
    )


def greedy(
    options: argparse.Namespace,
    target: Model,
    prompts: list[list[int]],
    drafters: dict[str, Drafter],
) -> int:
    reference = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    )
    ends = list(target.end_ids)
    expected = []
    begin = time.time()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                eos_token_id=ends, pad_token_id=ends[0], max_new_tokens=TOKENS
            ),
        )
        expected.append(out[0, len(prompt) :].tolist())
    print(f"transformers generate: {len(prompts)} prompts ({time.time() - begin:.0f} s)")
    jobs = [Job(p, TOKENS, end_ids=frozenset(ends)) for p in prompts]
    failures = 0
    for name, length, drafts in configurations(drafters, LENGTHS):
        begin = time.time()
        engine = Engine(target, drafts)
        ids = engine.run(jobs, ROWS)
        wrong = [i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b]
        failures += len(wrong)
        report(name, length, engine, wrong, begin)
        if wrong and options.dtype != "float64":
            explain(reference, prompts, expected, ids, wrong)
    return 1 if failures and options.dtype == "float64" else 0


def explain(
    reference: Any,
    prompts: list[list[int]],
    expected: list[list[int]],
    ids: list[list[int]],
    wrong: list[int],
) -> None:
    """Feed each first divergence to the float64 model: a gap <= 1e-3 is numerics."""
    exact = copy.deepcopy(reference).double()
    for i in wrong:
        at = next(k for k, (a, b) in enumerate(zip(ids[i], expected[i], strict=False)) if a != b)
        text = torch.tensor([prompts[i] + expected[i][:at]])
        with torch.inference_mode():
            logits = exact(input_ids=text).logits[0, -1]
        gap = abs(float(logits[ids[i][at]] - logits[expected[i][at]]))
        print(f"    prompt {i} token {at}: float64 gap {gap:.2e}")


def coupled(
    options: argparse.Namespace,
    target: Model,
    prompts: list[list[int]],
    drafters: dict[str, Drafter],
) -> int:
    """50 seeds, each with one of 12 prompts; the reference is plain sampling by the same race."""
    prompts = prompts[:12]
    ends = frozenset(target.end_ids)
    temperatures = (0.5, 1.0) if options.temperature is None else (options.temperature,)
    failures = 0
    for temperature in temperatures:
        for top_p in (1.0, 0.9):
            jobs = [
                Job(prompts[s % 12], TOKENS, Sampling(temperature, 0, top_p, 1000 + s), ends)
                for s in range(50)
            ]
            print(f"temperature {temperature} top_p {top_p}", flush=True)
            expected = Engine(target).run(jobs, 2 * ROWS)
            for name, length, drafts in variants(drafters):
                begin = time.time()
                engine = Engine(target, drafts)
                order = list(range(50))
                if name == "self reversed":
                    order.reverse()
                ids = engine.run([jobs[i] for i in order], ROWS if length == 8 else 2 * ROWS)
                wrong = [i for i, out in zip(order, ids, strict=True) if out != expected[i]]
                failures += len(wrong)
                report(name, length, engine, wrong, begin)
            alone = [Engine(target).run([job], 1)[0] for job in jobs[:6]]
            wrong = [i for i, out in enumerate(alone) if out != expected[i]]
            failures += len(wrong)
            print(f"       one at a time differing={len(wrong)} of 6", flush=True)
    return 1 if failures else 0


def variants(drafters: dict[str, Drafter]) -> Iterator[Any]:
    yield "lookup", 4, [EngineDraft("lookup", 4, PromptLookup(2, 5))]
    yield "self", 4, [EngineDraft("self", 4, drafters["self"])]
    yield "noisy", 4, [EngineDraft("noisy", 4, drafters["noisy"])]
    yield "self reversed", 8, [EngineDraft("self", 8, drafters["self"])]
    yield "noisy killed", 4, [EngineDraft("noisy", 4, drafters["noisy"], killed_after=20)]


if __name__ == "__main__":
    sys.exit(main())
