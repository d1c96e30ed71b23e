/* SPDX-License-Identifier: Apache-2.0 */
/* What the client of tier_rig.h does, and the bytes that it reads and writes. */
#include <string.h>

#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "kernels/kernels.h"
#include "tests/lib/pattern.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

/*
 * A frame that can come comes within it, on a busy machine and sanitized, too;
 * tests that run a pool dry wait for it many times.
 */
#define RIG_FRAME_MS	100

/* -- bytes ------------------------------------------------------------------------ */

/* The page in @f, in order; the caller's to free. */
static uint8_t *frame_read(struct mm_pool *p, uint32_t f)
{
	struct image im = frame_image(p, f, p->page_bytes), flat;
	uint8_t *buf = malloc(p->page_bytes);

	assert_non_null(buf);
	flat = image_flat(buf, p->page_bytes);
	image_copy(&flat, &im);
	return buf;
}

/* Its bytes are those of @k, but for the first, which has @flip in it. */
static uint32_t frame_write(struct mm_pool *p, uint32_t f,
			    const struct kvmm_key *k, uint8_t flip)
{
	struct image im = frame_image(p, f, p->page_bytes), flat;
	uint8_t *buf = malloc(p->page_bytes);
	uint32_t crc;

	assert_non_null(buf);
	pattern_fill(buf, p->page_bytes, k);
	buf[0] ^= flip;
	flat = image_flat(buf, p->page_bytes);
	image_copy(&im, &flat);
	crc = kvmm_crc32c(0, buf, p->page_bytes);
	free(buf);
	return crc;
}

/* -- what a client does ----------------------------------------------------------- */

static uint32_t take_frame(struct rig *r, struct mm_win *w, uint32_t *head,
			   unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	bool asked = false;

	for (;;) {
		uint32_t tail = atomic_load(&w->wl->mag_tail), f;

		if (tail != *head) {
			f = atomic_load(&w->mag[*head & (w->mag_entries - 1)]);
			atomic_store(&w->wl->mag_head, ++*head);
			return f;
		}
		if (!asked)
			mm_refill(w, 1);
		else if (deadline_past(deadline) &&
			 !w->pool->extents_coming)
			return 0;	/* the node's worker has its own time */
		else
			rig_poll(r);
		asked = true;
	}
}

uint32_t rig_frame(struct rig *r, unsigned int group, unsigned int ms)
{
	unsigned int cls = rig_class(group);

	return take_frame(r, r->w[cls], &r->mag_head[cls], ms);
}

static int publish(struct rig *r, struct mm_win *w, uint32_t f,
		   unsigned int group, uint32_t chain, uint32_t i)
{
	struct ring_pub pub = { .frame = f, .group = group, .pos = i * 16 };
	struct ring_sqe sqe = { .op = RING_PUBLISH, .n = 1 };
	struct rig_answer a;
	struct kvmm_key k;

	if (!f)
		return -EAGAIN;
	rig_key(chain, i, pub.key);
	memcpy(k.b, pub.key, 32);
	if (i)
		rig_key(chain, i - 1, pub.parent);
	pub.crc = frame_write(w->pool, f, &k, r->o.other_bytes);
	if (r->o.crc)
		pub.flags = KVMM_PUB_CRC;
	pub.crc ^= r->o.wrong_crc;
	sqe.tag = r->next_tag++;
	mm_publish(w, &sqe, &pub);
	assert_true(rig_answer(r, sqe.tag, 1000, &a));
	assert_int_equal(a.n, 1);
	rig_answer_put(r, &a);
	if (a.res[0].result)
		mm_free(w, &f, 1, 0);
	return a.res[0].result;
}

static unsigned int frame_ms(const struct rig *r)
{
	return r->o.frame_ms ? r->o.frame_ms : RIG_FRAME_MS;
}

int rig_publish(struct rig *r, unsigned int group, uint32_t chain, uint32_t i)
{
	return publish(r, r->w[rig_class(group)],
		       rig_frame(r, group, frame_ms(r)), group, chain, i);
}

int rig_publish_far(struct rig *r, uint32_t chain, uint32_t i)
{
	return publish(r, r->w_far, take_frame(r, r->w_far, &r->mag_head[2],
						frame_ms(r)),
		       RIG_FULL, chain, i);
}

