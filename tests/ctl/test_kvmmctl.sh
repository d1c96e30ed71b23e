#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvmmctl against a real kvmmd: what it prints, and its exit statuses.
set -u

src=${KVMM_SRC:-$(cd "$(dirname "$0")/../.." && pwd)}
build=${KVMM_BUILD:-$src/build}
kvmmd=${KVMMD:-$build/test/kvmmd}
ctl=${KVMMCTL:-$build/kvmmctl}
tmp=$(mktemp -d "${TMPDIR:-/tmp}/ctl.XXXXXX") || exit 1
daemon=
finish() {
	[ -n "$daemon" ] && kill -KILL "$daemon" 2>/dev/null
	rm -rf "$tmp"
}
trap finish EXIT
unset KVMM_ADMIN_SOCKET
n=0
failed=0

result() {
	n=$((n + 1))
	if [ "$1" -eq 0 ]; then
		echo "ok $n - $2"
	else
		echo "not ok $n - $2"
		sed 's/^/# /' "$tmp/out"
		failed=1
	fi
}

# expect STATUS PATTERN ARGUMENT... - exit status, and a line of the output
expect() {
	local want=$1 pattern=$2 rc
	shift 2
	timeout 20 "$ctl" --socket "$tmp/a.sock" "$@" >"$tmp/out" 2>&1
	rc=$?
	[ $rc -eq "$want" ] || { echo "# status $rc, not $want"; return 1; }
	grep -q -- "$pattern" "$tmp/out"
}

expect 3 "no daemon listens" ping
result $? "no_daemon_is_status_3"

cat >"$tmp/c.json" <<EOF
{"state_dir": "$tmp", "admin": {"socket": "$tmp/a.sock"},
 "sockets": [{"path": "$tmp/k.sock", "tenant": "demo"}],
 "nodes": [{"name": "dram0", "kind": "host", "size": "64MiB",
            "size_max": "64MiB", "below": "nvme0"},
           {"name": "nvme0", "kind": "nvme", "size": "33MiB",
            "path": "$tmp/nvme", "free_floor_pct": 0}]}
EOF
"$kvmmd" --config "$tmp/c.json" >"$tmp/log" 2>&1 &
daemon=$!
for _ in {1..200}; do
	expect 0 serving ping && break
	sleep 0.05
done

expect 0 "kvmmd .*: serving, epoch 0x" ping
result $? "ping_says_version_and_epoch"

expect 0 "^dram0  *host  *online  *64 MiB" status
result $? "status_has_a_row_for_each_node"
expect 0 "nvme0: admission second-touch, .* of [23].* MiB a day left" status
result $? "status_says_what_may_still_be_written"
expect 0 "^k  *demo  *rw  *observe" status
result $? "status_has_a_row_for_each_socket"

expect 0 "start adopt, 0 of [0-9]* descriptors kept by nobody" status
result $? "status_says_what_a_restart_would_find"

expect 0 "^SPACE  *ID" space
result $? "space_lists"
expect 0 "^SPACE  *ID" sp li
result $? "words_may_be_shortened"
expect 1 'no space is "7"' space show 7
result $? "what_the_daemon_refuses_is_status_1"
expect 0 "^CLIENT  *NAME" client list
result $? "client_lists"
expect 0 "PID  *NAME" pins
result $? "pins_lists"
expect 0 "no space yet" mode bypass
result $? "mode_without_a_space_says_so"
expect 0 "all laws hold" check && expect 0 "all laws hold" check 5000
result $? "check_passes"

reexecuted() {
	expect 0 "\(serving\|starting\), epoch 0x.* after a gap of [0-9]* ms" daemon reexec &&
		kill -0 "$daemon" &&
		expect 0 '"gap_ms"' --json daemon reexec
}
reexecuted
result $? "daemon_reexec_waits_for_the_new_one"

expect 0 '"ok": true' --json status
result $? "json_is_the_daemons_answer"
python3 -c 'import json,sys; json.load(open(sys.argv[1]))' "$tmp/out" \
	2>/dev/null || ! command -v python3 >/dev/null
result $? "json_can_be_parsed"

bad_usage() {
	expect 2 "several commands" s && expect 2 "no command" nonsense &&
		expect 2 "what about" && expect 2 "milliseconds" check now && expect 2 "mode \[SPACE" mode off &&
		expect 2 "space \[list" space show &&
		expect 2 "daemon takes" daemon start &&
		expect 2 "a time is" --timeout=1x ping
}
bad_usage
result $? "a_bad_command_line_is_status_2"

expect 0 "kvmmctl [0-9]" --version
result $? "version_is_printed"

kill -STOP "$daemon"
expect 4 "no answer in 300 ms" --timeout=300ms ping
result $? "a_daemon_that_does_not_answer_is_status_4"
kill -CONT "$daemon"
expect 0 serving ping
result $? "and_goes_on_afterwards"

kill -TERM "$daemon"
wait "$daemon"
result $? "the_daemon_ends_well"
daemon=

echo "1..$n"
exit $failed
