/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames that are to be seen one behind the other.
 *
 * Consecutive frames of a window are that already. Others are mapped a second
 * time: mremap() of a shared mapping with an old size of 0 leaves the old one
 * alone and makes another of the same memory, without a descriptor (the
 * window's are closed long since). One call a run of consecutive frames of one
 * extent. The kernel refuses it for parts of huge pages, or when a process has
 * too many mappings; then it is memory of our own, and bytes are copied.
 *
 * A second mapping lives as long as who holds the frames, OPEN or pinned: an
 * extent with such a frame is never given up, so it never shows memory that the
 * window has lost.
 *
 * But a step that was launched may write through it after the frames have an
 * owner no more, and nobody is called when that step ends: so where the commit
 * named one that was not done yet, the mapping lives until the request's end.
 * This is so after a commit that
 * - succeeded: the request has the frames pinned as long;
 * - found that somebody was first, or
 * - failed: the frames go back with that step, and are given to nobody before it
 *   is done. From then on the mapping may show what others write, and nobody
 *   reads it: kvmm_blob_commit() took the address from the caller.
 */
#include <string.h>
#include <sys/mman.h>

#include "libkvmm/blob.h"
#include "libkvmm/lib.h"

/* Frames from @i on that lie one behind the other in one extent. */
static uint32_t run_of(const struct kvmm_view *v, const uint32_t *frame,
		       uint32_t i, uint32_t n)
{
	uint32_t end = i + 1;

	while (end < n && frame[end] == frame[end - 1] + 1 &&
	       frame[end] % v->fpe)
		end++;
	return end - i;
}

static bool consecutive(const uint32_t *frame, uint32_t n)
{
	uint32_t i;

	for (i = 1; i < n; i++)
		if (frame[i] != frame[i - 1] + 1)
			return false;
	return true;
}

static int all_mapped(const struct kvmm_view *v, const uint32_t *frame,
		      uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		if (!kvmm_frame_addr(v, frame[i]))
			return kvmm_fail(-EAGAIN,
				"frame %u is not mapped here: kvmm_win_sync()",
				frame[i]);
	return 0;
}

static void *map_new(size_t bytes, int prot)
{
	void *p = mmap(NULL, bytes, prot, MAP_PRIVATE | MAP_ANONYMOUS |
		       MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		return NULL;
	madvise(p, bytes, MADV_DONTDUMP);
	return p;
}

/* A second mapping at @to; false: it cannot be had. */
static bool map_again(uint8_t *to, const struct kvmm_view *v,
		      const uint32_t *frame, uint32_t n)
{
	uint32_t i, run;

	for (i = 0; i < n; i += run) {
		size_t bytes;

		run = run_of(v, frame, i, n);
		bytes = (size_t)run * v->page_bytes;
		if (lib_broken(BREAK_REMAP) ||
		    mremap(kvmm_frame_addr(v, frame[i]), 0, bytes,
			   MREMAP_MAYMOVE | MREMAP_FIXED,
			   to + (size_t)i * v->page_bytes) == MAP_FAILED)
			return false;
	}
	return true;
}

int kvmm_span_init(struct kvmm_span *s, const struct kvmm_view *v,
		   const uint32_t *frame, uint32_t n)
{
	int err = all_mapped(v, frame, n);

	if (err)
		return err;
	s->bytes = (size_t)n * v->page_bytes;
	if (consecutive(frame, n)) {
		s->kind = SPAN_WINDOW;
		s->addr = kvmm_frame_addr(v, frame[0]);
		return 0;
	}
	s->kind = SPAN_MAP;
	s->addr = map_new(s->bytes, PROT_NONE);
	if (s->addr && !map_again(s->addr, v, frame, n)) {
		munmap(s->addr, s->bytes);
		s->kind = SPAN_COPY;
		s->addr = map_new(s->bytes, PROT_READ | PROT_WRITE);
	}
	if (!s->addr)
		return kvmm_fail(-ENOMEM, "no room for %zu bytes", s->bytes);
	madvise(s->addr, s->bytes, MADV_DONTFORK);
	madvise(s->addr, s->bytes, MADV_DONTDUMP);
	return 0;
}

void kvmm_span_fini(struct kvmm_span *s)
{
	if (s->addr && s->kind != SPAN_WINDOW)
		munmap(s->addr, s->bytes);
	s->addr = NULL;
}

void kvmm_span_in(struct kvmm_span *s, const struct kvmm_view *v,
		  const uint32_t *frame, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		memcpy(s->addr + (size_t)i * v->page_bytes,
		       kvmm_frame_addr(v, frame[i]), v->page_bytes);
	mprotect(s->addr, s->bytes, PROT_READ);
}

int kvmm_span_out(const struct kvmm_span *s, const struct kvmm_view *v,
		  const uint32_t *frame, uint32_t n)
{
	int err = all_mapped(v, frame, n);
	uint32_t i;

	for (i = 0; !err && i < n; i++)
		memcpy(kvmm_frame_addr(v, frame[i]),
		       s->addr + (size_t)i * v->page_bytes, v->page_bytes);
	return err;
}
