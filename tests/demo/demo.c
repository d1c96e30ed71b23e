/* SPDX-License-Identifier: Apache-2.0 */
/*
 * demo - four engines share prefixes through one kvmmd
 *
 * usage: demo [--quick] [--selftest-corrupt] [--data DIR] [--seconds N]
 *
 * Starts kvmmd on a temporary folder with a small DRAM node over an NVMe file
 * eight times as large, then four engines that replay a recorded load, each
 * every fourth request, so that a conversation's next turn lands on another
 * engine than its last. On the way one engine is killed and started again, and
 * kvmmd is stopped for two seconds. Every byte of every page read is checked.
 * At the end a small engine with a real model (tests/engine) generates a text
 * twice, the second time from what the first has published.
 *
 * Exit status: 0 when everything held, 1 when something did not, 2 when it
 * could not run. Leaves nothing behind, also when interrupted.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/demo/demo.h"
#include "tests/lib/daemon.h"

#define DRAM_BYTES	(UINT64_C(128) << 20)
#define QUICK_DRAM	(UINT64_C(64) << 20)
#define QUICK_REQUESTS	300u
#define NVME_TIMES	8		/* the DRAM */
#define VICTIM		1u		/* the engine that gets killed */
#define KILL_AT		0.30		/* share of the requests, or seconds */
#define KILL_AT_S	15.0
#define BACK_AFTER_NS	(300 * NSEC_PER_MSEC)
#define STOP_AT		0.55
#define STOP_AT_S	25.0
#define STOP_NS		(2 * NSEC_PER_SEC)
#define LIMIT_S		60		/* of the replay; then it is cut short */
#define END_S		10		/* for engines to finish after that */
#define TICK_NS		(20 * NSEC_PER_MSEC)

/**
 * struct stage - the parent's view
 * @stop_until, @back_at: 0: not now
 */
struct stage {
	struct demo	dm;
	struct test_daemon kvmmd;
	struct outcome	out;
	pid_t		pid[NR_ENGINES];
	uint64_t	start_ns;
	uint64_t	stop_until;
	uint64_t	back_at;
	uint64_t	limit_s;
	uint64_t	dram_bytes;
	bool		tty, quick;
	int		progress_s;
};

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
	interrupted = sig;
}

static void say(struct stage *st, const char *text)
{
	fprintf(stderr, "%s%5.1f s  %s\n", st->tty ? "\r\033[K" : "",
		(double)(now_ns() - st->start_ns) / 1e9, text);
}

/* ---- set-up ------------------------------------------------------------------- */

