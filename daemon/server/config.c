/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the configuration. Each object is a table of keys: where the value
 * goes, how it is read and what it may be. So an unknown key is one that is not
 * in the table, and the sentence about a bad value can always say what would
 * have been right.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>
#include <kvmm/kvmm.h>

#include "daemon/log.h"
#include "daemon/node/node.h"
#include "daemon/server/config.h"
#include "daemon/server/config_words.h"
#include "ipc/base/clock.h"

#define MAX_DEPTH	6
#define MIB		(UINT64_C(1) << 20)
#define GIB		(UINT64_C(1) << 30)
#define TIB		(UINT64_C(1) << 40)

/**
 * struct parse - where we are
 * @path:	steps from the root to the value being looked at
 */
struct parse {
	const char	*name;
	const char	*text;
	size_t		len;
	struct errmsg	*e;
	struct config	*c;
	struct json_step path[MAX_DEPTH];
	unsigned int	depth;
};

/**
 * struct key - one key of an object
 * @set:	reads @v into @obj + @off
 * @may:	what is allowed, in words
 * @lo, @hi:	bounds of numbers, sizes and durations; @hi of a string: bytes
 *		of its place
 * @sub:	keys of an object, or of an array's elements
 * @words:	names of an enum
 */
struct key {
	const char	*name;
	int		(*set)(struct parse *p, const struct key *k, json_t *v,
			       void *obj);
	const char	*may;
	size_t		off;
	uint64_t	lo, hi;
	const struct key *sub;
	const struct word *words;
};

/* -- sentences ----------------------------------------------------------------- */

static void path_text(const struct parse *p, char *buf, size_t len)
{
	size_t n = 0;
	unsigned int i;

	buf[0] = '\0';
	for (i = 0; i < p->depth && n < len; i++) {
		const struct json_step *st = &p->path[i];
		int m = st->key ? snprintf(buf + n, len - n, "%s%.40s",
					   n ? "." : "", st->key)
				: snprintf(buf + n, len - n, "[%zu]", st->ix);

		n += m > 0 ? (size_t)m : 0;
	}
}

/* "kvmmd.json:12: nodes[0].size: what is wrong" */
static int fail(struct parse *p, const char *fmt, ...) __printf(2, 3);
static int fail(struct parse *p, const char *fmt, ...)
{
	char path[160], what[160];
	va_list ap;

	path_text(p, path, sizeof(path));
	va_start(ap, fmt);
	vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	return errmsg_set(p->e, -EINVAL, "%.64s:%u: %s%s%s", p->name,
			  json_line_of(p->text, p->len, p->path, p->depth),
			  path, path[0] ? ": " : "", what);
}

/* The value as it stands in the file, cut to a readable length. */
static int fail_value(struct parse *p, const struct key *k, json_t *v)
{
	char *s = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
	int err = fail(p, "%.40s%s is not allowed; %s",
		       s ? s : "this value", s && strlen(s) > 40 ? "..." : "",
		       k->may);

	free(s);
	return err;
}

static void step_key(struct parse *p, const char *key)
{
	p->path[p->depth++] = (struct json_step){ .key = key };
}

static void step_ix(struct parse *p, size_t ix)
{
	p->path[p->depth++] = (struct json_step){ .ix = ix };
}

/* -- values -------------------------------------------------------------------- */

static void *place(void *obj, const struct key *k)
{
	return (char *)obj + k->off;
}

static int set_u32(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	json_int_t n = json_integer_value(v);

	if (!json_is_integer(v) || n < (json_int_t)k->lo ||
	    n > (json_int_t)k->hi)
		return fail_value(p, k, v);
	*(uint32_t *)place(obj, k) = (uint32_t)n;
	return 0;
}

static int set_bool(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	if (!json_is_boolean(v))
		return fail_value(p, k, v);
	*(bool *)place(obj, k) = json_is_true(v);
	return 0;
}

static int set_word(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	if (word_find(k->words, json_string_value(v), place(obj, k)))
		return fail_value(p, k, v);
	return 0;
}

