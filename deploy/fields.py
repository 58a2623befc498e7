"""Fields of OpenAI's and vLLM's API that are not served: which may be dropped, which must not.

A field that cannot change the text is ignored. Any other is dropped at its neutral value, where
it asks for nothing, and refused otherwise, as is a field that neither API has.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from outrider.cluster.errors import RequestError

# Bookkeeping, scheduling, caching and hints: the text is the same whatever they say.
IGNORED = frozenset(
    {
        # OpenAI
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "user",
        # vLLM
        "cache_salt", "priority", "request_id", "return_mm_kwargs", "return_token_offsets",
        "routed_experts_prompt_start", "session_id", "stream_interval", "truncation_side",
    }
)  # fmt: skip

# Not served, with the values (besides null) at which they ask for nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (False,),  # 0 asks for those of the prompt's own tokens
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": ({},),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

COMPLETION_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_special_tokens": (True,),
    "suffix": ("",),
}
CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_special_tokens": (False,),
}


def screen(
    body: Mapping[str, Any],
    served: Iterable[str],
    neutral: Mapping[str, tuple[object, ...]],
) -> dict[str, Any]:
    """The fields of `body` that are `served` and not null; RequestError names the others, if any.

    Fields that are ignored, or have a value of theirs in `neutral`, are left out without a word.
    """
    served = frozenset(served)
    best_of = {"best_of": (body.get("n") or 1,)}  # of so many, all are returned
    neutral = {**neutral, **best_of}
    given = {name: value for name, value in body.items() if value is not None}
    rest = {name: value for name, value in given.items() if name not in served | IGNORED}
    unknown = [name for name in rest if name not in neutral]
    if unknown:
        raise RequestError(f"no such field: {', '.join(unknown)}", unknown[0])
    unserved = [name for name, value in rest.items() if not _is_in(value, neutral[name])]
    if unserved:
        names = ", ".join(unserved)
        raise RequestError(f"not supported, leave it out: {names}", unserved[0])
    return {name: value for name, value in given.items() if name in served}


def _is_in(value: object, values: tuple[object, ...]) -> bool:
    """Membership that tells true from 1 and false from 0."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
    )
