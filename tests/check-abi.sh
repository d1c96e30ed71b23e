#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-abi.sh [ROOT] - what libkvmm promises to programs that were built before
#
#   - public structs keep their sizes and the places of their fields, and public
#     constants their values
#   - the headers, the symbol map, the shared and the static library name the
#     same calls, no more and no less
#   - each of them is described in its header
#   - libkvmm.so needs libc only
#
# A size that is changed here on purpose is a new ABI: the soname goes with it.
# The check first proves that it finds planted breaches.
set -u
export LC_ALL=C

root=$(cd "${1:-$(dirname "$0")/..}" && pwd) || exit 1
build=${KVMM_BUILD:-$root/build}
cc=${CC:-cc}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

passed=0
failed=0
check() {
	local what=$1 got=$2
	if [ -z "$got" ]; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		printf '%s:\n%s\n' "$what" "$got"
	fi
}

# struct size field=offset ...
layouts='
kvmm_key 32 b=0
kvmm_open_opts 24 size=0 flags=4 call_timeout_ns=8 name=16
kvmm_engine 32 size=0 flags=4 token=8 rank=24 world=28
kvmm_result 8 result=0 frame=4
kvmm_done 32 tag=0 op=8 result=12 first=16 n=20 res=24
kvmm_node_info 40 name=0 kind=16 below=17 gang=18 size_bytes=24 extent_bytes=32
kvmm_info 760 size=0 abi=4 rights=8 nr_nodes=12 epoch=16 tenant=24 daemon_version=88 library_version=104 node=120
kvmm_seg 12 bytes=0 align=4 layer=8 what=10 shard=11
kvmm_class 24 name=0 page_bytes=8 nsegs=12 segs=16
kvmm_group 12 class_ix=0 rule=2 block_tokens=4 window_pages=8
kvmm_desc 88 size=0 flags=4 model=8 revision=16 kv_dtype=24 scale_format=32 layout=40 abi_tag=48 salt=56 world=64 nclasses=66 ngroups=68 classes=72 groups=80
kvmm_win_opts 32 size=0 rights=4 max_frames=8 spare=12 on_extent=16 arg=24
kvmm_avail 24 size=0 now=4 clean=8 dirty=12 floor=16 limit=20
kvmm_hint 24 size=0 priority=4 session=8 expect_return_ms=16
kvmm_keys 16 k=0 n=8 group=12
kvmm_hit 12 frame=0 eta_us=4 state=8 node=9 group=10
kvmm_match 28 size=0 n_pages=4 n_resident=8 n_load=12 load_us=16 recompute_us=20 sync_wanted=24
kvmm_pub 96 key=0 parent=32 frame=64 pos=68 cost_us=72 crc=76 group=80 flags=82 after=88
kvmm_stats 160 size=0 connected=4 matches=8 pages_asked=16 pages_hit=24 pages_pending=32 pages_lower=40 pages_missed=48 pin_races=56 allocs=64 alloc_refused=72 published=80 publish_exists=88 publish_refused=96 fetched=104 fetch_missed=112 late=120 doorbells=128 touches_lost=136 reconnects=144 keys_lost=152
'

constants='
KVMM_MODE_ON 0 KVMM_MODE_OBSERVE 1 KVMM_MODE_BYPASS 2 KVMM_MODE_READONLY 3
KVMM_RO 1 KVMM_RW 2 KVMM_NODE_NONE 255
KVMM_NODE_HOST 1 KVMM_NODE_CUDA 2 KVMM_NODE_NVME 3 KVMM_NODE_REMOTE 4
KVMM_FULL 1 KVMM_WINDOW 2 KVMM_LAST 3 KVMM_BLOB 4
KVMM_SEG_K 1 KVMM_SEG_V 2 KVMM_SEG_KV 3 KVMM_SEG_STATE 4 KVMM_SEG_SCALE 5 KVMM_SEG_INDEX 6
KVMM_MIRROR 1 KVMM_STRIPE 2
KVMM_MISS 0 KVMM_HIT 1 KVMM_PENDING 2 KVMM_LOWER 3 KVMM_SKIP 4
KVMM_UNKNOWN 0 KVMM_ENDED 1 KVMM_CONTINUES 2 KVMM_BAD 1
KVMM_LEADER 1 KVMM_NO_STEP 2 KVMM_MUST_JOIN 1
KVMM_PUB_ROOT 1 KVMM_PUB_CRC 2 KVMM_EVICT_OK 1
KVMM_OP_PUBLISH 1 KVMM_OP_FETCH 2 KVMM_OP_PING 3 KVMM_OP_BLOB 4 KVMM_OP_FORK 5
'

