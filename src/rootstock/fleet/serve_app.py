"""A fleet as an application of Ray Serve: replicas, and the router that chooses one for each request.

Ray Serve's HAProxy asks a router for the replica of a request, and sends it to the replica's own port: no answer
passes through Python twice. All that depends on the internals of Ray is in this file, and Ray's version is pinned:
`Application._with_ingress_request_router`, `choose_replica(_reserve=False)` and the answer of /internal/route.
"""

# Without annotations of the future: Ray makes the routes' class anew, where their names mean nothing.
import asyncio
import dataclasses
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from fastapi import FastAPI, Request
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rootstock.cache.resumable_blocks import BlockKeys
from rootstock.config import Configuration
from rootstock.engine.stats import EngineStats
from rootstock.errors import EngineStopped, InvalidOption, StartupError
from rootstock.fleet.autoscaling import wanted_replicas
from rootstock.fleet.event_listener import SWITCH_S, EventListener
from rootstock.fleet.policy import Candidate, ReplicaReport, RoutingPolicy
from rootstock.fleet.prefix_index import NoFreeSlot, PrefixIndex
from rootstock.fleet.prompt_keys import UNKNOWN, PromptRouter, ReplicaFacts, RoutedPrompt, response_prefix
from rootstock.fleet.replica import Load, Replica, ReplicaPlace, SpeedMeter, TurnoverMeter, load_model, sealed
from rootstock.fleet_config import MOST_REPLICAS, FleetConfig
from rootstock.option_table import configuration_of, values_of

