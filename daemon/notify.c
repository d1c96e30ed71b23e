/* SPDX-License-Identifier: Apache-2.0 */
/* Words for who started us; see notify.h. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/notify.h"
#include "ipc/base/fd.h"

socklen_t notify_address(struct sockaddr_un *sa, const char *path)
{
	size_t len = path ? strlen(path) : 0;

	if (len < 2 || len >= sizeof(sa->sun_path) ||
	    (path[0] != '/' && path[0] != '@'))
		return 0;
	*sa = (struct sockaddr_un){ .sun_family = AF_UNIX };
	memcpy(sa->sun_path, path, len);
	if (path[0] == '@')
		sa->sun_path[0] = '\0';		/* abstract: its length counts */
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len +
			   (path[0] == '/'));
}

bool notify_open(struct notify *n)
{
	*n = (struct notify)NOTIFY_INIT;
	n->to_len = notify_address(&n->to, getenv("NOTIFY_SOCKET"));
	if (n->to_len)
		n->sock = socket(AF_UNIX,
				 SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return n->sock >= 0;
}

void notify_close(struct notify *n)
{
	close_fd(&n->sock);
}

int notify_say(const struct notify *n, const char *text)
{
	if (n->sock < 0)
		return 0;
	if (sendto(n->sock, text, strlen(text), MSG_NOSIGNAL,
		   (const struct sockaddr *)&n->to, n->to_len) < 0)
		return -errno;
	return 0;
}
