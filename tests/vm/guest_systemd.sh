#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The packaged units under the systemd of a distribution: they verify, the socket
# starts the service, the service is what its unit says, and whatever ends it,
# it comes back.
set -u
. ./guest.sh

cp -a root/. /
ldconfig
systemd-sysusers >/dev/null 2>&1
systemd-tmpfiles --create >/dev/null 2>&1
systemctl daemon-reload

unit() {
	systemctl show -P "$1" kvmmd.service
}
answers() {
	kvmmctl ping >/dev/null 2>&1
}
is() {
	[ "$(unit "$1")" "$2" "$3" ]
}
# back PID - another process serves
back() {
	answers && [ "$(unit MainPID)" != "$1" ] && is ActiveState = active
}

check "the units verify" systemd-analyze verify --man=no kvmmd.service kvmmd.socket kvmm.slice
check "the socket is enabled and started" systemctl enable --now kvmmd.socket
check "the socket is the group's" test "$(stat -c %U:%G:%a /run/kvmm/default.sock)" = kvmm:kvmm:660
check "the service starts" systemctl start kvmmd.service
check "it answers" within 20 answers
check "it runs as its own user" test "$(ps -o user= -p "$(unit MainPID)" 2>/dev/null || stat -c %U /proc/"$(unit MainPID)")" = kvmm
check "it is in the slice" is ControlGroup = /kvmm.slice/kvmmd.service
check "it says what it does" is StatusText != ""

pid=$(unit MainPID)
kill -KILL "$pid"
check "killed, it comes back" within 30 back "$pid"

# Stopped in its tracks it does not pet its watchdog: systemd ends it.
pid=$(unit MainPID)
kill -STOP "$pid"
check "hung, it comes back" within 60 back "$pid"

check "it stops in time" systemctl stop kvmmd.service
check "stopped, it is not failed" is Result = success
check "a restart serves" systemctl restart kvmmd.service
check "and answers" within 20 answers

echo '{"nodes": 1}' >/etc/kvmm/kvmmd.json
systemctl restart kvmmd.service 2>/dev/null
check "a refused configuration is not tried again" within 20 is ActiveState = failed
check "and its exit status says so" is ExecMainStatus = 78
tap_end
