"""The wheel: built from a copy, installed elsewhere, imported from another folder."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import outrider.cluster

ROOT = Path(str(outrider.cluster.__file__)).parents[1]
FOLDERS = ("cluster", "actors", "deploy")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: a build leaves folders behind."""
    copy = tmp_path_factory.mktemp("sources") / "outrider"
    copy.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    out = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


def test_the_wheel_holds_the_three_packages_whole_and_typed_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if ".dist-info/" in name}
    sources = {
        f"outrider/{folder}/{path.name}"
        for folder in FOLDERS
        for path in (ROOT / folder).iterdir()
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert names - info == sources
    assert {f"outrider/{folder}/py.typed" for folder in FOLDERS} <= names
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_the_installed_packages_are_imported_from_another_folder(
    installed: Path, tmp_path: Path
) -> None:
    modules = [f"outrider.{folder}" for folder in FOLDERS] + ["outrider.cluster.config"]
    script = "import " + ", ".join(modules) + "".join(f"; print({m}.__file__)" for m in modules)
    # Safe path: neither this folder nor the script's may hide the installed packages.
    printed = run("-P", "-c", script, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert len(printed) == len(modules)
    assert all(Path(file).is_relative_to(installed) for file in printed), printed


def test_the_console_script_is_a_function_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    (info,) = installed.glob("outrider-*.dist-info")
    entries = configparser.ConfigParser()
    entries.read(info / "entry_points.txt")
    assert entries["console_scripts"]["outrider"] == "outrider.deploy.cli:main"
    script = (
        "from importlib.metadata import distribution;"
        "(e,) = distribution('outrider').entry_points.select(group='console_scripts');"
        "main = e.load(); print(main.__code__.co_filename)"
    )
    file = run("-P", "-W", "ignore", "-c", script, cwd=tmp_path, PYTHONPATH=str(installed)).strip()
    assert file == str(installed / "outrider" / "deploy" / "cli.py")
