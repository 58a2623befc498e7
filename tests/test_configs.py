"""The Serve configurations in configs/: what Serve and our settings accept, and what we refuse."""

import re
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from outrider.cluster.config import DraftModelSpec, load_settings
from outrider.cluster.errors import ConfigError
from outrider.cluster.placement import num_logical_cpus, plan, total
from outrider.deploy.serve_file import read_serve_file

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if "applications" in (yaml.safe_load(path.read_text()) or {})
)
MINIMAL = """
applications:
  - name: outrider
    route_prefix: /
    import_path: outrider.deploy.app:build
    args: {target: {model: /models/big}}
"""


def test_the_three_examples_are_there() -> None:
    assert {"laptop.yaml", "pair.yaml", "llama-70b.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_a_serve_configuration_and_holds_valid_settings(path: Path) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    settings = load_settings(path)
    assert read_serve_file(path).settings == settings
    assert [application.name for application in schema.applications] == ["outrider"]
    # A misspelt key outside of `args` would be accepted by Serve without a word.
    document = yaml.safe_load(path.read_text())
    assert document.keys() <= ServeDeploySchema.model_fields.keys()
    assert document["applications"][0].keys() == {"name", "route_prefix", "import_path", "args"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_drafts_hold_what_the_target_holds(path: Path) -> None:
    settings = load_settings(path)
    for draft in settings.drafts:
        if isinstance(draft, DraftModelSpec):
            assert draft.max_model_len == settings.target.max_model_len


def test_the_laptop_file_fits_two_cores_and_needs_no_hub() -> None:
    settings = load_settings(ROOT / "configs" / "laptop.yaml")
    assert num_logical_cpus(settings) <= 2
    assert total(plan(settings)).get("GPU", 0) == 0
    assert settings.target.model.startswith("pypi:")
    assert "==" in settings.target.model


def write(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text)
    return path


def test_host_and_port_come_from_the_flags_then_the_file_then_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert read_serve_file(path).root_url == "http://127.0.0.1:8000"
    path = write(tmp_path, "http_options: {host: 10.1.2.3, port: 9000}" + MINIMAL)
    assert read_serve_file(path).root_url == "http://10.1.2.3:9000"
    assert read_serve_file(path, "0.0.0.0", 7000).root_url == "http://127.0.0.1:7000"
    assert read_serve_file(path, "0.0.0.0").host == "0.0.0.0"


def test_other_http_options_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "http_options: {request_timeout_s: 60}" + MINIMAL)
    assert read_serve_file(path, port=1).http_options == {
        "host": "127.0.0.1",
        "port": 1,
        "request_timeout_s": 60,
    }


def test_a_route_prefix_is_part_of_the_url(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("route_prefix: /", "route_prefix: /llm"))
    assert read_serve_file(path).root_url == "http://127.0.0.1:8000/llm"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("import_path: outrider.deploy.app:build", "import_path: other:app"), "import_path must"),
        (("route_prefix: /", "route_prefix: null"), "route_prefix must begin"),
        (("route_prefix: /", "route_prefix: llm"), "route_prefix must begin"),
        (("args:", "deployments: [{name: Ingress}]\n    args:"), "are for `serve run`"),
        (("args:", "runtime_env: {env_vars: {A: b}}\n    args:"), "are for `serve run`"),
        (("{model: /models/big}", "{model: /models/big, modle: x}"), "target.modle: no such"),
        (("applications:", "http_options: {port: many}\napplications:"), "http_options.port"),
        (("applications:", "http_options: [1]\napplications:"), "http_options"),
    ],
)
def test_what_would_be_passed_over_in_silence_is_refused(
    change: tuple[str, str], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path, MINIMAL.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_serve_file(path)


def test_several_applications_are_left_to_serve(tmp_path: Path) -> None:
    second = MINIMAL.removeprefix("\napplications:").replace("outrider\n", "b\n", 1)
    path = write(tmp_path, MINIMAL + second.replace("route_prefix: /", "route_prefix: /b"))
    with pytest.raises(ConfigError, match="one application, this file has 2"):
        read_serve_file(path)


def test_what_our_commands_would_pass_over_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(f"proxy_location: Disabled\n{MINIMAL}")
    with pytest.raises(ConfigError, match="proxy_location: only `serve run` reads this"):
        read_serve_file(file)
