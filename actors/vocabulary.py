"""What a tokenizer's ids mean: sameness by content, padded ids, end ids.

A vocabulary is its map from id to token. Two are the same when the maps are equal, whatever the
sizes of the embeddings: those are padded. *Padded ids* stand for no token: gaps, ids beyond the
tokenizer, and the placeholders `[PAD<own id>]` that conversions to GGUF write into the gaps. They
are ignored by the comparison and must never be proposed or emitted. Knows no torch.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.cluster.errors import ConfigError
from outrider.cluster.models import ModelFiles, Report, log_report, resolve


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one tokenizer, without its placeholders."""

    tokens: Mapping[int, str]  # id -> token

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Vocabulary":
        """The vocabulary of `tokenizer`, added and special tokens included."""
        return cls(
            {
                index: token
                for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
                if token != f"[PAD{index}]"
            }
        )

    @property
    def size(self) -> int:
        """One more than the largest id that stands for a token."""
        return max(self.tokens, default=-1) + 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the map: equal digests mean the same vocabulary."""
        digest = hashlib.sha256()
        for index, token in sorted(self.tokens.items()):
            data = token.encode("utf-8", "surrogatepass")
            digest.update(b"%d %d " % (index, len(data)) + data)
        return digest.hexdigest()

    def padded_ids(self, num_logits: int) -> list[int]:
        """The ids below `num_logits` (a model's rows of logits) that stand for no token."""
        return [index for index in range(num_logits) if index not in self.tokens]


def find_end_ids(generation: object, config: object, tokenizer: object) -> tuple[int, ...]:
    """The ids that end an answer, each given as an id, several, or None for unknown.

    Those of the generation config, all of them, and no others; only where it has none, what
    the model's config and its tokenizer say.
    """
    ids = set(_as_ids(generation)) or {*_as_ids(config), *_as_ids(tokenizer)}
    return tuple(sorted(ids))


def _as_ids(value: object) -> Iterator[int]:
    values: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
    return (index for index in values if isinstance(index, int) and index >= 0)


def load_tokenizer(
    files: ModelFiles, override: str | None = None, report: Report = log_report
) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, or that of the model that `override` refers to."""
    if override is not None:
        files = resolve(override, report=report)
    # Of a GGUF file the automatic class gives the same, but first reads all of it, slowly.
    kind: Any = AutoTokenizer if files.gguf_file is None else PreTrainedTokenizerFast
    try:
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(**files.arguments())
    except Exception as error:  # transformers raises whatever the files made it stumble over
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ConfigError(f"cannot load the tokenizer of {files}: {reason}") from error
    return tokenizer
