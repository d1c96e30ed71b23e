/* SPDX-License-Identifier: Apache-2.0 */
/* kvmmd as a process: options, signals, log, and what systemd expects of it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>
#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/sock.h"
#include "tests/lib/daemon.h"
#include "tests/lib/unit.h"

#define WAIT_MS		10000

static char out[65536];

/* Run kvmmd with @args, at most 10 s; its output, both kinds, in @out. */
static int run(const char *const args[])
{
	size_t len = 0;
	int p[2], status;
	ssize_t n;
	pid_t pid;

	assert_int_equal(pipe(p), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (!pid) {
		alarm(WAIT_MS / 1000);
		dup2(p[1], 1);
		dup2(p[1], 2);
		close(p[0]);
		execv(getenv("KVMMD") ? getenv("KVMMD") : "build/test/kvmmd",
		      (char *const *)args);
		_exit(127);
	}
	close(p[1]);
	while ((n = read(p[0], out + len, sizeof(out) - len - 1)) > 0)
		len += (size_t)n;
	out[len] = '\0';
	close(p[0]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void says(const char *text)
{
	if (!strstr(out, text))
		fail_msg("\"%s\" does not say \"%s\"", out, text);
}

static void write_file(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");

	assert_non_null(f);
	fputs(text, f);
	fclose(f);
}

/* -- options ------------------------------------------------------------------------- */

static void version_and_defaults_are_printed(void **state)
{
	json_t *o;

	assert_int_equal(run((const char *[]){ "kvmmd", "--version", NULL }), 0);
	says("kvmmd " KVMM_VERSION_STRING);
	assert_int_equal(run((const char *[]){ "kvmmd", "--defaults", NULL }), 0);
	o = json_loads(out, 0, NULL);
	assert_non_null(json_object_get(o, "nodes"));
	json_decref(o);
}

static void a_bad_command_line_is_status_2(void **state)
{
	assert_int_equal(run((const char *[]){ "kvmmd", "--nonsense", NULL }), 2);
	assert_int_equal(run((const char *[]){ "kvmmd", "word", NULL }), 2);
}

static void check_accepts_or_says_where(void **state)
{
	char dir[128], path[160];

	assert_int_equal(td_tmpdir(NULL, "main", dir, sizeof(dir)), 0);
	snprintf(path, sizeof(path), "%s/c.json", dir);
	write_file(path, "{\n\"spin_us\": 20}\n");
	assert_int_equal(run((const char *[]){ "kvmmd", "--check", "--config", path,
					 NULL }), 0);
	says(": ok");
	write_file(path, "{\n\"spin_us\": 2000}\n");
	assert_int_equal(run((const char *[]){ "kvmmd", "--check", "--config", path,
					 NULL }), 78);
	says("c.json:2: spin_us: 2000 is not allowed; 0 to 1000");
	assert_int_equal(run((const char *[]){ "kvmmd", "--config", path, NULL }),
			 78);
	assert_int_equal(run((const char *[]){ "kvmmd", "--check", "--config",
					 "/nonexistent", NULL }), 78);
	says("No such file");
	td_rmtree(dir);
}

static void what_cannot_be_served_is_status_1(void **state)
{
	struct test_daemon d;

	assert_int_equal(td_init(&d, NULL), 0);
	assert_int_equal(td_start(&d), 0);
	/* the same sockets, the same state folder: twice is once too often */
	assert_int_equal(run((const char *[]){ "kvmmd", "--config", d.config, NULL }),
			 1);
	says("another kvmmd serves from it");
	assert_int_equal(td_stop(&d), 0);
	td_fini(&d);
}

/* -- signals ---------------------------------------------------------------------------- */

static void term_and_int_end_it_in_order(void **state)
{
	struct test_daemon d;
	struct stat st;
	int status;

	assert_int_equal(td_init(&d, NULL), 0);
	assert_int_equal(td_start(&d), 0);
	assert_int_equal(td_stop(&d), 0);
	/* its sockets are gone, so that nobody waits at a dead one */
	assert_int_equal(stat(d.socket, &st), -1);
	assert_int_equal(stat(d.admin, &st), -1);
	assert_int_equal(td_start(&d), 0);
	kill(d.pid, SIGINT);
	assert_int_equal(waitpid(d.pid, &status, 0), d.pid);
	d.pid = 0;
	assert_true(WIFEXITED(status) && !WEXITSTATUS(status));
	td_fini(&d);
}

static void hup_changes_nothing(void **state)
{
	struct test_daemon d;

	assert_int_equal(td_init(&d, NULL), 0);
	assert_int_equal(td_start(&d), 0);
	kill(d.pid, SIGHUP);
	assert_int_equal(td_admin(&d, "ping", NULL), 0);
	assert_true(td_running(&d));
	assert_int_equal(td_stop(&d), 0);
	td_fini(&d);
}

/* A killed daemon leaves sockets and a lock behind; the next one copes. */
static void it_starts_again_after_sigkill(void **state)
{
	struct test_daemon d;
	int i;

	assert_int_equal(td_init(&d, NULL), 0);
	for (i = 0; i < 3; i++) {
		assert_int_equal(td_start(&d), 0);
		td_kill(&d);
	}
	td_fini(&d);
}

/* Ready in under a second whatever the size; memory comes with its use. */
static void a_large_node_does_not_delay_the_start(void **state)
{
	struct test_daemon d;
	uint64_t start;

	assert_int_equal(td_init(&d, &(struct td_opts){
		.dram_bytes = UINT64_C(64) << 30 }), 0);
	start = now_ns();
	assert_int_equal(td_start(&d), 0);
	/* generous: the machine may be busy */
	assert_in_range(now_ns() - start, 0, 5 * NSEC_PER_SEC);
	assert_int_equal(td_stop(&d), 0);
	td_fini(&d);
}

/* -- systemd ------------------------------------------------------------------------------ */

/* The manager's end of NOTIFY_SOCKET. */
static int notify_socket(const char *path)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	snprintf(sa.sun_path, sizeof(sa.sun_path), "%.100s", path);
	assert_int_equal(bind(fd, (void *)&sa, sizeof(sa)), 0);
	return fd;
}

/* Until a message has @text; false after 10 s. */
static bool notified(int fd, const char *text)
{
	uint64_t deadline = deadline_in(WAIT_MS * NSEC_PER_MSEC);
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char buf[4096];

	while (poll(&p, 1, deadline_left_ms(deadline)) == 1) {
		ssize_t n = recv(fd, buf, sizeof(buf) - 1, 0);

		if (n < 0)
			return false;
		buf[n] = '\0';
		if (strstr(buf, text))
			return true;
	}
	return false;
}

/**
 * struct managed - a kvmmd started as systemd would
 * @listen_fd:	passed as descriptor 3 with @listen_name; -1: none
 * @log:	read end of its stderr
 */
struct managed {
	struct test_daemon d;
	int		notify, listen_fd, log;
	const char	*listen_name;
	const char	*watchdog_usec;
};

static void managed_child(struct managed *m, int err_fd)
{
	char buf[300];
	struct stat st;

	alarm(60);
	dup2(err_fd, 2);
	if (m->listen_fd >= 0) {
		dup2(m->listen_fd, 3);
		fcntl(3, F_SETFD, 0);
		snprintf(buf, sizeof(buf), "%d", (int)getpid());
		setenv("LISTEN_PID", buf, 1);
		setenv("LISTEN_FDS", "1", 1);
		setenv("LISTEN_FDNAMES", m->listen_name, 1);
	}
	if (m->watchdog_usec) {
		snprintf(buf, sizeof(buf), "%d", (int)getpid());
		setenv("WATCHDOG_PID", buf, 1);
		setenv("WATCHDOG_USEC", m->watchdog_usec, 1);
	}
	fstat(2, &st);
	snprintf(buf, sizeof(buf), "%llu:%llu", (unsigned long long)st.st_dev,
		 (unsigned long long)st.st_ino);
	setenv("JOURNAL_STREAM", buf, 1);
	snprintf(buf, sizeof(buf), "%s/n", m->d.dir);
	setenv("NOTIFY_SOCKET", buf, 1);
	execl(m->d.opts.binary, "kvmmd", "--config", m->d.config, (char *)NULL);
	_exit(127);
}

static void managed_start(struct managed *m)
{
	char path[300];
	int p[2];

	snprintf(path, sizeof(path), "%s/n", m->d.dir);
	m->notify = notify_socket(path);
	assert_int_equal(pipe2(p, O_CLOEXEC), 0);
	m->d.pid = fork();
	assert_true(m->d.pid >= 0);
	if (!m->d.pid)
		managed_child(m, p[1]);
	close(p[1]);
	m->log = p[0];
}

static void managed_end(struct managed *m)
{
	ssize_t n;
	size_t len = 0;

	assert_int_equal(td_stop(&m->d), 0);
	while ((n = read(m->log, out + len, sizeof(out) - len - 1)) > 0)
		len += (size_t)n;
	out[len] = '\0';
	close(m->log);
	close(m->notify);
	td_fini(&m->d);
}

static void the_manager_hears_ready_watchdog_and_stopping(void **state)
{
	struct managed m = { .listen_fd = -1, .watchdog_usec = "300000" };

	assert_int_equal(td_init(&m.d, NULL), 0);
	managed_start(&m);
	assert_true(notified(m.notify, "READY=1"));
	/* ready means that it serves */
	assert_int_equal(td_admin(&m.d, "ping", NULL), 0);
	assert_true(notified(m.notify, "WATCHDOG=1"));
	assert_true(notified(m.notify, "WATCHDOG=1"));
	kill(m.d.pid, SIGTERM);
	assert_true(notified(m.notify, "STOPPING=1"));
	managed_end(&m);
	/* the journal takes priorities as a prefix */
	says("<5>kvmmd " KVMM_VERSION_STRING " serves");
}

/* It has other things to do than to wait for its manager. */
static void manager_that_does_not_read_holds_nobody_up(void **state)
{
	struct managed m = { .listen_fd = -1, .watchdog_usec = "3000" };
	unsigned int i;

	assert_int_equal(td_init(&m.d, NULL), 0);
	managed_start(&m);
	assert_true(notified(m.notify, "READY=1"));
	for (i = 0; i < 20; i++) {
		usleep(100 * 1000);	/* some 100 messages */
		assert_int_equal(td_admin(&m.d, "ping", NULL), 0);
	}
	managed_end(&m);
}

static void status_is_a_sentence(void **state)
{
	struct managed m = { .listen_fd = -1 };

	assert_int_equal(td_init(&m.d, NULL), 0);
	managed_start(&m);
	assert_true(notified(m.notify, "STATUS=serving, 0 clients, dram0"));
	managed_end(&m);
}

static void a_socket_of_the_manager_is_taken_by_name(void **state)
{
	struct managed m = { .listen_name = "kvmm" };
	struct kvmm *k = NULL;
	struct stat st;
	int err, i;

	assert_int_equal(td_init(&m.d, NULL), 0);
	m.listen_fd = sock_listen(m.d.socket, 0600);
	assert_true(m.listen_fd >= 0);
	managed_start(&m);
	close(m.listen_fd);
	assert_true(notified(m.notify, "READY=1"));
	err = kvmm_open(m.d.socket, NULL, &k);
	assert_int_equal(err, 0);
	kvmm_close(k);
	for (i = 0; i < 1; i++)
		assert_int_equal(td_admin(&m.d, "ping", NULL), 0);
	assert_true(td_running(&m.d));
	kill(m.d.pid, SIGTERM);
	assert_true(notified(m.notify, "STOPPING=1"));
	while (td_running(&m.d))
		usleep(1000);
	/* the manager's socket stays for the next one */
	assert_int_equal(stat(m.d.socket, &st), 0);
	close(m.log);
	close(m.notify);
	td_fini(&m.d);
}

static void a_socket_of_another_name_is_left_alone(void **state)
{
	struct managed m = { .listen_name = "other" };
	char path[300];

	assert_int_equal(td_init(&m.d, NULL), 0);
	snprintf(path, sizeof(path), "%s/other.sock", m.d.dir);
	m.listen_fd = sock_listen(path, 0600);
	assert_true(m.listen_fd >= 0);
	managed_start(&m);
	close(m.listen_fd);
	assert_true(notified(m.notify, "READY=1"));
	managed_end(&m);
	says("no socket in the configuration is called \"other\"");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(version_and_defaults_are_printed),
		cmocka_unit_test(a_bad_command_line_is_status_2),
		cmocka_unit_test(check_accepts_or_says_where),
		cmocka_unit_test(what_cannot_be_served_is_status_1),
		cmocka_unit_test(term_and_int_end_it_in_order),
		cmocka_unit_test(hup_changes_nothing),
		cmocka_unit_test(it_starts_again_after_sigkill),
		cmocka_unit_test(a_large_node_does_not_delay_the_start),
		cmocka_unit_test(the_manager_hears_ready_watchdog_and_stopping),
		cmocka_unit_test(manager_that_does_not_read_holds_nobody_up),
		cmocka_unit_test(status_is_a_sentence),
		cmocka_unit_test(a_socket_of_the_manager_is_taken_by_name),
		cmocka_unit_test(a_socket_of_another_name_is_left_alone),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
