/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An era: what a WELCOME brought. Also here: freeing what other threads may
 * still be looking at.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

/* -- deferred freeing -------------------------------------------------------- */

void kvmm_bury(struct kvmm *k, struct kvmm_dead *d)
{
	/* seq_cst: whoever takes the list also sees that @d was unlinked */
	d->next = atomic_load(&k->dead);
	while (!atomic_compare_exchange_weak(&k->dead, &d->next, d))
		;
}

void kvmm_reap(struct kvmm *k)
{
	struct kvmm_dead *d, *next;

	if (!atomic_load_explicit(&k->dead, memory_order_relaxed))
		return;
	d = atomic_exchange(&k->dead, NULL);
	/*
	 * seq_cst, and after the unlinking stores: whoever enters later than
	 * this does not find them. Zero also means, with the release in
	 * kvmm_exit(), that all earlier readers are through.
	 */
	if (atomic_load(&k->readers)) {
		for (; d; d = next) {
			next = d->next;
			kvmm_bury(k, d);
		}
		return;
	}
	for (; d; d = next) {
		next = d->next;
		d->free(d);
	}
}

/* -- creation ---------------------------------------------------------------- */

int kvmm_map_all(struct shm *s, int fd, size_t min_bytes, int writable)
{
	struct stat st;
	int err;

	if (fd < 0)
		return -EPROTO;
	if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < min_bytes) {
		close_fd(&fd);
		return -EPROTO;
	}
	err = shm_map_fd(s, fd, st.st_size, writable);
	if (!err)
		close_fd(&s->fd);
	return err;
}

static bool inside(uint64_t off, uint64_t n, uint64_t each, uint64_t bytes)
{
	uint64_t len, end;

	return off % KVMM_CACHELINE == 0 && !mul_overflows(n, each, &len) &&
	       !add_overflows(off, len, &end) && end <= bytes;
}

static bool ledger_ok(const struct ledger *l, uint64_t bytes)
{
	return l->magic == KVMM_MAGIC_LEDGER && l->size >= sizeof(*l) &&
	       l->bytes <= bytes && is_pow2(l->sq_entries) &&
	       is_pow2(l->cq_entries) && is_pow2(l->arena_bytes) &&
	       inside(l->sq_off, l->sq_entries, sizeof(struct ring_sqe),
		      l->bytes) &&
	       inside(l->cq_off, l->cq_entries, sizeof(struct ring_cqe),
		      l->bytes) &&
	       inside(l->arena_off, l->arena_bytes, 1, l->bytes) &&
	       inside(l->req_off, l->req_slots, sizeof(struct ledger_req),
		      l->bytes) &&
	       inside(l->agree_off, LEDGER_AGREE_ENTRIES,
		      sizeof(struct ledger_agree), l->bytes) &&
	       inside(l->talk_off, 1, sizeof(struct ledger_talk), l->bytes) &&
	       inside(l->frozen_off, 1, LEDGER_FROZEN_SIZE, l->bytes);
}

static void era_free(struct kvmm_dead *d)
{
	struct kvmm_era *e = container_of(d, struct kvmm_era, dead);

	kvmm_members_free(e);
	shm_fini(&e->hdr_shm);
	shm_fini(&e->ledger_shm);
	close_fd(&e->doorbell);
	close_fd(&e->notify);
	kvmm_mutex_fini(&e->sq_lock);
	free(e->slot);
	free(e->req_free);
	free(e);
}

void kvmm_era_put(struct kvmm_era *e)
{
	/* acq_rel: the last one out frees what the others wrote */
	if (e && atomic_fetch_sub_explicit(&e->refs, 1,
					   memory_order_acq_rel) == 1)
		kvmm_bury(e->k, &e->dead);
}

static int era_tables(struct kvmm_era *e)
{
	uint32_t i;

	e->slot = calloc(LIB_MAX_OPS, sizeof(*e->slot));
	e->req_free = calloc(e->ledger->req_slots, sizeof(*e->req_free));
	if (!e->slot || !e->req_free)
		return -ENOMEM;
	for (i = 0; i < LIB_MAX_OPS; i++)
		e->slot[i].next_free = i + 1;
	/* the lowest slot is taken first */
	for (i = e->ledger->req_slots; i > 0; i--)
		e->req_free[e->nr_req_free++] = i - 1;
	return 0;
}

static void era_init(struct kvmm_era *e, struct kvmm *k)
{
	e->dead.free = era_free;
	e->k = k;
	e->refs = 1;
	e->doorbell = -1;
	e->notify = -1;
	e->hdr_shm = (struct shm)SHM_INIT;
	e->ledger_shm = (struct shm)SHM_INIT;
	e->next_late_ns = DEADLINE_NONE;
	kvmm_mutex_init(&e->sq_lock, LOCK_RING);
	list_init(&e->ops);
	list_init(&e->deferred);
}

static void era_cursors(struct kvmm_era *e)
{
	struct ledger *l = e->ledger;
	char *base = (char *)l;

	e->sq = (struct ring_sqe *)(base + l->sq_off);
	e->arena = (uint8_t *)(base + l->arena_off);
	e->cq = (uint8_t *)(base + l->cq_off);
	e->sq_tail = atomic_load_explicit(&l->sq.tail, memory_order_relaxed);
	e->cq_head = atomic_load_explicit(&l->cq.head, memory_order_relaxed);
	e->arena_tail = atomic_load_explicit(&l->arena_head,
					     memory_order_relaxed);
	e->client = l->client;
	memcpy(e->secret, l->secret, sizeof(e->secret));
	e->agree_off = l->agree_off;
	e->talk_off = l->talk_off;
	e->frozen_off = l->frozen_off;
	e->agree = (struct ledger_agree *)(base + e->agree_off);
	e->talk = (struct ledger_talk *)(base + e->talk_off);
	e->frozen = (struct ledger_frozen *)(base + e->frozen_off);
}

int kvmm_era_create(struct kvmm *k, struct sock_msg *m, struct kvmm_era **ret)
{
	const struct wire_welcome *w = (const struct wire_welcome *)m->buf;
	struct kvmm_era *e = calloc(1, sizeof(*e));
	int err;

	if (!e)
		return kvmm_fail(-ENOMEM, "out of memory");
	era_init(e, k);
	e->epoch = w->epoch;
	err = kvmm_map_all(&e->hdr_shm, sock_msg_take_fd(m),
		      sizeof(struct kvmm_hdr), 0);
	if (err)
		goto out_bad;
	err = kvmm_map_all(&e->ledger_shm, sock_msg_take_fd(m),
		      sizeof(struct ledger), 1);
	if (err)
		goto out_bad;
	e->doorbell = sock_msg_take_fd(m);
	e->notify = sock_msg_take_fd(m);
	e->hdr = e->hdr_shm.addr;
	e->ledger = e->ledger_shm.addr;
	err = -EPROTO;
	if (e->doorbell < 0 || e->notify < 0 ||
	    e->hdr->magic != KVMM_MAGIC_HDR ||
	    e->hdr->size < sizeof(struct kvmm_hdr) ||
	    !ledger_ok(e->ledger, e->ledger_shm.bytes))
		goto out_bad;
	era_cursors(e);
	err = era_tables(e);
	if (err)
		goto out_bad;
	*ret = e;
	return 0;

out_bad:
	era_free(&e->dead);
	return kvmm_fail(err, "the daemon's welcome cannot be used: %s",
			 strerror(-err));
}