# A program that compiles only if $1, $2 hold for the headers under $3.
abi_errors() {
	{
		echo '#include <assert.h>'
		echo '#include <stddef.h>'
		echo '#include <kvmm/kvmm.h>'
		echo '#include <kvmm/admin.h>'
		awk 'NF {
			printf "static_assert(sizeof(struct %s) == %s, \"size\");\n", $1, $2
			for (i = 3; i <= NF; i++) {
				split($i, f, "=")
				printf "static_assert(offsetof(struct %s, %s) == %s, \"place\");\n", $1, f[1], f[2]
			}
		}' <<<"$1"
		tr ' ' '\n' <<<"$2" | awk 'NF { if (n++ % 2)
			printf "static_assert(%s == %s, \"value\");\n", name, $1
			else name = $1 }'
	} >"$tmp/abi.c"
	"$cc" -std=gnu11 -fsyntax-only -I"$3" "$tmp/abi.c" 2>&1 |
		grep 'error:' | sed 's,^.*/abi\.c:[0-9:]* ,,'
}

# Structs with a body in the headers under $1 that $layouts does not know.
unknown_structs() {
	sed -n 's/^struct \(kvmm_[a-z_]*\) {$/\1/p' "$1"/kvmm/*.h | sort |
		comm -23 - <(awk 'NF { print $1 }' <<<"$layouts" | sort)
}

in_headers() {
	cat "$1"/kvmm/*.h | tr '\n' ' ' | sed 's/KVMM_API/\n&/g' |
		sed -n 's/^KVMM_API [^(;]*[ *]\(kvmm_[a-z0-9_]*\)(.*/\1/p' | sort
}

in_map() {
	sed -n 's/^[ \t]*\(kvmm_[a-z0-9_]*\);$/\1/p' "$1" | sort
}

# Calls without a kernel-doc head `name() - what`.
undocumented() {
	local sym
	in_headers "$1" | while read -r sym; do
		grep -qE "^/?[ *]+\*? ?$sym\(\) - ." "$1"/kvmm/*.h || echo "$sym"
	done
}

differ() {
	diff <(printf '%s\n' "$1") <(printf '%s\n' "$2") | grep '^[<>]'
}

self_test() {
	local inc=$tmp/inc bad=0
	cp -r "$root/libkvmm/include" "$inc"
	[ -n "$(abi_errors 'kvmm_key 31 b=0' '' "$inc")" ] || bad=1
	[ -n "$(abi_errors 'kvmm_hit 12 node=8' '' "$inc")" ] || bad=1
	[ -n "$(abi_errors '' 'KVMM_HIT 2' "$inc")" ] || bad=1
	cat >>"$inc/kvmm/admin.h" <<-'EOT'
		struct kvmm_planted {
			int x;
		};
		KVMM_API int
		kvmm_planted(const struct kvmm *k);
	EOT
	[ "$(unknown_structs "$inc")" = kvmm_planted ] || bad=1
	[ "$(undocumented "$inc")" = kvmm_planted ] || bad=1
	in_headers "$inc" | grep -qx kvmm_planted || bad=1
	[ $bad -eq 0 ] || echo "a planted breach was not found"
}

inc=$root/libkvmm/include
map=$root/libkvmm/libkvmm.map
want=$(in_headers "$inc")

check "self-test" "$(self_test)"
check "layout of public structs" "$(abi_errors "$layouts" '' "$inc")"
check "values of public constants" "$(abi_errors '' "$constants" "$inc")"
check "public structs without a layout here" "$(unknown_structs "$inc")"
check "symbol map (>) against headers (<)" "$(differ "$want" "$(in_map "$map")")"
check "calls without a description" "$(undocumented "$inc")"
if [ -e "$build/libkvmm.so" ]; then
	check "libkvmm.so (>) against headers (<)" \
		"$(differ "$want" "$(nm -D --defined-only "$build/libkvmm.so" |
			awk '$2 == "T" { sub(/@.*/, "", $3); print $3 }' | sort)")"
	# the sanitizers bring libraries of their own
	check "libkvmm.so needs more than libc" \
		"$(readelf -d "$build/libkvmm.so" |
			sed -n 's/.*(NEEDED).*\[\(.*\)\]$/\1/p' |
			grep -vE '^(libc\.so|ld-linux|lib(a|t|ub)san\.so|libgcc_s|libm\.so|libpthread)')"
	check "soname" "$(readelf -d "$build/libkvmm.so" |
		grep SONAME | grep -v '\[libkvmm\.so\.0\]')"
fi
if [ -e "$build/libkvmm.a" ]; then
	check "libkvmm.a (>) against headers (<)" \
		"$(differ "$want" "$(nm -g --defined-only "$build/libkvmm.a" |
			awk '$2 == "T" { print $3 }' | sort)")"
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
