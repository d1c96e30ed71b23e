/* SPDX-License-Identifier: Apache-2.0 */
/* The joint rule and what a match pins, against a daemon made by hand. */
/* link: -Wl,--wrap=kvmm_look */
#include <string.h>

#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define N	12

struct env {
	struct fk	f;
	struct fc	c;
	struct kvmm_key	key[64];
	struct kvmm_hit	hit[256];
	struct kvmm_match m;
};

static struct env env;

static int setup_n(void **state, unsigned int classes)
{
	uint32_t i;

	memset(&env, 0, sizeof(env));
	if (fk_start(&env.f, classes) || fc_open(&env.f, &env.c))
		return -1;
	for (i = 0; i < ARRAY_SIZE(env.key); i++)
		env.key[i] = fk_key(1, i);
	env.m.size = sizeof(env.m);
	*state = &env;
	return 0;
}

static int setup(void **state)
{
	return setup_n(state, 1);
}

static int setup2(void **state)
{
	return setup_n(state, 2);
}

static int teardown(void **state)
{
	fc_close(&env.c);
	fk_stop(&env.f);
	return 0;
}

static void seal(uint16_t group, uint32_t i)
{
	fk_seal(&env.f, 0, &env.key[i], group, FK_FIRST + group * 14 + i, 1);
}

static uint32_t frame_of(uint16_t group, uint32_t i)
{
	return FK_FIRST + group * 14 + i;
}

static int match(const struct kvmm_keys *keys, unsigned int n)
{
	int err = kvmm_match(env.c.rq, keys, n, 0, env.hit, &env.m);

	if (err)
		fail_msg("match: %s", kvmm_error(env.c.k));
	return env.m.n_resident;
}

static int match_one(uint16_t group, uint32_t n)
{
	const struct kvmm_keys keys = { .k = env.key, .n = n, .group = group };

	return match(&keys, 1);
}

/* -- FULL -------------------------------------------------------------------------- */

static void full_hits_end_at_the_first_miss(void **state)
{
	int i;

	for (i = 0; i < N; i++)
		if (i != 7)
			seal(FK_FULL, i);
	assert_int_equal(match_one(FK_FULL, N), 7);
	assert_int_equal(env.m.n_pages, 7);
	assert_int_equal(env.m.n_load, 7);
	for (i = 0; i < N; i++) {
		assert_int_equal(env.hit[i].state, i < 7 ? KVMM_HIT :
							   KVMM_MISS);
		assert_int_equal(env.hit[i].frame, i < 7 ?
				 frame_of(FK_FULL, i) : 0);
		assert_int_equal(fk_pins(&env.f, 0, frame_of(FK_FULL, i)),
				 i < 7);
	}
}

static void nothing_there_is_no_hit(void **state)
{
	assert_int_equal(match_one(FK_FULL, N), 0);
	assert_int_equal(env.m.n_pages, 0);
	assert_int_equal(env.hit[0].state, KVMM_MISS);
	assert_int_equal(match_one(FK_FULL, 0), 0);
}

/* The pipeline reads ahead: more keys than it is deep, ends in all places. */
static void chains_of_any_length_are_found(void **state)
{
	static struct kvmm_key key[200];
	static struct kvmm_hit hit[200];
	uint32_t i, n;

	for (i = 0; i < 200; i++)
		key[i] = fk_key(9, i);
	for (n = 0; n <= 200; n++) {
		const struct kvmm_keys keys = { .k = key, .n = 200 };

		assert_int_equal(kvmm_match(env.c.rq, &keys, 1, 0, hit,
					    &env.m), 0);
		assert_int_equal(env.m.n_resident, min(n, 64u));
		assert_int_equal(env.m.n_pages, min(n, 64u));
		assert_int_equal(fk_all_pins(&env.f, 0), min(n, 64u));
		if (n < 64)
			fk_seal(&env.f, 0, &key[n], 0, FK_FIRST + n, 3);
	}
}