/* A string of 1 to @hi - 1 bytes without a NUL in it. */
static int set_string(struct parse *p, const struct key *k, json_t *v,
		      void *obj)
{
	size_t len = json_string_length(v);

	if (!json_is_string(v) || !len || len >= k->hi ||
	    strlen(json_string_value(v)) != len)
		return fail_value(p, k, v);
	memcpy(place(obj, k), json_string_value(v), len + 1);
	return 0;
}

#define NAME_CHARS	"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" \
			"0123456789._-"

/* Names go into status lines, descriptors of systemd and hashes: keep plain. */
static int set_name(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	const char *s = json_string_value(v);

	if (!s || strspn(s, NAME_CHARS) != json_string_length(v))
		return fail_value(p, k, v);
	return set_string(p, k, v, obj);
}

static int set_path(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	const char *s = json_string_value(v);

	if (!s || s[0] != '/')
		return fail_value(p, k, v);
	return set_string(p, k, v, obj);
}

/* Whether the file is there and may be trusted is mm_policy_load()'s to say. */
static int set_policy(struct parse *p, const struct key *k, json_t *v,
		      void *obj)
{
	const char *s = json_string_value(v);

	if (!s || (s[0] != '/' && strcmp(s, "lru")))
		return fail_value(p, k, v);
	return set_string(p, k, v, obj);
}

static int set_file_mode(struct parse *p, const struct key *k, json_t *v,
			 void *obj)
{
	const char *s = json_string_value(v);
	unsigned long m;
	char *end;

	if (!s || !*s || strspn(s, "01234567") != json_string_length(v) ||
	    strlen(s) > 4)
		return fail_value(p, k, v);
	m = strtoul(s, &end, 8);
	if (m > 0777)
		return fail_value(p, k, v);
	*(uint32_t *)place(obj, k) = (uint32_t)m;
	return 0;
}

static int get_bytes(json_t *v, uint64_t *ret)
{
	if (json_is_integer(v) && json_integer_value(v) >= 0) {
		*ret = (uint64_t)json_integer_value(v);
		return 0;
	}
	return json_is_string(v) ? text_bytes(json_string_value(v), ret)
				 : -EINVAL;
}

static int set_bytes(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	uint64_t n;

	if (get_bytes(v, &n) || n < k->lo || n > k->hi)
		return fail_value(p, k, v);
	*(uint64_t *)place(obj, k) = n;
	return 0;
}

static int set_ns(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	uint64_t n;

	if (!json_is_string(v) || text_ns(json_string_value(v), &n) ||
	    n < k->lo || n > k->hi)
		return fail_value(p, k, v);
	*(uint64_t *)place(obj, k) = n;
	return 0;
}

static int set_size(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	struct config_node *n = obj;
	const char *s = json_string_value(v);
	size_t len = json_string_length(v);

	if (s && !strcmp(s, "auto")) {
		n->size_kind = CONFIG_AUTO;
		return 0;
	}
	if (s && len > 1 && len <= 3 && s[len - 1] == '%' &&
	    strspn(s, "0123456789") == len - 1) {
		n->size_kind = CONFIG_PERCENT;
		n->size = strtoul(s, NULL, 10);
		return n->size && n->size <= 90 ? 0 : fail_value(p, k, v);
	}
	n->size_kind = CONFIG_BYTES;
	return set_bytes(p, k, v, obj);
}

static int set_object(struct parse *p, const struct key *k, json_t *v,
		      void *obj);
static int set_sockets(struct parse *p, const struct key *k, json_t *v,
		       void *obj);
static int set_nodes(struct parse *p, const struct key *k, json_t *v,
		     void *obj);

/* -- tables -------------------------------------------------------------------- */

#define NAME_WORDS	"a name of letters, digits, '.', '_' and '-'"

