"""H9: the server's stage of deploy/Dockerfile, run by its own instructions in a clean directory, without Docker.

COPY, RUN and ENV are carried out below a temporary directory, which stands for the image's /opt. The server starts
by ENTRYPOINT and CMD, with the variables of compose.yml and a small model that is made here. Its probes are asked, it
answers a chat, and SIGTERM drains it. Packages come from the index that pip is set up for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from common import ROOT, argument_parser, conclude, could_not, exactly

from deploy.dockerfiles import Instruction, stage_of
from rootstock.bench.tiny_model import ensure_tiny_model

SHOW = "H9"
ROOT_OF_IMAGE = "/opt/"
INSTALL_LIMIT_S = 1800
START_LIMIT_S = 300
# Instructions about users, who are the same here.
NOT_RUN = ("chown", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ARG")


class Image:
    """The stage's file system below a directory, and what its instructions set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root
        # A fresh machine's: nothing of this process is inherited but the way to the package index.
        kept = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith("PIP_") or name.lower().endswith("_proxy")
        }
        self.command: list[str] = []

    def at(self, text: str) -> str:
        """Returns a text with the image's paths below the root."""
        return text.replace(ROOT_OF_IMAGE, f"{self.root}{ROOT_OF_IMAGE}")

    def carry_out(self, instruction: Instruction) -> None:
        rest = instruction.rest
        match instruction.name:
            case "WORKDIR":
                self.folder = Path(self.at(rest))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    copy(ROOT / source, self.folder / target)
            case "RUN" if not rest.startswith("chown"):
                print(f"$ {rest}", flush=True)
                subprocess.run(
                    ["/bin/sh", "-c", self.at(rest)],
                    cwd=self.folder,
                    env=self.environment,
                    check=True,
                    timeout=INSTALL_LIMIT_S,
                )
            case "ENV":
                name, value = rest.split("=", 1)
                self.environment[name] = self.at(value)
            case "ENTRYPOINT" | "CMD":
                self.command += map(self.at, instruction.words)
            case name if name not in NOT_RUN and name != "RUN":
                raise ValueError(
                    f"deploy/Dockerfile has an instruction that this script does not know: {name}"
                )


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        shutil.copy(source, target)


def main() -> None:
    arguments = argument_parser(__doc__)
    arguments.add_argument("--port", type=int, default=18_764)
    port = arguments.parse_args().port
    with tempfile.TemporaryDirectory() as folder:
        image = Image(Path(folder))
        began = time.monotonic()
        for instruction in stage_of(ROOT / "deploy" / "Dockerfile", "server"):
            image.carry_out(instruction)
        figures: dict[str, Any] = {"built_s": round(time.monotonic() - began, 1)}
        model = ensure_tiny_model(folder=Path(folder))
        compose = yaml.safe_load((ROOT / "deploy" / "compose.yml").read_text())
        asked = compose["services"]["rootstock"]["environment"]
        drain = asked["ROOTSTOCK_DRAIN_TIMEOUT"]
        image.environment |= {
            "ROOTSTOCK_MODEL": str(model),
            "ROOTSTOCK_DRAIN_TIMEOUT": drain,
            "ROOTSTOCK_DISK_BUDGET": "1GiB",
            "ROOTSTOCK_KV_BUDGET": "64MiB",
            "ROOTSTOCK_PORT": str(port),
            "ROOTSTOCK_HOST": "127.0.0.1",  # not open to others while this script runs
        }
        figures |= served(image, f"http://127.0.0.1:{port}")
    conclude(
        SHOW,
        figures,
        {
            "package": exactly("of the image"),
            "ready_status": exactly(200),
            "live_status": exactly(200),
            "chat_status": exactly(200),
            "metrics_status": exactly(200),
            "stream_finished": exactly(True),
            "draining_status": exactly(503),
            "refused_status": exactly(503),
            "exit_status": exactly(0),
            "disk_tier_written": exactly(True),
        },
    )


def served(image: Image, url: str) -> dict[str, Any]:
    """Starts the image's command, asks the server, and drains it."""
    print(f"$ {' '.join(image.command)}", flush=True)
    process = subprocess.Popen(image.command, cwd=image.folder, env=image.environment)
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            if not wait_for_status(client, 200, process):
                could_not(SHOW, "the server did not become ready")
            figures: dict[str, Any] = {
                "package": package_of(image),
                "ready_status": client.get("/readyz").status_code,
                "live_status": client.get("/livez").status_code,
                "chat_status": chat(client).status_code,
                "metrics_status": client.get("/metrics").status_code,
            }
            figures |= drained(client, process)
        figures["exit_status"] = process.wait(120)
        disk = Path(image.environment["ROOTSTOCK_DISK_DIR"])
        figures["disk_tier_written"] = any(path.is_file() for path in disk.rglob("*"))
        return figures
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def drained(client: httpx.Client, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Sends SIGTERM during a stream. Returns its end, and what others are told."""
    began = threading.Event()
    texts: list[str] = []

    def read() -> None:
        body = {"prompt": "On and on", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                texts.append(line)
                began.set()

    reader = threading.Thread(target=read)
    reader.start()
    began.wait(60)
    process.send_signal(signal.SIGTERM)
    wait_for_status(client, 503, process)
    figures = {
        "draining_status": client.get("/readyz").status_code,
        "refused_status": chat(client).status_code,
    }
    reader.join(120)
    return figures | {"stream_finished": [text for text in texts if text][-1] == "data: [DONE]"}


def chat(client: httpx.Client) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "How do trees grow?"}], "max_tokens": 8}
    return client.post("/v1/chat/completions", json=body)


def wait_for_status(client: httpx.Client, status: int, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if client.get("/readyz").status_code == status:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    return False


def package_of(image: Image) -> str:
    """Returns whether the image's Python imports the package that was installed in it."""
    python = Path(image.command[0]).with_name("python")
    code = "import rootstock; print(rootstock.__file__)"
    done = subprocess.run(
        [python, "-c", code],
        cwd=image.folder,
        env=image.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    own = str(image.root) in done.stdout and "site-packages" in done.stdout
    return "of the image" if own else done.stdout.strip()


if __name__ == "__main__":
    main()
