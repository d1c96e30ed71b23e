#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The demo in short, and the proof that its verdict can be no: with pages
# damaged on purpose it must count wrong bytes and fail. And it must leave
# neither files nor processes, also when it is interrupted.
set -u

demo=$KVMM_BUILD/demo/demo
data=$KVMM_SRC/tests/data
n=0
failed=0

check() {
	n=$((n + 1))
	if [ "$1" -eq 0 ]; then
		echo "ok $n - $2"
	else
		echo "not ok $n - $2"
		failed=1
	fi
}

# A folder of its own, so that what is left behind shows.
run() {
	rm -rf "$TMPDIR/demo"
	mkdir "$TMPDIR/demo"
	TMPDIR=$TMPDIR/demo "$demo" --quick --data "$data" "$@" \
		>"$TMPDIR/out" 2>"$TMPDIR/err"
}

left() {
	[ -z "$(ls -A "$TMPDIR/demo")" ]
}

# What the last run said, as comments between the TAP lines.
told() {
	echo "# exit status $rc"
	sed 's/^/# /' "$TMPDIR/out" "$TMPDIR/err"
}

run
rc=$?
cat "$TMPDIR/out"
[ $rc -eq 0 ] || told
check $rc 'everything holds on an undamaged run'
# One text, twice: computed, then by another process that finds all but its end.
first=$(sed -n 's/^  computed .* 0 tokens hit: //p' "$TMPDIR/out")
second=$(sed -n 's/^  from hits .* [1-9][0-9]* tokens hit: //p' "$TMPDIR/out")
same=1
[ -n "$first" ] && [ "$first" = "$second" ] && same=0
[ $same -eq 0 ] || told
check $same 'a text is generated twice, the second time from hits'
left
check $? 'nothing is left behind'

run --selftest-corrupt
rc=$?
noticed=0
[ $rc -eq 1 ] && grep -q '^wrong bytes [1-9]' "$TMPDIR/out" || noticed=1
[ $noticed -eq 0 ] || told
check $noticed 'damaged pages are noticed and make the demo fail'
left
check $? 'nothing is left behind after a failure'

TMPDIR_SAVED=$TMPDIR
(
	rm -rf "$TMPDIR/demo"
	mkdir "$TMPDIR/demo"
	TMPDIR=$TMPDIR_SAVED/demo exec "$demo" --quick --data "$data" \
		>"$TMPDIR_SAVED/out" 2>"$TMPDIR_SAVED/err"
) &
pid=$!
sleep 1
kill -TERM $pid
wait $pid
rc=$?
interrupted=0
[ $rc -eq 2 ] && left || interrupted=1
[ $interrupted -eq 0 ] || told
check $interrupted 'nothing is left behind after an interruption'

exit $failed
