/* SPDX-License-Identifier: Apache-2.0 */
/* step.h - a decode step over kvmm memory against one over private memory */
#ifndef KVMM_TESTS_BENCH_STEP_H
#define KVMM_TESTS_BENCH_STEP_H

#include "tests/bench/bench.h"

/**
 * struct step_result - what came out
 * @time:	kvmm memory against private memory, us a step
 * @syscalls:	of libkvmm, a step that fills no page
 * @publish_syscalls: a step in which each of four sequences publishes a page, while
 *		kvmmd sleeps and has to be woken for each of them and for the step's
 *		end: at most
 */
struct step_result {
	struct bench_ratio time;
	double		syscalls, publish_syscalls;
};

/**
 * step_measure() - both in turns, in this process
 * @socket:	of a kvmmd
 *
 * Exits when it could not be measured, or when logits differ.
 */
void step_measure(struct bench *b, const char *socket, struct step_result *r);

#endif
