#!/bin/bash
# usage: run.sh MODEL   (a directory or a name that vLLM takes)
# Starts a daemon, a prefill worker, and then a decode worker that loads what the first has computed.
# Needs kvtier on the PATH, vLLM and the Python package (PYTHON names the interpreter, python3 otherwise).
set -euo pipefail
model=${1:?usage: run.sh MODEL}
here=$(cd "$(dirname "$0")" && pwd)
data=$(mktemp -d)
trap 'kill "$daemon" 2>/dev/null && wait "$daemon" || true; rm -rf "$data"' EXIT
daemon=
coproc SERVE { exec kvtier serve --data "$data" --dram 256MiB --nvme "$data/slab=1GiB" --listen "unix:$data/admin" --socket "$data/session" 2>"$data/log"; }
daemon=$SERVE_PID
read -r -t 60 -u "${SERVE[0]}" ready || { cat "$data/log" >&2; exit 1; }
for part in prefill decode; do
    "${PYTHON:-python3}" "$here/worker.py" "$part" "$model" "unix:$data/session"
done
kvtier stat --server "unix:$data/admin" | grep -A1 TIER | head -2
