/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host's memory. A cache that keeps its memory while the host runs out of it
 * gets an engine killed, and that costs more than any hit is worth. So DRAM that is
 * not in use goes back before it comes to that: when less than
 * limits.host_floor_pct of it is available, or when the kernel says that all tasks
 * stall for memory a tenth of the time (PSI, "full").
 *
 * Both are looked at once a second. What a daemon has just adopted is judged like
 * any other memory.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define LOOK_NS		NSEC_PER_SEC
#define STALL_PCT	10.0
#define STALL_BYTES	(UINT64_C(64) << 20)	/* to begin with; a guess */

/* Tests have files of their own. */
static const char *path_of(const char *name, const char *env)
{
#ifdef KVMM_TEST_BUILD
	const char *own = getenv(env);

	if (own)
		return own;
#endif
	return name;
}

static uint64_t meminfo(const char *what)
{
	FILE *f = fopen(path_of("/proc/meminfo", "KVMM_TEST_MEMINFO"), "re");
	size_t n = strlen(what);
	uint64_t kib = 0;
	char line[128];

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f)) {
		if (strncmp(line, what, n) || line[n] != ':')
			continue;
		kib = strtoull(line + n + 1, NULL, 10);
		break;
	}
	fclose(f);
	return kib * 1024;
}

/* Share of the last ten seconds in which nobody got on, per cent. */
static double stalled_pct(void)
{
	FILE *f = fopen(path_of("/proc/pressure/memory", "KVMM_TEST_PRESSURE"),
			"re");
	double pct = 0;
	char line[128];

	if (!f)
		return 0;		/* a kernel without PSI */
	while (fgets(line, sizeof(line), f))
		if (sscanf(line, "full avg10=%lf", &pct) == 1)
			break;
	fclose(f);
	return pct;
}

void hostmem_init(struct server *s)
{
	s->hostmem.floor = meminfo("MemTotal") / 100 * s->cfg.host_floor_pct;
}

static void hostmem_look(struct server *s)
{
	struct hostmem *h = &s->hostmem;
	uint64_t there = meminfo("MemAvailable"), was = h->lack;

	/* one that cannot be read says nothing */
	h->lack = there && there < h->floor ? h->floor - there : 0;
	h->stalled = stalled_pct() >= STALL_PCT;
	if (h->stalled)
		h->lack = max(h->lack, STALL_BYTES);
	if (h->lack && !was) {
		h->shortages++;
		log_warn("the host is short of memory (%" PRIu64 " MiB available, %" PRIu64 " wanted%s): DRAM that is not in use goes back",
			 there >> 20, h->floor >> 20,
			 h->stalled ? ", and tasks stall" : "");
	}
	if (!h->lack && was)
		log_notice("the host has memory again: %" PRIu64 " MiB available",
			   there >> 20);
	mm_host_short(s->mm, h->lack);
}

uint64_t hostmem_run(struct server *s, uint64_t now)
{
	struct hostmem *h = &s->hostmem;

	if (!h->floor)
		return DEADLINE_NONE;
	if (now >= h->due_ns) {
		hostmem_look(s);
		h->due_ns = now + LOOK_NS;
	}
	return h->due_ns;
}
