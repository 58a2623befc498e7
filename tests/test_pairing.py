"""Pairs and views: ids that mean the same, and one text in two vocabularies, byte for byte."""

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outrider.actors.messages import LoadReport
from outrider.actors.pairing import Pair, View, Wanted, has_same_vocabulary, pair_up
from outrider.cluster.errors import ConfigError
from tests import tiny
from tests.toys import KINDS, LACKING, make_report, make_text, make_tokenizer, make_word_pieces

CASES = [(target, draft, seed) for target in KINDS for draft in KINDS for seed in range(2)]


def make_pair(target: str, draft: str, seed: int = 0, **special: tuple[str, ...]) -> Pair:
    pair, _ = pair_up(
        make_report(make_tokenizer(target, 10 + seed)),
        make_report(make_tokenizer(draft, 20 + seed, **special)),
        "auto",
    )
    return pair


@pytest.mark.parametrize(("target", "draft", "seed"), CASES)
def test_the_map_is_one_to_one_and_keeps_bytes(target: str, draft: str, seed: int) -> None:
    pair = make_pair(target, draft, seed)
    assert len(set(pair.to_target.values())) == len(pair.to_target)
    assert {theirs: own for own, theirs in pair.to_target.items()} == pair.to_draft
    for own, theirs in pair.to_target.items():
        assert pair.draft.spell([own]) == pair.target.spell([theirs])
    shared = set(pair.draft.ids) & set(pair.target.ids)
    assert len(shared) >= 256  # every byte, whatever the family writes it as
    assert all(pair.draft.ids[piece] in pair.to_target for piece in shared)


@pytest.mark.parametrize(("target", "draft", "seed"), CASES)
def test_a_view_spells_the_committed_bytes_after_every_round(
    target: str, draft: str, seed: int
) -> None:
    pair = make_pair(target, draft, seed)
    rng = random.Random(seed)
    ordinary, special = sorted(pair.target.pieces), sorted(pair.target.special)
    for _ in range(20):
        view, committed = View(pair), []
        for _ in range(15):
            if rng.random() < 0.5:  # what a tokenizer makes of text
                committed += pair.target.encode(make_text(rng, 3).encode())
            elif rng.random() < 0.8:  # any bytes, most of them no text
                committed += rng.choices(ordinary, k=rng.randint(1, 4))
            else:
                committed.append(rng.choice(special))
            view.follow(committed)
            assert pair.draft.spell(view.ids) == pair.target.spell(committed)


@pytest.mark.parametrize("draft", LACKING)
def test_a_view_of_what_the_draft_cannot_spell_does_not_drift(draft: str) -> None:
    pair = make_pair("byte-level", draft)
    rng = random.Random(1)
    for _ in range(20):
        view, committed = View(pair), []
        for _ in range(15):
            committed += pair.target.encode(make_text(rng, 2).encode())
            committed += rng.choices(sorted(pair.target.pieces), k=rng.randint(0, 2))
            view.follow(committed)
        whole = pair.draft.encode(pair.target.spell(committed))
        assert len(view.ids) <= len(committed) * 4
        known = [[id for id in ids if id != pair.draft.unknown_id] for ids in (view.ids, whole)]
        assert pair.draft.spell(known[0]) == pair.draft.spell(known[1])


def test_a_character_that_comes_byte_by_byte_is_read_as_a_character() -> None:
    target = make_report(make_word_pieces(["a"]))
    pair, _ = pair_up(target, make_report(make_tokenizer("no bytes", 0)), "auto")
    pair_ids = pair.target.encode("🙂a".encode())
    assert len(pair_ids) == 5  # four bytes
    view = View(pair)
    for end in range(1, 6):
        view.follow(pair_ids[:end])
    assert pair.draft.spell(view.ids) == "🙂a".encode()


def test_a_leading_special_token_is_kept_as_often_as_it_was_said() -> None:
    pair = make_pair("byte-level", "unigram")
    end, own = pair.target.roles["eos_token"], pair.draft.roles["eos_token"]
    view = View(pair)
    view.follow([end, end, end])
    assert view.ids == [own] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_reads_text_as_the_drafts_own_tokenizer_would(kind: str) -> None:
    pair = make_pair("byte-level", kind)
    rng = random.Random(3)
    for _ in range(30):
        text = " ".join(rng.choice(["aba", "bb1", "é🙂", "a"]) for _ in range(12)).encode()
        committed = pair.target.encode(text)
        view = View(pair)
        for end in range(1, len(committed) + 1):
            view.follow(committed[:end])
        assert view.ids == pair.draft.encode(text)


def test_a_view_starts_anew_when_told_another_text() -> None:
    pair = make_pair("byte-level", "unigram")
    view = View(pair)
    for text in (b"ab ab", b"ab", b"1"):
        view.follow(pair.target.encode(text))
        assert pair.draft.spell(view.ids) == text


