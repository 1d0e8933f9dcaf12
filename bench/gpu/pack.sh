#!/bin/sh
# Fills bench/gpu/packages with the packages that a machine with torch, transformers and numba may lack: wheels for
# CPython 3.12 on x86-64 Linux, unpacked, so that no installer is needed there. `pip install` is not used.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(dirname -- "$(dirname -- "$here")")
python=${PYTHON:-python3}
limit_mib=64
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$python" -m pip download --quiet --dest "$wheels" --only-binary=:all: --implementation cp --python-version 3.12 \
  --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --constraint "$root/constraints.txt" \
  fastapi llguidance uvicorn httptools pydantic httpx prometheus-client typer rich xxhash jinja2 hypothesis pytest
rm -rf "$here/packages"
mkdir "$here/packages"
for wheel in "$wheels"/*.whl; do
  "$python" -m zipfile -e "$wheel" "$here/packages"
done
mib=$(du -sm "$here/packages" | cut -f1)
echo "bench/gpu/packages: $(ls "$wheels" | wc -l) packages, $mib MiB"
[ "$mib" -le "$limit_mib" ] || { echo "more than $limit_mib MiB" >&2; exit 1; }
