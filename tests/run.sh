#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh [-b BUILD] [-t SECONDS] PROGRAM... - run test programs one by one.
#
# A PROGRAM is a path, or a quoted path with arguments. It says what it did in
# one of two ways: TAP lines on stdout (`ok 1 - name`, what cmocka prints
# here), or a last line `N passed, N failed`. Exit status 77 means skipped, and
# the last line says why. A crash, a timeout, a process left behind, and a
# program that ran no test are failures.
#
# Programs find their surroundings in the environment: KVMM_SRC (project
# root), KVMM_BUILD, KVMMD (the test-built daemon), KVMMCTL, KVMM_POLICY_DIR,
# KVMM_TEST_LONG (set: full counts), KVMM_TEST_SEED (set: repeat that run),
# TMPDIR (a fresh folder, removed afterwards).
#
# Logs stay in BUILD/test-logs. The last line printed is the sum.
set -u

build=build
limit=
while getopts b:t: opt; do
	case $opt in
	b) build=$OPTARG ;;
	t) limit=$OPTARG ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))

src=$(cd "$(dirname "$0")/.." && pwd) || exit 1
mkdir -p "$build/test-logs" || exit 1
build=$(cd "$build" && pwd)
logs=$build/test-logs
summary=$logs/summary
rm -f "$summary"

export KVMM_SRC=$src KVMM_BUILD=$build
export KVMMD=$build/test/kvmmd KVMMCTL=$build/kvmmctl
export KVMM_POLICY_DIR=$build/policies
export CMOCKA_MESSAGE_OUTPUT=TAP
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}
export UBSAN_OPTIONS=print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}
tsan=halt_on_error=0:second_deadlock_stack=1
[ -f "$src/tests/tsan.supp" ] && tsan=$tsan:suppressions=$src/tests/tsan.supp
export TSAN_OPTIONS=$tsan${TSAN_OPTIONS:+:$TSAN_OPTIONS}
# A run is repeatable: the seed is in the log of every program.
: "${KVMM_TEST_SEED:=$((RANDOM << 15 | RANDOM))}"
export KVMM_TEST_SEED

# The thread sanitizer's shadow does not fit every address layout. Some
# containers forbid to ask for a fixed one; then it mostly fits as it is.
fixed_layout=
[[ ${SAN:-} == *thread* ]] && setarch -R true 2>/dev/null && fixed_layout=1

long=${KVMM_TEST_LONG:-}
fuzz_secs=${KVMM_FUZZ_SECS:-$([ -n "$long" ] && echo 60 || echo 3)}

