#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The runner must not call anything good that is not: each way for a test
# program to go wrong, and what the runner makes of it.
set -u
here=$(cd "$(dirname "$0")" && pwd)
run=$here/../run.sh
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/unit"
passed=0
failed=0

# program NAME BODY: a test program made of a few lines of shell
program() {
	printf '#!/bin/sh\n%s\n' "$2" >"$dir/unit/$1"
	chmod +x "$dir/unit/$1"
}

# expect WHAT STATUS LAST-LINE PROGRAM...
expect() {
	local what=$1 status=$2 last=$3 out rc
	shift 3
	out=$("$run" -b "$dir/build" -t 2 "$@" 2>&1)
	rc=$?
	if [ "$rc" -eq "$status" ] && [ "${out##*$'\n'}" = "$last" ] &&
	   [ "$(cat "$dir/build/test-logs/summary")" = "$last" ]; then
		passed=$((passed + 1))
	else
		echo "not as expected: $what (status $rc, wanted $status)"
		printf '%s\n' "$out" | sed 's/^/    /'
		failed=$((failed + 1))
	fi
}

cd "$dir" || exit 1
program tap 'echo 1..2; echo "ok 1 - a"; echo "ok 2 - b"'
program sum 'echo "3 passed, 0 failed"'
program bad 'echo "ok 1 - a"; echo "not ok 2 - b"; exit 1'
program sumbad 'echo "3 passed, 2 failed"; exit 1'
program crash 'echo "ok 1 - a"; kill -SEGV $$'
program status 'echo "ok 1 - a"; exit 3'
program nothing 'echo hello'
program skip 'echo "no such device"; exit 77'
program skipone 'echo "ok 1 - a"; echo "not ok 2 # SKIP b"'
program slow 'echo "ok 1 - a"; sleep 30'
program orphan 'echo "ok 1 - a"; sleep 30 & exit 0'
program args '[ "$1" = --small ] && echo "ok 1 - a"'
program scratch '[ -d "$TMPDIR" ] && touch "$TMPDIR/x" && echo "ok 1 - $TMPDIR" >'"$dir"'/where && cat '"$dir"'/where'

expect "TAP is counted" 0 "2 passed, 0 failed" unit/tap
expect "a closing line is counted" 0 "3 passed, 0 failed" unit/sum
expect "programs add up" 0 "5 passed, 0 failed" unit/tap unit/sum
expect "a failed test fails the run" 1 "1 passed, 1 failed" unit/bad
expect "so does a closing line with failures" 1 "3 passed, 2 failed" unit/sumbad
expect "the rest still runs after a failure" 1 "3 passed, 1 failed" unit/bad unit/tap
expect "a crash is a failure" 1 "1 passed, 1 failed" unit/crash
expect "an exit status is a failure" 1 "1 passed, 1 failed" unit/status
expect "a program without tests is a failure" 1 "0 passed, 1 failed" unit/nothing
expect "a program that is not there is a failure" 1 "0 passed, 1 failed" unit/none
expect "a skip is neither" 0 "2 passed, 0 failed" unit/skip unit/tap
expect "a skipped test is neither" 0 "1 passed, 0 failed" unit/skipone
expect "nothing but skips is no success" 1 "0 passed, 0 failed" unit/skip
expect "a timeout is a failure" 1 "1 passed, 1 failed" unit/slow
expect "a process left behind is a failure" 1 "1 passed, 1 failed" unit/orphan
expect "arguments are passed on" 0 "1 passed, 0 failed" "unit/args --small"
expect "a scratch folder is there" 0 "1 passed, 0 failed" unit/scratch

where=$(sed 's/^ok 1 - //' "$dir/where")
if [ -n "$where" ] && [ ! -e "$where" ]; then
	passed=$((passed + 1))
else
	echo "the scratch folder stayed: $where"
	failed=$((failed + 1))
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
