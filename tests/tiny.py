"""Tiny random models and tokenizers in a folder: real architectures, no download.

Weights are wide (initializer_range 0.3), so that attention matters and logits spread.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCABULARY = 160  # rows of logits
TOKENS = 151  # ids that stand for a token; the rest are padded
END_ID = 2

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": END_ID,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 8}
_OWN: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen2_window": {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {},
    "mistral": _WINDOW,
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
ARCHITECTURES = tuple(_OWN)


def make_config(kind: str, **changes: object) -> PreTrainedConfig:
    """The configuration of a tiny model of this kind (a model type, or one with a suffix)."""
    settings = {**_COMMON, **_OWN.get(kind, {}), **changes}
    if kind in ("gpt2", "gpt_neox", "opt"):  # every head has its own keys and values
        del settings["num_key_value_heads"], settings["head_dim"]
    return CONFIG_MAPPING[kind.removesuffix("_window")](**settings)


def make_network(kind: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny float64 network with random weights."""
    torch.manual_seed(seed)
    config = make_config(kind, **changes)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    network.set_experts_implementation("eager")  # torch's grouped product has no float64
    return network


def make_tokenizer(num_tokens: int = TOKENS) -> PreTrainedTokenizerFast:
    """A tokenizer of words w3 w4 ... and three special tokens."""
    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, num_tokens))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def make_folder(folder: Path, kind: str = "llama", seed: int = 0, **changes: object) -> str:
    """Save a tiny model and its tokenizer to `folder`; returns it as a model reference."""
    make_network(kind, seed, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)
