/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may share what: rights and tenants of sockets, modes that are switched
 * while clients run, members of engines, and descriptors that differ.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000

/* -- rights -------------------------------------------------------------------------- */

static const struct td_opts two_sockets = {
	.dram_bytes = 64 * MIB,
	.socket = {
		{ .name = "rw.sock", .tenant = "a" },
		{ .name = "ro.sock", .tenant = "a", .rights = "ro" },
		{ .name = "b.sock", .tenant = "b" },
	},
};

static long write_held(void *shm, long a, long b)
{
	uint32_t frame[64];
	volatile char *p;

	T_CHECK(fx_frames(frame, 0, 0) > 0);
	p = kvmm_win_ptr(fx_c()->win[0], 0, frame[0]);
	T_CHECK(p);
	*p = 1;				/* SIGSEGV */
	return 0;
}

static void read_only_clients_read(void **state)
{
	struct tc_opts rw = { .rights = KVMM_RW };
	struct fx *f = *state;
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	kvmm_frame_t frame = 1;
	char path[TD_MAX_PATH * 2];
	struct kvmm_info info = { .size = sizeof(info) };

	fx_start(f, &two_sockets);
	snprintf(path, sizeof(path), "%s", fx_path(f, 1));
	/* nothing to read: the first rw attach creates a space */
	T_EQ(tc_try_open(&f->c[1], path, NULL), -ENOENT);
	tc_open(&f->c[0], fx_path(f, 0), NULL);
	T_EQ(tc_put(&f->c[0], 1, 0, 16), 16);
	T_EQ(tc_try_open(&f->c[1], path, &rw), -EACCES);

	tc_open(&f->c[1], path, NULL);
	T_OK(kvmm_info(f->c[1].k, &info));
	T_EQ(info.rights, KVMM_RO);
	T_EQ(tc_hits(&f->c[1], 1, 16), 16);
	rq = tc_req(&f->c[1], 1);
	T_EQ(kvmm_alloc(rq, 0, f->c[1].node, 1, &frame, 0), -EACCES);
	tc_pub(&f->c[1], &pub, 2, 0, TC_FULL, 1, 0);
	T_EQ(kvmm_publish(rq, f->c[1].node, &pub, 1, 1), -EACCES);
	tc_end(rq);
	T_EQ(tc_hits(&f->c[0], 2, 1), 0);
	ta_check(&f->d);
}

static void read_only_memory_cannot_be_written(void **state)
{
	struct tc_opts ro = { .rights = KVMM_RO };
	struct fx *f = *state;
	unsigned int i;

	fx_start(f, &two_sockets);
	tc_open(&f->c[0], fx_path(f, 0), NULL);
	tc_put(&f->c[0], 1, 0, 16);
	/* through a read-only socket, and by its own wish */
	fx_client(f, 0, 1, NULL);
	fx_client(f, 1, 0, &ro);
	for (i = 0; i < 2; i++) {
		T_EQ(proc_call(&f->p[i], fx_hold, 1, 16), 16);
		proc_send(&f->p[i], write_held, 0, 0);
		proc_reap(&f->p[i]);
		T_CHECK(WIFSIGNALED(f->p[i].status));
		T_EQ(WTERMSIG(f->p[i].status), SIGSEGV);
	}
	T_EQ(tc_hits(&f->c[0], 1, 16), 16);
}

static void tenants_do_not_see_each_other(void **state)
{
	struct fx *f = *state;
	uint8_t a[32], b[32];

	fx_start(f, &two_sockets);
	tc_open(&f->c[0], fx_path(f, 0), NULL);
	tc_open(&f->c[1], fx_path(f, 2), NULL);
	T_OK(kvmm_space_id(f->c[0].sp, a));
	T_OK(kvmm_space_id(f->c[1].sp, b));
	T_CHECK(memcmp(a, b, 32));
	tc_put(&f->c[0], 1, 0, 4);
	T_EQ(tc_hits(&f->c[0], 1, 4), 4);
	T_EQ(tc_hits(&f->c[1], 1, 4), 0);
	T_EQ(tc_put(&f->c[1], 1, 0, 4), 4);
	T_EQ(tc_hits(&f->c[1], 1, 4), 4);
	ta_check(&f->d);
}

/* -- modes --------------------------------------------------------------------------- */

