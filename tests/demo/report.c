/* SPDX-License-Identifier: Apache-2.0 */
/* What the demo found: the daemon's own account, the table, the verdict. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/demo/demo.h"
#include "tests/lib/daemon.h"

#define SETTLE_NS	(5 * NSEC_PER_SEC)
#define BLOCK_SLACK	16u		/* tokens past the last full page */

uint64_t sum_stats(const struct shared *sh, size_t off)
{
	uint64_t sum = 0;
	unsigned int i;

	for (i = 0; i < NR_ENGINES; i++) {
		const char *st = (const char *)&sh->engine[i];

		sum += atomic_load_explicit((const _Atomic uint64_t *)(st + off),
					    memory_order_relaxed);
	}
	return sum;
}

static void sum_hist(const struct shared *sh, size_t off, struct hist *h)
{
	unsigned int i;

	memset(h, 0, sizeof(*h));
	for (i = 0; i < NR_ENGINES; i++)
		hist_merge(h, (const struct hist *)
			      ((const char *)&sh->engine[i] + off));
}

/* ---- the daemon's account ------------------------------------------------------- */

static uint64_t number(const json_t *o, const char *key)
{
	return (uint64_t)json_integer_value(json_object_get(o, key));
}

/* Frames in no state that anybody could get them out of, and pins of nobody. */
static uint64_t leaked_now(json_t *status)
{
	json_t *node, *nodes = json_object_get(status, "nodes");
	uint64_t sum = 0;
	size_t i;

	json_array_foreach(nodes, i, node) {
		json_t *f = json_object_get(node, "frames");

		sum += number(f, "open") + number(f, "loading") +
		       number(f, "quarantine") + number(f, "magazine");
	}
	return sum;
}

static int collect_pins(struct test_daemon *d, uint64_t *pins)
{
	json_t *reply, *list, *p;
	size_t i;
	int err = td_admin(d, "pins", &reply);

	if (err)
		return err;
	*pins = 0;
	list = json_object_get(reply, "pins");
	json_array_foreach(list, i, p)
		*pins += number(p, "pins");
	json_decref(reply);
	return 0;
}

static void collect_nodes(json_t *status, struct outcome *o)
{
	json_t *node, *nodes = json_object_get(status, "nodes");
	size_t i;

	json_array_foreach(nodes, i, node) {
		const char *name = json_string_value(json_object_get(node,
								     "name"));
		json_t *c = json_object_get(node, "counters");

		o->daemon_copied += number(c, "bytes_copied_shared");
		if (name && !strcmp(name, "nvme0")) {
			o->nvme_in = number(c, "bytes_in");
			o->nvme_out = number(c, "bytes_out");
		} else {
			o->dram_in += number(c, "bytes_in");
			o->dram_out += number(c, "bytes_out");
		}
	}
}

/*
 * The engines have exited, which kvmmd learns through their pidfds; it may take
 * a moment until what they held is back.
 */
int report_collect(struct test_daemon *d, struct outcome *o)
{
	uint64_t deadline = deadline_in(SETTLE_NS);

	for (;;) {
		struct timespec ts = ns_to_timespec(5 * NSEC_PER_MSEC);
		uint64_t pins = 0;
		json_t *status;
		int err = td_admin(d, "status", &status);

		if (err)
			return err;
		err = collect_pins(d, &pins);
		o->leaked = leaked_now(status) + pins;
		if (err || !o->leaked || deadline_past(deadline)) {
			collect_nodes(status, o);
			json_decref(status);
			return err ? err : td_admin(d, "check", NULL);
		}
		json_decref(status);
		nanosleep(&ts, NULL);
	}
}

/* ---- the table ---------------------------------------------------------------- */

static double percent(uint64_t part, uint64_t whole)
{
	return whole ? 100.0 * (double)part / (double)whole : 0;
}

static double mib(uint64_t bytes)
{
	return (double)bytes / (1 << 20);
}

