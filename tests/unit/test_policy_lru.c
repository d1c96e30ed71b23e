/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in policy, over its ABI, and how plug-ins are judged. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/mm/mm.h"
#include "ipc/base/rand.h"
#include "policies/kvmm_policy.h"
#include "tests/lib/unit.h"

#define PAGES	64

/* A pool of one, whose core says yes, no, or as the test wants. */
struct core {
	const struct kvmm_policy_v0 *pol;
	void		*inst;
	struct kvmm_policy_page pg[PAGES];
	bool		there[PAGES];
	unsigned int	order[PAGES * 4];
	unsigned int	nr;
	uint64_t	refuse;		/* bit i: page i is refused */
	uint64_t	touch;		/* bit i: and touched while offered */
	unsigned int	enough_at;	/* this many offers; 0: never */
};

static struct core core;

static int setup(void **state)
{
	struct core *c = &core;

	memset(c, 0, sizeof(*c));
	c->pol = &kvmm_policy_v0;
	c->inst = calloc(1, c->pol->inst_bytes);
	*state = c;
	return c->inst ? c->pol->init(c->inst) : -1;
}

static int teardown(void **state)
{
	struct core *c = *state;
	unsigned int i;

	for (i = 0; i < PAGES; i++)
		if (c->there[i])
			c->pol->remove(c->inst, &c->pg[i]);
	c->pol->fini(c->inst);
	free(c->inst);
	return 0;
}

static void add(struct core *c, unsigned int i)
{
	memset(c->pg[i].priv, 0, sizeof(c->pg[i].priv));
	c->pol->add(c->inst, &c->pg[i],
		    &(struct kvmm_policy_facts){ .pos = i });
	c->there[i] = true;
}

static void touch(struct core *c, unsigned int i)
{
	c->pol->touch(c->inst, &c->pg[i]);
}

static void drop(struct core *c, unsigned int i)
{
	c->pol->remove(c->inst, &c->pg[i]);
	/* what a policy keeps of a page after this it must not follow */
	memset(&c->pg[i], 0xff, sizeof(c->pg[i]));
	c->pg[i].flags = 0;
	c->there[i] = false;
}

static enum kvmm_policy_answer offer(struct kvmm_policy_select *sel,
				     struct kvmm_policy_page *pg)
{
	struct core *c = sel->arg;
	unsigned int i = pg - c->pg;

	assert_true(i < PAGES && c->there[i]);
	c->order[c->nr++] = i;
	if (c->touch >> i & 1)
		touch(c, i);
	if (c->enough_at == c->nr)
		return KVMM_POLICY_ENOUGH;
	if (c->refuse >> i & 1)
		return KVMM_POLICY_REFUSED;
	drop(c, i);
	return KVMM_POLICY_TAKEN;
}

static unsigned int run(struct core *c, uint32_t want, uint32_t max_scan)
{
	struct kvmm_policy_select sel = {
		.want = want, .max_scan = max_scan, .offer = offer, .arg = c,
	};
	uint32_t offered;

	c->nr = 0;
	offered = c->pol->select(c->inst, &sel);
	assert_int_equal(offered, c->nr);
	return offered;
}

static void an_empty_pool_offers_nothing(void **state)
{
	assert_int_equal(run(*state, 10, 10), 0);
}

static void the_page_used_longest_ago_is_offered_first(void **state)
{
	struct core *c = *state;
	unsigned int i;

	for (i = 0; i < 5; i++)
		add(c, i);
	touch(c, 0);
	touch(c, 3);
	assert_int_equal(run(c, 5, 100), 5);
	assert_memory_equal(c->order, ((unsigned int[]){ 1, 2, 4, 0, 3 }),
			    5 * sizeof(unsigned int));
}

/* A request's pages are touched tail to head: its tail leaves first. */
static void of_a_request_the_tail_is_offered_first(void **state)
{
	struct core *c = *state;
	unsigned int i;

	for (i = 0; i < 4; i++)
		add(c, i);
	for (i = 4; i--;)
		touch(c, i);
	run(c, 4, 4);
	for (i = 0; i < 4; i++)
		assert_int_equal(c->order[i], 3 - i);
}

static void a_page_that_arrived_cold_is_offered_first(void **state)
{
	struct core *c = *state;

	add(c, 0);
	add(c, 1);
	c->pg[2].flags = KVMM_POLICY_COLD;
	add(c, 2);
	run(c, 1, 10);
	assert_int_equal(c->order[0], 2);
}

static void no_more_are_offered_than_wanted_or_scanned(void **state)
{
	struct core *c = *state;
	unsigned int i;

	for (i = 0; i < 20; i++)
		add(c, i);
	assert_int_equal(run(c, 3, 100), 3);
	c->refuse = UINT64_MAX;
	assert_int_equal(run(c, 3, 7), 7);
	c->enough_at = 2;
	assert_int_equal(run(c, 3, 7), 2);
}

/* What is sent to the warm end while it is offered is not met again. */
static void refused_pages_are_offered_once_a_search(void **state)
{
	struct core *c = *state;
	unsigned int i;

	for (i = 0; i < 10; i++)
		add(c, i);
	c->refuse = UINT64_MAX;
	c->touch = UINT64_MAX;
	assert_int_equal(run(c, 1, 1000), 10);
	for (i = 0; i < 10; i++)
		assert_int_equal(c->order[i], i);
}

static void a_page_touched_while_offered_goes_to_the_warm_end(void **state)
{
	struct core *c = *state;
	unsigned int i;

	for (i = 0; i < 4; i++)
		add(c, i);
	c->refuse = c->touch = 1;
	assert_int_equal(run(c, 1, 10), 2);
	assert_int_equal(c->order[1], 1);
	c->refuse = c->touch = 0;
	run(c, 3, 10);
	assert_memory_equal(c->order, ((unsigned int[]){ 2, 3, 0 }),
			    3 * sizeof(unsigned int));
}

