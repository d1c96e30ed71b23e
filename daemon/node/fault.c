/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fault table. One for the process, since a test that breaks the disk
 * breaks it for whoever uses it.
 */
#include "daemon/node/fault.h"

#ifdef KVMM_TEST_BUILD

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/node_ops.h"
#include "ipc/base/lock.h"
#include "ipc/base/rand.h"

#define FAULT_MAX_RULES		16
#define FAULT_MAX_SPEC		1024
#define FAULT_SURE		1000u

/**
 * struct fault_rule - one line of the table
 * @who:	node or back end
 * @left:	how often still; UINT64_MAX for ever
 * @skip:	how many still pass before
 * @counted:	has n= or skip=: not for a node's own I/O
 * @off:	only what touches @len bytes from here; @len 0: wherever it is
 * @luck:	strikes so many times of FAULT_SURE
 * @seed:	of @rng, which decides
 */
struct fault_rule {
	char		who[32];
	enum fault_what	what;
	struct fault	fault;
	uint64_t	left;
	uint64_t	skip;
	bool		counted;
	uint64_t	off;
	uint64_t	len;
	uint64_t	luck;
	uint64_t	seed;
	struct rng	rng;
};

struct fault_table {
	struct fault_rule	rule[FAULT_MAX_RULES];
	unsigned int		nr;
};

/* The loop's thread, and the workers that open stores. */
static struct kvmm_mutex lock = KVMM_MUTEX_INIT(LOCK_TEST);
static struct fault_table table;
static uint64_t nr_hits;

static const struct {
	const char	*name;
	enum fault_what	what;
} whats[] = {
	{ "read",	FAULT_READ },
	{ "write",	FAULT_WRITE },
	{ "get",	FAULT_GET },
	{ "journal",	FAULT_JOURNAL },
	{ "openread",	FAULT_OPEN_READ },
	{ "openwrite",	FAULT_OPEN_WRITE },
};

static const struct {
	const char	*name;
	struct fault	fault;
} hows[] = {
	{ "eio",	{ FAULT_ERROR, .err = EIO } },
	{ "enodata",	{ FAULT_ERROR, .err = ENODATA } },
	{ "erofs",	{ FAULT_ERROR, .err = EROFS } },
	{ "enospc",	{ FAULT_ERROR, .err = ENOSPC } },
	{ "edquot",	{ FAULT_ERROR, .err = EDQUOT } },
	{ "efbig",	{ FAULT_ERROR, .err = EFBIG } },
	{ "eperm",	{ FAULT_ERROR, .err = EPERM } },
	{ "enomem",	{ FAULT_ERROR, .err = ENOMEM } },
	{ "short",	{ FAULT_SHORT } },
	{ "stall",	{ FAULT_STALL, .ms = 10000 } },
	{ "reorder",	{ FAULT_REORDER, .ms = 10 } },
	{ "flip",	{ FAULT_FLIP } },
	{ "drop",	{ FAULT_DROP } },
	{ "torn",	{ FAULT_TORN } },
	{ "stale",	{ FAULT_STALE } },
};

static int rule_option(struct fault_rule *r, const char *opt,
		       struct errmsg *msg)
{
	const char *eq = strchr(opt, '=');
	char *end;
	unsigned long long v;

	if (!eq)
		return errmsg_set(msg, -EINVAL, "'%s' is not KEY=VALUE", opt);
	errno = 0;
	v = strtoull(eq + 1, &end, 10);
	if (end == eq + 1 || *end || errno || eq[1] == '-')
		return errmsg_set(msg, -EINVAL, "'%s': not a number", opt);
	if (!strncmp(opt, "n=", 2)) {
		r->left = v;
		r->counted = true;
	} else if (!strncmp(opt, "skip=", 5)) {
		r->skip = v;
		r->counted = true;
	} else if (!strncmp(opt, "ms=", 3) && v <= UINT32_MAX) {
		r->fault.ms = (uint32_t)v;
	} else if (!strncmp(opt, "p=", 2) && v <= FAULT_SURE) {
		r->luck = v;
	} else if (!strncmp(opt, "seed=", 5)) {
		r->seed = v;
	} else if (!strncmp(opt, "off=", 4)) {
		r->off = v;
		r->len = r->len ? r->len : 1;
	} else if (!strncmp(opt, "len=", 4) && v) {
		r->len = v;
	} else {
		return errmsg_set(msg, -EINVAL,
				  "'%s': known are n=, skip=, ms=, p=, seed=, off= and len=",
				  opt);
	}
	return 0;
}

