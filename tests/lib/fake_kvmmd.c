/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/desc.h"
#include "tests/lib/fake_kvmmd.h"

#define EXTENT_BYTES	((size_t)FK_FPE * FK_STRIDE)

/* -- memory --------------------------------------------------------------------- */

static int ledger_make(struct fk *f)
{
	size_t sq = 4096;
	size_t cq = sq + LEDGER_SQ_ENTRIES * sizeof(struct ring_sqe);
	size_t req = cq + LEDGER_CQ_ENTRIES * sizeof(struct ring_cqe);
	size_t arena = req + LEDGER_REQ_SLOTS * sizeof(struct ledger_req);
	size_t agree = arena + LEDGER_ARENA_BYTES;
	size_t talk = agree + LEDGER_AGREE_ENTRIES * sizeof(struct ledger_agree);
	size_t frozen = talk + sizeof(struct ledger_talk);
	size_t bytes = frozen + LEDGER_FROZEN_SIZE;
	int err = shm_create(&f->ledger_shm, "fake-ledger", bytes, 1);

	if (err)
		return err;
	f->l = f->ledger_shm.addr;
	f->l->magic = KVMM_MAGIC_LEDGER;
	f->l->client = ++f->clients;
	f->l->size = sizeof(*f->l);
	f->l->sq_entries = LEDGER_SQ_ENTRIES;
	f->l->cq_entries = LEDGER_CQ_ENTRIES;
	f->l->sq_off = sq;
	f->l->cq_off = cq;
	f->l->req_off = req;
	f->l->req_slots = LEDGER_REQ_SLOTS;
	f->l->arena_off = arena;
	f->l->arena_bytes = LEDGER_ARENA_BYTES;
	f->l->agree_off = agree;
	f->l->talk_off = talk;
	f->l->frozen_off = frozen;
	f->l->bytes = bytes;
	f->l->engine_state = ENGINE_ALIVE;
	f->l->step_wanted = UINT64_MAX;
	f->sq_head = f->cq_tail = 0;
	f->arena_head = 0;
	return 0;
}

static int index_make(struct fk *f)
{
	int err = shm_create(&f->index_shm, "fake-index",
			     index_bytes(FK_LINES, FK_WORDS), 1);

	if (err)
		return err;
	f->ix = f->index_shm.addr;
	f->ix->magic = KVMM_MAGIC_INDEX;
	f->ix->size = sizeof(*f->ix);
	f->ix->epoch = 1;
	f->ix->nr_lines = FK_LINES;
	f->ix->nr_words = FK_WORDS;
	f->ix->seed[0] = 11;
	f->ix->seed[1] = f->epoch;
	return 0;
}

static int win_make(struct fk_win *w)
{
	size_t pins = 4096;
	size_t mag = pins + FK_FRAMES * 4;
	size_t bytes = round_up(mag + FK_MAG * 4, 4096);
	unsigned int i;
	int err;

	err = shm_create(&w->table, "fake-table", frame_table_bytes(FK_FRAMES),
			 1);
	if (!err)
		err = shm_create(&w->wl, "fake-window", bytes, 0);
	if (err)
		return err;
	w->t = w->table.addr;
	w->t->magic = KVMM_MAGIC_TABLE;
	w->t->size = sizeof(*w->t);
	w->t->stride = FK_STRIDE;
	w->t->max_frames = FK_FRAMES;
	w->t->frames_per_extent = FK_FPE;
	w->t->extent_bytes = EXTENT_BYTES;
	w->t->nr_limit = FK_FRAMES;
	w->w = w->wl.addr;
	w->w->magic = KVMM_MAGIC_WINDOW;
	w->w->size = sizeof(*w->w);
	w->w->max_frames = FK_FRAMES;
	w->w->mag_entries = FK_MAG;
	w->w->nr_extents = FK_EXTENTS;
	w->w->bitmap_off = sizeof(*w->w);
	w->w->pins_off = pins;
	w->w->mag_off = mag;
	w->w->bytes = bytes;
	w->mag_tail = 0;
	w->open = false;
	w->reserved = 0;
	for (i = 0; i < FK_EXTENTS; i++) {
		w->extent[i] = -1;
		w->up[i] = w->down[i] = 0;
	}
	return 0;
}

