"""The start of a fleet on this machine, or on a cluster of Ray: from options to a running application."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rootstock.config import Configuration
from rootstock.errors import StartupError
from rootstock.fleet.replica import Load, load_model, sealed
from rootstock.fleet_config import FleetConfig
from rootstock.server.http.listen import url_at

if TYPE_CHECKING:
    from rootstock.fleet.serve_app import FleetPlan

# Settings of Ray Serve: its processes read them when they start. On a cluster they belong to the start of Ray on each
# node (deploy/ray-cluster.yml, deploy/kuberay.yml).
SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # The router reads prompts.
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # The one header that a router gets. It names the tenant, on whom the namespace of a prompt depends.
    "RAY_SERVE_SESSION_ID_HEADER_KEY": "authorization",
    # Otherwise each part of an answer passes from one thread to another.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # When a replica comes or goes, HAProxy starts anew, and answers of its old process go on for as long.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # In which the port of a replica that has ended is not used again. There are a thousand.
    "RAY_SERVE_PORT_QUARANTINE_S": "120",
    "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # the replicas are the work
}
_FILES = {  # of HAProxy, in a directory of this fleet's own
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_PORTS = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT")  # of HAProxy's own pages
_POLL_S = 0.2
_LOGGING = {"log_level": "ERROR", "enable_access_log": False}
_OBJECT_STORE_BYTES = 100 * 2**20  # Ray's least is 75 MiB; no object of a fleet is large


class RunningFleet:
    """A fleet that answers requests. `close` ends it, unless its cluster was running before."""

    def __init__(self, config: Configuration, plan: FleetPlan, load: Load, folder: Path | None) -> None:
        self._config, self._plan, self._load = config, plan, load
        self._folder = folder  # of files; None: the cluster is not ours
        host = config.server.host
        self.url = url_at("127.0.0.1" if host in ("0.0.0.0", "::") else host, config.server.port)

    def __enter__(self) -> RunningFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def deploy(self) -> None:
        """Starts the replicas, or restarts all of them, some at a time: requests go to the others meanwhile.

        Returns when the fleet answers. Raises StartupError.
        """
        from ray import serve

        from rootstock.fleet.serve_app import APPLICATION, application

        try:
            serve.run(
                application(self._config, self._plan, self._load), name=APPLICATION, logging_config=_LOGGING
            )
        except Exception as error:
            raise StartupError(f"The fleet did not start: {' '.join(str(error).split())}") from error

    def close(self) -> None:
        """Ends the fleet, if its cluster was started for it."""
        if self._folder is None:
            return
        import ray
        from ray import serve

        from rootstock.fleet.serve_app import APPLICATION, stopping_s

        with suppress(Exception):  # a cluster that has failed ends all the same
            # Before HAProxy, which ends at once: answers are sent to their end.
            serve.delete(APPLICATION, _blocking=False)
            until = time.monotonic() + stopping_s(self._config)
            while APPLICATION in serve.status().applications and time.monotonic() < until:
                time.sleep(_POLL_S)
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def start(config: Configuration, fleet: FleetConfig, load: Load = load_model) -> RunningFleet:
    """Starts Ray, or joins a cluster, and runs a fleet there. Raises StartupError.

    `load` makes a replica's engine; Ray imports it in the replica's process.
    """
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    folder = None
    if fleet.ray_address is None:
        folder = Path(tempfile.mkdtemp(prefix="rootstock-"))
        os.environ.update({name: str(folder / file) for name, file in _FILES.items()})
        os.environ["RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE"] = str(fleet.routers)
        os.environ.update(dict(zip(_PORTS, map(str, _free_ports(len(_PORTS))), strict=True)))
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _join(ray, fleet.ray_address, folder)
    from rootstock.fleet.serve_app import plan_of

    plan = plan_of(config, fleet)
    serve.start(
        proxy_location="HeadOnly" if folder is not None else "EveryNode",
        http_options={"host": config.server.host, "port": config.server.port},
        logging_config=_LOGGING,
    )
    whole = sealed(_with_whole_paths(config))
    running = RunningFleet(whole, plan, load, folder)
    try:
        running.deploy()
    except BaseException:
        running.close()
        raise
    return running


def _with_whole_paths(config: Configuration) -> Configuration:
    """Returns the configuration for processes with other working directories."""

    def whole(part: Any) -> Any:
        paths = {
            one.name: getattr(part, one.name).expanduser().absolute()
            for one in fields(part)
            if isinstance(getattr(part, one.name), Path)
        }
        return replace(part, **paths)

    directory = Path(config.model.model).expanduser()
    model = str(directory.absolute()) if directory.is_dir() else config.model.model
    parts = {one.name: whole(getattr(config, one.name)) for one in fields(config)}
    return Configuration(**parts | {"model": replace(parts["model"], model=model)})


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        probes = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _join(ray: Any, address: str | None, folder: Path | None) -> None:
    quiet: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True}
    try:
        if folder is None:
            ray.init(address=address, **quiet)
            return
        ray.init(
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "ray"),
            **quiet,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise StartupError(f"Ray did not start: {' '.join(str(error).split())}") from error
