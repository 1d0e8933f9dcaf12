"""One replica of a fleet: the engine and the application of a server, in a process that Ray Serve runs."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO

from rootstock.cache.stats import CacheStats
from rootstock.config import Configuration
from rootstock.engine.build import Assembly, build_engine
from rootstock.engine.memory_watch import memory_limit
from rootstock.engine.sampling_defaults import SamplingDefaults
from rootstock.engine.sequence import Phase
from rootstock.engine.stats import EngineStats
from rootstock.errors import StartupError
from rootstock.fleet.policy import ReplicaReport
from rootstock.fleet.prompt_keys import ReplicaFacts, response_prefix
from rootstock.fleet_config import MOST_REPLICAS, KVEventsConfig
from rootstock.runtime.host_memory import share_heaps
from rootstock.runtime.select import device_memory, leave_out_torch, locate_model
from rootstock.server.access.guard import Keys
from rootstock.server.app import create_app
from rootstock.server.http.drain import Drain
from rootstock.tiers.remote.record_code import RecordCodes

Load = Callable[[Configuration], Assembly]

SWITCH_S = 0.0002  # between two turns of threads: a long body holds a step up for as long
_LEAST_MEASURED_TOKENS = 256  # of prompts between two measurements of the speed
_INERTIA = 0.9  # of the speed
_LEAST_PREFILL_SHARE = 0.2  # of the time of steps with prompt tokens
_FIRST_PORT, _LAST_PORT = 22_000, 30_000  # of KV events


def load_model(config: Configuration) -> Assembly:
    """Loads the model of a configuration. Raises StartupError."""
    model, server = config.model, config.server
    directory = locate_model(model, lambda stage, done: None)
    leave_out_torch((model,))
    defaults = SamplingDefaults.chosen(server.sampling_defaults, model.model, directory)
    made = build_engine(
        model,
        config.cache,
        config.engine,
        config.tier,
        chat_template=server.chat_template,
        directory=directory,
    )
    return replace(made, defaults=defaults)


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The place of a replica on its machine."""

    address: str  # of the machine, for routers on others
    name: str  # of the replica, unlike all others
    most: int  # replicas on the machine
    sharing: int  # replicas that share its memory: those of the machine, or of one GPU

    def configured(self, config: Configuration) -> Configuration:
        """Returns the configuration of a replica, with its part of the machine.

        Budgets that were given are of each replica. An automatic budget, such as half of the free memory, is
        divided among the replicas that the machine may have.
        """
        model, cache, engine, tier = config.model, config.cache, config.engine, config.tier
        if model.threads is None:
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
            model = replace(model, threads=max(1, cores // self.most))
        if cache.budget_bytes is None:
            cache = replace(cache, device_share=cache.device_share / self.sharing)
        if engine.memory_limit_bytes is None:
            limit = memory_limit(None, device_memory(model).kind)
            if limit is not None:
                engine = replace(engine, memory_limit_bytes=limit // self.most)
        # A browser's session belongs to one server, and its requests may reach any replica.
        server = replace(config.server, dashboard=False, response_id_prefix=response_prefix(self.name))
        return replace(config, model=model, cache=cache, engine=engine, tier=tier, server=server)


class OwnFiles:
    """The directory and the file that a replica has for itself: the first ones that no other replica uses."""

    def __init__(self, config: Configuration) -> None:
        """Takes them. Raises StartupError."""
        file = config.server.responses_file
        folder = config.tier.disk_dir or (None if file is None else file.parent)
        self.number = 0
        self._lock: IO[bytes] | None = None  # open as long as the process runs
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for self.number in range(MOST_REPLICAS):
                self._lock = (folder / f"replica-{self.number}.lock").open("wb")
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._lock.close()
                else:
                    return
        except OSError as error:
            raise StartupError(f"{folder} cannot be used: {error}") from error
        raise StartupError(f"{folder} has no place for a further replica.")

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def configured(self, config: Configuration) -> Configuration:
        """Returns the configuration with these files."""
        tier, server = config.tier, config.server
        if tier.disk_dir is not None:
            tier = replace(tier, disk_dir=tier.disk_dir / f"replica-{self.number}")
        if server.responses_file is not None:
            file = server.responses_file
            server = replace(server, responses_file=file.with_name(f"{file.stem}-{self.number}{file.suffix}"))
        return replace(config, tier=tier, server=server)


class Replica:
    """A running replica."""

    def __init__(self, config: Configuration, place: ReplicaPlace, load: Load = load_model) -> None:
        """Loads the model and starts its engine. Raises StartupError."""
        share_heaps()
        sys.setswitchinterval(SWITCH_S)
        self._files = OwnFiles(config)
        config = place.configured(self._files.configured(config))
        server, tracing = config.server, None
        if server.traces:
            from rootstock.server.observe.tracing import open_tracing

            tracing = open_tracing()
        events = _free_addresses(place.address)
        self.made = load(replace(config, engine=replace(config.engine, kv_events=events)))
        self.events = events.reached_at(place.address)
        self._tracing = tracing
        self.web = create_app(self.made, server, Drain(), Keys(server), tracing)
        self.made.engine.start()

    @property
    def facts(self) -> ReplicaFacts:
        engine = self.made.engine
        adapters = {one.name: one.fingerprint for one in engine.adapters.all}
        return ReplicaFacts.of(engine.namespace(), self.made.block_size, adapters)

    def close(self) -> None:
        """Ends requests, writes the records that the tiers below do not have yet, and stops the engine."""
        self.made.engine.stop()
        self.web.state.responses.close()
        if self._tracing is not None:
            self._tracing.close()
        self._files.release()


def _free_addresses(address: str) -> KVEventsConfig:
    """Returns two ports at which nothing listens now.

    They are below the ports that systems give to connections of their own, because the model is loaded before they
    are used. If another process takes one meanwhile, the replica does not start, and is started again.
    """
    # A wildcard where routers of other machines connect: the publisher binds no name of a machine.
    host = address if address.startswith("127.") else "*"
    free, offset = list[int](), os.getpid() * 2
    for number in range(_LAST_PORT - _FIRST_PORT):
        port = _FIRST_PORT + (offset + number) % (_LAST_PORT - _FIRST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("" if host == "*" else host, port))
            except OSError:
                continue
        free.append(port)
        if len(free) == 2:
            return KVEventsConfig(f"tcp://{host}:{free[0]}", f"tcp://{host}:{free[1]}", "", as_arrays=False)
    raise StartupError(f"No two ports from {_FIRST_PORT} to {_LAST_PORT} are free for KV events.")


def sealed(config: Configuration) -> Configuration:
    """Returns the configuration with a key by which each replica opens the seals of the others.

    It is made of the secret of --remote-key-file, or else lasts as long as this fleet.
    """
    path = config.tier.remote_key_file
    key = secrets.token_bytes(32)
    if path is not None:
        key = RecordCodes.of_file(path).derived(b"sealing-key")
    return replace(config, server=replace(config.server, sealing_key=key))


class SpeedMeter:
    """Reports of one replica's load and speed.

    Steps have a part that does not depend on their prompt tokens, such as their decodes. Steps without prompt tokens
    show how long it is, and the rest of the time is of prefills.
    """

    def __init__(self) -> None:
        self._steps = self._prompt_tokens = 0
        self._forward_s = 0.0
        self._decode_step_s = 0.0
        self._measured_tokens = self._measured_s = 0.0  # recent ones count more

    def report(self, stats: EngineStats) -> ReplicaReport:
        counters = stats.counters
        steps, forward_s = counters.steps - self._steps, counters.forward_s - self._forward_s
        prompt_tokens = counters.computed_tokens - counters.sampled_tokens - self._prompt_tokens
        if steps > 0 and prompt_tokens <= 0:
            self._decode_step_s = forward_s / steps
        elif prompt_tokens >= _LEAST_MEASURED_TOKENS:
            prefill_s = forward_s - steps * self._decode_step_s
            if prefill_s > _LEAST_PREFILL_SHARE * forward_s:  # or else it is the error of the other part
                self._measured_tokens = _INERTIA * self._measured_tokens + prompt_tokens
                self._measured_s = _INERTIA * self._measured_s + prefill_s
        self._steps, self._forward_s = counters.steps, counters.forward_s
        self._prompt_tokens = counters.computed_tokens - counters.sampled_tokens
        speed = self._measured_tokens / self._measured_s if self._measured_s > 0 else 0.0
        prefilling = sum(count for phase, count in stats.phases.items() if phase is not Phase.DECODE)
        return ReplicaReport(stats.waiting, stats.running, prefilling, speed)


class TurnoverMeter:
    """Measurement of how often a cache evicts as many tokens as it holds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_s = clock()
        self._evicted = 0

    def per_s(self, cache: CacheStats) -> float:
        """Returns the turnovers per second since the last call."""
        now_s, evicted = self._clock(), cache.evicted_tokens
        turnovers = (evicted - self._evicted) / max(1, cache.total_blocks * cache.block_size)
        passed_s = max(1e-3, now_s - self._at_s)
        self._at_s, self._evicted = now_s, evicted
        return turnovers / passed_s
