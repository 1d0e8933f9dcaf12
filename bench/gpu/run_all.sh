#!/bin/sh
# Runs every GPU check, each in a process of its own: bench/gpu/run_all.sh [--interpret] [--only STAGE,…]
# Needs python3 with torch, triton, transformers, numpy and numba. Other packages come from bench/gpu/packages, which
# bench/gpu/pack.sh fills on a machine with a network.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(dirname -- "$(dirname -- "$here")")
python=${PYTHON:-python3}
PYTHONPATH="$root/src:$root/tests:$here:$root/bench/show${PYTHONPATH:+:$PYTHONPATH}"
# The packages are built for CPython 3.12.
if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
  PYTHONPATH="$PYTHONPATH:$here/packages"
fi
export PYTHONPATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
exec "$python" "$here/run_all.py" "$@"
