/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd and who keeps its descriptors: the keeper starts it again, a re-exec
 * replaces it, unclean ends are counted, and what was parked is what is found.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/admin.h"
#include "tests/lib/daemon.h"
#include "tests/lib/fixture.h"
#include "tests/lib/proc.h"
#include "tests/lib/unit.h"

#define WAIT_MS	10000

/**
 * struct kept - a daemon that is not ours, but its keeper's
 * @td:		folder, configuration, sockets; its process is not used
 * @keeper:	`kvmmd --keep`
 */
static struct kept {
	struct test_daemon td;
	pid_t		keeper;
} k;

static int setup(void **state)
{
	memset(&k, 0, sizeof(k));
	return td_init(&k.td, &(struct td_opts){
		.dram_bytes	= 16u << 20,
		.config		= "{\"timeouts\": {\"crash_window\": \"10min\"}}",
	});
}

/* Ends the keeper first, or it would start the daemon again. */
static int teardown(void **state)
{
	json_t *r = NULL;
	pid_t pid = 0;

	if (!td_admin(&k.td, "status", &r))
		pid = (pid_t)json_integer_value(json_object_get(r, "pid"));
	json_decref(r);
	if (k.keeper > 0) {
		kill(k.keeper, SIGKILL);
		waitpid(k.keeper, NULL, 0);
	}
	if (pid > 1 && pid != k.td.pid)
		kill(pid, SIGKILL);
	td_fini(&k.td);
	return 0;
}

static void keeper_start(const char *const *env)
{
	int fd;

	fflush(NULL);
	k.keeper = fork();
	T_CHECK(k.keeper >= 0);
	if (k.keeper)
		return;
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	fd = open(k.td.log, O_WRONLY | O_CREAT | O_APPEND, 0600);
	dup2(fd, 1);
	dup2(fd, 2);
	unsetenv("NOTIFY_SOCKET");
	unsetenv("LISTEN_FDS");
	for (; env && *env; env++)
		putenv((char *)*env);
	execl(k.td.opts.binary, k.td.opts.binary, "--keep", "--config",
	      k.td.config, (char *)NULL);
	_exit(127);
}

static json_t *status_get(void)
{
	json_t *r = NULL;

	T_WAIT(WAIT_MS, !td_admin(&k.td, "status", &r));
	return r;
}

static long status_int(const char *object, const char *name)
{
	json_t *r = status_get();
	const json_t *o = object ? json_object_get(r, object) : r;
	long v = (long)json_integer_value(json_object_get(o, name));

	json_decref(r);
	return v;
}

/* Is there a note with these words? */
static bool noted(const char *words)
{
	json_t *r = status_get();
	const json_t *n;
	bool found = false;
	size_t i;

	json_array_foreach(json_object_get(r, "notes"), i, n)
		found |= strstr(json_string_value(n), words) != NULL;
	json_decref(r);
	return found;
}

static bool status_is(const char *object, const char *name, const char *value)
{
	json_t *r = status_get();
	const json_t *o = json_object_get(r, object);
	const char *s = json_string_value(json_object_get(o, name));
	bool is = s && !strcmp(s, value);

	json_decref(r);
	return is;
}

/* Another daemon serves; its pid. */
static pid_t wait_other(pid_t old)
{
	pid_t pid = 0;

	T_WAIT(WAIT_MS, (pid = (pid_t)status_int(NULL, "pid")) != old);
	return pid;
}

static int keeper_wait(void)
{
	int status;

	T_WAIT(WAIT_MS, waitpid(k.keeper, &status, WNOHANG) == k.keeper);
	k.keeper = 0;
	return WIFEXITED(status) ? WEXITSTATUS(status)
				 : 128 + WTERMSIG(status);
}

/* A client that is not served yet: it waits in the backlog, or it is refused. */
static int connect_to(const char *path)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	T_CHECK(fd >= 0);
	snprintf(sa.sun_path, sizeof(sa.sun_path), "%.*s",
		 (int)sizeof(sa.sun_path) - 1, path);
	if (connect(fd, (struct sockaddr *)&sa, sizeof(sa))) {
		int err = -errno;

		close(fd);
		return err;
	}
	return fd;
}

