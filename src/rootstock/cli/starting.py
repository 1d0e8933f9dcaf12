"""The steps of a server that do not depend on its models: before these are loaded, and from there to its end."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rootstock.background import in_background
from rootstock.cli.output import announce_drain
from rootstock.config import Configuration
from rootstock.errors import InvalidOption
from rootstock.runtime.model_files import Progress
from rootstock.server.routes.declared_prompts import check_warm_file, read_warm_file

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rootstock.engine.engine import Engine
    from rootstock.server.access.guard import Keys
    from rootstock.server.http.drain import Drain
    from rootstock.server.models.registry import ModelRegistry
    from rootstock.server.observe.tracing import Tracing

# With Python's own 5 ms each of several long bodies holds a step up for as long, each time that it needs the
# interpreter.
_SWITCH_S = 0.0002
# Numbers of new objects after which garbage is collected. With Python's own, full collections visit the objects of
# all imports several times while a model is loaded, which took a tenth of the load.
_LOADING_OBJECTS = 100_000
_SERVING_OBJECTS = gc.get_threshold()[0]


def importing_server(progress: Progress) -> Progress:
    """Returns a progress that also begins to import the server's modules when weights are read: reading them leaves
    the interpreter idle, and the import takes most of a second."""
    begun = False

    def report(stage: str, done: float) -> None:
        nonlocal begun
        if stage == "load" and not begun:
            begun = True
            in_background(_import_server, "imports")
        progress(stage, done)

    return report


def _import_server() -> None:
    import rootstock.server.app  # noqa: F401


@dataclass(frozen=True, slots=True)
class Start:
    """The parts of a server that exist before its models."""

    listener: socket.socket
    keys: Keys
    drain: Drain
    tracing: Tracing | None
    warm: Path | None

    @property
    def url(self) -> str:
        from rootstock.server.http.listen import url_of

        return url_of(self.listener)

    def serve(
        self,
        web: FastAPI,
        models: Engine | ModelRegistry,
        ready: str,
        max_connections: int,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Serves until a signal ends the process. Prints the line `ready` when the server accepts requests."""
        from rootstock.server.http.listen import serve

        # Keeps the garbage collector from visiting the loaded models, which stay until the end, between two tokens.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_SERVING_OBJECTS)

        def on_ready() -> None:
            print(ready, flush=True)
            if self.warm is not None:
                web.state.warmer.start(read_warm_file("--warm", self.warm))

        with closing(web.state.responses), models:
            serve(web, models, self.listener, on_ready, on_stop, max_connections, self.drain)
        if self.tracing is not None:
            self.tracing.close()  # exports the last spans


def prepare(config: Configuration) -> Start:
    """Read the files of the options and bind the address, before models are loaded for minutes.

    Raises StartupError."""
    from rootstock.runtime.host_memory import share_heaps
    from rootstock.server.access.guard import Keys
    from rootstock.server.http.drain import Drain
    from rootstock.server.http.listen import listen
    from rootstock.text.prompts.public_prompts import read_public_prompts

    share_heaps()
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(_LOADING_OBJECTS)
    server, tracing = config.server, None
    if server.traces:
        from rootstock.server.observe.tracing import open_tracing

        tracing = open_tracing()
    keys = Keys(server)
    if server.public_prompts is not None:
        read_public_prompts(server.public_prompts)
    if server.warm is not None:
        check_warm_file("--warm", server.warm)
        if not (config.engine.idle_work and config.cache.enabled):
            raise InvalidOption("--warm", str(server.warm), "left out with --no-idle-work and --no-cache")
    drain = Drain(server.drain_timeout_s, announce_drain)
    return Start(listen(server.host, server.port), keys, drain, tracing, server.warm)
