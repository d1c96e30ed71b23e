/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an administrator may ask. Each command fills the members of its reply;
 * field names are the words of the design and of kvmmctl's tables. 64-bit
 * values that are not counts (epochs, frame words) are hexadecimal strings,
 * since JSON numbers are doubles to some.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "daemon/node/fault.h"
#include "daemon/server/admin_json.h"
#include "daemon/server/config_words.h"
#include "daemon/server/server.h"
#include "ipc/base/clock.h"

json_t *json_hex(uint64_t v)
{
	char buf[24];

	snprintf(buf, sizeof(buf), "0x%" PRIx64, v);
	return json_string(buf);
}

json_t *json_bytes_hex(const uint8_t *p, size_t n)
{
	char buf[65];
	size_t i;

	n = min(n, (size_t)32);
	for (i = 0; i < n; i++)
		snprintf(buf + 2 * i, 3, "%02x", p[i]);
	return json_string(buf);
}

/* -- one space of a request ------------------------------------------------------------ */

/**
 * struct space_pick - find a space by its number or the begin of its id
 * @what:	NULL: all
 */
struct space_pick {
	const char	*what;
	uint32_t	ix;
	unsigned int	n;
};

static bool id_begins(const uint8_t id[32], const char *hex)
{
	char buf[65];
	int i;

	for (i = 0; i < 32; i++)
		snprintf(buf + 2 * i, 3, "%02x", id[i]);
	return strlen(hex) >= 4 && !strncmp(buf, hex, strlen(hex));
}

static bool space_is(const struct mm_space_info *si, const char *what)
{
	char *end;
	unsigned long ix;

	if (!what)
		return true;
	ix = strtoul(what, &end, 10);
	return (!*end && end != what && ix == si->ix) || id_begins(si->id, what);
}

static void pick_one(const struct mm_space_info *si, void *arg)
{
	struct space_pick *p = arg;

	if (!space_is(si, p->what))
		return;
	p->ix = si->ix;
	p->n++;
}

static const char *space_arg(const json_t *req, char *buf, size_t len)
{
	const json_t *v = json_object_get(req, "space");

	if (json_is_integer(v)) {
		snprintf(buf, len, "%" JSON_INTEGER_FORMAT,
			 json_integer_value(v));
		return buf;
	}
	return json_string_value(v);
}

/* -- commands ----------------------------------------------------------------------------- */

static int cmd_ping(struct server *s, const json_t *req, json_t *r,
		    struct errmsg *e)
{
	json_object_set_new(r, "version", json_string(KVMM_VERSION_STRING));
	json_object_set_new(r, "epoch", json_hex(s->epoch));
	json_object_set_new(r, "state", json_string(server_state(s)));
	json_object_set_new(r, "started", json_hex(s->started_ns));
	json_object_set_new(r, "reexec_error", json_string(s->reexec_why));
	return 0;
}

/* So that the answer is out before. A guess; it serves meanwhile. */
#define REEXEC_DELAY_NS	(20 * NSEC_PER_MSEC)

/* Another "started" of a ping says that it is done, "reexec_error" that not. */
static int cmd_reexec(struct server *s, const json_t *req, json_t *r,
		      struct errmsg *e)
{
	log_notice("a re-exec is wanted by an administrator");
	s->reexec_why[0] = '\0';
	s->reexec_ns = deadline_in(REEXEC_DELAY_NS);
	return cmd_ping(s, req, r, e);
}

struct mode_change {
	struct mm	*mm;
	const char	*what;
	enum kvmm_mode	mode;
	json_t		*list;
};

static void change_mode(const struct mm_space_info *si, void *arg)
{
	struct mode_change *mc = arg;

	if (!space_is(si, mc->what))
		return;
	mm_space_set_mode(mm_space_get(mc->mm, si->ix), mc->mode);
	json_array_append_new(mc->list, json_pack("{s:i, s:s, s:s}",
			"space", (int)si->ix,
			"was", word_of(mode_words, si->mode),
			"mode", word_of(mode_words, mc->mode)));
	log_notice("space %u: mode %s -> %s by an administrator", si->ix,
		   word_of(mode_words, si->mode),
		   word_of(mode_words, mc->mode));
}

