/* SPDX-License-Identifier: Apache-2.0 */
/* A slot store alone, and fio beside it; see disk.h. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/bits.h"
#include "ipc/base/fd.h"
#include "ipc/shm.h"
#include "tests/bench/disk.h"

#define SYNC_FILE_BYTES	(8u << 20)

const struct disk_size disk_sizes[DISK_NR_SIZES] = {
	{ "64k",	64u << 10,	32 },
	{ "256k",	256u << 10,	16 },
	{ "2m",		2u << 20,	8 },
};

uint32_t disk_nr_ios(const struct disk_size *s)
{
	return 3 * s->depth;
}

/* ---- the node ------------------------------------------------------------------- */

void disk_turn(struct disk *d)
{
	struct epoll_event ev[2];

	work_poll(d->pool, 0);
	node_poll(d->n, 0);
	if (!work_sleep(d->pool, true))
		epoll_wait(d->epfd, ev, 2,
			   min(deadline_left_ms(node_next_deadline(d->n)),
			       100));
	work_sleep(d->pool, false);
}

static void watch(struct disk *d, int fd)
{
	struct epoll_event ev = { .events = EPOLLIN };

	if (epoll_ctl(d->epfd, EPOLL_CTL_ADD, fd, &ev) < 0)
		bench_die(d->b, "epoll", -errno);
}

/* Write-back has three quarters of a node's depth: that much is to be fio's. */
void disk_open(struct disk *d, enum node_dir dir, uint32_t depth,
	       const struct node_owner *owner)
{
	struct nvme_opts o = {
		.name		= "nvme0",
		.path		= d->path,
		.bytes		= d->bytes,
		.seg_bytes	= DISK_SEG_BYTES,
		.depth		= dir == NODE_WRITE ?
				  div_round_up(depth * 4, 3) : depth,
		.engine		= NVME_ENGINE_URING,
		.io_timeout_ns	= DISK_WAIT_NS,
		.queue_timeout_ns = DISK_WAIT_NS,
		.zero_bytes_s	= UINT64_C(1) << 40,
	};
	uint64_t end = deadline_in(DISK_WAIT_NS);
	int err;

	if (owner)
		unlink(d->path);	/* nothing is to be found in it */
	err = nvme_create(&o, d->pool, &d->n);
	if (err)
		bench_die(d->b, "making the node", err);
	if (owner)
		node_set_owner(d->n, owner);
	watch(d, node_fd(d->n));
	while ((d->n->state == NODE_STARTING ||
		d->n->stats.zeroed_bytes < d->n->capacity) &&
	       !deadline_past(end))
		disk_turn(d);
	if (d->n->state != NODE_ONLINE) {
		bench_say("%s", d->n->why);
		bench_die(d->b, "opening the store", -EIO);
	}
	d->segs_off = d->bytes - d->n->capacity;
}

void disk_close(struct disk *d)
{
	int err = node_destroy(d->n, deadline_in(DISK_WAIT_NS));

	d->n = NULL;
	if (err)
		bench_die(d->b, "ending the node", err);
}

/* ---- CPU ------------------------------------------------------------------------ */

/* What a task has used, if it is one of those; the kernel counts it in ns. */
static uint64_t task_ns(const char *tasks, const char *id, disk_is_fn *is)
{
	char path[300], name[64] = "";
	unsigned long long ns = 0;
	FILE *f;

	snprintf(path, sizeof(path), "%s/%.16s/comm", tasks, id);
	f = fopen(path, "re");
	if (!f)
		return 0;
	if (!fgets(name, sizeof(name), f))
		name[0] = '\0';
	fclose(f);
	name[strcspn(name, "\n")] = '\0';
	if (!is(name))
		return 0;
	snprintf(path, sizeof(path), "%s/%.16s/schedstat", tasks, id);
	f = fopen(path, "re");
	if (!f)
		return 0;
	if (fscanf(f, "%llu", &ns) != 1)
		ns = 0;
	fclose(f);
	return ns;
}

uint64_t disk_cpu_ns(const char *tasks, disk_is_fn *is)
{
	DIR *dir = opendir(tasks);
	struct dirent *de;
	uint64_t ns = 0;

	while (dir && (de = readdir(dir)))
		if (isdigit(de->d_name[0]))
			ns += task_ns(tasks, de->d_name, is);
	if (dir)
		closedir(dir);
	return ns;
}

/* kworker/1:2H-kblockd: of the high priority ones, which are the block layer's. */
static bool is_kblockd(const char *name)
{
	return !strncmp(name, "kworker/", 8) &&
	       name[8 + strcspn(name + 8, "-+H")] == 'H';
}

uint64_t disk_kernel_ns(void)
{
	return disk_cpu_ns("/proc", is_kblockd);
}

/* ---- fio -------------------------------------------------------------------------- */

static json_t *fio_run(struct disk *d, const char *args)
{
	char cmd[1400];
	json_error_t je;
	json_t *root;
	FILE *f;

	snprintf(cmd, sizeof(cmd),
		 "fio --output-format=json --ioengine=io_uring --direct=1 %s 2>/dev/null",
		 args);
	f = popen(cmd, "re");
	if (!f)
		bench_die(d->b, "fio", -errno);
	/* it may say something before its report */
	root = json_loadf(f, JSON_DISABLE_EOF_CHECK, &je);
	if (pclose(f) || !root) {
		bench_say("%s: %s", cmd, je.text);
		bench_die(d->b, "fio (Debian's package is called that)",
			  -ENOENT);
	}
	return root;
}

