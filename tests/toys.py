"""Toy tokenizers of every family over a tiny alphabet, and models of text rather than of ids.

A `ByteModel` scores a token by the bytes it spells after the bytes before it, so that two of them
with different tokenizers mostly agree, as a real draft and its target do.
"""

import math
import random
from functools import cache

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.actors.messages import LoadReport
from outrider.actors.spelling import Spelling, TokenizerData
from outrider.actors.vocabulary import Vocabulary

ALPHABET = "ab \n\r1é🙂"
SPECIAL = ("<s>", "</s>", "<|user|>")
KINDS = ("byte-level", "unigram", "sentence-piece")
LACKING = ("no bytes", "no unknown")  # what they cannot spell is unknown, or an error of theirs


def make_text(rng: random.Random, length: int) -> str:
    """Random text: runs of spaces, CRLF, emoji, accents."""
    pieces = [*ALPHABET, "\r\n", "   ", "aba", " b", "🙂🙂", "11"]
    return "".join(rng.choice(pieces) for _ in range(length))


def make_tokenizer(
    kind: str, seed: int, special: tuple[str, ...] = SPECIAL
) -> PreTrainedTokenizerBase:
    """A tokenizer with random merges or pieces, its ids in random order."""
    rng = random.Random(f"{kind} {seed}")
    make = {
        "byte-level": _byte_level,
        "unigram": _unigram,
        "sentence-piece": _sentence_piece,
        "no bytes": _without_bytes,
        "no unknown": lambda rng: _without_bytes(rng, unknown=False),
    }[kind]
    tokenizer = make(rng)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1]
    )


def _byte_level(rng: random.Random) -> Tokenizer:
    """Byte-level BPE, GPT-2's way."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rng.random() < 0.5)
    start = "".join(piece for piece, _ in pre.pre_tokenize_str(ALPHABET))
    tokens, merges = list(alphabet), []
    current = sorted(set(start))
    for _ in range(40):
        pair = rng.choice(current), rng.choice(current)
        if "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
            current.append("".join(pair))
    rng.shuffle(tokens)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(rng: random.Random) -> list[str]:
    characters = [*ALPHABET.replace(" ", "\u2581")]
    pieces = {"".join(rng.choice(characters) for _ in range(rng.randint(2, 4))) for _ in range(40)}
    return [*characters, *sorted(pieces)]


def _byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _unigram(rng: random.Random) -> Tokenizer:
    """Unigram with byte fallback and a dummy prefix; it lacks the emoji as a piece."""
    pieces = [p for p in _pieces(rng) if "🙂" not in p]
    tokens = [*_byte_pieces(), *pieces]
    rng.shuffle(tokens)
    scored = [("<unk>", 0.0), *((token, -rng.uniform(1, 9)) for token in tokens)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _without_bytes(rng: random.Random, *, unknown: bool = True) -> Tokenizer:
    """Unigram over characters, XLM-R's way; without an unknown token it raises at what it lacks."""
    tokens = [p for p in _pieces(rng) if "é" not in p]
    rng.shuffle(tokens)
    scored = [(token, -rng.uniform(1, 9)) for token in tokens]
    if unknown:
        scored = [("<unk>", 0.0), *scored]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0 if unknown else None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _sentence_piece(rng: random.Random) -> Tokenizer:
    """BPE with byte fallback, Llama's way: spaces replaced and one prepended by a normalizer."""
    characters = [*ALPHABET.replace(" ", "\u2581")]
    tokens, merges, current = list(characters), [], list(characters)
    for _ in range(40):
        pair = rng.choice(current), rng.choice(current)
        if "".join(pair) not in tokens:
            merges.append(pair)
            tokens.append("".join(pair))
            current.append("".join(pair))
    tokens += ["<unk>", *_byte_pieces()]
    rng.shuffle(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def make_word_pieces(
    words: list[str], special: tuple[str, ...] = ("<s>", "</s>")
) -> PreTrainedTokenizerBase:
    """A tokenizer of these pieces, each the likelier the longer it is, and of single bytes."""
    pieces = [word.replace(" ", "\u2581") for word in words]
    scored = [("<unk>", 0.0), *((piece, -5.0 / len(piece)) for piece in pieces)]
    scored += [(piece, -20.0) for piece in _byte_pieces()]
    if "\u2581" not in pieces:
        scored.append(("\u2581", -6.0))
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1]
    )


def make_report(tokenizer: PreTrainedTokenizerBase, num_logits: int | None = None) -> LoadReport:
    """What a worker with this tokenizer would report."""
    vocabulary = Vocabulary.of(tokenizer)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    return LoadReport(
        vocabulary,
        num_logits or vocabulary.size,
        (end,),
        1000,
        tokenizer=TokenizerData.of(tokenizer),
    )


class ByteModel:
    """A language model of bytes, read token by token; `noise` makes it differ from its like."""

    max_model_len = 1000

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, num_rows: int, noise: float = 0.0, seed: int = 0
    ) -> None:
        report = make_report(tokenizer)
        assert report.tokenizer is not None
        self.vocabulary = report.vocabulary
        self.spelling = Spelling(report.tokenizer, report.vocabulary, report.num_ids)
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self._noise = np.random.default_rng(seed).normal(size=report.num_ids) * noise

    def forward(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> torch.Tensor:
        """As `Model.forward`: logits [sum(num_logits), V], float64."""
        kept = []
        for index, first, block, number in zip(row, start, ids, num_logits, strict=True):
            assert 0 <= first <= len(self.rows[index]), "a gap in the row"
            self.rows[index][first:] = block
            text = self.rows[index]
            kept += [self.logits(text[: len(text) - back]) for back in reversed(range(number))]
        return torch.stack(kept) if kept else torch.empty(0, len(self._noise))

    def logits(self, text: list[int]) -> torch.Tensor:
        """Logits [V] after `text`."""
        before = self.spelling.spell(text[-8:])[-2:]
        values = np.full(len(self._noise), -np.inf)
        for id, piece in self.spelling.pieces.items():
            values[id] = _score(before, piece)
        for id, content in self.spelling.special.items():
            values[id] = -7 - len(content) / 8 + 3 * (before == b"a ")
        return torch.from_numpy(values + self._noise)


@cache
def _score(before: bytes, piece: bytes) -> float:
    """Log probability of the bytes of `piece`, each after the two before it."""
    total = 0.0
    for byte in piece:
        total += _law(before)[byte]
        before = (before + bytes([byte]))[-2:]
    return total


@cache
def _law(before: bytes) -> list[float]:
    usual = set(ALPHABET.encode())
    rng = random.Random(before.hex())
    weights = [rng.random() ** 4 if byte in usual else 1e-4 for byte in range(256)]
    return [math.log(weight / sum(weights)) for weight in weights]
