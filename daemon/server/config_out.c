/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration's words, what it means on a machine, and writing it. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include <jansson.h>
#include <kvmm/kvmm.h>

#include "daemon/log.h"
#include "daemon/node/node.h"
#include "daemon/server/config.h"
#include "daemon/server/config_words.h"

#define MIB		(UINT64_C(1) << 20)
#define GIB		(UINT64_C(1) << 30)

const struct word right_words[] = {
	{ "rw", KVMM_RW }, { "ro", KVMM_RO }, { NULL, 0 }
};

const struct word mode_words[] = {
	{ "on", KVMM_MODE_ON }, { "observe", KVMM_MODE_OBSERVE },
	{ "bypass", KVMM_MODE_BYPASS }, { "readonly", KVMM_MODE_READONLY },
	{ NULL, 0 }
};

const struct word kind_words[] = {
	{ "host", KVMM_NODE_HOST }, { "nvme", KVMM_NODE_NVME }, { NULL, 0 }
};

const struct word engine_words[] = {
	{ "auto", NVME_ENGINE_AUTO }, { "io_uring", NVME_ENGINE_URING },
	{ "threads", NVME_ENGINE_THREADS }, { NULL, 0 }
};

const struct word admission_words[] = {
	{ "second-touch", 1 }, { "all", 0 }, { NULL, 0 }
};

const struct word discard_words[] = {
	{ "off", 0 }, { "segments", 1 }, { NULL, 0 }
};

const struct word rebuild_words[] = {
	{ "never", 0 }, { "damaged", 1 }, { NULL, 0 }
};

const struct word level_words[] = {
	{ "err", LOG_LVL_ERR }, { "warn", LOG_LVL_WARN },
	{ "notice", LOG_LVL_NOTICE }, { "info", LOG_LVL_INFO },
	{ "debug", LOG_LVL_DEBUG }, { NULL, 0 }
};

const char *word_of(const struct word *w, uint32_t value)
{
	for (; w->name; w++)
		if (w->value == value)
			return w->name;
	return "?";
}

int word_find(const struct word *w, const char *name, uint32_t *value)
{
	for (; name && w->name; w++) {
		if (!strcmp(w->name, name)) {
			*value = w->value;
			return 0;
		}
	}
	return -EINVAL;
}

/* -- the machine --------------------------------------------------------------- */

/*
 * A quarter of the machine, but leave what the engines and the rest need. On a
 * machine too small for that rule take a sixteenth: a guess, so that a small
 * machine runs at all.
 */
static uint64_t size_auto(uint64_t total, uint64_t available)
{
	uint64_t keep = max(16 * GIB, total / 10);
	uint64_t room = available > keep ? available - keep : 0;

	return max(min(total / 4, room), max(total / 16, 64 * MIB));
}

int config_resolve(struct config *c, uint64_t mem_total,
		   uint64_t mem_available, struct errmsg *e)
{
	unsigned int i;

	for (i = 0; i < c->nr_nodes; i++) {
		struct config_node *n = &c->node[i];

		switch (n->size_kind) {
		case CONFIG_AUTO:
			n->bytes = size_auto(mem_total, mem_available);
			break;
		case CONFIG_PERCENT:
			n->bytes = mem_total / 100 * n->size;
			break;
		case CONFIG_BYTES:
			n->bytes = n->size;
			break;
		}
		n->bytes = round_down(n->bytes, NODE_ALIGN);
		if (!n->size_max)
			n->size_max = n->kind == KVMM_NODE_HOST
					? max(mem_total, n->bytes) : n->bytes;
		if (n->bytes < MIB || n->size_max < n->bytes)
			return errmsg_set(e, -EINVAL,
					  "node %s: size_max (%" PRIu64
					  " bytes) is less than size (%" PRIu64
					  ")", n->name, n->size_max, n->bytes);
	}
	return 0;
}

/* -- writing it ---------------------------------------------------------------- */

static json_t *bytes_json(uint64_t v)
{
	char buf[32];

	return json_string(text_of_bytes(v, buf, sizeof(buf)));
}

static json_t *ns_json(uint64_t v)
{
	char buf[32];

	return json_string(text_of_ns(v, buf, sizeof(buf)));
}

