#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# `make deps` on machines that are not this one: package tools of our own stand
# first in the PATH and write down what they were asked to do.
set -u
deps=$(cd "$(dirname "$0")/../../.ci" && pwd)/deps
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/bin"
passed=0
failed=0

tool() {
	printf '#!/bin/bash\n%s\n' "$2" >"$dir/bin/$1"
	chmod +x "$dir/bin/$1"
}

all='gcc make pkg-config libjansson-dev libsystemd-dev liburing-dev
libcmocka-dev libssl-dev libzstd-dev zstd spin clang libclang-rt-14-dev'

# installed PACKAGE...
installed() {
	tool dpkg-query "printf 'ii  %s\n' $*"
}

# expect WHAT STATUS PATTERN; PATTERN must be in the output or the apt log
expect() {
	local what=$1 status=$2 pattern=$3 out rc
	: >"$dir/log"
	out=$(PATH=${path:-$dir/bin:/usr/bin:/bin} "$deps" 2>&1)
	rc=$?
	if [ "$rc" -eq "$status" ] &&
	   { [ -z "$pattern" ] && [ -z "$out" ] && [ ! -s "$dir/log" ] ||
	     [ -n "$pattern" ] && grep -q -- "$pattern" <<<"$out"$'\n'"$(cat "$dir/log")"; }; then
		passed=$((passed + 1))
	else
		echo "not as expected: $what (status $rc, wanted $status)"
		{ printf '%s\n' "$out"; cat "$dir/log"; } | sed 's/^/    /'
		failed=$((failed + 1))
	fi
}

tool id 'echo 0'
tool apt-cache 'exit 0'
tool apt-get 'echo "apt-get $*" >>'"$dir"'/log'
tool sudo 'echo "sudo $*" >>'"$dir"'/log; shift; shift; "$@"'

installed $all
expect "nothing is done when all is there" 0 ''

installed ${all/spin/}
expect "what is missing is named" 0 'missing Debian packages: spin'
expect "and installed" 0 'install -y --no-install-recommends spin$'

installed ${all/libclang-rt-14-dev/libclang-rt-dev}
expect "another release's name for it will do" 0 ''

installed ${all/libclang-rt-14-dev/}
tool apt-cache '[ "$2" = libclang-rt-dev ]'
expect "and is what such a release installs" 0 'install -y .* libclang-rt-dev$'
tool apt-cache 'exit 0'

installed ${all/pkg-config/pkgconf}
expect "pkgconf stands in for pkg-config" 0 ''

installed ${all/spin/}
tool apt-get 'echo "apt-get $*" >>'"$dir"'/log; [ "$2" = update ] && touch '"$dir"'/new; [ -e '"$dir"'/new ]'
expect "stale lists are refreshed, then it is tried once more" 0 'apt-get -q update'
tool apt-get 'exit 1'
expect "a failed install says what could not be installed" 1 'could not install: spin'
tool apt-get 'echo "apt-get $*" >>'"$dir"'/log'

tool id 'echo 1000'
expect "not root: through sudo" 0 '^deps: sudo apt-get install'
expect "sudo is really called" 0 '^sudo .*install'

# A system without dpkg: nothing in the PATH but a shell.
mkdir "$dir/min"
ln -s "$(command -v bash)" "$dir/min/bash"
path=$dir/min
expect "elsewhere nothing is installed, and it says so" 1 'not a Debian system'
expect "and says what is missing" 1 'please install.* spin'

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
