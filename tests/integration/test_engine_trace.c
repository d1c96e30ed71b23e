/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A recorded load through the small engine: two of them share a trace of coding
 * agents, each taking every second request, and answer as the oracle does that
 * takes them one after the other.
 */
#include <stdio.h>
#include <string.h>

#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG	40u
#define SAMPLE	12u

static struct ep e[2];

static int teardown(void **state)
{
	ep_kill(&e[0]);
	ep_kill(&e[1]);
	return fx_teardown(state);
}

/* Of the agents' trace: long prompts, which share what is before the last turn. */
static void replay(struct ep *p, const char *socket, const char *slice,
		   bool oracle)
{
	static char path[512], limit[16];
	const char *src = getenv("KVMM_SRC");

	snprintf(path, sizeof(path), "%s/tests/data/agents.jsonl.zst",
		 src ? src : ".");
	snprintf(limit, sizeof(limit), "%u", test_long() ? LONG : SAMPLE);
	ep_start(p, socket, "-c", "gqa", "--trace", path, "--limit", limit,
		 "--slice", slice, "--page-tokens", "2", "--block-tokens", "4",
		 "--generate", "3",
		 "--budget", "256", oracle ? "--oracle" : "--eager", NULL);
}

static void two_engines_share_a_trace(void **state)
{
	static struct ep_answer want[2][LONG], got[2][LONG];
	static const char *const slice[] = { "0/2", "1/2" };
	unsigned int n = test_long() ? LONG : SAMPLE, i, j, k;
	uint64_t prompt = 0, found = 0;
	struct fx *f = *state;

	fx_start(f, &(struct td_opts){ .dram_bytes = 256 * MIB });
	for (i = 0; i < 2; i++) {
		replay(&e[i], NULL, slice[i], true);
		ep_answers(&e[i], want[i], n);
		T_EQ(ep_end(&e[i], 20000), 0);
	}
	for (i = 0; i < 2; i++)
		replay(&e[i], f->d.socket, slice[i], false);
	for (i = 0; i < 2; i++) {
		ep_answers(&e[i], got[i], n);
		T_EQ(ep_end(&e[i], 20000), 0);
	}
	for (i = 0; i < 2; i++)
		for (j = 0; j < n; j++) {
			for (k = 0; k < n && want[i][k].id != got[i][j].id; k++)
				;
			T_CHECK(k < n);
			T_CHECK(!strcmp(want[i][k].digest, got[i][j].digest),
				"request %llu",
				(unsigned long long)got[i][j].id);
			prompt += got[i][j].prompt;
			found += got[i][j].hit;
		}
	/* agents come back with what they had */
	T_CHECK(found * 8 > prompt, "%llu of %llu tokens found",
		(unsigned long long)found, (unsigned long long)prompt);
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(two_engines_share_a_trace,
						fx_setup, teardown),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
