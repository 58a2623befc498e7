"""Spellings: what ids spell, and that encoding gives exactly the bytes back."""

import random

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.actors.spelling import Spelling, complete_length
from tests.toys import KINDS, LACKING, make_report, make_text, make_tokenizer


def spelling_of(tokenizer: PreTrainedTokenizerBase, num_logits: int | None = None) -> Spelling:
    report = make_report(tokenizer, num_logits)
    assert report.tokenizer is not None
    return Spelling(report.tokenizer, report.vocabulary, report.num_ids)


CASES = [(kind, seed) for kind in KINDS for seed in range(4)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_any_bytes_come_back_from_encoding(kind: str, seed: int) -> None:
    spelling = spelling_of(make_tokenizer(kind, seed))
    rng = random.Random(seed)
    for _ in range(200):
        data = make_text(rng, rng.randint(0, 12)).encode()
        first = rng.randint(0, len(data))
        for piece in (data, data[first:], data[:first], rng.randbytes(rng.randint(1, 6))):
            assert spelling.spell(spelling.encode(piece)) == piece


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_text_is_encoded_as_the_tokenizer_itself_does_but_for_what_it_adds(
    kind: str, seed: int
) -> None:
    tokenizer = make_tokenizer(kind, seed)
    spelling = spelling_of(tokenizer)
    rng = random.Random(seed)
    for _ in range(100):
        text = make_text(rng, 8)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # A dummy prefix is a space that the text then holds.
        prefix = "" if kind == "byte-level" or (kind == "unigram" and text[0] == " ") else " "
        assert spelling.encode((prefix + text).encode()) == ids


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_every_piece_has_one_id_that_spells_it(kind: str, seed: int) -> None:
    spelling = spelling_of(make_tokenizer(kind, seed))
    assert set(spelling.ids) == set(spelling.pieces.values())
    assert all(spelling.pieces[id] == piece for piece, id in spelling.ids.items())
    assert {bytes([byte]) for byte in range(256)} <= set(spelling.ids)
    assert not set(spelling.special) & set(spelling.pieces)


def test_a_whole_piece_is_taken_rather_than_a_bytes_stand_in() -> None:
    tokenizer = make_tokenizer("sentence-piece", 0)
    spelling = spelling_of(tokenizer)
    tokens = dict(make_report(tokenizer).vocabulary.tokens)
    assert tokens[spelling.ids[b"a"]] == "a"
    assert tokens[spelling.ids[b"\xc3"]] == "<0xC3>"
    assert tokens[spelling.ids[b" "]] == "\u2581"


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_looks_like_a_special_token_stays_text(kind: str) -> None:
    spelling = spelling_of(make_tokenizer(kind, 1))
    ids = spelling.encode(b"a<|user|>b")
    assert not set(ids) & set(spelling.special)
    assert spelling.spell(ids) == b"a<|user|>b"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_models_rows_are_never_used(kind: str) -> None:
    tokenizer = make_tokenizer(kind, 2)
    spelling = spelling_of(tokenizer, 200)
    assert max(spelling.pieces) < 200
    rng = random.Random(0)
    for _ in range(50):
        assert all(id < 200 for id in spelling.encode(make_text(rng, 5).encode()))


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_are_the_pieces_that_a_longer_one_begins_with(kind: str) -> None:
    spelling = spelling_of(make_tokenizer(kind, 3))
    for piece, id in spelling.ids.items():
        longer = any(other != piece and other.startswith(piece) for other in spelling.ids)
        assert (id in spelling.prefixes) == longer


def test_the_tokenizer_itself_is_not_changed() -> None:
    tokenizer = make_tokenizer("sentence-piece", 4)
    before = tokenizer.backend_tokenizer.to_str()
    spelling_of(tokenizer).encode(b"a b")
    assert tokenizer.backend_tokenizer.to_str() == before
    marker = tokenizer.convert_tokens_to_ids("<|user|>")
    assert tokenizer.encode("<|user|>", add_special_tokens=False)[-1] == marker


@pytest.mark.parametrize("kind", LACKING)
def test_what_cannot_be_spelled_still_stands_for_its_bytes(kind: str) -> None:
    spelling = spelling_of(make_tokenizer(kind, 0))
    assert (spelling.unknown_id is None) == (kind == "no unknown")
    assert spelling.unknown_id not in spelling.pieces
    rng = random.Random(0)
    for _ in range(100):
        data = make_text(rng, 6).encode() + rng.randbytes(2)
        pieces = spelling.split(data)
        assert b"".join(piece for _, piece in pieces) == data
        for id, piece in pieces:
            assert id == spelling.unknown_id or (id is not None and spelling.pieces[id] == piece)


def test_words_are_found_again_though_the_tokenizer_marks_spaces_after_splitting() -> None:
    tokenizer = make_tokenizer("no bytes", 1)
    spelling = spelling_of(tokenizer)
    text = "ab ab 1 ba"
    own = tokenizer.encode(text, add_special_tokens=False)
    assert spelling.encode(f" {text}".encode()) == own


def test_a_beginning_that_the_model_lacks_is_none() -> None:
    tokenizer = make_tokenizer("byte-level", 0)
    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    assert spelling_of(tokenizer).lead == begin
    assert spelling_of(tokenizer, begin).lead is None


def test_failures_tell_a_tokenizer_that_loses_text() -> None:
    assert spelling_of(make_tokenizer("byte-level", 0)).count_failures() == 0
    words = {word: i for i, word in enumerate(["<unk>", "the", "quick", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    assert spelling_of(lossy).count_failures() > 0.5


@pytest.mark.parametrize("text", ["", "a", "é", "a€", "🙂", "a🙂b"])
def test_only_an_unfinished_character_is_cut_off(text: str) -> None:
    data = text.encode()
    assert complete_length(data) == len(data)
    for cut in range(1, len(text[-1:].encode())):
        assert complete_length(data[:-cut]) == len(text[:-1].encode())
    assert complete_length(b"a\x80\x80\x80\x80") == 5  # never becomes a character
    assert complete_length(b"a\xff") == 2
