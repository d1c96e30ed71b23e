/* SPDX-License-Identifier: Apache-2.0 */
/* A client that works on while others misbehave; see healthy.h. */
#include <stdatomic.h>

#include "tests/lib/healthy.h"

/* All that it publishes is found, whatever the others are up to. */
static long be_healthy(void *shm, long a, long b)
{
	_Atomic uint32_t *stop = shm;
	struct tc *c = fx_c();
	struct t_wait pause = t_wait_begin(600000);
	uint64_t chain = 0;

	do {
		chain++;
		T_EQ(tc_put(c, 5000 + chain, 0, 8), 8);
		T_EQ(tc_hits(c, 5000 + chain, 8), 8);
		tc_get(c, HEALTHY_CHAIN, 16, 100);
		t_wait_more(&pause);	/* leave the others a CPU */
	} while (!atomic_load(stop));
	return (long)chain;
}

static long sync_windows(void *shm, long a, long b)
{
	return tc_sync(fx_c(), 0);
}

void healthy_start(struct fx *f, struct leak *before)
{
	static const struct td_opts o = {
		.dram_bytes = 32 * MIB, .nvme_bytes = 64 * MIB,
		.config = "{\"limits\": {\"pin_limit_pct\": 50}}",
	};
	struct proc *p = &f->p[HEALTHY];
	long i;

	fx_start(f, &o);
	fx_client(f, HEALTHY, 0, NULL);
	fx_grow(f, HEALTHY - FX_GROW);
	for (i = 0; i < 40; i++)
		T_EQ(proc_call(p, fx_put, 9000 + i, 16), 16);
	T_EQ(proc_call(p, fx_put, HEALTHY_CHAIN, 16), 16);
	proc_call(p, sync_windows, 0, 0);
	proc_send(p, be_healthy, 0, 0);
	leak_calm(f->d.pid, before);
}

void healthy_stop(struct fx *f)
{
	_Atomic uint32_t *stop = f->p[HEALTHY].shm;

	atomic_store(stop, 1);
	T_CHECK(proc_recv(&f->p[HEALTHY]) > 0);
	proc_end(&f->p[HEALTHY]);
}
