/* SPDX-License-Identifier: Apache-2.0 */
/* Words of the configuration and of the admin protocol. */
#ifndef KVMM_SERVER_CONFIG_WORDS_H
#define KVMM_SERVER_CONFIG_WORDS_H

#include <stdint.h>

/* One name of an enum; a table ends with a NULL name. */
struct word {
	const char	*name;
	uint32_t	value;
};

extern const struct word right_words[];
extern const struct word mode_words[];
extern const struct word kind_words[];
extern const struct word engine_words[];
extern const struct word admission_words[];
extern const struct word rebuild_words[];
extern const struct word discard_words[];
extern const struct word level_words[];

/** word_of() - the name of @value; "?" for one that has none */
const char *word_of(const struct word *w, uint32_t value);

/** word_find() - the value of @name; -EINVAL */
int word_find(const struct word *w, const char *name, uint32_t *value);

#endif
