/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a space would have had, while it is observed: the keys that were published
 * in it, by hash, and counts.
 *
 * A space without pages ends soon after its last client, and an observed one has
 * none. Engines restart, so what was seen is kept for the next space of the same
 * identity: of the KEPT spaces that ended last.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/clock.h"
#include "ipc/base/mix.h"

#define GHOST_OLD_MS	(1u << 30)

/*
 * A key has one place, by its hash, and the last that came has it: what was not
 * seen for long gives way, and a cache would have dropped it, too.
 */
static uint32_t ghost_tag(const struct mm_space *sp, uint16_t group,
			  const uint64_t key[4], uint32_t *at)
{
	uint64_t h = key_mix(key, sp->mm->seed[0], sp->mm->seed[1], group);

	*at = h >> 32 & (GHOST_ENTRIES - 1);
	return (uint32_t)h | 1;
}

/* Ages are told apart up to 2^31 ms, 24 days: old is old, and no older. */
static void ghost_age(struct ghost *g)
{
	uint32_t now = now_ns() / NSEC_PER_MSEC;

	if (now - g->ms > GHOST_OLD_MS)
		g->ms = now - GHOST_OLD_MS;
}

void ghost_publish(struct mm_space *sp, uint16_t group, const uint64_t key[4])
{
	uint32_t at, tag = ghost_tag(sp, group, key, &at);

	if (!sp->seen.ghost)
		sp->seen.ghost = calloc(GHOST_ENTRIES, sizeof(*sp->seen.ghost));
	if (!sp->seen.ghost)
		return;
	if (sp->seen.ghost[at].tag == tag) {
		ghost_age(&sp->seen.ghost[at]);
		return;
	}
	if (!sp->seen.ghost[at].tag)
		sp->seen.ghost_pages++;
	sp->seen.ghost[at].tag = tag;
	sp->seen.ghost[at].ms = now_ns() / NSEC_PER_MSEC;
}

bool ghost_known(const struct mm_space *sp, uint16_t group,
		 const uint64_t key[4], uint32_t asked_ms)
{
	uint32_t at, tag = ghost_tag(sp, group, key, &at);

	if (sp->seen.ghost && sp->seen.ghost[at].tag == tag)
		ghost_age(&sp->seen.ghost[at]);
	return sp->seen.ghost && sp->seen.ghost[at].tag == tag &&
	       (int32_t)(asked_ms - sp->seen.ghost[at].ms) > 0;
}

static void seen_free(struct kept *k)
{
	free(k->seen.ghost);
	memset(k, 0, sizeof(*k));
}

void ghost_keep(struct mm_space *sp)
{
	struct mm *mm = sp->mm;
	struct kept *k = &mm->kept[mm->kept_next];

	if (!sp->seen.ghost && !sp->seen.asked)
		return;
	mm->kept_next = (mm->kept_next + 1) % ARRAY_SIZE(mm->kept);
	seen_free(k);
	memcpy(k->id, sp->id, sizeof(k->id));
	k->seen = sp->seen;
	memset(&sp->seen, 0, sizeof(sp->seen));
}

void ghost_take(struct mm_space *sp)
{
	struct mm *mm = sp->mm;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(mm->kept); i++) {
		struct kept *k = &mm->kept[i];

		if (memcmp(k->id, sp->id, sizeof(k->id)))
			continue;
		sp->seen = k->seen;
		memset(k, 0, sizeof(*k));
		return;
	}
}

void ghost_forget(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(mm->kept); i++)
		seen_free(&mm->kept[i]);
}

uint64_t mm_kept_bytes(const struct mm *mm)
{
	uint64_t bytes = 0;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(mm->kept); i++)
		if (mm->kept[i].seen.ghost)
			bytes += GHOST_ENTRIES * sizeof(struct ghost);
	return bytes;
}
