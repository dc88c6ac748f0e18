#!/bin/bash
# Starts a daemon with a small memory and an NVMe slab in a directory of its own, runs long_context.py, and cleans up.
#
#     run.sh [s3://BUCKET/PREFIX?...]
#
# With a bucket, as for kvtier serve --object, the slab is small, too, and the blocks go on into the bucket.
# Needs kvtier on the PATH and the Python package (PYTHON names the interpreter, python3 otherwise).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
data=$(mktemp -d)
trap 'kill "$daemon" 2>/dev/null && wait "$daemon" || true; rm -rf "$data"' EXIT
daemon=
tiers=(--nvme "$data/slab=512MiB")
[[ $# == 0 ]] || tiers=(--nvme "$data/slab=64MiB" --object "$1")
coproc SERVE { exec kvtier serve --data "$data" --dram 96MiB "${tiers[@]}" --listen "unix:$data/admin" --socket "$data/session" 2>"$data/log"; }
daemon=$SERVE_PID
read -r -t 60 -u "${SERVE[0]}" ready || { cat "$data/log" >&2; exit 1; }
echo "$ready" >"$data/ready"
"${PYTHON:-python3}" "$here/long_context.py" "unix:$data/session"
