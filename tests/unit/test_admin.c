/* SPDX-License-Identifier: Apache-2.0 */
/* The administration socket: the protocol, its bounds, and each command. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <jansson.h>
#include <kvmm/admin.h>

#include "daemon/server/admin_json.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

static struct server_rig rig;

static int setup(void **state)
{
	return srig_open(&rig, NULL);
}

static int teardown(void **state)
{
	srig_close(&rig);
	return 0;
}

static int admin_connect(void)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", rig.cfg.admin_socket);
	if (connect(fd, (void *)&sa, sizeof(sa)) < 0)
		fail_msg("connect: %s", strerror(errno));
	return fd;
}

static void put(int fd, const char *text, size_t len)
{
	while (len) {
		ssize_t n = send(fd, text, len, MSG_NOSIGNAL);

		if (n < 0 && errno == EAGAIN) {
			srig_pump(&rig);
			continue;
		}
		assert_true(n > 0);
		text += n;
		len -= (size_t)n;
	}
}

/* One line, or NULL when the daemon hung up. */
static json_t *get(int fd)
{
	static char buf[1 << 20];
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);
	size_t len = 0;
	json_t *o;

	while (len < sizeof(buf)) {
		ssize_t n = recv(fd, buf + len, 1, 0);

		if (n < 0 && errno == EAGAIN) {
			if (deadline_past(deadline))
				fail_msg("no reply");
			srig_pump(&rig);
			continue;
		}
		if (n <= 0)
			return NULL;
		if (buf[len++] == '\n')
			break;
	}
	o = json_loadb(buf, len, 0, NULL);
	if (!o)
		fail_msg("not JSON: %.*s", (int)len, buf);
	return o;
}

static json_t *ask(int fd, const char *line)
{
	put(fd, line, strlen(line));
	return get(fd);
}

static void expect_refusal(int fd, const char *line, int err, const char *text)
{
	json_t *r = ask(fd, line);
	const char *sentence = json_string_value(json_object_get(r, "error"));

	assert_true(json_is_false(json_object_get(r, "ok")));
	assert_int_equal(json_integer_value(json_object_get(r, "errno")), err);
	if (!sentence || !strstr(sentence, text))
		fail_msg("\"%s\" does not say \"%s\"", sentence, text);
	json_decref(r);
}

static json_t *execute(const char *line)
{
	json_t *req = json_loads(line, 0, NULL), *r;

	assert_non_null(req);
	r = admin_execute(rig.s, req);
	json_decref(req);
	return r;
}

/* -- the protocol ---------------------------------------------------------------- */

static void requests_are_answered_in_order(void **state)
{
	int fd = admin_connect();
	json_t *r;

	put(fd, "{\"cmd\":\"ping\"}\n{\"cmd\":\"pins\"}\n{\"cmd\":\"nope\"}\n", 46);
	r = get(fd);
	assert_non_null(json_object_get(r, "version"));
	json_decref(r);
	r = get(fd);
	assert_true(json_is_array(json_object_get(r, "pins")));
	json_decref(r);
	r = get(fd);
	assert_true(json_is_false(json_object_get(r, "ok")));
	json_decref(r);
	close(fd);
}

static void a_request_may_come_byte_by_byte(void **state)
{
	const char *line = "{\"cmd\": \"ping\"}\n";
	int fd = admin_connect();
	json_t *r;

	for (; line[1]; line++) {
		put(fd, line, 1);
		srig_pump(&rig);
	}
	r = ask(fd, line);
	assert_true(json_is_true(json_object_get(r, "ok")));
	json_decref(r);
	close(fd);
}

