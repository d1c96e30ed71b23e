/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sentences, one a thread: the only state that the library has outside of its
 * handles. And the check of option structs, whose errors are most of them.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

static _Thread_local struct errmsg sentence;

struct errmsg *kvmm_errmsg(void)
{
	return &sentence;
}

void kvmm_say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(sentence.text, sizeof(sentence.text), fmt, ap);
	va_end(ap);
}

int kvmm_fail_forked(void)
{
	return kvmm_fail(-ECHILD,
		"this is a child of the process that opened the connection: it needs its own");
}

const char *kvmm_error(const struct kvmm *k)
{
	return sentence.text;
}

int kvmm_opts_copy(void *to, size_t known, const void *from, const char *what)
{
	const uint8_t *p = from;
	uint32_t size;
	size_t i;

	memcpy(&size, from, sizeof(size));
	if (size < sizeof(size) || size > 4096)
		return kvmm_fail(-EINVAL, "%s.size is %u, sizeof is %zu", what,
				 size, known);
	for (i = known; i < size; i++)
		if (p[i])
			return kvmm_fail(-E2BIG,
				"%s has %u bytes, this library knows %zu of them, and byte %zu is set",
				what, size, known, i);
	memset(to, 0, known);
	memcpy(to, from, size < known ? size : known);
	return 0;
}

#ifdef KVMM_TEST_BUILD
/* Chosen by KVMM_BREAK=name,name when a connection is opened. */
unsigned int kvmm_breaks;

void kvmm_breaks_init(void)
{
	const char *s = getenv("KVMM_BREAK");

	kvmm_breaks = 0;
	if (!s)
		return;
	if (strstr(s, "pinbarrier"))
		kvmm_breaks |= BREAK_PINBARRIER;
	if (strstr(s, "generation"))
		kvmm_breaks |= BREAK_GENERATION;
	if (strstr(s, "ready"))
		kvmm_breaks |= BREAK_READY;
	if (strstr(s, "remap"))
		kvmm_breaks |= BREAK_REMAP;
}
#endif
