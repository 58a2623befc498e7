"""Check: what a configuration file would start, and what that needs, without starting it.

Reads the models' configurations and tokenizers, never their weights.
"""

import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.actors.loading import footprint
from outrider.actors.messages import LoadReport
from outrider.actors.pairing import PairReport, has_same_vocabulary, pair_up
from outrider.actors.spelling import TokenizerData
from outrider.actors.vocabulary import Vocabulary, load_tokenizer
from outrider.cluster.config import DraftModelSpec, PromptLookupSpec, Settings, TargetSpec
from outrider.cluster.errors import ConfigError
from outrider.cluster.models import resolve
from outrider.cluster.placement import Placement, plan, total
from outrider.deploy.serve_file import read_serve_file

_MIB = 1 << 20


@dataclass(frozen=True)
class Need:
    """One actor: its place, its model, and the bytes that it will hold."""

    placement: Placement
    spec: TargetSpec | DraftModelSpec
    architecture: str
    num_logits: int
    max_model_len: int
    weights_bytes: int
    cache_bytes: int  # keys and values of all rows at full length


def check(path: str | Path, console: Console) -> None:
    """Validate a file and print its plan; ConfigError says what cannot work."""
    file = read_serve_file(path)
    settings = file.settings
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the reason comes as a sentence
    needs = size_up(settings)
    pairs = _examine_pairs(needs)
    console.print(f"{settings.model_name} at {file.root_url}/v1", highlight=False)
    console.print(_table(needs))
    lengths = " and ".join(f"{length:,}" for length in {need.max_model_len: None for need in needs})
    console.print(f"KV cache: {settings.target.max_num_seqs} rows of {lengths} tokens")
    for spec in settings.drafts:
        if isinstance(spec, PromptLookupSpec):
            console.print(f"draft {spec.name}: prompt lookup, runs in the coordinator")
        else:
            console.print(f"draft {spec.name}: {pairs[spec.name]}", highlight=False)


def size_up(settings: Settings) -> list[Need]:
    """What every actor of the plan needs, target ranks first."""
    num_rows = settings.target.max_num_seqs  # a draft keeps a copy of every running sequence
    placements = iter(plan(settings))
    needs = []
    for spec in (settings.target, *settings.drafts):
        if isinstance(spec, PromptLookupSpec):
            continue
        model = footprint(spec)
        num_ranks = spec.tensor_parallel_size if isinstance(spec, TargetSpec) else 1
        num_actors = num_ranks if isinstance(spec, TargetSpec) else spec.replicas
        cache_bytes = num_rows * model.max_model_len * model.cache_bytes_per_token
        needs += [
            Need(
                placement,
                spec,
                model.architecture,
                model.num_logits,
                model.max_model_len,
                model.weights_bytes // num_ranks,
                cache_bytes // num_ranks,
            )
            for placement in itertools.islice(placements, num_actors)
        ]
    return needs


def _examine_pairs(needs: list[Need]) -> dict[str, PairReport]:
    """How each neural draft speaks to the target, as it will be found at start."""
    theirs = _report_tokenizer(needs[0])
    pairs: dict[str, PairReport] = {}
    for need in needs:
        spec = need.spec
        if isinstance(spec, TargetSpec) or spec.name in pairs:
            continue
        own = _report_tokenizer(need)
        try:
            pairs[spec.name] = (
                PairReport(("same",))
                if has_same_vocabulary(theirs, own)
                else pair_up(theirs, own, spec.vocabulary)[1]
            )
        except ConfigError as error:
            raise ConfigError(f"draft {spec.name} cannot draft for the target: {error}") from None
    return pairs


def _report_tokenizer(need: Need) -> LoadReport:
    spec = need.spec
    tokenizer = load_tokenizer(resolve(spec.model, spec.revision), spec.tokenizer)
    vocabulary, data = Vocabulary.of(tokenizer), TokenizerData.of(tokenizer)
    return LoadReport(vocabulary, need.num_logits, (), need.max_model_len, tokenizer=data)


def _table(needs: list[Need]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("actor", "model", "dtype"):
        table.add_column(column, no_wrap=True)
    table.add_column("labels", overflow="fold")
    for column in ("CPUs", "GPUs", "weights", "KV cache"):
        table.add_column(column, justify="right", no_wrap=True)
    for need in needs:
        placement = need.placement
        table.add_row(
            placement.role,
            need.architecture,
            need.spec.dtype,
            ", ".join(f"{key}={value}" for key, value in placement.labels.items()),
            f"{placement.num_cpus:g}",
            f"{placement.num_gpus:g}",
            _mib(need.weights_bytes),
            _mib(need.cache_bytes),
        )
    asked = total(need.placement for need in needs)
    table.add_section()
    table.add_row(
        "total", "", "", "", f"{asked.get('CPU', 0):g}", f"{asked.get('GPU', 0):g}",
        _mib(sum(need.weights_bytes for need in needs)),
        _mib(sum(need.cache_bytes for need in needs)),
    )  # fmt: skip
    return table


def _mib(amount: int) -> str:
    return f"{amount / _MIB:,.0f} MiB"