static void a_second_match_replaces_the_first(void **state)
{
	int i;

	for (i = 0; i < N; i++)
		seal(FK_FULL, i);
	assert_int_equal(match_one(FK_FULL, N), N);
	assert_int_equal(match_one(FK_FULL, 3), 3);
	assert_int_equal(fk_all_pins(&env.f, 0), 3);
	assert_int_equal(kvmm_req_end(env.c.rq, KVMM_ENDED, 0), 0);
	env.c.rq = NULL;
	assert_int_equal(fk_all_pins(&env.f, 0), 0);
}

static void two_requests_pin_the_same_frame_twice(void **state)
{
	const struct kvmm_keys keys = { .k = env.key, .n = 1 };
	struct kvmm_req *other;

	seal(FK_FULL, 0);
	match_one(FK_FULL, 1);
	assert_int_equal(kvmm_req_open(env.c.sp, 2, NULL, &other), 0);
	assert_int_equal(kvmm_match(other, &keys, 1, 0, env.hit, &env.m), 0);
	assert_int_equal(fk_pins(&env.f, 0, frame_of(0, 0)), 2);
	kvmm_req_end(other, KVMM_ENDED, 0);
	assert_int_equal(fk_pins(&env.f, 0, frame_of(0, 0)), 1);
}

static void a_peek_pins_nothing_and_disturbs_no_match(void **state)
{
	const struct kvmm_keys keys = { .k = env.key, .n = N };
	int i;

	for (i = 0; i < N; i++)
		seal(FK_FULL, i);
	match_one(FK_FULL, 2);
	for (i = 0; i < 3; i++) {
		assert_int_equal(kvmm_peek(env.c.rq, &keys, 1, 0, &env.m), 0);
		assert_int_equal(env.m.n_resident, N);
		assert_int_equal(fk_all_pins(&env.f, 0), 2);
	}
}

static void a_trim_keeps_the_first_units(void **state)
{
	int i;

	for (i = 0; i < N; i++)
		seal(FK_FULL, i);
	match_one(FK_FULL, N);
	assert_int_equal(kvmm_trim(env.c.rq, 5, 0), 0);
	for (i = 0; i < N; i++)
		assert_int_equal(fk_pins(&env.f, 0, frame_of(0, i)), i < 5);
	assert_int_equal(kvmm_trim(env.c.rq, 50, 0), 0);
	assert_int_equal(fk_all_pins(&env.f, 0), 5);
}

static void a_page_given_back_loses_its_pin_and_no_other(void **state)
{
	kvmm_frame_t fr[2];
	int i;

	for (i = 0; i < N; i++)
		seal(FK_FULL, i);
	match_one(FK_FULL, N);
	fr[0] = frame_of(0, 1);
	fr[1] = frame_of(0, 3);
	assert_int_equal(kvmm_free(env.c.rq, 0, 0, fr, 2, 0), 0);
	for (i = 0; i < N; i++)
		assert_int_equal(fk_pins(&env.f, 0, frame_of(0, i)),
				 i != 1 && i != 3);
	assert_int_equal(kvmm_free(env.c.rq, 0, 0, fr, 1, 0), -EINVAL);
	kvmm_req_end(env.c.rq, KVMM_ENDED, 0);
	env.c.rq = NULL;
	assert_int_equal(fk_all_pins(&env.f, 0), 0);
}

/* -- what the word says --------------------------------------------------------------- */

static void an_isolated_frame_is_pending(void **state)
{
	int i;

	for (i = 0; i < 4; i++)
		seal(FK_FULL, i);
	fk_word(&env.f, 0, frame_of(0, 2), frame_word(1, FRAME_ISOLATED));
	assert_int_equal(match_one(FK_FULL, 4), 2);
	assert_int_equal(env.m.n_pages, 4);
	assert_int_equal(env.hit[2].state, KVMM_PENDING);
	assert_int_equal(fk_all_pins(&env.f, 0), 2);
}

