"""The board and the alert rules in deploy/ use only metrics and labels that a server exports."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rootstock.cache.families import row_bytes
from rootstock.config import CacheConfig, ServerConfig, TierConfig
from rootstock.engine.build import assemble
from rootstock.server.models.registry import ModelRegistry
from rootstock.server.observe.metrics import Metrics, ResponseStoreStats
from rootstock.server.request_info import Measured, RequestInfo
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, FakeRuntime
from rootstock.units import MIB

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana/rootstock.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())

OF_PROMETHEUS = {"up": {"job", "instance"}}
TARGET_LABELS = {"job", "instance"}  # added by the scrape
GRAFANA = ("$__rate_interval", "$job", "$instance", "$model_name")

_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|ignoring|on|group_left|group_right)\s*\(([^)]*)\)")
_WORDS = {"by", "ignoring", "group_left", "and", "or", "unless", "without", "on"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Labels by the name of a sample, of a server with a disk tier."""
    tokenizer = ByteTokenizer()
    runtime = FakeRuntime(tokenizer.vocab_size, 4096, families=(FULL,), eos_token_ids=tokenizer.eos_token_ids)
    budget = 100 * sum(row_bytes(family, 8) for family in runtime.description.families)
    tier = TierConfig(tmp_path_factory.mktemp("disk"), disk_budget_bytes=64 * MIB, verify_hits=0.5)
    made = assemble(runtime, tokenizer, CacheConfig(8, budget), tier=tier)
    stored = ResponseStoreStats(0, 0, 0, 0, {"stored": 1})
    metrics = Metrics(ModelRegistry.of_one(made, ServerConfig()), lambda: stored, labelled_tenants=3)
    aborted = Measured(1, unanswered=Counter(abort=1))
    info = RequestInfo("id", "POST", "/", route="/v1/completions", model="fake", tenant="tenant")
    info.outcome, info.measured = "ok", aborted
    metrics.observe(info)
    metrics.responded("/v1/completions", "POST", 200)
    metrics.errors.labels("/v1/completions", "queue_full").inc()
    made.engine.tier_connector.counters.loads["loaded"] += 1  # type: ignore[union-attr]
    made.engine.tier_connector.counters.choices["load"] += 1  # type: ignore[union-attr]
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    try:
        for family in text_string_to_metric_families(metrics.render_for_operator().decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels, TARGET_LABELS)
    finally:
        made.engine.stop()
    return found


def test_the_parts_of_an_expression_are_found() -> None:
    expression = 'sum by (le, a) (rate(x_bucket{b="1", c=~"y|z"}[5m])) / on (d) group_left (e) x:y > 0.5 * z'
    assert list(selectors(expression)) == [("x_bucket", {"b", "c"}), ("x:y", set()), ("z", set())]
    assert grouped(expression) == {"le", "a", "d", "e"}


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yields the metrics of an expression, and the labels by which each is selected."""
    expression = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub(" ", expression))
    for found in _SELECTOR.finditer(re.sub(r"\b[0-9][0-9.]*\b", " ", expression)):
        name, labels = found.groups()
        is_function = expression[found.end() :].startswith("(") or re.match(
            rf"{name}\s*\(", expression[expression.index(name) :]
        )
        if name in _WORDS or is_function:
            continue
        yield name, set(re.findall(r"([a-zA-Z_]+)\s*(?:=~|!~|!=|=)", labels or ""))


def grouped(expression: str) -> set[str]:
    names = ",".join(_GROUPING.findall(expression))
    return {name.strip() for name in names.split(",") if name.strip()}


def assert_exported(expression: str, exported: dict[str, set[str]]) -> None:
    found = list(selectors(expression))
    assert found, expression
    for name, labels in found:
        assert name in exported, f"{name} is not exported: {expression}"
        assert labels <= exported[name], (expression, labels - exported[name])
    assert grouped(expression) <= set().union(*(exported[name] for name, _ in found)), expression


PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_metrics_that_are_exported(panel: Any, exported: dict[str, set[str]]) -> None:
    assert panel["description"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert_exported(target["expr"], exported)
        left = target["expr"]
        for word in GRAFANA:
            left = left.replace(word, "")
        assert "$" not in left, "a variable that the board does not have"


def test_the_board_has_a_data_source_and_variables_of_its_own() -> None:
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables.keys() - {"datasource"} == {word.removeprefix("$") for word in GRAFANA[1:]}
    assert "DS_" not in json.dumps(BOARD), "an import would ask for a data source"


def test_variables_are_values_of_labels_that_are_exported(exported: dict[str, set[str]]) -> None:
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"])
            assert found is not None
            assert found[2] in exported[found[1]]


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken = np.zeros((200, 24), np.int32)
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        taken[at["y"] : at["y"] + at["h"], at["x"] : at["x"] + at["w"]] += 1
        assert at["x"] + at["w"] <= 24
    assert taken.max() == 1
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def rules() -> list[Any]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_uses_metrics_that_are_exported(rule: Any, exported: dict[str, set[str]]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "description"} <= rule["annotations"].keys()
    assert_exported(rule["expr"], exported)
    names = {name for name, _ in selectors(rule["expr"])}
    kept = set().union(*(exported[name] for name in names))
    for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
        assert label in kept
        if "sum by" in rule["expr"]:
            assert label in grouped(rule["expr"])


def test_prometheus_reads_the_rules_and_scrapes_the_metrics() -> None:
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    [job] = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "rootstock"
    assert job["metrics_path"] == "/metrics"


def test_grafana_is_provisioned_with_the_data_source_and_the_board() -> None:
    folder = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    [provider] = yaml.safe_load((folder / "dashboards/rootstock.yml").read_text())["providers"]
    assert provider["type"] == "file"