static void *map_shared(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static int make_shared(struct demo *dm)
{
	struct shared *sh = map_shared(sizeof(*sh));

	if (!sh)
		return -ENOMEM;
	sh->nr_places = (uint32_t)(2 * DRAM_BYTES / PAGE_BYTES);
	sh->place = map_shared(sh->nr_places * sizeof(*sh->place));
	sh->owner = map_shared(dm->trace.nr_pages);
	dm->sh = sh;
	return sh->place && sh->owner ? 0 : -ENOMEM;
}

static int load_trace(struct demo *dm, const char *dir, bool quick)
{
	static const char *const files[] = {
		"agents.jsonl.zst", "conversation.jsonl.zst",
	};
	unsigned int i;
	int err;

	for (i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
		char path[4096];

		snprintf(path, sizeof(path), "%s/%s", dir, files[i]);
		err = trace_add(&dm->trace, path);
		if (err)
			return err;
	}
	err = trace_seal(&dm->trace);
	if (!err && quick && dm->trace.nr > QUICK_REQUESTS)
		dm->trace.nr = QUICK_REQUESTS;
	return err;
}

/* Room for the NVMe file, with as much again left over? */
static int check_room(const char *dir, uint64_t bytes)
{
	struct statvfs vfs;
	uint64_t room;

	if (statvfs(dir, &vfs))
		return -errno;
	room = (uint64_t)vfs.f_bavail * vfs.f_frsize;
	if (room >= 2 * bytes)
		return 0;
	fprintf(stderr, "%s has %.1f GiB free, the demo wants %.1f (set TMPDIR)\n",
		dir, (double)room / (1 << 30),
		2 * (double)bytes / (1 << 30));
	return -ENOSPC;
}

static int start_daemon(struct stage *st)
{
	struct td_opts o = {
		.dram_bytes = st->dram_bytes,
		.nvme_bytes = NVME_TIMES * st->dram_bytes,
		/*
		 * What is at hand may be no NVMe: a disk that keeps an I/O for
		 * a second is slow here, not broken. Deadlines of fetches
		 * hold all the same.
		 */
		.io_timeout = "5s",
		.socket = { { .name = "kvmm.sock", .tenant = "demo" } },
	};
	int err;

	if (!getenv("KVMMD"))
		o.binary = "build/kvmmd";
	err = td_init(&st->kvmmd, &o);
	if (!err)
		err = check_room(st->kvmmd.dir, o.nvme_bytes);
	if (!err)
		err = td_start(&st->kvmmd);
	if (err)
		fprintf(stderr, "kvmmd did not start: %s\n", strerror(-err));
	st->dm.socket = st->kvmmd.socket;
	return err;
}

static int start_engine(struct stage *st, unsigned int i)
{
	pid_t me = getpid(), pid;

	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return -errno;
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		signal(SIGINT, SIG_IGN);	/* the parent ends us */
		_exit(getppid() == me ? engine_main(&st->dm, i) : 1);
	}
	st->pid[i] = pid;
	return 0;
}

/* ---- while it runs -------------------------------------------------------------- */

static double seconds(const struct stage *st)
{
	return (double)(now_ns() - st->start_ns) / 1e9;
}

static void show_progress(struct stage *st)
{
	const struct shared *sh = st->dm.sh;
	uint64_t asked = SUM(sh, pages_asked);
	uint64_t dram = SUM(sh, pages_dram), below = SUM(sh, pages_below);
	int now = (int)(seconds(st) * (st->tty ? 5 : 0.5));

	if (now == st->progress_s)
		return;
	st->progress_s = now;
	fprintf(stderr,
		"%s%5.1f s  %4" PRIu64 " of %zu requests, %4.1f %% of pages hit in DRAM, %4.1f %% below, %.1f GiB checked, %" PRIu64 " wrong bytes%s",
		st->tty ? "\r" : "", seconds(st), SUM(sh, requests),
		st->dm.trace.nr,
		asked ? 100.0 * (double)dram / (double)asked : 0,
		asked ? 100.0 * (double)below / (double)asked : 0,
		(double)SUM(sh, bytes_checked) / (1 << 30),
		SUM(sh, wrong_bytes), st->tty ? "\033[K" : "\n");
}

/* The engine loses everything it had: pins, frames being written, requests. */
static int accident_kill(struct stage *st, double share, uint64_t now)
{
	if (!st->out.killed && st->pid[VICTIM] &&
	    (share >= KILL_AT || seconds(st) >= KILL_AT_S)) {
		st->out.killed = true;
		kill(st->pid[VICTIM], SIGKILL);
		waitpid(st->pid[VICTIM], NULL, 0);
		st->pid[VICTIM] = 0;
		st->back_at = now + BACK_AFTER_NS;
		say(st, "engine 1 is killed with SIGKILL");
	}
	if (st->back_at && now >= st->back_at) {
		st->back_at = 0;
		say(st, "engine 1 is started again");
		return start_engine(st, VICTIM);
	}
	return 0;
}