/* Publish one page; what became of it. */
static int publish_result(struct tc *c, uint64_t chain)
{
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_pub pub;
	struct kvmm_done d;
	kvmm_frame_t frame;
	uint64_t tag = ++c->tag;
	int err;

	tc_alloc(c, rq, 0, 1, &frame);
	tc_pub(c, &pub, chain, 0, TC_FULL, frame, 0);
	tc_fill(c, 0, frame, &pub.key);
	err = kvmm_publish(rq, c->node, &pub, 1, tag);
	if (!err) {
		T_CHECK(tc_wait(c, tag, &d, LONG_WAIT));
		err = d.result ? d.result : d.res[0].result;
	}
	tc_end(rq);
	return err;
}

static void set_mode(struct fx *f, struct tc *c, const char *name, int mode)
{
	ta_mode(&f->d, name);
	T_WAIT(5000, kvmm_mode(c->sp) == mode);
}

static void modes_switch_while_running(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_stats before = { .size = sizeof(before) }, after = before;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	T_EQ(kvmm_mode(c->sp), KVMM_MODE_ON);
	tc_put(c, 1, 0, 8);
	T_EQ(tc_hits(c, 1, 8), 8);

	set_mode(f, c, "readonly", KVMM_MODE_READONLY);
	T_EQ(tc_hits(c, 1, 8), 8);
	T_EQ(publish_result(c, 2), -EROFS);
	T_EQ(tc_hits(c, 2, 1), 0);

	set_mode(f, c, "bypass", KVMM_MODE_BYPASS);
	T_EQ(tc_hits(c, 1, 8), 0);
	T_EQ(publish_result(c, 3), -EAGAIN);

	set_mode(f, c, "observe", KVMM_MODE_OBSERVE);
	T_OK(kvmm_stats(c->k, &before));
	T_EQ(tc_hits(c, 1, 8), 0);
	T_OK(kvmm_stats(c->k, &after));
	T_EQ(after.pages_asked - before.pages_asked, 8);
	publish_result(c, 4);
	T_EQ(tc_hits(c, 4, 1), 0);

	set_mode(f, c, "on", KVMM_MODE_ON);
	T_EQ(tc_hits(c, 1, 8), 8);
	T_EQ(tc_hits(c, 2, 1), 0);
	T_EQ(tc_hits(c, 3, 1), 0);
	T_EQ(tc_hits(c, 4, 1), 0);	/* what was observed stayed private */
	T_EQ(publish_result(c, 4), 0);
	T_EQ(tc_hits(c, 4, 1), 1);
	ta_check(&f->d);
}

static void pins_survive_a_change_of_mode(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[8];
	struct kvmm_req *rq;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 8);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 8, hit, NULL), 8);
	set_mode(f, c, "bypass", KVMM_MODE_BYPASS);
	tc_check(c, 1, hit, 8);
	T_EQ(ta_pins(&f->d, 0), 8);
	tc_end(rq);
	T_EQ(ta_pins(&f->d, 0), 0);
}

/* -- engines and descriptors --------------------------------------------------------- */

static struct kvmm_engine member(uint32_t rank, uint32_t flags)
{
	return (struct kvmm_engine) {
		.size = sizeof(struct kvmm_engine), .rank = rank, .world = 2,
		.flags = flags, .token = "sixteen bytes!!",
	};
}