static int memory_make(struct fk *f)
{
	unsigned int i;
	int err;

	err = shm_create(&f->hdr_shm, "fake-header", sizeof(*f->hdr), 1);
	if (err)
		return err;
	f->hdr = f->hdr_shm.addr;
	f->hdr->magic = KVMM_MAGIC_HDR;
	f->hdr->size = sizeof(*f->hdr);
	f->hdr->abi = KVMM_ABI_VERSION;
	f->hdr->epoch = f->epoch;
	f->hdr->space[FK_SPACE].live = 1;
	f->hdr->space[FK_SPACE].index_epoch = 1;
	err = ledger_make(f);
	if (!err)
		err = index_make(f);
	for (i = 0; i < f->nr_classes && !err; i++)
		err = win_make(&f->win[i]);
	f->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	f->notify = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (!err && (f->bell < 0 || f->notify < 0))
		err = -errno;
	for (i = 0; i < f->nr_classes && !err; i++)
		fk_extent_up(f, i, 1);
	return err;
}

static void memory_free(struct fk *f)
{
	unsigned int i, j;

	shm_fini(&f->hdr_shm);
	shm_fini(&f->ledger_shm);
	shm_fini(&f->index_shm);
	for (i = 0; i < f->nr_classes; i++) {
		shm_fini(&f->win[i].table);
		shm_fini(&f->win[i].wl);
		for (j = 0; j < FK_EXTENTS; j++)
			close_fd(&f->win[i].extent[j]);
	}
	close_fd(&f->bell);
	close_fd(&f->notify);
}

/* -- set-up messages ------------------------------------------------------------- */

static void send_ok(struct fk *f, uint32_t seq)
{
	struct wire_ok m = {
		.h = { .type = WIRE_OK, .len = sizeof(m), .seq = seq },
	};

	sock_send(f->sock, &m.h, NULL, 0);
}

static void send_error(struct fk *f, uint32_t seq, int err, const char *text)
{
	struct wire_error m = {
		.h = { .type = WIRE_ERROR, .len = sizeof(m), .seq = seq },
		.err = err,
	};

	snprintf(m.sentence, sizeof(m.sentence), "%s", text);
	sock_send(f->sock, &m.h, NULL, 0);
}

static void do_hello(struct fk *f, uint32_t seq)
{
	_Alignas(16) uint8_t buf[sizeof(struct wire_welcome) +
				 2 * sizeof(struct wire_node)] = { 0 };
	struct wire_welcome *w = (void *)buf;
	const int fds[] = {
		f->hdr_shm.ro_fd, f->ledger_shm.fd, f->bell, f->notify,
	};

	w->h = (struct wire_hdr){
		.type = WIRE_WELCOME, .len = sizeof(buf), .seq = seq,
	};
	w->abi = KVMM_ABI_VERSION;
	w->epoch = f->epoch;
	strcpy(w->tenant, "fake");
	strcpy(w->version, "0.0.0");
	w->rights = f->rights;
	w->nr_nodes = 2;
	strcpy(w->node[0].name, "dram0");
	w->node[0].kind = KVMM_NODE_HOST;
	w->node[0].below = 1;
	w->node[0].gang = f->gang;
	strcpy(w->node[1].name, "nvme0");
	w->node[1].kind = KVMM_NODE_NVME;
	w->node[1].below = KVMM_NODE_NONE;
	f->hellos++;
	sock_send(f->sock, &w->h, fds, 4);
}

static void do_attach(struct fk *f, const struct wire_attach *a)
{
	struct wire_attached r = {
		.h = { .type = WIRE_ATTACHED, .len = sizeof(r),
		       .seq = a->h.seq },
		.space = FK_SPACE,
		.index_epoch = 1,
		.index_bytes = f->index_shm.bytes,
	};

	desc_space_id(a->desc, a->desc_len, "fake", r.id);
	f->attaches++;
	sock_send(f->sock, &r.h, &f->index_shm.ro_fd, 1);
}