static void a_later_generation_is_not_the_page(void **state)
{
	seal(FK_FULL, 0);
	seal(FK_FULL, 1);
	fk_word(&env.f, 0, frame_of(0, 1), frame_word(2, FRAME_READY));
	assert_int_equal(match_one(FK_FULL, 2), 1);
	assert_int_equal(fk_all_pins(&env.f, 0), 1);
}

static void every_other_state_is_no_hit(void **state)
{
	static const enum frame_state other[] = {
		FRAME_FREE, FRAME_OPEN, FRAME_LOADING, FRAME_QUARANTINE,
	};
	unsigned int i;

	seal(FK_FULL, 0);
	for (i = 0; i < ARRAY_SIZE(other); i++) {
		fk_word(&env.f, 0, frame_of(0, 0), frame_word(1, other[i]));
		assert_int_equal(match_one(FK_FULL, 1), 0);
		assert_int_equal(fk_all_pins(&env.f, 0), 0);
	}
}

/* Each half of the comparison is needed: without it the wrong bytes are a hit. */
static void without_half_of_the_comparison_it_would_be_a_hit(void **state)
{
	seal(FK_FULL, 0);
	fk_word(&env.f, 0, frame_of(0, 0), frame_word(2, FRAME_READY));
	kvmm_breaks = BREAK_GENERATION;
	assert_int_equal(match_one(FK_FULL, 1), 1);
	kvmm_breaks = 0;
	assert_int_equal(match_one(FK_FULL, 1), 0);
	fk_word(&env.f, 0, frame_of(0, 0), frame_word(1, FRAME_ISOLATED));
	kvmm_breaks = BREAK_READY;
	assert_int_equal(match_one(FK_FULL, 1), 1);
	kvmm_breaks = 0;
	assert_int_equal(match_one(FK_FULL, 1), 0);
}

static void a_frame_beyond_the_table_is_no_hit(void **state)
{
	seal(FK_FULL, 0);
	fk_word(&env.f, 0, FK_FRAMES - 1, 0);
	fk_seal(&env.f, 0, &env.key[1], FK_FULL, FK_FRAMES - 1, 1);
	/* a line that names what does not exist at all */
	fk_below(&env.f, &env.key[2], FK_FULL, 0, 0);
	assert_int_equal(match_one(FK_FULL, 3), 1);
}

/* -- elsewhere ------------------------------------------------------------------------- */

static void a_page_below_is_lower_with_its_time(void **state)
{
	seal(FK_FULL, 0);
	fk_below(&env.f, &env.key[1], FK_FULL, 0, 0);
	fk_below(&env.f, &env.key[2], FK_FULL, INDEX_PENDING, 0);
	env.f.hdr->node[1].load_base_us = 100;
	env.f.hdr->node[1].load_ns_per_kib = 5000;
	assert_int_equal(match_one(FK_FULL, N), 1);
	assert_int_equal(env.m.n_pages, 3);
	assert_int_equal(env.hit[1].state, KVMM_LOWER);
	assert_int_equal(env.hit[1].node, 1);
	assert_int_equal(env.hit[1].eta_us, 120);
	assert_int_equal(env.hit[2].state, KVMM_PENDING);
	/* nobody said what recomputing costs: load it */
	assert_int_equal(env.m.n_load, 3);
	assert_int_equal(env.m.load_us, 140);
	assert_int_equal(env.m.recompute_us, 0);
}

static void a_node_that_failed_has_nothing(void **state)
{
	fk_below(&env.f, &env.key[0], FK_FULL, 0, 0);
	env.f.hdr->node[1].state = 2;
	assert_int_equal(match_one(FK_FULL, 1), 0);
	assert_int_equal(env.m.n_pages, 0);
	assert_int_equal(env.hit[0].state, KVMM_MISS);
}

