#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh [--small | --long] [NAME...] - check the protocol models with Spin.
#
# Runs the configurations of the file `table` beside this script, one by one:
# those marked small or full; with --small the small ones alone, with --long
# the long ones too; with NAMEs (shell patterns) those, however marked.
#
# A line each: name, what is expected, what came out, states stored, seconds.
# `ok` must be searched to the end without an error; `bad:GHOST` must end with
# the assertion over that ghost (bad:end_state: with an invalid end state, as
# Spin finds it by itself). Anything else, a search that was cut short
# included, is a failure. The last line is the sum.
#
# Limits of a configuration: 300 s and 4,000 MiB. Scratch files go under $O when
# that is set, and away at the end.
set -u

here=$(cd "$(dirname "$0")" && pwd) || exit 1
secs=300
mib=4000

sets='small full'
names=()
for arg; do
	case $arg in
	--small) sets='small' ;;
	--long) sets='small full long' ;;
	-*) echo "usage: ${0##*/} [--small | --long] [NAME...]" >&2; exit 2 ;;
	*) names+=("$arg") ;;
	esac
done

for tool in spin "${CC:=gcc}"; do
	command -v "$tool" >/dev/null || {
		echo "${0##*/}: no $tool here; on Debian: apt-get install spin gcc" >&2
		exit 1
	}
done

[ -n "${O:-}" ] && { mkdir -p "$O" || exit 1; }
scratch=$(mktemp -d "${O:-${TMPDIR:-/tmp}}/kvmm-model.XXXXXX") || exit 1
scratch=$(cd "$scratch" && pwd) || exit 1
child=
finish() {
	[ -n "$child" ] && kill -KILL -- "-$child" 2>/dev/null
	rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Run a command for at most $secs; timeout(1) makes it a process group.
limited() {
	timeout -k 5 "$secs" "$@" &
	child=$!
	wait "$child"
	local rc=$?
	child=
	return $rc
}

wanted() { # name set
	local pat
	if [ ${#names[@]} -gt 0 ]; then
		for pat in "${names[@]}"; do
			# shellcheck disable=SC2053
			[[ $1 == $pat ]] && return 0
		done
		return 1
	fi
	[[ " $sets " == *" $2 "* ]]
}

# What a search's output says.
verdict() { # rc
	local text
	if [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; then
		echo timeout
	elif grep -q 'invalid end state (at' out; then
		echo end_state
	elif text=$(grep -o 'assertion violated .*(at' out); then
		sed -n 's/.*!(\([a-z_]*\)).*/\1/p' <<<"$text" | grep . ||
			echo unnamed
	elif grep -qE 'search depth too small|reached -DMEMLIM|out of memory|VECTORSZ' out; then
		echo incomplete
	elif [ "$1" -eq 0 ] && grep -q 'errors: 0$' out &&
	     ! grep -q 'Search not completed' out; then
		echo ok
	else
		echo broken
	fi
}

check() { # file depth flags...
	local file=$1 depth=$2
	shift 2
	spin -a "$@" "$here/$file" >spin.log 2>&1 </dev/null || {
		result='not parsed'
		tail -n 5 spin.log
		return
	}
	# no partial order reduction: it saves a quarter here, and is then one
	# thing less to believe (SIGKILL is an `unless` around whole processes)
	"$CC" -w -DSAFETY -DNOREDUCE "${more[@]}" -DMEMLIM=$mib \
		-DVECTORSZ=1024 -o pan pan.c >cc.log 2>&1 || {
		result='not compiled'
		tail -n 5 cc.log
		return
	}
	limited ./pan -m"$depth" -w22 >out 2>&1
	result=$(verdict $?)
	states=$(awk '/states, stored/ { print $1; exit }' out)
}

passed=0
failed=0
format='%-26s %-21s %-16s %10s %7s%s\n'
# shellcheck disable=SC2059
printf "$format" name expect result states seconds ''
while read -r name expect set depth file flags; do
	[[ -z $name || $name == '#'* ]] && continue
	wanted "$name" "$set" || continue
	rm -rf "$scratch/t"
	mkdir "$scratch/t" && cd "$scratch/t" || exit 1
	states=-
	case $set in
	small)	more=(-O0) ;;			# compiling takes longest
	long)	more=(-O1 -DCOLLAPSE) ;;	# slower, in half the memory
	*)	more=(-O1) ;;
	esac
	start=${EPOCHREALTIME/[.,]/}
	# shellcheck disable=SC2086
	check "$file" "$depth" $flags
	ms=$(((${EPOCHREALTIME/[.,]/} - start) / 1000))
	if [ "$result" = "${expect#bad:}" ]; then
		passed=$((passed + 1))
		mark=
	else
		failed=$((failed + 1))
		mark='  <- not as expected'
	fi
	# shellcheck disable=SC2059
	printf "$format" "$name" "$expect" "$result" "${states:--}" \
		"$((ms / 1000)).$((ms % 1000 / 100))" "$mark"
done <"$here/table"

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
