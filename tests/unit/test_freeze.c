/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frozen matches: a rank reads what the leader found. Leader and rank have each
 * a daemon of their own, made by hand, with the same space.
 */
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define WAIT_NS		(20 * NSEC_PER_SEC)
#define PAGES		32u
#define MAX_HITS	512u

static struct fk f[2];			/* the leader's, the rank's */
static struct fc c[2];
static struct kvmm_key keys[PAGES];

static void meet(unsigned int i, unsigned int j, uint32_t flags)
{
	struct ledger_talk *t = (void *)((char *)f[i].l + f[i].l->talk_off);
	uint64_t deadline = deadline_in(WAIT_NS);
	struct wire_member w = {
		.h = { .type = WIRE_MEMBER, .len = sizeof(w) }, .world = 1,
		.flags = flags, .ledger_bytes = f[j].ledger_shm.bytes,
	};
	struct kvmm_done d;

	assert_int_equal(sock_send(f[i].sock, &w.h, &f[j].ledger_shm.ro_fd, 1),
			 0);
	while (!(flags ? t->met_leader : t->met[0])) {
		assert_false(deadline_past(deadline));
		kvmm_poll(c[i].k, &d, 1);
		poll(NULL, 0, 1);
	}
}

static void member(unsigned int i, uint32_t flags, bool joins)
{
	const struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = FC_TIMEOUT_NS,
	};
	const struct kvmm_engine e = {
		.size = sizeof(e), .world = 1, .flags = flags,
	};

	assert_int_equal(fk_start(&f[i], 1), 0);
	memset(&c[i], 0, sizeof(c[i]));
	assert_int_equal(kvmm_open(f[i].path, &o, &c[i].k), 0);
	if (joins)
		assert_int_equal(kvmm_join(c[i].k, &e), 0);
	assert_int_equal(kvmm_space_attach(c[i].k, fk_desc(1), &c[i].sp), 0);
	assert_int_equal(kvmm_win_open(c[i].sp, 0, 0, NULL, &c[i].win[0]), 0);
}

static int engine(void **state)
{
	uint32_t i;

	member(0, KVMM_LEADER | KVMM_NO_STEP, true);
	member(1, 0, true);
	meet(0, 1, 0);
	meet(1, 0, KVMM_LEADER | KVMM_NO_STEP);
	for (i = 0; i < PAGES; i++) {
		keys[i] = fk_key(1, i);
		fk_seal(&f[0], 0, &keys[i], FK_FULL, FK_FIRST + i, 1);
	}
	return 0;
}

static int teardown(void **state)
{
	unsigned int i;

	for (i = 0; i < 2; i++) {
		fc_close(&c[i]);
		fk_stop(&f[i]);
	}
	return 0;
}

static struct kvmm_req *req(uint64_t id)
{
	struct kvmm_req *rq;

	assert_int_equal(kvmm_req_open(c[0].sp, id, NULL, &rq), 0);
	return rq;
}

static void end(struct kvmm_req *rq)
{
	assert_int_equal(kvmm_req_end(rq, KVMM_ENDED, 0), 0);
}

/* The first @n keys, or all from @from on. */
static void match(struct kvmm_req *rq, uint32_t from, uint32_t n,
		  struct kvmm_hit *hit, struct kvmm_match *m)
{
	struct kvmm_hit local[MAX_HITS];
	struct kvmm_match mm = { .size = sizeof(mm) };
	const struct kvmm_keys k = {
		.k = keys + from, .n = n, .group = FK_FULL,
	};

	assert_int_equal(kvmm_match(rq, &k, 1, 0, hit ? hit : local, &mm), 0);
	if (m)
		*m = mm;
}

static int get(uint64_t id, struct kvmm_hit *hit, unsigned int max,
	       struct kvmm_match *m)
{
	static struct kvmm_hit local[MAX_HITS];
	struct kvmm_match mm = { .size = sizeof(mm) };

	return kvmm_match_get(c[1].sp, id, hit ? hit : local,
			      hit ? max : MAX_HITS, m ? m : &mm);
}

/* -- what is read ------------------------------------------------------------------- */

