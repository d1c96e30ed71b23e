/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of the administration's commands. */
#ifndef KVMM_SERVER_ADMIN_JSON_H
#define KVMM_SERVER_ADMIN_JSON_H

#include <jansson.h>

#include "daemon/server/server.h"

json_t *json_hex(uint64_t v);				/* "0x..." */
json_t *json_bytes_hex(const uint8_t *p, size_t n);	/* at most 32 bytes */

static inline json_t *json_u64(uint64_t v)
{
	return json_integer((json_int_t)v);
}

/* Is @si the space that a request names (number or begin of its id)? */
bool admin_space_is(const struct mm_space_info *si, const char *what);

/* What a request names: NULL when nothing. @buf is for numbers. */
const char *admin_space_arg(const json_t *req, char *buf, size_t len);

/* Commands: fill @reply; 0, or -errno with the sentence. */
int cmd_status(struct server *s, const json_t *req, json_t *reply,
	       struct errmsg *e);
int cmd_space(struct server *s, const json_t *req, json_t *reply,
	      struct errmsg *e);
int cmd_client(struct server *s, const json_t *req, json_t *reply,
	       struct errmsg *e);
int cmd_pins(struct server *s, const json_t *req, json_t *reply,
	     struct errmsg *e);
int cmd_check(struct server *s, const json_t *req, json_t *reply,
	      struct errmsg *e);
int cmd_dump(struct server *s, const json_t *req, json_t *reply,
	     struct errmsg *e);

#endif