static void do_win_open(struct fk *f, const struct wire_win_open *o)
{
	struct fk_win *w = &f->win[o->cls];
	struct wire_window r = {
		.h = { .type = WIRE_WINDOW, .len = sizeof(r), .seq = o->h.seq },
		.win = o->cls,
		.table_bytes = w->table.bytes,
		.ledger_bytes = w->wl.bytes,
		.flags = f->win_flags,
		.part_off = f->part_off,
	};
	int fds[2] = { w->table.ro_fd, w->wl.fd };

	w->opens++;
	if (w->open) {
		send_error(f, o->h.seq, -EBUSY, "open already");
		return;
	}
	w->open = true;
	sock_send(f->sock, &r.h, fds, 2);
}

static void do_win_sync(struct fk *f, const struct wire_win *q)
{
	struct fk_win *w = &f->win[q->win];
	_Alignas(16) uint8_t buf[sizeof(struct wire_extents) +
				 FK_EXTENTS * sizeof(struct wire_extent)];
	struct wire_extents *r = (void *)buf;
	int fds[FK_EXTENTS], n = 0;
	uint32_t i;

	memset(buf, 0, sizeof(buf));
	w->syncs++;
	for (i = 1; i < FK_EXTENTS; i++) {
		bool down = w->down[i] > q->have_seq;
		bool up = !w->down[i] && w->up[i] > q->have_seq;

		if (!up && !down)
			continue;
		r->ext[r->n++] = (struct wire_extent){ .no = i, .up = up };
		if (up && !(f->win_flags & WIRE_WINDOW_BLIND))
			fds[n++] = w->extent[i];
	}
	r->seq = w->t->extent_seq;
	r->h = (struct wire_hdr){
		.type = WIRE_EXTENTS, .seq = q->h.seq,
		.len = sizeof(*r) + r->n * sizeof(r->ext[0]),
	};
	sock_send(f->sock, &r->h, fds, n);
}

static void do_reserve(struct fk *f, const struct wire_reserve *r)
{
	f->win[r->cls].reserves++;
	if (f->full) {
		send_error(f, r->h.seq, -ENOSPC, "others have it");
		return;
	}
	f->win[r->cls].reserved = r->frames;
	send_ok(f, r->h.seq);
}

static void serve(struct fk *f, struct sock_msg *m)
{
	const struct wire_hdr *h = (const void *)m->buf;
	const struct wire_win *w = (const void *)m->buf;

	pthread_mutex_lock(&f->lock);
	switch (h->type) {
	case WIRE_HELLO:
		do_hello(f, h->seq);
		break;
	case WIRE_ATTACH:
		do_attach(f, (const void *)m->buf);
		break;
	case WIRE_WIN_OPEN:
		do_win_open(f, (const void *)m->buf);
		break;
	case WIRE_WIN_SYNC:
		do_win_sync(f, w);
		break;
	case WIRE_WIN_CLOSE:
		f->win[w->win].closes++;
		f->win[w->win].open = false;
		send_ok(f, h->seq);
		break;
	case WIRE_RESERVE:
		do_reserve(f, (const void *)m->buf);
		break;
	case WIRE_DETACH:
		f->detaches++;
		send_ok(f, h->seq);
		break;
	default:
		send_ok(f, h->seq);
	}
	pthread_mutex_unlock(&f->lock);
}

static void drop_sock(struct fk *f)
{
	pthread_mutex_lock(&f->lock);
	close_fd(&f->sock);
	pthread_mutex_unlock(&f->lock);
}

static void *fk_main(void *arg)
{
	struct sock_msg *m = malloc(sizeof(*m));
	struct fk *f = arg;

	while (!f->stop) {
		struct pollfd p = { .events = POLLIN };
		int err;

		pthread_mutex_lock(&f->lock);
		p.fd = f->sock >= 0 ? f->sock : f->listen_fd;
		if (f->stopped)
			p.fd = -1;
		pthread_mutex_unlock(&f->lock);
		if (poll(&p, 1, 2) <= 0 || f->stopped)
			continue;
		if (p.fd == f->listen_fd) {
			int fd = sock_accept(f->listen_fd);

			pthread_mutex_lock(&f->lock);
			f->sock = fd < 0 ? -1 : fd;
			pthread_mutex_unlock(&f->lock);
			continue;
		}
		err = sock_recv(p.fd, m);
		if (!err) {
			serve(f, m);
			sock_msg_close_fds(m);
		} else if (err != -EAGAIN) {
			drop_sock(f);
		}
	}
	free(m);
	return NULL;
}