APPLICATION, ENGINE, ROUTER = "rootstock", "Engine", "Router"
_NUMBER = "number"  # of a report: Ray repeats the last one
_TURNOVERS = "turnovers_per_s"
_FACTS, _EVENTS, _REPLAY = "facts", "events", "replay"  # of a replica's metadata
_STATS_PERIOD_S = 1.0
_EXPECTED_TOKENS_PER_S = 2_000.0  # of a replica that has not measured its speed
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 30.0
_ROUTING_REQUESTS = 10_000  # at once, at one router
_TOKENIZING_THREADS, _MOST_WORKING, _PROMPT_WITHIN_S = 4, 64, 2.0
_MOST_FACTS = 4  # different models of replicas, while a fleet changes
_REQUESTS_BESIDE = 64  # such as requests for metrics, of one replica at once
DEREGISTERING_S = 5.0  # in which HAProxy learns that a replica gets no requests any more
_STOPPING_S = 30.0  # in which a replica writes its records to the tiers below


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The numbers of a fleet."""

    least: int  # replicas
    most: int
    routers: int
    per_machine: int  # replicas
    cpus: float  # that Ray reserves for a replica
    gpus: float
    sharing: int  # replicas that share the memory in which the caches are
    is_local: bool  # all on this machine


class EngineReplica:
    """A replica, as Ray Serve runs it."""

    def __init__(self, config: Configuration, plan: FleetPlan, load: Load) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        address = "127.0.0.1" if plan.is_local else ray.util.get_node_ip_address()
        place = ReplicaPlace(address, name, plan.per_machine, plan.sharing)
        self._replica = Replica(config, place, load)
        self._meter, self._turnovers = SpeedMeter(), TurnoverMeter()
        self._reports = 0

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return self._replica.web

    def record_replica_metadata(self) -> dict[str, Any]:
        facts, events = self._replica.facts, self._replica.events
        return {
            _FACTS: dataclasses.asdict(facts),
            _EVENTS: events.endpoint,
            _REPLAY: events.replay_endpoint,
        }

    async def record_routing_stats(self) -> dict[str, Any]:
        self._reports += 1
        report = dataclasses.asdict(self._meter.report(await self._stats()))
        return {_NUMBER: self._reports, **report}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {_TURNOVERS: self._turnovers.per_s((await self._stats()).cache)}

    async def _stats(self) -> EngineStats:
        return await asyncio.to_thread(self._replica.made.engine.stats)

    async def check_health(self) -> None:
        health = self._replica.made.engine.health()
        if not health.alive:
            raise EngineStopped(health.detail)

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):  # the model was loaded
            await asyncio.to_thread(self._replica.close)


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Choice of a request's replica by its prompt, the replicas' blocks and their load."""

    facts_seen: ClassVar[
        tuple[ReplicaFacts, ...]
    ] = ()  # in this process, for which prompts' keys are made beforehand

    def initialize_state(self, **_: Any) -> None:
        self._index = PrefixIndex()
        self._listener: EventListener | None = None  # begins with the first replica
        self._slots: dict[ReplicaID, int] = {}
        self._facts: dict[ReplicaID, ReplicaFacts] = {}
        self._prefixes: dict[int, str] = {}  # of the ids of a replica's responses, by slot
        self._reported: dict[int, int] = {}  # number of the last report, by slot
        # By facts: while a fleet changes to another model, prompts have other keys at some replicas.
        self._policies: dict[ReplicaFacts, RoutingPolicy] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        here = {replica.replica_id for replica in replicas}
        for gone in [one for one in self._slots if one not in here]:
            self._forget(gone)
        for replica in replicas:
            id = replica.replica_id
            if id not in self._slots and replica.replica_metadata:
                self._follow(id, replica.replica_metadata)
            if id in self._slots and replica.routing_stats:
                self._report(id, dict(replica.routing_stats))

    def _report(self, id: ReplicaID, stats: dict[str, Any]) -> None:
        slot = self._slots[id]
        if (number := stats.pop(_NUMBER)) != self._reported.get(slot):
            self._reported[slot] = number
            self._policies[self._facts[id]].report(slot, ReplicaReport(**stats), time.monotonic())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _follow(self, id: ReplicaID, known: dict[str, Any]) -> None:
        try:
            slot = self._index.join()
        except NoFreeSlot:
            return  # it gets requests when all others are gone
        facts = ReplicaFacts.from_json(known[_FACTS])
        policy = self._policies.setdefault(facts, RoutingPolicy(self._index, facts.block_size))
        policy.add(slot, id.unique_id, _EXPECTED_TOKENS_PER_S)
        self._slots[id], self._facts[id] = slot, facts
        self._prefixes[slot] = response_prefix(id.unique_id)
        self._reported.pop(slot, None)
        PrefixRouter.facts_seen = (*(one for one in self.facts_seen if one != facts), facts)[-_MOST_FACTS:]
        self._listener = self._listener or EventListener(self._index)
        self._listener.follow(slot, known[_EVENTS], known[_REPLAY])

    def _forget(self, id: ReplicaID) -> None:
        slot = self._slots.pop(id, None)
        if slot is None:
            return
        facts = self._facts.pop(id)
        self._policies[facts].remove(slot)
        if facts not in self._facts.values():
            del self._policies[facts]
        assert self._listener is not None
        self._listener.forget(slot)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replicas, the best one first."""
        prompt = UNKNOWN
        if pending_request is not None:
            prompt = pending_request.kwargs.get("prompt", UNKNOWN)
            pending_request.routing_context.should_backoff = True
        of_slot = {
            self._slots[one.replica_id]: one for one in candidate_replicas if one.replica_id in self._slots
        }
        if not of_slot:
            return [candidate_replicas]
        now_s = time.monotonic()
        ranked: list[tuple[Candidate, RoutingPolicy, BlockKeys]] = []
        for facts, policy in self._policies.items():
            slots = [slot for slot, one in of_slot.items() if self._facts[one.replica_id] == facts]
            if slots:
                keys = prompt.keys(facts)
                ranked += (
                    (one, policy, keys) for one in policy.ranked(keys, len(prompt.tokens), slots, now_s)
                )
        if len(self._policies) > 1:
            ranked.sort(key=lambda found: found[0].cost_s)
        if prompt.stored_by:  # a stable sort: the others keep their order
            ranked.sort(key=lambda found: self._prefixes[found[0].slot] != prompt.stored_by)
        best, policy, keys = ranked[0]
        policy.assigned(best, keys, now_s)
        return [[of_slot[candidate.slot]] for candidate, _, _ in ranked]


_router_api = FastAPI(openapi_url=None)


@serve.ingress(_router_api)
class RouterReplica:
    """A process that answers where a request goes."""

    def __init__(self, engine: DeploymentHandle, config: Configuration) -> None:
        sys.setswitchinterval(SWITCH_S)
        self._engine = engine
        self._engine._init()  # begins to hear of replicas before the first request
        self._prompts = PromptRouter.load(config)
        self._threads = ThreadPoolExecutor(_TOKENIZING_THREADS, "rootstock-router")
        self._working = 0  # prompts that are being made, or wait for a thread

    @_router_api.post("/internal/route")
    async def route(self, request: Request) -> dict[str, Any]:
        """Returns the replica of a request, by the request's body."""
        prompt = await self._prompt(await request.body(), request.headers.get("authorization", ""))
        async with self._engine.choose_replica(prompt=prompt, _reserve=False) as chosen:
            replica = chosen._replica
            host, port = replica.backend_http_endpoint
            return {"host": host, "port": port, "replica_id": replica.replica_id.to_full_id_str()}

    async def _prompt(self, body: bytes, authorization: str) -> RoutedPrompt:
        """Returns the prompt, or UNKNOWN if it takes long or many others are being made: HAProxy waits for 5 s."""
        if self._working >= _MOST_WORKING:
            return UNKNOWN

        def made() -> RoutedPrompt:
            prompt = self._prompts.prompt(body, authorization)
            for facts in PrefixRouter.facts_seen:
                prompt.keys(facts)
            return prompt

        def ended(_: object) -> None:
            self._working -= 1

        self._working += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, made)
        work.add_done_callback(ended)
        try:
            return await asyncio.wait_for(asyncio.shield(work), _PROMPT_WITHIN_S)
        except TimeoutError:
            return UNKNOWN