static int accident_stop(struct stage *st, double share, uint64_t now)
{
	struct shared *sh = st->dm.sh;
	char text[128];
	int err;

	if (!st->out.paused &&
	    (share >= STOP_AT || seconds(st) >= STOP_AT_S)) {
		/* release: pairs with the engines' acquire in flag() */
		atomic_fetch_add_explicit(&sh->stops, 1, memory_order_release);
		err = td_pause(&st->kvmmd);
		if (err)
			return err;
		atomic_store_explicit(&sh->stopped, 1, memory_order_release);
		st->out.paused = true;
		st->stop_until = now_ns() + STOP_NS;
		say(st, "kvmmd is stopped with SIGSTOP");
	}
	if (st->stop_until && now >= st->stop_until) {
		st->stop_until = 0;
		atomic_store_explicit(&sh->stopped, 0, memory_order_release);
		/* Operations posted until now have waited, too. */
		atomic_fetch_add_explicit(&sh->stops, 1, memory_order_release);
		err = td_resume(&st->kvmmd);
		if (err)
			return err;
		snprintf(text, sizeof(text),
			 "kvmmd goes on; meanwhile %" PRIu64 " lookups found %" PRIu64 " pages",
			 SUM(sh, stopped_lookups), SUM(sh, stopped_hits));
		say(st, text);
	}
	return 0;
}

static int reap_engines(struct stage *st)
{
	unsigned int i, running = 0;

	for (i = 0; i < NR_ENGINES; i++) {
		int status;

		if (!st->pid[i])
			continue;
		if (waitpid(st->pid[i], &status, WNOHANG) != st->pid[i]) {
			running++;
			continue;
		}
		st->pid[i] = 0;
		if (!WIFEXITED(status) || WEXITSTATUS(status)) {
			snprintf(st->out.why, sizeof(st->out.why),
				 "engine %u ended with status 0x%x", i, status);
			return -ECHILD;
		}
	}
	return (int)running;
}

/*
 * kvmmd is there until it is told to go. What an exit was, and the end of the
 * log: nothing else is left of it.
 */
static int daemon_gone(struct stage *st, const char *when)
{
	char how[96];

	snprintf(st->out.why, sizeof(st->out.why), "%s %s",
		 td_ending(&st->kvmmd, how, sizeof(how)), when);
	td_dump_log(&st->kvmmd);
	return -ESRCH;
}

/* Return: 0 when all engines ended well. */
static int run(struct stage *st)
{
	struct shared *sh = st->dm.sh;
	int running, err;

	for (;;) {
		struct timespec tick = ns_to_timespec(TICK_NS);
		double share = (double)SUM(sh, next) / (double)st->dm.trace.nr;

		nanosleep(&tick, NULL);
		if (interrupted)
			return -EINTR;
		if (!td_running(&st->kvmmd))
			return daemon_gone(st, "while engines were at work");
		err = accident_kill(st, share, now_ns());
		if (!err)
			err = accident_stop(st, share, now_ns());
		if (err)
			return err;
		show_progress(st);
		running = reap_engines(st);
		if (running < 0)
			return running;
		if (!running && !st->back_at && !st->stop_until)
			return 0;
		if (seconds(st) >= (double)st->limit_s && !st->out.cut_short) {
			st->out.cut_short = true;
			atomic_store_explicit(&sh->quit, 1,
					      memory_order_release);
			say(st, "time is up: engines finish what they have");
		}
		if (seconds(st) >= (double)(st->limit_s + END_S)) {
			snprintf(st->out.why, sizeof(st->out.why),
				 "%d engines did not finish", running);
			return -ETIMEDOUT;
		}
	}
}

/* Only then, so that the replay has the CPUs to itself. */
static int generate(struct stage *st)
{
	int err;

	say(st, "a text is generated, and once more");
	err = text_twice(st->kvmmd.socket, st->quick, st->out.text);
	if (err && err != -EINTR)
		snprintf(st->out.why, sizeof(st->out.why),
			 "the text was not generated: %s", strerror(-err));
	return err;
}

/* Who hangs up may be dying: it has a second to be dead. */
static bool daemon_ended(struct stage *st)
{
	uint64_t deadline = deadline_in(NSEC_PER_SEC);
	struct timespec ts = ns_to_timespec(10 * NSEC_PER_MSEC);

	while (td_running(&st->kvmmd) && !deadline_past(deadline))
		nanosleep(&ts, NULL);
	return !td_running(&st->kvmmd);
}

