/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A writer that keeps writing: what it does to a page that it has published is
 * found out when the page first leaves DRAM, where it gave a checksum. Nobody is
 * ever served those bytes from below.
 */
#include <string.h>

#include "kernels/kernels.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define CHAIN		8
#define WAIT_MS		20000

static const struct td_opts opts = {
	.dram_bytes = 16 * MIB, .nvme_bytes = 64 * MIB,
	.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
	.io_timeout = "5s",
};

/* A chain with checksums, or without; the frames are in @f. */
static void put(struct tc *c, uint64_t chain, uint16_t flags, kvmm_frame_t *f)
{
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_pub pub[CHAIN];
	struct kvmm_done d;
	unsigned int i;

	tc_alloc(c, rq, 0, CHAIN, f);
	for (i = 0; i < CHAIN; i++) {
		tc_pub(c, &pub[i], chain, i, TC_FULL, f[i], 0);
		tc_fill(c, 0, f[i], &pub[i].key);
		pub[i].flags |= flags;
		pub[i].crc = kvmm_crc32c(0, kvmm_win_ptr(c->win[0], 0, f[i]),
					 c->page_bytes[0]);
	}
	T_OK(kvmm_publish(rq, c->node, pub, CHAIN, ++c->tag));
	T_CHECK(tc_wait(c, c->tag, &d, WAIT_MS));
	for (i = 0; i < CHAIN; i++)
		T_EQ(d.res[i].result, 0);
	tc_end(rq);
}

static void breach(struct tc *c, kvmm_frame_t f)
{
	uint8_t *at = kvmm_win_ptr(c->win[0], 0, f);

	at[c->page_bytes[0] / 2] ^= 0x40;
}

/* Everything that was there leaves DRAM. */
static void press(struct test_daemon *d, struct tc *c)
{
	unsigned int i;

	for (i = 0; i < 40; i++) {
		T_EQ(tc_put(c, 1000 + i, 0, 16), 16);
		T_WAIT(WAIT_MS, !ta_node(d, "nvme0", "write.inflight") &&
				!ta_node(d, "nvme0", "write.queued"));
	}
}

/* Fetch a chain, all of which must come; bytes that are not what they should. */
static size_t wrong_bytes(struct tc *c, uint64_t chain)
{
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_match m;
	struct kvmm_done d;
	struct kvmm_key key;
	size_t wrong = 0;
	unsigned int i;

	T_EQ(tc_match(c, rq, chain, CHAIN, NULL, &m), 0);
	T_EQ(m.n_pages, CHAIN);
	T_OK(kvmm_fetch(rq, 0, CHAIN, c->node, 0, ++c->tag));
	T_CHECK(tc_wait(c, c->tag, &d, WAIT_MS));
	for (i = 0; i < CHAIN; i++) {
		T_EQ(d.res[i].result, 0);
		tc_key(c, chain, i, TC_FULL, &key);
		wrong += tc_wrong(c, 0, d.res[i].frame, &key);
	}
	tc_end(rq);
	return wrong;
}

static void a_write_after_publish_costs_the_page_and_no_one_is_served(void **s)
{
	struct fx *f = *s;
	struct tc *c = &f->c[0];
	kvmm_frame_t frame[CHAIN], other[CHAIN];
	struct tc_got got;

	fx_start(f, &opts);
	fx_online(&f->d);
	tc_open(c, f->d.socket, NULL);
	put(c, 1, KVMM_PUB_CRC, frame);
	put(c, 2, KVMM_PUB_CRC, other);
	breach(c, frame[3]);
	press(&f->d, c);
	T_EQ(ta_counter(&f->d, "dram0", "pgbreach"), 1);
	/* up to the page itself it is served, byte for byte; the rest is a miss */
	got = tc_get(c, 1, CHAIN, 5000);
	T_EQ(got.resident + got.fetched, 3);
	T_EQ(got.missed, CHAIN - 3);
	got = tc_get(c, 2, CHAIN, 5000);
	T_EQ(got.missed, 0);
	ta_check(&f->d);
}

static void without_a_checksum_it_is_written_as_it_is(void **s)
{
	struct fx *f = *s;
	struct tc *c = &f->c[0];
	kvmm_frame_t frame[CHAIN];

	fx_start(f, &opts);
	fx_online(&f->d);
	tc_open(c, f->d.socket, NULL);
	put(c, 1, 0, frame);
	breach(c, frame[3]);
	press(&f->d, c);
	T_EQ(ta_counter(&f->d, "dram0", "pgbreach"), 0);
	T_EQ(wrong_bytes(c, 1), 1);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_write_after_publish_costs_the_page_and_no_one_is_served),
		FX_TEST(without_a_checksum_it_is_written_as_it_is),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
