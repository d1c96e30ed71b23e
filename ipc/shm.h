/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory: memfds with the seals that a restart can live with.
 *
 * A memfd is made by the daemon: mode 0400, close-on-exec, sealed against
 * shrink, grow and further seals. Never F_SEAL_WRITE or F_SEAL_FUTURE_WRITE: a
 * restarted daemon could neither map such memory writable nor punch it. What a
 * client must not write it gets as a description reopened O_RDONLY.
 */
#ifndef KVMM_IPC_SHM_H
#define KVMM_IPC_SHM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define SHM_HUGE_BYTES	(UINT64_C(2) << 20)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE	25		/* Linux 6.1 */
#endif

/**
 * struct shm - a memfd and its mapping in this process
 * @fd:		-1 when none
 * @ro_fd:	the same file opened O_RDONLY, or -1; daemon side only
 * @addr:	NULL when not mapped
 */
struct shm {
	int	fd;
	int	ro_fd;
	size_t	bytes;
	void	*addr;
};

#define SHM_INIT { .fd = -1, .ro_fd = -1 }

/**
 * shm_create() - make, size, seal and map a memfd
 * @name:	shown in /proc/PID/maps
 * @bytes:	final size; memory is taken only where it is touched
 * @want_ro:	also open it O_RDONLY for passing to clients
 * Return: 0, -ENOMEM, -EMFILE, other -errno; nothing is left behind on error.
 */
int shm_create(struct shm *s, const char *name, size_t bytes, int want_ro);

/**
 * shm_map_fd() - map a received memfd
 * @fd:		taken over, also on error (then closed)
 * @bytes:	what the peer says; refused when the file is smaller
 * @writable:	PROT_WRITE, too
 *
 * Checks that the file is a memfd sealed against shrinking, so that no access
 * can SIGBUS. The mapping is MADV_DONTFORK and MADV_DONTDUMP.
 * Return: 0, -EBADF, -EPROTO (not sealed, too small), -ENOMEM.
 */
int shm_map_fd(struct shm *s, int fd, size_t bytes, int writable);

/**
 * shm_adopt() - take over what shm_create() made, perhaps in another process
 * @fd:		read-write; taken over, also on error (then closed)
 * @bytes:	what it must be long, exactly
 * @want_ro:	as for shm_create()
 *
 * Return: 0, -EPROTO (not sealed as such a file is, or of another size), -ENOMEM,
 * other -errno.
 */
int shm_adopt(struct shm *s, int fd, size_t bytes, int want_ro);

/**
 * shm_huge() - give a part of a file's memory huge pages, if there are any
 * @fd:		of a shm; stays the caller's
 * @off, @bytes: whole huge pages (2 MiB) within it are tried
 *
 * What was sparse takes memory from then on. Whoever has it mapped keeps what he
 * sees, and gets one TLB entry for 512: mappings made here are aligned for it.
 * Blocks for about a millisecond a piece: for a worker, not for a loop.
 * Return: bytes that have huge pages now, or -errno when none has.
 */
int64_t shm_huge(int fd, uint64_t off, uint64_t bytes);

/** shm_fini() - unmap and close; fine on SHM_INIT and twice */
void shm_fini(struct shm *s);

#endif
