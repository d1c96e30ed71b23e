#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-layers.sh [ROOT] - who may include whom, as the design draws it:
#
#   engine -> libkvmm -> ipc <- daemon/server -> daemon/mm -> daemon/node
#   kvmmctl -^                                      `-> policies/kvmm_policy.h
#
# mm/ knows pages and never sockets; node/ knows frames and never pages, spaces
# or clients. One rule a folder; a file under no rule is a violation too, so
# that a new folder has to say where it stands. Quoted includes name the path
# from the project root. kernels/ is pure arithmetic (checksums of records and
# pages), so that mm may use it as well as node. The check first proves that it finds planted breaches.
set -u
export LC_ALL=C

# folder (of the file) | quoted includes it may have | in words
rules='
ipc/base               ^ipc/base/                                        ipc/base stands on libc alone
ipc                    ^ipc/                                             ipc includes ipc only
libkvmm                ^libkvmm/[^/]+\.h$|^ipc/                          libkvmm includes itself and ipc
libkvmm/ctl            ^ctl\.h$                                          kvmmctl uses installed headers only
libkvmm/cuda           ^libkvmm/cuda/                                    libkvmm-cuda uses installed headers only
libkvmm/include/kvmm   ^$                                                installed headers include installed headers only
daemon                 ^daemon/[^/]+\.h$|^daemon/(server|mm|keeper)/|^daemon/node/node\.h$|^ipc/|^policies/kvmm_policy\.h$  the daemon wires the parts together
daemon/keeper          ^daemon/[^/]+\.h$|^daemon/keeper/|^ipc/base/      the keeper is small: itself, the log and ipc/base
daemon/server          ^daemon/[^/]+\.h$|^daemon/(server|mm)/|^daemon/node/(node|fault)\.h$|^ipc/  server sees mm, node.h (fault.h for tests) and ipc
daemon/mm              ^daemon/mm/|^daemon/node/node\.h$|^ipc/base/|^ipc/(abi|desc|frame|index|ledger|ring|shm)\.h$|^kernels/kernels\.h$|^policies/kvmm_policy\.h$  mm never sees sockets, messages or clients
daemon/node            ^daemon/node/|^ipc/base/|^kernels/kernels\.h$     node sees frames: itself, ipc/base and kernels
daemon/copyd           ^daemon/copyd/|^daemon/node/|^ipc/|^kernels/      copyd sees node, ipc and kernels
policies               ^policies/kvmm_policy\.h$                         a policy sees kvmm_policy.h only
kernels                ^kernels/                                         kernels include kernels only
tests/engine           ^tests/engine/|^ipc/base/|^tests/lib/trace\.h$     the engine is a client: installed headers, its own, ipc/base and recorded requests
'

# What may be in <...> besides the C library, by folder. The installed headers
# are the vocabulary (keys, states, errors) from mm upwards; node, kernels and
# policies do without.
sys_rules='
libkvmm/ctl            ^(kvmm/|jansson\.h$)
libkvmm                ^kvmm/
libkvmm/cuda           ^(kvmm/|cuda\.h$)
libkvmm/include/kvmm   ^kvmm/
ipc                    ^kvmm/kvmm\.h$
ipc/base               ^$
kernels                ^$
tests/engine           ^(kvmm/|jansson\.h$)
policies               ^$
daemon                 ^(kvmm/|jansson\.h$|systemd/)
daemon/server          ^(kvmm/|jansson\.h$|systemd/)
daemon/keeper          ^$
daemon/mm              ^kvmm/kvmm\.h$
daemon/node            ^(liburing\.h$)
daemon/copyd           ^(cuda\.h$)
'
# Headers of libraries that are not libc's; all others in <...> are.
foreign='^(kvmm|systemd|openssl|liburing)/|^(jansson|liburing|zstd|zlib|cmocka|cuda|nvml|libudev)[a-z_]*\.h$'

