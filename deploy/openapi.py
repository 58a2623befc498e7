"""The OpenAPI description of the routes, for tools that read such: made from the checked models.

It tells the served fields. What else is accepted and ignored, as null is for every field, is in
the README only.
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider.deploy.schema import ChatBody, CompletionBody

_JSON = ("application/json",)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_api() -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    _, models = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")],
        ref_template="#/components/schemas/{model}",
    )
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": "v1"},
        "paths": {
            "/v1/completions": {"post": _generation("Continue prompts", CompletionBody)},
            "/v1/chat/completions": {"post": _generation("Answer a conversation", ChatBody)},
            "/v1/models": {"get": _operation("List the models: one")},
            "/v1/models/{name}": {"get": _operation("Describe a model") | {"parameters": [name]}},
            "/metrics": {"get": _operation("Counts for Prometheus", "text/plain")},
            "/health": {"get": _operation("Whether everything is loaded")},
        },
        "components": {"schemas": {**models["$defs"], "Error": _ERROR}},
    }


def _generation(summary: str, body: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {
        **_operation(summary, "application/json", "text/event-stream"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
    }


def _operation(summary: str, *media_types: str) -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    failed = {"description": "Failed", "content": {"application/json": error}}
    content: dict[str, Any] = {media_type: {} for media_type in media_types or _JSON}
    answer = {"description": "The answer", "content": content}
    return {"summary": summary, "responses": {"200": answer, "4XX": failed, "5XX": failed}}
