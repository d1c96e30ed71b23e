/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What looks at every page: the check of all laws, and the dump.
 *
 * Both run in the loop, since only there nothing changes meanwhile, and while
 * one runs nobody else is served: rings wait, deadlines pass, and in the end
 * the watchdog. So neither may take long. A dump is given in pieces, each of
 * one moment. A check has no pieces: its accounts are sums over everything. It
 * says beforehand how long it would take, and is not begun when that is more
 * than was allowed.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/server/admin_json.h"
#include "daemon/server/config_words.h"
#include "ipc/base/clock.h"

/* -- the check ---------------------------------------------------------------------------- */

#define CHECK_MS	1000		/* that it may take unless told */

/*
 * What a check costs, ns: measured with 110,000 pages in 393,000 frames and
 * 4 Mi lines on a busy virtual machine (0.4 s), rounded up.
 */
#define PAGE_NS		4000
#define FRAME_NS	20		/* and once more for each client */
#define LINE_NS		25

struct check_cost {
	uint64_t	pages, lines, clients;
};

static void cost_of_space(const struct mm_space_info *si, void *arg)
{
	struct check_cost *cc = arg;

	cc->pages += si->pages;
	cc->lines += si->index_lines;
}

static void cost_of_client(struct mm_client *c, const struct mm_client_info *ci,
			   void *arg)
{
	struct check_cost *cc = arg;

	cc->clients++;
}

static uint64_t check_estimate_ms(struct server *s, struct check_cost *cc)
{
	struct mm_node_stat st;
	uint64_t frames = 0;
	unsigned int i;

	mm_for_each_space(s->mm, cost_of_space, cc);
	mm_for_each_client(s->mm, 0, cost_of_client, cc);
	for (i = 0; i < s->nr_nodes; i++) {
		mm_node_stat(s->mm, i, &st);
		frames += st.frames;
	}
	return div_round_up(cc->pages * PAGE_NS + cc->lines * LINE_NS +
			    frames * FRAME_NS * (1 + cc->clients),
			    NSEC_PER_MSEC);
}

/* {"max_ms": 5000}: how long nobody may be served for it; 1000 */
int cmd_check(struct server *s, const json_t *req, json_t *r, struct errmsg *e)
{
	const json_t *may = json_object_get(req, "max_ms");
	json_int_t max_ms = may ? json_integer_value(may) : CHECK_MS;
	struct check_cost cc = { 0 };
	uint64_t start, ms = check_estimate_ms(s, &cc);
	unsigned int i;
	int err;

	if (max_ms < 0 || (may && !json_is_integer(may)))
		return errmsg_set(e, -EINVAL, "\"max_ms\": milliseconds");
	json_object_set_new(r, "estimate_ms", json_u64(ms));
	if (ms > (uint64_t)max_ms)
		return errmsg_set(e, -EBUSY, "with %" PRIu64 " pages nobody "
				  "would be served for about %" PRIu64 " ms; "
				  "\"max_ms\" allows %" JSON_INTEGER_FORMAT,
				  cc.pages, ms, max_ms);
	start = now_ns();
	err = mm_check(s->mm, e);
	for (i = 0; i < s->nr_nodes && !err; i++)
		if (!node_check(s->node[i]))
			err = errmsg_set(e, -EUCLEAN, "node %s: its accounts "
					 "do not add up", s->node[i]->name);
	if (err)
		log_err("check: %s", e->text);
	json_object_set_new(r, "ms", json_real((double)(now_ns() - start) /
					       1e6));
	return err;
}

/* -- the dump ----------------------------------------------------------------------------- */

#define DUMP_PAGES	2000		/* in an answer unless told */
#define DUMP_MAX_PAGES	20000

struct dump {
	struct server	*s;
	json_t		*list;
};

static const char *const copy_states[] = { "none", "loading", "writing", "ready" };