/* -- life ------------------------------------------------------------------------- */

int fk_start(struct fk *f, unsigned int nr_classes)
{
	static _Atomic unsigned int serial;
	const char *dir = getenv("TMPDIR");
	int err;

	memset(f, 0, sizeof(*f));
	f->sock = -1;
	f->bell = f->notify = -1;
	f->nr_classes = nr_classes;
	f->rights = KVMM_RW;
	f->epoch = 1;
	pthread_mutex_init(&f->lock, NULL);
	snprintf(f->path, sizeof(f->path), "%s/fake-%d-%u.sock",
		 dir ? dir : "/tmp", (int)getpid(), serial++);
	err = memory_make(f);
	if (err)
		return err;
	f->listen_fd = sock_listen(f->path, 0600);
	if (f->listen_fd < 0)
		return f->listen_fd;
	return -pthread_create(&f->thread, NULL, fk_main, f);
}

void fk_stop(struct fk *f)
{
	f->stop = true;
	pthread_join(f->thread, NULL);
	close_fd(&f->sock);
	close_fd(&f->listen_fd);
	unlink(f->path);
	memory_free(f);
	pthread_mutex_destroy(&f->lock);
}

void fk_hang_up(struct fk *f)
{
	drop_sock(f);
}

void fk_restart(struct fk *f)
{
	pthread_mutex_lock(&f->lock);
	close_fd(&f->sock);
	memory_free(f);
	f->epoch++;
	if (memory_make(f))
		abort();
	pthread_mutex_unlock(&f->lock);
}

/* -- extents ------------------------------------------------------------------------ */

void fk_extent_up(struct fk *f, unsigned int cls, uint32_t no)
{
	struct fk_win *w = &f->win[cls];
	struct shm s = SHM_INIT;

	if (shm_create(&s, "fake-extent",
		       max(f->gang, (uint8_t)1) * EXTENT_BYTES, 0))
		abort();
	w->extent[no] = take_fd(&s.fd);
	shm_fini(&s);
	w->down[no] = 0;
	w->up[no] = ++w->t->extent_seq;
}

void fk_extent_down(struct fk *f, unsigned int cls, uint32_t no)
{
	struct fk_win *w = &f->win[cls];

	w->down[no] = ++w->t->extent_seq;
}

/* -- pages -------------------------------------------------------------------------- */

static struct index_line *line_for(struct fk *f, const uint64_t key[4],
				   uint16_t group, uint8_t node)
{
	struct index_hash h = index_hash(f->ix->nr_lines, f->ix->seed, key,
					 group, node);
	struct index_line *free = NULL;
	struct index_hit hit;
	unsigned int i;

	for (i = 0; i < INDEX_PROBES; i++) {
		struct index_line *l = &f->ix->line[index_probe(h, i)];

		if (index_read_line(l, key, group, node, &hit))
			return l;
		if (!free && !(l->word0 >> 56 & INDEX_USED))
			free = l;
	}
	if (!free)
		abort();		/* a test with too many pages */
	return free;
}

static void line_write(struct fk *f, const struct kvmm_key *key,
		       uint16_t group, uint8_t node, uint8_t flags,
		       uint64_t fword, uint64_t frame, uint64_t aux)
{
	struct index_line *l;
	uint32_t version;
	uint64_t k[4];
	int i;

	memcpy(k, key->b, sizeof(k));
	l = line_for(f, k, group, node);
	version = (uint32_t)l->word0;
	l->word0 = index_word0(version + 1, group, node, 0);
	for (i = 0; i < 4; i++)
		l->key[i] = k[i];
	l->fword = fword;
	l->frame = frame;
	l->aux = aux;
	l->word0 = index_word0(version + 2, group, node, flags);
}

