/* SPDX-License-Identifier: Apache-2.0 */
/* Lists for administrators: spaces, clients, pins. */
#include <errno.h>
#include <string.h>

#include "daemon/server/admin_json.h"
#include "daemon/server/config_words.h"
#include "ipc/base/clock.h"

/*
 * Words of pins that one list looks at: nobody is served meanwhile. A guess:
 * some tens of milliseconds. Only words that exist count, so it is a hundred
 * clients that each have pinned all over 20 GiB in pages of 64 KiB.
 */
#define PIN_WORDS	(UINT64_C(32) << 20)

struct list_arg {
	struct server	*s;
	const char	*what;
	json_t		*list;
	uint64_t	n;
};

/* -- spaces ------------------------------------------------------------------------------- */

static const struct word rule_words[] = {
	{ "full", KVMM_FULL }, { "window", KVMM_WINDOW },
	{ "last", KVMM_LAST }, { "blob", KVMM_BLOB }, { NULL, 0 }
};

static json_t *classes_json(const struct desc *d)
{
	json_t *list = json_array();
	unsigned int i;

	for (i = 0; i < d->nclasses; i++)
		json_array_append_new(list, json_pack("{s:s, s:I, s:i}",
			"name", d->cls[i].name,
			"page_bytes", (json_int_t)d->cls[i].page_bytes,
			"segments", (int)d->cls[i].nsegs));
	return list;
}

static json_t *groups_json(const struct desc *d)
{
	json_t *list = json_array();
	unsigned int i;

	for (i = 0; i < d->ngroups; i++)
		json_array_append_new(list, json_pack("{s:i, s:s, s:i, s:i}",
			"class", (int)d->group[i].class_ix,
			"rule", word_of(rule_words, d->group[i].rule),
			"block_tokens", (int)d->group[i].block_tokens,
			"window_pages", (int)d->group[i].window_pages));
	return list;
}

static json_t *node_bytes_json(struct server *s, const uint64_t *bytes)
{
	json_t *o = json_object();
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++)
		json_object_set_new(o, s->node[i]->name, json_u64(bytes[i]));
	return o;
}

static void list_space(const struct mm_space_info *si, void *arg)
{
	struct list_arg *l = arg;
	const struct desc *d = si->desc;
	json_t *o;

	if (!admin_space_is(si, l->what))
		return;
	o = json_pack("{s:i, s:o, s:s, s:s, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
		      "space", (int)si->ix,
		      "id", json_bytes_hex(si->id, sizeof(si->id)),
		      "tenant", si->tenant,
		      "mode", word_of(mode_words, si->mode),
		      "clients", (int)si->clients,
		      "pages", (json_int_t)si->pages,
		      "index_lines", (json_int_t)si->index_lines,
		      "index_used", (json_int_t)si->index_used,
		      "metadata", (json_int_t)si->metadata_bytes,
		      "asked", (json_int_t)si->asked,
		      "ghost_asked", (json_int_t)si->ghost_asked,
		      "ghost_hits", (json_int_t)si->ghost_hits,
		      "ghost_pages", (json_int_t)si->ghost_pages);
	json_object_update_new(o, json_pack(
		      "{s:s, s:s, s:s, s:s, s:s, s:s, s:i, s:o, s:o, s:o}",
		      "model", d->model, "revision", d->revision,
		      "kv_dtype", d->kv_dtype,
		      "scale_format", d->scale_format,
		      "layout", d->layout, "abi_tag", d->abi_tag,
		      "world", (int)d->world,
		      "classes", classes_json(d), "groups", groups_json(d),
		      "bytes", node_bytes_json(l->s, si->bytes)));
	json_array_append_new(l->list, o);
	l->n++;
}

int cmd_space(struct server *s, const json_t *req, json_t *r,
	      struct errmsg *e)
{
	char buf[32];
	struct list_arg l = { .s = s, .list = json_array() };

	l.what = admin_space_arg(req, buf, sizeof(buf));
	mm_for_each_space(s->mm, list_space, &l);
	json_object_set_new(r, "spaces", l.list);
	if (l.what && !l.n)
		return errmsg_set(e, -ENOENT, "no space is \"%.64s\"", l.what);
	return 0;
}

/* -- clients ------------------------------------------------------------------------------ */