static const struct key socket_keys[] = {
	{ "path", set_path, "an absolute path of at most 107 bytes",
	  offsetof(struct config_socket, path), .hi = CONFIG_SUN_PATH },
	{ "name", set_name, NAME_WORDS " of at most 63 bytes",
	  offsetof(struct config_socket, name), .hi = CONFIG_NAME },
	{ "tenant", set_name, NAME_WORDS " of at most 63 bytes",
	  offsetof(struct config_socket, tenant), .hi = CONFIG_NAME },
	{ "rights", set_word, "\"rw\" or \"ro\"",
	  offsetof(struct config_socket, rights), .words = right_words },
	{ "mode", set_word, "\"on\", \"observe\", \"bypass\" or \"readonly\"",
	  offsetof(struct config_socket, mode), .words = mode_words },
	{ "file_mode", set_file_mode, "octal digits as \"0660\", up to \"0777\"",
	  offsetof(struct config_socket, file_mode) },
	{ NULL }
};

static const struct key node_keys[] = {
	{ "name", set_name, NAME_WORDS " of at most 15 bytes",
	  offsetof(struct config_node, name), .hi = 16 },
	{ "kind", set_word, "\"host\" or \"nvme\"",
	  offsetof(struct config_node, kind), .words = kind_words },
	{ "size", set_size, "1MiB to 256TiB, \"1%\" to \"90%\" of MemTotal, "
	  "or \"auto\"",
	  offsetof(struct config_node, size), .lo = MIB, .hi = 256 * TIB },
	{ "size_max", set_bytes, "1MiB to 256TiB",
	  offsetof(struct config_node, size_max), .lo = MIB, .hi = 256 * TIB },
	{ "below", set_name, "the name of an nvme node",
	  offsetof(struct config_node, below), .hi = 16 },
	{ "path", set_path, "an absolute path of a file or block device",
	  offsetof(struct config_node, path), .hi = CONFIG_FILE_PATH },
	{ "engine", set_word, "\"auto\", \"io_uring\" or \"threads\"",
	  offsetof(struct config_node, engine), .words = engine_words },
	{ "depth", set_u32, "1 to 1024 I/Os",
	  offsetof(struct config_node, depth), 1, 1024 },
	{ "io_timeout", set_ns, "1ms to 60s, as \"500ms\"",
	  offsetof(struct config_node, io_timeout_ns),
	  NSEC_PER_MSEC, 60 * NSEC_PER_SEC },
	{ "extent", set_bytes, "64KiB to 1GiB",
	  offsetof(struct config_node, extent_bytes), 1 << 16, GIB },
	{ "numa", set_u32, "the number of a NUMA node, 0 to 1023",
	  offsetof(struct config_node, numa), 0, 1023 },
	{ "hugepages", set_bool, "true or false",
	  offsetof(struct config_node, hugepages) },
	{ NULL }
};

static const struct key admin_keys[] = {
	{ "socket", set_path, "an absolute path of at most 107 bytes",
	  offsetof(struct config, admin_socket), .hi = CONFIG_SUN_PATH },
	{ NULL }
};

static const struct key limit_keys[] = {
	{ "max_clients", set_u32, "1 to 256",
	  offsetof(struct config, max_clients), 1, KVMM_MAX_CLIENTS },
	{ "max_spaces", set_u32, "1 to 256",
	  offsetof(struct config, max_spaces), 1, KVMM_MAX_SPACES },
	{ "max_requests", set_u32, "1 to 1048576 in flight a socket",
	  offsetof(struct config, max_requests), 1, 1 << 20 },
	{ "pin_limit_pct", set_u32, "1 to 100, per cent of a node's frames",
	  offsetof(struct config, pin_limit_pct), 1, 100 },
	{ NULL }
};

static const struct key timeout_keys[] = {
	{ "fetch", set_ns, "1ms to 1h, as \"2s\"",
	  offsetof(struct config, fetch_ns),
	  NSEC_PER_MSEC, 3600 * NSEC_PER_SEC },
	{ "direct_reclaim", set_ns, "0ms to 1s, as \"5ms\"",
	  offsetof(struct config, direct_reclaim_ns), 0, NSEC_PER_SEC },
	{ "shrink_ack", set_ns, "1ms to 1h, as \"5s\"",
	  offsetof(struct config, shrink_ack_ns),
	  NSEC_PER_MSEC, 3600 * NSEC_PER_SEC },
	{ NULL }
};

