/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a configuration. What is accepted must survive being printed and
 * read again; what is refused must say where.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/server/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct config c, again;
	struct errmsg e = { "" };
	char *text = NULL;
	size_t len = 0;
	FILE *f;

	if (config_parse("fuzz.json", (const char *)data, size, &c, &e)) {
		if (strncmp(e.text, "fuzz.json:", 10))
			abort();
		return 0;
	}
	f = open_memstream(&text, &len);
	if (!f || config_print(&c, f) || fclose(f))
		abort();
	if (config_parse("printed", text, len, &again, &e)) {
		fprintf(stderr, "%s\n%s\n", e.text, text);
		abort();
	}
	free(text);
	config_resolve(&c, UINT64_C(1) << 36, UINT64_C(1) << 35, &e);
	return 0;
}
