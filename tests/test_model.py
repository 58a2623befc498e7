import json
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from outrider.actors.loading import footprint
from outrider.actors.model import Model
from outrider.actors.selfcheck import check_rows
from outrider.cluster.config import DraftModelSpec, TargetSpec
from outrider.cluster.errors import ConfigError

from . import tiny

torch.set_num_threads(1)
TEXT = [5, 17, 140, 9, 77, 23, 8, 61, 102, 44]


def make_model(kind: str = "llama", padded: bool = False, rows: int = 3) -> Model:
    network = tiny.make_network(kind)
    return Model(network, tiny.make_tokenizer(), rows=rows, max_model_len=64, padded=padded)


def load(folder: str, *, rows: int = 3, max_model_len: int | None = None, **spec: object) -> Model:
    settings = TargetSpec.model_validate({"model": folder, "dtype": "float64", **spec})
    return Model.load(settings, rows=rows, max_model_len=max_model_len, report=lambda line: None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.make_folder(tmp_path_factory.mktemp("llama"))


def test_padded_ids_have_no_probability() -> None:
    logits = make_model().forward([0], [0], [TEXT], [len(TEXT)])
    assert logits.shape == (len(TEXT), tiny.VOCABULARY)
    assert torch.isneginf(logits[:, tiny.TOKENS :]).all()
    assert logits[:, : tiny.TOKENS].isfinite().all()


def test_logits_come_only_where_they_are_asked_for() -> None:
    whole = make_model().forward([2, 0], [0, 0], [TEXT, TEXT[:4]], [10, 4])
    some = make_model().forward([2, 0], [0, 0], [TEXT, TEXT[:4]], [1, 3])
    assert torch.equal(some, whole[[9, 11, 12, 13]])


def test_a_pass_may_ask_for_no_logits_at_all() -> None:
    model = make_model()
    assert model.forward([0], [0], [TEXT[:6]], [0]).shape == (0, tiny.VOCABULARY)
    assert model.cache.lengths[0] == 6
    expected = make_model().forward([0], [0], [TEXT], [4])
    assert (model.forward([0], [6], [TEXT[6:]], [4]) - expected).nan_to_num().abs().max() <= 1e-9


def test_a_start_before_the_length_rolls_the_row_back() -> None:
    model = make_model()
    model.forward([1], [0], [[*TEXT[:4], 99, 98, 97]], [0])
    logits = model.forward([1], [4], [TEXT[4:]], [6])
    assert model.cache.lengths == [0, len(TEXT), 0]
    expected = make_model().forward([1], [0], [TEXT], [6])
    assert (logits - expected).nan_to_num().abs().max() <= 1e-9


def test_a_gap_is_an_error_and_changes_nothing() -> None:
    model = make_model()
    model.forward([0], [0], [TEXT], [0])
    with pytest.raises(IndexError, match="row 1"):
        model.forward([0, 1], [3, 2], [[1], [1]], [1, 1])
    assert model.cache.lengths == [len(TEXT), 0, 0]


@pytest.mark.parametrize(("row", "ids"), [([0, 0], [[1], [1]]), ([0, 1], [[1], []])])
def test_a_pass_takes_distinct_rows_with_tokens(row: list[int], ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="distinct rows"):
        make_model().forward(row, [0, 0], ids, [0, 0])


@pytest.mark.parametrize("padded", [False, True])
def test_what_an_earlier_sequence_left_in_a_row_does_not_matter(padded: bool) -> None:
    model = make_model(padded=padded)
    model.forward([0, 1], [0, 0], [TEXT, TEXT], [0, 0])
    with torch.inference_mode():
        for layer in model.cache.row_layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys[0] = layer.values[0] = torch.nan
    model.forward([0], [0], [TEXT[:3]], [0])
    logits = model.forward([1, 0], [10, 3], [[7], TEXT[3:5]], [1, 2])
    fresh = make_model(padded=padded)
    fresh.forward([0, 1], [0, 0], [TEXT[:3], TEXT], [0, 0])
    assert torch.equal(logits, fresh.forward([1, 0], [10, 3], [[7], TEXT[3:5]], [1, 2]))


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_greedy_ids_are_those_of_generate(kind: str) -> None:
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0)
    network = tiny.make_network(kind)
    network.generation_config = settings
    ids = torch.tensor([TEXT])
    # The reference may emit padded ids: there it has no say.
    expected = network.generate(
        ids, attention_mask=torch.ones_like(ids), suppress_tokens=[*range(151, 160)]
    )[0].tolist()
    model, found = make_model(kind), list(TEXT)
    block = TEXT
    for _ in range(24):
        found.append(model.forward([0], [len(found) - len(block)], [block], [1]).argmax().item())
        block = found[-1:]
    assert found == expected


def test_logits_are_float32_or_wider(llama: str) -> None:
    for dtype, wide in (("bfloat16", torch.float32), ("float64", torch.float64)):
        model = load(llama, dtype=dtype)
        assert str(model.dtype) == f"torch.{dtype}"
        assert model.forward([0], [0], [TEXT], [1]).dtype == wide


def test_auto_is_the_type_that_the_weights_are_stored_in(llama: str) -> None:
    assert load(llama, dtype="auto").dtype == torch.float64


def test_loading_leaves_an_empty_cache(llama: str) -> None:
    model = load(llama, rows=5)
    assert model.cache.lengths == [0] * 5
    assert model.cache_bytes == 3 * 2 * 5 * 2 * 128 * 8 * 8  # layers, k and v, rows, heads, ...


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("max_model_len", [2, 3, 5, 7])
def test_a_cache_of_the_smallest_size_is_checked_too(
    llama: str, rows: int, max_model_len: int
) -> None:
    assert load(llama, rows=rows, max_model_len=max_model_len).max_model_len == max_model_len