static const struct key root_keys[] = {
	{ "state_dir", set_path, "an absolute path of a folder",
	  offsetof(struct config, state_dir), .hi = CONFIG_FILE_PATH },
	{ "admin", set_object, "an object with \"socket\"", .sub = admin_keys },
	{ "sockets", set_sockets, "an array of 1 to 64 objects",
	  .sub = socket_keys },
	{ "nodes", set_nodes, "an array of 1 to 16 objects", .sub = node_keys },
	{ "policy", set_policy, "\"lru\" or the absolute path of a plug-in",
	  offsetof(struct config, policy), .hi = CONFIG_FILE_PATH },
	{ "limits", set_object, "an object", .sub = limit_keys },
	{ "timeouts", set_object, "an object", .sub = timeout_keys },
	{ "spin_us", set_u32, "0 to 1000 microseconds",
	  offsetof(struct config, spin_us), 0, 1000 },
	{ "log_level", set_word,
	  "\"err\", \"warn\", \"notice\", \"info\" or \"debug\"",
	  offsetof(struct config, log_level), .words = level_words },
	{ NULL }
};

/* -- objects ------------------------------------------------------------------- */

static int key_unknown(struct parse *p, const struct key *keys)
{
	char list[128] = "";
	size_t n = 0;

	for (; keys->name && n < sizeof(list); keys++)
		n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%s",
				      n ? ", " : "", keys->name);
	return fail(p, "unknown key; allowed: %s", list);
}

static int parse_object(struct parse *p, const struct key *keys, json_t *v,
			void *obj)
{
	const char *name;
	json_t *member;

	json_object_foreach(v, name, member) {
		const struct key *k = keys;
		int err;

		while (k->name && strcmp(k->name, name))
			k++;
		step_key(p, name);
		err = k->name ? k->set(p, k, member, obj)
			      : key_unknown(p, keys);
		if (err)
			return err;
		p->depth--;
	}
	return 0;
}

static int set_object(struct parse *p, const struct key *k, json_t *v,
		      void *obj)
{
	if (!json_is_object(v))
		return fail_value(p, k, v);
	return parse_object(p, k->sub, v, obj);
}

static int need(struct parse *p, const char *value, const char *key,
		const struct key *keys)
{
	while (strcmp(keys->name, key))
		keys++;
	return *value ? 0 : fail(p, "\"%s\" is missing; %s", key, keys->may);
}

/* kvmm.sock in some folder is called "kvmm" unless it says otherwise. */
static void socket_name(struct config_socket *s)
{
	const char *base = strrchr(s->path, '/') + 1;
	size_t n = strcspn(base, ".");
	size_t i;

	n = min(n, sizeof(s->name) - 1);
	for (i = 0; i < n; i++)
		s->name[i] = strchr(NAME_CHARS, base[i]) ? base[i] : '_';
	s->name[n] = '\0';
	if (!n)
		strcpy(s->name, "socket");
}

static int judge_socket(struct parse *p, unsigned int ix)
{
	struct config_socket *s = &p->c->socket[ix];
	unsigned int i;
	int err;

	err = need(p, s->path, "path", socket_keys);
	if (err)
		return err;
	if (!s->name[0])
		socket_name(s);
	for (i = 0; i < ix; i++) {
		if (!strcmp(s->path, p->c->socket[i].path))
			return fail(p, "sockets[%u] has the same path", i);
		if (!strcmp(s->name, p->c->socket[i].name))
			return fail(p, "sockets[%u] is called \"%.40s\", too; "
				    "give one another \"name\"", i, s->name);
	}
	return 0;
}

static void socket_defaults(struct config_socket *s)
{
	*s = (struct config_socket){
		.tenant		= "default",
		.rights		= KVMM_RW,
		.mode		= KVMM_MODE_OBSERVE,
		.file_mode	= 0660,
	};
}

