/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SIGKILL at random moments of their work, to whoever it hits: a scheduler with
 * ranks, one of its ranks, another engine of the same space, kvmmd. Those that are
 * left give the answers that the model gives, and when they are done nothing of
 * the dead is left in any account. The model's shape is another one from run to
 * run, by the seed.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define NR_ASK		6
#define LONG_ROUNDS	50
#define ROUNDS		8

enum victim {
	SCHEDULER, RANK, OTHER, DAEMON, NR_VICTIMS
};

/* Who there is: with ranks on a gang, and two on a plain node. */
enum { TP, ONE, TWO, NR_ENGINES };
#define NR_CLIENTS	5u	/* a scheduler, its ranks, and the two */

static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};

static struct ep e[NR_ENGINES];
static unsigned int answered[NR_ENGINES];	/* of this round's requests */
static const char *shape;
static struct rng rng;

static int teardown(void **state)
{
	unsigned int i, r;

	for (i = 0; i < NR_ENGINES; i++) {
		ep_kill(&e[i]);
		for (r = 0; r < e[i].nranks; r++)
			if (e[i].rank[r] > 0)
				kill(e[i].rank[r], SIGKILL);
		memset(&e[i], 0, sizeof(e[i]));
	}
	return fx_teardown(state);
}

static const char nodes[] =
	"{\"nodes\": ["
	"{\"name\": \"dram0\", \"kind\": \"host\", \"size\": \"32MiB\"},"
	"{\"name\": \"gang2\", \"kind\": \"host\", \"gang\": 2, \"size\": \"32MiB\"}]}";

static void engine_start(struct fx *f, unsigned int i)
{
	if (i == TP)
		ep_start(&e[i], f->d.socket, "-c", shape, "--ranks", "2",
			 "--node", "gang2", NULL);
	else
		ep_start(&e[i], f->d.socket, "-c", shape, NULL);
}

/*
 * A few texts, so that their answers are computed once by the oracle. They end one
 * after the other.
 */
static struct ep_req request(unsigned int i)
{
	static char text[NR_ASK][160];

	snprintf(text[i], sizeof(text[i]),
		 "They begin alike, and that is what they share with whoever else is there; then number %u goes its own way%s",
		 i, i % 2 ? " for some more words." : ".");
	return (struct ep_req){
		.id = i, .text = text[i], .max_tokens = 14 + 10 * i, .seed = i,
		.temperature = 0.8,
	};
}

static void ask_all(unsigned int i)
{
	struct ep_req r;
	unsigned int j;

	answered[i] = 0;
	for (j = 0; j < NR_ASK; j++) {
		r = request(j);
		ep_ask(&e[i], &r);
	}
}

static void expect_one(unsigned int i, const struct ep_answer *a)
{
	struct ep_req r = request((unsigned int)a->id);

	ep_expect(a, shape, &r);
	answered[i]++;
}

static void expect_all(unsigned int i)
{
	struct ep_answer a;

	while (answered[i] < NR_ASK) {
		ep_answers(&e[i], &a, 1);
		expect_one(i, &a);
	}
}

/* What it has said by now, or had when it was killed: is there more to come? */
static bool is_busy(unsigned int i)
{
	struct ep_answer a;

	while (answered[i] < NR_ASK && ep_try_answer(&e[i], &a, 0))
		expect_one(i, &a);
	return answered[i] < NR_ASK;
}

/*
 * Who of the engines is dead after it? NR_ENGINES: none. *@busy: somebody whom it
 * hit was at work.
 */
static unsigned int strike(struct fx *f, enum victim v, bool *busy)
{
	unsigned int i, dead = v == OTHER ? TWO : TP;

	switch (v) {
	case SCHEDULER:
	case OTHER:
		kill(e[dead].pid, SIGKILL);
		*busy = is_busy(dead);
		ep_kill(&e[dead]);
		return dead;
	case RANK:
		kill(e[TP].rank[rng_below(&rng, 2)], SIGKILL);
		*busy = is_busy(TP);
		ep_end(&e[TP], 30000);
		return TP;
	default:
		td_kill(&f->d);
		for (*busy = false, i = 0; i < NR_ENGINES; i++)
			*busy |= is_busy(i);
		T_OK(td_start(&f->d));
		return NR_ENGINES;
	}
}

static void rank_is_gone(const struct ep *p, unsigned int r)
{
	T_WAIT(20000, kill(p->rank[r], 0));
}

/*
 * Nothing of the dead is left: neither they, nor their pins, nor frames that wait
 * for them. What the living have ready for the next request is theirs.
 */
static bool at_rest(struct fx *f)
{
	return !ta_pins(&f->d, 0) &&
	       !ta_node(&f->d, "dram0", "frames.quarantine") &&
	       !ta_node(&f->d, "gang2", "frames.quarantine") &&
	       ta_clients(&f->d) == NR_CLIENTS;
}

/* Until the victim has answered some of it, and a little longer. */
static void wait_some(enum victim v)
{
	unsigned int i = v == DAEMON ? (unsigned int)rng_below(&rng, NR_ENGINES) :
			 v == OTHER ? TWO : TP;
	unsigned int n = (unsigned int)rng_below(&rng, NR_ASK - 2);
	struct ep_answer a;

	while (answered[i] < n) {
		ep_answers(&e[i], &a, 1);
		expect_one(i, &a);
	}
	usleep((useconds_t)rng_below(&rng, 5000));
}

/* Return: did it hit somebody at work? */
static bool round_of(struct fx *f, enum victim v)
{
	unsigned int dead, i, r;
	bool busy;

	for (i = 0; i < NR_ENGINES; i++)
		ask_all(i);
	wait_some(v);
	dead = strike(f, v, &busy);
	for (i = 0; i < NR_ENGINES; i++)
		if (i != dead)
			expect_all(i);
	if (dead < NR_ENGINES) {
		for (r = 0; r < e[dead].nranks; r++)
			rank_is_gone(&e[dead], r);
		memset(e[dead].rank, 0, sizeof(e[dead].rank));
		engine_start(f, dead);
	}
	T_WAIT(20000, at_rest(f));
	ta_check(&f->d);
	return busy;
}

static void whoever_is_killed_the_others_are_right(void **state)
{
	unsigned int i, rounds = test_long() ? LONG_ROUNDS : ROUNDS, busy = 0;
	struct fx *f = *state;

	rng_seed(&rng, test_seed());
	shape = shapes[rng_below(&rng, 6)];
	printf("# shape %s\n", shape);
	fx_start(f, &(struct td_opts){ .config = nodes });
	for (i = 0; i < NR_ENGINES; i++)
		engine_start(f, i);
	/* not while somebody is to be met at work: the oracle takes longer */
	for (i = 0; i < NR_ENGINES; i++) {
		ask_all(i);
		expect_all(i);
	}
	/* each kind is met, in whatever order from then on */
	for (i = 0; i < rounds; i++)
		busy += round_of(f, i < NR_VICTIMS ? i :
				    rng_below(&rng, NR_VICTIMS));
	T_CHECK(busy >= rounds / 2, "%u of %u kills hit somebody at work", busy,
		rounds);
	printf("# %u of %u kills hit somebody at work\n", busy, rounds);
	for (i = 0; i < NR_ENGINES; i++)
		ep_quit(&e[i]);
	ta_baseline(&f->d, 20000);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			whoever_is_killed_the_others_are_right, fx_setup,
			teardown),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