/* Against a list that is too simple to be wrong. */
static void random_operations_agree_with_a_plain_list(void **state)
{
	struct core *c = *state;
	unsigned int list[PAGES], n = 0, step, i, j;
	struct rng r;

	rng_seed(&r, test_seed());
	c->refuse = UINT64_MAX;
	for (step = 0; step < (test_long() ? 200000 : 20000); step++) {
		i = rng_below(&r, PAGES);
		for (j = 0; j < n && list[j] != i; j++)
			;
		if (j < n)
			memmove(&list[j], &list[j + 1],
				(--n - j) * sizeof(list[0]));
		if (!c->there[i]) {
			c->pg[i].flags = 0;
			add(c, i);
			list[n++] = i;
		} else if (rng_below(&r, 2)) {
			touch(c, i);
			list[n++] = i;
		} else {
			drop(c, i);
		}
		if (step % 16)
			continue;
		assert_int_equal(run(c, 1, PAGES), n);
		assert_memory_equal(c->order, list, n * sizeof(list[0]));
	}
}

/* -- loading -------------------------------------------------------------------- */

static void lru_is_there_by_name(void **state)
{
	const struct kvmm_policy_v0 *pol = NULL;
	struct errmsg e = { "" };

	assert_int_equal(mm_policy_load("lru", &pol, &e), 0);
	assert_ptr_equal(pol, &kvmm_policy_v0);
	assert_int_equal(pol->abi, KVMM_POLICY_ABI);
}

static void what_is_no_name_must_be_an_absolute_path(void **state)
{
	const struct kvmm_policy_v0 *pol = NULL;
	struct errmsg e = { "" };

	assert_int_equal(mm_policy_load("lfu", &pol, &e), -EINVAL);
	assert_non_null(strstr(e.text, "'lfu'"));
	assert_int_equal(mm_policy_load("./lru.so", &pol, &e), -EINVAL);
	assert_int_equal(mm_policy_load("/nowhere/at/all.so", &pol, &e),
			 -ENOENT);
	assert_non_null(strstr(e.text, "/nowhere/at/all.so"));
	assert_null(pol);
}

/* A file of @mode in a folder of @dir_mode; both the caller's to remove. */
static void plant(char dir[64], char path[96], mode_t dir_mode, mode_t mode)
{
	int fd;

	strcpy(dir, "/tmp/kvmm-policy-XXXXXX");
	assert_non_null(mkdtemp(dir));
	snprintf(path, 96, "%s/p.so", dir);
	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	assert_int_equal(write(fd, "no plug-in\n", 11), 11);
	assert_int_equal(fchmod(fd, mode), 0);
	close(fd);
	assert_int_equal(chmod(dir, dir_mode), 0);
}

static int load_planted(mode_t dir_mode, mode_t mode, uid_t owner,
			struct errmsg *e)
{
	const struct kvmm_policy_v0 *pol;
	char dir[64], path[96];
	int err;

	plant(dir, path, dir_mode, mode);
	assert_int_equal(chown(path, owner, 0), 0);
	err = mm_policy_load(path, &pol, e);
	unlink(path);
	rmdir(dir);
	return err;
}

static void a_file_that_others_may_write_is_refused(void **state)
{
	struct errmsg e = { "" };

	if (geteuid())
		skip();
	assert_int_equal(load_planted(0755, 0666, 0, &e), -EPERM);
	assert_non_null(strstr(e.text, "666"));
	assert_int_equal(load_planted(0777, 0644, 0, &e), -EPERM);
	assert_non_null(strstr(e.text, "777"));
	assert_int_equal(load_planted(0755, 0644, 12345, &e), -EPERM);
	assert_non_null(strstr(e.text, "12345"));
	/* its folder and its owner are fine: then it must be a plug-in */
	assert_int_equal(load_planted(0755, 0644, 0, &e), -ENOEXEC);
}

static void a_folder_is_not_a_plug_in(void **state)
{
	const struct kvmm_policy_v0 *pol;
	struct errmsg e = { "" };

	assert_int_equal(mm_policy_load("/usr/lib", &pol, &e), -ENOEXEC);
}

/* Any library that is root's and exports something else. */
static void a_library_without_the_symbol_is_refused(void **state)
{
	static const char *const lib[] = {
		"/lib/x86_64-linux-gnu/libm.so.6",
		"/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6",
	};
	const struct kvmm_policy_v0 *pol;
	struct errmsg e = { "" };
	unsigned int i;

	for (i = 0; i < 3; i++)
		if (!access(lib[i], R_OK))
			break;
	if (i == 3)
		skip();
	assert_int_equal(mm_policy_load(lib[i], &pol, &e), -ENOEXEC);
	assert_non_null(strstr(e.text, "kvmm_policy_v0"));
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(an_empty_pool_offers_nothing),
		T(the_page_used_longest_ago_is_offered_first),
		T(of_a_request_the_tail_is_offered_first),
		T(a_page_that_arrived_cold_is_offered_first),
		T(no_more_are_offered_than_wanted_or_scanned),
		T(refused_pages_are_offered_once_a_search),
		T(a_page_touched_while_offered_goes_to_the_warm_end),
		T(random_operations_agree_with_a_plain_list),
		cmocka_unit_test(lru_is_there_by_name),
		cmocka_unit_test(what_is_no_name_must_be_an_absolute_path),
		cmocka_unit_test(a_file_that_others_may_write_is_refused),
		cmocka_unit_test(a_folder_is_not_a_plug_in),
		cmocka_unit_test(a_library_without_the_symbol_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
