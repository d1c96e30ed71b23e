/* SPDX-License-Identifier: Apache-2.0 */
/* A server in the test's process; see server_rig.h. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/bitmap.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/desc.h"
#include "tests/lib/daemon.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

#define WAIT_NS		(5 * NSEC_PER_SEC)

int srig_open(struct server_rig *r, const char *more)
{
	return srig_open_sized(r, "8MiB", more);
}

int srig_open_sized(struct server_rig *r, const char *size, const char *more)
{
	char text[4096], path[64];
	struct server_opts o = { .cfg = &r->cfg, .config_path = "" };
	struct errmsg e = { "" };
	int err;

	memset(r, 0, sizeof(*r));
	err = td_tmpdir(NULL, "rig", r->dir, sizeof(r->dir));
	if (err)
		return err;
	snprintf(path, sizeof(path), "%.60s", r->dir);
	snprintf(text, sizeof(text),
		 "{\"state_dir\": \"%s\", \"admin\": {\"socket\": \"%s/a.sock\"},"
		 "\"sockets\": [{\"path\": \"%s/rw.sock\", \"tenant\": \"demo\","
		 " \"mode\": \"on\"}, {\"path\": \"%s/ro.sock\","
		 " \"tenant\": \"demo\", \"rights\": \"ro\", \"mode\": \"on\"}],"
		 "\"nodes\": [{\"name\": \"dram0\", \"kind\": \"host\","
		 " \"size\": \"%s\", \"size_max\": \"%s\","
		 " \"extent\": \"256KiB\"}], \"log_level\": \"err\"%s%s}",
		 path, path, path, path, size, size, more ? ", " : "", more ? more : "");
	err = config_parse("rig", text, strlen(text), &r->cfg, &e);
	if (!err)
		err = config_resolve(&r->cfg, 1u << 30, 1u << 30, &e);
	if (!err) {
		log_set_level(LOG_LVL_ERR);
		err = server_create(&o, &r->s, &e);
	}
	if (err) {
		fprintf(stderr, "rig: %s\n", e.text);
		td_rmtree(r->dir);
	}
	return err;
}

void srig_close(struct server_rig *r)
{
	if (r->s && server_destroy(r->s, deadline_in(WAIT_NS)))
		fprintf(stderr, "rig: the server did not end\n");
	r->s = NULL;
	td_rmtree(r->dir);
}

void srig_pump(struct server_rig *r)
{
	int i;

	for (i = 0; i < 4; i++)
		loop_once(r->s, 0);
}

uint64_t srig_reject(const struct server_rig *r, enum reject why)
{
	return r->s->c.reject[why];
}

unsigned int srig_sessions(const struct server_rig *r)
{
	return r->s->nr_sessions;
}

/* -- the wire --------------------------------------------------------------------- */

int rc_connect(struct server_rig *r, unsigned int socket, struct raw_client *c)
{
	*c = (struct raw_client){
		.rig = r, .doorbell = -1, .notify = -1, .win = 0xffff,
		.hdr = SHM_INIT, .ledger_shm = SHM_INIT, .table = SHM_INIT,
		.wl_shm = SHM_INIT,
	};
	c->m = calloc(1, sizeof(*c->m));
	if (!c->m)
		return -ENOMEM;
	c->fd = sock_connect(r->cfg.socket[socket].path);
	if (c->fd < 0) {
		free(c->m);
		c->m = NULL;
		return c->fd;
	}
	return 0;
}

void rc_close(struct raw_client *c)
{
	if (c->m)
		sock_msg_close_fds(c->m);
	free(c->m);
	c->m = NULL;
	close_fd(&c->fd);
	close_fd(&c->doorbell);
	close_fd(&c->notify);
	shm_fini(&c->hdr);
	shm_fini(&c->ledger_shm);
	shm_fini(&c->table);
	shm_fini(&c->wl_shm);
}

int rc_send(struct raw_client *c, struct wire_hdr *h, const int *fds,
	    unsigned int nr_fds)
{
	h->seq = ++c->seq;
	return sock_send(c->fd, h, fds, nr_fds);
}

int rc_recv(struct raw_client *c)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	int err;

	sock_msg_close_fds(c->m);
	for (;;) {
		err = sock_recv(c->fd, c->m);
		if (err != -EAGAIN)
			return err;
		if (deadline_past(deadline))
			return -ETIMEDOUT;
		loop_once(c->rig->s, deadline_in(NSEC_PER_MSEC));
	}
}

static const struct wire_hdr *msg_hdr(const struct raw_client *c)
{
	return (const void *)c->m->buf;
}

void rc_expect(struct raw_client *c, uint16_t type)
{
	const struct wire_error *e = (const void *)c->m->buf;
	int err = rc_recv(c);

	if (err)
		fail_msg("no message %u: %s", type, strerror(-err));
	if (msg_hdr(c)->type != type)
		fail_msg("message %u instead of %u: %s", msg_hdr(c)->type, type,
			 msg_hdr(c)->type == WIRE_ERROR ? e->sentence : "");
}

