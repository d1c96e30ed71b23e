/* SPDX-License-Identifier: Apache-2.0 */
/* The start ladder: see ladder.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "daemon/server/config.h"
#include "daemon/server/ladder.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define FILE_BYTES	4096
#define BUILTIN_POLICY	"lru"
#define MAGIC		"kvmm-boot 1"

static const char *const step_names[] = {
	[LADDER_ADOPT]	= "adopt",
	[LADDER_PLAIN]	= "plain",
	[LADDER_EMPTY]	= "empty",
	[LADDER_BYPASS]	= "bypass",
};

const char *ladder_name(enum ladder_step step)
{
	return step_names[step];
}

/* -- small files ---------------------------------------------------------------------- */

/* The whole of a small file, terminated; its length, -ENOENT, -errno. */
static ssize_t file_read(int dirfd, const char *name, char *buf, size_t len)
{
	int fd = openat(dirfd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW |
			O_NONBLOCK);
	ssize_t n;

	if (fd < 0)
		return -errno;
	n = read(fd, buf, len - 1);
	if (n < 0)
		n = -errno;
	close(fd);
	if (n >= 0)
		buf[n] = '\0';
	return n;
}

static int write_all(int fd, const char *text, size_t len)
{
	while (len) {
		ssize_t n = write(fd, text, len);

		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0) {
			text += n;
			len -= (size_t)n;
		}
	}
	return 0;
}

/*
 * By rename: a crash leaves the old one or the new one. Not flushed: what is
 * said here is of no use to another boot.
 */