static int set_sockets(struct parse *p, const struct key *k, json_t *v,
		       void *obj)
{
	struct config *c = obj;
	size_t i, n = json_array_size(v);

	if (!json_is_array(v) || !n || n > CONFIG_MAX_SOCKETS)
		return fail_value(p, k, v);
	c->nr_sockets = (uint32_t)n;
	for (i = 0; i < n; i++) {
		json_t *el = json_array_get(v, i);
		int err;

		socket_defaults(&c->socket[i]);
		step_ix(p, i);
		err = json_is_object(el) ? parse_object(p, k->sub, el,
							&c->socket[i])
					 : fail_value(p, k, el);
		if (!err)
			err = judge_socket(p, (unsigned int)i);
		if (err)
			return err;
		p->depth--;
	}
	return 0;
}

/* What a key of the other kind would mean is nothing: say so. */
static int judge_kind(struct parse *p, const struct config_node *n)
{
	bool nvme = n->kind == KVMM_NODE_NVME;

	if (!nvme && (n->path[0] || n->depth || n->io_timeout_ns ||
		      n->engine != NVME_ENGINE_AUTO))
		return fail(p, "path, engine, depth and io_timeout are for "
			    "nodes of kind \"nvme\"");
	if (nvme && (n->below[0] || n->extent_bytes || n->hugepages ||
		     n->numa >= 0))
		return fail(p, "below, extent, numa and hugepages are for "
			    "nodes of kind \"host\"");
	if (nvme && n->size_kind != CONFIG_BYTES)
		return fail(p, "\"size\" of an nvme node: bytes, 1MiB to "
			    "256TiB");
	if (n->size_max && n->size_kind == CONFIG_BYTES &&
	    n->size_max < n->size)
		return fail(p, "\"size_max\" is less than \"size\"");
	return nvme ? need(p, n->path, "path", node_keys) : 0;
}

static int judge_node(struct parse *p, unsigned int ix)
{
	struct config_node *n = &p->c->node[ix];
	unsigned int i;
	int err;

	err = need(p, n->name, "name", node_keys);
	if (!err)
		err = need(p, n->kind ? "set" : "", "kind", node_keys);
	if (!err)
		err = need(p, n->size || n->size_kind != CONFIG_BYTES ? "set"
								      : "",
			   "size", node_keys);
	if (!err)
		err = judge_kind(p, n);
	for (i = 0; i < ix && !err; i++) {
		if (!strcmp(n->name, p->c->node[i].name))
			err = fail(p, "nodes[%u] is called \"%s\", too", i,
				   n->name);
		else if (n->path[0] && !strcmp(n->path, p->c->node[i].path))
			err = fail(p, "nodes[%u] has the same path", i);
	}
	return err;
}

/* Names of nodes may come before the node that has them. */
static int link_nodes(struct parse *p)
{
	struct config *c = p->c;
	unsigned int i, j, nr_host = 0;

	for (i = 0; i < c->nr_nodes; i++) {
		struct config_node *n = &c->node[i];

		nr_host += n->kind == KVMM_NODE_HOST;
		n->below_ix = KVMM_NODE_NONE;
		if (!n->below[0])
			continue;
		for (j = 0; j < c->nr_nodes; j++)
			if (c->node[j].kind == KVMM_NODE_NVME &&
			    !strcmp(n->below, c->node[j].name))
				n->below_ix = j;
		if (n->below_ix == KVMM_NODE_NONE) {
			step_ix(p, i);
			step_key(p, "below");
			return fail(p, "there is no nvme node \"%s\"",
				    n->below);
		}
	}
	return nr_host ? 0 : fail(p, "at least one node of kind \"host\" is "
				  "needed");
}

static int set_nodes(struct parse *p, const struct key *k, json_t *v,
		     void *obj)
{
	struct config *c = obj;
	size_t i, n = json_array_size(v);

	if (!json_is_array(v) || !n || n > KVMM_MAX_NODES)
		return fail_value(p, k, v);
	c->nr_nodes = (uint32_t)n;
	for (i = 0; i < n; i++) {
		json_t *el = json_array_get(v, i);
		int err;

		c->node[i] = (struct config_node){ .numa = -1,
						   .below_ix = KVMM_NODE_NONE };
		step_ix(p, i);
		err = json_is_object(el) ? parse_object(p, k->sub, el,
							&c->node[i])
					 : fail_value(p, k, el);
		if (!err)
			err = judge_node(p, (unsigned int)i);
		if (err)
			return err;
		p->depth--;
	}
	return link_nodes(p);
}

