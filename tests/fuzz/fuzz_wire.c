/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client that sends any messages.
 *
 * Input: a byte of wishes (1: no hello, 2: the read-only socket, 4: attach
 * first, 8: open a window first), then messages: a byte of control (low 3 bits:
 * descriptors that go along; 8: raw bytes without a proper header; 16: let the
 * daemon run), a byte of type, two bytes of length, payload.
 *
 * Whatever was sent: the daemon goes on, forgets the client when its process is
 * gone, has as many descriptors as before, and its books balance.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

#define CHECK_EVERY	64

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

static struct server_rig rig;
static unsigned int nr_runs;

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

static void take_all(struct raw_client *c)
{
	while (!sock_recv(c->fd, c->m))
		sock_msg_close_fds(c->m);
}

/* One message out of the input; returns the bytes that it used. */
static size_t message(struct raw_client *c, const uint8_t *data, size_t size)
{
	static _Alignas(16) uint8_t buf[WIRE_MAX_BYTES];
	struct wire_hdr *h = (void *)buf;
	int fds[7];
	size_t len, i, n;

	if (size < 4)
		return size;
	n = data[0] & 7;
	len = data[2] | (size_t)data[3] << 8;
	len = min(len, size - 4);
	for (i = 0; i < n; i++)
		fds[i] = c->rig->s->epfd;
	if (data[0] & 8) {
		send(c->fd, data + 4, len, MSG_DONTWAIT | MSG_NOSIGNAL);
	} else {
		len = min(len, sizeof(buf) - sizeof(*h));
		*h = (struct wire_hdr){
			.type = data[1],
			.len = (uint32_t)(sizeof(*h) + len),
			.seq = 1,
		};
		memcpy(buf + sizeof(*h), data + 4, len);
		sock_send(c->fd, h, fds, (unsigned int)n);
	}
	if (data[0] & 16) {
		srig_pump(c->rig);
		take_all(c);
	}
	return 4 + len;
}

/* The process behind every session is gone: so are they. */
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
}

/* What was sent is closed by threads, four a socket; then it takes no more. */
static void wait_for_closers(void)
{
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

	while (!foreign_room(0) || !foreign_room(1)) {
		if (deadline_past(deadline)) {
			fprintf(stderr, "descriptors are not closed\n");
			abort();
		}
		sched_yield();
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct raw_client c;
	struct errmsg e;
	uint8_t wish;

	if (!size)
		return 0;
	wish = *data++;
	size--;
	if (rc_connect(&rig, !!(wish & 2), &c))
		abort();
	wait_for_closers();
	if (!(wish & 1)) {
		rc_hello(&c);
		if ((wish & 4) && !(wish & 2)) {
			rc_attach(&c);
			if (wish & 8)
				rc_win_open(&c, KVMM_RW);
		}
	}
	while (size) {
		size_t n = message(&c, data, size);

		data += n;
		size -= n;
	}
	srig_pump(&rig);
	take_all(&c);
	rc_close(&c);
	srig_pump(&rig);
	end_sessions();
	if (!(++nr_runs % CHECK_EVERY) && mm_check(rig.s->mm, &e)) {
		fprintf(stderr, "%s\n", e.text);
		abort();
	}
	return 0;
}
