#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-clang.sh - every C file is clean for clang, too: it has warnings that gcc
# has not, -Wthread-safety among them, which reads who must hold what lock.
# Nothing is generated, and files are seen as the tests have them only: what a
# release leaves out is little, and would cost as much again.
set -u
cd "$(dirname "$0")/.." || exit 1

if ! command -v clang >/dev/null; then
	echo "there is no clang here"
	exit 77
fi

# as the Makefile has them for that compiler, in words that a shell reads
text=$(make -s --no-print-directory CC=clang \
	--eval='print-flags: ; $(info $(COMMON) $(PKG_CFLAGS)) @:' print-flags) ||
	exit 1
if [[ $text != *-Wthread-safety* ]]; then
	echo "clang would not look at locks: $text"
	exit 1
fi
eval "flags=($text -DKVMM_TEST_BUILD)"

out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT
mapfile -t files < <(find ipc libkvmm daemon kernels policies tests -name '*.c' \
	! -path 'tests/model/run/*' | sort)
printf '%s\0' "${files[@]}" |
	xargs -0 -n 16 -P "$(nproc)" clang -fsyntax-only "${flags[@]}" >"$out" 2>&1
rc=$?

failed=$(grep -Eo '^[^ :]+:[0-9]+:[0-9]+: (fatal )?(error|warning):' "$out" |
	cut -d: -f1 | sort -u | wc -l)
# it may fail without a word on any file
[ "$rc" -ne 0 ] && [ "$failed" -eq 0 ] && failed=1
[ "$failed" -eq 0 ] || head -n 60 "$out"
echo "$((${#files[@]} - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