static void a_rank_reads_what_the_leader_found(void **state)
{
	struct kvmm_hit want[4 * PAGES], got[4 * PAGES];
	struct kvmm_match a = { .size = sizeof(a) }, b = { .size = sizeof(b) };
	struct kvmm_key more[PAGES], last[PAGES], blob = fk_key(4, 0);
	const struct kvmm_keys k[] = {
		{ .k = more, .n = PAGES, .group = FK_FULL },
		{ .k = last, .n = PAGES, .group = FK_LAST },
		{ .k = &blob, .n = 1, .group = FK_BLOB },
	};
	struct kvmm_req *rq = req(77);
	uint32_t i;

	for (i = 0; i < PAGES; i++) {
		more[i] = i < 9 ? keys[i] : fk_key(2, i);
		last[i] = fk_key(3, i);
	}
	fk_seal(&f[0], 0, &last[8], FK_LAST, FK_FIRST + 40, 1);
	for (i = 9; i < 12; i++)
		fk_below(&f[0], &more[i], FK_FULL, 0, 700);
	fk_below(&f[0], &last[11], FK_LAST, 0, 300);
	f[0].hdr->node[1].load_base_us = 30;
	memset(want, 0, sizeof(want));
	memset(got, 0, sizeof(got));
	assert_int_equal(kvmm_match(rq, k, 3, 0, want, &a), 0);
	assert_int_equal(a.n_resident, 9);
	assert_int_equal(a.n_pages, 12);
	assert_int_equal(get(77, got, 4 * PAGES, &b), 2 * PAGES + 1);
	assert_memory_equal(got, want, sizeof(got));
	assert_memory_equal(&a, &b, sizeof(a));
	end(rq);
}

static void as_many_as_there_is_room_for(void **state)
{
	struct kvmm_match m = { .size = 8 };
	struct kvmm_hit got[8];
	struct kvmm_req *rq = req(1);
	uint32_t n;

	match(rq, 0, 7, NULL, NULL);
	for (n = 0; n < 8; n++) {
		memset(got, 0xee, sizeof(got));
		assert_int_equal(get(1, got, n, &m), 7);
		assert_int_equal(m.size, 8);
		assert_int_equal(m.n_pages, 7);
		if (n && n <= 7)
			assert_int_equal(got[n - 1].frame, FK_FIRST + n - 1);
		assert_int_equal(got[min(n, 7u)].frame, 0xeeeeeeee);
	}
	m.size = 3;
	assert_int_equal(get(1, got, 8, &m), -EINVAL);
	end(rq);
}

static void it_is_the_last_match_of_that_request(void **state)
{
	struct kvmm_req *a = req(1), *b = req(2);
	struct kvmm_hit got[PAGES];

	assert_int_equal(get(1, NULL, 0, NULL), -EAGAIN);
	match(a, 0, 3, NULL, NULL);
	assert_int_equal(get(1, got, PAGES, NULL), 3);
	assert_int_equal(get(2, NULL, 0, NULL), -EAGAIN);
	match(b, 4, 5, NULL, NULL);
	match(a, 10, 2, NULL, NULL);
	assert_int_equal(get(1, got, PAGES, NULL), 2);
	assert_int_equal(got[0].frame, FK_FIRST + 10);
	assert_int_equal(get(2, got, PAGES, NULL), 5);
	assert_int_equal(got[0].frame, FK_FIRST + 4);
	end(a);
	assert_int_equal(get(1, NULL, 0, NULL), -EAGAIN);
	assert_int_equal(get(2, NULL, 0, NULL), 5);
	/* a number may come again */
	a = req(1);
	assert_int_equal(get(1, NULL, 0, NULL), -EAGAIN);
	match(a, 0, 0, NULL, NULL);
	assert_int_equal(get(1, NULL, 0, NULL), 0);
	end(a);
	end(b);
	assert_int_equal(get(2, NULL, 0, NULL), -EAGAIN);
}

static void what_is_trimmed_is_no_hit(void **state)
{
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit got[8];
	struct kvmm_req *rq = req(1);
	uint32_t i;

	match(rq, 0, 8, NULL, NULL);
	assert_int_equal(kvmm_trim(rq, 5, 0), 0);
	assert_int_equal(get(1, got, 8, &m), 8);
	assert_int_equal(m.n_resident, 5);
	for (i = 0; i < 8; i++)
		assert_int_equal(got[i].state == KVMM_HIT, i < 5);
	end(rq);
}

static void a_forked_request_has_its_parents(void **state)
{
	struct kvmm_hit got[8];
	struct kvmm_req *rq = req(1), *child, *bare;

	assert_int_equal(kvmm_req_fork(rq, 3, 0, NULL, 0, 0, 0, &bare), 0);
	assert_int_equal(get(3, got, 8, NULL), -EAGAIN);
	match(rq, 2, 4, NULL, NULL);
	assert_int_equal(kvmm_req_fork(rq, 2, 0, NULL, 0, 0, 0, &child), 0);
	assert_int_equal(get(2, got, 8, NULL), 4);
	assert_int_equal(got[0].frame, FK_FIRST + 2);
	end(rq);
	assert_int_equal(get(1, got, 8, NULL), -EAGAIN);
	assert_int_equal(get(2, got, 8, NULL), 4);
	end(child);
	end(bare);
	assert_int_equal(get(2, got, 8, NULL), -EAGAIN);
}

