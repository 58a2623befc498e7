"""The values that a request's fields may have: types that check more than pydantic's own do.

Each says for the OpenAPI schema what it reads, and for the server what it makes of that.
"""

import re
import reprlib
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StringConstraints

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD = 1024  # characters


def _encodable(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError("holds half of a surrogate pair, which is no text") from error
    return value


Text = Annotated[str, AfterValidator(_encodable)]
StopString = Annotated[str, Field(min_length=1), AfterValidator(_encodable)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD), AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


_StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[
    _StopList, BeforeValidator(_listed, json_schema_input_type=StopString | _StopList)
]


def _by_id(value: object) -> object:
    """The object with its keys as numbers: JSON has them as strings, Python may not."""
    if not isinstance(value, dict):
        return value
    biases: dict[int, object] = {}
    for key, bias in value.items():
        is_id = isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key)
        if not (is_id or (type(key) is int and key >= 0)):
            raise ValueError(f"{reprlib.repr(key)} is not a token id")
        if int(key) in biases:
            raise ValueError(f"token id {int(key)} is given twice")
        biases[int(key)] = bias
    return biases


LogitBias = Annotated[
    dict[int, Bias],
    Field(max_length=MAX_BIASES),
    BeforeValidator(
        _by_id,
        json_schema_input_type=Annotated[
            dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,18}$")], Bias],
            Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
        ],
    ),
]


def _counted(value: object) -> object:
    """The number of logprobs of the completions form: false asks for none, true is chat's word."""
    if value is True:
        raise ValueError(f"must be a number from 0 to {MAX_LOGPROBS}: only chat has true")
    return None if value is False else value


NumLogprobs = Annotated[
    Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_counted)
]

Prompts = list[str] | list[list[int]]


def _prompts(value: object) -> Prompts:
    if isinstance(value, str):
        return [_encodable(value)]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [_ids(value)]
        if all(isinstance(item, str) for item in value):
            return [_encodable(item) for item in value]
        if all(isinstance(item, list) and item for item in value):
            return [_ids(item) for item in value]
    raise ValueError("must be a string, a list of strings, token ids or a list of lists of them")


def _ids(value: list[Any]) -> list[int]:
    for item in value:
        if type(item) is not int or item < 0:
            raise ValueError(f"{reprlib.repr(item)} is not a token id")
    return value


_PromptIds = Annotated[list[TokenId], Field(min_length=1)]
PromptField = Annotated[
    Prompts,
    PlainValidator(
        _prompts,
        json_schema_input_type=str
        | _PromptIds
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[_PromptIds], Field(min_length=1)],
    ),
]
