/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading the configuration. Each object is a table of keys: where the value
 * goes, how it is read and what it may be. So an unknown key is one that is not
 * in the table, and the sentence about a bad value can always say what would
 * have been right.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>
#include <kvmm/kvmm.h>

#include "daemon/log.h"
#include "daemon/node/node.h"
#include "daemon/server/config_key.h"
#include "ipc/base/clock.h"

#define MIB		(UINT64_C(1) << 20)
#define GIB		(UINT64_C(1) << 30)
#define TIB		(UINT64_C(1) << 40)

#define FREE_FLOOR_PCT	10
#define DAY_PERMILLE	1000
#define NOT_GIVEN	UINT32_MAX
#define NO_BYTES	UINT64_MAX

/* A terabyte in 17 hours, some hundredth of what a drive can read. */
#define SCRUB_BYTES_S	(16 * MIB)

static int set_object(struct parse *p, const struct key *k, json_t *v,
		      void *obj);
static int set_sockets(struct parse *p, const struct key *k, json_t *v,
		       void *obj);
static int set_nodes(struct parse *p, const struct key *k, json_t *v,
		     void *obj);

/* -- tables -------------------------------------------------------------------- */

#define NAME_WORDS	"a name of letters, digits, '.', '_' and '-'"

static const struct key socket_keys[] = {
	{ "path", key_path, "an absolute path of at most 107 bytes",
	  offsetof(struct config_socket, path), .hi = CONFIG_SUN_PATH },
	{ "name", key_name, NAME_WORDS " of at most 63 bytes",
	  offsetof(struct config_socket, name), .hi = CONFIG_NAME },
	{ "tenant", key_name, NAME_WORDS " of at most 63 bytes",
	  offsetof(struct config_socket, tenant), .hi = CONFIG_NAME },
	{ "rights", key_word, "\"rw\" or \"ro\"",
	  offsetof(struct config_socket, rights), .words = right_words },
	{ "mode", key_word, "\"on\", \"observe\", \"bypass\" or \"readonly\"",
	  offsetof(struct config_socket, mode), .words = mode_words },
	{ "file_mode", key_file_mode, "octal digits as \"0660\", up to \"0777\"",
	  offsetof(struct config_socket, file_mode) },
	{ NULL }
};

static const struct key node_keys[] = {
	{ "name", key_name, NAME_WORDS " of at most 15 bytes",
	  offsetof(struct config_node, name), .hi = 16 },
	{ "kind", key_word, "\"host\" or \"nvme\"",
	  offsetof(struct config_node, kind), .words = kind_words },
	{ "size", key_size, "1MiB to 256TiB, \"1%\" to \"90%\" of MemTotal, "
	  "or \"auto\"",
	  offsetof(struct config_node, size), .lo = MIB, .hi = 256 * TIB },
	{ "size_max", key_bytes, "1MiB to 256TiB",
	  offsetof(struct config_node, size_max), .lo = MIB, .hi = 256 * TIB },
	{ "below", key_name, "the name of an nvme node",
	  offsetof(struct config_node, below), .hi = 16 },
	{ "path", key_path, "an absolute path of a file or block device",
	  offsetof(struct config_node, path), .hi = CONFIG_FILE_PATH },
	{ "engine", key_word, "\"auto\", \"io_uring\" or \"threads\"",
	  offsetof(struct config_node, engine), .words = engine_words },
	{ "depth", key_u32, "1 to 1024 I/Os",
	  offsetof(struct config_node, depth), 1, 1024 },
	{ "io_timeout", key_ns, "1ms to 60s, as \"500ms\"",
	  offsetof(struct config_node, io_timeout_ns),
	  NSEC_PER_MSEC, 60 * NSEC_PER_SEC },
	{ "free_floor_pct", key_u32,
	  "0 to 90, per cent of the file system, 0: no floor",
	  offsetof(struct config_node, free_floor_pct), 0, 90 },
	{ "admission", key_word, "\"second-touch\" or \"all\"",
	  offsetof(struct config_node, second_touch),
	  .words = admission_words },
	{ "writes_per_day", key_permille,
	  "0 to 1000 times its size, in thousandths, 0: no limit",
	  offsetof(struct config_node, day_permille), 0, 1000 * 1000 },
	{ "discard", key_word, "\"off\" or \"segments\"",
	  offsetof(struct config_node, discard), .words = discard_words },
	{ "scrub", key_bytes, "0, never, to 16GiB a second",
	  offsetof(struct config_node, scrub_bytes_s), 0, 16 * GIB },
	{ "sqpoll", key_bool, "true or false",
	  offsetof(struct config_node, sqpoll) },
	{ "rebuild", key_word, "\"never\" or \"damaged\"",
	  offsetof(struct config_node, rebuild), .words = rebuild_words },
	{ "extent", key_bytes, "64KiB to 1GiB",
	  offsetof(struct config_node, extent_bytes), 1 << 16, GIB },
	{ "gang", key_u32, "2 to 8, the world of the engines that it serves",
	  offsetof(struct config_node, gang), 2, KVMM_MAX_GANG },
	{ "numa", key_u32, "the number of a NUMA node, 0 to 1023",
	  offsetof(struct config_node, numa), 0, 1023 },
	{ "hugepages", key_bool, "true or false",
	  offsetof(struct config_node, hugepages) },
	{ NULL }
};

