"""Two tenants of one server, and a twin server that only the second one uses.

Each answer to the second tenant must equal the twin's, for all requests of the first: no token, text or count of one
is in an answer to the other. Ids and times are left out of the comparison.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
from fastapi import FastAPI
from hypothesis import strategies as st

from rootstock.cache.families import Family, row_bytes
from rootstock.config import CacheConfig, EngineConfig, ServerConfig
from rootstock.engine.build import Assembly, assemble
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime, window
from waiting import HANG_S

Json = dict[str, Any]
Name = Literal["A", "B"]
WORDS = ("my password is ", "correct ", "horse ", "battery ", "staple ", "x", "\n")
# The mark of each tenant: in some of its prompts, and never in an answer to the other.
MARKS = {"A": "alpha-only", "B": "bravo-only"}
FAMILIES: Mapping[str, tuple[Family, ...]] = {"full": (FULL,), "hybrid": (FULL, window(7), STATE)}


@dataclass(frozen=True)
class Setting:
    """Way in which a server tells tenants apart, with the headers and salts that each of them sends."""

    name: str
    server: ServerConfig
    headers: Mapping[Name, Mapping[str, str]]
    salts: Mapping[Name, str | None] = field(default_factory=lambda: {"A": None, "B": None})
    totals: frozenset[str] = frozenset()  # routes documented to report totals of all tenants to this client
    keys: str = ""  # content of the file of keys
    public_text: str = ""  # the beginning of prompts that all tenants share

    @property
    def admin(self) -> Mapping[str, str]:
        """Returns the headers of the server's owner."""
        key = self.server.admin_key or self.server.api_key
        return {} if key is None else _key(key)

    @property
    def binds_keys(self) -> bool:
        """True if a key decides the tenant, with any header."""
        return bool(self.server.tenant_keys or self.keys)

    def server_with_files(self, folder: Path) -> ServerConfig:
        server = self.server
        if self.keys:
            (folder / "keys.yaml").write_text(self.keys)
            server = replace(server, api_keys=folder / "keys.yaml")
        if self.public_text:
            (folder / "public.jsonl").write_text(json.dumps({"text": self.public_text}))
            server = replace(server, public_prompts=folder / "public.jsonl")
        return server


def _key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _salted(tenant: str) -> dict[str, str]:
    return {"X-Cache-Salt": tenant}


_KEYS = {"key-a": "a", "key-b": "b"}
_BOUND: Mapping[Name, Mapping[str, str]] = {"A": _key("key-a"), "B": _key("key-b")}
SETTINGS = (
    Setting("a proxy's header", ServerConfig(), {"A": _salted("a"), "B": _salted("b")}),
    Setting(
        "a proxy's header and the API key",
        ServerConfig(api_key="k", explain="all"),
        {"A": _key("k") | _salted("a"), "B": _key("k") | _salted("b")},
    ),
    Setting("keys of tenants", ServerConfig(tenant_keys=_KEYS, api_key="k"), _BOUND),
    Setting("keys of tenants and of the admin", ServerConfig(tenant_keys=_KEYS, admin_key="admin"), _BOUND),
    Setting(
        "salts that clients choose",
        ServerConfig(admin_key="admin"),
        {"A": {}, "B": {}},
        {"A": "secret of a", "B": "secret of b"},
        frozenset({"/metrics"}),
    ),
    Setting(
        "a file of keys, and a public head",
        ServerConfig(admin_key="admin"),
        _BOUND,
        keys="keys: [{key: key-a, tenant: a}, {key: key-b, tenant: b}, {key: key-c, tenant: c}]\n"
        "default: {requests_per_minute: 1000000, tokens_per_minute: 1000000000, max_concurrency: 100000}",
        public_text=WORDS[0],
    ),
)


@dataclass(frozen=True)
class Ask:
    """Request of a tenant."""

    method: str
    route: str  # as the application names it
    path: str = ""  # if another than the route
    body: Json | None = None
    stays_open: bool = False  # a stream, of which nothing but the beginning is read
    spoof: bool = False  # names the other tenant in the header
    refers: Literal["nothing", "unknown", "own", "other"] = "nothing"  # to the last response of a tenant


