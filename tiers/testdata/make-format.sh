#!/usr/bin/env bash
# make-format.sh KVTIER DIRECTORY makes the data directories of a released format
# that format_test.go opens, with the kvtier of that release:
#
#	clean.tar.gz   stopped in order, started and stopped again
#	killed.tar.gz  killed after the last put
#	blocks.jsonl   what was done to each block, a line for each, the last one counts
#	namespaces.json
#
# A block holds its line over and over, cut at its length. What was put into DRAM
# only ("g2") is in the first, and may or may not be in the second.
set -euo pipefail

kvtier=$(realpath "$1")
out=$(realpath -m "$2")
work=/tmp/kvtier-format
export KVTIER_SERVER=unix:$work/socket
rm -rf "$work"
mkdir -p "$work" "$out"
cd "$work"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

k() { "$kvtier" "$1" --server "$KVTIER_SERVER" "${@:2}"; }

# note STATE NAMESPACE HASH LENGTH LINE PARENT
note() {
	printf '{"state":"%s","namespace":"%s","hash":"%s","length":%d,"line":"%s","parent":"%s"}\n' "$@" >>blocks.jsonl
}

# put STATE NAMESPACE HASH LENGTH LINE PARENT [FLAG...]
put() {
	note "${@:1:6}"
	(yes "$5" || true) | head -c "$4" | k put "$3" - --namespace "$2" --durable "${durable:-g3}" ${6:+--parent "$6"} "${spaces[$2]}" "${@:7}" >/dev/null
}

# hash N BYTES
hash() { printf "%0$((2 * $2))x" $((0x4b56 * 65536 + $1)); }

declare -A spaces=(
	[fixed]=--block-bytes=64KiB [varied]=--max-block-bytes=1MiB [short]=--block-bytes=1000
	[twenty]=--max-block-bytes=4KiB [cleared]=--max-block-bytes=8KiB
)

fill() {
	k ns open fixed --model llama-3-8b --revision r1 --dtype bf16 --layout NHD --tokens-per-block 16 --hash-algorithm sha256 \
		--hash-seed 7 --rank-layout tp2 --kv-group full --block-bytes 64KiB >/dev/null
	k ns open short --tenant someone --ttl 438000h "${spaces[short]}" >/dev/null
	local parent= h i
	for i in {1..12}; do
		h=$(hash "$i" 16)
		put present fixed "$h" 65536 "fixed $i" "$parent"
		parent=$h
	done
	i=0
	for n in 1 511 512 513 4096 65535 65536 65537 100000 300001 1048576; do
		i=$((i + 1))
		put present varied "$(hash $i 32)" $n "varied $i" ""
	done
	for i in {1..6}; do
		put present short "$(hash "$i" 8)" 1000 "short $i" ""
		put present twenty "$(hash "$i" 20)" $((600 * i)) "twenty $i" "" --ttl 438000h
		put cleared cleared "$(hash "$i" 16)" $((1300 * i)) "before $i" ""
	done
	put expired varied "$(hash 90 32)" 5000 "short-lived" "" --ttl 1s

	k rm --namespace fixed "$(hash 7 16)" >/dev/null
	note deleted fixed "$(hash 7 16)" 65536 "" ""
	k rm --namespace short "$(hash 3 8)" >/dev/null
	note deleted short "$(hash 3 8)" 1000 "" ""
	k rm --namespace cleared --all --yes >/dev/null
	put present cleared "$(hash 2 16)" 2600 "after 2" ""

	durable=g2
	for i in {20..23}; do
		put g2 fixed "$(hash $i 16)" 65536 "dram $i" ""
	done
	durable=g3
	k ns --json >namespaces.json
}

start() {
	: >ready
	"$kvtier" serve --data data --dram 128MiB --nvme data/g3.slab=128MiB --listen "$KVTIER_SERVER" --insecure >ready 2>log &
	pid=$!
	until grep -q ready ready; do sleep 0.1; done
}

stop() { # SIGNAL
	kill -"$1" $pid
	wait $pid 2>/dev/null || true
}

pack() { # NAME
	cp --sparse=always data/g3.slab sparse
	mv sparse data/g3.slab
	chmod 600 data/g3.slab
	tar --create --sparse --owner=0 --group=0 --numeric-owner --sort=name data | gzip -9n >"$out/$1.tar.gz"
	rm -rf data
}

start
fill
stop TERM
start # the catalog has tables too then
stop TERM
pack clean

rm blocks.jsonl
start
fill
stop KILL
pack killed

cp blocks.jsonl namespaces.json "$out/"
rm -rf "$work"
ls -l "$out"