static void what_is_no_request_is_refused_with_a_sentence(void **state)
{
	int fd = admin_connect();

	expect_refusal(fd, "hello\n", EINVAL, "not a JSON object");
	expect_refusal(fd, "[]\n", EINVAL, "not a JSON object");
	expect_refusal(fd, "\n", EINVAL, "not a JSON object");
	expect_refusal(fd, "{}\n", EINVAL, "\"cmd\" is missing");
	expect_refusal(fd, "{\"cmd\": 1}\n", EINVAL, "\"cmd\" is missing");
	expect_refusal(fd, "{\"cmd\": \"reboot\"}\n", EOPNOTSUPP, "reboot");
	expect_refusal(fd, "{\"cmd\": \"mode\"}\n", EINVAL, "\"space\"");
	expect_refusal(fd, "{\"cmd\": \"mode\", \"space\": 0, \"mode\": \"off\"}\n",
		       EINVAL, "observe");
	expect_refusal(fd, "{\"cmd\": \"mode\", \"space\": 0, \"mode\": \"on\"}\n",
		       ENOENT, "no space");
	expect_refusal(fd, "{\"cmd\": \"space\", \"space\": \"zzzz\"}\n", ENOENT,
		       "no space");
	close(fd);
}

static void a_request_that_does_not_end_is_refused(void **state)
{
	static char long_line[KVMM_ADMIN_MAX_REQUEST];
	int fd = admin_connect();
	json_t *r;

	memset(long_line, 'x', sizeof(long_line));
	put(fd, long_line, sizeof(long_line));
	r = get(fd);
	assert_int_equal(json_integer_value(json_object_get(r, "errno")),
			 EMSGSIZE);
	json_decref(r);
	assert_null(get(fd));
	close(fd);
}

static void half_a_request_has_a_deadline(void **state)
{
	int fd = admin_connect();

	put(fd, "{\"cmd\"", 6);
	srig_pump(&rig);
	admin_run(rig.s->admin, now_ns() + 6 * NSEC_PER_SEC);
	assert_null(get(fd));
	close(fd);
}

static void a_peer_that_stops_sending_still_gets_its_reply(void **state)
{
	int fd = admin_connect();
	json_t *r;

	put(fd, "{\"cmd\": \"status\"}\n", 18);
	shutdown(fd, SHUT_WR);
	r = get(fd);
	assert_true(json_is_true(json_object_get(r, "ok")));
	json_decref(r);
	assert_null(get(fd));
	close(fd);
}

/* Others are served while one does not take its replies. */
static void a_slow_reader_holds_up_nobody(void **state)
{
	int slow = admin_connect(), fd = admin_connect(), i;
	json_t *r;

	for (i = 0; i < 2000; i++) {
		if (send(slow, "{\"cmd\":\"status\"}\n", 17, MSG_NOSIGNAL) < 0)
			break;
		srig_pump(&rig);
	}
	r = ask(fd, "{\"cmd\": \"ping\"}\n");
	assert_true(json_is_true(json_object_get(r, "ok")));
	json_decref(r);
	admin_run(rig.s->admin, now_ns() + 31 * NSEC_PER_SEC);
	close(slow);
	close(fd);
}

static void too_many_connections_are_told_so(void **state)
{
	int fd[17], i, before = fd_count();
	json_t *r;

	for (i = 0; i < 17; i++) {
		fd[i] = admin_connect();
		srig_pump(&rig);
	}
	r = get(fd[16]);
	assert_int_equal(json_integer_value(json_object_get(r, "errno")),
			 EUSERS);
	json_decref(r);
	for (i = 0; i < 17; i++)
		close(fd[i]);
	srig_pump(&rig);
	srig_pump(&rig);
	assert_int_equal(fd_count(), before);
}

static void nobody_else_can_open_the_socket(void **state)
{
	struct stat st;

	assert_int_equal(stat(rig.cfg.admin_socket, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0600);
}

/* -- commands -------------------------------------------------------------------- */

static void status_says_everything(void **state)
{
	static const char *const has[] = {
		"version", "abi", "pid", "epoch", "uptime_ms", "state",
		"sentence", "nodes", "sockets", "clients", "spaces", "rings",
		"rejects", "memory", "limits", "notes",
	};
	json_t *r = execute("{\"cmd\": \"status\"}"), *n;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(has); i++)
		if (!json_object_get(r, has[i]))
			fail_msg("status lacks \"%s\"", has[i]);
	n = json_array_get(json_object_get(r, "nodes"), 0);
	assert_string_equal(json_string_value(json_object_get(n, "name")),
			    "dram0");
	assert_string_equal(json_string_value(json_object_get(n, "state")),
			    "online");
	assert_non_null(json_object_get(json_object_get(n, "counters"),
					"pgpublish"));
	assert_non_null(json_object_get(json_object_get(n, "frames"), "open"));
	assert_int_equal(json_array_size(json_object_get(r, "sockets")), 2);
	json_decref(r);
}