/* -- the keeper ------------------------------------------------------------------ */

static void killed_kvmmd_is_started_again(void **state)
{
	pid_t pid;

	keeper_start(NULL);
	T_CHECK(status_is("park", "keeper", "kvmmd --keep"));
	T_CHECK(status_int("park", "parked") >= 1);
	T_EQ(status_int("park", "waiting"), 0);
	T_EQ(status_int("park", "inherited"), 0);
	pid = (pid_t)status_int(NULL, "pid");
	T_CHECK(pid != k.keeper);
	kill(pid, SIGKILL);
	pid = wait_other(pid);
	T_CHECK(status_int("park", "inherited") >= 1);
	T_EQ(status_int("start", "unclean"), 1);
	T_CHECK(noted("without order (signal 9)"));
	kill(k.keeper, SIGTERM);
	T_EQ(keeper_wait(), 0);
	T_CHECK(kill(pid, 0) < 0 && errno == ESRCH);
}

/* The listening socket is one and the same, so who connects meanwhile waits. */
static void clients_wait_while_nobody_serves(void **state)
{
	pid_t pid;
	int fd;

	keeper_start(NULL);
	pid = (pid_t)status_int(NULL, "pid");
	kill(pid, SIGKILL);
	T_WAIT(WAIT_MS, kill(pid, 0) < 0);
	fd = connect_to(k.td.socket);
	T_OK(fd);
	wait_other(pid);
	T_CHECK(status_int("park", "taken") >= 1);
	T_WAIT(WAIT_MS, status_int("clients", "greeting") == 1);
	close(fd);
}

/* Names may be long, and differ in the end alone. */
static void each_socket_is_found_again(void **state)
{
	static char name[2][64], path[2][TD_MAX_PATH * 2];
	struct td_opts o = k.td.opts;
	unsigned int i;
	pid_t pid;
	int fd[2];

	td_fini(&k.td);
	for (i = 0; i < 2; i++) {
		snprintf(name[i], sizeof(name[i]), "%052u%u.sock", 0, i);
		o.socket[i].name = name[i];
	}
	T_OK(td_init(&k.td, &o));
	keeper_start(NULL);
	pid = (pid_t)status_int(NULL, "pid");
	kill(pid, SIGKILL);
	T_WAIT(WAIT_MS, kill(pid, 0) < 0);
	for (i = 0; i < 2; i++) {
		snprintf(path[i], sizeof(path[i]), "%s/%s", k.td.dir, name[i]);
		fd[i] = connect_to(path[i]);
		T_OK(fd[i]);
	}
	wait_other(pid);
	T_WAIT(WAIT_MS, status_int("clients", "greeting") == 2);
	close(fd[0]);
	close(fd[1]);
}

static void orderly_stop_ends_the_keeper_and_is_not_counted(void **state)
{
	pid_t pid;

	keeper_start(NULL);
	pid = (pid_t)status_int(NULL, "pid");
	kill(pid, SIGTERM);
	T_EQ(keeper_wait(), 0);
	keeper_start(NULL);
	T_EQ(status_int("start", "unclean"), 0);
	T_EQ(status_int("park", "inherited"), 0);
	kill(k.keeper, SIGTERM);
	T_EQ(keeper_wait(), 0);
}

/* In its tracks: it feeds no watchdog, and hears no signal but one. */
static void hung_kvmmd_is_started_again(void **state)
{
	static const char *const env[] = { "WATCHDOG_USEC=3000000", NULL };
	pid_t pid;

	keeper_start(env);
	pid = (pid_t)status_int(NULL, "pid");
	usleep(2000 * 1000);
	T_EQ(status_int(NULL, "pid"), pid);	/* it is fed */
	T_OK(kill(pid, SIGSTOP));
	T_WAIT(WAIT_MS, kill(pid, 0) < 0 && errno == ESRCH);
	wait_other(pid);
	T_EQ(status_int("start", "unclean"), 1);
	T_CHECK(noted("without order (watchdog)"));
	T_CHECK(status_int("park", "inherited") >= 1);
	kill(k.keeper, SIGTERM);
	T_EQ(keeper_wait(), 0);
}

