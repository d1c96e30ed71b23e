/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - recorded requests to replay
 *
 * Several files become one sequence: each file's time is stretched to the same
 * length, then the requests are sorted. A page is a small integer, the same
 * for all requests that share the prefix that it ends.
 */
#ifndef KVMM_TESTS_LIB_TRACE_H
#define KVMM_TESTS_LIB_TRACE_H

#include <stddef.h>
#include <stdint.h>

/**
 * struct request - one recorded request
 * @when:	0 .. 1, where in its file
 * @session:	conversation, never 0
 * @how:	enum kvmm_end: what is known of the conversation's future
 * @tokens:	of the prompt
 * @npages:	whole pages of the prompt
 * @page:	in struct trace.page, 0 .. nr_pages - 1
 */
struct request {
	double		when;
	uint64_t	session;
	int		how;
	uint32_t	tokens;
	uint32_t	npages;
	const uint32_t	*page;
};

/**
 * struct trace - all of it
 * @nr_pages:	different pages
 * @max_pages:	of the longest request
 */
struct trace {
	struct request	*req;
	size_t		nr;
	size_t		cap;
	uint32_t	*page;
	size_t		page_len;
	size_t		page_cap;
	uint32_t	nr_pages;
	uint32_t	max_pages;
	unsigned int	nr_files;
};

/**
 * trace_add() - read a file of tests/data
 * @path:	JSON lines, compressed by zstd
 * Return: 0 or -errno, with a sentence on stderr.
 */
int trace_add(struct trace *t, const char *path);

/** trace_seal() - after the last trace_add(): sort, resolve pointers */
int trace_seal(struct trace *t);

/** trace_fini() - free it; fine on zeroes */
void trace_fini(struct trace *t);

#endif