uint32_t rig_publish_chain(struct rig *r, unsigned int group, uint32_t chain,
			   uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		if (rig_publish(r, group, chain, i))
			break;
	return i;
}

void rig_pin(struct rig *r, unsigned int group, uint32_t frame, int by)
{
	atomic_fetch_add(&r->w[rig_class(group)]->pins[frame], by);
}

void rig_touch(struct rig *r, unsigned int group, uint32_t chain, uint32_t n)
{
	struct mm_win *w = r->w[rig_class(group)];
	struct page *pg = rig_page(r, group, chain, n - 1);
	struct ring_sqe sqe = { .op = RING_END, .n = n, .group = group };

	if (!pg || copy_at(pg, RIG_DRAM)->state != COPY_READY)
		return;
	sqe.frame = copy_at(pg, RIG_DRAM)->frame;
	sqe.arg = frame_word_of(w->pool, sqe.frame);
	mm_touch(w, &sqe);
}

uint64_t rig_fetch(struct rig *r, unsigned int group, uint32_t chain,
		   uint32_t first, uint32_t n, unsigned int ms)
{
	struct ring_sqe sqe = { .op = RING_FETCH, .n = n };
	struct ring_key key[64] = { 0 };
	uint32_t i;

	assert_true(n <= ARRAY_SIZE(key));
	for (i = 0; i < n; i++) {
		rig_key(chain, first + i, key[i].key);
		key[i].group = group;
	}
	sqe.tag = r->next_tag++;
	if (ms)
		sqe.arg = deadline_in(ms * NSEC_PER_MSEC);
	mm_fetch(r->w[rig_class(group)], &sqe, key);
	return sqe.tag;
}

void rig_breach(struct rig *r, unsigned int group, uint32_t chain, uint32_t i,
		unsigned int node)
{
	struct page *pg = rig_page(r, group, chain, i);
	struct mm_pool *p = rig_pool(r, group, node);
	uint8_t *at;

	assert_true(pg && copy_at(pg, node)->state == COPY_READY);
	/* of a gang the last rank's share of the last segment */
	at = frame_part(p, copy_at(pg, node)->frame, p->parts - 1);
	at[(p->shape ? p->shape->part_bytes : p->page_bytes) - 1] ^= 1;
}

bool rig_bytes_at(struct rig *r, unsigned int node, unsigned int group,
		  uint32_t frame, uint32_t chain, uint32_t i)
{
	struct mm_pool *p = rig_pool(r, group, node);
	uint8_t *buf = frame_read(p, frame);
	struct kvmm_key k;
	bool ok;

	rig_key(chain, i, k.b);
	ok = !pattern_check(buf, p->page_bytes, &k);
	free(buf);
	return ok;
}

bool rig_bytes_ok(struct rig *r, unsigned int group, uint32_t frame,
		  uint32_t chain, uint32_t i)
{
	return rig_bytes_at(r, RIG_DRAM, group, frame, chain, i);
}

uint32_t rig_fetch_check(struct rig *r, unsigned int group, uint32_t chain,
			 uint32_t first, uint32_t n)
{
	uint64_t tag = rig_fetch(r, group, chain, first, n, 0);
	struct rig_answer a;
	uint32_t i, came = 0;

	assert_true(rig_answer(r, tag, 5000, &a));
	assert_int_equal(a.result, 0);
	assert_int_equal(a.n, n);
	for (i = 0; i < n; i++) {
		if (a.res[i].result)
			continue;
		assert_true(a.res[i].frame);
		if (!rig_bytes_ok(r, group, a.res[i].frame, chain, first + i))
			fail_msg("wrong bytes in page %u of chain %u",
				 first + i, chain);
		came++;
	}
	rig_answer_put(r, &a);
	return came;
}

void rig_push_down(struct rig *r, unsigned int group)
{
	struct mm_pool *p = rig_pool(r, group, RIG_DRAM);
	unsigned int rounds;

	for (rounds = 0; rounds < 200 && p->nr_pages; rounds++) {
		struct reclaim_control rc = {
			.want = 64, .max_scan = 4096,
			.deadline_ns = deadline_in(NSEC_PER_SEC),
		};

		pool_reclaim(p, &rc);
		rig_settle(r, 1000);
	}
}
