"""From a model's files to a network ready to run: configuration, refusals, weights.

What cannot be served is refused before any weight is read, by one ConfigError sentence that names
the architecture: state that cannot be rolled back, attention that does not go through
transformers' interface, head counts that do not divide. What may still be silently wrong after
this is for the self-check. Knows no rows and no rounds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from outrider.cluster.config import DraftModelSpec, DType, TargetSpec
from outrider.cluster.errors import ConfigError
from outrider.cluster.models import ModelFiles, resolve

Spec = TargetSpec | DraftModelSpec
DEFAULT_MAX_MODEL_LEN = 4096
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Footprint:
    """What a model needs, by its configuration alone. Keys and values have the weights' type."""

    architecture: str
    num_layers: int
    num_logits: int  # rows of the embedding
    max_model_len: int
    weights_bytes: int  # of the whole model: a rank holds about 1 / tensor_parallel_size of it
    cache_bytes_per_token: int  # likewise, for one token of one row


def footprint(spec: Spec) -> Footprint:
    """Size up the model of `spec` without its weights; refuses what loading would refuse."""
    files = resolve(spec.model, spec.revision)
    config = load_config(files)
    tp_size = spec.tensor_parallel_size if isinstance(spec, TargetSpec) else 1
    check_supported(config, tp_size)
    text = config.get_text_config(decoder=True)
    dtype = resolve_dtype(spec.dtype, files) or cast(torch.dtype | None, config.dtype)
    dtype = dtype or torch.float32
    build: Any = AutoModelForCausalLM.from_config  # transformers leaves it untyped
    with _quiet(), torch.device("meta"):
        network = build(config, dtype=dtype)
    heads, kv_heads = _head_counts(text)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    per_head = 2 * head_dim
    if hasattr(text, "qk_nope_head_dim"):  # latent attention caches expanded keys and values
        kv_heads = heads
        per_head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    return Footprint(
        architecture=name_architecture(config),
        num_layers=text.num_hidden_layers,
        num_logits=text.vocab_size,
        max_model_len=limit_context(config, spec.max_model_len),
        weights_bytes=count_bytes(network),
        cache_bytes_per_token=text.num_hidden_layers * kv_heads * per_head * dtype.itemsize,
    )


def load_config(files: ModelFiles) -> PreTrainedConfig:
    """The model's configuration; ConfigError if there is none or it is invalid."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**files.arguments())
    except Exception as error:  # transformers raises whatever the file made it stumble over
        raise ConfigError(
            f"cannot load the configuration of the model {files}: {_first_line(error)}"
        ) from error
    return config


def load_generation_eos(files: ModelFiles) -> object:
    """End ids of the model's generation config (an id or a list); None if it has no such file."""
    if files.gguf_file is not None:
        return None
    find: Any = cached_file  # transformers types it in part
    try:
        path = find(
            files.path_or_id,
            GENERATION_CONFIG_NAME,
            revision=files.revision,
            _raise_exceptions_for_missing_entries=False,
        )
        if path is None:
            return None
        config = GenerationConfig.from_pretrained(
            files.path_or_id, revision=files.revision or "main"
        )
    except Exception as error:  # a broken file must not pass for none: other ids would end answers
        raise ConfigError(
            f"cannot load the generation config of {files}: {_first_line(error)}"
        ) from error
    return cast(object, config.eos_token_id)


def name_architecture(config: PreTrainedConfig) -> str:
    """The class name that the checkpoint gives, else its model type."""
    names = config.architectures
    return str(names[0]) if names else str(config.model_type)


def check_supported(config: PreTrainedConfig, tp_size: int = 1) -> None:
    """ConfigError unless the model can be run packed, rolled back, and split over `tp_size`."""
    name = name_architecture(config)
    reason = _find_obstacle(config)
    if reason is not None:
        raise ConfigError(f"{name} ({config.model_type}) cannot be served: {reason}")
    if tp_size == 1:
        return
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(
            f"{name} has no tensor-parallel plan in transformers: instead of "
            f"tensor_parallel_size {tp_size} use device_map: auto, one actor with several devices"
        )
    heads, kv_heads = _head_counts(text)
    if heads % tp_size or kv_heads % tp_size:
        raise ConfigError(
            f"{name} has {heads} attention heads and {kv_heads} key-value heads: "
            f"tensor_parallel_size {tp_size} must divide both"
        )


