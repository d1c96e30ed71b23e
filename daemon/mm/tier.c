/* SPDX-License-Identifier: Apache-2.0 */
/* What moves pages between nodes, as one: its beginning and its end. */
#include <stdlib.h>

#include "daemon/mm/tier.h"

void tier_init(struct mm *mm)
{
	list_init(&mm->flights);
	list_init(&mm->wbacks);
	stage_init(mm);
	admit_init(mm);
	scrub_init(mm);
}

bool tier_stop(struct mm *mm)
{
	mm->stopping = true;
	fetch_stop(mm);
	writeback_stop(mm);
	return scrub_stop(mm) && list_empty(&mm->flights) &&
	       list_empty(&mm->wbacks);
}

void tier_fini(struct mm *mm)
{
	unsigned int i;

	stage_fini(mm);
	admit_fini(mm);
	scrub_fini(mm);
	for (i = 0; i < mm->nr_nodes; i++) {
		free(mm->node[i].slots);
		free(mm->node[i].evac);
		mm->node[i].slots = NULL;
		mm->node[i].evac = NULL;
	}
}