static void a_dying_engine_gets_nothing(void **state)
{
	struct kvmm_req *rq = req(1);

	match(rq, 0, 8, NULL, NULL);
	f[1].l->engine_state = ENGINE_DYING;
	assert_int_equal(get(1, NULL, 0, NULL), -EOWNERDEAD);
	end(rq);
}

static void nobody_writes_for_himself(void **state)
{
	struct kvmm_match m = { .size = sizeof(m) };
	struct ledger_frozen *fr;
	struct kvmm_req *rq;
	uint32_t i;

	member(0, 0, false);
	member(1, 0, false);
	rq = req(1);
	match(rq, 0, 8, NULL, NULL);
	fr = (void *)((char *)f[0].l + f[0].l->frozen_off);
	for (i = 0; i < LEDGER_FROZEN_SLOTS; i++)
		assert_int_equal(fr->slot[i], 0);
	assert_int_equal(kvmm_match_get(c[0].sp, 1, NULL, 0, &m), -EAGAIN);
	end(rq);
}

/* -- the log ------------------------------------------------------------------------- */

#define MANY	4000u

static void a_place_is_found_for_every_request(void **state)
{
	static struct kvmm_req *rq[MANY];
	struct kvmm_hit got[4];
	uint32_t i;

	for (i = 0; i < MANY; i++) {
		rq[i] = req(i * 3);
		match(rq[i], i % 16, 4, NULL, NULL);
	}
	for (i = 0; i < MANY; i++) {
		assert_int_equal(get(i * 3, got, 4, NULL), 4);
		assert_int_equal(got[0].frame, FK_FIRST + i % 16);
		assert_int_equal(get(i * 3 + 1, got, 4, NULL), -EAGAIN);
	}
	for (i = 0; i < MANY; i++)
		end(rq[i]);
	for (i = 0; i < MANY; i++)
		assert_int_equal(get(i * 3, got, 4, NULL), -EAGAIN);
}

/* Keys that nobody has: long records, cheaply. */
static void match_long(struct kvmm_req *rq, uint32_t n)
{
	static struct kvmm_key none[400000];
	static struct kvmm_hit hit[400000];
	struct kvmm_match m = { .size = sizeof(m) };
	const struct kvmm_keys k = { .k = none, .n = n };

	assert_int_equal(kvmm_match(rq, &k, 1, 0, hit, &m), 0);
}

static void the_oldest_are_forgotten(void **state)
{
	struct kvmm_req *rq[100];
	uint32_t i, first = 0;

	/* 120 kB each: some thirty fit */
	for (i = 0; i < 100; i++) {
		rq[i] = req(i);
		match_long(rq[i], 10000);
		assert_int_equal(get(i, NULL, 0, NULL), 10000);
	}
	while (get(first, NULL, 0, NULL) == -EAGAIN)
		first++;
	assert_in_range(first, 60, 70);
	for (i = first; i < 100; i++)
		assert_int_equal(get(i, NULL, 0, NULL), 10000);
	/* longer than may be: none rather than an old one */
	match_long(rq[99], 180000);
	assert_int_equal(get(99, NULL, 0, NULL), -EAGAIN);
	match_long(rq[99], 170000);
	assert_int_equal(get(99, NULL, 0, NULL), 170000);
	for (i = 0; i < 100; i++)
		end(rq[i]);
}

/* Its place says the right number, but the record is another one's. */
static void an_overwritten_record_is_none_whatever_lies_there(void **state)
{
	const uint32_t n = (4096 - sizeof(struct ledger_match)) / 12;
	struct kvmm_req *a = req(7), *b = req(7), *fill = req(8);
	uint32_t i;

	match_long(a, n);
	for (i = 1; i < LEDGER_FROZEN_BYTES / 4096; i++)
		match_long(fill, n);
	assert_int_equal(get(7, NULL, 0, NULL), n);
	match_long(b, n - 1);
	assert_int_equal(get(7, NULL, 0, NULL), n - 1);
	end(b);
	assert_int_equal(get(7, NULL, 0, NULL), -EAGAIN);
	end(a);
	end(fill);
}