uint64_t fk_seal(struct fk *f, unsigned int cls, const struct kvmm_key *key,
		 uint16_t group, uint32_t frame, uint64_t gen)
{
	uint64_t word = frame_word(gen, FRAME_READY);

	fk_word(f, cls, frame, word);
	line_write(f, key, group, 0, INDEX_USED, word,
		   frame | UINT64_C(100) << 32, (uint64_t)FK_STRIDE << 32);
	return word;
}

/* The page's word, or a free one. */
static _Atomic uint64_t *word_for(struct fk *f, const uint64_t key[4],
				  uint16_t group, uint32_t *tag)
{
	struct index_below h = index_below(f->ix->nr_words, f->ix->seed, key,
					   group);
	_Atomic uint64_t *w = (_Atomic uint64_t *)&f->ix->line[f->ix->nr_lines];
	_Atomic uint64_t *free = NULL;
	unsigned int i;

	*tag = h.tag;
	for (i = 0; i < INDEX_WORDS; i++) {
		_Atomic uint64_t *at = &w[h.home + i];

		if ((*at & INDEX_USED) && *at >> INDEX_TAG_SHIFT == h.tag)
			return at;
		if (!free && !(*at & INDEX_USED))
			free = at;
	}
	if (!free)
		abort();		/* a test with too many pages */
	return free;
}

void fk_below(struct fk *f, const struct kvmm_key *key, uint16_t group,
	      uint8_t flags, uint32_t cost_us)
{
	_Atomic uint64_t *w;
	uint64_t k[4];
	uint32_t tag;

	memcpy(k, key->b, sizeof(k));
	w = word_for(f, k, group, &tag);
	*w = index_word(tag, INDEX_USED | flags, 1u << 1, 1, cost_us);
}

void fk_forget_below(struct fk *f, const struct kvmm_key *key, uint16_t group)
{
	uint64_t k[4];
	uint32_t tag;

	memcpy(k, key->b, sizeof(k));
	*word_for(f, k, group, &tag) = 0;
}

void fk_forget(struct fk *f, const struct kvmm_key *key, uint16_t group,
	       uint8_t node)
{
	line_write(f, key, group, node, 0, 0, 0, 0);
}

void fk_word(struct fk *f, unsigned int cls, uint32_t frame, uint64_t word)
{
	f->win[cls].t->word[frame] = word;
}

uint32_t fk_pins(struct fk *f, unsigned int cls, uint32_t frame)
{
	return window_pins(f->win[cls].w)[frame];
}

uint32_t fk_all_pins(struct fk *f, unsigned int cls)
{
	uint32_t i, n = 0;

	for (i = 0; i < FK_FRAMES; i++)
		n += fk_pins(f, cls, i);
	return n;
}

void fk_give(struct fk *f, unsigned int cls, uint32_t first, uint32_t n)
{
	struct fk_win *w = &f->win[cls];
	uint32_t i;

	for (i = 0; i < n; i++) {
		window_magazine(w->w)[w->mag_tail++ % FK_MAG] = first + i;
		fk_word(f, cls, first + i, frame_word(0, FRAME_OPEN));
	}
	w->w->mag_tail = w->mag_tail;
	w->w->refills++;
}

/* -- rings -------------------------------------------------------------------------- */

bool fk_take(struct fk *f, struct ring_sqe *sqe, const void **array)
{
	const struct ring_sqe *sq = (const void *)((char *)f->l + f->l->sq_off);
	uint32_t n = ring_pending(&f->l->sq, f->sq_head);

	if (!n || n > LEDGER_SQ_ENTRIES)
		return false;
	*sqe = sq[f->sq_head++ % LEDGER_SQ_ENTRIES];
	if (array)
		*array = sqe->arena_len ? (char *)f->l + f->l->arena_off +
			sqe->arena_pos % LEDGER_ARENA_BYTES : NULL;
	f->arena_head += sqe->arena_len;
	f->l->arena_head = f->arena_head;
	f->l->sq.head = f->sq_head;
	return true;
}