static const struct key admin_keys[] = {
	{ "socket", key_path, "an absolute path of at most 107 bytes",
	  offsetof(struct config, admin_socket), .hi = CONFIG_SUN_PATH },
	{ NULL }
};

static const struct key limit_keys[] = {
	{ "max_clients", key_u32, "1 to 256",
	  offsetof(struct config, max_clients), 1, KVMM_MAX_CLIENTS },
	{ "max_spaces", key_u32, "1 to 256",
	  offsetof(struct config, max_spaces), 1, KVMM_MAX_SPACES },
	{ "max_requests", key_u32, "1 to 1048576 in flight a socket",
	  offsetof(struct config, max_requests), 1, 1 << 20 },
	{ "pin_limit_pct", key_u32, "1 to 100, per cent of a node's frames",
	  offsetof(struct config, pin_limit_pct), 1, 100 },
	{ "host_floor_pct", key_u32,
	  "0 to 50, per cent of MemTotal, 0: no floor",
	  offsetof(struct config, host_floor_pct), 0, 50 },
	{ NULL }
};

static const struct key timeout_keys[] = {
	{ "fetch", key_ns, "1ms to 1h, as \"2s\"",
	  offsetof(struct config, fetch_ns),
	  NSEC_PER_MSEC, 3600 * NSEC_PER_SEC },
	{ "direct_reclaim", key_ns, "0ms to 1s, as \"5ms\"",
	  offsetof(struct config, direct_reclaim_ns), 0, NSEC_PER_SEC },
	{ "shrink_ack", key_ns, "1ms to 1h, as \"5s\"",
	  offsetof(struct config, shrink_ack_ns),
	  NSEC_PER_MSEC, 3600 * NSEC_PER_SEC },
	{ "crash_window", key_ns, "0ms to 24h, as \"10min\", 0: no end counts",
	  offsetof(struct config, crash_window_ns), 0,
	  86400 * NSEC_PER_SEC },
	{ NULL }
};