static double member(const json_t *o, const char *key)
{
	return json_number_value(json_object_get(o, key));
}

/* A job beside, on a file of its own: blocks that are on the medium when they end. */
static void beside(const struct disk *d, char *args, size_t len, uint64_t ns,
		   double syncs_s)
{
	size_t at = strlen(args);

	snprintf(args + at, len - at,
		 " --name=sync --filename='%s/sync' --size=%u --rw=write --bs=4k --iodepth=1 --sync=dsync --rate_iops=%.0f --time_based --runtime=%us",
		 d->dir, SYNC_FILE_BYTES, fmax(round(syncs_s), 1),
		 (unsigned int)(ns / NSEC_PER_SEC));
}

struct disk_share disk_fio(struct disk *d, const char *rw, uint32_t block_bytes,
			   uint32_t depth, uint64_t ns, double syncs_s)
{
	const json_t *jobs, *job, *side;
	struct disk_share sh = { .bytes_s = 0 };
	uint64_t t0 = now_ns(), kernel_ns;
	char args[800];
	json_t *root;
	double s;

	snprintf(args, sizeof(args),
		 "--name=b --filename='%s' --offset=%llu --size=%llu --rw=%s --bs=%u --iodepth=%u --iomem=mmapshared:/proc/%d/fd/%d --fixedbufs=1 --registerfiles=1 --time_based --runtime=%us",
		 d->path, (unsigned long long)d->segs_off,
		 (unsigned long long)d->n->capacity, rw, block_bytes, depth,
		 (int)getpid(), d->mem_fd,
		 (unsigned int)(ns / NSEC_PER_SEC));
	if (syncs_s > 0)
		beside(d, args, sizeof(args), ns, syncs_s);
	kernel_ns = disk_kernel_ns();
	root = fio_run(d, args);
	kernel_ns = disk_kernel_ns() - kernel_ns;
	jobs = json_object_get(root, "jobs");
	job = json_array_get(jobs, 0);
	side = json_object_get(job, strstr(rw, "read") ? "read" : "write");
	s = member(side, "runtime") / 1000;
	d->rest_ns = now_ns() - t0;
	d->rest_ns -= min(d->rest_ns, (uint64_t)(s * NSEC_PER_SEC));
	sh.bytes_s = member(side, "bw_bytes");
	sh.cpu_gb = ((member(job, "usr_cpu") + member(job, "sys_cpu")) / 100 *
		     s * 1e9 + (double)kernel_ns) / member(side, "io_bytes");
	if (syncs_s > 0)
		sh.syncs_s = member(json_object_get(json_array_get(jobs, 1),
						    "write"), "iops");
	json_decref(root);
	if (!(sh.bytes_s > 0) || (syncs_s > 0 && !(sh.syncs_s > 0)))
		bench_die(d->b, "fio moved nothing", -EIO);
	return sh;
}

void disk_rest(const struct disk *d)
{
	struct timespec ts = ns_to_timespec(d->rest_ns);

	nanosleep(&ts, NULL);
}

/* ---- both --------------------------------------------------------------------------- */

static void make_mem(struct disk *d)
{
	size_t most = 0, i;

	for (i = 0; i < DISK_NR_SIZES; i++)
		most = max(most, (size_t)disk_nr_ios(&disk_sizes[i]) *
				 disk_sizes[i].bytes);
	d->mem = MAP_FAILED;
	d->mem_bytes = most;
	d->mem_fd = memfd_create("kvmm-bench", MFD_CLOEXEC);
	if (d->mem_fd >= 0 && !ftruncate(d->mem_fd, (off_t)most) &&
	    shm_huge(d->mem_fd, 0, most) != (int64_t)most)
		bench_say("  not all buffers are in huge pages: one that others use may be quicker or slower");
	if (d->mem_fd >= 0)
		d->mem = mmap(NULL, most, PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_POPULATE, d->mem_fd, 0);
	if (d->mem == MAP_FAILED)
		bench_die(d->b, "memory", -errno);
	memset(d->mem, 0x5a, most);
}

void disk_init(struct disk *d, struct bench *b, uint64_t bytes)
{
	char args[500];
	int err;

	memset(d, 0, sizeof(*d));
	d->b = b;
	d->bytes = bytes;
	make_mem(d);
	err = td_tmpdir(NULL, "kvmm-disk", d->dir, sizeof(d->dir));
	if (err)
		bench_die(b, "a folder", err);
	snprintf(d->path, sizeof(d->path), "%s/node", d->dir);
	err = work_create(DISK_WORKERS, 1, &d->pool);
	if (err)
		bench_die(b, "a worker", err);
	d->epfd = epoll_create1(EPOLL_CLOEXEC);
	watch(d, work_fd(d->pool));
	snprintf(args, sizeof(args),
		 "--name=sync --filename='%s/sync' --size=%u --rw=write --bs=1m --end_fsync=1",
		 d->dir, SYNC_FILE_BYTES);
	json_decref(fio_run(d, args));
}

void disk_fini(struct disk *d)
{
	work_destroy(d->pool, deadline_in(DISK_WAIT_NS));
	close_fd(&d->epfd);
	munmap(d->mem, d->mem_bytes);
	close_fd(&d->mem_fd);
	td_rmtree(d->dir);
}
