"""Drafts of another vocabulary in the serving loop: the target's ids, whatever they say."""

import json
import random
from collections import Counter
from typing import cast

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.actors.drafter import Drafter
from outrider.actors.lookup import PromptLookup
from outrider.actors.messages import Contexts, Method, Proposals, Sampling, Shaping
from outrider.actors.method_choice import MethodChoice
from outrider.actors.model import Model
from outrider.actors.pairing import Pair, pair_up
from outrider.actors.sampling import processed
from tests import tiny
from tests.engine import Engine, EngineDraft, Job
from tests.toys import KINDS, LACKING, ByteModel, make_report, make_text, make_tokenizer

METHODS: tuple[Method, ...] = ("string", "token")
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1, seed=5),
    Sampling(temperature=0.7, top_k=9, seed=6, choice=1),
    Sampling(temperature=1.3, top_p=0.8, seed=7),
    Sampling(temperature=1e-3, seed=8),
]


def make_engine(
    target: ByteModel, drafts: list[EngineDraft] | None = None, *, with_law: bool = False
) -> Engine:
    return Engine(cast(Model, target), drafts or [], with_law=with_law)


def make_draft(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, noise: float, seed: int = 1
) -> tuple[Drafter, Pair]:
    pair, _ = pair_up(make_report(target), make_report(draft), "auto")
    model = ByteModel(draft, 8, noise, seed)
    return Drafter(cast(Model, model), 8, 64, pair=pair), pair


def make_jobs(target: ByteModel, seed: int, number: int = 8) -> list[Job]:
    """Prompts of text and of stray bytes and markers, each with its own law."""
    rng = random.Random(seed)
    ids = [*target.spelling.pieces, *target.spelling.special]
    ends = frozenset(id for id, token in target.spelling.special.items() if token == "</s>")
    jobs = []
    for i in range(number):
        prompt = target.spelling.encode(make_text(rng, rng.randint(1, 8)).encode())
        if i % 3 == 2:
            prompt += rng.choices(ids, k=3)
        sampling = SAMPLINGS[i % len(SAMPLINGS)]
        if i >= len(SAMPLINGS):
            sampling = sampling._replace(min_p=0.02, shaping=make_shaping(rng, ids, ends))
        jobs.append(Job(prompt, rng.randint(1, 30), sampling._replace(seed=seed + i), ends))
    return jobs


