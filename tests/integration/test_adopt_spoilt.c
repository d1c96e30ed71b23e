/* SPDX-License-Identifier: Apache-2.0 */
/* What kvmmd left behind is not as it was: the next one takes what is sound. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/frame.h"
#include "tests/lib/kept.h"
#include "tests/lib/unit.h"

/* A file of the keeper's, by the name of its memory, mapped. */
static void *keepers(pid_t keeper, const char *what, size_t *bytes)
{
	char dir[64], link[320], to[256];
	struct dirent *de;
	void *p = NULL;
	ssize_t n;
	DIR *d;
	int fd;

	snprintf(dir, sizeof(dir), "/proc/%d/fd", (int)keeper);
	d = opendir(dir);
	T_CHECK(d);
	while (!p && (de = readdir(d))) {
		snprintf(link, sizeof(link), "%s/%s", dir, de->d_name);
		n = readlink(link, to, sizeof(to) - 1);
		to[n < 0 ? 0 : n] = '\0';
		if (!strstr(to, what))
			continue;
		fd = open(link, O_RDWR | O_CLOEXEC);
		T_CHECK(fd >= 0, "%s", strerror(errno));
		*bytes = (size_t)lseek(fd, 0, SEEK_END);
		p = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			 0);
		T_CHECK(p != MAP_FAILED);
		close(fd);
	}
	closedir(d);
	return p;
}

/* Every record of a chain's page @i, by its key: a bit of it flips. */
static unsigned int spoil(void *mem, size_t bytes, const struct kvmm_key *key)
{
	unsigned int n = 0;
	size_t at;

	for (at = 0; at + sizeof(struct frame_record) <= bytes; at += 128) {
		struct frame_record *r = (void *)((char *)mem + at);

		if (memcmp(r->key, key->b, sizeof(r->key)))
			continue;
		r->cost_us ^= 4;
		n++;
	}
	return n;
}

static void a_spoilt_record_costs_a_page(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key key;
	size_t bytes = 0;
	void *mem;
	pid_t pid;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	T_EQ(tc_put(c, 2, 0, 16), 16);
	pid = td_kept(&f->d);
	T_OK(td_pause(&f->d));
	T_OK(kill(pid, SIGKILL));
	mem = keepers(f->d.pid, "kvmm-records", &bytes);
	T_CHECK(mem);
	tc_key(c, 1, 8, TC_FULL, &key);
	T_EQ(spoil(mem, bytes, &key), 1);
	munmap(mem, bytes);
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	T_EQ(tc_hits(c, 1, 16), 8);
	T_EQ(tc_hits(c, 2, 16), 16);
	ta_check(&f->d);
	T_EQ(tc_put(c, 1, 8, 8), 8);
	T_EQ(tc_hits(c, 1, 16), 16);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* The state that says who had what is gone: everybody begins anew. */
static void without_a_state_all_begin_anew(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	struct kvmm_req *rq;
	size_t bytes = 0;
	uint64_t epoch;
	void *mem;
	pid_t pid;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	epoch = kvmm_epoch(c->k);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	pid = td_kept(&f->d);
	T_OK(td_pause(&f->d));
	T_OK(kill(pid, SIGKILL));
	mem = keepers(f->d.pid, "kvmm-state", &bytes);
	T_CHECK(mem);
	memset(mem, 0x5a, 4096);
	munmap(mem, bytes);
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	/* by which a rank knows that a plan of then means nothing now */
	T_CHECK(kvmm_epoch(c->k) != epoch);
	/* it reads on what it had pinned */
	tc_check(c, 1, hit, 16);
	tc_end(rq);
	T_OK(kvmm_win_sync(c->win[0], 0));
	T_EQ(tc_hits(c, 1, 16), 0);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	T_EQ(tc_hits(c, 1, 16), 16);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_spoilt_record_costs_a_page),
		FX_TEST(without_a_state_all_begin_anew),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
