/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/base/err.h"

#include <stdarg.h>
#include <stdio.h>

int errmsg_set(struct errmsg *msg, int err, const char *fmt, ...)
{
	int saved = errno;
	va_list ap;

	if (msg) {
		va_start(ap, fmt);
		if (vsnprintf(msg->text, sizeof(msg->text), fmt, ap) < 0)
			msg->text[0] = '\0';
		va_end(ap);
	}
	errno = saved;
	return err;
}
