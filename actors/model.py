"""A language model over rows of a KV cache: load it, run ragged blocks, get logits.

One forward takes, for every row, any number of tokens from any place on: a prefill chunk, a block
to verify and a single token are the same thing. Positions are absolute, so rollback is implicit:
a row's length becomes where its new tokens end. Padded ids get no probability. What it was loaded
from is checked: see `loading` and `selfcheck`. Knows no sequences and no sampling.
"""

from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.actors.attention import ATTENTION, Pass, register, running
from outrider.actors.cache import RowCache
from outrider.actors.loading import (
    Spec,
    check_supported,
    count_bytes,
    limit_context,
    list_windows,
    load_config,
    load_generation_eos,
    load_network,
    name_architecture,
)
from outrider.actors.messages import LoadReport
from outrider.actors.selfcheck import check_rows
from outrider.actors.spelling import TokenizerData
from outrider.actors.vocabulary import Vocabulary, find_end_ids, load_tokenizer
from outrider.cluster.errors import ConfigError
from outrider.cluster.models import Report, log_report, resolve


class Model:
    """A loaded model and its KV cache of `rows` rows."""

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rows: int,
        max_model_len: int,
        end_ids: tuple[int, ...] = (),
        padded: bool | None = None,
    ) -> None:
        """Take over `network`. `padded`: how attention runs; None = padded except on CPUs."""
        register()
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary.of(tokenizer)
        self.end_ids = end_ids
        self.max_model_len = max_model_len
        self.device = next(
            (p.device for p in network.parameters() if p.device.type != "meta"),
            torch.device("cpu"),  # all weights offloaded
        )
        self.dtype: torch.dtype = network.dtype
        self.num_logits = cast(torch.Tensor, network.get_output_embeddings().weight).shape[0]
        self.weights_bytes = count_bytes(network)
        self._windows = self._limit_windows(list_windows(network.config))
        self.cache = RowCache(len(self._windows), rows, max_model_len)
        self._network = network
        self._plain_attention = network.config._attn_implementation
        self._padded = self.device.type != "cpu" if padded is None else padded
        self._padded_ids = torch.tensor(self.vocabulary.padded_ids(self.num_logits)).long()
        network.set_attn_implementation(ATTENTION)

    @classmethod
    def load(
        cls,
        spec: Spec,
        *,
        rows: int,
        max_model_len: int | None = None,
        tp_size: int = 1,
        report: Report = log_report,
    ) -> "Model":
        """Load what `spec` names, and check that it can be served; ConfigError if not.

        `max_model_len` goes before that of `spec`; None in both = the model's own, at most 4096.
        With `tp_size` > 1 every rank of an initialised torch.distributed world of that size calls
        this, and from then on all run the same passes in the same order.
        """
        files = resolve(spec.model, spec.revision, report)
        config = load_config(files)
        check_supported(config, tp_size)
        limit = limit_context(config, max_model_len or spec.max_model_len)
        tokenizer = load_tokenizer(files, spec.tokenizer, report)
        report(f"loading the weights of {spec.model}")
        network = load_network(spec, files, config, tp_size)
        text = config.get_text_config(decoder=True)
        model = cls(
            network,
            tokenizer,
            rows=rows,
            max_model_len=limit,
            end_ids=find_end_ids(
                load_generation_eos(files),
                text.to_diff_dict().get("eos_token_id"),
                tokenizer.eos_token_id,
            ),
        )
        report(f"checking {spec.model}: ragged cached passes against plain ones")
        model.check()
        return model

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache on this rank."""
        return self.cache.allocated_bytes

    def describe(self) -> LoadReport:
        """What was loaded, for the coordinator."""
        return LoadReport(
            self.vocabulary,
            self.num_logits,
            self.end_ids,
            self.max_model_len,
            self.weights_bytes,
            self.cache_bytes,
            TokenizerData.of(self.tokenizer),
        )

    def forward(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> torch.Tensor:
        """Run `ids[i]` on row `row[i]` (all distinct) from position `start[i]` on.

        Returns the logits after each of the last `num_logits[i]` tokens of every block, in order:
        `[sum(num_logits), vocabulary]`, float32 (float64 of a float64 model), -inf at padded ids.
        Row lengths become `start[i] + len(ids[i])`. An IndexError if a block begins beyond its
        row's length or does not fit.
        """
        logits = self._run(row, start, ids, num_logits)
        padded = self._padded_ids.to(logits.device)
        with torch.inference_mode():
            return logits.index_fill_(1, padded, float("-inf"))

    def _run(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> torch.Tensor:
        counts = [len(block) for block in ids]
        if len(set(row)) < len(row) or 0 in counts:
            raise ValueError("a pass takes distinct rows with at least one token each")
        self.cache.begin(row, start, counts)
        positions = [s + i for s, n in zip(start, counts, strict=True) for i in range(n)]
        keep = [i >= n - k for n, k in zip(counts, num_logits, strict=True) for i in range(n)]
        is_empty = not any(keep)
        if is_empty:
            keep[-1] = True  # heads do not take empty input everywhere; left out below
        current = Pass(row, start, counts, self._padded)
        with torch.inference_mode(), running(current):
            logits = self._network(
                input_ids=self._packed([token for block in ids for token in block]),
                position_ids=self._packed(positions),
                use_cache=True,
                logits_to_keep=self._packed(keep),
                cache=self.cache,
            ).logits
            # Some architectures do not tell the attention that a layer has a sliding window.
            if (announced := self._limit_windows(current.windows)) != self._windows:
                raise ValueError(f"its layers have windows {self._windows}, announce {announced}")
            self.cache.finish(row, counts)
            return _widen(logits[:0] if is_empty else logits)

    def _limit_windows(self, windows: list[int | None]) -> list[int | None]:
        return [w if w is not None and w < self.max_model_len else None for w in windows]

    def check(self) -> None:
        """ConfigError unless ragged cached passes agree with plain ones. Empties the cache."""
        name = name_architecture(self._network.config)

        def run(row: list[int], start: list[int], ids: list[list[int]]) -> torch.Tensor:
            return self._run(row, start, ids, [len(block) for block in ids])

        try:
            check_rows(
                run,
                self._run_plainly,
                [index for index in self.vocabulary.tokens if index < self.num_logits],
                num_rows=len(self.cache.lengths),
                max_model_len=self.max_model_len,
                windows=[window for window in self._windows if window is not None],
                dtype=self.dtype,
            )
        except ConfigError as error:
            raise ConfigError(f"{name} cannot be served: {error}") from None
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the KV cache of {len(self.cache.lengths)} rows of {self.max_model_len} tokens "
                "does not fit beside the weights: lower max_num_seqs or max_model_len"
            ) from error
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{name} does not run in packed passes: {error}") from error
        finally:
            self.cache.lengths = [0] * len(self.cache.lengths)

    def _packed(self, values: list[int] | list[bool]) -> torch.Tensor:
        return torch.tensor([values]).to(self.device)

    def _run_plainly(self, ids: list[int]) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` as the model gives them without our cache and attention."""
        self._network.set_attn_implementation(self._plain_attention)
        try:
            with torch.inference_mode():
                logits = self._network(input_ids=self._packed(ids), use_cache=False).logits
                return _widen(logits[0])
        finally:
            self._network.set_attn_implementation(ATTENTION)


def _widen(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
