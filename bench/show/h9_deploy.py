"""H9: the server's stage of deploy/Dockerfile, run by its own instructions in a clean directory, without Docker.

COPY, RUN, ENV and the others are carried out below a temporary directory, which stands for the image's /opt.
The server starts by ENTRYPOINT and CMD, with the variables of compose.yml and a small model that is made here.
Where root runs the script and the system has mount namespaces, the server sees a read-only file system, as in
compose.yml, but for the volume and /tmp. The command of HEALTHCHECK and the probes are asked, the server answers a
chat, and SIGTERM drains it within the compose file's stop_grace_period.

Packages come from the index that pip is set up for. If root runs the script, the server has the user of USER,
provided that this user can read the Python of --python. Otherwise it has the user of the script.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from common import ROOT, argument_parser, at_most, conclude, could_not, exactly

from deploy.dockerfiles import Instruction, interpolated, stage_of
from rootstock.bench.tiny_model import ensure_tiny_model
from rootstock.options import parse_seconds

SHOW = "H9"
ROOT_OF_IMAGE = "/opt/"
INSTALL_LIMIT_S = 1800
START_LIMIT_S = 300
STREAM_TOKENS = 2_000
# Instructions that only tell Docker something, and which tests/deploy holds.
NOT_RUN = ("EXPOSE", "STOPSIGNAL")
# In a mount namespace of its own: each file system becomes read-only but the volume and a new /tmp. Arguments: the
# volume, the user, the group, the command.
READ_ONLY = """
set -e
volume=$1 user=$2 group=$3; shift 3
mount --make-rprivate /
mount -t tmpfs tmpfs /tmp
mount --bind "$volume" "$volume"
awk '{print $2}' /proc/self/mounts | while read -r at; do
  case $at in "$volume"|/tmp) ;; *) mount -o remount,bind,ro "$at" 2>/dev/null || true;; esac
done
if touch "$volume/../written" 2>/dev/null; then echo 'the file system can be written' >&2; exit 1; fi
exec setpriv --reuid "$user" --regid "$group" --clear-groups "$@"
"""


class Image:
    """The stage's file system below a directory, and the settings of its instructions."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.root = root
        self.folder = root
        # A fresh machine's: nothing of this process is inherited but the way to the package index.
        kept = ("LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith("PIP_") or name.lower().endswith("_proxy")
        }
        self.environment |= {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(root)}
        self.arguments: dict[str, str] = {}  # of the build
        self.command: list[str] = []
        self.health: list[str] = []
        self.user: dict[str, Any] = {}  # of processes, in subprocess' words; empty: that of this script
        self.volume = root

    def at(self, text: str) -> str:
        """Returns a text with the image's paths below the root."""
        return text.replace(ROOT_OF_IMAGE, f"{self.root}{ROOT_OF_IMAGE}")

    def carry_out(self, instruction: Instruction) -> None:
        rest = instruction.rest
        match instruction.name:
            case "ARG":
                name, default = rest.split("=", 1)
                self.arguments[name] = os.environ.get(name, default)
            case "WORKDIR":
                self.folder = Path(self.at(rest))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    copy(ROOT / source, self.folder / target)
            case "RUN" if rest.startswith("chown") and os.geteuid() != 0:
                print(f"  {rest}: not without root", flush=True)
            case "RUN":
                print(f"$ {rest}", flush=True)
                self.run(["/bin/sh", "-c", self.at(rest)], INSTALL_LIMIT_S).check_returncode()
            case "USER":
                self.become(*map(int, rest.split(":")))
            case "ENV":
                name, value = rest.split("=", 1)
                self.environment[name] = self.at(value)
            case "VOLUME":
                self.volume = Path(self.at(rest))
            case "HEALTHCHECK":
                self.health = [self.at(word) for word in json.loads(rest.split(" CMD ", 1)[1])]
            case "ENTRYPOINT" | "CMD":
                self.command += map(self.at, instruction.words)
            case name if name not in NOT_RUN:
                raise ValueError(
                    f"deploy/Dockerfile has an instruction that this script does not know: {name}"
                )

    def become(self, user: int, group: int) -> None:
        """Runs later processes as the image's user, where that is possible."""
        if os.geteuid() != 0:
            return
        asked = {"user": user, "group": group, "extra_groups": []}
        python = next((self.root / "opt").rglob("bin/python"))
        try:
            subprocess.run([python, "-c", ""], **asked, check=True, env={})  # type: ignore[call-overload]
        except (PermissionError, subprocess.CalledProcessError):
            print(f"  USER {user}:{group}: it cannot run {python.resolve()}", flush=True)
            return
        self.user = asked
        # Docker sets it so for a user without an entry in /etc/passwd. The image's ENV has another one.
        self.environment["HOME"] = "/"

    def start(self) -> tuple[subprocess.Popen[bytes], bool]:
        """Starts the image's command. Returns whether it sees a read-only file system, too."""
        namespaces = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
        if not self.user or namespaces.returncode != 0:
            return subprocess.Popen(self.command, cwd=self.folder, env=self.environment, **self.user), False
        owner = (str(self.user["user"]), str(self.user["group"]))
        command = ["unshare", "-m", "/bin/sh", "-c", READ_ONLY, "sh", str(self.volume), *owner, *self.command]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment), True

    def run(self, command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.arguments | self.environment,
            text=True,
            timeout=limit_s,
            **self.user,
        )

    def is_healthy(self) -> bool:
        return self.run(self.health, 60).returncode == 0