def test_the_context_is_the_models_own_but_not_longer_than_4096(tmp_path: Path, llama: str) -> None:
    assert load(llama).max_model_len == 128
    folder = tiny.make_folder(tmp_path, max_position_embeddings=131072)
    assert load(folder, rows=1).max_model_len == 4096
    assert load(folder, rows=1, max_model_len=5000).max_model_len == 5000


def test_a_longer_context_than_the_models_own_is_refused_with_both_numbers(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 129, but .* has 128 positions"):
        load(llama, max_model_len=129)


def test_only_the_end_ids_of_the_generation_config_count_and_all_of_them(tmp_path: Path) -> None:
    folder = tiny.make_folder(tmp_path)
    assert load(folder).end_ids == (tiny.END_ID,)
    GenerationConfig(eos_token_id=[9, 7]).save_pretrained(folder)
    assert load(folder).end_ids == (7, 9)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 11}))
    assert load(folder).end_ids == (tiny.END_ID, 11)


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_the_footprint_is_what_loading_takes(tmp_path: Path, kind: str) -> None:
    folder = tiny.make_folder(tmp_path, kind)
    size = footprint(TargetSpec(model=folder, dtype="float32"))
    model = load(folder, dtype="float32", rows=2)
    assert size.weights_bytes == model.weights_bytes
    assert size.cache_bytes_per_token * 2 * size.max_model_len == model.cache_bytes
    assert size.num_layers == 3


def test_a_draft_model_loads_the_same_way(llama: str) -> None:
    spec = DraftModelSpec(method="draft_model", model=llama, dtype="float64")
    draft = Model.load(spec, rows=1, report=lambda line: None)
    assert draft.vocabulary.digest == make_model().vocabulary.digest


def test_progress_is_reported(llama: str) -> None:
    lines: list[str] = []
    Model.load(TargetSpec(model=llama), rows=1, report=lines.append)
    assert [line.split()[0] for line in lines] == ["loading", "checking"]


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = tiny.make_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"lacks 9 weights, first model\.layers\.3"):
        load(folder)


@pytest.mark.parametrize("content", ["{}", "not json", '{"model_type": "unheard-of"}'])
def test_a_broken_configuration_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot load the configuration") as refusal:
        load(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_gpus_that_are_not_there_are_refused(llama: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    with pytest.raises(ConfigError, match=r"num_gpus is 1, but torch sees no GPU .*driver"):
        load(llama, num_gpus=1)


def test_layers_that_hide_their_window_are_refused(tmp_path: Path) -> None:
    folder = tiny.make_folder(
        tmp_path, "qwen2_moe", use_sliding_window=True, sliding_window=8, max_window_layers=1,
        num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"Qwen2MoeForCausalLM.*windows \[8, None, None\]"):
        load(folder)


def test_a_model_that_runs_packed_but_wrong_is_refused(tmp_path: Path) -> None:
    folder = tiny.make_folder(tmp_path, "bert")  # attends in both directions
    with pytest.raises(ConfigError, match="BertLMHeadModel cannot be served: packed passes differ"):
        load(folder)


class Broken:
    """The passes of a right model, but for one mistake."""

    def __init__(self, mistake: str) -> None:
        self.model = make_model("mistral")
        self.mistake = mistake

    def run(self, row: list[int], start: list[int], ids: list[list[int]]) -> torch.Tensor:
        if self.mistake == "forgets to roll back":
            start = [self.model.cache.lengths[index] for index in row]
            ids = [block[: 64 - first] for block, first in zip(ids, start, strict=True)]
        if self.mistake == "mixes rows":
            row = [(index + len(row)) % 3 for index in row]
            start = [min(s, self.model.cache.lengths[i]) for i, s in zip(row, start, strict=True)]
        logits = self.model.forward(row, start, ids, [len(block) for block in ids])
        if self.mistake == "is wrong beyond the window" and max(start) > 8:
            logits = logits + torch.randn(logits.shape, dtype=logits.dtype) * 0.3
        return logits[:, : tiny.TOKENS] * (torch.nan if self.mistake == "overflows" else 1)

    def check(self) -> None:
        reference = tiny.make_network("mistral")

        def plain(ids: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                logits = reference(torch.tensor([ids]), use_cache=False).logits
            return logits[0, :, : tiny.TOKENS]

        check_rows(
            self.run, plain, range(3, tiny.TOKENS),
            num_rows=3, max_model_len=64, windows=[8], dtype=torch.float64,
        )  # fmt: skip


def test_the_self_check_passes_a_right_model() -> None:
    Broken("nothing").check()


@pytest.mark.parametrize(
    "mistake",
    ["forgets to roll back", "mixes rows", "is wrong beyond the window", "overflows"],
)
def test_the_self_check_catches_every_kind_of_mistake(mistake: str) -> None:
    with pytest.raises(ConfigError, match="packed passes differ"):
        Broken(mistake).check()


def test_ids_beyond_the_embedding_are_no_ids_though_the_tokenizer_knows_them() -> None:
    """Such an id would fail the whole pass, and with it the requests beside it."""
    model = Model(
        tiny.make_network("llama"),
        tiny.make_tokenizer(num_tokens=tiny.VOCABULARY + 10),
        rows=1,
        max_model_len=64,
    )
    assert model.vocabulary.size == tiny.VOCABULARY + 10
    assert model.describe().num_ids == tiny.VOCABULARY