static json_t *socket_json(const struct config_socket *s)
{
	char mode[8];

	snprintf(mode, sizeof(mode), "0%03o", s->file_mode & 0777);
	return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s}",
			 "name", s->name, "path", s->path, "tenant", s->tenant,
			 "rights", word_of(right_words, s->rights),
			 "mode", word_of(mode_words, s->mode),
			 "file_mode", mode);
}

static json_t *size_json(const struct config_node *n)
{
	char buf[8];

	if (n->size_kind == CONFIG_AUTO)
		return json_string("auto");
	if (n->size_kind == CONFIG_BYTES)
		return bytes_json(n->size);
	snprintf(buf, sizeof(buf), "%u%%", (unsigned int)n->size);
	return json_string(buf);
}

static json_t *node_json(const struct config_node *n)
{
	json_t *o = json_pack("{s:s, s:s, s:o}", "name", n->name,
			      "kind", word_of(kind_words, n->kind),
			      "size", size_json(n));

	if (n->size_max)
		json_object_set_new(o, "size_max", bytes_json(n->size_max));
	if (n->below[0])
		json_object_set_new(o, "below", json_string(n->below));
	if (n->extent_bytes)
		json_object_set_new(o, "extent", bytes_json(n->extent_bytes));
	if (n->gang)
		json_object_set_new(o, "gang", json_integer(n->gang));
	if (n->numa >= 0)
		json_object_set_new(o, "numa", json_integer(n->numa));
	if (n->kind == KVMM_NODE_HOST) {
		json_object_set_new(o, "hugepages", json_boolean(n->hugepages));
		return o;
	}
	json_object_set_new(o, "path", json_string(n->path));
	json_object_set_new(o, "engine",
			    json_string(word_of(engine_words, n->engine)));
	json_object_set_new(o, "free_floor_pct",
			    json_integer(n->free_floor_pct));
	json_object_set_new(o, "admission",
			    json_string(word_of(admission_words,
						n->second_touch)));
	json_object_set_new(o, "writes_per_day",
			    json_real(n->day_permille / 1000.0));
	json_object_set_new(o, "scrub",
			    json_integer((json_int_t)n->scrub_bytes_s));
	json_object_set_new(o, "discard",
			    json_string(word_of(discard_words, n->discard)));
	json_object_set_new(o, "sqpoll", json_boolean(n->sqpoll));
	json_object_set_new(o, "rebuild",
			    json_string(word_of(rebuild_words, n->rebuild)));
	if (n->depth)
		json_object_set_new(o, "depth", json_integer(n->depth));
	if (n->io_timeout_ns)
		json_object_set_new(o, "io_timeout",
				    ns_json(n->io_timeout_ns));
	return o;
}

int config_print(const struct config *c, FILE *out)
{
	json_t *sockets = json_array(), *nodes = json_array(), *root;
	unsigned int i;
	int err;

	for (i = 0; i < c->nr_sockets; i++)
		json_array_append_new(sockets, socket_json(&c->socket[i]));
	for (i = 0; i < c->nr_nodes; i++)
		json_array_append_new(nodes, node_json(&c->node[i]));
	root = json_pack("{s:s, s:{s:s}, s:o, s:o, s:s,"
			 " s:{s:i, s:i, s:i, s:i, s:i}, s:{s:o, s:o, s:o, s:o},"
			 " s:i, s:s}",
			 "state_dir", c->state_dir,
			 "admin", "socket", c->admin_socket,
			 "sockets", sockets, "nodes", nodes,
			 "policy", c->policy,
			 "limits", "max_clients", (int)c->max_clients,
			 "max_spaces", (int)c->max_spaces,
			 "max_requests", (int)c->max_requests,
			 "pin_limit_pct", (int)c->pin_limit_pct,
			 "host_floor_pct", (int)c->host_floor_pct,
			 "timeouts", "fetch", ns_json(c->fetch_ns),
			 "direct_reclaim", ns_json(c->direct_reclaim_ns),
			 "shrink_ack", ns_json(c->shrink_ack_ns),
			 "crash_window", ns_json(c->crash_window_ns),
			 "spin_us", (int)c->spin_us,
			 "log_level", word_of(level_words, c->log_level));
	if (!root)
		return -ENOMEM;
	err = json_dumpf(root, out, JSON_INDENT(2) | JSON_REAL_PRECISION(7)) || fputc('\n', out) == EOF;
	json_decref(root);
	return err ? -EIO : 0;
}
