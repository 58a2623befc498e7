"""What a tokenizer's ids spell, as bytes, and which ids spell given bytes.

Tokens are compared as bytes, since every family writes them in its own way: byte-level alphabets
(GPT-2: a character for each byte), sentence pieces (`▁` for a space, `<0x0A>` for a byte) and
plain text. Encoding here adds nothing (no special tokens, no leading space), normalises nothing
and gives exactly the bytes back. Works on a private copy; knows no models and no drafts.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from outrider.actors.byte_letters import read_byte_letters, read_byte_piece
from outrider.actors.vocabulary import Vocabulary

Piece = tuple[int | None, bytes]  # an id and the bytes that it stands for; None = no id
Script = Literal["byte-level", "sentence-piece", "plain"]

_SPACE = "\u2581"  # how sentence pieces write a space
_NOT_UTF_8 = re.compile("([\udc80-\udcff]+)")  # bytes that `surrogateescape` let through
_WORDS = re.compile(r"\s*\S+|\s+")
_CHARACTERS = re.compile("(?s).")
_SAMPLE = 200  # texts to judge a tokenizer by
_LEAST_KEPT = 0.8
_ROLES = ("bos_token", "eos_token")

# Everyday text with what tokenizers stumble over: leading and repeated spaces, line ends of both
# kinds, tabs, digits, accents composed and decomposed, scripts without spaces, emoji, code.
PROBE = (
    "The quick brown fox jumps over the lazy dog. It's 12:45, isn't it?\n",
    " leading, and   three  spaces;\ta tab\r\nand a Windows line end\r\n\r\n",
    "def f(x: int) -> str:\n    return {'a': [x ** 2, 0x1F]}[\"a\"]  # done\n",
    "Käse, naïve café, garçon, Straße, Ωμέγα, Привет мир, e\u0301 is not \u00e9\n",
    "東京都は日本の首都です。这是中文。 한국어 문장입니다.\n",
    "🙂 👩‍👩‍👧 🇳🇱 ½ ﬁ ™ … “quotes” — dash\n",
    "UPPER lower CamelCase snake_case 3.14159 1,000,000 $9.99 50% a@b.org\n",
)


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer as it travels between actors: its definition, not its files."""

    definition: str  # JSON of the `tokenizers` library
    roles: Mapping[str, int]  # "bos_token", "eos_token" -> id
    lead: int | None = None  # the id that the tokenizer puts before every text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenizerData | None":
        """The data of `tokenizer`; None if it is not one of the `tokenizers` library."""
        if not tokenizer.is_fast:
            return None
        known: Any = tokenizer  # transformers leaves both untyped
        ids = {role: getattr(known, f"{role}_id") for role in _ROLES}
        roles = {role: id for role, id in ids.items() if isinstance(id, int)}
        first = known.backend_tokenizer.encode("").ids[:1]
        return cls(
            known.backend_tokenizer.to_str(),
            roles,
            first[0] if first == [roles.get("bos_token")] else None,
        )


