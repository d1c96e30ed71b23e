/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's configuration: one JSON object. Whatever it does not know or
 * does not allow is refused before anything is touched, with file, line, key
 * and what would be right. Absent keys have the defaults that
 * `kvmmd --defaults` prints.
 */
#ifndef KVMM_SERVER_CONFIG_H
#define KVMM_SERVER_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/abi.h"
#include "ipc/base/err.h"

#define CONFIG_PATH		"/etc/kvmm/kvmmd.json"
#define CONFIG_MAX_BYTES	(1u << 20)
#define CONFIG_MAX_SOCKETS	64
#define CONFIG_NAME		64	/* bytes of a name, NUL included */
#define CONFIG_SUN_PATH		108	/* of a socket's path */
#define CONFIG_FILE_PATH	1024

/* How a host node's size is given. */
enum config_size_kind {
	CONFIG_BYTES,
	CONFIG_PERCENT,		/* of MemTotal */
	CONFIG_AUTO,
};

/**
 * struct config_socket - a client socket; it decides tenant and rights
 * @name:	what systemd calls it (FileDescriptorName=)
 * @rights:	KVMM_RO or KVMM_RW
 * @mode:	enum kvmm_mode of the spaces it creates
 * @file_mode:	permission bits of the socket file
 */
struct config_socket {
	char		name[CONFIG_NAME];
	char		path[CONFIG_SUN_PATH];
	char		tenant[CONFIG_NAME];
	uint32_t	rights;
	uint32_t	mode;
	uint32_t	file_mode;
};

/**
 * struct config_node - a place with memory
 * @kind:	KVMM_NODE_HOST or KVMM_NODE_NVME
 * @bytes:	size; from @size_kind and @size once config_resolve() ran
 * @size_max:	tables are sized for it; 0: MemTotal, or @bytes on nvme
 * @below:	name of the node it demotes to, or ""
 * @below_ix:	its index, %KVMM_NODE_NONE
 * @path:	nvme: file or block device
 * @engine:	nvme: enum nvme_engine
 * @depth:	nvme: I/Os in the kernel's hands; 0: the node's default
 * @io_timeout_ns: nvme
 * @free_floor_pct: nvme: of its file system, to be left free; -1: not given
 * @second_touch: nvme: what was used once is not written to it
 * @day_permille: nvme: what may be written to it a day, thousandths of its size;
 *		0: no limit
 * @scrub_bytes_s: nvme: read at this rate to see what the medium has lost; 0: never
 * @discard:	nvme: the medium is told of segments that became empty
 * @sqpoll:	nvme: a thread of the kernel's takes I/O
 * @rebuild:	nvme: what is there and no store of ours is emptied, not refused
 * @extent_bytes: host; 0: chosen from the size
 * @gang:	host: parts of its frames, one a rank of an engine of that
 *		world; @bytes are of all of them. 0: no gang
 * @numa:	host; -1: none
 */
struct config_node {
	char		name[16];
	char		below[16];
	char		path[CONFIG_FILE_PATH];
	uint32_t	kind;
	uint32_t	below_ix;
	enum config_size_kind size_kind;
	uint64_t	size;
	uint64_t	bytes;
	uint64_t	size_max;
	uint64_t	extent_bytes;
	uint64_t	io_timeout_ns;
	uint32_t	engine;
	uint32_t	depth;
	uint32_t	second_touch;
	uint32_t	day_permille;
	uint64_t	scrub_bytes_s;
	uint32_t	discard;
	uint32_t	rebuild;
	uint32_t	gang;
	int32_t		numa;
	int32_t		free_floor_pct;
	bool		hugepages;
	bool		sqpoll;
};

/**
 * struct config - the whole
 * @crash_window_ns: within which ends without order count, see ladder.h
 */
struct config {
	char		state_dir[CONFIG_FILE_PATH];
	char		admin_socket[CONFIG_SUN_PATH];
	char		policy[CONFIG_FILE_PATH];	/* for mm_policy_load() */
	uint32_t	nr_sockets;
	uint32_t	nr_nodes;
	struct config_socket socket[CONFIG_MAX_SOCKETS];
	struct config_node node[KVMM_MAX_NODES];
	uint32_t	max_clients;
	uint32_t	max_spaces;
	uint32_t	max_requests;		/* in flight, a socket */
	uint32_t	pin_limit_pct;
	uint32_t	host_floor_pct;		/* of MemTotal, to be left available */
	uint64_t	fetch_ns;
	uint64_t	direct_reclaim_ns;
	uint64_t	shrink_ack_ns;
	uint64_t	crash_window_ns;
	uint32_t	spin_us;
	uint32_t	log_level;		/* enum log_level */
};

/** config_defaults() - what an empty configuration means */
void config_defaults(struct config *c);

/**
 * config_parse() - read and judge a configuration
 * @name:	of the file, for the sentence
 * @text:	@len bytes; need not be terminated
 * @c:		written on success only
 * Return: 0, -EINVAL (the sentence says where and what), -ENOMEM, -E2BIG.
 */
int config_parse(const char *name, const char *text, size_t len,
		 struct config *c, struct errmsg *e);

/** config_load() - the same for a file; also what open(2) and read(2) say */
int config_load(const char *path, struct config *c, struct errmsg *e);

/**
 * config_resolve() - turn sizes that depend on the machine into bytes
 * @mem_total, @mem_available: bytes, as in /proc/meminfo
 * Return: 0, or -EINVAL with a sentence.
 */
int config_resolve(struct config *c, uint64_t mem_total,
		   uint64_t mem_available, struct errmsg *e);

/** config_print() - write @c as JSON that config_parse() reads back as @c */
int config_print(const struct config *c, FILE *out);

/* -- text: config_text.c ----------------------------------------------------- */

/** text_bytes() - "256MiB", "1.5TiB", "4096"; -EINVAL, -ERANGE */
int text_bytes(const char *s, uint64_t *bytes);
/** text_ns() - "500ms", "2s", "50us", "10min"; -EINVAL, -ERANGE */
int text_ns(const char *s, uint64_t *ns);
/* The shortest exact form of each, into @buf of at least 32 bytes. */
const char *text_of_bytes(uint64_t bytes, char *buf, size_t len);
const char *text_of_ns(uint64_t ns, char *buf, size_t len);

/**
 * struct json_step - one step into a document
 * @key:	member of an object, or NULL
 * @ix:		element of an array, where @key is NULL
 */
struct json_step {
	const char	*key;
	size_t		ix;
};

/**
 * json_line_of() - the line on which a value stands
 *
 * Jansson keeps no positions. @text must have been accepted by it.
 * Return: line of the last step's key (or element), from 1; where a step is
 * missing, that of what it should be in.
 */
unsigned int json_line_of(const char *text, size_t len,
			  const struct json_step *path, unsigned int depth);

#endif
