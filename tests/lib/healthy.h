/* SPDX-License-Identifier: Apache-2.0 */
/*
 * healthy.h - a client that works on while others misbehave
 *
 * It publishes, finds, fetches and checks pages all the time; a wrong byte, or a
 * call that does not return, fails the test that started it.
 */
#ifndef KVMM_TESTS_LIB_HEALTHY_H
#define KVMM_TESTS_LIB_HEALTHY_H

#include "tests/lib/fixture.h"
#include "tests/lib/leak.h"

#define HEALTHY		(FX_PROCS - 1)	/* which child it is */
#define HEALTHY_CHAIN	1		/* 16 pages that it keeps alive */

/**
 * healthy_start() - a daemon with a healthy client at work
 * @before: what the daemon holds then, and is to hold afterwards
 *
 * The daemon has all the extents that it will ever have, 32 MiB of DRAM over 64
 * of NVMe, and lets one engine pin half of its frames.
 */
void healthy_start(struct fx *f, struct leak *before);

/** healthy_stop() - end it; it has found all that it published */
void healthy_stop(struct fx *f);

#endif
