#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kvmm-engine(7): every snippet compiles against the installed headers alone and
# without a warning, none is without a marker, and every call that an engine may
# need is mentioned. Each check is shown to fail on a page that was spoilt for it.
set -u
src=${KVMM_SRC:-$(cd "$(dirname "$0")/../.." && pwd)}
page=$src/libkvmm/man/kvmm-engine.7
tmp=$(mktemp -d "${TMPDIR:-/tmp}/kvmm-man.XXXXXX") || exit 1
trap 'rm -rf "$tmp"' EXIT
passed=0 failed=0
ok() { if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "not: $2"; fi; }

# extract PAGE DIR: DIR/file.inc has the snippets that are whole definitions, one
# behind the other; DIR/NAME.body each of the others, which are statements. A
# compiler names lines of the page.
extract()
{
	rm -rf "$2"
	mkdir -p "$2"
	: >"$2/file.inc"
	awk -v dir="$2" '
	function die(why) { print FILENAME ":" FNR ": " why; bad = 1; exit 1 }
	/^\.\\" snippet: / {
		if (named) die("a marker without a snippet")
		name = $3; named = 1
		if (name !~ /^[a-z-]+$/ || seen[name]++) die("name " name)
		if ($4 != "" && $4 != "file") die("what is " $4 "?")
		out = $4 == "file" ? dir "/file.inc" : dir "/" name ".body"
		next
	}
	/^\.EX/ {
		if (!named || in_ex) die("a snippet without a marker")
		in_ex = 1; n++
		printf "#line %d \"kvmm-engine.7\"\n", FNR + 1 >out
		next
	}
	/^\.EE/ { if (!in_ex) die(".EE without .EX"); in_ex = named = 0; next }
	in_ex {
		gsub(/\\-/, "-"); gsub(/\\\(aq/, "\047"); gsub(/\\\(dq/, "\"")
		sub(/^\\&/, ""); gsub(/\\e/, "\\")
		print >out
		next
	}
	named { die("a marker that no .EX follows") }
	END { if (!bad && (in_ex || n < 20)) { print n " snippets"; exit 1 } }
	' "$1"
}

# compile DIR: the definitions together, then each body in a function behind them.
compile()
{
	local b

	for b in "$1/file.inc" "$1"/*.body; do
		{
			cat "$1/file.inc"
			[ "$b" = "$1/file.inc" ] || {
				echo "int snippet(struct seq *q);"
				echo "int snippet(struct seq *q)"
				echo "{"
				cat "$b"
				echo "return q ? 0 : 1;"
				echo "}"
			}
		} >"$1/unit.c"
		# what a snippet declares for the reader it need not use itself
		${CC:-gcc} -Wall -Wextra -Werror -Wno-unused-variable \
			-fsyntax-only -I"$src/libkvmm/include" "$1/unit.c" || return 1
	done
}

# missing PAGE: calls of the library that it does not mention. Administration and
# ping are not for engines.
missing()
{
	sed -n 's/^\t\(kvmm_[a-z0-9_]*\);$/\1/p' "$src/libkvmm/libkvmm.map" |
		grep -v -x -e kvmm_admin_call -e kvmm_ping |
		while read -r call; do
			grep -q "\\b$call\\b" "$1" || echo "$call"
		done
}

good() { extract "$1" "$tmp/x" >"$tmp/log" 2>&1 && compile "$tmp/x" >>"$tmp/log" 2>&1; }

good "$page"
ok $? "every snippet is marked and compiles: $(head -n 20 "$tmp/log")"
lacks=$(missing "$page" | tr '\n' ' ')
[ -z "$lacks" ]
ok $? "every call of an engine is mentioned, but for $lacks"

# -- what would be found ------------------------------------------------------------

spoil() { sed "$1" "$page" >"$tmp/spoilt.7"; ! cmp -s "$page" "$tmp/spoilt.7"; }

spoil 's/kvmm_fetch(q\\->rq, first, end, node, 0, tag)/kvmm_fetch(q\\->rq, first, end, node, tag)/' &&
	! good "$tmp/spoilt.7" && grep -q '^kvmm-engine.7:[0-9]*:' "$tmp/log"
ok $? "a definition that does not compile is found, with its line: $(cat "$tmp/log")"

spoil 's/kvmm_avail(sp, 0, node, &av)/kvmm_avail(sp, 0, node, \&nonsense)/' && ! good "$tmp/spoilt.7"
ok $? "statements that do not compile are found"

{ cat "$page"; printf '.EX\nint x;\n.EE\n'; } >"$tmp/spoilt.7"
! good "$tmp/spoilt.7" && grep -q 'without a marker' "$tmp/log"
ok $? "a snippet without a marker is found: $(cat "$tmp/log")"

spoil 's/kvmm_trim/kvmm_mirt/g' && [ "$(missing "$tmp/spoilt.7")" = kvmm_trim ]
ok $? "a call that is not mentioned is found"

# -- as people see it --------------------------------------------------------------

for p in "$src"/libkvmm/man/*.[1-8] "$src"/daemon/man/*.[1-8]; do
	if command -v groff >/dev/null; then
		groff -ww -man -Tutf8 "$p" 2>&1 >/dev/null | head -n 5 >"$tmp/log"
		[ ! -s "$tmp/log" ]
		ok $? "groff has nothing to say of ${p##*/}: $(cat "$tmp/log")"
	fi
	if command -v mandoc >/dev/null; then
		mandoc -Tlint -Werror "$p" >"$tmp/log" 2>&1
		ok $? "mandoc has nothing to say of ${p##*/}: $(cat "$tmp/log")"
	fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