/* -- the whole ----------------------------------------------------------------- */

void config_defaults(struct config *c)
{
	memset(c, 0, sizeof(*c));
	strcpy(c->state_dir, "/var/lib/kvmm");
	strcpy(c->admin_socket, "/run/kvmm/admin.sock");
	strcpy(c->policy, "lru");
	c->nr_sockets = 1;
	socket_defaults(&c->socket[0]);
	strcpy(c->socket[0].path, "/run/kvmm/default.sock");
	socket_name(&c->socket[0]);
	c->nr_nodes = 1;
	c->node[0] = (struct config_node){
		.name		= "dram0",
		.kind		= KVMM_NODE_HOST,
		.size_kind	= CONFIG_AUTO,
		.numa		= -1,
		.below_ix	= KVMM_NODE_NONE,
		.hugepages	= true,		/* used if free, never reserved */
	};
	c->max_clients = KVMM_MAX_CLIENTS;
	c->max_spaces = KVMM_MAX_SPACES;
	c->max_requests = 64 * 1024;
	c->pin_limit_pct = 90;
	c->fetch_ns = 2 * NSEC_PER_SEC;
	c->direct_reclaim_ns = 5 * NSEC_PER_MSEC;
	c->shrink_ack_ns = 5 * NSEC_PER_SEC;
	c->spin_us = 50;
	c->log_level = LOG_LVL_NOTICE;
}

static int judge_root(struct parse *p)
{
	struct config *c = p->c;
	unsigned int i;

	for (i = 0; i < c->nr_sockets; i++)
		if (!strcmp(c->socket[i].path, c->admin_socket))
			return fail(p, "sockets[%u] has the path of the admin "
				    "socket", i);
	return 0;
}

int config_parse(const char *name, const char *text, size_t len,
		 struct config *c, struct errmsg *e)
{
	struct parse p = { .name = name, .text = text, .len = len, .e = e };
	const char *base = strrchr(name, '/');
	struct config *draft;
	json_error_t je;
	json_t *root;
	int err;

	if (base)
		p.name = base + 1;
	root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &je);
	if (!root)
		return errmsg_set(e, -EINVAL, "%.64s:%d: %s", p.name,
				  je.line > 0 ? je.line : 1, je.text);
	draft = malloc(sizeof(*draft));
	if (!draft) {
		json_decref(root);
		return errmsg_set(e, -ENOMEM, "out of memory");
	}
	config_defaults(draft);
	p.c = draft;
	err = json_is_object(root) ? parse_object(&p, root_keys, root, draft)
				   : fail(&p, "an object is expected");
	if (!err)
		err = judge_root(&p);
	if (!err)
		*c = *draft;
	free(draft);
	json_decref(root);
	return err;
}

static int read_all(int fd, char *buf, size_t max, size_t *len)
{
	*len = 0;
	while (*len < max) {
		ssize_t n = read(fd, buf + *len, max - *len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (!n)
			return 0;
		*len += (size_t)n;
	}
	return -E2BIG;
}

int config_load(const char *path, struct config *c, struct errmsg *e)
{
	size_t len = 0;
	char *buf;
	int fd, err;

	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		err = -errno;
		return errmsg_set(e, err, "%.160s: %s", path, strerror(-err));
	}
	buf = malloc(CONFIG_MAX_BYTES);
	err = buf ? read_all(fd, buf, CONFIG_MAX_BYTES, &len) : -ENOMEM;
	close(fd);
	if (err == -E2BIG)
		errmsg_set(e, err, "%.160s: larger than 1 MiB", path);
	else if (err)
		errmsg_set(e, err, "%.160s: %s", path, strerror(-err));
	else
		err = config_parse(path, buf, len, c, e);
	free(buf);
	return err;
}