void rc_expect_error(struct raw_client *c, int err, const char *text)
{
	const struct wire_error *e = (const void *)c->m->buf;

	rc_expect(c, WIRE_ERROR);
	if (e->err != err || !strstr(e->sentence, text))
		fail_msg("%d \"%s\" instead of %d \"...%s...\"", e->err,
			 e->sentence, err, text);
}

void rc_expect_cut(struct raw_client *c, enum reject why)
{
	uint64_t before = srig_reject(c->rig, why);
	int err, i;

	for (i = 0; i < 100; i++) {
		err = rc_recv(c);
		if (err)
			break;
	}
	if (err != -EPIPE)
		fail_msg("not cut off: %s", strerror(-err));
	/* it may have been counted while an earlier call pumped */
	if (srig_reject(c->rig, why) == before && !before)
		fail_msg("\"%s\" was not counted", reject_name(why));
}

/* -- a client that behaves ------------------------------------------------------------ */

void rc_hello(struct raw_client *c)
{
	const struct wire_welcome *w = (const void *)c->m->buf;
	struct wire_hello h = {
		.h = { .type = WIRE_HELLO, .len = sizeof(h) },
		.abi_min = KVMM_ABI_MIN, .abi_max = KVMM_ABI_VERSION,
		.pid = (uint32_t)getpid(), .name = "raw",
	};
	int pidfd = fd_pidfd_open(getpid()), fd;
	struct stat st;

	assert_true(pidfd >= 0);
	assert_int_equal(rc_send(c, &h.h, &pidfd, 1), 0);
	close(pidfd);
	rc_expect(c, WIRE_WELCOME);
	assert_int_equal(c->m->nr_fds, 4);
	c->no = w->client;
	assert_int_equal(shm_map_fd(&c->hdr, sock_msg_take_fd(c->m),
				    sizeof(struct kvmm_hdr), 0), 0);
	fd = sock_msg_take_fd(c->m);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(shm_map_fd(&c->ledger_shm, fd, (size_t)st.st_size, 1),
			 0);
	c->l = c->ledger_shm.addr;
	assert_int_equal(c->l->magic, KVMM_MAGIC_LEDGER);
	assert_int_equal(c->l->bytes, st.st_size);
	c->sq = (void *)((char *)c->l + c->l->sq_off);
	c->cq = (void *)((char *)c->l + c->l->cq_off);
	c->arena = (uint8_t *)c->l + c->l->arena_off;
	c->sq_entries = c->l->sq_entries;
	c->cq_entries = c->l->cq_entries;
	c->arena_bytes = (uint32_t)c->l->arena_bytes;
	c->doorbell = sock_msg_take_fd(c->m);
	c->notify = sock_msg_take_fd(c->m);
}

void rc_come_again(struct raw_client *c)
{
	const struct kvmm_hdr *hdr = c->hdr.addr;
	struct wire_hello h = {
		.h = { .type = WIRE_HELLO, .len = sizeof(h) },
		.abi_min = KVMM_ABI_MIN, .abi_max = KVMM_ABI_VERSION,
		.pid = (uint32_t)getpid(), .name = "raw",
		.epoch = hdr->epoch, .client = c->no,
	};
	int pidfd = fd_pidfd_open(getpid());

	memcpy(h.secret, c->l->secret, sizeof(h.secret));
	assert_true(pidfd >= 0);
	close_fd(&c->fd);
	srig_pump(c->rig);		/* it sees that */
	c->fd = sock_connect(c->rig->cfg.socket[0].path);
	assert_true(c->fd >= 0);
	assert_int_equal(rc_send(c, &h.h, &pidfd, 1), 0);
	close(pidfd);
}

uint32_t rc_hello_again(struct raw_client *c)
{
	const struct wire_hdr *mh = (const void *)c->m->buf;
	uint32_t flags;
	int fd, i;

	rc_come_again(c);
	rc_expect(c, WIRE_WELCOME);
	assert_int_equal(c->m->nr_fds, 4);
	flags = ((const struct wire_welcome *)c->m->buf)->flags;
	if (!(flags & WIRE_WELCOME_RESUMED))
		return flags;
	for (i = 0; i < 2; i++) {
		fd = sock_msg_take_fd(c->m);
		close_fd(&fd);
	}
	close_fd(&c->doorbell);
	close_fd(&c->notify);
	c->doorbell = sock_msg_take_fd(c->m);
	c->notify = sock_msg_take_fd(c->m);
	do
		assert_int_equal(rc_recv(c), 0);
	while (mh->type != WIRE_RESUMED);
	return flags;
}

size_t rc_desc(uint8_t *buf)
{
	static const struct kvmm_seg seg = {
		.bytes = SRIG_PAGE, .align = 64, .what = KVMM_SEG_KV,
		.shard = KVMM_MIRROR,
	};
	static const struct kvmm_class cls = { "kv", SRIG_PAGE, 1, &seg };
	static const struct kvmm_group grp = {
		.rule = KVMM_FULL, .block_tokens = 16,
	};
	const struct kvmm_desc d = {
		.size = sizeof(d), .model = "model", .revision = "1",
		.kv_dtype = "bf16", .scale_format = "", .layout = "rig",
		.abi_tag = "rig-1", .salt = "", .world = 1, .nclasses = 1,
		.ngroups = 1, .classes = &cls, .groups = &grp,
	};
	struct errmsg e = { "" };
	int n = desc_encode(&d, buf, &e);

	if (n < 0)
		fail_msg("descriptor: %s", e.text);
	return (size_t)n;
}