# Violations under $1, as "file:line: ..."; nothing when there are none.
violations() {
	(cd "$1" && find ipc libkvmm daemon policies kernels tests/engine \
		\( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print 2>/dev/null |
		sort | xargs -r grep -HnE '^[ \t]*#[ \t]*include' /dev/null) |
	rules=$rules sys_rules=$sys_rules foreign=$foreign awk '
	BEGIN {
		foreign = ENVIRON["foreign"]
		n = split(ENVIRON["rules"], r, "\n")
		for (i = 1; i <= n; i++) {
			if (split(r[i], f, /  +/) < 3)
				continue
			allow[f[1]] = f[2]
			why[f[1]] = f[3]
		}
		n = split(ENVIRON["sys_rules"], r, "\n")
		for (i = 1; i <= n; i++)
			if (split(r[i], f, /  +/) == 2)
				sys[f[1]] = f[2]
	}
	{
		split($0, p, ":")
		file = p[1]
		dir = file
		sub(/\/[^\/]*$/, "", dir)
		inc = $0
		sub(/^[^:]*:[0-9]*:[ \t]*#[ \t]*include[ \t]*/, "", inc)
		quoted = inc ~ /^"/
		sub(/^["<]/, "", inc)
		sub(/[">].*$/, "", inc)
		if (!(dir in allow))
			print file ":" p[2] ": " inc ": no rule says what " dir "/ may include"
		else if (quoted && inc !~ allow[dir])
			print file ":" p[2] ": \"" inc "\": " why[dir]
		else if (!quoted && inc ~ foreign && inc !~ sys[dir])
			print file ":" p[2] ": <" inc ">: " dir "/ may not use this library"
	}'
}

# Plant one breach of each rule, and one file that is fine, in a scratch tree.
self_test() {
	local tmp bad=0 where what got
	tmp=$(mktemp -d) || return 1
	while read -r where what; do
		rm -rf "${tmp:?}"/*
		mkdir -p "$tmp/$where"
		printf '#include <stdio.h>\n# include %s\n' "$what" >"$tmp/$where/x.c"
		got=$(violations "$tmp")
		if [[ $got != *"$where/x.c:2: "* ]]; then
			echo "planted in $where and not found: #include $what"
			bad=1
		fi
	done <<-'EOF'
		ipc/base "ipc/wire.h"
		ipc "daemon/mm/mm.h"
		ipc <jansson.h>
		libkvmm "daemon/mm/mm.h"
		libkvmm "libkvmm/ctl/ctl.h"
		libkvmm <openssl/sha.h>
		libkvmm/ctl "ipc/wire.h"
		libkvmm/include/kvmm "ipc/abi.h"
		daemon/keeper "daemon/server/park.h"
		daemon/server "daemon/node/work.h"
		daemon/server "kernels/kernels.h"
		daemon/mm "ipc/sock.h"
		daemon/mm "ipc/wire.h"
		daemon/mm "daemon/server/client.h"
		daemon/mm <systemd/sd-daemon.h>
		daemon/node "daemon/mm/mm.h"
		daemon/node "ipc/ring.h"
		policies "daemon/mm/mm.h"
		kernels "ipc/base/bits.h"
		tests/engine "libkvmm/lib.h"
		tests/engine <zlib.h>
		daemon/newcomer "ipc/abi.h"
		ipc "tests/lib/unit.h"
		daemon/mm "mm.h"
	EOF
	rm -rf "${tmp:?}"/*
	mkdir -p "$tmp/daemon/mm" "$tmp/libkvmm/ctl"
	printf '#include "daemon/node/node.h"\n#include <sys/mman.h>\n' >"$tmp/daemon/mm/x.c"
	printf '#include <kvmm/kvmm.h>\n#include <jansson.h>\n' >"$tmp/libkvmm/ctl/x.c"
	got=$(violations "$tmp")
	if [ -n "$got" ]; then
		echo "found where nothing is wrong: $got"
		bad=1
	fi
	rm -rf "$tmp"
	return $bad
}

root=${1:-$(dirname "$0")/..}
passed=0
failed=0

if self_test; then
	passed=$((passed + 1))
else
	failed=$((failed + 1))
fi

found=$(violations "$root")
if [ -z "$found" ]; then
	passed=$((passed + 1))
else
	printf '%s\n' "$found"
	failed=$((failed + $(printf '%s\n' "$found" | wc -l)))
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
