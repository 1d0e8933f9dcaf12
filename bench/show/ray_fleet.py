"""A fleet on Ray Serve, as a program that fleet_sides.py starts: with a Ray of its own, for the life of the process.

    ray_fleet.py POLICY RUNTIME REPLICAS FOLDER MODEL [REMOTE_URL]

It prints its URL when it serves, as a line that begins with "> ", obeys the line "restart" with a rolling restart
and another such line, and ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from fleet_replicas import BUILDS, configuration

from rootstock.config import Configuration
from rootstock.fleet.running import SETTINGS, start
from rootstock.fleet_config import FleetConfig
from waiting import unused_port

CPUS = 4  # that Ray believes in: its processes ask for parts of them
OBJECT_STORE_BYTES = 100 << 20
Restart = Callable[[], None]


def main() -> None:
    policy, runtime, replicas, folder, model, *remote_url = sys.argv[1:]
    asked = configuration(Path(model), runtime, *remote_url)
    with unused_port() as port, unused_port() as metrics_port, unused_port() as stats_port:
        pass
    # Serve's HAProxy would take the same ports as one of another fleet on this machine.
    os.environ["RAY_SERVE_HAPROXY_METRICS_PORT"] = str(metrics_port)
    os.environ["RAY_SERVE_HAPROXY_STATS_PORT"] = str(stats_port)
    asked = replace(asked, server=replace(asked.server, port=port))
    serving = ours if policy == "ours" else rays_own
    with serving(policy, runtime, asked, int(replicas), Path(folder)) as (url, restart):
        print(">", url, flush=True)
        for line in sys.stdin:
            assert line == "restart\n"
            restart()
            print("> restarted", flush=True)


@contextlib.contextmanager
def ours(
    _policy: str, runtime: str, asked: Configuration, replicas: int, _folder: Path
) -> Iterator[tuple[str, Restart]]:
    with start(asked, FleetConfig(replicas, replicas), BUILDS[runtime]) as fleet:
        yield fleet.url, fleet.deploy


@contextlib.contextmanager
def rays_own(
    policy: str, runtime: str, asked: Configuration, replicas: int, folder: Path
) -> Iterator[tuple[str, Restart]]:
    """Serves with a policy of Ray's."""
    os.environ.update(environment(policy, folder))
    import ray
    from ray import serve
    from ray_policies import application

    ray.init(
        num_cpus=CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),
    )
    try:
        http = {"host": asked.server.host, "port": asked.server.port}
        serve.start(http_options=http, logging_config={"log_level": "ERROR"})
        serve.run(application(policy, asked, BUILDS[runtime], replicas))
        yield f"http://{asked.server.host}:{asked.server.port}", lambda: None
        serve.shutdown()
    finally:
        ray.shutdown()


def environment(policy: str, folder: Path) -> dict[str, str]:
    """Returns the variables that Ray reads when it is imported."""
    if policy != "pow2-direct":
        return {}
    proxy = folder / "proxy"
    proxy.mkdir()
    return {
        **SETTINGS,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
    }


if __name__ == "__main__":
    main()
