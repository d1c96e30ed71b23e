# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# guest.sh - what the scripts that run in a machine share

tap_n=0
tap_failed=0

# check WHAT COMMAND [ARG...] - one line of TAP; the output only if it failed
check() {
	local what=$1 out
	shift
	tap_n=$((tap_n + 1))
	if out=$("$@" 2>&1); then
		echo "ok $tap_n - $what"
	else
		echo "not ok $tap_n - $what"
		printf '%s\n' "$out" | tail -20 | sed 's/^/# /'
		tap_failed=1
	fi
}

# within SECONDS COMMAND [ARG...] - until it succeeds
within() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		[ $SECONDS -lt $end ] || return 1
		sleep 0.2
	done
}

tap_end() {
	echo "1..$tap_n"
	exit $tap_failed
}
