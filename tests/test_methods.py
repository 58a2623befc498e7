"""Methods: what is certain of drafted text, what is held back, and where drafting ends."""

import torch

from outrider.actors.methods import Draft, String, Token
from outrider.actors.pairing import Pair, pair_up
from outrider.actors.spelling import Spelling
from tests.toys import KINDS, make_report, make_tokenizer, make_word_pieces

# The target writes whole words, the draft single letters and bytes.
TARGET = ["hello", "hell", "he", "llo", " world", "!", "é", "a", "b"]
DRAFT = ["h", "e", "l", "o", " ", "w", "r", "d", "!", "a", "b"]


def make_pair() -> Pair:
    target, draft = (make_report(make_word_pieces(words)) for words in (TARGET, DRAFT))
    pair, _ = pair_up(target, draft, "auto")
    return pair


def say(pair: Pair, text: bytes, num_tokens: int = 8) -> Draft:
    """Draft the bytes one by one, through the ids that the method draws from."""
    method, draft = String(pair), Draft(num_tokens)
    for byte in text:
        own = pair.draft.ids[bytes([byte])]
        method.add(draft, pair.to_target.get(own, pair.target.num_ids + own))
    return draft


def proposed(pair: Pair, draft: Draft) -> list[bytes]:
    return [pair.target.spell([id]) for id in draft.proposed]


def test_a_last_piece_that_could_grow_is_held_back() -> None:
    pair = make_pair()
    assert proposed(pair, say(pair, b"he")) == []  # hell, hello
    assert proposed(pair, say(pair, b"hell")) == []
    assert proposed(pair, say(pair, b"hello")) == [b"hello"]  # begins no other piece
    assert proposed(pair, say(pair, b"hello!")) == [b"hello", b"!"]
    assert proposed(pair, say(pair, b"hello he")) == [b"hello", b" "]


def test_half_a_character_is_held_back_and_noise_goes_by_the_target_s_position() -> None:
    pair = make_pair()
    half, whole = say(pair, "aé".encode()[:2]), say(pair, "aé".encode())
    assert proposed(pair, half) == [b"a"]
    assert len(half.ids) == 1  # what comes next is still the second id
    assert proposed(pair, whole) == [b"a", "é".encode()]


def test_no_more_is_proposed_than_was_asked_for() -> None:
    pair = make_pair()
    draft = say(pair, b"ababab", num_tokens=3)
    assert proposed(pair, draft) == [b"a", b"b", b"a"]
    assert draft.is_done


def test_nothing_is_drafted_past_a_special_token_and_the_text_before_it_is_certain() -> None:
    pair = make_pair()
    draft = say(pair, b"he")
    end = pair.draft.roles["eos_token"]
    String(pair).add(draft, pair.to_target[end])
    assert draft.is_done
    assert draft.proposed == [*pair.target.encode(b"he"), pair.target.roles["eos_token"]]


def test_a_special_token_that_the_target_lacks_ends_the_draft_without_it() -> None:
    target = make_report(make_word_pieces(TARGET))
    draft_tokenizer = make_word_pieces(DRAFT, special=("<s>", "</s>", "<|own|>"))
    pair, _ = pair_up(target, make_report(draft_tokenizer), "auto")
    own = next(id for id, content in pair.draft.special.items() if content == "<|own|>")
    draft = say(pair, b"he")
    String(pair).add(draft, pair.target.num_ids + own)
    assert draft.is_done
    assert draft.proposed == pair.target.encode(b"he")


def test_every_token_of_the_draft_is_drawn_under_one_id_with_its_own_logit() -> None:
    for kind in KINDS:
        reports = make_report(make_tokenizer("byte-level", 1)), make_report(make_tokenizer(kind, 2))
        pair, _ = pair_up(*reports, "auto")
        logits = torch.arange(2 * pair.draft.num_ids, dtype=torch.float64).view(2, -1)
        string, token = String(pair).spread(logits), Token(pair).spread(logits)
        assert token.shape == (2, pair.target.num_ids)
        known = set(pair.draft.pieces) | set(pair.draft.special)
        assert string.isfinite().sum(-1).tolist() == [len(known)] * 2
        assert torch.equal(string[:, : pair.target.num_ids], token)
        for own, partner in pair.to_target.items():
            assert token[0, partner] == own
        assert token.isfinite().sum(-1).tolist() == [len(pair.to_target)] * 2
        rest = known - set(pair.to_target)
        assert all(string[0, pair.target.num_ids + own] == own for own in rest)


def test_prefixes_of_whole_pieces_only() -> None:
    spelling: Spelling = make_pair().target
    assert {spelling.spell([id]) for id in spelling.prefixes} >= {b"he", b"hell", b" "}
    assert spelling.ids[b"hello"] not in spelling.prefixes
