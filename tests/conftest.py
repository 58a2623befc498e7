"""Fixtures that cost seconds: one Ray for the whole session, and tiny models in folders."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # before Ray is imported
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import ray
import torch

from .tiny import make_folder, make_network, make_tokenizer

torch.set_num_threads(1)
# A shared machine may stall any example; a failure must come back on the next run.
hypothesis.settings.register_profile("outrider", deadline=None, derandomize=True)
hypothesis.settings.load_profile("outrider")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray with plenty of logical CPUs."""
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
    )
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Folders:
    """Tiny model folders: the target, a noisy copy of it, and one of another vocabulary."""

    target: str
    noisy: str
    foreign: str


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Tiny Llamas, saved once."""
    base = tmp_path_factory.mktemp("models")
    noisy = make_network("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in noisy.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter += 0.03 * noise
    noisy.save_pretrained(base / "noisy")
    make_tokenizer().save_pretrained(base / "noisy")
    make_network("llama", seed=3).save_pretrained(base / "foreign")
    make_tokenizer(num_tokens=140).save_pretrained(base / "foreign")
    return Folders(
        target=make_folder(base / "target"),
        noisy=str(base / "noisy"),
        foreign=str(base / "foreign"),
    )