static void kvmmd_outlives_its_keeper_and_says_so(void **state)
{
	pid_t pid;

	keeper_start(NULL);
	pid = (pid_t)status_int(NULL, "pid");
	T_CHECK(!noted("the keeper is gone"));
	kill(k.keeper, SIGKILL);
	keeper_wait();
	T_WAIT(WAIT_MS, noted("the keeper is gone"));
	T_CHECK(status_is("park", "keeper", "nobody"));
	kill(pid, SIGTERM);
	T_WAIT(WAIT_MS, kill(pid, 0) < 0);
}

/* -- the ladder ------------------------------------------------------------------- */

static void crashes_climb_the_ladder(void **state)
{
	static const char *const step[] = { "adopt", "plain", "empty", "bypass" };
	unsigned int i;

	T_OK(td_start(&k.td));
	T_CHECK(noted("nothing is parked: a restart starts empty"));
	for (i = 0; i < 4; i++) {
		td_kill(&k.td);
		T_OK(td_start(&k.td));
		T_CHECK(status_is("start", "step", step[i]));
		T_EQ(status_int("start", "unclean"), i + 1);
	}
	/* it serves, takes no part, and says why */
	{
		json_t *r = status_get();
		const json_t *s = json_array_get(json_object_get(r, "sockets"), 0);

		T_CHECK(!strcmp(json_string_value(json_object_get(s, "mode")),
				"bypass"));
		T_CHECK(strstr(json_string_value(json_object_get(r, "sentence")),
			       "bypass"));
		json_decref(r);
	}
	T_EQ(td_stop(&k.td), 0);
	T_OK(td_start(&k.td));
	T_CHECK(status_is("start", "step", "adopt"));
	T_EQ(status_int("start", "unclean"), 0);
}

/* The configuration that served is in force when today's crashes. */
static void confirmed_configuration_is_used_after_two_crashes(void **state)
{
	char path[TD_MAX_PATH + 32], text[4096] = "";
	const char *what = "\"max_clients\": 77";
	json_t *c, *r;
	FILE *f;

	c = json_load_file(k.td.config, 0, NULL);
	T_CHECK(c);
	json_object_set_new(c, "limits", json_pack("{s:i}", "max_clients", 77));
	snprintf(path, sizeof(path), "%s/confirmed.json", k.td.dir);
	T_EQ(json_dump_file(c, path, 0), 0);
	json_decref(c);
	f = fopen(path, "r");
	T_CHECK(f && fread(text, 1, sizeof(text) - 1, f) > 0);
	fclose(f);
	T_CHECK(strstr(text, what));

	T_OK(td_start(&k.td));
	td_kill(&k.td);
	T_OK(td_start(&k.td));
	T_CHECK(status_int("clients", "max") != 77);
	td_kill(&k.td);
	T_OK(td_start(&k.td));
	T_EQ(status_int("clients", "max"), 77);
	r = status_get();
	T_CHECK(strstr(json_string_value(json_object_get(r, "config")),
		       "confirmed.json"));
	json_decref(r);
}

static void word_of_an_oom_kill_is_heard(void **state)
{
	char cmd[TD_MAX_PATH * 3];

	T_OK(td_start(&k.td));
	td_kill(&k.td);
	snprintf(cmd, sizeof(cmd), "SERVICE_RESULT=oom-kill %s --ended "
		 "--config %s", k.td.opts.binary, k.td.config);
	T_EQ(system(cmd), 0);
	T_OK(td_start(&k.td));
	T_EQ(status_int("start", "adopt_pct"), 50);
	T_CHECK(noted("oom-kill"));
}

/* -- re-exec ----------------------------------------------------------------------- */

