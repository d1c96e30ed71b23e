#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# check-headers.sh - every header compiles when it is the first one included,
# and an installed header also does in strict C11 and in C++, as an engine's
# code may be either. Every source file opens with its licence.
set -u
cd "$(dirname "$0")/.." || exit 1

passed=0
failed=0

# check WHAT COMMAND... ; the source comes on stdin
check() {
	local what=$1 out
	shift
	if out=$("$@" 2>&1); then
		passed=$((passed + 1))
	else
		echo "$what: $*"
		printf '%s\n' "$out" | head -n 12
		failed=$((failed + 1))
	fi
}

flags=(-D_GNU_SOURCE -DKVMM_TEST_BUILD -I. -Ilibkvmm/include -Wall -Wextra -Werror
       -Wno-unused-parameter -Wno-unused-function -fsyntax-only)
cxx=$(command -v c++ || command -v g++ || command -v clang++)

while read -r h; do
	check "$h alone" "${CC:-gcc}" "${flags[@]}" -std=gnu11 -x c - <<<"#include \"$h\""
done < <(find ipc libkvmm daemon policies kernels tests -name '*.h' \
	! -path 'libkvmm/include/*' | sort)

while read -r h; do
	inc="#include <${h#libkvmm/include/}>"
	check "$h in strict C11" "${CC:-gcc}" -std=c11 -pedantic-errors -Wall -Wextra \
		-Werror -Ilibkvmm/include -fsyntax-only -x c - <<<"$inc"
	if [ -n "$cxx" ]; then
		check "$h in C++" "$cxx" -std=c++17 -Wall -Wextra -Werror \
			-Ilibkvmm/include -fsyntax-only -x c++ - <<<"$inc"
	fi
done < <(find libkvmm/include -name '*.h' | sort)

unlicensed=$(find ipc libkvmm daemon policies kernels tests \
	\( -name '*.[ch]' -o -name '*.cu' -o -name '*.sh' -o -name '*.pml' -o -name '*.py' \) \
	! -path 'tests/model/run/*' -print0 |
	xargs -0 grep -L -m1 'SPDX-License-Identifier: Apache-2.0')
if [ -z "$unlicensed" ]; then
	passed=$((passed + 1))
else
	printf 'no SPDX line: %s\n' $unlicensed
	failed=$((failed + 1))
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