static const struct word engine_state_words[] = {
	{ "forming", ENGINE_FORMING }, { "alive", ENGINE_ALIVE },
	{ "dying", ENGINE_DYING }, { NULL, 0 }
};

static void list_client(struct mm_client *c, const struct mm_client_info *ci,
			void *arg)
{
	const struct session *ss = mm_client_arg(c);
	const struct ring *rg = &ss->ring;
	struct list_arg *l = arg;
	json_t *o;

	o = json_pack("{s:i, s:s, s:s, s:i, s:i, s:b, s:i, s:i, s:i, s:b, s:b}",
		      "client", (int)ss->no,
		      "name", ci->name, "tenant", ci->tenant,
		      "pid", (int)ci->pid, "uid", (int)ss->cred_uid,
		      "foreign", ss->foreign,
		      "engine", (int)ci->engine,
		      "rank", (int)ci->rank, "world", (int)ci->world,
		      "leader", !!(ci->flags & KVMM_LEADER),
		      "no_step", !!(ci->flags & KVMM_NO_STEP));
	json_object_update_new(o, json_pack(
		      "{s:s, s:s, s:s, s:I, s:I, s:I, s:b, s:b, s:b, s:I}",
		      "socket", ss->via->cfg->name,
		      "rights", word_of(right_words, ci->rights),
		      "state", word_of(engine_state_words, ci->state),
		      "step", (json_int_t)ci->step,
		      "open_frames", (json_int_t)ci->open_frames,
		      "pins", (json_int_t)ci->pins,
		      "pins_partial", ci->pins_partial,
		      "connected", ci->connected, "exited", ci->exited,
		      "since_ms", (json_int_t)((now_ns() - ss->since_ns) /
					       NSEC_PER_MSEC)));
	json_object_update_new(o, json_pack("{s:i, s:i, s:i, s:i, s:I, s:I}",
		      "spaces", (int)ss->nr_spaces, "windows", (int)ss->nr_wins,
		      "in_flight", (int)rg->ops,
		      "backlog", (int)rg->backlog_slots,
		      "submissions", (json_int_t)rg->submissions,
		      "completions", (json_int_t)rg->completions));
	json_array_append_new(l->list, o);
}

int cmd_client(struct server *s, const json_t *req, json_t *r,
	       struct errmsg *e)
{
	struct list_arg l = { .s = s, .list = json_array() };

	mm_for_each_client(s->mm, PIN_WORDS, list_client, &l);
	json_object_set_new(r, "clients", l.list);
	return 0;
}

/* -- pins --------------------------------------------------------------------------------- */

static void list_pin(const struct mm_pin_info *pi, void *arg)
{
	const struct session *ss = mm_client_arg(pi->client);
	struct list_arg *l = arg;
	uint64_t now = now_ns();
	struct pin_age age;
	json_t *o;

	session_pin_age(ss, pi->space, &age);
	o = json_pack("{s:i, s:s, s:s, s:i, s:i, s:i, s:s, s:I, s:I, s:b, s:b, s:i}",
		      "client", (int)ss->no, "name", pi->name,
		      "tenant", pi->tenant, "pid", (int)pi->pid,
		      "space", (int)pi->space, "class", (int)pi->cls,
		      "node", l->s->node[pi->node]->name,
		      "pins", (json_int_t)pi->pins,
		      "frames", (json_int_t)pi->frames,
		      "partial", pi->partial, "exited", pi->exited,
		      "requests", (int)age.requests);
	if (age.requests && age.oldest_ns <= now) {
		json_object_update_new(o, json_pack("{s:I, s:b, s:I, s:I}",
			"oldest_ms", (json_int_t)((now - age.oldest_ns) /
						  NSEC_PER_MSEC),
			"old", now - age.oldest_ns > PIN_OLD_NS,
			"oldest_request", (json_int_t)age.id,
			"oldest_session", (json_int_t)age.session));
	}
	json_array_append_new(l->list, o);
}

int cmd_pins(struct server *s, const json_t *req, json_t *r,
	     struct errmsg *e)
{
	struct list_arg l = { .s = s, .list = json_array() };

	mm_for_each_pin(s->mm, PIN_WORDS, list_pin, &l);
	json_object_set_new(r, "pins", l.list);
	return 0;
}
