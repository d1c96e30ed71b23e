#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The README's client is short, compiles without a warning, runs against a real
# kvmmd, publishes the first time and hits the second, and says what is wrong
# when there is no kvmmd.
set -u
src=${KVMM_SRC:-$(cd "$(dirname "$0")/../.." && pwd)}
build=${KVMM_BUILD:-$src/build}
tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvmm-readme.XXXXXX") || exit 1
pid=
trap '[ -n "$pid" ] && kill "$pid" 2>/dev/null; wait; rm -rf "$tmp"' EXIT
passed=0 failed=0
ok() { if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "not: $2"; fi; }

awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' "$src/README.md" >"$tmp/client.c"
lines=$(sed -n '/^int main/,$p' "$tmp/client.c" | grep -c .)
[ "$lines" -gt 10 ] && [ "$lines" -le 28 ]
ok $? "README.md has a short C client: $lines lines"

${CC:-gcc} -Wall -Wextra -Werror -Wno-missing-field-initializers ${SAN:+-fsanitize=$SAN} \
	-I"$src/libkvmm/include" -o "$tmp/client" "$tmp/client.c" \
	-L"$build" -lkvmm -Wl,-rpath,"$build"
ok $? "the README's client compiles"

KVMM_SOCKET=$tmp/kvmm.sock timeout 20 "$tmp/client" >"$tmp/none" 2>&1
[ $? -eq 1 ] && grep -q "$tmp/kvmm.sock" "$tmp/none"
ok $? "without kvmmd it says so: $(cat "$tmp/none")"

cat >"$tmp/kvmmd.json" <<JSON
{ "state_dir": "$tmp",
  "admin": { "socket": "$tmp/admin.sock" },
  "sockets": [ { "path": "$tmp/kvmm.sock", "tenant": "readme", "rights": "rw", "mode": "on" } ],
  "nodes": [ { "name": "dram0", "kind": "host", "size": "64MiB" } ] }
JSON
"${KVMMD:-$build/kvmmd}" --config "$tmp/kvmmd.json" 2>"$tmp/log" &
pid=$!
for _ in $(seq 100); do
	KVMM_ADMIN_SOCKET=$tmp/admin.sock "${KVMMCTL:-$build/kvmmctl}" ping >/dev/null 2>&1 && break
	sleep 0.1
done
KVMM_SOCKET=$tmp/kvmm.sock timeout 20 "$tmp/client" >"$tmp/first" 2>&1
grep -qx 'published: 0' "$tmp/first"
ok $? "the first run publishes: $(cat "$tmp/first")"
KVMM_SOCKET=$tmp/kvmm.sock timeout 20 "$tmp/client" >"$tmp/second" 2>&1
grep -qx 'hit: computed once' "$tmp/second"
ok $? "the second run hits: $(cat "$tmp/second")"
[ "$failed" -eq 0 ] || cat "$tmp/log"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