# Mostly beginnings of one sentence, so that prompts share and part.
_BEGINNINGS = st.integers(1, len(WORDS)).map(lambda words: "".join(WORDS[:words]))
TEXTS = _BEGINNINGS | st.tuples(_BEGINNINGS, st.sampled_from(WORDS)).map("".join)
MAX_TOKENS = st.sampled_from([0, 1, 9])


def _body(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries(parts)


_SAMPLING = {
    "max_tokens": MAX_TOKENS,
    "stream": st.booleans(),
    "temperature": st.sampled_from([0, 1.0]),
    "seed": st.integers(0, 3),
    "ignore_eos": st.just(True),
}
_MESSAGES = st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda said: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
)
# One choice each: how several of one request meet in the cache depends on when the engine sees each of them.
_EARLIER = st.none() | st.just("unknown")  # the id of an answer that diagnostics compare with
_CACHE_OPTIONS = st.none() | st.just({"comparison_response_id": "unknown"})
# Both tenants name the same sessions.
_HINTS = st.none() | st.sampled_from(
    [
        {"session_control": {"session_id": "s"}},
        {"session_control": {"session_id": "s", "action": "close"}},
        {"cache_control": {"type": "ephemeral"}, "agent_hints": {"priority": 5}},
    ]
)
_CHAT = _body(
    messages=_MESSAGES, logprobs=st.booleans(), prompt_cache_options=_CACHE_OPTIONS, nvext=_HINTS, **_SAMPLING
)
_COMPLETION = _body(
    prompt=TEXTS, echo=st.booleans(), logprobs=st.none() | st.just(2), nvext=_HINTS, **_SAMPLING
)
_MESSAGES_BODY = _body(
    messages=_MESSAGES,
    diagnostics=st.none() | _body(previous_message_id=_EARLIER),
    **_SAMPLING | {"max_tokens": st.sampled_from([1, 9])},
)
_RESPONSE = _body(
    input=TEXTS,
    stream=st.booleans(),
    store=st.booleans(),
    max_output_tokens=st.sampled_from([1, 9]),
    temperature=st.sampled_from([0, 1.0]),
    seed=st.integers(0, 3),
    prompt_cache_options=_CACHE_OPTIONS,
)
REFUSED_BY_OLLAMA = ("pull", "push", "create", "copy")
_OLLAMA = {
    "stream": st.booleans(),
    "keep_alive": st.none() | st.just("5m"),
    "options": _body(
        num_predict=st.sampled_from([1, 9]), temperature=st.sampled_from([0, 1.0]), seed=st.integers(0, 3)
    ),
}
_UNKNOWN = f"resp_{'0' * 32}"
_REFERRED = st.sampled_from(["unknown", "own", "other"])
_NOTHING = st.just("nothing")
_EXPLAIN = _body(prompt=TEXTS) | _body(messages=_MESSAGES)
_OF_API = st.one_of(
    _body(api=st.just("chat"), body=_body(messages=_MESSAGES)),
    _body(api=st.just("completions"), body=_body(prompt=TEXTS)),
    _body(api=st.just("messages"), body=_body(messages=_MESSAGES)),
    _body(api=st.just("responses"), body=_body(input=TEXTS)),
)


def _plain(route: str, path: str = "") -> st.SearchStrategy[Ask]:
    return st.just(Ask("GET", route, path))


def _posted(
    route: str, bodies: st.SearchStrategy[Json | None], refers: st.SearchStrategy[Any] = _NOTHING
) -> st.SearchStrategy[Ask]:
    return st.builds(
        Ask, st.just("POST"), st.just(route), st.just(""), bodies, spoof=st.booleans(), refers=refers
    )


def _stored(method: str, route: str) -> st.SearchStrategy[Ask]:
    """Draws requests for a stored response, which the other tenant may own."""
    body = {} if method == "POST" else None
    return st.builds(
        Ask, st.just(method), st.just(route), body=st.just(body), spoof=st.booleans(), refers=_REFERRED
    )


