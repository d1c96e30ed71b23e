/* SPDX-License-Identifier: Apache-2.0 */
/* Observe mode: what the operator reads of a cache that nobody uses yet. */
#include <inttypes.h>
#include <string.h>
#include <time.h>

#include <jansson.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define PAGES	8u

static struct td_opts observed(void)
{
	return (struct td_opts){ .socket = { { .mode = "observe" } } };
}

/* A number of the only space. */
static int64_t of_space(struct fx *f, const char *name)
{
	json_t *r = ta_request(&f->d, "{\"cmd\": \"space\"}");
	json_t *list = json_object_get(r, "spaces"), *v;
	int64_t n;

	T_EQ(json_array_size(list), 1);
	v = json_object_get(json_array_get(list, 0), name);
	T_CHECK(json_is_integer(v), "space has no %s", name);
	n = json_integer_value(v);
	json_decref(r);
	return n;
}

/* Times are told in milliseconds: let what follows be later than what was. */
static void next_ms(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = 3000000 }, NULL);
}

/* As an engine does: ask, compute what is missing, publish it, end. */
static void serve(struct tc *c, uint64_t chain, uint32_t n)
{
	struct kvmm_req *rq = tc_req(c, chain);

	T_EQ(tc_match(c, rq, chain, n, NULL, NULL), 0);
	tc_publish(c, rq, chain, 0, n, NULL);
	tc_end(rq);
	tc_ping(c);
	next_ms();
}

static bool says(struct fx *f, const char *what)
{
	json_t *r = ta_request(&f->d, "{\"cmd\": \"status\"}"), *v;
	bool found = false;
	size_t i;

	json_array_foreach(json_object_get(r, "notes"), i, v)
		found |= strstr(json_string_value(v), what) != NULL;
	json_decref(r);
	return found;
}

static void a_prompt_that_comes_again_would_hit(void **state)
{
	struct td_opts o = observed();
	struct fx *f = *state;
	struct tc *c = &f->c[0];

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	serve(c, 1, PAGES);
	T_EQ(of_space(f, "ghost_asked"), PAGES);
	T_EQ(of_space(f, "ghost_hits"), 0);
	T_EQ(of_space(f, "ghost_pages"), PAGES);
	serve(c, 1, PAGES);
	T_EQ(of_space(f, "ghost_asked"), 2 * PAGES);
	T_EQ(of_space(f, "ghost_hits"), PAGES);
	T_EQ(of_space(f, "ghost_pages"), PAGES);
	serve(c, 2, 2 * PAGES);
	T_EQ(of_space(f, "ghost_asked"), 4 * PAGES);
	T_EQ(of_space(f, "ghost_hits"), PAGES);
	T_EQ(of_space(f, "pages"), 0);
	T_CHECK(says(f, "8 of 32 pages asked for would have hit (25.0 %)"));
	ta_check(&f->d);
}

/* What another process computed counts, what it computes meanwhile does not. */
static void prompts_of_two_processes_meet(void **state)
{
	struct td_opts o = observed();
	struct fx *f = *state;
	struct kvmm_req *rq;

	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, NULL);
	tc_open(&f->c[1], f->d.socket, NULL);
	rq = tc_req(&f->c[1], 1);
	T_EQ(tc_match(&f->c[1], rq, 1, PAGES, NULL, NULL), 0);
	next_ms();
	serve(&f->c[0], 1, PAGES);
	tc_end(rq);
	tc_ping(&f->c[1]);
	T_EQ(of_space(f, "ghost_asked"), 2 * PAGES);
	T_EQ(of_space(f, "ghost_hits"), 0);
	serve(&f->c[1], 1, PAGES);
	T_EQ(of_space(f, "ghost_hits"), PAGES);
}

/* More pages than an entry takes; asked of by a peek only. */
static void a_long_prompt_is_counted_whole(void **state)
{
	static struct kvmm_key key[3 * 4096];
	struct kvmm_keys keys = { .k = key, .n = 3 * 4096 };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_stats st = { .size = sizeof(st) };
	struct td_opts o = observed();
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	uint32_t i;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	serve(c, 1, PAGES);
	tc_keys(c, 1, PAGES, 0, key);
	for (i = PAGES; i < keys.n; i++)
		memcpy(key[i].b, &i, sizeof(i));
	rq = tc_req(c, 2);
	T_OK(kvmm_peek(rq, &keys, 1, c->node, &m));
	T_EQ(m.n_pages, 0);
	tc_end(rq);
	tc_ping(c);
	T_EQ(of_space(f, "ghost_asked"), PAGES + keys.n);
	T_EQ(of_space(f, "ghost_hits"), PAGES);
	T_OK(kvmm_stats(c->k, &st));
	T_EQ(st.keys_lost, 0);
}

/* In mode on nobody needs to know, and it costs nothing. */
static void without_observing_nothing_is_named(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, PAGES);
	T_EQ(tc_hits(c, 1, PAGES), PAGES);
	tc_ping(c);
	T_EQ(of_space(f, "asked"), 0);
	T_EQ(of_space(f, "ghost_asked"), 0);
	T_CHECK(!says(f, "would have hit"));
}

/* What was cached before the switch would have been found, too. */
static void pages_from_before_the_switch_count(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, PAGES);
	ta_mode(&f->d, "observe");
	T_WAIT(5000, kvmm_mode(c->sp) == KVMM_MODE_OBSERVE);
	T_EQ(tc_hits(c, 1, 2 * PAGES), 0);
	tc_ping(c);
	T_EQ(of_space(f, "ghost_asked"), 2 * PAGES);
	T_EQ(of_space(f, "ghost_hits"), PAGES);
	ta_check(&f->d);
}

static unsigned int nr_spaces(struct fx *f)
{
	json_t *r = ta_request(&f->d, "{\"cmd\": \"space\"}");
	unsigned int n = json_array_size(json_object_get(r, "spaces"));

	json_decref(r);
	return n;
}

/* A space without pages ends with its clients: what was seen does not. */
static void an_engine_that_restarts_loses_no_figures(void **state)
{
	struct td_opts o = observed();
	struct fx *f = *state;
	struct tc *c = &f->c[0];

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	serve(c, 1, PAGES);
	tc_close(c);
	T_WAIT(10000, nr_spaces(f) == 0);
	tc_open(c, f->d.socket, NULL);
	T_EQ(of_space(f, "ghost_asked"), PAGES);
	T_EQ(of_space(f, "ghost_pages"), PAGES);
	serve(c, 1, PAGES);
	T_EQ(of_space(f, "ghost_asked"), 2 * PAGES);
	T_EQ(of_space(f, "ghost_hits"), PAGES);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_prompt_that_comes_again_would_hit),
		FX_TEST(prompts_of_two_processes_meet),
		FX_TEST(a_long_prompt_is_counted_whole),
		FX_TEST(without_observing_nothing_is_named),
		FX_TEST(pages_from_before_the_switch_count),
		FX_TEST(an_engine_that_restarts_loses_no_figures),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