class Spelling:
    """One tokenizer as bytes; ids from `num_ids` on (rows that the model lacks) are left out."""

    def __init__(self, data: TokenizerData, vocabulary: Vocabulary, num_ids: int) -> None:
        definition = json.loads(data.definition)
        added = {token["content"]: bool(token["special"]) for token in definition["added_tokens"]}
        self.script: Script = _find_script(definition)
        self.special: dict[int, str] = {}  # id -> content; they spell nothing
        self.pieces: dict[int, bytes] = {}  # id -> what it spells, never empty
        self.num_ids = num_ids
        self.roles = {role: id for role, id in data.roles.items() if id < num_ids}
        self.lead = data.lead if data.lead in self.roles.values() else None
        self.unknown_id = _find_unknown(definition["model"], vocabulary, num_ids)
        markers = {self.unknown_id, *data.roles.values()}
        for id, token in vocabulary.tokens.items():
            if id >= num_ids:
                continue
            if added.get(token, False) or id in markers:
                self.special[id] = token
            elif spelled := _spell(token, self.script, is_added=token in added):
                self.pieces[id] = spelled
        self._tokens = vocabulary.tokens
        self._encoder = Tokenizer.from_str(json.dumps(_verbatim(definition)))
        self._encoder.encode_special_tokens = True  # text that looks like a marker stays text

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Piece -> its one id: a whole piece rather than a byte's stand-in, then the smallest."""
        ids: dict[bytes, int] = {}
        stand_ins = {id for id in self.pieces if read_byte_piece(self._tokens[id])}
        for id in sorted(self.pieces, key=lambda id: (id in stand_ins, id)):
            ids.setdefault(self.pieces[id], id)
        return ids

    @cached_property
    def prefixes(self) -> frozenset[int]:
        """Ids whose piece is the beginning of a longer one: more text could merge into them."""
        ordered = sorted((piece, id) for piece, id in self.ids.items())
        following = [piece for piece, _ in ordered[1:]] + [b""]
        return frozenset(
            id
            for (piece, id), after in zip(ordered, following, strict=True)
            if after.startswith(piece)
        )

    def spell(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids one after another; special ids by their content."""
        return b"".join(
            self.pieces[id] if id in self.pieces else self.special.get(id, "").encode()
            for id in ids
        )

    def encode(self, data: bytes) -> list[int]:
        """Ids that spell `data`, canonical where it is text, as far as there are any."""
        return [id for id, _ in self.split(data) if id is not None]

    def split(self, data: bytes) -> list[Piece]:
        """The ids of `encode`, each with its bytes; together they are `data`.

        What cannot be spelled (no piece for a character nor for its bytes) stands under the
        unknown id, or under None without one.
        """
        pieces: list[Piece] = []
        for part in _NOT_UTF_8.split(data.decode("utf-8", "surrogateescape")):
            if _NOT_UTF_8.fullmatch(part):
                pieces += self._split_bytes(part.encode("utf-8", "surrogateescape"))
            elif part:
                pieces += self._split_text(part, (_WORDS, _CHARACTERS))
        return pieces

    @cached_property
    def keeps_text(self) -> bool:
        """Whether texts made of its own pieces come back; word lists, for example, lose spaces."""
        draw = random.Random(0)  # the same sample for everybody
        pieces = list(self.ids)
        texts = [b"".join(draw.choices(pieces, k=3)) for _ in range(_SAMPLE)] if pieces else []
        kept = [text for text in texts if self._spells(self.encode(text), text)]
        return len(kept) > _LEAST_KEPT * _SAMPLE

    def count_failures(self) -> float:
        """Share of the probe's words that do not come back from encoding, in [0, 1]."""
        words = [word.encode() for text in PROBE for word in _WORDS.findall(text)]
        failed = [word for word in words if not self._spells(self.encode(word), word)]
        return len(failed) / len(words)

    def _spells(self, ids: list[int], data: bytes) -> bool:
        return all(id in self.pieces for id in ids) and self.spell(ids) == data

    def _split_text(self, text: str, finer: tuple[re.Pattern[str], ...]) -> list[Piece]:
        """The tokenizer's own ids if they spell the text; else those of its parts."""
        data = text.encode()
        try:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        except Exception:  # the library raises it bare, where there is no unknown token
            ids = []
        if self._spells(ids, data):
            return [(id, self.pieces[id]) for id in ids]
        if not finer:
            return self._split_bytes(data)
        parts = finer[0].findall(text)
        return [piece for part in parts for piece in self._split_text(part, finer[1:])]

    def _split_bytes(self, data: bytes) -> list[Piece]:
        if data in self.ids:
            return [(self.ids[data], data)]
        each = [bytes([byte]) for byte in data]
        return [(self.ids.get(byte, self.unknown_id), byte) for byte in each]


def complete_length(data: bytes) -> int:
    """Bytes of `data` before an unfinished UTF-8 character at its end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            is_first = 0xC2 <= byte <= 0xF4
            size = 2 + (byte >= 0xE0) + (byte >= 0xF0) if is_first else 1
            return len(data) - back if size > back else len(data)
    return len(data)


def _spell(token: str, script: Script, *, is_added: bool) -> bytes:
    spelled: bytes | None = None
    if script == "byte-level" and not is_added:
        spelled = read_byte_letters(token)
    if script == "sentence-piece":
        spelled = read_byte_piece(token) or token.replace(_SPACE, " ").encode()
    return token.encode("utf-8", "surrogatepass") if spelled is None else spelled


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder of a definition, sequences taken apart."""
    if part is None:
        return
    for inner in ("normalizers", "pretokenizers", "decoders"):
        if part["type"] == "Sequence" and inner in part:
            for one in part[inner]:
                yield from _parts(one)
            return
    yield part


def _find_unknown(model: Mapping[str, Any], vocabulary: Vocabulary, num_ids: int) -> int | None:
    """The id that stands for what a model's tokenizer lacks; None if there is none."""
    id, token = model.get("unk_id"), model.get("unk_token")
    if isinstance(token, str):
        id = next((id for id, other in vocabulary.tokens.items() if other == token), None)
    return id if isinstance(id, int) and id < num_ids else None


def _find_script(definition: Mapping[str, Any]) -> Script:
    sides = ("normalizer", "pre_tokenizer", "decoder")
    parts = [part for side in sides for part in _parts(definition.get(side))]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return "byte-level"
    replaces_spaces = any(
        part["type"] == "Replace" and part["pattern"].get("String") == _SPACE for part in parts
    )
    if "Metaspace" in kinds or "ByteFallback" in kinds or replaces_spaces:
        return "sentence-piece"
    return "plain"


def _verbatim(definition: dict[str, Any]) -> dict[str, Any]:
    """The definition without anything that adds to a text or changes it."""
    normalizers = [
        part
        for part in _parts(definition.get("normalizer"))
        if part["type"] == "ByteLevel"
        or (part["type"] == "Replace" and part["pattern"] == {"String": " "})
    ]
    given = list(_parts(definition.get("pre_tokenizer")))
    if any(part["type"] == "Metaspace" for part in given):  # it marks the spaces itself
        given = [part for part in given if part["type"] != "WhitespaceSplit"]
    pre_tokenizers = []
    for part in given:
        if part["type"] == "Metaspace":
            part = {**part, "prepend_scheme": "never"}
        if part["type"] == "ByteLevel":
            part = {**part, "add_prefix_space": False}
        pre_tokenizers.append(part)
    return {
        **definition,
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers}
        if pre_tokenizers
        else None,
    }
