/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/kept.h"

#include <jansson.h>

#include "ipc/base/clock.h"

#define GAP_NS		NSEC_PER_SEC

const struct td_opts fx_kept = {
	.keep	= true,
	.config	= "{\"timeouts\": {\"crash_window\": \"0s\"}}",
};

void fx_start_kept(struct fx *f)
{
	fx_start(f, &fx_kept);
}

void fx_crash(struct fx *f, bool first)
{
	uint64_t gap = 0;

	T_OK(td_crash(&f->d, &gap));
	T_CHECK(!first || gap < GAP_NS, "%llu ms",
		(unsigned long long)(gap / NSEC_PER_MSEC));
}

long fx_adopted(struct fx *f, const char *name)
{
	json_t *r = ta_request(&f->d, "{\"cmd\": \"status\"}");
	json_t *o = json_object_get(r, "adopted");
	long v = (long)json_integer_value(json_object_get(o, name));

	json_decref(r);
	return v;
}

uint64_t tc_reconnects(struct tc *c)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	T_OK(kvmm_stats(c->k, &st));
	return st.reconnects;
}

bool tc_back(struct tc *c, uint64_t reconnects)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_done d;

	kvmm_poll(c->k, &d, 1);
	T_OK(kvmm_stats(c->k, &st));
	return st.connected && st.reconnects > reconnects;
}

void fx_crash_and_back(struct fx *f, struct tc *c)
{
	uint64_t before = tc_reconnects(c);

	fx_crash(f, true);
	T_WAIT(LONG_WAIT, tc_back(c, before));
}