static int cmd_mode(struct server *s, const json_t *req, json_t *r,
		    struct errmsg *e)
{
	struct mode_change mc = { .mm = s->mm };
	char buf[32];
	uint32_t mode;

	mc.what = space_arg(req, buf, sizeof(buf));
	if (!mc.what)
		return errmsg_set(e, -EINVAL, "\"space\": a number, the begin "
				  "of an id, or \"all\"");
	if (word_find(mode_words, json_string_value(json_object_get(req,
							"mode")), &mode))
		return errmsg_set(e, -EINVAL, "\"mode\": on, observe, bypass or "
				  "readonly");
	mc.mode = mode;
	if (strcmp(mc.what, "all")) {
		struct space_pick p = { .what = mc.what };

		mm_for_each_space(s->mm, pick_one, &p);
		if (p.n != 1)
			return errmsg_set(e, -ENOENT, "%s space is \"%.64s\"",
					  p.n ? "more than one" : "no",
					  mc.what);
	} else {
		mc.what = NULL;
	}
	mc.list = json_array();
	mm_for_each_space(s->mm, change_mode, &mc);
	json_object_set_new(r, "spaces", mc.list);
	return 0;
}

#ifdef KVMM_TEST_BUILD
/* {"spec": "nvme0:read:eio;..."}, or {"node": "nvme0", "spec": "read:eio"} */
static int cmd_fault(struct server *s, const json_t *req, json_t *r,
		     struct errmsg *e)
{
	const char *spec = json_string_value(json_object_get(req, "spec"));
	const char *node = json_string_value(json_object_get(req, "node"));
	char buf[1024];
	int err;

	if (node && spec && *spec) {
		if ((size_t)snprintf(buf, sizeof(buf), "%s:%s", node, spec) >=
		    sizeof(buf))
			return errmsg_set(e, -EINVAL, "too long");
		spec = buf;
	}
	json_object_set_new(r, "hits", json_integer((json_int_t)fault_hits()));
	err = fault_set(spec, e);
	return err;
}
#endif

static const struct {
	const char	*name;
	int		(*fn)(struct server *s, const json_t *req,
			      json_t *reply, struct errmsg *e);
} commands[] = {
	{ "ping",	cmd_ping },
	{ "status",	cmd_status },
	{ "space",	cmd_space },
	{ "client",	cmd_client },
	{ "pins",	cmd_pins },
	{ "mode",	cmd_mode },
	{ "check",	cmd_check },
	{ "dump",	cmd_dump },
	{ "reexec",	cmd_reexec },
#ifdef KVMM_TEST_BUILD
	{ "fault",	cmd_fault },
#endif
};

bool admin_space_is(const struct mm_space_info *si, const char *what)
{
	return space_is(si, what);
}

const char *admin_space_arg(const json_t *req, char *buf, size_t len)
{
	return space_arg(req, buf, len);
}

json_t *admin_execute(struct server *s, const json_t *req)
{
	const char *cmd = json_string_value(json_object_get(req, "cmd"));
	struct errmsg e = { "" };
	json_t *r = json_object();
	unsigned int i;
	int err = -EOPNOTSUPP;

	if (!cmd)
		err = errmsg_set(&e, -EINVAL, "\"cmd\" is missing");
	for (i = 0; cmd && i < ARRAY_SIZE(commands); i++) {
		if (!strcmp(cmd, commands[i].name)) {
			err = commands[i].fn(s, req, r, &e);
			break;
		}
	}
	if (err == -EOPNOTSUPP && !e.text[0])
		errmsg_set(&e, err, "there is no command \"%.64s\"", cmd);
	json_object_set_new(r, "ok", json_boolean(!err));
	if (err) {
		json_object_set_new(r, "errno", json_integer(-err));
		json_object_set_new(r, "error", json_string(e.text[0] ? e.text :
							strerror(-err)));
	}
	return r;
}