static int rule_parse(struct fault_rule *r, char *text, struct errmsg *msg)
{
	char *who = strtok_r(text, ":", &text);
	char *what = strtok_r(NULL, ":", &text);
	char *how = strtok_r(NULL, ":", &text);
	char *opt;
	size_t i;

	if (!how)
		return errmsg_set(msg, -EINVAL,
				  "a fault rule is WHO:WHAT:HOW[:KEY=VALUE]");
	if (strlen(who) >= sizeof(r->who))
		return errmsg_set(msg, -EINVAL, "'%s' is no node", who);
	memset(r, 0, sizeof(*r));
	strcpy(r->who, who);
	r->left = UINT64_MAX;
	r->luck = FAULT_SURE;

	for (i = 0; i < ARRAY_SIZE(whats) && strcmp(what, whats[i].name); i++)
		;
	if (i == ARRAY_SIZE(whats))
		return errmsg_set(msg, -EINVAL,
				  "'%s' is not read, write, journal, openread, openwrite or get",
				  what);
	r->what = whats[i].what;

	for (i = 0; i < ARRAY_SIZE(hows) && strcmp(how, hows[i].name); i++)
		;
	if (i == ARRAY_SIZE(hows))
		return errmsg_set(msg, -EINVAL, "unknown fault '%s'", how);
	r->fault = hows[i].fault;

	while ((opt = strtok_r(NULL, ":", &text))) {
		int err = rule_option(r, opt, msg);

		if (err)
			return err;
	}
	rng_seed(&r->rng, r->seed);
	return 0;
}

int fault_set(const char *spec, struct errmsg *msg)
{
	struct fault_table new = { .nr = 0 };
	char buf[FAULT_MAX_SPEC];
	char *save = NULL;
	char *text;

	if (spec && strlen(spec) >= sizeof(buf))
		return errmsg_set(msg, -EINVAL, "longer than %d characters",
				  FAULT_MAX_SPEC - 1);
	strcpy(buf, spec ? spec : "");
	for (text = strtok_r(buf, ";", &save); text;
	     text = strtok_r(NULL, ";", &save)) {
		int err;

		if (new.nr == FAULT_MAX_RULES)
			return errmsg_set(msg, -EINVAL, "more than %d rules",
					  FAULT_MAX_RULES);
		err = rule_parse(&new.rule[new.nr], text, msg);
		if (err)
			return err;
		new.nr++;
	}
	kvmm_lock(&lock);
	table = new;
	nr_hits = 0;
	kvmm_unlock(&lock);
	return 0;
}

int fault_env(void)
{
	static bool once;
	struct errmsg msg;
	int err;

	if (once)
		return 0;
	once = true;
	err = fault_set(getenv("KVMM_FAULT"), &msg);
	if (err)
		fprintf(stderr, "KVMM_FAULT: %s\n", msg.text);
	return err;
}

static bool rule_meets(const struct fault_rule *r, const struct node *n,
		       enum fault_what what, bool internal, uint64_t off,
		       uint64_t len)
{
	if (r->what != what || !r->left || (internal && r->counted) ||
	    (strcmp(r->who, n->name) && strcmp(r->who, n->ops->name)))
		return false;
	return !r->len || (len && off < r->off + r->len && r->off < off + len);
}

static bool rule_strikes(struct fault_rule *r, struct fault *f)
{
	if (r->luck < FAULT_SURE && rng_below(&r->rng, FAULT_SURE) >= r->luck)
		return false;
	if (r->skip) {
		r->skip--;
		return false;
	}
	if (r->left != UINT64_MAX)
		r->left--;
	nr_hits++;
	*f = r->fault;
	if (f->how == FAULT_REORDER) {
		f->how = FAULT_STALL;
		f->ms = (uint32_t)rng_below(&r->rng, r->fault.ms + 1ull);
	}
	return true;
}

bool fault_ask_at(const struct node *n, enum fault_what what, bool internal,
		  uint64_t off, uint64_t len, struct fault *f)
{
	bool strikes = false;

	kvmm_lock(&lock);
	for (unsigned int i = 0; i < table.nr && !strikes; i++)
		strikes = rule_meets(&table.rule[i], n, what, internal, off,
				     len) && rule_strikes(&table.rule[i], f);
	kvmm_unlock(&lock);
	return strikes;
}

bool fault_ask(const struct node *n, enum fault_what what, bool internal,
	       struct fault *f)
{
	return fault_ask_at(n, what, internal, 0, 0, f);
}

static struct {
	void	(*fn)(const struct node *n, enum fault_tap_when when,
		      const struct node_io *io, void *arg);
	void	*arg;
} tap;

void fault_tap_set(void (*fn)(const struct node *n, enum fault_tap_when when,
			      const struct node_io *io, void *arg),
		   void *arg)
{
	tap.fn = fn;
	tap.arg = arg;
}

void fault_tap(const struct node *n, enum fault_tap_when when,
	       const struct node_io *io)
{
	if (tap.fn)
		tap.fn(n, when, io, tap.arg);
}

uint64_t fault_hits(void)
{
	uint64_t n;

	kvmm_lock(&lock);
	n = nr_hits;
	kvmm_unlock(&lock);
	return n;
}

int node_fault_set(const char *spec, char *why, size_t len)
{
	struct errmsg msg = { .text = "" };
	int err = fault_set(spec, &msg);

	if (why && len)
		snprintf(why, len, "%s", msg.text);
	return err;
}

uint64_t node_fault_hits(void)
{
	return fault_hits();
}

bool fault_broken(const char *what)
{
	const char *list = getenv("KVMM_BREAK");
	size_t len = strlen(what);

	for (const char *p = list; p && *p; p += strcspn(p, ",|") + 1) {
		size_t n = strcspn(p, ",|");

		if (n == len && !strncmp(p, what, n))
			return true;
		if (!p[n])
			break;
	}
	return false;
}

#endif
