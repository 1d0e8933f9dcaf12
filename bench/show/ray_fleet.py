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
from pathlib import Path

from fleet_replicas import BUILDS, configuration

from rootstock.config import Configuration
from waiting import unused_port

CPUS = 4  # that Ray believes in: its processes ask for parts of them
OBJECT_STORE_BYTES = 100 << 20
Restart = Callable[[], None]


def main() -> None:
    policy, runtime, replicas, folder, model, *remote_url = sys.argv[1:]
    asked = configuration(Path(model), runtime, *remote_url)
    start = ours if policy == "ours" else rays_own
    with start(policy, runtime, asked, int(replicas), Path(folder)) as (url, restart):
        print(">", url, flush=True)
        for line in sys.stdin:
            assert line == "restart\n"
            restart()
            print("> restarted", flush=True)


@contextlib.contextmanager
def rays_own(
    policy: str, runtime: str, asked: Configuration, replicas: int, folder: Path
) -> Iterator[tuple[str, Restart]]:
    """Serves with a policy of Ray's."""
    os.environ.update(environment(policy, folder))
    import ray
    from ray import serve
    from ray_policies import application

    with unused_port() as port:
        pass
    ray.init(
        num_cpus=CPUS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(policy, asked, BUILDS[runtime], replicas))
        yield f"http://127.0.0.1:{port}", lambda: None
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
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    }


if __name__ == "__main__":
    main()