/* Pages 1-4 are below; each costs 50 us to load, after 100 us once. */
static void the_cheapest_split_is_advised(void **state)
{
	static const uint32_t cost[][4] = {
		{ 10, 10, 10, 10 },	/* never worth it */
		{ 500, 10, 10, 10 },	/* the first alone */
		{ 10, 10, 500, 10 },	/* what leads to an expensive one */
		{ 60, 60, 60, 60 },	/* 300 to load, 240 to compute */
		{ 80, 80, 80, 80 },	/* 300 to load, 320 to compute */
	};
	static const uint32_t want[] = { 1, 2, 4, 1, 5 };
	unsigned int i, j;

	seal(FK_FULL, 0);
	env.f.hdr->node[1].load_base_us = 100;
	env.f.hdr->node[1].load_ns_per_kib = 12500;
	for (i = 0; i < ARRAY_SIZE(cost); i++) {
		for (j = 0; j < 4; j++)
			fk_below(&env.f, &env.key[j + 1], FK_FULL, 0,
				 cost[i][j]);
		assert_int_equal(match_one(FK_FULL, 5), 1);
		assert_int_equal(env.m.n_pages, 5);
		assert_int_equal(env.m.n_load, want[i]);
	}
	assert_int_equal(env.m.load_us, 300);
	assert_int_equal(env.m.recompute_us, 320);
	/* what waits in the node's queue counts */
	env.f.hdr->node[1].queue_us = 50;
	match_one(FK_FULL, 5);
	assert_int_equal(env.m.n_load, 1);
}

static void a_page_in_an_unmapped_extent_wants_a_sync(void **state)
{
	seal(FK_FULL, 0);
	fk_extent_up(&env.f, 0, 3);
	fk_seal(&env.f, 0, &env.key[1], FK_FULL, 3 * FK_FPE + 5, 1);
	assert_int_equal(match_one(FK_FULL, 2), 1);
	assert_int_equal(env.m.sync_wanted, 1);
	assert_int_equal(env.hit[1].state, KVMM_PENDING);
	assert_int_equal(kvmm_win_sync(env.c.win[0], 0), 1);
	assert_int_equal(match_one(FK_FULL, 2), 2);
	assert_int_equal(env.m.sync_wanted, 0);
	/* extent 2 is missing between them, and may go on missing */
	fk_seal(&env.f, 0, &env.key[2], FK_FULL, 2 * FK_FPE, 1);
	assert_int_equal(match_one(FK_FULL, 3), 2);
	fk_extent_down(&env.f, 0, 3);
	assert_int_equal(kvmm_win_sync(env.c.win[0], 0), 1);
	assert_int_equal(match_one(FK_FULL, 2), 1);
}

/* -- the other rules ---------------------------------------------------------------------- */

static void a_window_needs_its_last_pages_only(void **state)
{
	int i;

	for (i = 4; i < 7; i++)
		seal(FK_WINDOW, i);
	seal(FK_WINDOW, 9);
	assert_int_equal(match_one(FK_WINDOW, N), 7);
	for (i = 0; i < N; i++)
		assert_int_equal(env.hit[i].state,
				 i < 4 ? KVMM_SKIP :
				 i < 7 ? KVMM_HIT :
				 i == 9 ? KVMM_SKIP : KVMM_MISS);
	assert_int_equal(fk_all_pins(&env.f, 0), 3);
}

static void a_short_window_starts_at_the_beginning(void **state)
{
	seal(FK_WINDOW, 0);
	seal(FK_WINDOW, 1);
	assert_int_equal(match_one(FK_WINDOW, N), 2);
	assert_int_equal(fk_all_pins(&env.f, 0), 2);
}

static void the_last_snapshot_is_the_deepest(void **state)
{
	seal(FK_LAST, 2);
	seal(FK_LAST, 6);
	assert_int_equal(match_one(FK_LAST, N), 7);
	assert_int_equal(env.hit[6].state, KVMM_HIT);
	assert_int_equal(env.hit[2].state, KVMM_SKIP);
	assert_int_equal(env.hit[7].state, KVMM_MISS);
	assert_int_equal(fk_all_pins(&env.f, 0), 1);
}

