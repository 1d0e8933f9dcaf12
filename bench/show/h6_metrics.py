"""H6: every panel of the Grafana board has data, and every alert rule is evaluated, by a real Prometheus.

A server of a small model runs with little memory, a disk tier and drafts. Clients chat in sessions whose prompts
come back after other prompts have evicted them; some leave early, some send errors. Prometheus scrapes the server
with the configuration of deploy/, every second. Then each expression of the board is queried over the time of the
load through Prometheus' API, with the board's variables filled in as Grafana does. The program `prometheus` comes
from its package: `apt-get install prometheus`.

`metrics_us_per_token` is the time that observing one token takes of the event loop's thread, at 32 streams a step.
`metrics_share_of_step` compares it, for the 32 tokens, with a step of 10 ms.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from common import ROOT, argument_parser, at_least, at_most, conclude, could_not, exactly
from peers import PeerProcess, PeerUnavailable, free_port, rootstock_server

from rootstock.bench.tiny_model import TinyModelSpec, write_tiny_model
from rootstock.engine.request import RequestId, TokenEvent, Usage
from rootstock.server.observe.request_metrics import RequestMetrics

SHOW = "H6"
DEPLOY = ROOT / "deploy"
LOAD_S = 40.0
CLIENTS = 4
SESSIONS = 12
WINDOW = "15s"
STREAMS = 32
STEP_S = 0.010
OPTIONS = ("--kv-budget", "3MiB", "--dtype", "float32", "--speculate", "3", "--max-batch", "4")
VLLM_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:spec_decode_num_drafts_total",
)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program")
    options.add_argument("--seconds", type=float, default=LOAD_S, help="of load")
    given = options.parse_args()
    if given.prometheus is None:
        could_not(SHOW, "there is no program `prometheus`: install its package")
    with tempfile.TemporaryDirectory() as folder:
        try:
            figures = run(Path(folder), given.prometheus, given.seconds)
        except PeerUnavailable as error:
            could_not(SHOW, str(error))
    figures |= cost()
    conclude(
        SHOW,
        figures,
        {
            "panels_without_data": exactly([]),
            "panels": at_least(30),
            "rules_not_ok": exactly([]),
            "rules": at_least(10),
            "vllm_names_without_data": exactly([]),
            "series_of_invented_tenants": at_most(0),
            "metrics_share_of_step": at_most(0.01),
        },
    )


def run(folder: Path, program: str, seconds: float) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    write_tiny_model(TinyModelSpec(), model)
    disk = ("--disk-dir", str(folder / "disk"), "--disk-budget", "64MiB", "--metrics-tenants", "4")
    with (
        rootstock_server(model, *OPTIONS, *disk) as server,
        prometheus(folder, program, server.url) as watcher,
    ):
        began = time.time()
        load(server.url, seconds)
        time.sleep(3)  # for the last scrapes
        return judge(watcher.url, began, time.time())


def prometheus(folder: Path, program: str, target: str) -> PeerProcess:
    """Returns Prometheus with the configuration of deploy/, but for the target and the interval."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target.removeprefix("http://")]}]
    job["scrape_timeout"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus/alerts.yml", folder)
    port = free_port()
    command = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    return PeerProcess(command, port, ready_path="/-/ready")


def load(url: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=chat, args=(url, number, until)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def chat(url: str, client: int, until: float) -> None:
    """Continues the sessions in turn, so that each comes back after the others."""
    turn = 0
    with httpx.Client(base_url=url, timeout=60) as http:
        while time.monotonic() < until:
            session, turn = (client + turn) % SESSIONS, turn + 1
            told = f"Session {session}. " + "The river and the hill and the road. " * (8 + session)
            body = {"messages": [{"role": "user", "content": told}], "max_tokens": 24, "stream": True}
            headers = {"X-Cache-Salt": f"tenant {session % 3}" if turn % 7 else f"invented {client} {turn}"}
            with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                for number, _ in enumerate(response.iter_text()):
                    if turn % 5 == 0 and number == 1:
                        break  # leaves
            if turn % 6 == 0:
                http.post("/v1/completions", json={"prompt": "x " * 200_000}, headers=headers)
                http.get("/v1/models")


def judge(url: str, began: float, ended: float) -> dict[str, Any]:
    board = json.loads((DEPLOY / "grafana/rootstock.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    empty = [
        f"{panel['title']}: {target['expr']}"
        for panel in panels
        for target in panel["targets"]
        if not has_data(url, target["expr"], began, ended)
    ]
    rules = [rule for group in get(url, "rules")["groups"] for rule in group["rules"]]
    invented = "count(count by (tenant) (rootstock_prompt_tokens_total)) - 6"  # 4 labels, the others, none
    over = get(url, "query", query=invented)["result"]
    return {
        "panels": len(panels),
        "panels_without_data": empty,
        "rules": len(rules),
        "rules_not_ok": [rule["name"] for rule in rules if rule["health"] != "ok"],
        "alerts": sorted({rule["name"] for rule in rules if rule["state"] == "firing"}),
        "vllm_names_without_data": [name for name in VLLM_NAMES if not has_data(url, name, began, ended)],
        "series_of_invented_tenants": max(0.0, float(over[0]["value"][1])) if over else None,
        "series": float(get(url, "query", query='scrape_samples_scraped{job="rootstock"}')["result"][0]["value"][1]),
        "scrape_ms": round(1000 * float(
            get(url, "query", query=f'quantile_over_time(0.5, scrape_duration_seconds{{job="rootstock"}}[{WINDOW}])')
            ["result"][0]["value"][1]), 1),
    }  # fmt: skip


def has_data(url: str, expression: str, began: float, ended: float) -> bool:
    """Returns whether an expression has a value that is a number at some time of the load."""
    for variable, value in (
        ("$__rate_interval", WINDOW),
        ("$job", ".*"),
        ("$instance", ".*"),
        ("$model_name", ".*"),
    ):
        expression = expression.replace(variable, value)
    found = get(url, "query_range", query=expression, start=str(began), end=str(ended), step="1")
    return any(value != "NaN" for series in found["result"] for _, value in series["values"])


def get(url: str, path: str, **parameters: str) -> Any:
    answer = httpx.get(f"{url}/api/v1/{path}", params=parameters, timeout=30).json()
    assert answer["status"] == "success", answer
    return answer["data"]


def cost(steps: int = 2_000) -> dict[str, float]:
    """Measures the metrics of one step's tokens, and of one request."""
    metrics = RequestMetrics(20)
    timings = [metrics.timing("model", f"tenant {stream % 20}") for stream in range(STREAMS)]
    for timing in timings:
        timing.submitted(1)
    events = [(0, TokenEvent(RequestId("x"), 1, "a"))]

    def step() -> float:
        began = time.perf_counter()
        for timing in timings:  # a request each, as after a step of 32 streams
            timing.tokens(events)
        return time.perf_counter() - began

    step_s = sorted(step() for _ in range(steps))[steps // 2]
    usage = Usage(1000, 900, 100, queued_s=0.1, ttft_s=0.3, total_s=2.0)

    def request() -> float:
        began = time.perf_counter()
        timings[0].answered(usage, 1)
        metrics.timing("model", "tenant 1")
        return time.perf_counter() - began

    request_s = sorted(request() for _ in range(steps))[steps // 2]
    return {
        "metrics_us_per_token": round(1e6 * step_s / STREAMS, 3),
        "metrics_us_per_request": round(1e6 * request_s, 3),
        "metrics_share_of_step": round(step_s / STEP_S, 5),
    }


if __name__ == "__main__":
    main()
