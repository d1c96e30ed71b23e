#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-docs.sh - kvmmd.conf(5) has every key that the configuration knows, and
# no man page names another one that is not there.
set -u
cd "$(dirname "$0")/.." || exit 1

passed=0
failed=0

# verdict WHAT RC
verdict() {
	if [ "$2" = 0 ]; then
		passed=$((passed + 1))
	else
		echo "$1"
		failed=$((failed + 1))
	fi
}

page=daemon/man/kvmmd.conf.5
keys=$(sed -n 's/^\t{ "\([a-z_]*\)", \(key\|set\)_.*/\1/p' daemon/server/config.c | sort -u)

[ "$(wc -w <<<"$keys")" -ge 40 ]
verdict "keys are no longer found in daemon/server/config.c" $?
for k in $keys; do
	grep -q "^\.B.*\b$k\b" "$page"
	verdict "$page says nothing of \"$k\"" $?
done

while read -r ref; do
	name=${ref%(*} sec=${ref#*(}
	test -n "$(find daemon/man libkvmm/man -name "$name.${sec%)}")"
	verdict "a page refers to $ref, which is not there" $?
done < <(sed -n 's/^\.BR \(kvmm[a-z.-]*\) (\([0-9]\)).*/\1(\2)/p' \
	daemon/man/*.[1-8] libkvmm/man/*.[1-8] | sort -u)

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
