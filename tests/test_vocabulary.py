from pathlib import Path

import pytest

from outrider.actors.vocabulary import (
    Vocabulary,
    find_end_ids,
    load_tokenizer,
)
from outrider.cluster.errors import ConfigError
from outrider.cluster.models import ModelFiles

from . import tiny

WORDS = Vocabulary({0: "a", 1: "b", 2: "c"})


def test_sameness_is_of_content_not_of_sizes() -> None:
    assert Vocabulary({2: "c", 1: "b", 0: "a"}).digest == WORDS.digest
    swapped = Vocabulary({0: "a", 1: "c", 2: "b"})
    assert swapped.size == WORDS.size
    assert swapped.digest != WORDS.digest


def test_a_missing_token_is_a_difference() -> None:
    assert Vocabulary({0: "a", 1: "b"}).digest != WORDS.digest


def test_tokens_that_only_concatenate_alike_differ() -> None:
    assert Vocabulary({0: "a1 1 b"}).digest != Vocabulary({0: "a", 1: "b"}).digest


def test_placeholders_of_conversions_are_padding_not_tokens() -> None:
    tokenizer = tiny.make_tokenizer(20)
    tokenizer.add_tokens([f"[PAD{index}]" for index in range(20, 23)])
    converted = Vocabulary.of(tokenizer)
    assert converted.digest == Vocabulary.of(tiny.make_tokenizer(20)).digest
    assert converted.padded_ids(25) == [20, 21, 22, 23, 24]


def test_a_token_that_names_another_id_is_a_token() -> None:
    tokenizer = tiny.make_tokenizer(20)
    tokenizer.add_tokens(["[PAD]", "[PAD7]"])
    assert Vocabulary.of(tokenizer).padded_ids(22) == []


def test_gaps_and_ids_beyond_the_tokenizer_are_padded() -> None:
    assert Vocabulary({0: "a", 2: "c"}).padded_ids(5) == [1, 3, 4]


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "end_ids"),
    [
        ([7, 5], 1, 2, (5, 7)),  # all of the generation config's, no others
        (7, [1], 2, (7,)),
        (None, [1, 3], 2, (1, 2, 3)),
        (None, None, 2, (2,)),
        (None, None, None, ()),
        ([], None, 0, (0,)),
    ],
)
def test_end_ids(
    generation: object, config: object, tokenizer: object, end_ids: tuple[int, ...]
) -> None:
    assert find_end_ids(generation, config, tokenizer) == end_ids


def test_the_override_goes_before_the_models_own_tokenizer(tmp_path: Path) -> None:
    for name, size in (("own", 20), ("other", 30)):
        tiny.make_tokenizer(size).save_pretrained(tmp_path / name)
        tiny.make_config("llama").save_pretrained(tmp_path / name)
    files = ModelFiles(str(tmp_path / "own"))
    assert Vocabulary.of(load_tokenizer(files)).size == 20
    assert Vocabulary.of(load_tokenizer(files, str(tmp_path / "other"))).size == 30


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the tokenizer of"):
        load_tokenizer(ModelFiles(str(tmp_path)))
