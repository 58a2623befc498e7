"""Two ways to spread a model: tensor-parallel ranks, and accelerate's device map."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from outrider.actors.model import Model
from outrider.cluster.config import TargetSpec

from . import tiny

PROMPTS = [[5, 17, 140, 9, 77, 23, 8], [61, 102], [44, 3, 90, 12]]
KINDS = ("llama", "gemma2")


def generate(model: Model, num_tokens: int = 6) -> list[list[int]]:
    """Greedy ids of all prompts together: ragged prefill, then blocks with a wrong guess."""
    rows = [2, 0, 1]
    texts = [list(prompt) for prompt in PROMPTS]
    logits = model.forward(rows, [0, 0, 0], PROMPTS, [1, 1, 1])
    for _ in range(num_tokens):
        for text, token in zip(texts, logits.argmax(dim=-1).tolist(), strict=True):
            text.append(token)
        starts = [len(text) - 1 for text in texts]
        logits = model.forward(rows, starts, [[text[-1], 3, 4] for text in texts], [3, 3, 3])[::3]
    return texts


def load(folder: str, tp_size: int = 1, **spec: object) -> Model:
    settings = TargetSpec.model_validate(
        {"model": folder, "dtype": "float64", "tensor_parallel_size": tp_size, **spec}
    )
    return Model.load(settings, rows=3, tp_size=tp_size, report=lambda line: None)


def run_rank(rank: int, folder: str, port: int) -> None:
    """One rank: saves what it generated, and how much memory it took."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}"
    )
    found: dict[str, Any] = {}
    for kind in KINDS:
        model = load(f"{folder}/{kind}", tp_size=2)
        found[kind] = (generate(model), model.weights_bytes, model.cache_bytes)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def free_port() -> int:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


def test_two_ranks_give_the_ids_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        tiny.make_folder(tmp_path / kind, kind)
    torch.multiprocessing.spawn(run_rank, (str(tmp_path), free_port()), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for kind in KINDS:
        whole = load(str(tmp_path / kind))
        expected = generate(whole)
        for ids, weights_bytes, cache_bytes in (rank[kind] for rank in ranks):
            assert ids == expected
            assert weights_bytes < 0.8 * whole.weights_bytes  # really shared
            assert cache_bytes * 2 == whole.cache_bytes


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_a_model_offloaded_to_disk_gives_the_ids_of_one_in_memory(
    tmp_path: Path, kind: str
) -> None:
    torch.set_num_threads(1)
    folder = tiny.make_folder(tmp_path / "model", kind)
    spread = load(
        folder, device_map="auto", max_memory={"cpu": 150_000}, offload_folder=str(tmp_path / "off")
    )
    places = set(map(str, spread._network.hf_device_map.values()))
    assert places == {"cpu", "disk"}
    assert generate(spread) == generate(load(folder))