static void a_blob_is_there_or_not(void **state)
{
	assert_int_equal(match_one(FK_BLOB, 1), 0);
	assert_int_equal(env.hit[0].state, KVMM_MISS);
	seal(FK_BLOB, 0);
	assert_int_equal(match_one(FK_BLOB, 1), 1);
	assert_int_equal(env.m.n_pages, 1);
	assert_int_equal(env.hit[0].state, KVMM_HIT);
	fk_forget(&env.f, &env.key[0], FK_BLOB, 0);
	fk_below(&env.f, &env.key[0], FK_BLOB, 0, 0);
	assert_int_equal(match_one(FK_BLOB, 1), 0);
	assert_int_equal(env.m.n_pages, 1);
	assert_int_equal(env.hit[0].state, KVMM_LOWER);
}

/* Beside others it is pinned when it is there, and the length is theirs. */
static void a_blob_does_not_count_in_lengths(void **state)
{
	const struct kvmm_keys keys[] = {
		{ .k = env.key + 20, .n = 1, .group = FK_BLOB },
		{ .k = env.key, .n = N, .group = FK_FULL },
	};
	struct kvmm_stats st = { .size = sizeof(st) };
	int i;

	for (i = 0; i < 9; i++)
		seal(FK_FULL, i);
	assert_int_equal(match(keys, 2), 9);
	assert_int_equal(env.m.n_pages, 9);
	assert_int_equal(env.hit[0].state, KVMM_MISS);
	fk_below(&env.f, &env.key[20], FK_BLOB, 0, 0);
	assert_int_equal(match(keys, 2), 9);
	assert_int_equal(env.hit[0].state, KVMM_LOWER);
	assert_int_equal(kvmm_stats(env.c.k, &st), 0);
	assert_int_equal(st.pages_lower, 1);
	fk_seal(&env.f, 0, &env.key[20], FK_BLOB, FK_FIRST + 50, 1);
	assert_int_equal(match(keys, 2), 9);
	assert_int_equal(env.hit[0].state, KVMM_HIT);
	assert_int_equal(env.hit[9].state, KVMM_HIT);
	assert_int_equal(fk_all_pins(&env.f, 0), 10);
	assert_int_equal(kvmm_trim(env.c.rq, 4, 0), 0);
	assert_int_equal(fk_all_pins(&env.f, 0), 5);
	/* nor does it make one where the others have none */
	env.key[0] = fk_key(2, 0);
	assert_int_equal(match(keys, 2), 0);
	assert_int_equal(env.m.n_pages, 0);
	assert_int_equal(fk_all_pins(&env.f, 0), 1);
}

/* It comes with the first fetch, and so with that one's time. */
static void a_blob_below_is_part_of_the_load(void **state)
{
	const struct kvmm_keys keys[] = {
		{ .k = env.key, .n = 3, .group = FK_FULL },
		{ .k = env.key + 20, .n = 1, .group = FK_BLOB },
	};

	env.f.hdr->node[1].load_base_us = 100;
	env.f.hdr->node[1].load_ns_per_kib = 5000;
	seal(FK_FULL, 0);
	fk_below(&env.f, &env.key[1], FK_FULL, 0, 300);
	fk_below(&env.f, &env.key[2], FK_FULL, 0, 300);
	assert_int_equal(match(keys, 2), 1);
	assert_int_equal(env.m.n_load, 3);
	assert_int_equal(env.m.load_us, 140);
	assert_int_equal(env.m.recompute_us, 600);
	fk_below(&env.f, &env.key[20], FK_BLOB, 0, 50);
	assert_int_equal(match(keys, 2), 1);
	assert_int_equal(env.m.n_load, 3);
	assert_int_equal(env.m.load_us, 160);
	assert_int_equal(env.m.recompute_us, 650);
}