scratch=$(mktemp -d "${TMPDIR:-/tmp}/kvmm-test.XXXXXX") || exit 1
child=
finish() {
	[ -n "$child" ] && kill -KILL -- "-$child" 2>/dev/null
	rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

limit_of() {
	local s
	case $1 in
	*/unit/*) s=120 ;;
	*/fuzz/*) s=$((fuzz_secs + 60)) ;;
	*) s=300 ;;
	esac
	[ -n "$long" ] && s=$((s * 10))
	[ -n "${SAN:-}" ] && s=$((s * 3))
	echo "${limit:-$s}"
}

# What a program's log says it did: "passed failed".
counts() {
	awk '
	/^(not )?ok [0-9]+ # SKIP/ { next }
	/^ok([ \t]|$)/		{ ok++ }
	/^not ok([ \t]|$)/	{ bad++ }
	/^[0-9]+ passed, [0-9]+ failed$/ { p = $1; f = $3; said = 1 }
	END	{ if (said && !ok && !bad) { ok = p; bad = f }
		  printf "%d %d\n", ok, bad }' "$1"
}

# Does process group $1 still have a live member? Zombies whose new parent has
# not looked yet do not count, and who was just told to go gets a moment.
group_alive() {
	local tries stat
	for tries in {1..10}; do
		kill -0 -- "-$1" 2>/dev/null || return 1
		stat=$(cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^.*) //' |
			awk -v g="$1" '$3 == g && $1 != "Z" && $1 != "X"')
		[ -n "$stat" ] || return 1
		sleep 0.05
	done
	return 0
}

passed=0
failed=0
skipped=0
started=$SECONDS

run_one() {
	local cmd name log secs t0 t1 rc ok bad why= state
	read -ra cmd <<<"$1"
	name=${cmd[0]#"$src"/}
	name=${name#"$build"/test/}
	name=${name#./}
	name=${name#"${build#"$src"/}"/test/}
	name=${name#tests/}
	log=$logs/${name//\//-}.log
	secs=$(limit_of "/${cmd[0]}")

	rm -rf "$scratch/t" && mkdir "$scratch/t"
	if [[ ${cmd[0]} == */fuzz/fuzz_* ]]; then
		# New finds go to a throw-away corpus, crashes to the logs.
		local corpus=$src/tests/fuzz/corpus/${cmd[0]##*/fuzz_}
		mkdir "$scratch/t/corpus"
		cmd+=(-max_total_time="$fuzz_secs" -seed="$KVMM_TEST_SEED"
		      -timeout=10 -rss_limit_mb=2048 -error_exitcode=1
		      -artifact_prefix="$logs/${name//\//-}-"
		      "$scratch/t/corpus")
		[ -d "$corpus" ] && cmd+=("$corpus")
	fi
	[[ ${cmd[0]} == */* ]] || cmd[0]=./${cmd[0]}
	[ -n "$fixed_layout" ] && cmd=(setarch -R "${cmd[@]}")

	echo "# KVMM_TEST_SEED=$KVMM_TEST_SEED ${cmd[*]}" >"$log"
	t0=${EPOCHREALTIME/[.,]/}
	# timeout(1) makes itself a process group: what is left of it later is
	# a process that the test forgot.
	TMPDIR=$scratch/t timeout -k 5 "$secs" "${cmd[@]}" >>"$log" 2>&1 </dev/null &
	child=$!
	wait "$child" 2>/dev/null
	rc=$?
	if group_alive "$child"; then
		why="left processes behind"
		kill -KILL -- "-$child" 2>/dev/null
	fi
	child=
	t1=${EPOCHREALTIME/[.,]/}

	read -r ok bad < <(counts "$log")
	if [[ ${cmd[*]} == */fuzz/fuzz_* && $rc -eq 0 ]]; then
		ok=$((ok + 1))
	fi
	if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
		why="no end after $secs s"
	elif [ "$rc" -gt 128 ]; then
		why="killed by signal $((rc - 128))"
	elif [ "$rc" -eq 77 ] && [ $((ok + bad)) -eq 0 ]; then
		skipped=$((skipped + 1))
		printf 'SKIP  %-36s %s\n' "$name" "$(tail -n 1 "$log")"
		return
	elif [ "$rc" -ne 0 ] && [ "$bad" -eq 0 ]; then
		why="exit status $rc"
	elif [ "$rc" -eq 0 ] && [ $((ok + bad)) -eq 0 ]; then
		why="ran no test"
	fi
	[ -n "$why" ] && [ "$bad" -eq 0 ] && bad=1

	passed=$((passed + ok))
	failed=$((failed + bad))
	state=ok
	[ "$bad" -gt 0 ] && state=FAIL
	printf '%-5s %-36s %4d passed %3d failed %7.1f s%s\n' "$state" "$name" \
		"$ok" "$bad" "$(((t1 - t0) / 100000))e-1" "${why:+  ($why)}"
	if [ "$bad" -gt 0 ]; then
		echo "----- $log"
		grep -n '^not ok' "$log" | head -n 20
		tail -n 60 "$log"
		echo "-----"
	fi
}

for prog in "$@"; do
	run_one "$prog"
done

[ $# -eq 0 ] && echo "no test programs"
[ "$skipped" -gt 0 ] && echo "$skipped skipped"
echo "seed $KVMM_TEST_SEED, $((SECONDS - started)) s, logs in $logs"
echo "$passed passed, $failed failed" | tee "$summary"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
