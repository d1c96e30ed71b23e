/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files that read the configuration: keys and what sets them. */
#ifndef KVMM_SERVER_CONFIG_KEY_H
#define KVMM_SERVER_CONFIG_KEY_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "daemon/server/config.h"
#include "daemon/server/config_words.h"

#define MAX_DEPTH	6

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

#define NAME_CHARS	"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" \
			"0123456789._-"

/* One step further down; parse.depth-- is the way back. */
void parse_key(struct parse *p, const char *key);
void parse_ix(struct parse *p, size_t ix);

/** key_fail() - -EINVAL with "file:line: path: ..." */
int key_fail(struct parse *p, const char *fmt, ...) __printf(2, 3);
/** key_refuse() - the same for a value: as it stands there, and what may */
int key_refuse(struct parse *p, const struct key *k, json_t *v);

/* Values; each checks against @k and refuses. */
int key_u32(struct parse *p, const struct key *k, json_t *v, void *obj);
/* A number with at most three decimals, kept as thousandths. */
int key_permille(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_bool(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_word(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_string(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_name(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_path(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_policy(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_file_mode(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_bytes(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_ns(struct parse *p, const struct key *k, json_t *v, void *obj);
int key_size(struct parse *p, const struct key *k, json_t *v, void *obj);

#endif