/* FULL [0, 9), a WINDOW hole at 6, snapshots at 4 and 8: only 4 suits all. */
static void groups_agree_on_one_length(void **state)
{
	const struct kvmm_keys keys[] = {
		{ .k = env.key, .n = N, .group = FK_LAST },
		{ .k = env.key, .n = N, .group = FK_FULL },
		{ .k = env.key, .n = N, .group = FK_WINDOW },
	};
	int i;

	for (i = 0; i < 9; i++)
		seal(FK_FULL, i);
	for (i = 0; i < 12; i++)
		if (i != 6)
			seal(FK_WINDOW, i);
	seal(FK_LAST, 3);
	seal(FK_LAST, 7);
	assert_int_equal(match(keys, 3), 4);
	/* in the order of the keys; the frames needed and no others */
	assert_int_equal(env.hit[3].state, KVMM_HIT);
	assert_int_equal(env.hit[3].group, FK_LAST);
	assert_int_equal(env.hit[7].state, KVMM_SKIP);
	assert_int_equal(env.hit[N].state, KVMM_HIT);
	assert_int_equal(env.hit[N + 4].state, KVMM_SKIP);
	assert_int_equal(env.hit[2 * N].state, KVMM_SKIP);
	assert_int_equal(env.hit[2 * N + 1].state, KVMM_HIT);
	assert_int_equal(fk_all_pins(&env.f, 0), 1 + 4 + 3);
}

/* Blocks of 16 and 32 tokens: a unit is two pages of the one, one of the other. */
static void lengths_count_common_units(void **state)
{
	const struct kvmm_keys keys[] = {
		{ .k = env.key, .n = 9, .group = FK_FULL },
		{ .k = env.key, .n = 6, .group = FK_FULL2 },
	};
	int i;

	for (i = 0; i < 9; i++)
		seal(FK_FULL, i);
	for (i = 0; i < 3; i++)
		fk_seal(&env.f, 1, &env.key[i], FK_FULL2, FK_FIRST + i, 1);
	assert_int_equal(match(keys, 2), 3);
	assert_int_equal(fk_all_pins(&env.f, 0), 6);
	assert_int_equal(fk_all_pins(&env.f, 1), 3);
	for (i = 3; i < 6; i++)
		fk_seal(&env.f, 1, &env.key[i], FK_FULL2, FK_FIRST + i, 1);
	/* nine pages of 16 are four units */
	assert_int_equal(match(keys, 2), 4);
}

/* The answer by trying every length, from the rule's words. */
static uint32_t by_hand(const bool there[3][16], uint32_t max)
{
	uint32_t n, i;

	for (n = max; n > 0; n--) {
		bool ok = there[2][n - 1];

		for (i = 0; i < n; i++)
			ok = ok && there[0][i];
		for (i = n > FK_WINDOW_PAGES ? n - FK_WINDOW_PAGES : 0; i < n;
		     i++)
			ok = ok && there[1][i];
		if (ok)
			break;
	}
	return n;
}

static void any_pattern_agrees_with_the_rule_by_hand(void **state)
{
	struct rng r;
	int round;

	rng_seed(&r, test_seed());
	for (round = 0; round < 2000; round++) {
		struct kvmm_keys keys[3];
		bool there[3][16] = { { false } };
		unsigned int g, i;

		for (i = 0; i < N; i++)
			env.key[i] = fk_key(1000 + round % 7, i);
		for (g = 0; g < 3; g++) {
			keys[g] = (struct kvmm_keys){ .k = env.key, .n = N,
						      .group = g };
			for (i = 0; i < N; i++) {
				there[g][i] = rng_below(&r, 10) > 1;
				if (there[g][i])
					seal(g, i);
				else
					fk_forget(&env.f, &env.key[i], g, 0);
			}
		}
		assert_int_equal(match(keys, 3), by_hand(there, N));
		assert_int_equal(env.m.n_pages, env.m.n_resident);
	}
}

/* -- what a search costs --------------------------------------------------------------------- */

#define LONG	4000

static uint64_t looked;			/* pages put through the lookup */

void __real_kvmm_look(struct kvmm_att *a, struct kvmm_mset *m,
		      struct kvmm_mgroup *g, uint32_t lo, uint32_t hi);
void __wrap_kvmm_look(struct kvmm_att *a, struct kvmm_mset *m,
		      struct kvmm_mgroup *g, uint32_t lo, uint32_t hi);