/* All engines have left: kvmmd's account, and its end. */
static void close_books(struct stage *st)
{
	int err = report_collect(&st->kvmmd, &st->out);

	if (err && daemon_ended(st)) {
		daemon_gone(st, "when the engines had left");
		st->out.daemon_exit = -ESRCH;
		return;
	}
	if (err)
		snprintf(st->out.why, sizeof(st->out.why),
			 "kvmmd runs and was not to be asked: %s%s",
			 strerror(-err), access(st->kvmmd.admin, F_OK) ?
			 "; somebody has removed its admin socket" : "");
	st->out.daemon_exit = td_stop(&st->kvmmd);
	if (err || st->out.daemon_exit)
		td_dump_log(&st->kvmmd);
}

static void clean_up(struct stage *st)
{
	unsigned int i;

	for (i = 0; i < NR_ENGINES; i++)
		if (st->pid[i]) {
			kill(st->pid[i], SIGKILL);
			waitpid(st->pid[i], NULL, 0);
		}
	td_fini(&st->kvmmd);
	trace_fini(&st->dm.trace);
}

/* ---- main ------------------------------------------------------------------------ */

static int demo(struct stage *st)
{
	unsigned int i;
	int err = start_daemon(st);

	if (err)
		return 2;
	fprintf(stderr,
		"kvmmd has %" PRIu64 " MiB of DRAM and %" PRIu64 " MiB of NVMe; %u engines replay %zu requests of %u recorded loads\n",
		st->dram_bytes >> 20, NVME_TIMES * st->dram_bytes >> 20,
		NR_ENGINES,
		st->dm.trace.nr, st->dm.trace.nr_files);
	st->start_ns = now_ns();
	for (i = 0; i < NR_ENGINES && !err; i++)
		err = start_engine(st, i);
	if (!err)
		err = run(st);
	st->out.seconds = seconds(st);
	if (!err)
		err = generate(st);
	st->out.engines_ok = !err;
	if (st->tty)
		fprintf(stderr, "\r\033[K");
	if (err == -EINTR) {
		fprintf(stderr, "interrupted\n");
		return 2;
	}
	/* they notice sooner than the next look at it */
	if (err && !st->kvmmd.paused && daemon_ended(st))
		daemon_gone(st, "while engines were at work");
	if (!st->out.why[0] && err)
		snprintf(st->out.why, sizeof(st->out.why), "%s",
			 strerror(-err));
	/* With engines left over there is nothing to ask kvmmd about. */
	if (!err)
		close_books(st);
	return report_print(&st->dm, &st->out);
}

int main(int argc, char **argv)
{
	static const struct option opts[] = {
		{ "quick", no_argument, NULL, 'q' },
		{ "selftest-corrupt", no_argument, NULL, 'c' },
		{ "data", required_argument, NULL, 'd' },
		{ "seconds", required_argument, NULL, 's' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	struct sigaction sa = { .sa_handler = on_signal };
	struct stage st = {
		.limit_s = LIMIT_S,
		.dram_bytes = DRAM_BYTES,
		.progress_s = -1,
	};
	const char *data = "tests/data";
	int c, status = 2;

	while ((c = getopt_long(argc, argv, "h", opts, NULL)) != -1)
		switch (c) {
		case 'q':
			st.quick = true;
			st.dram_bytes = QUICK_DRAM;
			break;
		case 'c': st.dm.corrupt = true; break;
		case 'd': data = optarg; break;
		case 's': st.limit_s = strtoul(optarg, NULL, 10); break;
		default:
			fprintf(stderr, "usage: demo [--quick] [--selftest-corrupt] [--data DIR] [--seconds N]\n");
			return c == 'h' ? 0 : 2;
		}
	sigaction(SIGINT, &sa, NULL);
	sigaction(SIGTERM, &sa, NULL);
	sigaction(SIGHUP, &sa, NULL);
	st.tty = isatty(STDERR_FILENO);
	if (!load_trace(&st.dm, data, st.quick) && !make_shared(&st.dm))
		status = demo(&st);
	clean_up(&st);
	return status;
}
