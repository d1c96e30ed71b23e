/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client that writes anything into what it may write: submission ring, arena,
 * cursors, pins, magazine, step word.
 *
 * Input: a byte with the number of frames to begin with (low 3 bits; 8: publish
 * them), then actions, each a byte and what it needs:
 *	0  an entry as it is: 64 bytes
 *	1  an entry that gets far: op, n, 1 byte each; the array comes out of the
 *	   rest of the input, window and space are right
 *	2  submission tail: 1 byte is added
 *	3  completion head: 4 bytes; or, with 0xff first, up to where it should be
 *	4  4 bytes at a place (2 bytes) of the base ledger's head
 *	5  4 bytes at a place (2 bytes) of the window ledger
 *	6  let the daemon run
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

#define CHECK_EVERY	64
#define MAX_ACTIONS	256

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

static struct server_rig rig;
static unsigned int nr_runs;

/* What is left of the input. */
struct bytes {
	const uint8_t	*p;
	size_t		n;
};

static void end(void)
{
	srig_close(&rig);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	if (srig_open(&rig, "\"spin_us\": 0"))
		exit(1);
	atexit(end);
	return 0;
}

/* Zeroes where the input has ended. */
static void take(struct bytes *b, void *to, size_t n)
{
	size_t k = min(n, b->n);

	memset(to, 0, n);
	memcpy(to, b->p, k);
	b->p += k;
	b->n -= k;
}

static uint8_t take_byte(struct bytes *b)
{
	uint8_t v;

	take(b, &v, 1);
	return v;
}

/* Mostly between frames that the client may have. */
static void good_forks(const struct raw_client *c, struct ring_fork *f,
		       uint32_t n)
{
	uint32_t first = ((const struct frame_table *)c->table.addr)->
			 frames_per_extent;

	for (; n--; f++) {
		if (f->spare & 0xf0)
			f->win = c->win;
		if (f->spare & 0x0f)
			f->from = first + f->from % 16;
		if (f->spare & 0x0e)
			f->to = first + f->to % 16;
	}
}

static void good_entry(struct raw_client *c, struct bytes *b)
{
	static uint8_t array[32 * sizeof(struct ring_pub)];
	static const uint8_t elem[RING_NR_OPS] = {
		[RING_PUBLISH] = sizeof(struct ring_pub),
		[RING_FETCH] = sizeof(struct ring_key),
		[RING_FREE] = 4, [RING_REPORT] = sizeof(struct ring_key),
		[RING_END] = sizeof(struct ring_key),
		[RING_FORK] = sizeof(struct ring_fork),
	};
	struct ring_sqe e = {
		.op = take_byte(b) % RING_NR_OPS,
		.win = c->win, .space = (uint16_t)c->space,
		.n = take_byte(b) % 32 + 1, .tag = take_byte(b) % 8,
	};
	uint32_t bytes;

	if (e.op == RING_REPORT)
		e.n = 1;
	if (e.op == RING_FORK)
		e.n = e.n % KVMM_MAX_GROUPS + 1;
	if (e.op == RING_END)
		e.nr_keys = e.n - 1;
	e.after = take_byte(b) % 4;
	e.arg = e.op == RING_CANCEL ? take_byte(b) % 8 : 0;
	e.frame = take_byte(b);
	bytes = (e.op == RING_END ? e.nr_keys : e.n) * elem[e.op];
	take(b, array, bytes);
	if (e.op == RING_FORK)
		good_forks(c, (struct ring_fork *)array, e.n);
	rc_submit(c, &e, bytes ? array : NULL, bytes);
}

static void raw_entry(struct raw_client *c, struct bytes *b)
{
	struct ring_sqe e;

	take(b, &e, sizeof(e));
	rc_submit(c, &e, NULL, 0);
}

static void write_word(void *base, size_t bytes, struct bytes *b)
{
	uint16_t off;
	uint32_t v;

	take(b, &off, sizeof(off));
	take(b, &v, sizeof(v));
	off = (uint16_t)(off % (bytes / 4));
	/* relaxed: whatever order a hostile client's stores have */
	atomic_store_explicit((_Atomic uint32_t *)base + off, v,
			      memory_order_relaxed);
}

static void completion_head(struct raw_client *c, struct bytes *b)
{
	uint32_t v;

	if (take_byte(b) == 0xff)
		v = atomic_load(&c->l->cq.tail);
	else
		take(b, &v, sizeof(v));
	atomic_store(&c->l->cq.head, v);
}

static void action(struct raw_client *c, struct bytes *b)
{
	switch (take_byte(b) % 7) {
	case 0:
		raw_entry(c, b);
		break;
	case 1:
		good_entry(c, b);
		break;
	case 2:
		atomic_store(&c->l->sq.tail, c->sq_tail + take_byte(b));
		break;
	case 3:
		completion_head(c, b);
		break;
	case 4:
		write_word(c->l, sizeof(struct ledger), b);
		break;
	case 5:
		write_word(c->wl, min(c->wl_shm.bytes, (size_t)65536), b);
		break;
	case 6:
		srig_pump(c->rig);
		break;
	}
}

static void begin(struct raw_client *c, uint8_t wish)
{
	struct ring_sqe e = { .op = RING_PUBLISH };
	struct ring_pub pub[7] = { { .frame = 0 } };
	uint32_t frame[7], n = wish & 7, i;

	rc_hello(c);
	rc_attach(c);
	rc_win_open(c, KVMM_RW);
	if (!n)
		return;
	rc_alloc(c, frame, n);
	if (!(wish & 8))
		return;
	for (i = 0; i < n; i++) {
		pub[i].frame = frame[i];
		pub[i].key[0] = (uint8_t)(i + 1);
	}
	e.win = c->win;
	e.space = (uint16_t)c->space;
	e.n = n;
	rc_submit(c, &e, pub, n * sizeof(pub[0]));
	srig_pump(c->rig);
}

static void end_sessions(void)
{
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);
	struct session *ss;

	while ((ss = list_first(&rig.s->sessions, struct session, link))) {
		if (ss->state != SESSION_EXITING)
			session_exited(ss);
		srig_pump(&rig);
		if (deadline_past(deadline)) {
			fprintf(stderr, "a session does not end\n");
			abort();
		}
	}
	if (rig.s->nr_held || rig.s->nr_watch ||
	    rig.s->listener[0].requests) {
		fprintf(stderr, "something is left of a session\n");
		abort();
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct bytes b = { data, size };
	struct raw_client c;
	struct errmsg e;
	unsigned int i;

	if (!size)
		return 0;
	if (rc_connect(&rig, 0, &c))
		abort();
	begin(&c, take_byte(&b));
	for (i = 0; i < MAX_ACTIONS && b.n; i++)
		action(&c, &b);
	srig_pump(&rig);
	rc_close(&c);
	srig_pump(&rig);
	end_sessions();
	if (!(++nr_runs % CHECK_EVERY) && mm_check(rig.s->mm, &e)) {
		fprintf(stderr, "%s\n", e.text);
		abort();
	}
	return 0;
}