static const struct key root_keys[] = {
	{ "state_dir", key_path, "an absolute path of a folder",
	  offsetof(struct config, state_dir), .hi = CONFIG_FILE_PATH },
	{ "admin", set_object, "an object with \"socket\"", .sub = admin_keys },
	{ "sockets", set_sockets, "an array of 1 to 64 objects",
	  .sub = socket_keys },
	{ "nodes", set_nodes, "an array of 1 to 16 objects", .sub = node_keys },
	{ "policy", key_policy, "\"lru\" or the absolute path of a plug-in",
	  offsetof(struct config, policy), .hi = CONFIG_FILE_PATH },
	{ "limits", set_object, "an object", .sub = limit_keys },
	{ "timeouts", set_object, "an object", .sub = timeout_keys },
	{ "spin_us", key_u32, "0 to 1000 microseconds",
	  offsetof(struct config, spin_us), 0, 1000 },
	{ "log_level", key_word,
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
	return key_fail(p, "unknown key; allowed: %s", list);
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
		parse_key(p, name);
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
		return key_refuse(p, k, v);
	return parse_object(p, k->sub, v, obj);
}

static int need(struct parse *p, const char *value, const char *key,
		const struct key *keys)
{
	while (strcmp(keys->name, key))
		keys++;
	return *value ? 0 : key_fail(p, "\"%s\" is missing; %s", key, keys->may);
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
			return key_fail(p, "sockets[%u] has the same path", i);
		if (!strcmp(s->name, p->c->socket[i].name))
			return key_fail(p, "sockets[%u] is called \"%.40s\", too; "
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
		return key_refuse(p, k, v);
	c->nr_sockets = (uint32_t)n;
	for (i = 0; i < n; i++) {
		json_t *el = json_array_get(v, i);
		int err;

		socket_defaults(&c->socket[i]);
		parse_ix(p, i);
		err = json_is_object(el) ? parse_object(p, k->sub, el,
							&c->socket[i])
					 : key_refuse(p, k, el);
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
		      n->free_floor_pct >= 0 ||
		      n->second_touch != NOT_GIVEN ||
		      n->day_permille != NOT_GIVEN ||
		      n->discard || n->sqpoll || n->rebuild ||
		      n->scrub_bytes_s != NO_BYTES ||
		      n->engine != NVME_ENGINE_AUTO))
		return key_fail(p, "path, engine, depth, io_timeout, "
			    "free_floor_pct, admission, writes_per_day, "
			    "discard, scrub, sqpoll and rebuild are for nodes of "
			    "kind \"nvme\"");
	if (nvme && (n->below[0] || n->extent_bytes || n->hugepages ||
		     n->numa >= 0 || n->gang))
		return key_fail(p, "below, extent, gang, numa and hugepages are "
			    "for nodes of kind \"host\"");
	if (nvme && n->size_kind != CONFIG_BYTES)
		return key_fail(p, "\"size\" of an nvme node: bytes, 1MiB to "
			    "256TiB");
	if (n->size_max && n->size_kind == CONFIG_BYTES &&
	    n->size_max < n->size)
		return key_fail(p, "\"size_max\" is less than \"size\"");
	return nvme ? need(p, n->path, "path", node_keys) : 0;
}

static void node_defaults(struct config_node *n)
{
	bool nvme = n->kind == KVMM_NODE_NVME;

	if (nvme && n->free_floor_pct < 0)
		n->free_floor_pct = FREE_FLOOR_PCT;
	if (n->second_touch == NOT_GIVEN)
		n->second_touch = nvme;
	if (n->day_permille == NOT_GIVEN)
		n->day_permille = nvme ? DAY_PERMILLE : 0;
	if (n->scrub_bytes_s == NO_BYTES)
		n->scrub_bytes_s = nvme ? SCRUB_BYTES_S : 0;
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
	node_defaults(n);
	for (i = 0; i < ix && !err; i++) {
		if (!strcmp(n->name, p->c->node[i].name))
			err = key_fail(p, "nodes[%u] is called \"%s\", too", i,
				   n->name);
		else if (n->path[0] && !strcmp(n->path, p->c->node[i].path))
			err = key_fail(p, "nodes[%u] has the same path", i);
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
			parse_ix(p, i);
			parse_key(p, "below");
			return key_fail(p, "there is no nvme node \"%s\"",
				    n->below);
		}
	}
	return nr_host ? 0 : key_fail(p, "at least one node of kind \"host\" is "
				  "needed");
}

static int set_nodes(struct parse *p, const struct key *k, json_t *v,
		     void *obj)
{
	struct config *c = obj;
	size_t i, n = json_array_size(v);

	if (!json_is_array(v) || !n || n > KVMM_MAX_NODES)
		return key_refuse(p, k, v);
	c->nr_nodes = (uint32_t)n;
	for (i = 0; i < n; i++) {
		json_t *el = json_array_get(v, i);
		int err;

		c->node[i] = (struct config_node){
			.numa = -1, .free_floor_pct = -1,
			.second_touch = NOT_GIVEN, .day_permille = NOT_GIVEN,
			.below_ix = KVMM_NODE_NONE, .scrub_bytes_s = NO_BYTES,
		};
		parse_ix(p, i);
		err = json_is_object(el) ? parse_object(p, k->sub, el,
							&c->node[i])
					 : key_refuse(p, k, el);
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
		.free_floor_pct	= -1,
		.below_ix	= KVMM_NODE_NONE,
		.hugepages	= true,		/* used if free, never reserved */
	};
	c->max_clients = KVMM_MAX_CLIENTS;
	c->max_spaces = KVMM_MAX_SPACES;
	c->max_requests = 64 * 1024;
	c->pin_limit_pct = 90;
	c->host_floor_pct = 5;
	c->fetch_ns = 2 * NSEC_PER_SEC;
	c->direct_reclaim_ns = 5 * NSEC_PER_MSEC;
	c->shrink_ack_ns = 5 * NSEC_PER_SEC;
	c->crash_window_ns = 600 * NSEC_PER_SEC;
	c->spin_us = 50;
	c->log_level = LOG_LVL_NOTICE;
}

static int judge_root(struct parse *p)
{
	struct config *c = p->c;
	unsigned int i;

	for (i = 0; i < c->nr_sockets; i++)
		if (!strcmp(c->socket[i].path, c->admin_socket))
			return key_fail(p, "sockets[%u] has the path of the admin "
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
				   : key_fail(&p, "an object is expected");
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
