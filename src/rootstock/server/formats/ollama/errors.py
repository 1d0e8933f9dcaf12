"""Errors in the form of Ollama's API: {"error": message}. In a stream, such an object is the last line."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rootstock.errors import RootstockError
from rootstock.server.http.errors import error_body


class OllamaErrorBody(BaseModel):
    """An error, as the OpenAPI document describes it."""

    error: str


def ollama_error_body(error: RootstockError) -> dict[str, Any]:
    return {"error": error_body(error)["error"]["message"]}
