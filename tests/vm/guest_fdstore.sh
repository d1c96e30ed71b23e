#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What kvmmd parks is in systemd's fd store, comes back after a crash and a
# restart, stays with a process that re-executes itself, and is gone after a stop.
set -u
. ./guest.sh

cp -a root/. /
ldconfig
systemd-sysusers >/dev/null 2>&1
systemd-tmpfiles --create >/dev/null 2>&1
# A socket of kvmmd's own beside systemd's: it is parked.
sed -i 's|"sockets": \[|"sockets": [{"path": "/run/kvmm/own.sock", "tenant": "own"},|' \
	/etc/kvmm/kvmmd.json
systemctl daemon-reload

unit() {
	systemctl show -P "$1" kvmmd.service
}
answers() {
	kvmmctl ping >/dev/null 2>&1
}
# value PATH - a member of the status, as park.parked
value() {
	kvmmctl --json status | sed -n "/^  \"${1%.*}\": {/,/^  }/s/.*\"${1#*.}\": \"\?\([^\",]*\).*/\1/p"
}
has() {
	[ "$(value "$1")" "$2" "$3" ] || { kvmmctl --json status | tail -60; return 1; }
}
# back PID - another process serves
back() {
	answers && [ "$(unit MainPID)" != "$1" ]
}
stored() {
	[ "$(unit NFileDescriptorStore)" "$1" "$2" ]
}

check "the service starts" systemctl start kvmmd.service
check "it answers" within 20 answers
check "systemd keeps its descriptors" has park.keeper = systemd
check "it has parked some" has park.parked -ge 1
check "all that it wants to" has park.waiting -eq 0
check "and systemd has as many" stored -eq "$(value park.parked)"
check "nothing was found at first" has park.inherited -eq 0

pid=$(unit MainPID)
kill -KILL "$pid"
check "killed, it comes back" within 30 back "$pid"
check "it finds what was parked" has park.inherited -ge 1
check "it knows that there was no order" has start.unclean -eq 1
check "and how it ended" has start.why = "the last kvmmd ended without order (signal)"

pid=$(unit MainPID)
check "it can be re-executed" kvmmctl --timeout 30s daemon reexec
check "in the same process" test "$(unit MainPID)" = "$pid"
check "which systemd takes for active" test "$(unit ActiveState)" = active
check "with what it had" has park.inherited -ge 1
check "systemd has it still" stored -ge 1

check "a restart is in order" systemctl restart kvmmd.service
check "and answers" within 20 answers
check "ends are forgotten then" has start.unclean -eq 0

check "it stops" systemctl stop kvmmd.service
check "a stopped one holds nothing" stored -eq 0
tap_end
