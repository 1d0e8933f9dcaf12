"""`rootstock fleet`: several replicas of a model behind one address, by Ray Serve."""

from __future__ import annotations

import queue
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from rootstock.cli import options
from rootstock.config import Configuration
from rootstock.errors import InvalidOption, StartupError
from rootstock.fleet_config import FleetConfig
from rootstock.logs import announce, configure_logs
from rootstock.options import FLEET

if TYPE_CHECKING:
    from rootstock.fleet.running import RunningFleet

_ENDS = (signal.SIGINT, signal.SIGTERM)


@options.configured(hidden=True)
def fleet(
    ctx: typer.Context,
    config: Configuration,
    model: options.ModelPath,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N",
            rich_help_panel=FLEET,
            help="Number of replicas, or a range such as 2-8: more run while requests wait, or while caches evict "
            "prefixes that were used minutes ago.",
        ),
    ] = "2",
    replicas_per_machine: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=FLEET,
            help="Most replicas on one machine. They divide its cores and its memory.",
            show_default="all without --ray-address, else 1",
        ),
    ] = None,
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            max=8,
            rich_help_panel=FLEET,
            help="Processes that choose the replica of a request. With two, requests go on when one has failed.",
        ),
    ] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            rich_help_panel=FLEET,
            help="Running cluster of Ray: auto, or its address. A second call restarts the replicas, one after "
            "another.",
            show_default="Ray is started on this machine",
        ),
    ] = None,
    _config: options.ConfigFile = None,
) -> None:
    """Serve a model with several replicas behind one address. Requests go to the replica that has their beginning.

    It takes all options of `rootstock serve` for its replicas, too, but for --kv-events. Needs the extra `fleet`,
    which is Ray Serve. Without --ray-address, SIGHUP restarts the replicas, one after another."""
    configure_logs(config.server.log_format, config.server.log_level, access=config.server.access_log)
    options.announce_misplaced(ctx)
    if config.engine.kv_events is not None:
        allowed = "left out: replicas of a fleet choose their addresses"
        raise InvalidOption("--kv-events", str(config.engine.kv_events), allowed)
    if config.server.port == 0:
        raise InvalidOption("--port", "0", "a port from 1 to 65535 for a fleet")
    least, most = FleetConfig.parse_replicas(replicas)
    size = FleetConfig(least, most, routers, replicas_per_machine, ray_address)
    from rootstock.fleet.running import start

    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with start(config, size) as running:
        shown = replicas if least < most else f"{most}"
        print(f"Rootstock serves {config.model.model} with {shown} replicas at {running.url}/v1", flush=True)
        if ray_address is None:
            for number in (*_ENDS, signal.SIGHUP):
                signal.signal(number, lambda sent, _frame: signals.put(sent))
            _until_the_end(running, signals)


def _until_the_end(running: RunningFleet, signals: queue.SimpleQueue[int]) -> None:
    """Restarts the replicas at each SIGHUP, until another signal comes."""
    while signals.get() not in _ENDS:
        announce("restarting the replicas, one after another")
        try:
            running.deploy()
        except StartupError as error:
            announce(error.message)
        else:
            announce("all replicas have been restarted")
    announce("ending the replicas (Ctrl-C again: at once)")
    signal.signal(signal.SIGINT, signal.default_int_handler)
