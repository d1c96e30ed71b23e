/* SPDX-License-Identifier: Apache-2.0 */
/* What a process holds; see leak.h. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/leak.h"
#include "tests/lib/proc.h"

/* "/memfd:kvmm-frames (deleted)" and "socket:[123]" without what is unique. */
static void count_kind(struct leak *l, const char *to)
{
	struct leak_kind *k = l->kind, new = { .n = 1 };
	size_t len = strcspn(to, "[0123456789");

	snprintf(new.name, sizeof(new.name), "%.*s", (int)len, to);
	while (k < l->kind + LEAK_KINDS && k->name[0] &&
	       strcmp(k->name, new.name) < 0)
		k++;
	if (k == l->kind + LEAK_KINDS)
		return;
	if (!strcmp(k->name, new.name)) {
		k->n++;
		return;
	}
	memmove(k + 1, k, (size_t)(l->kind + LEAK_KINDS - 1 - k) * sizeof(*k));
	*k = new;
}

static int count_fds(pid_t pid, struct leak *l)
{
	char path[64], to[256];
	struct dirent *de;
	DIR *dir;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	dir = opendir(path);
	if (!dir)
		return -errno;
	while ((de = readdir(dir))) {
		ssize_t n;

		if (!isdigit((unsigned char)de->d_name[0]))
			continue;
		l->fds++;
		n = readlinkat(dirfd(dir), de->d_name, to, sizeof(to) - 1);
		if (n <= 0)
			continue;
		to[n] = '\0';
		l->memfds += !strncmp(to, "/memfd:", 7);
		count_kind(l, to);
	}
	/* our own look is one of them */
	if (pid == getpid())
		l->fds--;
	closedir(dir);
	return 0;
}

/* Anonymous memory comes and goes with malloc(); files and devices do not. */
static int count_maps(pid_t pid, struct leak *l)
{
	char path[64], line[512];
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	f = fopen(path, "re");
	if (!f)
		return -errno;
	while (fgets(line, sizeof(line), f)) {
		if (strstr(line, "/memfd:")) {
			l->shm_maps++;
			l->maps++;
		} else if (strstr(line, "anon_inode:") ||
			   strstr(line, "/dev/")) {
			l->maps++;
		}
	}
	fclose(f);
	return 0;
}

static long count_words(const char *path)
{
	char text[4096];
	size_t n, i;
	long words = 0;
	FILE *f = fopen(path, "re");

	if (!f)
		return 0;
	n = fread(text, 1, sizeof(text), f);
	fclose(f);
	for (i = 0; i < n; i++)
		words += isdigit((unsigned char)text[i]) &&
			 (!i || !isdigit((unsigned char)text[i - 1]));
	return words;
}

static long count_entries(const char *path)
{
	struct dirent *de;
	long n = 0;
	DIR *dir = opendir(path);

	if (!dir)
		return 0;
	while ((de = readdir(dir)))
		n += de->d_name[0] != '.';
	closedir(dir);
	return n;
}

/*
 * The kernel makes workers for an io_uring when it likes, and keeps the first for
 * as long as the ring lives: they are nobody's leak.
 */
static bool is_uring_worker(const char *task, const char *tid)
{
	char path[384], comm[32] = "";
	FILE *f;

	snprintf(path, sizeof(path), "%s/%s/comm", task, tid);
	f = fopen(path, "re");
	if (!f)
		return false;
	if (!fgets(comm, sizeof(comm), f))
		comm[0] = '\0';
	fclose(f);
	return !strncmp(comm, "iou-", 4);
}

static long count_threads(const char *path)
{
	struct dirent *de;
	long n = 0;
	DIR *dir = opendir(path);

	if (!dir)
		return 0;
	while ((de = readdir(dir)))
		n += de->d_name[0] != '.' && !is_uring_worker(path, de->d_name);
	closedir(dir);
	return n;
}

int leak_look(pid_t pid, struct leak *l)
{
	char path[64];
	int err;

	memset(l, 0, sizeof(*l));
	if (!pid)
		pid = getpid();
	err = count_fds(pid, l);
	if (!err)
		err = count_maps(pid, l);
	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	l->threads = count_threads(path);
	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", pid, pid);
	l->children = count_words(path);
	l->dev_shm = count_entries("/dev/shm");
	return err;
}

static long kind_of(const struct leak *l, const char *name)
{
	unsigned int i;

	for (i = 0; i < LEAK_KINDS; i++)
		if (!strcmp(l->kind[i].name, name))
			return l->kind[i].n;
	return 0;
}

static void say_kind(const struct leak_kind *k, const struct leak *then,
		     const struct leak *now, char *why, size_t len, size_t *at)
{
	long was = kind_of(then, k->name), is = kind_of(now, k->name);

	if (k->name[0] && was != is && *at < len)
		*at += (size_t)snprintf(why + *at, len - *at,
					" %s %ld, were %ld;", k->name, is, was);
}

bool leak_same(const struct leak *then, const struct leak *now, char *why,
	       size_t len)
{
	const struct {
		const char *name;
		long then, now;
	} what[] = {
		{ "fds", then->fds, now->fds },
		{ "memfds", then->memfds, now->memfds },
		{ "maps", then->maps, now->maps },
		{ "mapped memfds", then->shm_maps, now->shm_maps },
		{ "threads", then->threads, now->threads },
		{ "children", then->children, now->children },
		{ "files in /dev/shm", then->dev_shm, now->dev_shm },
	};
	size_t i, at = 0;

	why[0] = '\0';
	for (i = 0; i < sizeof(what) / sizeof(what[0]); i++)
		if (what[i].then != what[i].now && at < len)
			at += (size_t)snprintf(why + at, len - at,
					       " %s %ld, were %ld;",
					       what[i].name, what[i].now,
					       what[i].then);
	for (i = 0; at && i < LEAK_KINDS; i++) {
		say_kind(&then->kind[i], then, now, why, len, &at);
		if (!kind_of(then, now->kind[i].name))
			say_kind(&now->kind[i], then, now, why, len, &at);
	}
	return !why[0];
}

/* What goes on in the background (growth, a closing socket) takes a moment. */
void leak_calm(pid_t pid, struct leak *l)
{
	struct t_wait w = t_wait_begin(20000);
	unsigned int calm = 0;

	w.step_ns = 5000000;
	T_OK(leak_look(pid, l));
	while (calm < 10) {
		struct leak now;

		T_CHECK(t_wait_more(&w), "process %d never rests", pid);
		T_OK(leak_look(pid, &now));
		calm = memcmp(&now, l, sizeof(now)) ? 0 : calm + 1;
		*l = now;
	}
}

static bool look_same(pid_t pid, const struct leak *then, char *why, size_t len)
{
	struct leak now;

	T_OK(leak_look(pid, &now));
	return leak_same(then, &now, why, len);
}

void leak_settle(pid_t pid, const struct leak *then, unsigned int ms)
{
	struct t_wait w = t_wait_begin(ms);
	char why[512];

	while (!look_same(pid, then, why, sizeof(why)))
		if (!t_wait_more(&w))
			t_fail(__FILE__, __LINE__, "process %d still holds:%s",
			       pid, why);
}