bool fk_take_op(struct fk *f, uint8_t op, struct ring_sqe *sqe,
		const void **array)
{
	while (fk_take(f, sqe, array))
		if (sqe->op == op)
			return true;
	return false;
}

void fk_answer(struct fk *f, const struct ring_sqe *sqe, int result,
	       const struct ring_result *res, uint32_t n)
{
	struct ring_cqe *cq = (void *)((char *)f->l + f->l->cq_off);
	struct ring_cqe c = {
		.op = sqe->op, .result = result, .tag = sqe->tag, .n = n,
	};
	uint32_t i;

	cq[f->cq_tail++ % LEDGER_CQ_ENTRIES] = c;
	for (i = 0; i < n; i += RING_RESULTS)
		memcpy(&cq[f->cq_tail++ % LEDGER_CQ_ENTRIES], &res[i],
		       min(n - i, (uint32_t)RING_RESULTS) * sizeof(*res));
	f->l->cq.tail = f->cq_tail;
	if (f->l->cq.armed == 1 && atomic_exchange(&f->l->cq.armed, 2) == 1)
		eventfd_write(f->notify, 1);
}

bool fk_rung(struct fk *f)
{
	eventfd_t n;

	return !eventfd_read(f->bell, &n);
}

/* -- the client's side ------------------------------------------------------------------ */

const struct kvmm_desc *fk_desc(unsigned int nr_classes)
{
	static const struct kvmm_seg segs[] = {
		{ 1024, 64, 0, KVMM_SEG_K, KVMM_MIRROR },
		{ 3072, 64, 0, KVMM_SEG_V, KVMM_MIRROR },
	};
	static const struct kvmm_class classes[] = {
		{ "kv", 4096, 2, segs },
		{ "state", 4096, 2, segs },
	};
	static const struct kvmm_group groups[] = {
		{ 0, KVMM_FULL, 0, 16, 0 },
		{ 0, KVMM_WINDOW, 0, 16, FK_WINDOW_PAGES },
		{ 0, KVMM_LAST, 0, 16, 0 },
		{ 0, KVMM_BLOB, 0, 0, 0 },
		{ 1, KVMM_FULL, 0, 32, 0 },
	};
	static const struct kvmm_desc desc[] = {
		{ .size = sizeof(desc[0]), .model = "fake", .world = 1,
		  .nclasses = 1, .ngroups = 4, .classes = classes,
		  .groups = groups },
		{ .size = sizeof(desc[0]), .model = "fake", .world = 1,
		  .nclasses = 2, .ngroups = 5, .classes = classes,
		  .groups = groups },
	};

	return &desc[nr_classes - 1];
}

int fc_open(struct fk *f, struct fc *c)
{
	const struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = FC_TIMEOUT_NS,
	};
	unsigned int i;
	int err;

	memset(c, 0, sizeof(*c));
	err = kvmm_open(f->path, &o, &c->k);
	if (err)
		return err;
	err = kvmm_space_attach(c->k, fk_desc(f->nr_classes), &c->sp);
	for (i = 0; i < f->nr_classes && !err; i++)
		err = kvmm_win_open(c->sp, i, 0, NULL, &c->win[i]);
	if (!err)
		err = kvmm_req_open(c->sp, 1, NULL, &c->rq);
	if (err) {
		fprintf(stderr, "fake: %s\n", kvmm_error(c->k));
		kvmm_close(c->k);
	}
	return err;
}

void fc_close(struct fc *c)
{
	if (c->rq)
		kvmm_req_end(c->rq, KVMM_ENDED, 0);
	kvmm_close(c->k);
}

int fc_match(struct fc *c, const struct kvmm_key *key)
{
	const struct kvmm_keys keys = { .k = key, .n = 1, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit;
	int err = kvmm_match(c->rq, &keys, 1, 0, &hit, &m);

	return err ? err : (int)m.n_resident;
}

struct kvmm_key fk_key(uint32_t seq, uint32_t i)
{
	struct kvmm_key k = { { 0 } };

	memcpy(k.b, &seq, sizeof(seq));
	memcpy(k.b + 4, &i, sizeof(i));
	k.b[31] = 1;
	return k;
}