def _find_obstacle(config: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if network is None:
        return "transformers has no causal language model of this type"
    if network._is_stateful:
        return "its recurrent state cannot be rolled back"
    if getattr(config, "alibi", False) or not network._supports_attention_backend:
        return (
            "its attention (ALiBi or legacy code) does not go through transformers' attention "
            "interface, so rows cannot be packed"
        )
    try:
        kinds = set(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])
    except Exception as error:  # configurations without the usual fields
        return f"its layers are unknown: {_first_line(error)}"
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        return f"its layers of type {', '.join(unknown)} have no per-row rollback"
    return None


def list_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, None for full attention."""
    _, kinds = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return [kind.get("sliding_window") for kind in kinds]


def _head_counts(text: PreTrainedConfig) -> tuple[int, int]:
    heads: int = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads


def limit_context(config: PreTrainedConfig, asked: int | None) -> int:
    """The longest context served, in tokens; ConfigError if more is asked than the model has."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    reason = f"{name_architecture(config)} has {limit} positions"
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # transformers switches the factors for a whole pass by its largest position: beyond the
        # border a row's logits would depend on the rows beside it.
        border = rope.get("original_max_position_embeddings") or limit
        if limit is None or border < limit:
            limit = border
            reason = f"the longrope factors of {name_architecture(config)} change at {limit}"
    if asked is None:
        return min(limit or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    if limit is not None and asked > limit:
        raise ConfigError(
            f"max_model_len is {asked}, but {reason}: lower max_model_len to {limit} or less"
        )
    return asked


def resolve_dtype(dtype: DType, files: ModelFiles) -> torch.dtype | None:
    """The type to load in; of "auto" None = as stored, float32 for a GGUF file (dequantised)."""
    if dtype == "auto":
        return None if files.gguf_file is None else torch.float32
    return _DTYPES[dtype]


def load_network(
    spec: Spec, files: ModelFiles, config: PreTrainedConfig, tp_size: int
) -> PreTrainedModel:
    """Read the weights, onto the devices that `spec` and the process group (tp_size > 1) say."""
    if spec.num_gpus > 0 and not torch.cuda.is_available():
        raise ConfigError(
            f"num_gpus is {spec.num_gpus:g}, but torch sees no GPU on this machine, or its driver "
            "is older than torch's CUDA needs"
        )
    load: Any = AutoModelForCausalLM.from_pretrained  # transformers types it in part
    try:
        with _quiet():
            network, info = load(
                **files.arguments(),
                config=config,
                dtype=resolve_dtype(spec.dtype, files) or "auto",
                output_loading_info=True,
                **_placement(spec, tp_size),
                **_numerics(spec, files),
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the weights of {files} do not fit: {_first_line(error)}") from error
    except Exception as error:  # transformers raises whatever the files made it stumble over
        raise ConfigError(f"cannot load the model {files}: {_first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{files} lacks {len(missing)} weights, first {missing[0]}")
    if tp_size > 1 and network.tp_size != tp_size:
        raise ConfigError(f"transformers did not shard {files} over {tp_size} ranks")
    return cast(PreTrainedModel, network.eval().requires_grad_(False))


def _placement(spec: Spec, tp_size: int) -> dict[str, object]:
    if tp_size > 1:
        return {"distributed_config": DistributedConfig(tp_size=tp_size)}
    if isinstance(spec, TargetSpec) and spec.device_map is not None:
        return {
            "device_map": spec.device_map,
            "max_memory": spec.max_memory,
            "offload_folder": spec.offload_folder,
        }
    return {"device_map": {"": "cuda:0"}} if spec.num_gpus > 0 else {}


def _numerics(spec: Spec, files: ModelFiles) -> dict[str, object]:
    numerics: dict[str, object] = {}
    if files.gguf_file is not None:
        numerics["quantization_config"] = GgufConfig(dequantize=True)
    if spec.dtype == "float64":
        numerics["experts_implementation"] = "eager"  # torch's grouped product has no float64
    return numerics


def count_bytes(network: torch.nn.Module) -> int:
    """Bytes of the parameters; under tensor parallelism of this rank's shards."""
    total = 0
    for parameter in network.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        total += local.numel() * local.element_size()
    return total


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' notices and progress bars out of a server's output."""
    logs: Any = transformers_logging  # transformers leaves it untyped
    verbosity = logs.get_verbosity()
    has_bars = logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if has_bars:
            logs.enable_progress_bar()