void rc_attach(struct raw_client *c)
{
	static _Alignas(16) uint8_t buf[sizeof(struct wire_attach) +
					DESC_MAX_BYTES];
	const struct wire_attached *r = (const void *)c->m->buf;
	struct wire_attach *a = (void *)buf;

	*a = (struct wire_attach){ .h.type = WIRE_ATTACH };
	a->desc_len = (uint32_t)rc_desc(a->desc);
	a->h.len = (uint32_t)sizeof(*a) + a->desc_len;
	assert_int_equal(rc_send(c, &a->h, NULL, 0), 0);
	rc_expect(c, WIRE_ATTACHED);
	assert_int_equal(c->m->nr_fds, 1);
	c->space = r->space;
}

void rc_win_open(struct raw_client *c, uint32_t rights)
{
	const struct wire_window *r = (const void *)c->m->buf;
	struct wire_win_open w = {
		.h = { .type = WIRE_WIN_OPEN, .len = sizeof(w) },
		.space = c->space, .rights = rights,
	};

	assert_int_equal(rc_send(c, &w.h, NULL, 0), 0);
	rc_expect(c, WIRE_WINDOW);
	assert_int_equal(c->m->nr_fds, 2);
	c->win = r->win;
	assert_int_equal(shm_map_fd(&c->table, sock_msg_take_fd(c->m),
				    r->table_bytes, 0), 0);
	assert_int_equal(shm_map_fd(&c->wl_shm, sock_msg_take_fd(c->m),
				    r->ledger_bytes, 1), 0);
	c->wl = c->wl_shm.addr;
}

void rc_win_sync(struct raw_client *c)
{
	const struct wire_extents *x = (const void *)c->m->buf;
	struct wire_win w = {
		.h = { .type = WIRE_WIN_SYNC, .len = sizeof(w) },
		.win = c->win,
	};
	uint32_t i;

	assert_int_equal(rc_send(c, &w.h, NULL, 0), 0);
	do {
		rc_expect(c, WIRE_EXTENTS);
		for (i = 0; i < x->n; i++)
			if (x->ext[i].up)
				bitmap_shared_set(window_bitmap(c->wl),
						  x->ext[i].no);
	} while (x->more);
}

void rc_alloc(struct raw_client *c, uint32_t *frames, unsigned int n)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	uint32_t head = atomic_load(&c->wl->mag_head);

	while (atomic_load(&c->wl->mag_tail) - head < n) {
		struct ring_sqe e = {
			.op = RING_REFILL, .win = c->win, .n = n,
		};

		if (deadline_past(deadline))
			fail_msg("no frames");
		rc_win_sync(c);
		atomic_store(&c->wl->want, n);
		rc_submit(c, &e, NULL, 0);
		srig_pump(c->rig);
	}
	while (n--)
		*frames++ = atomic_load(&window_magazine(c->wl)[head++ &
					(c->wl->mag_entries - 1)]);
	atomic_store(&c->wl->mag_head, head);
}

/* -- the rings -------------------------------------------------------------------------- */

void rc_submit(struct raw_client *c, struct ring_sqe *e, const void *array,
	       uint32_t bytes)
{
	uint32_t size = c->arena_bytes;
	uint32_t off = (uint32_t)c->arena_tail % size;
	uint32_t pad = off + bytes > size ? size - off : 0;

	if (array) {
		e->arena_pos = (uint32_t)c->arena_tail + pad;
		e->arena_len = pad + bytes;
		memcpy(c->arena + e->arena_pos % size, array, bytes);
		c->arena_tail += e->arena_len;
	}
	c->sq[c->sq_tail++ % c->sq_entries] = *e;
	atomic_store(&c->l->sq.tail, c->sq_tail);
}

bool rc_pending(const struct raw_client *c)
{
	return atomic_load(&c->l->cq.tail) != c->cq_head;
}

void rc_complete(struct raw_client *c, struct ring_cqe *cqe,
		 struct ring_result *res, unsigned int max)
{
	struct ring_cqe *cq = c->cq;
	uint32_t mask = c->cq_entries - 1, i;
	uint64_t deadline = deadline_in(WAIT_NS);

	while (!rc_pending(c)) {
		if (deadline_past(deadline))
			fail_msg("no completion");
		loop_once(c->rig->s, deadline_in(NSEC_PER_MSEC));
	}
	*cqe = cq[c->cq_head++ & mask];
	for (i = 0; i < cqe->n; i++) {
		const struct ring_result *slot = (const void *)
			&cq[(c->cq_head + i / RING_RESULTS) & mask];

		if (i < max)
			res[i] = slot[i % RING_RESULTS];
	}
	c->cq_head += ring_result_slots(cqe->n);
}

void rc_advance(struct raw_client *c)
{
	atomic_store(&c->l->cq.head, c->cq_head);
}