def test_a_text_begins_as_the_drafts_tokenizer_begins_it_and_only_once() -> None:
    tokenizer = make_tokenizer("unigram", 1)
    begin, target = "<s>", make_report(make_tokenizer("byte-level", 1))
    begin_id = tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, begin_id)]
    )
    pair, _ = pair_up(target, make_report(tokenizer), "auto")
    view = View(pair)
    view.follow(pair.target.encode(b"ab"))
    assert view.ids == [begin_id, *pair.draft.encode(b"ab")]
    view.follow([pair.target.roles["bos_token"], *pair.target.encode(b"b")])
    assert view.ids == [begin_id, *pair.draft.encode(b"b")]


def test_special_tokens_are_partners_by_content_else_by_role_else_not_at_all() -> None:
    pair = make_pair("byte-level", "unigram", special=("<begin>", "</s>", "<|other|>"))
    target, draft = pair.target, pair.draft
    partners = {
        draft.special[own]: target.special.get(theirs)
        for own, theirs in pair.to_target.items()
        if own in draft.special
    }
    assert partners == {"<begin>": "<s>", "</s>": "</s>"}


def test_a_marker_that_the_draft_lacks_is_fed_as_its_bytes() -> None:
    pair = make_pair("byte-level", "unigram", special=("<s>", "</s>"))
    marker = next(id for id, content in pair.target.special.items() if content == "<|user|>")
    view = View(pair)
    view.follow([*pair.target.encode(b"a"), marker, *pair.target.encode(b"b")])
    assert pair.draft.spell(view.ids) == b"a<|user|>b"
    assert not set(view.ids) & set(pair.draft.special)


def test_two_drafts_of_one_tokenizer_do_not_disturb_each_other() -> None:
    tokenizer = make_tokenizer("unigram", 5)
    target = make_report(make_tokenizer("byte-level", 5))
    first, _ = pair_up(target, make_report(tokenizer), "auto")
    before = dict(first.to_target)
    second, _ = pair_up(target, make_report(tokenizer), "token")
    views = View(first), View(second)
    views[0].follow(first.target.encode(b"ab ab"))
    views[1].follow(first.target.encode(b"1"))
    views[0].follow(first.target.encode(b"ab ab1"))
    assert first.draft.spell(views[0].ids) == b"ab ab1"
    assert first.to_target == before == second.to_target


@pytest.mark.parametrize(
    ("wanted", "methods"),
    [("auto", ("string", "token")), ("string", ("string",)), ("token", ("token",))],
)
def test_what_is_wanted_serves(wanted: Wanted, methods: tuple[str, ...]) -> None:
    target, draft = (make_report(make_tokenizer(kind, 1)) for kind in ("byte-level", "unigram"))
    _, report = pair_up(target, draft, wanted)
    assert report.methods == methods
    assert f"{report.num_shared} of its {report.num_draft} tokens" in str(report)


def word_report(words: list[str]) -> LoadReport:
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return make_report(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
    )


def test_tokenizers_that_lose_text_on_both_sides_are_served_id_by_id() -> None:
    words = [f"w{i}" for i in range(30)]
    target = word_report(["<unk>", "<s>", "</s>", *words])
    draft = word_report([*reversed(words[:20]), "</s>", "<s>", "<unk>"])
    pair, report = pair_up(target, draft, "auto")
    assert report.methods == ("token",)
    assert report.num_shared == 23
    view = View(pair)
    view.follow([1, 3, 4, 32, 2])
    tokens = draft.vocabulary.tokens
    assert [tokens[id] for id in view.ids] == ["<s>", "w0", "w1", "<unk>", "</s>"]


@pytest.mark.parametrize("wanted", ["auto", "string", "token"])
def test_a_pair_of_which_one_side_loses_text_is_refused_with_the_reason(wanted: Wanted) -> None:
    words = make_report(tiny.make_tokenizer())
    bytes_ = make_report(make_tokenizer("byte-level", 0))
    for target, draft, side in ((words, bytes_, "target"), (bytes_, words, "draft")):
        with pytest.raises(ConfigError, match=f"the {side}'s tokenizer loses text"):
            pair_up(target, draft, wanted)


def test_string_is_refused_where_text_is_lost_and_token_where_nothing_is_shared() -> None:
    target, draft = (
        word_report(["<unk>", "</s>", "<s>", *words]) for words in (["aa", "bb"], ["cc", "dd"])
    )
    with pytest.raises(ConfigError, match="vocabulary: string cannot serve"):
        pair_up(target, draft, "string")
    slow = replace(make_report(make_tokenizer("unigram", 0)), tokenizer=None)
    with pytest.raises(ConfigError, match="draft's tokenizer is not one of the `tokenizers`"):
        pair_up(target, slow, "auto")


def test_a_vocabulary_is_another_by_content_or_by_the_models_rows() -> None:
    target = make_report(tiny.make_tokenizer(20), 32)
    assert has_same_vocabulary(target, make_report(tiny.make_tokenizer(20), 64))
    assert not has_same_vocabulary(target, make_report(tiny.make_tokenizer(20), 19))
    assert not has_same_vocabulary(target, make_report(tiny.make_tokenizer(21)))
