"""A browser without a screen: the cookie and the token of a session, the feed's events, and the tree's columns."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from waiting import HANG_S

Json = dict[str, Any]
_KINDS = {"Uint32": "<u4", "Int32": "<i4", "Float32": "<f4", "Uint16": "<u2", "Uint8": "u1"}


@dataclass
class Browser:
    """A page's requests to one server."""

    url: str
    csrf: str = ""
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S)

    def log_in(self, key: str) -> httpx.Response:
        response = self.client.post("/dashboard/login", headers={"x-api-key": key})
        if response.status_code == 200:
            self.csrf = response.json()["csrf"]
        return response

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.client.post(path, json=body, headers={"X-CSRF-Token": self.csrf})

    @contextlib.contextmanager
    def events(self, model: str | None = None) -> Iterator[Iterator[Json]]:
        params = {"page": self.get("/dashboard/session").json()["page"]}
        with self.stream(params | ({} if model is None else {"model": model})) as events:
            yield events

    @contextlib.contextmanager
    def stream(self, params: dict[str, str]) -> Iterator[Iterator[Json]]:
        with self.client.stream("GET", "/dashboard/events", params=params) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))

    def sections(self, *wanted: str, model: str | None = None) -> Json:
        """Returns the first content of some sections."""
        found: Json = {}
        with self.events(model) as events:
            for event in events:
                for name, section in event.items():
                    found.setdefault(name, section["set"] if name in ("requests", "misses") else section)
                if all(name in found for name in wanted):
                    return found
        raise AssertionError(f"the feed ended with {sorted(found)}")

    def assert_gone(self, path: str) -> None:
        """Asserts that a node is told to be gone, with a status that a browser does not report as an error."""
        response = self.get(path)
        assert response.status_code == 200, response.text
        assert response.json() == {"gone": True, "message": "This node is gone: it was evicted or cleared."}

    def tree(self) -> tuple[Json, dict[str, list[float]]]:
        """Returns the head of the tree, and its columns."""
        response = self.get("/dashboard/tree")
        assert response.status_code == 200, response.text
        raw = response.content
        length = int.from_bytes(raw[:8], "little")
        head, at, columns = json.loads(raw[8 : 8 + length]), 8 + length, {}
        for name, kind in head["columns"]:
            at = -(-at // 8) * 8
            column = np.frombuffer(raw, _KINDS[kind], head["nodes"], at)
            columns[name] = column.tolist()
            at += column.nbytes
        return head, columns