def make_shaping(rng: random.Random, ids: list[int], ends: frozenset[int]) -> Shaping:
    """Every option at once, over the ids of the target."""
    return Shaping(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias=tuple((id, rng.uniform(-3, 3)) for id in rng.sample(ids, 9)),
        bad_words=tuple(tuple(rng.choices(ids, k=k)) for k in (1, 1, 2, 2, 3)),
        allowed_ids=tuple(rng.sample(ids, len(ids) * 2 // 3)),
        min_tokens=10,
        end_ids=tuple(ends),
    )


def check_copies(drafter: Drafter, pair: Pair) -> None:
    """The draft's context of every sequence spells the bytes that it was told."""
    if {bytes([byte]) for byte in range(256)} <= set(pair.draft.ids):
        for copy in drafter._copies.values():
            assert pair.draft.spell(copy.own) == pair.target.spell(copy.committed)


class Watched(Drafter):
    """Checks its copies after every call."""

    pair: Pair

    def propose(self, contexts: Contexts) -> Proposals:
        proposals = super().propose(contexts)
        check_copies(self, self.pair)
        return proposals


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft_kind", [*KINDS, *LACKING])
@pytest.mark.parametrize("target_kind", KINDS)
def test_ids_are_plain_decodings_whatever_the_draft(
    target_kind: str, draft_kind: str, method: Method
) -> None:
    accepted = 0
    for seed, length in ((0, 1), (1, 4)):
        tokenizers = make_tokenizer(target_kind, seed), make_tokenizer(draft_kind, 50 + seed)
        target = ByteModel(tokenizers[0], 8, 0.5)
        jobs = make_jobs(target, 100 * seed)
        expected = make_engine(target).run(jobs)
        pair, _ = pair_up(*map(make_report, tokenizers), "auto")
        drafter = Watched(cast(Model, ByteModel(tokenizers[1], 8, 0.5, 1)), 8, 64, pair=pair)
        drafter.pair = pair
        engine = make_engine(target, [EngineDraft("d", length, drafter, method=method)])
        assert engine.run(jobs) == expected
        accepted += engine.stats.drafts["d"].counts.num_accepted_tokens
    assert accepted > 10  # else nothing was tested


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_is_the_target_under_other_ids_is_always_right(method: Method) -> None:
    tokenizer = make_tokenizer("byte-level", 3)
    target = ByteModel(tokenizer, 8)
    other = shuffled(tokenizer)
    drafter, _ = make_draft(tokenizer, other, noise=0)
    engine = make_engine(target, [EngineDraft("d", 4, drafter, method=method)])
    jobs = [Job(job.prompt, 30, job.sampling, job.end_ids) for job in make_jobs(target, 9)]
    assert engine.run(jobs) == make_engine(target).run(jobs)
    counts = engine.stats.drafts["d"].counts
    if method == "token":
        assert counts.num_accepted_tokens == counts.num_draft_tokens > 0
    else:  # the target's own text is not always the one that its tokenizer would choose
        assert counts.num_accepted_tokens > 0.3 * counts.num_draft_tokens


def shuffled(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same tokens under other ids."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = definition["model"]["vocab"]
    ids = list(vocab.values())
    random.Random(0).shuffle(ids)
    definition["model"]["vocab"] = dict(zip(vocab, ids, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(definition)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_temperature_near_zero_gives_the_greedy_ids(method: Method) -> None:
    tokenizers = make_tokenizer("byte-level", 1), make_tokenizer("unigram", 2)
    target = ByteModel(tokenizers[0], 8, 0.5)
    greedy, cold = (
        [Job(job.prompt, 30, law, job.end_ids) for job in make_jobs(target, 5)]
        for law in (Sampling(temperature=0), Sampling(temperature=1e-3, seed=3))
    )
    drafter, _ = make_draft(*tokenizers, noise=0.5)
    expected = make_engine(target).run(greedy)
    for jobs in (greedy, cold):
        engine = make_engine(target, [EngineDraft("d", 4, drafter, method=method)])
        assert engine.run(jobs) == expected


def test_methods_change_hands_in_mid_sequence_and_lookup_helps_out() -> None:
    tokenizers = make_tokenizer("byte-level", 1), make_tokenizer("unigram", 2)
    target = ByteModel(tokenizers[0], 8, 0.5)
    jobs = make_jobs(target, 7)
    expected = make_engine(target).run(jobs)
    drafter, _ = make_draft(*tokenizers, noise=0.5)
    draft = EngineDraft("d", 3, drafter, choice=MethodChoice(METHODS))
    lookup = EngineDraft("lookup", 3, PromptLookup(1, 3))
    engine = make_engine(target, [lookup, draft])
    assert engine.run(jobs) == expected
    assert set(engine.stats.drafts["d"].methods) == set(METHODS)
    killed = EngineDraft("d", 3, drafter, choice=MethodChoice(METHODS), killed_after=5)
    assert make_engine(target, [killed]).run(jobs) == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_alone_says_what_it_said_before_pairs_were_made(method: Method) -> None:
    tokenizers = make_tokenizer("byte-level", 1), make_tokenizer("unigram", 2)
    target = ByteModel(tokenizers[0], 8)
    model = ByteModel(tokenizers[1], 8, 0.5)
    jobs = make_jobs(model, 3)
    before = make_engine(model).run(jobs)
    pair, _ = pair_up(*map(make_report, tokenizers), "auto")
    drafters = [Drafter(cast(Model, model), 8, 64, pair=pair) for _ in range(2)]
    theirs = make_jobs(target, 3)
    drafts = [
        EngineDraft(name, 3, source, method=method)
        for name, source in zip("ab", drafters, strict=True)
    ]
    expected = make_engine(target).run(theirs)
    assert make_engine(target, drafts[:1]).run(theirs) == expected
    assert make_engine(model).run(jobs) == before
    assert make_engine(target, drafts[1:]).run(theirs) == expected


class Skewed:
    """A model of ids with a fixed law, for counting."""

    max_model_len = 1000

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.vocabulary = make_report(tokenizer).vocabulary
        size = self.vocabulary.size
        self._logits = torch.from_numpy(np.random.default_rng(seed).normal(size=size))

    def forward(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> torch.Tensor:
        return self._logits.expand(sum(num_logits), -1)


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerBase:
    tokens = {word: id for id, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_the_ratio_rule_keeps_the_targets_law_over_unsorted_vocabularies() -> None:
    """Chi-square of the second and third token of 2500 answers; false alarm 1e-6 each."""
    words = [f"w{i}" for i in range(9)]
    target_tokenizer = word_tokenizer(["<unk>", "</s>", *words])
    draft_tokenizer = word_tokenizer([*reversed(words[2:]), "x", "</s>", "y", "<unk>", "z"])
    target, draft = Skewed(target_tokenizer, 1), Skewed(draft_tokenizer, 2)
    pair, _ = pair_up(make_report(target_tokenizer), make_report(draft_tokenizer), "token")
    drafter = Drafter(cast(Model, draft), 16, 64, pair=pair)
    engine = Engine(
        cast(Model, target), [EngineDraft("d", 3, drafter, method="token")], with_law=True
    )
    jobs = [Job([3, 4], 4, Sampling(1.0, seed=i)) for i in range(2500)]
    answers = engine.run(jobs, 16)
    counts = engine.stats.drafts["d"].counts
    assert 0.2 < counts.num_accepted_tokens / counts.num_draft_tokens < 0.95
    ids, probs = processed(target._logits, Sampling(1.0))
    for position in (1, 2):
        seen = Counter(answer[position] for answer in answers)
        statistic = sum(
            (seen[int(id)] - len(jobs) * p) ** 2 / (len(jobs) * p)
            for id, p in zip(ids, probs, strict=True)
        )
        assert statistic < chi2.isf(1e-6, len(ids) - 1)


def test_proposals_of_text_are_verified_by_the_coupled_rule_under_ratio() -> None:
    tokenizers = make_tokenizer("byte-level", 1), make_tokenizer("unigram", 2)
    target = ByteModel(tokenizers[0], 8, 0.5)
    jobs = make_jobs(target, 11)
    drafter, _ = make_draft(*tokenizers, noise=0.5)
    draft = EngineDraft("d", 3, drafter, method="string")
    engine = make_engine(target, [draft], with_law=True)
    assert engine.run(jobs) == make_engine(target).run(jobs)


def test_a_real_network_drafts_for_one_of_another_vocabulary() -> None:
    torch.set_num_threads(1)
    tokenizers = make_tokenizer("byte-level", 1), make_tokenizer("sentence-piece", 2)
    models = [
        Model(
            tiny.make_network("llama", seed, vocab_size=len(tokenizer) + 5),
            tokenizer,
            rows=8,
            max_model_len=100,
        )
        for seed, tokenizer in enumerate(tokenizers)
    ]
    target, draft = models
    rng = random.Random(0)
    jobs = [
        Job([rng.randrange(len(tokenizers[0])) for _ in range(9)], 20, sampling)
        for sampling in SAMPLINGS
    ]
    expected = Engine(target).run(jobs)
    pair, _ = pair_up(target.describe(), draft.describe(), "auto")
    for method in METHODS:
        source = EngineDraft("d", 3, Drafter(draft, 8, 64, pair=pair), method=method)
        assert Engine(target, [source]).run(jobs) == expected
