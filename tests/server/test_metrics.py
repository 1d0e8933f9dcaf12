"""/metrics counts tools that the model does not see, and the responses that are stored."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from checkpoints import tiny_model
from lora import linears_of, save_adapter
from rootstock.config import EngineConfig, ServerConfig
from rootstock.engine.adapters import MAX_ADAPTERS
from rootstock.engine.stats import AdapterStats
from rootstock.server.observe.metric_families import Families
from rootstock.server.observe.vllm_metrics import add_vllm_adapters
from rootstock.units import MIB
from server.conftest import user
from server.held import Held
from waiting import wait_until

SEARCH = {"type": "web_search"}
FUNCTION = {"type": "function", "name": "look_up"}


def test_ignored_tools_are_counted_by_their_type(serve: Any) -> None:
    with serve() as served:
        for _ in range(2):
            body = {"input": "x", "max_output_tokens": 1, "tools": [SEARCH, FUNCTION]}
            assert served.client.post("/v1/responses", json=body).status_code == 200
        assert served.metric("rootstock_ignored_tools_total", type="web_search") == 2
        assert served.client.get("/metrics").text.count("rootstock_ignored_tools_total{") == 1


@pytest.mark.parametrize(
    ("path", "tools", "code"),
    [
        ("/v1/responses", [{"type": "mcp"}], "unsupported_parameter"),
        ("/v1/responses", [{"type": "function"}], "missing_parameter"),
        ("/v1/messages", [{"type": "code_execution_20250522", "name": "x"}], "unsupported_parameter"),
        ("/v1/chat/completions", [{"type": "web_search"}], "invalid_parameter"),
    ],
)
def test_requests_refused_for_a_tool_are_counted_by_the_error(
    serve: Any, path: str, tools: Any, code: str
) -> None:
    with serve() as served:
        body = {"input": "x"} if path == "/v1/responses" else {"messages": user("x"), "max_tokens": 1}
        assert served.client.post(path, json={**body, "tools": tools}).status_code == 400
        assert served.metric("rootstock_refused_tools_total", code=code) == 1
        assert served.client.post(path, json={**body, "stop": [""]}).status_code == 400
        assert served.client.get("/metrics").text.count("rootstock_refused_tools_total{") == 1


def test_blocks_hints_and_pins_are_counted_as_in_the_statistics(serve: Any) -> None:
    prompt = "A prefix that several requests share. " * 7  # ends inside a block
    with serve() as served:
        for end in ("a", "b"):
            served.complete(
                prompt + end * 40, max_tokens=1, nvext={"cache_control": {"type": "ephemeral", "ttl": "5m"}}
            )
        assert served.client.post("/v1/cache/pin", json={"prompt": prompt}).status_code == 200
        cache = served.client.get("/v1/cache/stats").json()["cache"]
        assert all(cache[name] > 0 for name in ("inside_block_tokens", "copied_blocks", "accepted_hints"))
        assert served.metric("rootstock_hit_tokens_inside_blocks_total") == cache["inside_block_tokens"]
        for event in ("copied", "duplicate", "evicted"):
            assert served.metric("rootstock_block_events_total", event=event) == cache[f"{event}_blocks"]
        for verdict in ("accepted", "clipped", "refused"):
            assert served.metric("rootstock_hints_total", verdict=verdict) == cache[f"{verdict}_hints"]
        for reason in ("expired", "displaced"):
            assert served.metric("rootstock_lost_grants_total", reason=reason) == cache[f"{reason}_grants"]
        assert served.metric("rootstock_cache_bytes", of="retained") == cache["retained_bytes"] > 0
        assert served.metric("rootstock_cache_bytes", of="pinned") == cache["pinned_bytes"] > 0
        assert served.metric("rootstock_pins") == cache["pins"] == 1


def test_stored_responses_are_counted_with_their_bytes_and_events(serve: Any) -> None:
    metadata = {f"name {number}": "x" * 512 for number in range(16)}
    with serve(server=ServerConfig(responses_budget_bytes=MIB)) as served:

        def metric(name: str, **labels: str) -> float:
            found: float = served.metric(f"rootstock_stored_responses{name}", **labels)
            return found

        def create(**fields: Any) -> str:
            body = {"input": "x", "max_output_tokens": 1, "metadata": metadata, **fields}
            id: str = served.client.post("/v1/responses", json=body).json()["id"]
            return id

        assert metric("") == metric("_bytes", of="used") == 0
        create(store=False)
        first = create()
        wait_until(lambda: metric("_events_total", event="stored") == 1)
        assert metric("") == 1
        assert 0 < metric("_bytes", of="used") <= metric("_bytes", of="budget") == MIB
        served.client.delete(f"/v1/responses/{first}")
        assert metric("_events_total", event="deleted") == 1
        assert metric("") == 0
        for _ in range(140):  # of some 9 kB each
            create()
        wait_until(lambda: metric("_events_total", event="stored") == 141)
        assert metric("_events_total", event="evicted") == 140 - metric("") > 0
        assert metric("_bytes", of="used") <= MIB
        assert metric("_bytes", of="waiting_to_be_stored") == metric("_events_total", event="not_stored") == 0


def vllm(served: Any, name: str, **labels: str) -> float:
    found: float = served.metric(f"vllm:{name}", model_name="fake", **labels)
    return found


def test_vllms_names_count_the_same_events(serve: Any) -> None:
    with serve() as served:
        for _ in range(2):
            served.complete("count these", max_tokens=4, ignore_eos=True)
        served.complete("x", max_tokens=2, ignore_eos=True, n=2)
        assert vllm(served, "request_success_total", finished_reason="length") == 4
        assert vllm(served, "request_success_total", finished_reason="abort") == 0
        assert vllm(served, "generation_tokens_total") == 12
        by_source = {
            source: vllm(served, "prompt_tokens_by_source_total", source=source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        assert sum(by_source.values()) == vllm(served, "prompt_tokens_total") == 11 + 11 + 1 + 1
        assert by_source["local_cache_hit"] == vllm(served, "prefix_cache_hits_total") == 10
        assert vllm(served, "prefix_cache_queries_total") == 24
        for histogram, count in (
            ("time_to_first_token_seconds", 4),
            ("inter_token_latency_seconds", 3 + 3 + 1 + 1),
            ("e2e_request_latency_seconds", 4),
            ("request_queue_time_seconds", 4),
            ("request_prefill_time_seconds", 4),
            ("request_decode_time_seconds", 4),
            ("request_inference_time_seconds", 4),
            ("request_prompt_tokens", 4),
            ("request_params_n", 3),
        ):
            assert vllm(served, f"{histogram}_count", engine="0") == count, histogram
        assert vllm(served, "request_generation_tokens_sum") == 12
        assert vllm(served, "request_prefill_kv_computed_tokens_sum") == by_source["local_compute"]
        assert vllm(served, "request_params_max_tokens_sum") == 4 + 4 + 2 + 2
        assert vllm(served, "num_requests_running") == vllm(served, "num_requests_waiting") == 0
        assert vllm(served, "kv_cache_usage_perc") == 0, "cached blocks that no request uses are no usage"
        assert vllm(served, "cache_config_info", block_size="8", enable_prefix_caching="True") == 1
        text = served.client.get("/metrics").text
        assert "external_prefix_cache" not in text, "there is no tier"
        assert "spec_decode" not in text, "there are no drafts"


def test_a_running_request_is_shown_by_its_phase_and_counted_when_its_client_leaves(serve: Any) -> None:
    held = Held(free_forwards=3)
    with serve(fault=held) as served:
        body = {"prompt": "wait", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            parts = response.iter_text()  # its end would close the response
            next(parts)
            text = httpx.get(f"{served.url}/metrics").text
            assert 'vllm:num_requests_running{engine="0",model_name="fake"} 1.0' in text
            assert 'rootstock_engine_phases{model_name="fake",phase="decode"} 1.0' in text
            assert re.search(r"vllm:kv_cache_usage_perc{.*} 0\.\d*[1-9]", text)
        held.let_go()
        served.settled()
        wait_until(lambda: vllm(served, "request_success_total", finished_reason="abort") == 1)
        assert served.metric("rootstock_ended_requests_total", reason="abort") == 1
        assert vllm(served, "time_to_first_token_seconds_count") == 1


def test_the_adapters_of_running_and_of_waiting_requests_are_listed(serve: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    held = Held()
    with serve(fault=held, engine=EngineConfig(max_batch=2)) as served, ThreadPoolExecutor(4) as pool:
        engine = served.assembly.engine
        assert "lora_requests_info" not in served.client.get("/metrics").text, "no adapter was ever loaded"
        for seed, name in enumerate(("b", "a", "with,comma", "idle")):
            engine.load_adapter(
                name, save_adapter(tmp_path / name, model, linears_of(model, "q_proj"), seed=seed)
            )

        def listed() -> dict[str, str]:
            lines = httpx.get(f"{served.url}/metrics").text.splitlines()
            (line,) = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            assert labels.pop("max_lora") == str(MAX_ADAPTERS)
            assert labels.pop("model_name") == "fake"
            assert labels.pop("engine") == "0"
            assert float(line.split()[-1]) > 1e9, "the value is the time"
            return labels

        assert listed() == {"running_lora_adapters": "", "waiting_lora_adapters": ""}
        try:
            for names, phase in ((("b", "a"), "running"), (("with,comma", "a"), "waiting")):
                for name in names:
                    pool.submit(served.complete, "wait", model=name, max_tokens=50, ignore_eos=True)
                wait_until(lambda phase=phase: getattr(engine.health(), phase) == 2)
            assert listed() == {"running_lora_adapters": "a,b", "waiting_lora_adapters": "a"}
        finally:
            held.let_go()


def test_a_label_lists_the_adapters_with_the_most_requests() -> None:
    families = Families()
    waiting = {f"adapter-{number:03}": 1 + (number >= 200) for number in range(256)}
    add_vllm_adapters(families, AdapterStats(256, {}, waiting), {})
    ((sample,),) = [family.samples for family in families]
    listed = sample.labels["waiting_lora_adapters"].split(",")
    assert listed == [f"adapter-{number}" for number in range(200, 232)]


def test_tenants_are_shown_to_the_operator_alone(serve: Any) -> None:
    server = ServerConfig(api_key="user-key", admin_key="admin-key", tenant_keys={"acme-key": "acme"})
    with serve(server=server) as served:

        def get(key: str) -> httpx.Response:
            return httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {key}"})

        for key, more in (("acme-key", {}), ("user-key", {"X-Cache-Salt": "secret"}), ("user-key", {})):
            headers = {"Authorization": f"Bearer {key}", **more}
            body = {"prompt": "hello", "max_tokens": 1}
            assert httpx.post(f"{served.url}/v1/completions", json=body, headers=headers).status_code == 200
        shown = get("admin-key").text
        assert 'rootstock_prompt_tokens_total{model_name="fake",tenant="acme"} 5.0' in shown
        assert shown.count('rootstock_prompt_tokens_total{model_name="fake",tenant="sha256:') == 1
        assert 'rootstock_prompt_tokens_total{model_name="fake",tenant=""} 5.0' in shown
        hidden = get("user-key").text
        assert 'rootstock_prompt_tokens_total{model_name="fake"} 15.0' in hidden
        assert "tenant=" not in hidden
        assert all(word not in shown + hidden for word in ("secret", "-key"))
        assert get("acme-key").status_code == 403


def test_errors_are_counted_by_their_code_and_responses_by_their_status(serve: Any) -> None:
    with serve() as served:
        served.complete("x" * 5_000, max_tokens=1)
        served.client.get("/v1/models/some")
        served.client.get(f"/{'x' * 100}")
        served.client.request("PROPFIND", "/v1/models")
        code = served.complete("x" * 5_000, max_tokens=1).json()["error"]["code"]
        assert served.metric("rootstock_errors_total", route="/v1/completions", code=code) == 2
        assert (
            served.metric("http_requests_total", handler="/v1/completions", method="POST", status="4xx") == 2
        )
        assert served.metric("http_requests_total", handler="/v1/models/{name:path}", status="4xx") == 1
        assert served.metric("http_requests_total", handler="none", method="GET", status="4xx") == 1
        assert served.metric("http_requests_total", method="other") == 1
