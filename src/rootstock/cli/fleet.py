"""`rootstock fleet`: several replicas of a model behind one address, by Ray Serve."""

from __future__ import annotations

import importlib.util
import queue
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from rootstock.cli import options
from rootstock.cli.output import LoadProgress
from rootstock.config import Configuration
from rootstock.engine.build import check_files
from rootstock.errors import InvalidOption, StartupError
from rootstock.fleet_config import FleetConfig
from rootstock.logs import announce, configure_logs
from rootstock.options import FLEET
from rootstock.runtime.select import locate_model

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
            help="Processes that choose the replica of a request. With two, requests go on when one has failed. On a "
            "cluster, RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE says how many run on each machine with HAProxy.",
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
    size.check(config.server.host)
    if importlib.util.find_spec("ray") is None:
        raise StartupError("A fleet needs Ray Serve: pip install 'rootstock[fleet]'")
    from rootstock.fleet.running import start

    if ray_address is None:
        _check(config)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with start(config, size) as running:
        shown = replicas if least < most else f"{most}"
        print(f"Rootstock serves {config.model.model} with {shown} replicas at {running.url}/v1", flush=True)
        if ray_address is None:
            _collect(signals)
            _until_the_end(running, signals)


def _check(config: Configuration) -> None:
    """Reads the files and binds the address once, before Ray is started for seconds. Raises StartupError."""
    from rootstock.server.access.guard import Keys
    from rootstock.server.http.listen import listen

    model = config.model
    with LoadProgress() as progress:
        directory = locate_model(model, progress)
    check_files(model, directory)
    Keys(config.server)
    listen(config.server.host, config.server.port).close()


def _collect(signals: queue.SimpleQueue[int]) -> None:
    """Has signals put into the queue, instead of ending the process."""
    for number in (*_ENDS, signal.SIGHUP):
        signal.signal(number, lambda sent, _frame: signals.put(sent))


def _until_the_end(running: RunningFleet, signals: queue.SimpleQueue[int]) -> None:
    """Restarts the replicas at each SIGHUP, until another signal comes."""
    while signals.get() not in _ENDS:
        announce("restarting the replicas, one after another")
        for number in _ENDS:  # a restart that does not end is given up
            signal.signal(number, signal.default_int_handler)
        try:
            running.deploy()
        except StartupError as error:
            announce(error.message)
        else:
            announce("all replicas have been restarted")
        _collect(signals)
    announce("ending the replicas (Ctrl-C again: at once)")
    signal.signal(signal.SIGINT, signal.default_int_handler)