class Autoscaling:
    """Ray Serve's policy: the controller asks it again and again how many replicas should run."""

    def __init__(self, running_at_once: int, has_shared_tier: bool) -> None:
        self._running_at_once = running_at_once
        self._has_shared_tier = has_shared_tier

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        turnovers = (context.aggregated_metrics or {}).get(_TURNOVERS, {})
        wanted = wanted_replicas(
            context.total_num_requests,
            self._running_at_once,
            list(turnovers.values()),
            has_shared_tier=self._has_shared_tier,
        )
        return wanted, context.policy_state


def application(config: Configuration, plan: FleetPlan, load: Load) -> serve.Application:
    """Returns the application of a fleet. Each deployment of it restarts the replicas, some at a time."""
    engine = config.engine
    at_once = engine.max_batch + engine.max_queue
    options: dict[str, Any] = {"num_replicas": plan.most}
    if plan.least < plan.most:
        policy = AutoscalingPolicy(
            policy_function=Autoscaling,
            policy_kwargs={
                "running_at_once": engine.max_batch,
                "has_shared_tier": config.tier.remote is not None,
            },
        )
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.least,
                max_replicas=plan.most,
                policy=policy,
            )
        }
    replicas = serve.deployment(
        serve.ingress()(EngineReplica),
        name=ENGINE,
        # The engine has a queue of its own, and refuses further ones with an error that clients understand.
        max_ongoing_requests=at_once + _REQUESTS_BESIDE,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        max_replicas_per_node=plan.per_machine,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=stopping_s(config),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_STATS_PERIOD_S
        ),
        **options,
    ).bind(config, plan, load)
    routers = serve.deployment(
        RouterReplica,
        name=ROUTER,
        num_replicas=plan.routers,
        max_ongoing_requests=_ROUTING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
    ).bind(replicas, config)
    return replicas._with_ingress_request_router(routers)


def stopping_s(config: Configuration) -> float:
    """Returns the seconds after which a replica that ends is killed."""
    return config.server.drain_timeout_s + DEREGISTERING_S + _STOPPING_S


def plan_of(config: Configuration, fleet: FleetConfig) -> FleetPlan:
    """Divides the machines of the cluster among the replicas."""
    is_local = fleet.ray_address is None
    per_machine = fleet.per_machine or (fleet.most if is_local else 1)
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    with_gpus = [machine for machine in machines if machine.get("GPU")]
    if with_gpus and config.model.device != "cpu":
        machines = with_gpus
    if not machines:
        raise StartupError("No machine of the cluster has a CPU for replicas yet: start its workers first.")
    cpus, gpus = (min(machine.get(name, 0.0) for machine in machines) for name in ("CPU", "GPU"))
    of_gpu = 0.0 if config.model.device == "cpu" else min(1.0, math.floor(100 * gpus / per_machine) / 100)
    return FleetPlan(
        fleet.least,
        fleet.most,
        fleet.routers,
        per_machine,
        cpus=math.floor(100 * cpus / per_machine) / 100,
        gpus=of_gpu,
        sharing=max(1, math.floor(1 / of_gpu)) if of_gpu else per_machine,
        is_local=is_local,
    )


def fleet(args: dict[str, Any]) -> serve.Application:
    """Returns the application for Ray Serve's own configuration files, such as a RayService of Kubernetes.

    `args` has options by their names: {"model": DIRECTORY, "replicas": "2-8", "max-batch": 32}.
    Raises InvalidOption.
    """
    given = {name.replace("_", "-"): str(value) for name, value in args.items()}
    model = given.pop("model", "")
    if not model or "kv-events" in given:
        raise InvalidOption("args", ", ".join(given), "a mapping with 'model', and without 'kv-events'")
    least, most = FleetConfig.parse_replicas(given.pop("replicas", "2"))
    per_machine = given.pop("replicas-per-machine", "1")
    if not (per_machine.isdigit() and 1 <= int(per_machine) <= MOST_REPLICAS):
        raise InvalidOption("replicas-per-machine", per_machine, f"a number from 1 to {MOST_REPLICAS}")
    config = configuration_of(model, values_of(given))
    size = FleetConfig(least, most, 1, int(per_machine), ray_address="auto")
    size.check(config.server.host)
    return application(sealed(config), plan_of(config, size), load_model)
