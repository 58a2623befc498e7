"""Text as it streams: the tokenizer's own decoding, whole characters, and no stop string shown."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from outrider.actors.text import Decode, TextStream

BROKEN = "\ufffd"
SPACE = "\u2581"  # Metaspace's mark of a space


def make_decode(tokens: list[str], decoder: decoders.Decoder) -> Decode:
    assert len(set(tokens)) == len(tokens)
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return decode


def byte_token(data: bytes) -> str:
    return "".join(LETTERS[byte] for byte in data)


def _letters() -> list[str]:
    """GPT-2's letter for each byte, as the tokenizers library knows it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [letters[byte] for byte in range(256)]


LETTERS = _letters()
# Ids 0..255 are the bytes; then whole characters, characters' parts, and text with parts.
PIECES = [b" the", "\u00e9".encode(), b"\n\xe2\x80", b"\x9c.", b"\xf0\x9f", b"\x98\x80x", b"ab\xc3"]
END = 256 + len(PIECES)
BYTES = make_decode(LETTERS + [byte_token(p) for p in PIECES], decoders.ByteLevel())
WORDS = [SPACE + "the", SPACE + "cat", "s", SPACE, SPACE * 2, "x" + SPACE, "e"]
METASPACE = make_decode(WORDS, decoders.Metaspace())
FALLBACK_TOKENS = [*WORDS, *(f"<0x{byte:02X}>" for byte in (0x0A, 0x41, 0xE2, 0x82, 0xAC, 0xFF))]
FALLBACK = make_decode(
    FALLBACK_TOKENS,
    decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
)

any_ids = st.lists(
    st.one_of(
        st.integers(0, END),
        st.integers(256, END),
        st.sampled_from([*"a\u00e9\u20ac\U0001f600".encode()]),
    ),
    max_size=14,
)
texts = st.text("ab \u00e9\u20ac\U0001f600\ufffd", max_size=8).map(lambda text: [*text.encode()])
byte_ids = st.one_of(any_ids, texts)
cuts = st.sets(st.integers(0, 14), max_size=6)


def split(ids: list[int], cut: set[int]) -> list[list[int]]:
    borders = [0, *sorted(c for c in cut if c < len(ids)), len(ids)]
    return [ids[a:b] for a, b in pairwise(borders)]


def stream(decode: Decode, prompt: list[int], blocks: list[list[int]]) -> list[str]:
    text = TextStream(decode, prompt)
    return [*map(text.push, blocks), text.flush()]


@settings(deadline=None)
@given(byte_ids, byte_ids, cuts)
def test_the_text_of_all_deltas_is_the_tokenizers_decoding(
    prompt: list[int], ids: list[int], cut: set[int]
) -> None:
    assert "".join(stream(BYTES, prompt, split(ids, cut))) == BYTES(ids)


@settings(deadline=None)
@given(byte_ids, byte_ids)
def test_after_every_id_all_whole_characters_are_out_and_no_part_of_one(
    prompt: list[int], ids: list[int]
) -> None:
    text = TextStream(BYTES, prompt)
    released = ""
    for i, id in enumerate(ids):
        released += text.push([id])
        assert released == BYTES(ids[: i + 1]).rstrip(BROKEN)


@pytest.mark.parametrize("character", ["\u00e9", "\u20ac", "\U0001f600"])
def test_a_character_of_several_ids_comes_out_once_and_whole(character: str) -> None:
    blocks = [[id] for id in character.encode()]
    deltas = stream(BYTES, [97], blocks)
    assert deltas == [""] * (len(blocks) - 1) + [character, ""]


def test_bytes_that_never_become_a_character_come_out_when_that_is_certain() -> None:
    assert stream(BYTES, [], [[0xE2], [0x82], [97], [0xFF]]) == ["", "", BROKEN + "a", "", BROKEN]


def test_a_skipped_special_token_inside_a_character_changes_nothing() -> None:
    blocks = [[END], [0xC3], [END], [0xA9], [END]]
    assert stream(BYTES, [END], blocks) == ["", "", "", "\u00e9", "", ""]


metaspace_ids = st.lists(st.integers(0, len(WORDS)), max_size=10)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=10), metaspace_ids, cuts)
def test_the_answers_leading_space_is_kept_as_after_the_whole_prompt(
    prompt: list[int], ids: list[int], cut: set[int]
) -> None:
    whole = METASPACE(prompt + ids)[len(METASPACE(prompt)) :]
    assert "".join(stream(METASPACE, prompt, split(ids, cut))) == whole


def test_a_word_after_a_prompt_begins_with_its_space_and_without_one_does_not() -> None:
    assert stream(METASPACE, [0], [[1], [2]]) == [" cat", "s", ""]
    assert stream(METASPACE, [], [[1], [2]]) == ["cat", "s", ""]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, len(FALLBACK_TOKENS)), max_size=8),
    st.lists(st.integers(0, len(FALLBACK_TOKENS)), max_size=10),
    cuts,
)
def test_blocks_read_as_their_ids_one_by_one_even_where_bytes_read_by_their_neighbours(
    prompt: list[int], ids: list[int], cut: set[int]
) -> None:
    one_by_one = stream(FALLBACK, prompt, [[id] for id in ids])
    assert "".join(stream(FALLBACK, prompt, split(ids, cut))) == "".join(one_by_one)