static char *started(void)
{
	json_t *r = NULL;
	char *s;

	T_WAIT(WAIT_MS, !td_admin(&k.td, "ping", &r));
	s = strdup(json_string_value(json_object_get(r, "started")));
	json_decref(r);
	return s;
}

static bool started_is(const char *was)
{
	char *s = started();
	bool same = !strcmp(s, was);

	free(s);
	return same;
}

/* In place: the same process, with the sockets that it had. */
static void reexec_in_place(void)
{
	pid_t pid = (pid_t)status_int(NULL, "pid");
	char *was = started();
	json_t *r = NULL;
	int fd;

	T_OK(td_admin(&k.td, "reexec", &r));
	json_decref(r);
	T_WAIT(WAIT_MS, !started_is(was));
	T_EQ(status_int(NULL, "pid"), pid);
	T_EQ(status_int("start", "unclean"), 0);
	T_CHECK(status_int("park", "taken") >= 1);
	fd = connect_to(k.td.socket);
	T_OK(fd);
	close(fd);
	T_WAIT(WAIT_MS, !status_int("clients", "greeting"));
	free(was);
}

static void reexec_keeps_the_process_and_its_sockets(void **state)
{
	unsigned int i;
	long fds;

	T_OK(td_start(&k.td));
	reexec_in_place();
	fds = status_int("limits", "fds");
	for (i = 0; i < 3; i++)
		reexec_in_place();
	/* nothing is left open by the way; a worker may have something in hand */
	T_WAIT(WAIT_MS, status_int("limits", "fds") <= fds);
	T_EQ(td_stop(&k.td), 0);
}

static void reexec_under_the_keeper_keeps_what_it_keeps(void **state)
{
	pid_t pid;

	keeper_start(NULL);
	reexec_in_place();
	T_CHECK(status_is("park", "keeper", "kvmmd --keep"));
	pid = (pid_t)status_int(NULL, "pid");
	kill(pid, SIGKILL);
	wait_other(pid);
	T_CHECK(status_int("park", "inherited") >= 1);
	kill(k.keeper, SIGTERM);
	T_EQ(keeper_wait(), 0);
}

/* The program is gone: it serves on, and says why. */
static void reexec_that_cannot_be_is_refused(void **state)
{
	char copy[TD_MAX_PATH + 16], cmd[TD_MAX_PATH * 3];
	const char *binary = k.td.opts.binary;
	char *was;
	json_t *r = NULL;

	snprintf(copy, sizeof(copy), "%s/copy", k.td.dir);
	snprintf(cmd, sizeof(cmd), "cp %s %s", binary, copy);
	T_EQ(system(cmd), 0);
	k.td.opts.binary = copy;
	T_OK(td_start(&k.td));
	was = started();
	T_EQ(unlink(copy), 0);
	T_OK(td_admin(&k.td, "reexec", &r));
	json_decref(r);
	T_WAIT(WAIT_MS, noted("the last re-exec was not done"));
	T_CHECK(started_is(was));
	free(was);
	T_EQ(td_stop(&k.td), 0);
	k.td.opts.binary = binary;
	/* and was no crash */
	T_OK(td_start(&k.td));
	T_EQ(status_int("start", "unclean"), 0);
}

/* What is installed does not answer: nobody waits for it but the administrator. */
static void reexec_of_what_hangs_is_given_up(void **state)
{
	char copy[TD_MAX_PATH + 16], cmd[TD_MAX_PATH * 3];
	const char *binary = k.td.opts.binary;
	char *was;
	FILE *f;

	snprintf(copy, sizeof(copy), "%s/copy", k.td.dir);
	snprintf(cmd, sizeof(cmd), "cp %s %s", binary, copy);
	T_EQ(system(cmd), 0);
	k.td.opts.binary = copy;
	T_OK(td_start(&k.td));
	was = started();
	T_EQ(unlink(copy), 0);
	f = fopen(copy, "w");
	T_CHECK(f);
	fputs("#!/bin/sh\nexec sleep 60\n", f);
	fclose(f);
	T_EQ(chmod(copy, 0700), 0);
	json_decref(ta_request(&k.td, "{\"cmd\": \"reexec\"}"));
	usleep(500 * 1000);
	T_CHECK(!noted("the last re-exec was not done"));
	T_WAIT(WAIT_MS, noted("its --check does not answer"));
	T_CHECK(started_is(was));
	free(was);
	T_EQ(td_stop(&k.td), 0);
	k.td.opts.binary = binary;
}