static void a_page_waits_for_the_step_of_every_member(void **state)
{
	struct kvmm_engine e0 = member(0, KVMM_LEADER), e1 = member(1, 0);
	struct tc_opts o0 = { .engine = &e0 }, o1 = { .engine = &e1 };
	struct fx *f = *state;
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint64_t tag;

	fx_start(f, NULL);
	tc_open(&f->c[2], f->d.socket, NULL);
	tc_open(&f->c[0], f->d.socket, &o0);
	rq = tc_post(&f->c[0], 1, 1, &tag);
	T_OK(kvmm_step_done(f->c[0].k, 1));
	tc_ping(&f->c[0]);
	/* not all members have joined */
	T_EQ(tc_hits(&f->c[2], 1, 1), 0);
	tc_open(&f->c[1], f->d.socket, &o1);
	tc_ping(&f->c[0]);
	T_EQ(tc_hits(&f->c[2], 1, 1), 0);
	T_OK(kvmm_step_done(f->c[1].k, 1));
	T_CHECK(tc_wait(&f->c[0], tag, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(tc_hits(&f->c[2], 1, 1), 1);
	/* it hears of the other member in kvmm_poll(), not in a hot call */
	T_WAIT(5000, (tc_ping(&f->c[0]), kvmm_step_engine(f->c[0].k) == 1));
	tc_end(rq);
}

static void join_refuses_what_does_not_fit(void **state)
{
	struct kvmm_engine e0 = member(0, KVMM_LEADER), e1 = member(1, 0);
	struct kvmm_engine twice = member(0, 0), wide = member(1, 0);
	struct tc_opts o = { .engine = &e0 };
	struct fx *f = *state;

	wide.world = 3;
	fx_start(f, NULL);
	tc_open(&f->c[0], f->d.socket, &o);
	o.engine = &twice;
	T_EQ(tc_try_open(&f->c[1], f->d.socket, &o), -EEXIST);
	o.engine = &wide;
	T_EQ(tc_try_open(&f->c[1], f->d.socket, &o), -EPROTO);
	o.engine = &e1;
	tc_open(&f->c[1], f->d.socket, &o);
	T_EQ(kvmm_join(f->c[0].k, &e0), -EBUSY);
	ta_check(&f->d);
}

static void a_differing_descriptor_is_named(void **state)
{
	struct kvmm_engine e0 = member(0, KVMM_LEADER), e1 = member(1, 0);
	struct kvmm_open_opts oo = { .size = sizeof(oo) };
	struct tc_opts o = { .engine = &e0 };
	struct fx *f = *state;
	struct kvmm_space *sp;
	struct kvmm_desc d;

	fx_start(f, NULL);
	tc_open(&f->c[0], f->d.socket, &o);
	T_OK(kvmm_open(f->d.socket, &oo, &f->c[1].k));
	T_OK(kvmm_join(f->c[1].k, &e1));
	d = *tc_desc(NULL);
	d.kv_dtype = "fp8";
	T_EQ(kvmm_space_attach(f->c[1].k, &d, &sp), -EPROTO);
	T_CHECK(strstr(kvmm_error(f->c[1].k), "kv_dtype"), "%s",
		kvmm_error(f->c[1].k));
	d = *tc_desc(NULL);
	T_OK(kvmm_space_attach(f->c[1].k, &d, &f->c[1].sp));

	/* a stranger who must join says which field is another one */
	T_OK(kvmm_open(f->d.socket, &oo, &f->c[2].k));
	d.flags = KVMM_MUST_JOIN;
	d.layout = "vk";
	T_EQ(kvmm_space_attach(f->c[2].k, &d, &sp), -EPROTO);
	T_CHECK(strstr(kvmm_error(f->c[2].k), "layout"), "%s",
		kvmm_error(f->c[2].k));
	d.flags = 0;
	T_OK(kvmm_space_attach(f->c[2].k, &d, &f->c[2].sp));
	ta_check(&f->d);
}

static void a_bad_descriptor_is_refused_with_its_field(void **state)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo) };
	struct fx *f = *state;
	struct kvmm_space *sp;
	struct kvmm_class cls[2];
	struct kvmm_desc d;

	fx_start(f, NULL);
	T_OK(kvmm_open(f->d.socket, &oo, &f->c[0].k));
	d = *tc_desc(NULL);
	memcpy(cls, d.classes, sizeof(cls[0]));
	cls[0].page_bytes += 4096;
	d.classes = cls;
	T_EQ(kvmm_space_attach(f->c[0].k, &d, &sp), -EINVAL);
	T_CHECK(strstr(kvmm_error(f->c[0].k), "page_bytes"), "%s",
		kvmm_error(f->c[0].k));
	T_EQ(ta_rejects(&f->d, NULL), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(read_only_clients_read),
		FX_TEST(read_only_memory_cannot_be_written),
		FX_TEST(tenants_do_not_see_each_other),
		FX_TEST(modes_switch_while_running),
		FX_TEST(pins_survive_a_change_of_mode),
		FX_TEST(a_page_waits_for_the_step_of_every_member),
		FX_TEST(join_refuses_what_does_not_fit),
		FX_TEST(a_differing_descriptor_is_named),
		FX_TEST(a_bad_descriptor_is_refused_with_its_field),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