void __wrap_kvmm_look(struct kvmm_att *a, struct kvmm_mset *m,
		      struct kvmm_mgroup *g, uint32_t lo, uint32_t hi)
{
	looked += hi > lo ? hi - lo : 0;
	__real_kvmm_look(a, m, g, lo, hi);
}

/* A window as long as the prompt moves down page by page where there is none. */
static void each_page_of_a_window_is_looked_up_once(void **state)
{
	static struct kvmm_key key[LONG];
	static struct kvmm_hit hit[2 * LONG];
	const struct kvmm_keys keys[] = {
		{ .k = key, .n = LONG, .group = FK_WINDOW },
		{ .k = key, .n = LONG, .group = FK_LAST },
	};
	uint32_t i;

	for (i = 0; i < LONG; i++)
		key[i] = fk_key(1, i);
	env.c.sp->desc.group[FK_WINDOW].window_pages = LONG;
	looked = 0;
	assert_int_equal(kvmm_match(env.c.rq, keys, 1, 0, hit, &env.m), 0);
	assert_int_equal(env.m.n_pages, 0);
	assert_in_range(looked, 1, LONG);
	/* each group moves the other down by one, to the beginning */
	env.c.sp->desc.group[FK_WINDOW].window_pages = 100;
	for (i = 0; i < 60; i++) {
		fk_below(&env.f, &key[i], FK_WINDOW, 0, 0);
		fk_seal(&env.f, 0, &key[i], i % 2 ? FK_WINDOW : FK_LAST,
			FK_FIRST + i, 1);
	}
	looked = 0;
	assert_int_equal(kvmm_match(env.c.rq, keys, 2, 0, hit, &env.m), 0);
	assert_int_equal(env.m.n_pages, 59);
	assert_int_equal(env.m.n_resident, 0);
	assert_in_range(looked, 1, 2 * LONG);
}

/* -- modes, mistakes ------------------------------------------------------------------------ */

static void modes_decide_whether_there_are_hits(void **state)
{
	static const struct {
		enum kvmm_mode mode;
		int hits;
	} want[] = {
		{ KVMM_MODE_ON, 2 }, { KVMM_MODE_OBSERVE, 0 },
		{ KVMM_MODE_BYPASS, 0 }, { KVMM_MODE_READONLY, 2 },
	};
	struct kvmm_stats st = { .size = sizeof(st) };
	unsigned int i;

	seal(FK_FULL, 0);
	seal(FK_FULL, 1);
	for (i = 0; i < ARRAY_SIZE(want); i++) {
		env.f.hdr->space[FK_SPACE].mode = want[i].mode;
		assert_int_equal(kvmm_mode(env.c.sp), want[i].mode);
		assert_int_equal(match_one(FK_FULL, 2), want[i].hits);
		assert_int_equal(env.hit[0].state,
				 want[i].hits ? KVMM_HIT : KVMM_MISS);
	}
	assert_int_equal(kvmm_stats(env.c.k, &st), 0);
	assert_int_equal(st.matches, 4);
	assert_int_equal(st.pages_asked, 8);
	assert_int_equal(st.pages_hit, 4);
	assert_int_equal(st.pages_missed, 4);
}

