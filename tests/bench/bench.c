/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring against a floor; see bench.h. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/bench/bench.h"

/* ---- the machine -------------------------------------------------------------- */

static void cpu_name(char *buf, size_t len)
{
	char line[512];
	FILE *f = fopen("/proc/cpuinfo", "re");

	snprintf(buf, len, "unknown");
	while (f && fgets(line, sizeof(line), f)) {
		char *v = strchr(line, ':');

		if (strncmp(line, "model name", 10) || !v)
			continue;
		line[strcspn(line, "\n")] = '\0';
		snprintf(buf, len, "%s", v + 2);
		break;
	}
	if (f)
		fclose(f);
}

/* The type of the file system that @path is on: the longest mount above it. */
static void fs_name(const char *path, char *buf, size_t len)
{
	char dev[256], mnt[256], type[64], line[1024];
	size_t best = 0;
	FILE *f = fopen("/proc/mounts", "re");

	snprintf(buf, len, "unknown");
	while (f && fgets(line, sizeof(line), f)) {
		size_t n;

		if (sscanf(line, "%255s %255s %63s", dev, mnt, type) != 3)
			continue;
		n = strlen(mnt);
		if (strncmp(path, mnt, n) ||
		    (n > 1 && path[n] != '/' && path[n] != '\0') || n < best)
			continue;
		best = n;
		snprintf(buf, len, "%s", type);
	}
	if (f)
		fclose(f);
}

static json_t *machine(void)
{
	const char *tmp = getenv("TMPDIR");
	char cpu[256], fs[64];
	struct utsname un;

	cpu_name(cpu, sizeof(cpu));
	fs_name(tmp && *tmp ? tmp : "/var/tmp", fs, sizeof(fs));
	uname(&un);
	return json_pack("{s:s, s:I, s:s, s:s}", "cpu", cpu, "cores",
			 (json_int_t)sysconf(_SC_NPROCESSORS_ONLN),
			 "kernel", un.release, "fs", fs);
}

/* ---- the account -------------------------------------------------------------- */

void bench_init(struct bench *b, const char *name)
{
	memset(b, 0, sizeof(*b));
	b->name = name;
	b->results = json_object();
	b->must = json_array();
}

/* Four significant digits are what was measured; more would be a lie. */
static double rounded(double v)
{
	double scale;

	if (v == 0 || !isfinite(v))
		return 0;
	scale = pow(10, 3 - floor(log10(fabs(v))));
	return scale >= 1 ? round(v * scale) / scale : round(v);
}

static json_t *number(double v)
{
	double r = rounded(v);

	return r == floor(r) && fabs(r) < 1e15 ? json_integer((json_int_t)r)
					       : json_real(r);
}

void bench_result(struct bench *b, const char *key, double value)
{
	json_object_set_new(b->results, key, number(value));
	bench_say("%-22s %.4g", key, value);
}

void bench_result_text(struct bench *b, const char *key, const char *text)
{
	json_object_set_new(b->results, key, json_string(text));
}

void bench_must(struct bench *b, const char *what, double value,
		const char *op, double limit)
{
	bool holds = !strcmp(op, "<=") ? value <= limit :
		     !strcmp(op, ">=") ? value >= limit : value == limit;

	if (!isfinite(value))
		holds = false;
	json_array_append_new(b->must, json_pack("{s:s, s:o, s:s, s:o, s:b}",
		"what", what, "value", number(value), "op", op,
		"limit", number(limit), "holds", holds));
	bench_say("%s %s %.4g %s %.4g", holds ? "holds: " : "FAILS: ", what,
		  value, op, limit);
	if (!holds)
		b->failed = true;
}

static void end_daemon(struct bench *b)
{
	if (b->kvmmd)
		td_fini(b->kvmmd);
	b->kvmmd = NULL;
}

int bench_finish(struct bench *b)
{
	json_t *o = json_pack("{s:s, s:o, s:o, s:o}", "bench", b->name,
			      "machine", machine(), "results", b->results,
			      "must", b->must);

	end_daemon(b);
	json_dumpf(o, stdout, JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(6));
	putchar('\n');
	fflush(stdout);
	json_decref(o);
	return b->failed ? 1 : 0;
}

void bench_say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
}

void bench_die(struct bench *b, const char *what, int err)
{
	bench_say("%s: %s: %s", b->name, what, strerror(-err));
	if (b->kvmmd)
		td_dump_log(b->kvmmd);
	end_daemon(b);
	exit(2);
}

/* ---- rounds -------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

double bench_median(double *v, size_t n)
{
	if (!n)
		return NAN;
	qsort(v, n, sizeof(*v), by_value);
	return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

void bench_abba(const char *what, unsigned int rounds, bench_fn subject,
		bench_fn floor, void *arg, struct bench_ratio *r)
{
	double s[2 * BENCH_MAX], f[2 * BENCH_MAX];
	double ratio[BENCH_MAX], noise[BENCH_MAX];
	unsigned int i;

	if (rounds > BENCH_MAX)
		rounds = BENCH_MAX;
	floor(arg);
	subject(arg);
	for (i = 0; i < rounds; i++) {
		double s1, s2, f1, f2;

		if (i % 2) {
			s1 = subject(arg);
			f1 = floor(arg);
			f2 = floor(arg);
			s2 = subject(arg);
		} else {
			f1 = floor(arg);
			s1 = subject(arg);
			s2 = subject(arg);
			f2 = floor(arg);
		}
		s[2 * i] = s1;
		s[2 * i + 1] = s2;
		f[2 * i] = f1;
		f[2 * i + 1] = f2;
		ratio[i] = (s1 + s2) / (f1 + f2);
		noise[i] = f1 > f2 ? f1 / f2 : f2 / f1;
		bench_say("  %s round %u of %u: %.1f against %.1f: %.2f (floor against floor %.2f)",
			  what, i + 1, rounds, (s1 + s2) / 2, (f1 + f2) / 2,
			  ratio[i], noise[i]);
	}
	r->subject = bench_median(s, 2 * rounds);
	r->floor = bench_median(f, 2 * rounds);
	r->ratio = bench_median(ratio, rounds);
	r->noise = bench_median(noise, rounds);
}