def test_a_cut_character_after_a_newline_byte_leaves_the_newline_alone() -> None:
    """Byte fallback reads `0A E2` as two broken bytes: a block showed less than its ids did."""
    newline, part = len(WORDS), len(WORDS) + 2
    for blocks in ([[newline], [part]], [[newline, part]]):
        assert "".join(stream(FALLBACK, [0], blocks)) == "\n" + BROKEN


def test_characters_that_came_before_a_cut_one_read_alike_in_every_block() -> None:
    """Byte fallback breaks all bytes of a run for one that is cut: the run must not be longer."""
    first = len(WORDS)
    euro = [first + 2, first + 3, first + 4]
    ids = [*euro, *euro, first, *euro[:2]]
    one_by_one = "".join(stream(FALLBACK, [0], [[id] for id in ids]))
    assert one_by_one.startswith("\u20ac\u20ac\n" + BROKEN)
    for cut in range(1, len(ids)):
        assert "".join(stream(FALLBACK, [0], [ids[:cut], ids[cut:]])) == one_by_one


def expected(ids: list[int], stop: tuple[str, ...]) -> tuple[str, str | None, int]:
    """Text, stop string and number of ids used, by the definition: id after id."""
    for count in range(1, len(ids) + 1):
        text = BYTES(ids[:count]).rstrip(BROKEN)
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            at, _, matched = min(found)
            return text[:at], matched, count
    return BYTES(ids), None, len(ids)


def longest_beginning(text: str, stop: tuple[str, ...]) -> int:
    return max(n for s in stop for n in range(len(s)) if text.endswith(s[:n]))


stops = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)
letters = st.lists(st.sampled_from([97, 98, 0xC3, 0xA9, 257, 262, END]), max_size=14)


@settings(deadline=None)
@given(letters, letters, stops)
def test_a_stop_string_ends_the_text_at_its_first_id_and_is_never_shown(
    prompt: list[int], ids: list[int], stop: tuple[str, ...]
) -> None:
    text = TextStream(BYTES, prompt, stop)
    released = ""
    want, matched, count = expected(ids, stop)
    for i, id in enumerate(ids, 1):
        released += text.push([id])
        if i == count and matched is not None:
            break
        assert text.matched is None
        certain = BYTES(ids[:i]).rstrip(BROKEN)
        assert released == certain[: len(certain) - longest_beginning(certain, stop)]
    assert text.matched == matched
    assert released + text.flush() == want
    assert text.flush() == ""


def test_a_stop_string_that_ends_in_a_broken_character_is_found_at_the_very_end() -> None:
    """The end of the answer made it certain, but came out unsearched."""
    text = TextStream(BYTES, [], ("a" + BROKEN,))
    assert [text.push([id]) for id in (98, 97, 0xE2)] == ["b", "", ""]
    assert (text.flush(), text.matched) == ("", "a" + BROKEN)


@settings(deadline=None)
@given(letters, stops)
def test_an_included_stop_string_is_the_end_of_the_text(
    ids: list[int], stop: tuple[str, ...]
) -> None:
    plain, including = TextStream(BYTES, [], stop), TextStream(BYTES, [], stop, include_stop=True)
    without = "".join(plain.push([id]) for id in ids) + plain.flush()
    shown = "".join(including.push([id]) for id in ids) + including.flush()
    assert shown == without + (plain.matched or "")


def test_what_might_have_been_a_stop_string_is_held_and_comes_out_at_the_end() -> None:
    text = TextStream(BYTES, [], ("END",))
    assert [text.push([id]) for id in b"xEEN"] == ["x", "", "E", ""]
    assert text.flush() == "EN"


def test_a_stop_string_inside_held_text_is_found() -> None:
    text = TextStream(BYTES, [], ("aab", "ac"))
    assert [text.push([id]) for id in b"aac"] == ["", "", "a"]
    assert (text.matched, text.push([120]), text.flush()) == ("ac", "", "")


def test_a_stop_string_is_seen_at_the_id_that_completes_it_though_a_character_hangs_on() -> None:
    """The id of a newline and two thirds of a quotation mark completed the newline unnoticed."""
    text = TextStream(BYTES, [], ("\n",))
    assert text.push([97]) == "a"
    assert text.push([258]) == ""
    assert text.matched == "\n"


@pytest.mark.parametrize("stop", [("b", "ab"), ("a", "ab"), ("ab", "b", "a")])
def test_of_stop_strings_in_one_id_the_earliest_wins_then_the_longest(
    stop: tuple[str, ...],
) -> None:
    text = TextStream(BYTES, [], stop)
    assert text.push([256 + PIECES.index(b"ab\xc3")]) == ""
    assert text.matched == "ab"


def test_neither_a_long_prompt_nor_a_long_answer_is_decoded_again_and_again() -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return BYTES(ids)

    text = TextStream(decode, [97] * 1000)
    for _ in range(1000):
        text.push([98])
    assert max(sizes) < 10