static int file_write(int dirfd, const char *name, const char *text, size_t len)
{
	char new[64];
	int fd, err;

	snprintf(new, sizeof(new), "%s.new", name);
	fd = openat(dirfd, new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC |
		    O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	err = write_all(fd, text, len);
	close(fd);
	if (!err && renameat(dirfd, new, dirfd, name) < 0)
		err = -errno;
	if (err)
		unlinkat(dirfd, new, 0);
	return err;
}

/* -- the boot file ---------------------------------------------------------------------- */

enum boot_state {
	BOOT_NONE,		/* no file, or of another boot */
	BOOT_RUNNING,		/* a daemon ran and did not say that it ended */
	BOOT_STOPPED,
	BOOT_BAD,
};

/* One line; false: not one of ours. */
static bool line_parse(struct ladder *l, const char *line, char *boot,
		       enum boot_state *state)
{
	uint64_t t;
	char end;

	if (sscanf(line, "boot %63s%c", boot, &end) == 1)
		return true;
	if (!strcmp(line, "state running"))
		*state = BOOT_RUNNING;
	else if (!strcmp(line, "state stopped"))
		*state = BOOT_STOPPED;
	else if (sscanf(line, "unclean %" SCNu64 "%c", &t, &end) == 1 &&
		 l->nr_times < LADDER_TIMES)
		l->time[l->nr_times++] = t;
	else
		return false;
	return true;
}

static enum boot_state boot_parse(struct ladder *l, char *text)
{
	enum boot_state state = BOOT_BAD;
	char boot[64] = "", *line, *rest = text;

	line = strsep(&rest, "\n");
	if (strcmp(line, MAGIC))
		return BOOT_BAD;
	while ((line = strsep(&rest, "\n")) && *line)
		if (!line_parse(l, line, boot, &state))
			return BOOT_BAD;
	/* the last line ends with a newline, and nothing follows */
	if (!line || rest || !boot[0])
		return BOOT_BAD;
	return strcmp(boot, l->boot) ? BOOT_NONE : state;
}

static enum boot_state boot_read(struct ladder *l)
{
	char text[FILE_BYTES];
	ssize_t n = file_read(l->dirfd, "boot", text, sizeof(text));
	enum boot_state state;

	l->nr_times = 0;
	if (n == -ENOENT)
		return BOOT_NONE;
	state = n < 0 || strlen(text) != (size_t)n ? BOOT_BAD
						   : boot_parse(l, text);
	if (state == BOOT_NONE || state == BOOT_BAD)
		l->nr_times = 0;
	return state;
}

static int boot_write(struct ladder *l, const char *state)
{
	char text[FILE_BYTES];
	unsigned int i;
	size_t n;

	n = (size_t)snprintf(text, sizeof(text), MAGIC "\nboot %s\nstate %s\n",
			     l->boot, state);
	for (i = 0; i < l->nr_times; i++)
		n += (size_t)snprintf(text + n, sizeof(text) - n,
				      "unclean %" PRIu64 "\n", l->time[i]);
	return file_write(l->dirfd, "boot", text, n);
}

/* -- the rung ----------------------------------------------------------------------------- */

/* Forget what is too old, or from the future. */
static void times_trim(struct ladder *l, const struct ladder_now *now)
{
	unsigned int i, n = 0;

	for (i = 0; i < l->nr_times; i++)
		if (l->time[i] <= now->now_s &&
		    now->now_s - l->time[i] < now->window_s)
			l->time[n++] = l->time[i];
	l->nr_times = n;
}

static void times_add(struct ladder *l, const struct ladder_now *now)
{
	if (!now->window_s)
		return;
	if (l->nr_times == LADDER_TIMES)
		memmove(l->time, l->time + 1,
			--l->nr_times * sizeof(l->time[0]));
	l->time[l->nr_times++] = now->now_s;
}

static void ladder_judge(struct ladder *l, const struct ladder_now *now,
			 const char *ended)
{
	static const char *const what[] = {
		[LADDER_ADOPT]	= "what it left is adopted",
		[LADDER_PLAIN]	= "built-in policy, confirmed configuration",
		[LADDER_EMPTY]	= "built-in policy, confirmed configuration, "
				  "memory starts empty",
		[LADDER_BYPASS]	= "all spaces are in bypass until it is "
				  "stopped and started",
	};
	bool said = ended && *ended;

	l->unclean = l->nr_times;
	l->step = (enum ladder_step)clamp(l->nr_times, 1u, 4u) - 1;
	l->adopt_pct = l->step >= LADDER_EMPTY ? 0 : l->oom ? 50 : 100;
	if (!l->unclean)
		return;
	snprintf(l->why, sizeof(l->why), "the last kvmmd ended without order"
		 "%s%.24s%s, %u time%s in %" PRIu64 " min: %s%s",
		 said ? " (" : "", said ? ended : "", said ? ")" : "",
		 l->unclean, l->unclean == 1 ? "" : "s",
		 div_round_up(now->window_s, 60), what[l->step],
		 l->adopt_pct == 50 ? ", at most half of memory" : "");
}

int ladder_begin(struct ladder *l, int dirfd, const struct ladder_now *now,
		 struct errmsg *e)
{
	const char *ended = now->ended ? now->ended : "";
	enum boot_state was;
	int err;

	*l = (struct ladder){ .dirfd = dirfd };
	snprintf(l->boot, sizeof(l->boot), "%s", now->boot);
	was = boot_read(l);
	times_trim(l, now);
	if (was == BOOT_RUNNING || was == BOOT_BAD) {
		times_add(l, now);
		l->oom = !strcmp(ended, "oom-kill");
	}
	ladder_judge(l, now, was == BOOT_BAD ? "or its record is damaged" : ended);
	err = boot_write(l, "running");
	if (err)
		return errmsg_set(e, err, "state_dir: boot: %s: unclean ends are "
				  "not counted", strerror(-err));
	return 0;
}

int ladder_end(struct ladder *l, bool forget)
{
	if (forget)
		l->nr_times = 0;
	return boot_write(l, "stopped");
}

int ladder_again(struct ladder *l)
{
	return boot_write(l, "running");
}

/* -- how the last one ended ---------------------------------------------------------------- */

void ladder_now(struct ladder_now *now, const struct config *c, int dirfd,
		char *buf, size_t len)
{
	const char *env = getenv("KVMM_ENDED");
	struct timespec ts = { 0 };
	int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);

	clock_gettime(CLOCK_BOOTTIME, &ts);
	*now = (struct ladder_now){
		.now_s		= (uint64_t)ts.tv_sec,
		.window_s	= c->crash_window_ns / NSEC_PER_SEC,
		.ended		= buf,
	};
	if (file_read(root, "proc/sys/kernel/random/boot_id", now->boot,
		      sizeof(now->boot)) <= 1)
		snprintf(now->boot, sizeof(now->boot), "unknown");
	now->boot[strcspn(now->boot, "\n ")] = '\0';
	close_fd(&root);

	if (file_read(dirfd, "ended", buf, len) < 0)
		buf[0] = '\0';
	unlinkat(dirfd, "ended", 0);
	if (env)
		snprintf(buf, len, "%s", env);
	unsetenv("KVMM_ENDED");
	buf[strcspn(buf, "\n")] = '\0';
}

int ladder_ended(const char *dir, const char *result)
{
	int dirfd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), err;

	if (dirfd < 0)
		return -errno;
	err = file_write(dirfd, "ended", result, strnlen(result, 64));
	close(dirfd);
	return err;
}

/* -- the configuration last confirmed ------------------------------------------------------- */

int ladder_confirm(int dirfd, const struct config *c)
{
	char *text = NULL;
	size_t len = 0;
	FILE *f = open_memstream(&text, &len);
	int err;

	if (!f)
		return -errno;
	err = config_print(c, f);
	if (fclose(f) && !err)
		err = -ENOMEM;
	if (!err)
		err = file_write(dirfd, LADDER_CONFIRMED, text, len);
	free(text);
	return err;
}

bool ladder_apply(const struct ladder *l, struct config *c)
{
	unsigned int i;

	if (l->step < LADDER_PLAIN)
		return false;
	snprintf(c->policy, sizeof(c->policy), "%s", BUILTIN_POLICY);
	for (i = 0; l->step >= LADDER_BYPASS && i < c->nr_sockets; i++)
		c->socket[i].mode = KVMM_MODE_BYPASS;
	return true;
}
