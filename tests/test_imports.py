"""Imports run one way, cluster <- actors <- deploy, and the pure core knows no machinery."""

import ast
from functools import cache
from pathlib import Path

import pytest

import outrider.actors
import outrider.cluster
import outrider.deploy

FOLDERS = {
    name: Path(str(package.__file__)).parent
    for name, package in (
        ("cluster", outrider.cluster),
        ("actors", outrider.actors),
        ("deploy", outrider.deploy),
    )
}
FILES = [path for folder in FOLDERS.values() for path in sorted(folder.glob("*.py"))]
MAY_IMPORT = {
    "cluster": {"cluster"},
    "actors": {"cluster", "actors"},
    "deploy": {"cluster", "actors", "deploy"},
}
PURE = [
    "attention", "byte_letters", "cache", "decide", "drafter", "intake", "latencies", "ledger",
    "loading", "lookup", "messages", "method_choice", "methods", "model", "pace", "pairing",
    "philox", "requests", "sampling", "scheduler", "selfcheck", "sequence", "shaping", "spelling",
    "stats", "text", "verify", "vocabulary",
]  # fmt: skip
SHELLS = ["__init__", "coordinator", "draft", "drafting", "streams", "target"]
CLOCKS_AND_MACHINERY = {"ray", "fastapi", "starlette", "httpx", "asyncio", "time", "datetime"}


@cache
def imports(path: Path) -> frozenset[str]:
    """Every name imported anywhere in a file, with dots: `a.b` and, of `from a import b`, `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def is_within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def imports_any(path: Path, modules: set[str]) -> set[str]:
    return {name for name in imports(path) for module in modules if is_within(name, module)}


def project_files(path: Path) -> set[Path]:
    """The files of the project that a file imports."""
    return {
        other
        for other in FILES
        for name in imports(path)
        if is_within(name, f"outrider.{other.parent.name}.{other.stem}")
    }


def reachable(path: Path) -> set[Path]:
    """A file and all of the project's that it imports, directly or not."""
    found, new = set(), {path}
    while new:
        found |= new
        new = {other for each in new for other in project_files(each)} - found
    return found


def test_every_file_is_seen_and_every_file_of_actors_is_pure_or_a_shell() -> None:
    assert {path.parent.name for path in FILES} == set(MAY_IMPORT)
    assert sorted(path.stem for path in FOLDERS["actors"].glob("*.py")) == sorted(PURE + SHELLS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_imports_run_one_way(path: Path) -> None:
    own = {name.split(".")[1] for name in imports(path) if is_within(name, "outrider")}
    assert own <= MAY_IMPORT[path.parent.name]
    # Under `outrider` there is nothing but the three, and they are never named without it.
    assert not imports_any(path, set(MAY_IMPORT))


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_knows_neither_ray_nor_http_nor_clocks(name: str) -> None:
    for path in reachable(FOLDERS["actors"] / f"{name}.py"):
        machinery = CLOCKS_AND_MACHINERY if path.parent.name == "actors" else {"ray", "fastapi"}
        assert not imports_any(path, machinery), path


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name == "cluster"], ids=lambda path: path.stem
)
def test_the_cluster_knows_no_tensors(path: Path) -> None:
    assert not imports_any(path, {"torch", "transformers", "accelerate", "tokenizers"})


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name != "deploy"], ids=lambda path: path.stem
)
def test_only_deploy_knows_http_and_metrics(path: Path) -> None:
    assert not imports_any(
        path, {"fastapi", "starlette", "prometheus_client", "ray.serve", "httpx", "rich"}
    )


def test_the_walk_sees_what_it_must(tmp_path: Path) -> None:
    """The checks above pass on nothing; this is what they are made of."""
    path = tmp_path / "x.py"
    path.write_text("def f():\n    from ray import serve\n    import time as t, a.b\n")
    assert imports(path) == {"ray.serve", "time", "a.b"}
    assert imports_any(path, {"ray"}) == imports_any(path, {"ray.serve"}) == {"ray.serve"}
    assert not imports_any(path, {"a.bc", "b"})
    relative = tmp_path / "y.py"
    relative.write_text("from . import x\n")
    with pytest.raises(AssertionError, match="a relative import"):
        imports(relative)
    coordinator = FOLDERS["actors"] / "coordinator.py"
    assert FOLDERS["actors"] / "philox.py" in reachable(coordinator)
    assert FOLDERS["cluster"] / "errors.py" in reachable(coordinator)
