"""The shipped configurations of HAProxy and nginx, for replicas on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DEPLOY = Path(__file__).parents[1] / "deploy"
FILES = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}


def balancer_command(program: str, port: int, replicas: Mapping[str, int], folder: Path) -> list[str]:
    """Writes a program's configuration, in which only addresses are replaced, and returns the program's command.

    `replicas` has the ports of replica-1 and replica-2. nginx's configuration gets further ones like the last.
    """
    text = (DEPLOY / FILES[program]).read_text()
    for name in replicas:
        if f"{name}:8000" not in text:
            text = re.sub(r"( +server )replica-2(:8000.*\n)", rf"\g<0>\1{name}\2", text)
        assert f"{name}:8000" in text
    for name, replica_port in replicas.items():
        text = text.replace(f"{name}:8000", f"127.0.0.1:{replica_port}")
    text = text.replace("bind :8080", f"bind 127.0.0.1:{port}")
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
    path = folder / FILES[program]
    if program == "haproxy":
        path.write_text(text)
        return ["haproxy", "-db", "-f", str(path)]
    own = f"http {{\n    access_log off;\n    client_body_temp_path {folder}/body;"
    path.write_text(f"daemon off;\npid {folder}/pid;\nerror_log stderr;\n{text.replace('http {', own, 1)}")
    return ["nginx", "-p", str(folder), "-c", str(path)]