# Requests to each route of the application.
_ACTIONS = st.lists(
    st.sampled_from(["kv.retain", "kv.demote", "kv.release", "kv.pin"]), min_size=1, max_size=3
).map(
    lambda types: {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {
                "action_id": type,
                "action_type": type,
                "action_version": "1.0",
                "payload": {"directives": [{"priority": 5, "duration": 60}]} if type == "kv.retain" else {},
            }
            for type in types
        ],
    }
)
ROUTES: Mapping[tuple[str, str], st.SearchStrategy[Ask]] = {
    ("POST", "/v1/chat/completions"): _posted("/v1/chat/completions", _CHAT),
    ("POST", "/v1/completions"): _posted("/v1/completions", _COMPLETION),
    ("POST", "/v1/messages"): _posted("/v1/messages", _MESSAGES_BODY),
    ("POST", "/v1/messages/count_tokens"): _posted("/v1/messages/count_tokens", _body(messages=_MESSAGES)),
    ("POST", "/v1/responses"): _posted("/v1/responses", _RESPONSE, _NOTHING | _REFERRED),
    ("POST", "/v1/responses/input_tokens"): _posted(
        "/v1/responses/input_tokens", _body(input=TEXTS), _NOTHING | _REFERRED
    ),
    ("GET", "/v1/responses/{id}"): _stored("GET", "/v1/responses/{id}"),
    ("DELETE", "/v1/responses/{id}"): _stored("DELETE", "/v1/responses/{id}"),
    ("GET", "/v1/responses/{id}/input_items"): _stored("GET", "/v1/responses/{id}/input_items"),
    ("POST", "/v1/responses/{id}/cancel"): _stored("POST", "/v1/responses/{id}/cancel"),
    ("POST", "/v1/embeddings"): _posted("/v1/embeddings", _body(input=TEXTS)),
    ("GET", "/v1/cache/volatile"): _plain("/v1/cache/volatile"),
    ("POST", "/v1/cache/explain"): _posted("/v1/cache/explain", _EXPLAIN | _OF_API),
    ("POST", "/v1/cache/explain/chat/completions"): _posted("/v1/cache/explain/chat/completions", _CHAT),
    ("POST", "/v1/cache/explain/completions"): _posted("/v1/cache/explain/completions", _COMPLETION),
    ("POST", "/v1/cache/explain/messages"): _posted("/v1/cache/explain/messages", _MESSAGES_BODY),
    ("POST", "/v1/cache/explain/responses"): _posted("/v1/cache/explain/responses", _RESPONSE),
    ("POST", "/v1/cache/clear"): _posted("/v1/cache/clear", st.none() | st.just({})),
    ("GET", "/v1/cache/stats"): _plain("/v1/cache/stats"),
    ("GET", "/v1/models"): _plain("/v1/models"),
    ("GET", "/v1/models/{name:path}"): _plain("/v1/models/{name:path}", "/v1/models/fake"),
    ("GET", "/"): _plain("/"),
    ("POST", "/v1/cache/pin"): _posted("/v1/cache/pin", _EXPLAIN | _OF_API),
    ("POST", "/v1/cache/pin/chat/completions"): _posted("/v1/cache/pin/chat/completions", _CHAT),
    ("POST", "/v1/cache/pin/completions"): _posted("/v1/cache/pin/completions", _COMPLETION),
    ("POST", "/v1/cache/pin/messages"): _posted("/v1/cache/pin/messages", _MESSAGES_BODY),
    ("POST", "/v1/cache/pin/responses"): _posted("/v1/cache/pin/responses", _RESPONSE),
    ("POST", "/v1/cache/release"): _posted("/v1/cache/release", _body(id=st.just("pin-unknown"))),
    ("GET", "/v1/cache/pins"): _plain("/v1/cache/pins"),
    ("GET", "/v1/cache/sessions"): _plain("/v1/cache/sessions"),
    ("POST", "/v1/cache/hints"): _posted("/v1/cache/hints", _body(prompt=TEXTS, kv_hints=_ACTIONS)),
    ("GET", "/health"): _plain("/health"),
    ("GET", "/livez"): _plain("/livez"),
    ("GET", "/readyz"): _plain("/readyz"),
    ("GET", "/metrics"): _plain("/metrics"),
    ("GET", "/openapi.json"): _plain("/openapi.json"),
    ("GET", "/docs"): _plain("/docs"),
    ("GET", "/dashboard/page/{name}"): _plain("/dashboard/page/{name}", "/dashboard/page/index.html"),
    ("POST", "/dashboard/login"): _posted("/dashboard/login", st.none()),
    ("POST", "/dashboard/logout"): _posted("/dashboard/logout", st.none()),
    ("POST", "/dashboard/requests/{id}/stop"): _posted("/dashboard/requests/{id}/stop", st.none()),
    ("POST", "/dashboard/pins/{id}/release"): _posted("/dashboard/pins/{id}/release", st.none()),
}
# Bodies of routes that a tenant may not use, and of those that need an id.
OTHER_BODIES: Mapping[str, Json] = {
    "/v1/cache/release": {"id": "pin_unknown"},
    "/v1/models/load": {"model": "fake"},
    "/v1/models/unload": {"model": "fake"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/absent"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}
ROUTES = {
    **ROUTES,
    ("GET", "/v1/cache/pins"): _plain("/v1/cache/pins"),
    ("GET", "/v1/cache/sessions"): _plain("/v1/cache/sessions"),
    **{
        # Warming is off: its time depends on the other requests, which its answer is allowed to tell.
        ("POST", f"/v1/cache/{name}{path}"): _posted(f"/v1/cache/{name}{path}", bodies)
        for name in ("pin", "warm")
        for path, bodies in (
            ("", _EXPLAIN | _OF_API),
            ("/chat/completions", _body(messages=_MESSAGES)),
            ("/completions", _body(prompt=TEXTS)),
            ("/messages", _body(messages=_MESSAGES)),
            ("/responses", _body(input=TEXTS)),
        )
    },
    **{("POST", route): _posted(route, st.just(body)) for route, body in OTHER_BODIES.items()},
    **{
        ("POST", f"{prefix}/{name}"): _posted(f"{prefix}/{name}", bodies)
        for prefix in ("", "/v1")
        for name, bodies in (
            ("tokenize", _body(prompt=TEXTS) | _body(messages=_MESSAGES)),
            ("detokenize", _body(tokens=st.lists(st.integers(0, 255), max_size=8))),
        )
    },
    ("POST", "/api/chat"): _posted("/api/chat", _body(messages=_MESSAGES, **_OLLAMA)),
    ("POST", "/api/generate"): _posted(
        "/api/generate", _body(prompt=TEXTS, raw=st.none() | st.just(True), **_OLLAMA)
    ),
    ("POST", "/api/embed"): _posted("/api/embed", _body(input=TEXTS)),
    ("POST", "/api/embeddings"): _posted("/api/embeddings", _body(prompt=TEXTS)),
    ("POST", "/api/show"): _posted("/api/show", st.just({"model": "fake"})),
    **{("GET", route): _plain(route) for route in ("/api/tags", "/api/ps", "/api/version")},
    **{
        ("POST", f"/api/{name}"): _posted(f"/api/{name}", st.just({"model": "x"}))
        for name in REFUSED_BY_OLLAMA
    },
    ("DELETE", "/api/delete"): st.just(Ask("DELETE", "/api/delete")),
    ("GET", "/version"): _plain("/version"),
    ("GET", "/ping"): _plain("/ping"),
    ("POST", "/ping"): _posted("/ping", st.none()),
    **{
        ("POST", f"/dashboard/models/{name}"): _posted(
            f"/dashboard/models/{name}", st.just({"model": "fake"})
        )
        for name in ("load", "unload")
    },
}
# Routes whose answers may depend on other tenants, each with its reason. A new route is in one of the two lists.
_NODES = "numbers of nodes count those of all tenants: tests/server/dashboard looks for the nodes of others"
NOT_COMPARED: Mapping[tuple[str, str], str] = {
    ("GET", "/dashboard/events"): "its events have times: tests/server/dashboard looks for what is of others",
    (
        "GET",
        "/dashboard/session",
    ): "it has a random token for the page: tests/server/dashboard looks at its fields",
    (
        "POST",
        "/v1/responses/compact",
    ): "its item is sealed with a random nonce; /v1/responses has the same prompts",
    ("GET", "/dashboard/tree"): _NODES,
    ("GET", "/dashboard/tree/{number}"): _NODES,
    ("POST", "/dashboard/tree/{number}/pin"): _NODES,
}
_OPEN = st.builds(
    lambda text: Ask(
        "POST",
        "/v1/completions",
        body={"prompt": text, "max_tokens": 3_900, "stream": True, "temperature": 0, "ignore_eos": True},
        stays_open=True,
    ),
    TEXTS,
)
_OFTEN = [
    ROUTES["POST", f"/v1/{path}"]
    for path in ("chat/completions", "completions", "messages", "responses", "cache/explain")
]
_ASKS = st.one_of(*_OFTEN, *_OFTEN, *ROUTES.values())
# Only the first tenant leaves streams open: how far one of its own has come may show in an answer to a client.
_STEP = st.tuples(st.just("A"), _ASKS | _OPEN) | st.tuples(st.just("B"), _ASKS)
STEPS: st.SearchStrategy[list[tuple[Name, Ask]]] = st.lists(_STEP, min_size=2, max_size=12)


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """Returns every method and path except HEAD, which is a GET without its body."""
    found: set[tuple[str, str]] = set()
    left: list[Any] = list(app.routes)
    while left:
        route = left.pop()
        included = getattr(route, "original_router", None)  # as newer versions of FastAPI include a router
        if included is not None:
            left += included.routes
            continue
        assert route.methods, f"{route} is no route that this test knows: it may lead to others"
        found |= {(method, route.path) for method in route.methods - {"HEAD"}}
    return found


@dataclass
class World:
    """Server with its open streams."""

    setting: Setting
    app: FastAPI
    client: httpx.Client
    made: Assembly
    streams: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    responses: dict[Name, str] = field(default_factory=dict)  # the id of each tenant's last one

    def reset(self) -> None:
        self.streams.close()
        self.responses.clear()
        while (health := self.made.engine.health()).running or health.waiting:
            self.made.engine.call(lambda: None)  # a step further
        for pinned in self.made.engine.pins():
            self.made.engine.release_pin(pinned.id)
        self.made.engine.clear_cache()
        if self.setting.public_text:  # its use is no secret: it is cached before either tenant comes
            body = {"prompt": f"{self.setting.public_text}~", "max_tokens": 0}
            self.client.post("/v1/completions", json=body, headers=_key("key-c"))

    def ask(self, who: Name, ask: Ask, ordinal: int) -> Answer:
        headers = dict(self.setting.headers[who])
        if ask.spoof and self.setting.binds_keys:
            headers |= _salted("b" if who == "A" else "a")  # overridden by the key
        body = None if ask.body is None else dict(ask.body)
        salt = self.setting.salts[who]
        if body is not None:
            inner = body
            if "api" in body:
                inner = body["body"] = dict(body["body"])
            if salt is not None:
                inner["cache_salt"] = salt
            if ordinal % 3 == 0:
                _mark(inner, MARKS[who])
        id = self._referred(who, ask)
        if body is not None and "input" in body and ask.refers != "nothing":
            body["previous_response_id"] = id
        arguments: Json = {"headers": headers} | ({} if body is None else {"json": body})
        path = (ask.path or ask.route).replace("{id}", id)
        if not ask.stays_open:
            answer = self.client.request(ask.method, path, **arguments)
            if ask.route == "/v1/responses" and (made := re.search(r'"(resp_[0-9a-f]{32})"', answer.text)):
                self.responses[who] = made[1]
            return Answer(answer.status_code, _told(answer.text))
        stream = self.streams.enter_context(self.client.stream(ask.method, path, **arguments))
        begins = next(stream.iter_lines()) if stream.status_code == 200 else stream.read().decode()
        return Answer(stream.status_code, _told(begins))

    def _referred(self, who: Name, ask: Ask) -> str:
        """Returns the id of the response to which a request refers, or else an id of no response."""
        other: Name = "B" if who == "A" else "A"
        match ask.refers:
            case "own":
                return self.responses.get(who, _UNKNOWN)
            # Clients without a key or a header are one tenant to the store, in which an id is a secret.
            case "other" if self.setting.headers["A"] != self.setting.headers["B"]:
                return self.responses.get(other, _UNKNOWN)
        return _UNKNOWN


def _mark(body: Json, mark: str) -> None:
    """Appends a mark to the text of a prompt."""
    for name in ("prompt", "input"):
        if name in body:
            body[name] += mark
    if "messages" in body:
        *before, last = body["messages"]
        body["messages"] = [*before, {**last, "content": last["content"] + mark}]


@dataclass(frozen=True)
class Answer:
    status: int
    text: str


def _told(text: str) -> str:
    """Removes ids and times from an answer."""
    text = re.sub(r"""(["'])[a-z]+[_-][0-9a-f]{24,}(_\d+|i\d+)?\1""", '"id"', text)
    times = (
        "created|created_at|completed_at|modified_at|last_seen_s_ago|idle_s|expected_pause_s|queued_s|lost_s|"
        "[a-z_]+_duration"
    )
    return re.sub(rf'"({times})": ?(\d+(\.\d+)?|"[^"]*")', '"created":0', text)


@contextlib.contextmanager
def world(setting: Setting, families: Sequence[Family]) -> Iterator[World]:
    model_tokenizer = ByteTokenizer()
    runtime = FakeRuntime(
        model_tokenizer.vocab_size, 4096, families=tuple(families), eos_token_ids=(model_tokenizer.END,)
    )
    block_bytes = sum(row_bytes(family, 8) for family in families)
    # Room for everything: one tenant's requests may evict another's blocks, which is documented and not compared.
    made = assemble(runtime, model_tokenizer, CacheConfig(8, 8_000 * block_bytes), EngineConfig())
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        app = create_app(made, setting.server_with_files(folder))
        opened.enter_context(made.engine)
        url = opened.enter_context(running(app, made.engine))
        limits = httpx.Limits(max_connections=None)
        client = opened.enter_context(httpx.Client(base_url=url, timeout=HANG_S, limits=limits))
        one = World(setting, app, client, made)
        with one.streams:
            yield one


@dataclass
class Twins:
    """Server of both tenants, and server of the second alone."""

    both: World
    alone: World
    compared: int = 0
    cached_tokens: int = 0  # in answers to the second; 0 would mean that no difference was possible
    routes: set[tuple[str, str]] = field(default_factory=set)

    def play(self, steps: Sequence[tuple[Name, Ask]]) -> None:
        """Asserts that the second tenant cannot tell the two servers apart."""
        self.both.reset()
        self.alone.reset()
        for ordinal, (who, ask) in enumerate(steps):
            answer = self.both.ask(who, ask, ordinal)
            other = MARKS["B" if who == "A" else "A"]
            assert other not in answer.text, f"{who} was told what the other one wrote: {answer.text}"
            assert answer.status < 500, answer.text
            if who == "A":
                continue
            expected = self.alone.ask(who, ask, ordinal)
            if ask.route in self.both.setting.totals:
                assert answer.status == expected.status
                continue
            assert answer == expected, f"{ask} tells B of A"
            self.compared += 1
            self.routes.add((ask.method, ask.route))
            names = "cached_tokens|cache_read_input_tokens|matched_tokens|prompt_eval_cached_count"
            found = re.findall(rf'"(?:{names})": ?(\d+)', answer.text)
            self.cached_tokens += sum(map(int, found))


@contextlib.contextmanager
def twins(setting: Setting, families: Sequence[Family]) -> Iterator[Twins]:
    with world(setting, families) as both, world(setting, families) as alone:
        yield Twins(both, alone)