static json_t *copies_json(struct server *s, const struct mm_page_info *pi)
{
	json_t *list = json_array();
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++) {
		json_t *o;

		if (!pi->copy[i].state || pi->copy[i].state > 3)
			continue;
		o = json_pack("{s:s, s:s}", "node", s->node[i]->name,
			      "state", copy_states[pi->copy[i].state]);
		if (s->node[i]->kind == NODE_MEM)
			json_object_update_new(o, json_pack("{s:I, s:o, s:I}",
				"frame", (json_int_t)pi->copy[i].frame,
				"word", json_hex(pi->copy[i].word),
				"pins", (json_int_t)pi->copy[i].pins));
		else
			json_object_set_new(o, "slot",
					    json_u64(pi->copy[i].slot));
		json_array_append_new(list, o);
	}
	return list;
}

static void list_page(const struct mm_page_info *pi, void *arg)
{
	struct dump *d = arg;

	json_array_append_new(d->list, json_pack(
		"{s:i, s:i, s:o, s:o, s:I, s:I, s:o}",
		"space", (int)pi->space, "group", (int)pi->group,
		"key", json_bytes_hex(pi->key, sizeof(pi->key)),
		"parent", pi->has_parent
			? json_bytes_hex(pi->parent, sizeof(pi->parent))
			: json_null(),
		"raw_bytes", (json_int_t)pi->raw_bytes,
		"pos", (json_int_t)pi->pos,
		"copies", copies_json(d->s, pi)));
}

static json_t *dump_nodes(struct server *s)
{
	json_t *list = json_array();
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++) {
		struct mm_node_stat st;

		mm_node_stat(s->mm, i, &st);
		json_array_append_new(list, json_pack(
			"{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
			"name", st.node->name,
			"kind", word_of(kind_words, st.kind),
			"capacity", (json_int_t)st.node->capacity,
			"used", (json_int_t)st.node->used,
			"bytes_pages", (json_int_t)st.bytes_pages,
			"pgbreach", (json_int_t)st.c.pgbreach,
			"frames", (json_int_t)st.frames,
			"frames_free", (json_int_t)st.frames_free,
			"frames_open", (json_int_t)st.frames_open,
			"frames_magazine", (json_int_t)st.frames_magazine,
			"frames_loading", (json_int_t)st.frames_loading,
			"frames_ready", (json_int_t)st.frames_ready,
			"frames_quarantine",
			(json_int_t)st.frames_quarantine));
	}
	return list;
}

/* "space:size:at" as the last answer gave it, or the beginning. */
static int dump_from(const json_t *v, struct mm_page_cursor *cur)
{
	int end = 0;

	memset(cur, 0, sizeof(*cur));
	if (!v)
		return 0;
	if (!json_is_string(v) ||
	    sscanf(json_string_value(v), "%" SCNu32 ":%" SCNu64 ":%" SCNu64 "%n",
		   &cur->space, &cur->size, &cur->at, &end) != 3 ||
	    json_string_value(v)[end] || !cur->size)
		return -EINVAL;
	return 0;
}

/*
 * {"max": 500, "from": "..."}: so many pages, from where the last answer said
 * "next"; without one these were the last.
 */
int cmd_dump(struct server *s, const json_t *req, json_t *r, struct errmsg *e)
{
	const json_t *max = json_object_get(req, "max");
	json_int_t most = max ? json_integer_value(max) : DUMP_PAGES;
	struct dump d = { .s = s };
	struct mm_page_cursor cur;
	char next[72];
	int more;

	if ((max && !json_is_integer(max)) || most < 1 || most > DUMP_MAX_PAGES)
		return errmsg_set(e, -EINVAL, "\"max\": 1 to %d pages",
				  DUMP_MAX_PAGES);
	if (dump_from(json_object_get(req, "from"), &cur))
		return errmsg_set(e, -EINVAL, "\"from\": what the last answer "
				  "called \"next\"");
	d.list = json_array();
	more = mm_walk_pages(s->mm, &cur, (uint64_t)most, list_page, &d);
	json_object_set_new(r, "epoch", json_hex(s->epoch));
	json_object_set_new(r, "nodes", dump_nodes(s));
	json_object_set_new(r, "pages", d.list);
	if (more < 0)
		return errmsg_set(e, more, "the space is gone or has grown: "
				  "start over, without \"from\"");
	if (more) {
		snprintf(next, sizeof(next), "%" PRIu32 ":%" PRIu64 ":%" PRIu64,
			 cur.space, cur.size, cur.at);
		json_object_set_new(r, "next", json_string(next));
	}
	return 0;
}
