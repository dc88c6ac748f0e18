#!/usr/bin/env bash
# A tour: a daemon on small tiers, a real request trace replayed with every byte
# verified, a clean stop and a restart, and the same again. It fails when a byte
# is wrong or a block is lost.
#
#   e2e/tour.sh KVTIER TRACE
set -euo pipefail

kvtier=$(realpath "$1")
trace=$(realpath "$2")
# Beside the program and not in the directory for temporary files, which may be
# in memory.
dir=$(mktemp -d "$(dirname "$kvtier")/tour.XXXXXX")
daemon=

cleanup() {
	if [[ -n $daemon ]]; then
		kill -KILL "$daemon" 2>/dev/null || true
		wait "$daemon" 2>/dev/null || true
	fi
	rm -rf "$dir"
}
trap cleanup EXIT

say() { printf '\n== %s\n' "$*"; }
fail() {
	printf 'tour: %s\n' "$*" >&2
	sed 's/^/  daemon: /' "$dir/log" >&2
	exit 1
}

# start runs the daemon until it is ready and sets server to its address.
start() {
	printf '$ kvtier serve --data DIR --listen 127.0.0.1:0 --dram 128MiB --nvme DIR/slab=768MiB\n'
	rm -f "$dir/out"
	mkfifo "$dir/out"
	"$kvtier" serve --data "$dir/data" --listen 127.0.0.1:0 --dram 128MiB --nvme "$dir/slab=768MiB" >"$dir/out" 2>>"$dir/log" &
	daemon=$!
	local line=
	read -r line <"$dir/out" || fail "the daemon ended before it was ready"
	printf '%s\n' "$line"
	[[ $line == "ready "* ]] || fail "want a line with ready"
	server=${line#ready }
}

# stop ends the daemon as an operator would.
stop() {
	kill -TERM "$daemon"
	local code=0
	wait "$daemon" || code=$?
	daemon=
	((code == 0)) || fail "the daemon's exit code is $code"
	grep 'msg=stopped' "$dir/log" | tail -1
}

# field prints the first number in the row of a report.
field() { awk -v name="$1" 'index($0, name) == 1 { sub(name, ""); print $1 + 0; exit }' "$2"; }

say "1. A daemon with 128 MiB of DRAM and 768 MiB of NVMe"
: >"$dir/log"
start

say "2. Replay: match each prompt's blocks, get the hits, put the misses, check every byte"
printf '$ kvtier replay %s --block-bytes 64KiB --verify\n' "$(basename "$trace")"
"$kvtier" replay "$trace" --server "$server" --block-bytes 64KiB --verify | tee "$dir/first" || fail "the replay failed"

say "3. Where the blocks are now"
printf '$ kvtier stat\n'
"$kvtier" stat --server "$server" | sed "s|$dir|DIR|" | tee "$dir/stat" || fail "stat failed"
blocks=$(field blocks "$dir/stat")

say "4. Stop (SIGTERM): what is only in DRAM goes down to NVMe"
stop
down=$(sed -n 's/.*brought_down=\([0-9]*\).*/\1/p' "$dir/log")

say "5. Check the stopped daemon's files"
printf '$ kvtier verify --data DIR\n'
"$kvtier" verify --data "$dir/data" | sed "s|$dir|DIR|" || fail "verify failed"

say "6. Start again, and read everything back"
start
printf '$ kvtier replay %s --check-only\n' "$(basename "$trace")"
"$kvtier" replay "$trace" --server "$server" --check-only | tee "$dir/check" || fail "the check failed"
present=$(field present "$dir/check")
[[ $present == "$blocks" ]] || fail "$blocks blocks were there before the stop, $present after it"

say "7. Replay the same requests again"
printf '$ kvtier replay %s --block-bytes 64KiB --verify\n' "$(basename "$trace")"
"$kvtier" replay "$trace" --server "$server" --block-bytes 64KiB --verify | tee "$dir/second" || fail "the second replay failed"
stop

say "Done"
printf 'hit    %s blocks the first time, %s the second\n' "$(field hits "$dir/first")" "$(field hits "$dir/second")"
printf 'moved  %s blocks from DRAM to NVMe by eviction, %s at the stop\n' "$((present - down))" "$down"
printf 'kept   %s of %s blocks over the restart, 0 wrong bytes\n' "$present" "$blocks"
