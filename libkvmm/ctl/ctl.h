/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmctl: asks a kvmmd through the installed header kvmm/admin.h, and shows
 * the answer as tables for people or, with --json, as it came.
 */
#ifndef KVMM_CTL_CTL_H
#define KVMM_CTL_CTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

/* Exit statuses; documented in --help and kvmmctl(1). */
enum ctl_exit {
	CTL_OK		= 0,
	CTL_REFUSED	= 1,	/* the daemon said no, or its answer is no answer */
	CTL_USAGE	= 2,
	CTL_AWAY	= 3,	/* nobody listens, or may not be asked */
	CTL_TIMEOUT	= 4,
};

/**
 * struct ctl - one run
 * @socket:	NULL: $KVMM_ADMIN_SOCKET, else the usual place
 */
struct ctl {
	const char	*socket;
	unsigned int	timeout_ms;
	bool		json;
};

/**
 * ctl_ask() - one request
 * @request:	taken over
 * @reply:	a new reference, on CTL_OK only
 *
 * Says on stderr what went wrong. With --json the reply goes to stdout here,
 * whatever it says, and *@reply is NULL.
 */
enum ctl_exit ctl_ask(const struct ctl *c, json_t *request, json_t **reply);

/* Commands: @argc words after the noun. */
enum ctl_exit ctl_status(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_space(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_client(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_pins(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_mode(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_ping(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_check(const struct ctl *c, int argc, char **argv);
enum ctl_exit ctl_daemon(const struct ctl *c, int argc, char **argv);

enum ctl_exit ctl_usage(const char *fmt, ...)
	__attribute__((format(printf, 1, 2)));

/**
 * ctl_word() - find a word of a NULL-terminated list by itself or by a prefix
 * Return: its index; -1 when there is none, -2 when the prefix fits several.
 */
int ctl_word(const char *const *words, const char *w);

/* -- values of an answer --------------------------------------------------------- */

/* Members by path, as "frames.ready"; absent ones are 0, "" and false. */
const json_t *ctl_at(const json_t *o, const char *path);
int64_t ctl_int(const json_t *o, const char *path);
const char *ctl_str(const json_t *o, const char *path);
bool ctl_true(const json_t *o, const char *path);

/* -- text: table.c ------------------------------------------------------------------ */

/**
 * struct table - rows of equal columns, printed aligned
 *
 * A heading that begins with '>' makes its column flush right.
 */
struct table;

struct table *table_create(const char *const *headings);
/* Cells are copied; NULL is an empty one. */
void table_cell(struct table *t, const char *text);
void table_cellf(struct table *t, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
void table_print(const struct table *t, FILE *out);
void table_destroy(struct table *t);

/* "1.5 GiB", "12 KiB", "0"; 10 minutes and more without seconds. */
const char *text_bytes(int64_t bytes, char *buf, size_t len);
const char *text_ms(int64_t ms, char *buf, size_t len);
#define TEXT_LEN	32

#endif
