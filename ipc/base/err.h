/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors are negative errno. Where a person has to act on one, a sentence goes
 * along: it names the thing, what was wrong with it and what is allowed.
 */
#ifndef KVMM_BASE_ERR_H
#define KVMM_BASE_ERR_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

#include "ipc/base/bits.h"

/**
 * struct errmsg - the last sentence about an error
 * @text:	always terminated; cut where a sentence does not fit
 */
struct errmsg {
	char	text[256];
};

/**
 * errmsg_set() - write the sentence and return the error
 * @msg:	where to; may be NULL
 * @err:	negative errno, returned as it is
 * @fmt:	as printf(); without a newline
 *
 * So that `return errmsg_set(msg, -EINVAL, "...")` is one line. Keeps errno.
 */
int errmsg_set(struct errmsg *msg, int err, const char *fmt, ...) __printf(3, 4);

static inline void errmsg_clear(struct errmsg *msg)
{
	if (msg)
		msg->text[0] = '\0';
}

/* What a system call returned, as value or negative errno. */
static inline long ret_errno(long ret)
{
	return ret < 0 ? -errno : ret;
}

/* Is @err one after which a socket's other end must be taken for gone? */
static inline bool err_is_disconnect(int err)
{
	return err == -EPIPE || err == -ECONNRESET || err == -ECONNABORTED ||
	       err == -ENOTCONN || err == -ESHUTDOWN || err == -ECONNREFUSED;
}

/* Is @err "not now", as opposed to "not"? */
static inline bool err_is_again(int err)
{
	return err == -EAGAIN || err == -EINTR;
}

#endif
