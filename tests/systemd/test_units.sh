#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The units are what systemd understands, the default configuration is what
# kvmmd understands, and the two name the same socket.
set -u

src=${KVMM_SRC:-$(cd "$(dirname "$0")/../.." && pwd)}
kvmmd=${KVMM_BUILD:-$src/build}/kvmmd
[ -x "$kvmmd" ] || kvmmd=${KVMMD:-}
tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvmm-units.XXXXXX") || exit 1
trap 'rm -rf "$tmp"' EXIT

n=0
failed=0
result() {
	n=$((n + 1))
	if [ "$1" -eq 0 ]; then
		echo "ok $n - $2"
	else
		echo "not ok $n - $2"
		failed=1
	fi
}

if ! command -v systemd-analyze >/dev/null; then
	echo "systemd-analyze is not installed, so nothing can judge the units"
	exit 77
fi

# The units name the installed program; judge them with the one just built.
mkdir "$tmp/units"
for u in "$src"/systemd/*.service "$src"/systemd/*.socket "$src"/systemd/*.slice; do
	sed "s|/usr/bin/kvmmd|$kvmmd|" "$u" >"$tmp/units/${u##*/}"
done

# Manual pages that are not installed here are no fault of the units.
verify() {
	systemd-analyze verify --man=no "$tmp"/units/kvmmd.service \
		"$tmp"/units/kvmmd.socket "$tmp"/units/kvmm.slice \
		>"$tmp/verify" 2>&1
	local rc=$?
	grep "$tmp\|kvmm" "$tmp/verify" && return 1
	return $rc
}
verify
result $? "units_are_accepted_by_systemd_analyze"

# A unit with a mistake is found: the check above can fail.
planted() {
	echo "Watchdog=1" >>"$tmp/units/kvmmd.service"
	verify >/dev/null
	local rc=$?
	sed -i '$d' "$tmp/units/kvmmd.service"
	[ $rc -ne 0 ]
}
# Appended to [Install], where no Watchdog= exists.
planted
result $? "a_planted_mistake_is_found"

exposure() {
	systemd-analyze security --offline=yes --threshold=25 \
		"$tmp/units/kvmmd.service" >"$tmp/security" 2>&1 && return 0
	tail -n 3 "$tmp/security"
	return 1
}
if systemd-analyze security --help 2>&1 | grep -q -- --offline; then
	exposure
	result $? "service_is_sandboxed"
fi

"$kvmmd" --check --config "$src/systemd/kvmmd.json" >"$tmp/check" 2>&1
result $? "default_configuration_is_accepted"

same_socket() {
	local name path
	name=$(sed -n 's/^FileDescriptorName=//p' "$src/systemd/kvmmd.socket")
	path=$(sed -n 's/^ListenSequentialPacket=//p' "$src/systemd/kvmmd.socket")
	grep -q "\"name\": \"$name\"" "$src/systemd/kvmmd.json" &&
		grep -q "\"path\": \"$path\"" "$src/systemd/kvmmd.json"
}
same_socket
result $? "socket_unit_and_configuration_agree"

# What the unit lets systemd keep, what the daemon is told and what it parks at
# most are one number.
same_store() {
	local max env park
	max=$(sed -n 's/^FileDescriptorStoreMax=//p' "$src/systemd/kvmmd.service")
	env=$(sed -n 's/^Environment=FDSTORE=//p' "$src/systemd/kvmmd.service")
	park=$(sed -n 's/^#define PARK_MAX[[:space:]]*\([0-9]*\).*/\1/p' \
		"$src/daemon/server/park.h")
	[ -n "$max" ] && [ "$max" = "$env" ] && [ "$max" = "$park" ]
}
same_store
result $? "unit_and_daemon_agree_on_what_is_kept"

if command -v systemd-sysusers >/dev/null && [ "$(id -u)" -eq 0 ]; then
	mkdir -p "$tmp/root/etc"
	systemd-sysusers --root="$tmp/root" "$src/systemd/sysusers.d/kvmm.conf" \
		>"$tmp/sysusers" 2>&1 && grep -q '^kvmm:' "$tmp/root/etc/passwd"
	result $? "user_can_be_made"
fi

echo "1..$n"
exit $failed
