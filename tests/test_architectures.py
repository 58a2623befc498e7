"""Every supported architecture, both attention forms: ragged rounds equal a plain forward."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from outrider.actors.loading import check_supported, limit_context
from outrider.actors.model import Model
from outrider.cluster.errors import ConfigError

from . import tiny

torch.set_num_threads(1)
LENGTH = 40  # five times the windows of the tiny models
NUM_TEXTS = 4


def _wide_attention(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None,
                    **kwargs):  # fmt: skip
    """transformers' eager attention with a softmax in the model's own type, not float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("wide_reference", _wide_attention)
AttentionMaskInterface.register("wide_reference", eager_mask)


def make_reference(kind: str) -> PreTrainedModel:
    network = tiny.make_network(kind)
    network.set_attn_implementation("wide_reference")
    return network


def make_model(kind: str, padded: bool) -> Model:
    network = tiny.make_network(kind)
    return Model(network, tiny.make_tokenizer(), rows=6, max_model_len=LENGTH, padded=padded)


def make_texts() -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(3, tiny.TOKENS) for _ in range(LENGTH)] for _ in range(NUM_TEXTS)]


def run_ragged(
    forward: Callable[..., torch.Tensor], texts: list[list[int]], seed: int
) -> list[tuple[int, int, torch.Tensor]]:
    """Feed all texts in ragged rounds over scrambled rows; returns (text, position, logits).

    Rows join at different times; blocks are prefill chunks, single tokens, and blocks whose tail
    is wrong and rolled back by the next round.
    """
    chance = random.Random(seed)
    rows = chance.sample(range(6), len(texts))
    lengths = [0] * len(texts)
    found = []
    number = 0
    while min(lengths) < LENGTH:
        number += 1
        waiting = [i for i in range(len(texts)) if lengths[i] < LENGTH and number > 2 * i]
        chosen = chance.sample(waiting, chance.randint(min(1, len(waiting)), len(waiting)))
        if not chosen:
            continue
        ids, right, kept = [], [], []
        for text in chosen:
            start = lengths[text]
            block = texts[text][start : start + chance.choice([1, 1, 2, 5, 9, 14])]
            good = len(block) if chance.random() < 0.6 else chance.randint(1, len(block))
            block = block[:good] + [chance.randrange(3, tiny.TOKENS) for _ in block[good:]]
            ids.append(block)
            right.append(good)
            kept.append(chance.choice([len(block), len(block), 1, 0]))
        starts = [lengths[text] for text in chosen]
        logits = forward([rows[text] for text in chosen], starts, ids, kept)
        assert logits.shape == (sum(kept), tiny.VOCABULARY)
        parts = torch.split(logits, kept)
        for text, start, block, good, part in zip(chosen, starts, ids, right, parts, strict=True):
            first = start + len(block) - len(part)
            found += [
                (text, first + i, row) for i, row in enumerate(part) if first + i < start + good
            ]
            lengths[text] = start + good
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_ragged_rounds_give_the_logits_of_a_plain_forward(kind: str, padded: bool) -> None:
    texts = make_texts()
    reference = make_reference(kind)
    with torch.inference_mode():
        expected = [reference(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    model = make_model(kind, padded)
    for seed in range(2):  # the second time over rows that hold the first's leftovers
        found = run_ragged(model.forward, texts, seed)
        assert len(found) > LENGTH  # not vacuous
        for text, position, logits in found:
            want = expected[text][position, : tiny.TOKENS]
            assert (logits[: tiny.TOKENS] - want).abs().max() <= 1e-9
            assert logits.argmax() == want.argmax()


@pytest.mark.parametrize("kind", ["qwen2_window", "mistral", "gemma2", "gemma3_text"])
def test_the_windows_of_the_tiny_models_matter(kind: str) -> None:
    text = torch.tensor([make_texts()[0]])
    windowed, full = make_reference(kind), make_reference(kind)
    for module in full.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = None
    full.config.sliding_window = LENGTH
    with torch.inference_mode():
        difference = windowed(text, use_cache=False).logits - full(text, use_cache=False).logits
    assert difference[0, 8:].abs().max() > 0.1


REFUSED = {
    "mamba": "recurrent state cannot be rolled back",
    "qwen3_next": "recurrent state cannot be rolled back",
    "jamba": "recurrent state cannot be rolled back",
    "bloom": "ALiBi or legacy code",
    "falcon": "ALiBi or legacy code",
    "mpt": "ALiBi or legacy code",
    "gpt_neo": "ALiBi or legacy code",
    "stablelm": "ALiBi or legacy code",
    "t5": "encoder-decoder",
    "whisper": "encoder-decoder",
    "llama4_text": "layers of type chunked_attention have no per-row rollback",
    "gemma3n_text": "layers of type dummy have no per-row rollback",
    "clip": "no causal language model",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_rolled_back_or_packed_is_refused_by_name(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    with pytest.raises(ConfigError, match=REFUSED[model_type]) as refusal:
        check_supported(config)
    assert model_type in str(refusal.value)


def test_alibi_is_refused_where_it_is_an_option() -> None:
    with pytest.raises(ConfigError, match="ALiBi"):
        check_supported(CONFIG_MAPPING["falcon"](alibi=True))


def test_head_counts_must_divide_by_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"4 attention heads and 2 key-value heads.*size 4"):
        check_supported(tiny.make_config("llama"), tp_size=4)


def test_a_model_without_a_tensor_parallel_plan_is_pointed_to_device_map() -> None:
    with pytest.raises(ConfigError, match=r"no tensor-parallel plan.*device_map: auto"):
        check_supported(tiny.make_config("gpt2"), tp_size=2)


@pytest.mark.parametrize("asked", [None, 32, 33])
def test_longrope_is_served_up_to_the_border_where_its_factors_change(asked: int | None) -> None:
    """transformers switches them for a whole pass, so that rows would depend on one another."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = tiny.make_config(
        "llama", rope_parameters={**rope, "original_max_position_embeddings": 32}
    )
    if asked == 33:
        with pytest.raises(ConfigError, match=r"longrope factors of .* change at 32"):
            limit_context(config, asked)
    else:
        assert limit_context(config, asked) == 32