static void row(const char *what, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

static void row(const char *what, const char *fmt, ...)
{
	va_list ap;

	printf("  %-26s", what);
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	putchar('\n');
}

static void row_latency(const struct shared *sh, const char *what, size_t off)
{
	struct hist h;

	sum_hist(sh, off, &h);
	row(what, "p50 %9.1f us   p99 %9.1f us   of %" PRIu64,
	    (double)hist_quantile(&h, 0.50) / 1e3,
	    (double)hist_quantile(&h, 0.99) / 1e3, hist_count(&h));
}
#define LATENCY(sh, what, field) \
	row_latency(sh, what, offsetof(struct engine_stats, field))

static void print_hits(const struct shared *sh)
{
	uint64_t asked = SUM(sh, pages_asked), dram = SUM(sh, pages_dram);
	uint64_t below = SUM(sh, pages_below), cross = SUM(sh, pages_cross);
	uint64_t coming = SUM(sh, pages_coming);

	row("pages asked for", "%" PRIu64 " of %u KiB", asked,
	    PAGE_BYTES >> 10);
	row("hit in DRAM", "%5.1f %%", percent(dram, asked));
	row("hit in NVMe, fetched", "%5.1f %%   (%" PRIu64 " more came too late)",
	    percent(below, asked), SUM(sh, pages_late));
	row("hit on its way to DRAM", "%5.1f %%   (computed or fetched by another engine)",
	    percent(coming, asked));
	row("hit, by another engine", "%5.1f %% of all, %.1f %% of the hits",
	    percent(cross, asked), percent(cross, dram + below + coming));
	row("computed", "%5.1f %%   (%" PRIu64 " published, %" PRIu64 " were there by then, %" PRIu64 " refused, %" PRIu64 " kept private)",
	    percent(SUM(sh, pages_computed), asked), SUM(sh, pages_published),
	    SUM(sh, pages_twice), SUM(sh, pages_refused),
	    SUM(sh, pages_private));
}

static void print_table(const struct demo *dm, const struct outcome *o)
{
	const struct shared *sh = dm->sh;
	uint64_t match_ns = SUM(sh, match_ns);

	printf("\n");
	row("requests", "%" PRIu64 " of %zu in %.1f s%s", SUM(sh, requests),
	    dm->trace.nr, o->seconds, o->cut_short ? ", cut short" : "");
	row("prompt tokens", "%.1f million", (double)SUM(sh, tokens) / 1e6);
	print_hits(sh);
	row("moved by engines", "%.0f MiB written, %.0f MiB read, in place",
	    mib(SUM(sh, pages_computed) * PAGE_BYTES),
	    mib(SUM(sh, bytes_checked)));
	row("moved DRAM -> NVMe", "%.0f MiB", mib(o->nvme_in));
	row("moved NVMe -> DRAM", "%.0f MiB", mib(o->nvme_out));
	row("lookups", "%" PRIu64 " (%.0f/s of wall time, %.1f million pages/s while in one)",
	    SUM(sh, lookups), (double)SUM(sh, lookups) / o->seconds,
	    match_ns ? 1e3 * (double)SUM(sh, pages_asked) / (double)match_ns
		     : 0);
	LATENCY(sh, "match", match);
	LATENCY(sh, "match, kvmmd stopped", match_stopped);
	LATENCY(sh, "fetch", fetch);
	LATENCY(sh, "publish", publish);
	row("while kvmmd was stopped", "%" PRIu64 " lookups found %" PRIu64 " pages",
	    SUM(sh, stopped_lookups), SUM(sh, stopped_hits));
	printf("\n");
	printf("wrong bytes %" PRIu64 "\n", SUM(sh, wrong_bytes));
	printf("frames leaked %" PRIu64 "\n", o->leaked);
	printf("bytes copied on shared hits %" PRIu64 "\n",
	       SUM(sh, copied_bytes) + o->daemon_copied);
}

/* ---- the verdict --------------------------------------------------------------- */

static bool must(bool holds, const char *what)
{
	if (!holds)
		printf("FAILED: %s\n", what);
	return holds;
}

int report_print(const struct demo *dm, const struct outcome *o)
{
	const struct shared *sh = dm->sh;
	bool ok = true;

	print_table(dm, o);
	if (o->engines_ok)
		text_print(o->text);
	ok &= must(!o->why[0], o->why);
	ok &= must(o->engines_ok, "all engines end well");
	ok &= must(!SUM(sh, errors), "no call fails");
	ok &= must(!o->daemon_exit, "kvmmd stops cleanly");
	ok &= must(o->killed, "an engine was killed on the way");
	ok &= must(o->paused, "kvmmd was stopped on the way");
	ok &= must(SUM(sh, stopped_hits), "hits go on while kvmmd is stopped");
	ok &= must(SUM(sh, pages_dram), "pages are hit in DRAM");
	ok &= must(SUM(sh, pages_below), "pages come back from NVMe");
	ok &= must(SUM(sh, pages_twice) <= SUM(sh, pages_published) / 4,
		   "what is there is found, and not computed again");
	ok &= must(SUM(sh, pages_cross), "engines hit each other's pages");
	ok &= must(!SUM(sh, wrong_bytes), "no byte is wrong");
	ok &= must(!o->leaked, "no frame leaks");
	ok &= must(!SUM(sh, copied_bytes) && !o->daemon_copied,
		   "nothing is copied to share it");
	ok &= must(SUM(sh, shared_bytes), "shared memory was seen to be shared");
	ok &= must(o->text[0].text[0] &&
		   !strcmp(o->text[0].text, o->text[1].text) &&
		   !strcmp(o->text[0].digest, o->text[1].digest),
		   "the second text is the first");
	ok &= must(!o->text[0].hit, "the first text's prompt is computed");
	ok &= must(o->text[1].prompt - o->text[1].hit <= BLOCK_SLACK,
		   "the second text's prompt is found");
	if (ok)
		printf("everything held\n");
	fflush(stdout);
	return ok ? 0 : 1;
}
