#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cut the request traces in this folder out of the whole ones.

    slice.py conversation NORM_MOONCAKE_CONVERSATION.jsonl[.zst] OUT.jsonl.zst
    slice.py agents       NORM_CC_SHARED.jsonl[.zst]             OUT.jsonl.zst

Input is one request a line: {timestamp ms, session_id, turn, [stop,]
input_length, output_length, hash_ids}, where an id names the whole prefix up
to and with its block. So every second id of a trace of 256-token blocks is a
correct trace of 512-token blocks, which is what `agents` makes. Nothing else is
changed: ids and numbers are those of the source, and a line can be looked up
there by timestamp and session.

Writes the same bytes every time; see README.md for what comes out.
"""
import json
import subprocess
import sys

MAX_PAGES = 384		# a request's pages are pinned together: leave room for others

CUTS = {
    # name: (first ms, end ms, keep every n-th id)
    "conversation": (0, 540_000, 1),
    "agents": (21_600_000, 22_320_000, 2),
}


def lines(path):
    if path.endswith(".zst"):
        cmd = ["zstd", "-dqc", "--long=27", path]
        with subprocess.Popen(cmd, stdout=subprocess.PIPE, text=True) as p:
            yield from p.stdout
        if p.returncode:
            sys.exit(f"{path}: zstd failed")
    else:
        with open(path) as f:
            yield from f


def cut(path, first, end, step):
    for line in lines(path):
        r = json.loads(line)
        if not first <= r["timestamp"] < end:
            continue
        r["hash_ids"] = r["hash_ids"][step - 1::step]
        if 0 < len(r["hash_ids"]) <= MAX_PAGES:
            yield r


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in CUTS:
        sys.exit(__doc__)
    first, end, step = CUTS[sys.argv[1]]
    rows = list(cut(sys.argv[2], first, end, step))
    text = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in rows)
    with open(sys.argv[3], "wb") as f:
        # The size goes into the header: readers allocate by it.
        subprocess.run(["zstd", "-19", "-qc", f"--stream-size={len(text)}"],
                       input=text.encode(), stdout=f, check=True)
    ids = [i for r in rows for i in r["hash_ids"]]
    print(f"{len(rows)} requests, {len({r['session_id'] for r in rows})} "
          f"sessions, {sum(r['input_length'] for r in rows)} input tokens, "
          f"{len(ids)} pages asked, {len(set(ids))} different, "
          f"longest {max(len(r['hash_ids']) for r in rows)}")


if __name__ == "__main__":
    main()