static void lists_name_who_is_there(void **state)
{
	struct raw_client c;
	uint32_t frames[3];
	json_t *r, *o;

	assert_int_equal(rc_connect(&rig, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	rc_alloc(&c, frames, 3);

	r = execute("{\"cmd\": \"client\"}");
	o = json_array_get(json_object_get(r, "clients"), 0);
	assert_int_equal(json_integer_value(json_object_get(o, "pid")),
			 getpid());
	assert_string_equal(json_string_value(json_object_get(o, "tenant")),
			    "demo");
	assert_true(json_integer_value(json_object_get(o, "open_frames")) >= 3);
	json_decref(r);

	r = execute("{\"cmd\": \"space\"}");
	o = json_array_get(json_object_get(r, "spaces"), 0);
	assert_string_equal(json_string_value(json_object_get(o, "model")),
			    "model");
	assert_int_equal(json_integer_value(json_object_get(o, "clients")), 1);
	json_decref(r);
	rc_close(&c);
}

/* A ledger is sparse: to read what was never written would make it exist. */
static void looking_for_pins_makes_no_memory(void **state)
{
	struct stat before, after;
	struct raw_client c;
	uint32_t frame;

	assert_int_equal(rc_connect(&rig, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	rc_alloc(&c, &frame, 1);
	assert_int_equal(fstat(c.wl_shm.fd, &before), 0);
	json_decref(execute("{\"cmd\": \"pins\"}"));
	json_decref(execute("{\"cmd\": \"client\"}"));
	assert_int_equal(fstat(c.wl_shm.fd, &after), 0);
	assert_int_equal(after.st_blocks, before.st_blocks);
	rc_close(&c);
}

static void one_pin(const struct mm_pin_info *pi, void *arg)
{
	*(struct mm_pin_info *)arg = *pi;
}

/* Pins are shown with who and since when, from the client's request slots. */
static void pins_are_shown_with_their_age(void **state)
{
	struct ring_result res[1];
	struct ledger_req *rq;
	struct ring_cqe cqe;
	struct raw_client c;
	struct ring_pub pub = { .key = { 1 } };
	struct ring_sqe e = { .op = RING_PUBLISH, .n = 1 };
	struct mm_pin_info pi = { .pins = 9 };
	json_t *r, *o;

	assert_int_equal(rc_connect(&rig, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	rc_alloc(&c, &pub.frame, 1);
	e.win = c.win;
	e.space = (uint16_t)c.space;
	rc_submit(&c, &e, &pub, sizeof(pub));
	rc_complete(&c, &cqe, res, 1);
	assert_int_equal(res[0].result, 0);
	atomic_store(&window_pins(c.wl)[res[0].frame], 2);
	mm_for_each_pin(rig.s->mm, 1, one_pin, &pi);
	assert_true(pi.partial);
	assert_int_equal(pi.pins, 0);
	mm_for_each_pin(rig.s->mm, 1u << 20, one_pin, &pi);
	assert_false(pi.partial);
	assert_int_equal(pi.pins, 2);
	rq = (void *)((char *)c.l + c.l->req_off);
	atomic_store(&rq->id, 4711);
	atomic_store(&rq->start_ns, now_ns() - 700 * NSEC_PER_SEC);
	atomic_store(&rq->space, c.space);
	atomic_store(&rq->nr_pins, 2);
	atomic_store(&rq->state, 1);
	rc_advance(&c);

	r = execute("{\"cmd\": \"pins\"}");
	o = json_array_get(json_object_get(r, "pins"), 0);
	assert_int_equal(json_integer_value(json_object_get(o, "pins")), 2);
	assert_int_equal(json_integer_value(json_object_get(o, "frames")), 1);
	assert_int_equal(json_integer_value(json_object_get(o, "requests")), 1);
	assert_int_equal(json_integer_value(json_object_get(o,
						"oldest_request")), 4711);
	assert_true(json_is_true(json_object_get(o, "old")));
	json_decref(r);

	r = execute("{\"cmd\": \"dump\"}");
	o = json_array_get(json_object_get(r, "pages"), 0);
	o = json_array_get(json_object_get(o, "copies"), 0);
	assert_string_equal(json_string_value(json_object_get(o, "state")),
			    "ready");
	assert_int_equal(json_integer_value(json_object_get(o, "frame")),
			 res[0].frame);
	assert_int_equal(json_integer_value(json_object_get(o, "pins")), 2);
	json_decref(r);
	rc_close(&c);
}

#define NR_DUMPED	20

static const char *text_at(json_t *o, const char *key)
{
	return json_string_value(json_object_get(o, key));
}

/* Count what an answer shows that was not shown before. */
static unsigned int new_pages(json_t *r, bool seen[NR_DUMPED])
{
	unsigned int n = 0;
	json_t *page;
	size_t i;

	assert_true(json_is_true(json_object_get(r, "ok")));
	json_array_foreach(json_object_get(r, "pages"), i, page) {
		unsigned int no;

		/* the first byte of the key */
		assert_int_equal(sscanf(text_at(page, "key"), "%2x", &no), 1);
		assert_true(no >= 1 && no <= NR_DUMPED && !seen[no - 1]);
		seen[no - 1] = true;
		n++;
	}
	return n;
}

static void publish_roots(struct raw_client *c)
{
	struct ring_result res[NR_DUMPED];
	struct ring_pub pub[NR_DUMPED] = { 0 };
	struct ring_sqe e = { .op = RING_PUBLISH, .n = NR_DUMPED };
	uint32_t frame[NR_DUMPED];
	struct ring_cqe cqe;
	unsigned int i;

	rc_alloc(c, frame, NR_DUMPED);
	for (i = 0; i < NR_DUMPED; i++) {
		pub[i].key[0] = (uint8_t)(i + 1);
		pub[i].frame = frame[i];
		pub[i].flags = KVMM_PUB_ROOT;
	}
	e.win = c->win;
	e.space = (uint16_t)c->space;
	rc_submit(c, &e, pub, sizeof(pub));
	rc_complete(c, &cqe, res, NR_DUMPED);
	for (i = 0; i < NR_DUMPED; i++)
		assert_int_equal(res[i].result, 0);
}

/* A big cache is dumped in pieces, so that nobody waits for all of it. */
static void a_dump_comes_in_pieces(void **state)
{
	bool seen[NR_DUMPED] = { false };
	unsigned int n, sum = 0, pieces = 0;
	struct raw_client c;
	char req[160], from[80] = "";
	json_t *r;

	assert_int_equal(rc_connect(&rig, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	publish_roots(&c);
	do {
		snprintf(req, sizeof(req), "{\"cmd\": \"dump\", \"max\": 3%s}",
			 from);
		r = execute(req);
		n = new_pages(r, seen);
		assert_true(n <= 3 + 8);	/* and what hangs at one place */
		sum += n;
		pieces++;
		from[0] = '\0';
		if (text_at(r, "next"))
			snprintf(from, sizeof(from), ", \"from\": \"%s\"",
				 text_at(r, "next"));
		json_decref(r);
	} while (from[0]);
	assert_int_equal(sum, NR_DUMPED);
	assert_true(pieces > 1);
	/* a place in a table that is no more */
	r = execute("{\"cmd\": \"dump\", \"from\": \"0:3:1\"}");
	assert_int_equal(json_integer_value(json_object_get(r, "errno")),
			 ESTALE);
	json_decref(r);
	r = execute("{\"cmd\": \"dump\", \"from\": \"here\"}");
	assert_int_equal(json_integer_value(json_object_get(r, "errno")),
			 EINVAL);
	json_decref(r);
	r = execute("{\"cmd\": \"dump\", \"max\": 0}");
	assert_non_null(strstr(text_at(r, "error"), "1 to 20000"));
	json_decref(r);
	rc_close(&c);
}

/* Nobody is served while it runs, so it says how long that would be. */
static void a_check_that_would_take_too_long_is_refused(void **state)
{
	struct raw_client c;
	json_t *r;

	assert_int_equal(rc_connect(&rig, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	r = execute("{\"cmd\": \"check\"}");
	assert_true(json_is_true(json_object_get(r, "ok")));
	assert_true(json_integer_value(json_object_get(r, "estimate_ms")) > 0);
	json_decref(r);
	r = execute("{\"cmd\": \"check\", \"max_ms\": 0}");
	assert_int_equal(json_integer_value(json_object_get(r, "errno")), EBUSY);
	assert_non_null(strstr(text_at(r, "error"), "nobody would be served"));
	json_decref(r);
	r = execute("{\"cmd\": \"check\", \"max_ms\": \"1s\"}");
	assert_int_equal(json_integer_value(json_object_get(r, "errno")),
			 EINVAL);
	json_decref(r);
	rc_close(&c);
}

static void mode_reaches_the_shared_header(void **state)
{
	const struct kvmm_hdr *hdr;
	struct raw_client c;
	char line[128];
	json_t *r;

	assert_int_equal(rc_connect(&rig, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	hdr = c.hdr.addr;
	assert_int_equal(atomic_load(&hdr->space[c.space].mode),
			 KVMM_MODE_ON);
	r = execute("{\"cmd\": \"mode\", \"space\": \"all\", \"mode\": \"bypass\"}");
	assert_int_equal(json_array_size(json_object_get(r, "spaces")), 1);
	json_decref(r);
	assert_int_equal(atomic_load(&hdr->space[c.space].mode),
			 KVMM_MODE_BYPASS);
	snprintf(line, sizeof(line), "{\"cmd\": \"mode\", \"space\": %u, "
		 "\"mode\": \"readonly\"}", c.space);
	json_decref(execute(line));
	assert_int_equal(atomic_load(&hdr->space[c.space].mode),
			 KVMM_MODE_READONLY);
	rc_close(&c);
}

static void check_passes_and_faults_can_be_set(void **state)
{
	json_t *r = execute("{\"cmd\": \"check\"}");

	assert_true(json_is_true(json_object_get(r, "ok")));
	json_decref(r);
	r = execute("{\"cmd\": \"fault\", \"node\": \"dram0\", "
		    "\"spec\": \"get:enomem:n=1\"}");
	assert_true(json_is_true(json_object_get(r, "ok")));
	json_decref(r);
	r = execute("{\"cmd\": \"fault\", \"spec\": \"nonsense\"}");
	assert_true(json_is_false(json_object_get(r, "ok")));
	json_decref(r);
	r = execute("{\"cmd\": \"fault\", \"spec\": \"\"}");
	assert_true(json_is_true(json_object_get(r, "ok")));
	json_decref(r);
}

#define TEST(f)	cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(requests_are_answered_in_order),
		TEST(a_request_may_come_byte_by_byte),
		TEST(what_is_no_request_is_refused_with_a_sentence),
		TEST(a_request_that_does_not_end_is_refused),
		TEST(half_a_request_has_a_deadline),
		TEST(a_peer_that_stops_sending_still_gets_its_reply),
		TEST(a_slow_reader_holds_up_nobody),
		TEST(too_many_connections_are_told_so),
		TEST(nobody_else_can_open_the_socket),
		TEST(status_says_everything),
		TEST(lists_name_who_is_there),
		TEST(looking_for_pins_makes_no_memory),
		TEST(pins_are_shown_with_their_age),
		TEST(a_dump_comes_in_pieces),
		TEST(a_check_that_would_take_too_long_is_refused),
		TEST(mode_reaches_the_shared_header),
		TEST(check_passes_and_faults_can_be_set),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
