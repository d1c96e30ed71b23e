/* SPDX-License-Identifier: Apache-2.0 */
/* What every cmocka program begins with. */
#ifndef KVMM_TESTS_UNIT_H
#define KVMM_TESTS_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

/* The seed of this run; the runner prints it, KVMM_TEST_SEED repeats it. */
static inline uint64_t test_seed(void)
{
	const char *s = getenv("KVMM_TEST_SEED");

	return s ? strtoull(s, NULL, 0) : 1;
}

/* Full counts (make check-long), or a sample? */
static inline bool test_long(void)
{
	return getenv("KVMM_TEST_LONG") != NULL;
}

#endif
