/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Policies: the built-in by name, plug-ins from files that only root can have
 * written, and the instance that each pool has.
 *
 * What is checked and what is used is one and the same file: it is opened once,
 * judged by fstat(2) of that descriptor, and loaded through it. The folders
 * above it count too, since who may rename in one of them may put another file
 * there; in a sticky folder nobody can rename what is root's.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/mm/mm_calls.h"
#include "daemon/mm/tier.h"
#include "ipc/base/fd.h"

#define POLICY_INST_MAX	(1u << 20)	/* bytes a pool; a guess at "too much" */

/* 0, or -EPERM with the sentence when somebody other than root may change it. */
static int trust_check(const char *path, const struct stat *st,
		       struct errmsg *e)
{
	if (st->st_uid != 0)
		return errmsg_set(e, -EPERM,
				  "policy: %s belongs to uid %u, it must be root's",
				  path, (unsigned int)st->st_uid);
	if ((st->st_mode & 022) &&
	    !(S_ISDIR(st->st_mode) && (st->st_mode & S_ISVTX)))
		return errmsg_set(e, -EPERM,
				  "policy: %s has mode %03o, only root may be able to write it",
				  path, (unsigned int)st->st_mode & 07777);
	return 0;
}

/* Every folder above @path, from the file's own up to the root. */
static int trust_check_parents(const char *path, struct errmsg *e)
{
	char dir[PATH_MAX];
	struct stat st;
	int err;

	snprintf(dir, sizeof(dir), "%s", path);
	do {
		char *slash = strrchr(dir, '/');

		slash[slash == dir] = '\0';
		if (lstat(dir, &st))
			return errmsg_set(e, -errno, "policy: %s: %s", dir,
					  strerror(errno));
		err = trust_check(dir, &st, e);
		if (err)
			return err;
	} while (dir[1]);
	return 0;
}

static int policy_judge(const char *path, const struct kvmm_policy_v0 *pol,
			struct errmsg *e)
{
	if (pol->abi != KVMM_POLICY_ABI)
		return errmsg_set(e, -EPROTO,
				  "policy: %s speaks ABI %u, this daemon %u",
				  path, pol->abi, KVMM_POLICY_ABI);
	if (pol->size != sizeof(*pol) ||
	    pol->page_bytes != sizeof(struct kvmm_policy_page))
		return errmsg_set(e, -EPROTO,
				  "policy: %s was built against another header (%u bytes, not %zu)",
				  path, pol->size, sizeof(*pol));
	if (!pol->name || !*pol->name || strlen(pol->name) > 31)
		return errmsg_set(e, -EINVAL,
				  "policy: %s has no name of 1 to 31 bytes",
				  path);
	if (pol->inst_bytes > POLICY_INST_MAX)
		return errmsg_set(e, -EINVAL,
				  "policy: %s wants %u bytes a pool, at most %u are allowed",
				  path, pol->inst_bytes, POLICY_INST_MAX);
	if (!pol->init || !pol->fini || !pol->add || !pol->touch ||
	    !pol->remove || !pol->select)
		return errmsg_set(e, -EINVAL,
				  "policy: %s leaves out one of its functions",
				  path);
	return 0;
}

/* The descriptor has been judged: load through it, not through the path. */
static int policy_open(const char *path, int fd,
		       const struct kvmm_policy_v0 **ret, struct errmsg *e)
{
	const struct kvmm_policy_v0 *pol;
	char self[32];
	void *dl;
	int err;

	snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	dl = dlopen(self, RTLD_NOW | RTLD_LOCAL);
	if (!dl)
		return errmsg_set(e, -ENOEXEC, "policy: %s cannot be loaded: %s",
				  path, dlerror());
	pol = dlsym(dl, "kvmm_policy_v0");
	if (!pol) {
		err = errmsg_set(e, -ENOEXEC,
				 "policy: %s exports no kvmm_policy_v0", path);
		goto err_close;
	}
	err = policy_judge(path, pol, e);
	if (err)
		goto err_close;
	*ret = pol;
	return 0;		/* stays loaded: pools hold pointers into it */

err_close:
	dlclose(dl);
	return err;
}

int mm_policy_load(const char *spec, const struct kvmm_policy_v0 **ret,
		   struct errmsg *e)
{
	char path[PATH_MAX];
	struct stat st;
	int fd, err;

	if (!strcmp(spec, kvmm_policy_v0.name)) {
		*ret = &kvmm_policy_v0;
		return 0;
	}
	if (spec[0] != '/')
		return errmsg_set(e, -EINVAL,
				  "policy: '%s' is neither '%s' nor an absolute path",
				  spec, kvmm_policy_v0.name);
	if (!realpath(spec, path))
		return errmsg_set(e, -errno, "policy: %s: %s", spec,
				  strerror(errno));
	fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return errmsg_set(e, -errno, "policy: %s: %s", path,
				  strerror(errno));
	if (fstat(fd, &st))
		err = errmsg_set(e, -errno, "policy: %s: %s", path,
				 strerror(errno));
	else if (!S_ISREG(st.st_mode))
		err = errmsg_set(e, -ENOEXEC, "policy: %s is not a file", path);
	else
		err = trust_check(path, &st, e);
	if (!err)
		err = trust_check_parents(path, e);
	if (!err)
		err = policy_open(path, fd, ret, e);
	close_fd(&fd);
	return err;
}

int pool_policy_init(struct mm_pool *p, struct errmsg *e)
{
	const struct kvmm_policy_v0 *pol = pool_policy(p);
	int err;

	p->policy = calloc(1, pol->inst_bytes ? pol->inst_bytes : 1);
	if (!p->policy)
		return errmsg_set(e, -ENOMEM, "no memory for policy %s",
				  pol->name);
	err = pol->init(p->policy);
	if (!err)
		return 0;
	free(p->policy);
	p->policy = NULL;
	return errmsg_set(e, err, "policy %s refused to start: %s", pol->name,
			  strerror(-err));
}

void pool_policy_fini(struct mm_pool *p)
{
	if (!p->policy)
		return;
	pool_policy(p)->fini(p->policy);
	free(p->policy);
	p->policy = NULL;
}

/* -- asking for victims ------------------------------------------------------- */

struct pool_select {
	struct kvmm_policy_select sel;
	struct mm_pool	*pool;
	pool_offer_fn	*fn;
	void		*arg;
};

static enum kvmm_policy_answer offer(struct kvmm_policy_select *sel,
				     struct kvmm_policy_page *pol)
{
	struct pool_select *ps = container_of(sel, struct pool_select, sel);
	struct copy *c = container_of(pol, struct copy, pol);

	return ps->fn(ps->pool, copy_page(c, ps->pool->nd), ps->arg);
}

uint32_t pool_select(struct mm_pool *p, uint32_t want, uint32_t max_scan,
		     pool_offer_fn *fn, void *arg)
{
	struct pool_select ps = {
		.sel = {
			.want		= want,
			.max_scan	= max_scan,
			.now_ns		= p->nd->mm->now_ns,
			.offer		= offer,
		},
		.pool	= p,
		.fn	= fn,
		.arg	= arg,
	};

	return pool_policy(p)->select(p->policy, &ps.sel);
}