static void wrong_questions_are_refused_with_a_sentence(void **state)
{
	struct kvmm_keys keys[] = {
		{ .k = env.key, .n = 4, .group = FK_FULL },
		{ .k = env.key, .n = 4, .group = FK_FULL },
	};
	struct kvmm_req *rq = env.c.rq;

	assert_int_equal(kvmm_match(rq, keys, 2, 0, env.hit, &env.m), -EINVAL);
	assert_non_null(strstr(kvmm_error(env.c.k), "twice"));
	assert_int_equal(kvmm_match(rq, keys, 0, 0, env.hit, &env.m), -EINVAL);
	assert_int_equal(kvmm_match(rq, keys, 9, 0, env.hit, &env.m), -EINVAL);
	assert_int_equal(kvmm_match(rq, keys, 1, 1, env.hit, &env.m), -EINVAL);
	assert_non_null(strstr(kvmm_error(env.c.k), "no window"));
	assert_int_equal(kvmm_match(rq, keys, 1, 99, env.hit, &env.m), -EINVAL);
	keys[0].group = 7;
	assert_int_equal(kvmm_match(rq, keys, 1, 0, env.hit, &env.m), -EINVAL);
	keys[0].group = FK_BLOB;
	assert_int_equal(kvmm_match(rq, keys, 1, 0, env.hit, &env.m), -EINVAL);
	keys[0].group = FK_FULL;
	keys[0].k = NULL;
	assert_int_equal(kvmm_match(rq, keys, 1, 0, env.hit, &env.m), -EINVAL);
	keys[0].k = env.key;
	env.m.size = 0;
	assert_int_equal(kvmm_match(rq, keys, 1, 0, env.hit, &env.m), -EINVAL);
	env.m.size = sizeof(env.m);
	env.f.l->engine_state = ENGINE_DYING;
	assert_int_equal(kvmm_match(rq, keys, 1, 0, env.hit, &env.m),
			 -EOWNERDEAD);
}

/* -- growth ------------------------------------------------------------------------------- */

static void a_larger_index_is_used_once_it_is_told(void **state)
{
	struct shm old = env.f.index_shm, s = SHM_INIT;
	struct wire_index w = {
		.h = { .type = WIRE_INDEX, .len = sizeof(w) },
		.space = FK_SPACE, .epoch = 2,
		.bytes = index_bytes(2 * FK_LINES, FK_WORDS),
	};
	struct kvmm_done d;

	seal(FK_FULL, 0);
	assert_int_equal(shm_create(&s, "fake-index", w.bytes, 1), 0);
	env.f.index_shm = s;
	env.f.ix = s.addr;
	memcpy(s.addr, old.addr, sizeof(struct index));
	env.f.ix->nr_lines = 2 * FK_LINES;
	seal(FK_FULL, 0);
	seal(FK_FULL, 1);
	assert_int_equal(match_one(FK_FULL, 2), 1);
	assert_int_equal(sock_send(env.f.sock, &w.h, &s.ro_fd, 1), 0);
	shm_fini(&old);
	while (match_one(FK_FULL, 2) != 2)
		kvmm_poll(env.c.k, &d, 1);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)
#define T2(x) cmocka_unit_test_setup_teardown(x, setup2, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(full_hits_end_at_the_first_miss),
		T(nothing_there_is_no_hit),
		T(chains_of_any_length_are_found),
		T(a_second_match_replaces_the_first),
		T(two_requests_pin_the_same_frame_twice),
		T(a_peek_pins_nothing_and_disturbs_no_match),
		T(a_trim_keeps_the_first_units),
		T(a_page_given_back_loses_its_pin_and_no_other),
		T(an_isolated_frame_is_pending),
		T(a_later_generation_is_not_the_page),
		T(every_other_state_is_no_hit),
		T(without_half_of_the_comparison_it_would_be_a_hit),
		T(a_frame_beyond_the_table_is_no_hit),
		T(a_page_below_is_lower_with_its_time),
		T(a_node_that_failed_has_nothing),
		T(the_cheapest_split_is_advised),
		T(a_page_in_an_unmapped_extent_wants_a_sync),
		T(a_window_needs_its_last_pages_only),
		T(a_short_window_starts_at_the_beginning),
		T(the_last_snapshot_is_the_deepest),
		T(a_blob_is_there_or_not),
		T(a_blob_does_not_count_in_lengths),
		T(a_blob_below_is_part_of_the_load),
		T(groups_agree_on_one_length),
		T2(lengths_count_common_units),
		T(any_pattern_agrees_with_the_rule_by_hand),
		T(each_page_of_a_window_is_looked_up_once),
		T(modes_decide_whether_there_are_hits),
		T(wrong_questions_are_refused_with_a_sentence),
		T(a_larger_index_is_used_once_it_is_told),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