static void what_the_leader_scribbles_is_no_harm(void **state)
{
	struct ledger_frozen *fr = (void *)((char *)f[0].l +
					    f[1].l->frozen_off);
	uint32_t round, i, ok = 0;
	struct kvmm_hit got[64];
	struct rng r;

	rng_seed(&r, test_seed());
	for (round = 0; round < 3000; round++) {
		struct kvmm_req *rq = req(round);
		uint64_t pos = rng_below(&r, LEDGER_FROZEN_BYTES / 64);
		int n;

		match(rq, 0, 16, NULL, NULL);
		for (i = 0; i < LEDGER_FROZEN_SLOTS && !(round % 8); i++)
			if (fr->slot[i])
				fr->slot[i] = (fr->slot[i] & ~0xffffffffffffu) |
					      (pos + 1);
		for (i = 0; i < 1 + round % 3; i++) {
			uint64_t at = rng_below(&r, 64 * 32);

			((uint8_t *)(fr + 1))[(c[0].k->era->frozen_pos - at) %
					      LEDGER_FROZEN_BYTES] ^=
				1 << rng_below(&r, 8);
		}
		n = get(round, got, 64, NULL);
		for (i = 0; n > 0 && i < min((uint32_t)n, 64u); i++) {
			assert_in_range(got[i].state, 0, KVMM_SKIP);
			/* elsewhere this rank has no window to tell by */
			if (got[i].state == KVMM_HIT && !got[i].node)
				assert_non_null(kvmm_win_ptr(c[1].win[0], 0,
							     got[i].frame));
		}
		ok += n > 0;
		end(rq);
	}
	assert_in_range(ok, 100, 2990);
	rng_fill(&r, fr, LEDGER_FROZEN_SIZE);
	for (i = 0; i < 1000; i++)
		assert_int_equal(get(i, got, 64, NULL), -EAGAIN);
}

/* -- threads --------------------------------------------------------------------------- */

#define READERS	3
#define GOOD	20000u
#define MOST	2000000u
#define LIVE	4u

static _Atomic uint64_t good[READERS];
static _Atomic bool over;

static bool all_good(void)
{
	unsigned int i = 0;

	while (i < READERS && atomic_load(&good[i]) >= GOOD)
		i++;
	return i == READERS;
}

/* A match of n keys begins with page n: whoever reads it can tell. */
static void *write_matches(void *arg)
{
	struct kvmm_req *rq[LIVE];
	struct rng r;
	uint32_t i;

	rng_seed(&r, test_seed());
	for (i = 0; i < LIVE; i++)
		rq[i] = req(i);
	for (i = 0; i < MOST && !all_good(); i++) {
		uint32_t at = rng_below(&r, LIVE), n = rng_below(&r, 16);

		match(rq[at], n, n, NULL, NULL);
		if (!(i % 16)) {
			end(rq[at]);
			rq[at] = req(at);
		}
		/* around the ring */
		if (!(i % 64))
			match_long(rq[at], 20000);
	}
	for (i = 0; i < LIVE; i++)
		end(rq[i]);
	atomic_store(&over, true);
	return NULL;
}

static void *read_matches(void *arg)
{
	unsigned int me = (unsigned int)(uintptr_t)arg;
	struct kvmm_hit got[MAX_HITS];
	struct rng r;

	rng_seed(&r, test_seed() + 1 + me);
	while (!atomic_load(&over)) {
		struct kvmm_match m = { .size = sizeof(m) };
		/* one of them looks where the leader writes */
		int n = kvmm_match_get(c[me != 0].sp, rng_below(&r, LIVE), got,
				       MAX_HITS, &m), i;

		if (n == -EAGAIN || n == 20000)
			continue;
		if (n < 0 || m.n_pages != (uint32_t)n)
			return (void *)1;
		for (i = 0; i < n; i++)
			if (got[i].frame != FK_FIRST + (uint32_t)(n + i) ||
			    got[i].state != KVMM_HIT)
				return (void *)2;
		atomic_fetch_add(&good[me], 1);
	}
	return NULL;
}

static void nobody_reads_a_mix(void **state)
{
	pthread_t w, r[READERS];
	unsigned int i;
	void *ret;

	over = false;
	for (i = 0; i < READERS; i++) {
		good[i] = 0;
		assert_int_equal(pthread_create(&r[i], NULL, read_matches,
						(void *)(uintptr_t)i), 0);
	}
	assert_int_equal(pthread_create(&w, NULL, write_matches, NULL), 0);
	pthread_join(w, NULL);
	for (i = 0; i < READERS; i++) {
		pthread_join(r[i], &ret);
		assert_int_equal((uintptr_t)ret, 0);
		assert_in_range(good[i], 1, UINT64_MAX);
	}
}

#define T(x) cmocka_unit_test_setup_teardown(x, engine, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_rank_reads_what_the_leader_found),
		T(as_many_as_there_is_room_for),
		T(it_is_the_last_match_of_that_request),
		T(what_is_trimmed_is_no_hit),
		T(a_forked_request_has_its_parents),
		T(a_dying_engine_gets_nothing),
		cmocka_unit_test_teardown(nobody_writes_for_himself, teardown),
		T(a_place_is_found_for_every_request),
		T(the_oldest_are_forgotten),
		T(an_overwritten_record_is_none_whatever_lies_there),
		T(what_the_leader_scribbles_is_no_harm),
		T(nobody_reads_a_mix),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
