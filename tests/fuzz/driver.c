/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a fuzz target where clang's libFuzzer is missing: every file of the
 * corpus first, then seeded mutations of them until the time is over. Without
 * coverage it finds less, yet the targets are built, run, and sanitized.
 *
 * Understands the options that the runner passes to libFuzzer:
 * -max_total_time=S -seed=N -artifact_prefix=P; other options are ignored.
 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"

#define INPUT_BYTES	(64 * 1024)
#define MAX_CORPUS	4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
__attribute__((weak)) int LLVMFuzzerInitialize(int *argc, char ***argv);

struct input {
	uint8_t	*data;
	size_t	len;
};

static struct input corpus[MAX_CORPUS];
static size_t nr_corpus;

/* What runs now, so that a crash can be kept. */
static uint8_t current[INPUT_BYTES];
static size_t current_len;
static char artifact[4096];

static void keep_input(int sig)
{
	int fd = open(artifact, O_WRONLY | O_CREAT | O_TRUNC, 0644);

	if (fd >= 0 && write(fd, current, current_len) >= 0)
		close(fd);
	signal(sig, SIG_DFL);
	raise(sig);
}

static void run(const uint8_t *data, size_t len)
{
	/* A copy of just that size: reading past it is an error that shows. */
	uint8_t *exact = malloc(len ? len : 1);

	if (!exact)
		abort();
	memcpy(exact, data, len);
	memcpy(current, data, len);
	current_len = len;
	LLVMFuzzerTestOneInput(exact, len);
	free(exact);
}

static void add_file(const char *path)
{
	struct input *in = &corpus[nr_corpus];
	FILE *f = fopen(path, "rb");

	if (!f || nr_corpus == MAX_CORPUS) {
		if (f)
			fclose(f);
		return;
	}
	in->data = malloc(INPUT_BYTES);
	if (!in->data)
		abort();
	in->len = fread(in->data, 1, INPUT_BYTES, f);
	fclose(f);
	nr_corpus++;
}

static void add_path(const char *path)
{
	char name[4096];
	struct dirent *e;
	struct stat st;
	DIR *dir;

	if (stat(path, &st))
		return;
	if (!S_ISDIR(st.st_mode)) {
		add_file(path);
		return;
	}
	dir = opendir(path);
	while (dir && (e = readdir(dir))) {
		if (e->d_name[0] == '.')
			continue;
		snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
		add_file(name);
	}
	if (dir)
		closedir(dir);
}

/* A few edits of a corpus file, or of nothing; returns the new length. */
static size_t mutate(struct rng *r, uint8_t *buf)
{
	static const uint64_t edges[] = {
		0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff,
		0x80000000, 0xffffffff, INT64_MAX, UINT64_MAX,
	};
	size_t len = 0;

	if (nr_corpus) {
		const struct input *in = &corpus[rng_below(r, nr_corpus)];

		len = in->len;
		memcpy(buf, in->data, len);
	}
	for (uint64_t n = 1 + rng_below(r, 8); n; n--) {
		uint64_t edge = edges[rng_below(r, ARRAY_SIZE(edges))];
		size_t width = (size_t)1 << rng_below(r, 4);
		size_t at = rng_below(r, len + 1);
		size_t grow = rng_below(r, 64);

		switch (rng_below(r, 5)) {
		case 0:					/* flip a bit */
			if (at < len)
				buf[at] ^= (uint8_t)BIT(rng_below(r, 8));
			break;
		case 1:					/* an edge value */
			if (at + width <= len)
				memcpy(buf + at, &edge, width);
			break;
		case 2:					/* a random byte */
			if (at < len)
				buf[at] = (uint8_t)rng_next(r);
			break;
		case 3:					/* cut */
			len = at;
			break;
		default:				/* insert */
			if (len + grow > INPUT_BYTES)
				break;
			memmove(buf + at + grow, buf + at, len - at);
			rng_fill(r, buf + at, grow);
			len += grow;
		}
	}
	return len;
}

int main(int argc, char **argv)
{
	static uint8_t buf[INPUT_BYTES];
	uint64_t secs = 0, seed = 1, end, runs = 0;
	const char *prefix = "";
	struct rng r;

	if (LLVMFuzzerInitialize)
		LLVMFuzzerInitialize(&argc, &argv);
	for (int i = 1; i < argc; i++) {
		if (!strncmp(argv[i], "-max_total_time=", 16))
			secs = strtoull(argv[i] + 16, NULL, 0);
		else if (!strncmp(argv[i], "-seed=", 6))
			seed = strtoull(argv[i] + 6, NULL, 0);
		else if (!strncmp(argv[i], "-artifact_prefix=", 17))
			prefix = argv[i] + 17;
		else if (argv[i][0] != '-')
			add_path(argv[i]);
	}
	snprintf(artifact, sizeof(artifact), "%scrash-%llu", prefix,
		 (unsigned long long)seed);
	signal(SIGSEGV, keep_input);
	signal(SIGABRT, keep_input);

	for (size_t i = 0; i < nr_corpus; i++)
		run(corpus[i].data, corpus[i].len);
	rng_seed(&r, seed);
	end = deadline_in(secs * NSEC_PER_SEC);
	while (!deadline_past(end)) {
		size_t len = mutate(&r, buf);

		run(buf, len);
		runs++;
	}
	printf("%zu corpus files, %llu mutations\n", nr_corpus,
	       (unsigned long long)runs);
	for (size_t i = 0; i < nr_corpus; i++)
		free(corpus[i].data);
	return 0;
}
