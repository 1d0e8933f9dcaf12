"""Division of a machine among replicas, their number, and the manifests of a fleet."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rootstock.cache.stats import CacheStats
from rootstock.config import Configuration, ServerConfig
from rootstock.engine.sequence import Phase
from rootstock.engine.stats import EngineStats, StepCounters
from rootstock.errors import InvalidOption
from rootstock.fleet.autoscaling import KEPT_S, wanted_replicas
from rootstock.fleet.replica import OwnFiles, ReplicaPlace, SpeedMeter, TurnoverMeter, sealed
from rootstock.fleet.running import SETTINGS
from rootstock.fleet_config import FleetConfig, KVEventsConfig
from rootstock.option_table import configuration_of, values_of
from server.conftest import served_by_oracle

DEPLOY = Path(__file__).parents[2] / "deploy"


def config(**values: Any) -> Configuration:
    return configuration_of("fake", values)


@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_replicas_divide_what_was_not_given(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock.fleet.replica.memory_limit", lambda asked, kind: 24 << 30)
    alone = ReplicaPlace("127.0.0.1", "one", 1, 1).configured(config())
    one = ReplicaPlace("127.0.0.1", "two", most, most).configured(config())
    assert one.cache.device_share == pytest.approx(1 / most)
    assert one.model.threads is not None
    assert alone.model.threads is not None
    assert one.model.threads == max(1, alone.model.threads // most)
    assert one.engine.memory_limit_bytes == (24 << 30) // most


def test_what_was_given_is_of_each_replica() -> None:
    given = config(threads=3, budget_bytes=1 << 20, memory_limit_bytes=1 << 30)
    one = ReplicaPlace("127.0.0.1", "one", 4, 4).configured(given)
    assert (one.model, one.cache, one.engine) == (given.model, given.cache, given.engine)


def test_replicas_that_have_a_gpu_each_do_not_divide_its_memory() -> None:
    one = ReplicaPlace("127.0.0.1", "one", 4, 1).configured(config())
    assert one.cache.device_share == 1.0


def test_replicas_have_files_of_their_own(tmp_path: Path) -> None:
    given = config(disk_dir=tmp_path, responses_file=tmp_path / "responses.sqlite")
    taken = [OwnFiles(given) for _ in range(3)]
    made = [one.configured(given) for one in taken]
    assert len({one.tier.disk_dir for one in made}) == 3
    assert len({one.server.responses_file for one in made}) == 3
    taken[1].release()  # as when its process ends
    assert OwnFiles(given).configured(given).tier.disk_dir == made[1].tier.disk_dir
    for one in taken:
        one.release()


def test_replicas_without_files_take_none() -> None:
    assert OwnFiles(config()).configured(config()) == config()


@pytest.fixture(scope="module")
def at_rest() -> EngineStats:
    with served_by_oracle() as served:
        return served.assembly.engine.stats()


@pytest.mark.parametrize("seed", range(20))
def test_the_speed_of_prefills_is_measured_beside_decodes(at_rest: EngineStats, seed: int) -> None:
    """Steps take some time, and each prompt token takes some: the report has the second one, whatever the mix is."""
    rng = random.Random(seed)
    step_s, tokens_per_s = rng.uniform(0.002, 0.05), rng.uniform(300, 30_000)
    meter, total, is_shown = SpeedMeter(), StepCounters(), False
    assert meter.report(replace(at_rest, counters=StepCounters())).tokens_per_s == 0.0
    for second in range(30):
        decodes = rng.randrange(1, 200)
        prompts = 0 if second % 5 == 0 else rng.randrange(300, 3_000)
        total.steps += decodes
        total.sampled_tokens += decodes * 4
        total.computed_tokens += decodes * 4 + prompts
        total.forward_s += decodes * step_s + prompts / tokens_per_s
        is_shown |= prompts / tokens_per_s > 0.3 * (decodes * step_s + prompts / tokens_per_s)
        report = meter.report(replace(at_rest, counters=replace(total)))
    assert report.tokens_per_s > 0 or not is_shown
    assert report.tokens_per_s in (0.0, pytest.approx(tokens_per_s, rel=0.01))


def test_a_report_counts_requests_without_a_first_token(at_rest: EngineStats) -> None:
    phases = {Phase.QUEUED: 2, Phase.PREFILL: 3, Phase.LOADING: 1, Phase.DECODE: 7}
    report = SpeedMeter().report(replace(at_rest, waiting=2, running=11, phases=phases))
    assert (report.waiting, report.running, report.prefilling) == (2, 11, 6)


def test_turnovers_are_evictions_by_capacity(at_rest: EngineStats) -> None:
    meter = TurnoverMeter(iter((0.0, 10.0, 20.0)).__next__)
    cache: CacheStats = at_rest.cache
    capacity = cache.total_blocks * cache.block_size
    assert meter.per_s(replace(cache, evicted_tokens=2 * capacity)) == pytest.approx(0.2)
    assert meter.per_s(replace(cache, evicted_tokens=2 * capacity)) == 0.0


@pytest.mark.parametrize(
    ("requests", "turnovers", "has_shared_tier", "wanted"),
    [
        (0, [], False, 1),
        (12, [0.0], False, 1),
        (13, [0.0], False, 2),
        (120, [0.0] * 3, False, 10),
        (1, [1 / KEPT_S], False, 1),
        (1, [2 / KEPT_S, 2 / KEPT_S], False, 4),
        (1, [2 / KEPT_S, 2 / KEPT_S], True, 1),
        (40, [2 / KEPT_S, 2 / KEPT_S], False, 4),
    ],
)
def test_replicas_follow_the_queue_and_the_evictions(
    requests: float, turnovers: list[float], has_shared_tier: bool, wanted: int
) -> None:
    assert wanted_replicas(requests, 16, turnovers, has_shared_tier=has_shared_tier) == wanted


@pytest.mark.parametrize(("text", "size"), [("1", (1, 1)), ("3", (3, 3)), ("2-8", (2, 8)), (" 2-2 ", (2, 2))])
def test_sizes(text: str, size: tuple[int, int]) -> None:
    assert FleetConfig.parse_replicas(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8-2", "65", "2-", "two", "1-65", "1-2-3", "9" * 30])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InvalidOption):
        FleetConfig.parse_replicas(text)


def test_seals_of_a_fleet_follow_the_secret_of_its_records(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"o" * 32)
    first, again, other = (
        sealed(config(remote_key_file=tmp_path / name)) for name in ("key", "key", "other")
    )
    assert first.server.sealing_key == again.server.sealing_key != other.server.sealing_key
    assert b"k" * 8 not in (first.server.sealing_key or b"")
    assert sealed(config()).server.sealing_key != sealed(config()).server.sealing_key
    assert "sealing_key" not in repr(ServerConfig(sealing_key=b"secret"))


def test_events_are_reached_at_the_address_of_their_machine() -> None:
    bound = KVEventsConfig("tcp://*:22001", "tcp://*:22002", "", as_arrays=False)
    assert bound.binds
    reached = bound.reached_at("10.0.0.7")
    assert (reached.endpoint, reached.replay_endpoint) == ("tcp://10.0.0.7:22001", "tcp://10.0.0.7:22002")
    assert bound.reached_at("fd00::7").endpoint == "tcp://[fd00::7]:22001"
    own = KVEventsConfig("tcp://127.0.0.1:22001", None, "", as_arrays=False)
    assert own.reached_at("127.0.0.1") == own


def test_clusters_have_the_settings_of_a_fleet() -> None:
    cluster = yaml.safe_load((DEPLOY / "ray-cluster.yml").read_text())
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        (start,) = (one for one in commands if "ray start" in one)
        found = dict(re.findall(r"(RAY_(?:SERVE_|USAGE_|worker)\w+)=(\S+)", start))
        assert found.pop("RAY_SERVE_HAPROXY_SOCKET_PATH").startswith("$HOME/")
        assert found == SETTINGS
    service = yaml.safe_load((DEPLOY / "kuberay.yml").read_text())["spec"]["rayClusterConfig"]
    for group in (service["headGroupSpec"], *service["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {one["name"]: one["value"] for one in container["env"]} == SETTINGS


def test_the_arguments_of_the_service_are_options() -> None:
    spec = yaml.safe_load((DEPLOY / "kuberay.yml").read_text())["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "rootstock.fleet.serve_app:fleet"
    given = {name: str(value) for name, value in application["args"].items()}
    FleetConfig.parse_replicas(given.pop("replicas"))
    assert int(given.pop("replicas-per-machine")) >= 1
    made = configuration_of(given.pop("model"), values_of(given))
    assert made.tier.remote is not None
    assert made.server.host == "0.0.0.0"
    with pytest.raises(InvalidOption):
        values_of({"max-btch": "7"})


@pytest.mark.parametrize(
    ("host", "address", "is_right"),
    [
        *(("127.0.0.1", None, True), ("localhost", None, True), ("0.0.0.0", None, True), ("::", None, True)),
        *(
            ("10.0.0.5", None, False),
            ("::1", None, False),
            ("127.0.0.1", "auto", False),
            ("0.0.0.0", "auto", True),
        ),
    ],
)
def test_haproxy_reaches_the_replicas(host: str, address: str | None, is_right: bool) -> None:
    size = FleetConfig(ray_address=address)
    if is_right:
        size.check(host)
        return
    with pytest.raises(InvalidOption):
        size.check(host)
