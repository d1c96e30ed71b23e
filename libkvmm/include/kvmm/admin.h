/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Administration of a kvmmd: one JSON object out, one JSON object back, over
 * the Unix stream socket admin.sock (mode 0600), each ended by a newline.
 *
 * Request:  {"cmd": "status", ...}
 * Reply:    {"ok": true, ...} or {"ok": false, "errno": N, "error": "sentence"}
 *
 * Commands are listed in ipc/PROTOCOL.md and in kvmmctl(1).
 */
#ifndef KVMM_ADMIN_H
#define KVMM_ADMIN_H

#include <stdint.h>

#include <kvmm/kvmm.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVMM_ADMIN_SOCKET	"/run/kvmm/admin.sock"
#define KVMM_ADMIN_MAX_REQUEST	65536		/* bytes, newline included */
#define KVMM_ADMIN_MAX_REPLY	(64u << 20)

/**
 * kvmm_admin_call() - one request, one reply
 * @socket:	path; NULL = $KVMM_ADMIN_SOCKET, else %KVMM_ADMIN_SOCKET
 * @request:	JSON object, no newline in it
 * @reply:	JSON object, NUL-terminated, no newline; the caller frees it
 * @timeout_ms:	of the whole call
 *
 * Return: 0 whatever the reply says; -ENOTCONN (nobody listens), -EACCES,
 * -ETIMEDOUT, -EMSGSIZE, -EPROTO (the peer hung up), -ENOMEM.
 */
KVMM_API int kvmm_admin_call(const char *socket, const char *request,
			     char **reply, unsigned int timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
