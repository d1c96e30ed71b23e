/* SPDX-License-Identifier: Apache-2.0 */
/* kvmmctl daemon: what is about the process. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <kvmm/admin.h>

#include "ctl.h"

#define LOOK_MS	5		/* between two looks at a daemon that comes back */

static uint64_t now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

/* A ping that may go wrong, since nobody may be there; NULL then. */
static json_t *look(const struct ctl *c, unsigned int ms)
{
	char *answer = NULL;
	json_t *r;

	if (kvmm_admin_call(c->socket, "{\"cmd\": \"ping\"}", &answer, ms))
		return NULL;
	r = json_loads(answer, 0, NULL);
	free(answer);
	return r;
}

/**
 * struct back - what came of it
 * @last:	the last answer of the old one
 * @gap_ms:	from there to the first of the new one
 */
struct back {
	uint64_t	last;
	uint64_t	gap_ms;
	json_t		*reply;
};

/* True: something came of it, good or bad; @b->reply says what. */
static bool look_for(const struct ctl *c, const char *started, struct back *b,
		     unsigned int ms)
{
	json_t *r = look(c, ms);

	if (!r)
		return false;
	if (!strcmp(ctl_str(r, "started"), started) &&
	    !*ctl_str(r, "reexec_error")) {
		b->last = now_ms();
		json_decref(r);
		return false;
	}
	b->gap_ms = now_ms() - b->last;
	b->reply = r;
	return true;
}

static enum ctl_exit report(const struct ctl *c, const struct back *b)
{
	const char *error = ctl_str(b->reply, "reexec_error");

	if (*error) {
		fprintf(stderr, "kvmmctl: not re-executed: %s\n", error);
		return CTL_REFUSED;
	}
	if (c->json) {
		json_object_set_new(b->reply, "gap_ms",
				    json_integer((json_int_t)b->gap_ms));
		json_dumpf(b->reply, stdout, JSON_INDENT(2));
		putchar('\n');
	} else {
		printf("kvmmd %s: %s, epoch %s, after a gap of %" PRIu64 " ms\n",
		       ctl_str(b->reply, "version"), ctl_str(b->reply, "state"),
		       ctl_str(b->reply, "epoch"), b->gap_ms);
	}
	return CTL_OK;
}

static enum ctl_exit reexec(const struct ctl *c)
{
	const struct timespec nap = { .tv_nsec = LOOK_MS * 1000000 };
	struct ctl quiet = *c;
	uint64_t begin = now_ms();
	struct back b = { .last = begin };
	enum ctl_exit rc;
	json_t *r;

	quiet.json = false;		/* one answer is printed, the last */
	rc = ctl_ask(&quiet, json_pack("{s:s}", "cmd", "reexec"), &r);
	if (!r)
		return rc;
	rc = CTL_TIMEOUT;
	while (now_ms() - begin < c->timeout_ms) {
		if (look_for(c, ctl_str(r, "started"), &b, c->timeout_ms)) {
			rc = report(c, &b);
			break;
		}
		nanosleep(&nap, NULL);
	}
	if (rc == CTL_TIMEOUT)
		fprintf(stderr, "kvmmctl: kvmmd is not back after %u ms\n",
			c->timeout_ms);
	json_decref(b.reply);
	json_decref(r);
	return rc;
}

enum ctl_exit ctl_daemon(const struct ctl *c, int argc, char **argv)
{
	static const char *const verbs[] = { "reexec", NULL };

	if (argc != 1 || ctl_word(verbs, argv[0]))
		return ctl_usage("daemon takes reexec");
	return reexec(c);
}