def copy(source: Path, target: Path) -> None:
    """Copies as the builder does: without the files that .dockerignore leaves out of its context."""
    if source.is_dir():
        lines = (ROOT / ".dockerignore").read_text().splitlines()
        left_out = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(*left_out))
    else:
        shutil.copy(source, target)


def main() -> None:
    arguments = argument_parser(__doc__)
    arguments.add_argument("--port", type=int, default=18_764)
    own = os.path.realpath(sys.executable)
    arguments.add_argument("--python", default=own, help="stands for the Python of the base image")
    options = arguments.parse_args()
    # Not below /tmp, where the server has another one.
    place = "/var/tmp" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(dir=place) as folder, tempfile.TemporaryDirectory(dir=place) as programs:
        Path(folder).chmod(0o755)  # another user runs the server
        # A script and no link: a virtual environment finds its library beside its interpreter.
        python = Path(programs) / "python"
        python.write_text(f'#!/bin/sh\nexec {options.python} "$@"\n')
        python.chmod(0o755)
        image = Image(Path(folder), Path(programs))
        began = time.monotonic()
        for instruction in stage_of(ROOT / "deploy" / "Dockerfile", "server"):
            image.carry_out(instruction)
        figures: dict[str, Any] = {"built_s": round(time.monotonic() - began, 1)}
        compose = yaml.safe_load((ROOT / "deploy" / "compose.yml").read_text())
        service = compose["services"]["rootstock"]
        given = {
            "ROOTSTOCK_MODEL": str(ensure_tiny_model(folder=Path(folder))),
            "ROOTSTOCK_DISK_BUDGET": "1GiB",
        }
        image.environment |= {
            name: interpolated(value, given) for name, value in service["environment"].items()
        }
        image.environment |= {
            "ROOTSTOCK_KV_BUDGET": "64MiB",
            "ROOTSTOCK_PORT": str(options.port),
            "ROOTSTOCK_HOST": "127.0.0.1",  # not open to others while this script runs
        }
        figures["user"] = "of the image" if image.user else "of this script"
        figures |= served(image, f"http://127.0.0.1:{options.port}")
    conclude(
        SHOW,
        figures,
        {
            "package": exactly("of the image"),
            "healthy_before": exactly(False),
            "healthy": exactly(True),
            "ready_status": exactly(200),
            "live_status": exactly(200),
            "chat_status": exactly(200),
            "metrics_status": exactly(200),
            "draining_ready_status": exactly(503),
            "draining_live_status": exactly(200),
            "draining_healthy": exactly(False),
            "draining_chat": exactly("503 draining"),
            "stream_finish": exactly("length"),
            "stream_tokens": exactly(STREAM_TOKENS),
            "exit_status": exactly(0),
            "stop_s": at_most(parse_seconds(service["stop_grace_period"], "stop_grace_period")),
            "disk_tier_written": exactly(True),
        }
        | ({"file_system": exactly("read-only")} if image.user else {}),
    )


def served(image: Image, url: str) -> dict[str, Any]:
    """Starts the image's command, asks the server, and drains it."""
    figures: dict[str, Any] = {"package": package_of(image), "healthy_before": image.is_healthy()}
    print(f"$ {' '.join(image.command)}", flush=True)
    process, is_read_only = image.start()
    figures["file_system"] = "read-only" if is_read_only else "that of this machine"
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            began = time.monotonic()
            if not wait_for_status(client, 200, process):
                could_not(SHOW, "the server did not become ready")
            figures |= {
                "start_s": round(time.monotonic() - began, 1),
                "healthy": image.is_healthy(),
                "ready_status": client.get("/readyz").status_code,
                "live_status": client.get("/livez").status_code,
                "chat_status": chat(client).status_code,
                "metrics_status": client.get("/metrics").status_code,
            }
            figures |= drained(client, process, image)
        disk = Path(image.environment["ROOTSTOCK_DISK_DIR"])
        return figures | {"disk_tier_written": any(path.is_file() for path in disk.rglob("*"))}
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def drained(client: httpx.Client, process: subprocess.Popen[bytes], image: Image) -> dict[str, Any]:
    """Sends SIGTERM during a stream. Returns the answers of the drain, and the stream's and the process' ends."""
    began = threading.Event()
    events: list[dict[str, Any]] = []

    def read() -> None:
        body = {
            "prompt": "On and on", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                began.set()

    reader = threading.Thread(target=read)
    reader.start()
    if not began.wait(60):
        could_not(SHOW, "the stream did not begin")
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    wait_for_status(client, 503, process)
    refused = chat(client)
    figures = {
        "draining_ready_status": client.get("/readyz").status_code,
        "draining_live_status": client.get("/livez").status_code,
        "draining_chat": f"{refused.status_code} {refused.json()['error']['code']}",
        "draining_healthy": image.is_healthy(),
    }
    reader.join(120)
    exit_status = process.wait(120)
    return figures | {
        "stream_finish": next(
            (c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]), None
        ),
        "stream_tokens": next((e["usage"]["completion_tokens"] for e in events if e.get("usage")), None),
        "exit_status": exit_status,
        "stop_s": round(time.monotonic() - asked, 1),
    }


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
    done = subprocess.run(
        [python, "-c", "import rootstock; print(rootstock.__file__)"],
        cwd=image.folder,
        env=image.environment,
        capture_output=True,
        text=True,
        check=True,
        **image.user,
    )
    own = str(image.root) in done.stdout and "site-packages" in done.stdout
    return "of the image" if own else done.stdout.strip()


if __name__ == "__main__":
    main()