/* One letter in a file does not cost the memory of all. */
static void reexec_with_a_bad_configuration_is_refused(void **state)
{
	char *was;
	FILE *f;

	T_OK(td_start(&k.td));
	was = started();
	f = fopen(k.td.config, "w");
	T_CHECK(f);
	fputs("{\"sockets\": 1", f);
	fclose(f);
	json_decref(ta_request(&k.td, "{\"cmd\": \"reexec\"}"));
	T_WAIT(WAIT_MS, noted("the last re-exec was not done"));
	T_CHECK(noted("it would not start"));
	T_CHECK(started_is(was));
	/* it is well-formed now, and the policy is not there */
	k.td.opts.policy = "/nonexistent/policy.so";
	T_OK(td_configure(&k.td));
	json_decref(ta_request(&k.td, "{\"cmd\": \"reexec\"}"));
	T_WAIT(WAIT_MS, noted("/nonexistent/policy.so"));
	T_CHECK(started_is(was));
	free(was);
	k.td.opts.policy = NULL;
	T_OK(td_configure(&k.td));
	reexec_in_place();
	T_EQ(td_stop(&k.td), 0);
}

static bool writes_wait(struct test_daemon *d)
{
	return ta_node(d, "nvme0", "write.inflight") > 0;
}

/*
 * While the disk may still write from memory that the next one would use, it is
 * not replaced, however long that takes; afterwards it is. The client meets a
 * gap and goes on.
 */
static void reexec_waits_for_io_and_gives_up_in_time(void **state)
{
	struct test_daemon *d = &k.td;
	struct tc c = { .k = NULL };
	char *was;
	unsigned int i;

	td_fini(d);
	T_OK(td_init(d, &(struct td_opts){
		.dram_bytes	= 16 * MIB,
		.nvme_bytes	= 64 * MIB,
		.engine		= "threads",
		.io_timeout	= "20s",
		.config		= "{\"timeouts\": {\"direct_reclaim\": \"200ms\"}}",
	}));
	T_OK(td_start(d));
	fx_online(d);
	tc_open(&c, d->socket, NULL);
	ta_fault(d, "nvme0:write:stall:ms=7000:n=1");
	for (i = 0; i < 64 && !writes_wait(d); i++)
		tc_put(&c, i, 0, 16);
	T_WAIT(WAIT_MS, writes_wait(d));

	was = started();
	json_decref(ta_request(d, "{\"cmd\": \"reexec\"}"));
	T_WAIT(WAIT_MS, noted("I/O of node nvme0 is still under way"));
	T_CHECK(started_is(was));
	T_EQ(tc_put(&c, 1000, 0, 4), 4);
	T_WAIT(WAIT_MS, !writes_wait(d));
	free(was);
	reexec_in_place();
	tc_close(&c);
	T_EQ(td_stop(d), 0);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(killed_kvmmd_is_started_again),
		T(clients_wait_while_nobody_serves),
		T(each_socket_is_found_again),
		T(orderly_stop_ends_the_keeper_and_is_not_counted),
		T(hung_kvmmd_is_started_again),
		T(kvmmd_outlives_its_keeper_and_says_so),
		T(crashes_climb_the_ladder),
		T(confirmed_configuration_is_used_after_two_crashes),
		T(word_of_an_oom_kill_is_heard),
		T(reexec_keeps_the_process_and_its_sockets),
		T(reexec_under_the_keeper_keeps_what_it_keeps),
		T(reexec_that_cannot_be_is_refused),
		T(reexec_of_what_hangs_is_given_up),
		T(reexec_with_a_bad_configuration_is_refused),
		T(reexec_waits_for_io_and_gives_up_in_time),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
