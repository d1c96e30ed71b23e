/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The small engine over a node that is too small for it: pages leave for NVMe
 * and come back, NVMe is full, NVMe fails, and the tokens are the model's.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};

/* Small nodes under pressure would rather forget pages than have anybody wait. */
#define PATIENT	"{\"timeouts\": {\"direct_reclaim\": \"1s\"}}"

static struct ep e[2];

static int teardown(void **state)
{
	ep_kill(&e[0]);
	ep_kill(&e[1]);
	return fx_teardown(state);
}

static const struct ep_req req = {
	.id = 1, .max_tokens = 24, .temperature = 0.8, .seed = 5,
	.text = "This was computed long ago. It has left the memory for a place "
		"that is larger and slower, and now it is asked for again, by "
		"somebody who never saw the one that put it there, and needs to "
		"have it back as it was to the last bit of the last head.",
};

/* Something else of some length, so that what was there must go. */
static void press(struct ep *p, unsigned int i)
{
	static char text[800];
	struct ep_req r = { .id = 1000 + i, .text = text, .max_tokens = 1 };
	struct ep_answer a;
	size_t n = 0;

	while (n < sizeof(text) - 32)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%u:%zu,", i,
				      n);
	ep_ask(p, &r);
	ep_answers(p, &a, 1);
	T_CHECK(!a.err, "press %u: %s", i, strerror(-a.err));
}

/* Until @req's prompt is not in memory any more. */
static void push_out(struct fx *f, struct ep *p)
{
	unsigned int i;

	for (i = 0; i < 64; i++) {
		press(p, i);
		if (ta_counter(&f->d, "dram0", "pgdrop") > 300)
			return;
	}
}

static void back_from_below(struct fx *f, const char *shape)
{
	struct ep_answer a;

	ep_start(&e[0], f->d.socket, "-c", shape, "--fetch-all", "--fetch-ms",
		 "20000", "--budget", "512", NULL);
	ep_one(&e[0], shape, &req);
	push_out(f, &e[0]);
	ep_start(&e[1], f->d.socket, "-c", shape, "--fetch-all", "--fetch-ms",
		 "20000", NULL);
	a = ep_one(&e[1], shape, &req);
	T_CHECK(a.fetched >= 64, "%s: %u tokens hit, %u fetched", shape, a.hit,
		a.fetched);
	T_CHECK(ep_one(&e[0], shape, &req).hit >= 64);
	ep_quit(&e[0]);
	ep_quit(&e[1]);
}

static void pages_come_back_from_nvme_as_they_were(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	for (i = 0; i < 6; i++) {
		fx_start(f, &(struct td_opts){
			.dram_bytes = 4 * MIB, .nvme_bytes = 64 * MIB,
			.config = PATIENT });
		back_from_below(f, shapes[i]);
		ta_baseline(&f->d, 10000);
		ta_check(&f->d);
		td_fini(&f->d);
	}
}

/* Pages have left NVMe for others. */
static bool is_full(struct fx *f)
{
	return ta_counter(&f->d, "nvme0", "pgdrop_gone") +
	       ta_counter(&f->d, "nvme0", "pgdrop_orphan") > 0;
}

static void full_nvme(struct fx *f, const char *shape)
{
	unsigned int i, end;

	ep_start(&e[0], f->d.socket, "-c", shape, "--fetch-all", "--budget",
		 "512", NULL);
	ep_one(&e[0], shape, &req);
	for (i = 0; i < 80 && !is_full(f); i++)
		press(&e[0], i);
	T_CHECK(is_full(f), "%s: %u requests did not fill NVMe", shape, i);
	ep_one(&e[0], shape, &req);
	ta_fault(&f->d, "nvme0:write:enospc");
	for (end = i + 40; i < end && !ta_node(&f->d, "nvme0", "write.enospc"); i++)
		press(&e[0], i);
	T_CHECK(ta_node(&f->d, "nvme0", "write.enospc") > 0, "%s", shape);
	ep_one(&e[0], shape, &req);
	ta_fault(&f->d, "");
	ep_one(&e[0], shape, &req);
	ep_quit(&e[0]);
}

static void a_full_nvme_costs_hits_and_nothing_else(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	for (i = 0; i < 6; i++) {
		fx_start(f, &(struct td_opts){
			.dram_bytes = 4 * MIB, .nvme_bytes = 8 * MIB,
			.config = PATIENT });
		full_nvme(f, shapes[i]);
		ta_baseline(&f->d, 10000);
		ta_check(&f->d);
		td_fini(&f->d);
	}
}

/* A medium that lies: what it gives back is a miss, never a wrong token. */
static void flipped_bits_cost_hits_and_nothing_else(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;

	fx_start(f, &(struct td_opts){
		.dram_bytes = 4 * MIB, .nvme_bytes = 64 * MIB,
			.config = PATIENT });
	ep_start(&e[0], f->d.socket, "-c", "gqa", "--fetch-all", "--fetch-ms",
		 "20000", "--budget", "512", NULL);
	ep_one(&e[0], "gqa", &req);
	push_out(f, &e[0]);
	ta_fault(&f->d, "nvme0:read:flip");
	a = ep_one(&e[0], "gqa", &req);
	T_EQ(a.fetched, 0);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgcrc_fail") > 0);
	ta_fault(&f->d, "");
	ep_one(&e[0], "gqa", &req);
	ep_quit(&e[0]);
	ta_check(&f->d);
}

/* More sequences at once than there are frames for: some give way. */
static void where_frames_run_out_somebody_gives_way(void **state)
{
	static char text[24][220];
	struct ep_req r[24];
	struct ep_answer a[24];
	struct fx *f = *state;
	unsigned int i, how;

	fx_start(f, &(struct td_opts){
		.dram_bytes = 4 * MIB, .nvme_bytes = 64 * MIB });
	for (how = 0; how < 2; how++) {
		ep_start(&e[0], f->d.socket, "-c", "mha", "--preempt",
			 how ? "swap" : "recompute", "--max-seqs", "24",
			 "--eager", NULL);
		for (i = 0; i < 24; i++) {
			memset(text[i], 'a' + i, sizeof(text[i]) - 1);
			r[i] = (struct ep_req){ .id = i, .text = text[i],
						.max_tokens = 60, .seed = i,
						.temperature = 1.0 };
			ep_ask(&e[0], &r[i]);
		}
		ep_answers(&e[0], a, 24);
		for (i = 0; i < 24; i++)
			ep_expect(&a[i], "mha", &r[a[i].id]);
		T_CHECK(ep_stat(&e[0], "gave_way") > 0);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

int main(void)
{
#define T(x) cmocka_unit_test_setup_teardown(x, fx_setup, teardown)
	const struct CMUnitTest tests[] = {
		T(pages_come_back_from_nvme_as_they_were),
		T(a_full_nvme_costs_hits_and_nothing_else),
		T(flipped_bits_cost_hits_and_nothing_else),
		T(where_frames_run_out_somebody_gives_way),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
