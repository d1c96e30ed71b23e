/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=io_uring_submit,--wrap=pwritev2,--wrap=pwrite,--wrap=fdatasync */
/*
 * Every write is a crash point.
 *
 * A store is used at random while each write to its file is recorded: what, when
 * it was handed to the kernel, when it was over, and whether the kernel was told
 * to have it on the medium then. From that, files are made as a crash could have left them at any event:
 * with every write so far, or with any of those that nobody had waited for
 * missing, torn at a sector, or in another order. The first of them are those of
 * the superblocks and of a store that is made: recording begins before it is
 * opened. Each is opened, and what is found must be what had been said up to some call: not earlier than the last
 * acknowledged flush, not later than the crash. That is one comparison and says
 * all: nothing wrong, nothing lost that was flushed, nothing lost from the
 * middle.
 */
#include "daemon/node/nvme.h"
#include "tests/lib/kernel_writes.h"
#include "tests/lib/node_owner.h"

#define SECTOR		512u
#define SLOT		4096u
#define CRASH_BYTES	(4 * MIB)
#define CRASH_RECORDS	400u

enum { MAX_WRITES = 60000, MAX_OPS = 60000, MAX_ACKS = 20000 };

/**
 * struct wr - a write
 * @started:	event at which the kernel got it
 * @ended:	event at which it was over; UINT_MAX: never
 * @sync:	is on the medium then, if the kernel does as it was told
 */
struct wr {
	const struct node_io *io;
	uint64_t	off;
	uint32_t	len;
	bool		sync;
	unsigned int	started;
	unsigned int	ended;
	char		*data;
};

/**
 * struct ack - a flush
 * @op:		said before it
 * @event:	told at
 */
struct ack {
	unsigned int	op;
	unsigned int	event;
};

/**
 * struct history - a recorded run
 * @base:	the file when it began
 * @hash:	of what had been said after so many calls
 * @op_event:	when they were
 * @opened:	events until the store was open
 * @again:	first and last event of its next opening
 */
static struct history {
	struct wr	wr[MAX_WRITES];
	unsigned int	nr_wr;
	unsigned int	event;
	unsigned int	opened;
	unsigned int	again[2];
	char		*base;
	uint64_t	bytes;
	uint64_t	hash[MAX_OPS];
	unsigned int	op_event[MAX_OPS];
	unsigned int	nr_ops;
	struct ack	ack[MAX_ACKS];
	unsigned int	nr_acks;
} h;

static struct owner ours, theirs;

/* ---- recording ---------------------------------------------------------------- */

/* While a store is opened it is fdatasync() that makes writes durable: that one,
 * and all before it. */
static bool opening(const struct node_io *io)
{
	return !io->priv.node;
}

static void all_synced(struct wr *last)
{
	for (struct wr *w = h.wr; w < last; w++) {
		if (w->sync || w->ended == UINT32_MAX)
			continue;
		w->sync = true;
		w->ended = last->ended;
	}
}

static void on_io(const struct node *n, enum fault_tap_when when,
		  const struct node_io *io, void *arg)
{
	struct wr *w;

	if (io->dir != NODE_WRITE)
		return;
	h.event++;
	if (when == FAULT_TAP_START) {
		assert_true(h.nr_wr < MAX_WRITES);
		w = &h.wr[h.nr_wr++];
		w->io = io;
		w->off = io->slot.off;
		w->len = (uint32_t)round_up(io->len, NODE_ALIGN);
		w->sync = false;
		w->started = h.event;
		w->ended = UINT32_MAX;
		w->data = malloc(w->len);
		assert_non_null(w->data);
		memcpy(w->data, io->addr, w->len);
		return;
	}
	for (unsigned int i = h.nr_wr; i-- > 0;) {
		w = &h.wr[i];
		if (w->io == io && w->ended == UINT32_MAX) {
			if (io->priv.res == (int)w->len) {
				w->ended = h.event;
				assert_true(kernel_writes_take(io->addr, w->off,
							       &w->sync));
			}
			w->io = NULL;
			if (opening(io) && w->sync)
				all_synced(w);
			return;
		}
	}
	/* one from before, or one that a fault kept from the medium */
}

static uint64_t hash_bytes(uint64_t seed, const void *p, size_t len)
{
	const uint8_t *b = p;

	for (size_t i = 0; i < len; i++)
		seed = (seed ^ b[i]) * UINT64_C(0x100000001b3);
	return splitmix64(&seed);
}

static uint64_t hash_record(const struct node_record *r)
{
	return hash_bytes(1, r, sizeof(*r));
}

static uint64_t hash_label(uint32_t id, const void *bytes, uint32_t len)
{
	return hash_bytes(hash_bytes(2, &id, sizeof(id)), bytes, len);
}

/* Something was said; @delta is what it changes. */
static void said(uint64_t delta)
{
	assert_true(h.nr_ops + 1 < MAX_OPS);
	h.op_event[h.nr_ops] = h.event;
	h.hash[h.nr_ops + 1] = h.hash[h.nr_ops] ^ delta;
	h.nr_ops++;
}

static void on_flush(int err, void *arg)
{
	if (err)
		return;
	assert_true(h.nr_acks < MAX_ACKS);
	h.ack[h.nr_acks++] = (struct ack) {
		.op	= (unsigned int)(uintptr_t)arg,
		.event	= h.event,
	};
}

static void read_file(const struct rig *r, char *to)
{
	assert_int_equal(pread(r->memfd, to, r->o.bytes, 0),
			 (ssize_t)r->o.bytes);
}

/* ---- using the store ------------------------------------------------------------ */

static void use_add(struct rig *r, struct rng *rng)
{
	uint32_t len = SLOT * (1 + (uint32_t)rng_below(rng, 3));
	struct owned *w = owner_place(&ours);
	struct node_record *rec = &w->rec;
	struct op op;

	memset(rec, 0, sizeof(*rec));
	if (node_slot_alloc(r->n, len, &rec->slot))
		return;
	fill(r->mem, len, rec->slot.seq);
	op_init(&op, NODE_WRITE, &rec->slot, r->mem, len, "crash");
	if (node_submit(r->n, &op.io)) {
		node_slot_free(r->n, &rec->slot);
		return;
	}
	rig_until(r, op.nr_release);
	if (op.told) {
		node_slot_free(r->n, &rec->slot);
		return;
	}
	rec->len = len;
	rec->crc = op.io.crc;
	rng_fill(rng, rec->meta, sizeof(rec->meta));
	w->used = true;
	ours.nr = max(ours.nr, (unsigned int)(w - ours.rec) + 1);
	said(hash_record(rec));
	node_record_add(r->n, rec);
}

/* Without data, and without a round of the loop. */
static void use_add_bare(struct rig *r, struct rng *rng)
{
	struct owned *w = owner_place(&ours);
	struct node_record *rec = &w->rec;

	memset(rec, 0, sizeof(*rec));
	if (node_slot_alloc(r->n, SLOT, &rec->slot))
		return;
	rec->len = 1 + (uint32_t)rng_below(rng, SLOT);
	rng_fill(rng, rec->meta, sizeof(rec->meta));
	w->used = true;
	ours.nr = max(ours.nr, (unsigned int)(w - ours.rec) + 1);
	said(hash_record(rec));
	node_record_add(r->n, rec);
}

static void use_del(struct rig *r, struct rng *rng)
{
	struct owned *w;

	if (!ours.nr)
		return;
	w = &ours.rec[rng_below(rng, ours.nr)];
	if (!w->used)
		return;
	w->used = false;
	said(hash_record(&w->rec));
	if (rng_below(rng, 2))
		node_record_del(r->n, &w->rec.slot);
	assert_int_equal(node_slot_free(r->n, &w->rec.slot), 0);
}

static void use_label(struct rig *r, struct rng *rng)
{
	struct owned_label *l = &ours.label[rng_below(rng, 12)];

	if (l->used) {
		l->used = false;
		said(hash_label(l->id, l->bytes, l->len));
		node_label_del(r->n, l->id);
		return;
	}
	l->len = 1 + (uint32_t)rng_below(rng, sizeof(l->bytes));
	rng_fill(rng, l->bytes, l->len);
	if (node_label_put(r->n, l->bytes, l->len, &l->id))
		return;
	l->used = true;
	/* the number is known afterwards only; no event came between */
	said(hash_label(l->id, l->bytes, l->len));
}

static void use_step(struct rig *r, struct rng *rng)
{
	unsigned int burst = rng_below(rng, 8) ? 0 :
			     (unsigned int)rng_below(rng, 100);

	switch (rng_below(rng, 16)) {
	case 0 ... 1:
		use_add(r, rng);
		break;
	case 2 ... 5:
		do
			use_add_bare(r, rng);
		while (burst--);
		break;
	case 6 ... 9:
		do
			use_del(r, rng);
		while (burst--);
		break;
	case 10:
		use_label(r, rng);
		break;
	case 11 ... 12:
		assert_int_equal(node_record_flush(r->n, on_flush,
						   (void *)(uintptr_t)
						   h.nr_ops), 0);
		break;
	default:
		rig_poll(r, 0);
		break;
	}
}

/* Another store, full of records, that has to be rebuilt. */
static void fill_other(struct rig *r)
{
	owner_open(r, &ours);
	for (unsigned int i = 0; i < 300; i++)
		assert_int_equal(owner_add(r, &ours, SLOT, (uint8_t)i, NULL),
				 0);
	assert_int_equal(owner_flush(r), 0);
	rig_close(r);
	r->o.records--;
}

/* An orderly end, and one more life. */
static void open_again(struct rig *r)
{
	node_fault_set(NULL, NULL, 0);
	while (owner_flush(r))
		rig_poll(r, 1);
	rig_close(r);
	h.again[0] = h.event;
	owner_open(r, &ours);
	ours.step = 8;
	h.again[1] = h.event;
	on_flush(0, (void *)(uintptr_t)h.nr_ops);
}

/* A record of some hundred flushes; @faults: meanwhile. */
static void record_run(struct rig *r, unsigned int steps, const char *faults,
		       uint64_t seed)
{
	struct rng rng;

	rng_seed(&rng, seed);
	h.nr_wr = h.event = h.nr_ops = h.nr_acks = 0;
	h.hash[0] = 0;
	h.bytes = r->o.bytes;
	h.base = malloc(h.bytes);
	assert_non_null(h.base);
	read_file(r, h.base);
	fault_tap_set(on_io, NULL);
	owner_open(r, &ours);
	ours.step = 8;		/* a checkpoint takes many rounds */
	h.opened = h.event;
	assert_true(h.opened >= 12);
	for (unsigned int i = 0; i < steps; i++) {
		if (i == steps / 3)
			assert_int_equal(node_fault_set(faults, NULL, 0), 0);
		if (i == 2 * steps / 3)
			open_again(r);
		use_step(r, &rng);
	}
	fault_tap_set(NULL, NULL);
	node_fault_set(NULL, NULL, 0);
	print_message("# %u events, %u calls, %u flushes, %llu checkpoints, %llu entries lost\n",
		      h.event, h.nr_ops, h.nr_acks,
		      (unsigned long long)r->n->stats.ckpts,
		      (unsigned long long)r->n->stats.journal_lost);
	rig_close(r);
}

static void history_free(void)
{
	for (unsigned int i = 0; i < h.nr_wr; i++)
		free(h.wr[i].data);
	free(h.base);
	h.base = NULL;
	h.nr_wr = 0;
}

/* ---- crashing ------------------------------------------------------------------- */

/* Some of its sectors, or of its blocks. */
static void apply_torn(char *image, const struct wr *w, struct rng *rng)
{
	uint32_t step = rng_below(rng, 2) ? SECTOR : NVME_BLOCK;

	for (uint32_t at = 0; at < w->len; at += step)
		if (rng_below(rng, 2))
			memcpy(image + w->off + at, w->data + at, step);
}

static bool durable(const struct wr *w, unsigned int event)
{
	return w->sync && w->ended < event;
}

/* The file after a crash at @event; @rng: with losses. */
static void make_image(char *image, unsigned int event, struct rng *rng)
{
	unsigned int nr = 0;

	memcpy(image, h.base, h.bytes);
	while (nr < h.nr_wr && h.wr[nr].started < event)
		nr++;
	for (unsigned int i = 0; i < nr; i++) {
		const struct wr *w = &h.wr[i];
		uint64_t luck = rng ? rng_below(rng, 8) : 0;

		if (durable(w, event) || luck < 3)
			memcpy(image + w->off, w->data, w->len);
		else if (luck < 6)
			apply_torn(image, w, rng);
	}
	/* and some of what is not ordered, late */
	for (unsigned int i = 0; rng && nr && i < 4; i++) {
		const struct wr *w = &h.wr[rng_below(rng, nr)];

		if (!w->sync)
			memcpy(image + w->off, w->data, w->len);
	}
}

static uint64_t found_hash(const struct owner *o)
{
	uint64_t hash = 0;

	for (unsigned int i = 0; i < o->nr; i++)
		if (o->rec[i].used)
			hash ^= hash_record(&o->rec[i].rec);
	for (unsigned int i = 0; i < LABELS_MAX; i++)
		if (o->label[i].used)
			hash ^= hash_label(o->label[i].id, o->label[i].bytes,
					   o->label[i].len);
	return hash;
}

/* Is what was found what had been said after some call that may be the last? */
static bool found_true(const struct rig *r, unsigned int event, bool tell)
{
	uint64_t hash = found_hash(&theirs);
	unsigned int from = 0, to = 0;
	uint64_t used = 0;

	for (unsigned int i = 0; i < h.nr_acks; i++)
		if (h.ack[i].event < event)
			from = max(from, h.ack[i].op);
	while (to < h.nr_ops && h.op_event[to] < event)
		to++;
	for (unsigned int p = from; p <= to; p++) {
		if (h.hash[p] != hash)
			continue;
		for (unsigned int i = 0; i < theirs.nr; i++)
			used += round_up(theirs.rec[i].rec.len, SLOT);
		return r->n->used == used && !r->n->stats.recover_dropped;
	}
	if (!tell)
		return false;
	print_message("# event %u: %u records are nothing that was ever true in %u .. %u\n",
		      event, theirs.nr, from, to);
	for (unsigned int p = 0; p <= h.nr_ops; p++)
		if (h.hash[p] == hash)
			print_message("# they were after call %u\n", p);
	return false;
}

static void judge(struct rig *r, unsigned int event)
{
	assert_true(found_true(r, event, true));
}

/* Right bytes, or none. */
static void judge_data(struct rig *r)
{
	for (unsigned int i = 0; i < theirs.nr; i++) {
		const struct node_record *rec = &theirs.rec[i].rec;
		int err;

		memset(r->mem, 0, rec->len);
		err = op_read(r, &rec->slot, r->mem, rec->len, "crash",
			      rec->crc);
		if (!err)
			assert_filled(r->mem, rec->len, rec->slot.seq);
		else
			assert_int_equal(err, -EBADMSG);
	}
}

static void write_image(const struct rig *r, const char *image)
{
	assert_int_equal(pwrite(r->memfd, image, h.bytes, 0),
			 (ssize_t)h.bytes);
}

/* Use it on for a while, let it crash again without any loss, and look. */
static void live_on(struct rig *r, char *image, struct rng *rng)
{
	for (unsigned int round = 0; round < 3; round++) {
		unsigned int n = 1 + (unsigned int)rng_below(rng, 60);

		for (unsigned int i = 0; i < n; i++) {
			unsigned int k = (unsigned int)rng_below(rng, 400);

			if (k < theirs.nr && theirs.rec[k].used)
				owner_free(r, &theirs.rec[k]);
			else
				owner_add(r, &theirs, SLOT, (uint8_t)k, NULL);
		}
		assert_int_equal(owner_flush(r), 0);
		read_file(r, image);
		rig_close(r);
		write_image(r, image);
		ours = theirs;
		owner_open(r, &theirs);
		owners_equal(&theirs, &ours);
		assert_int_equal(r->n->stats.recover_dropped, 0);
	}
}

static void crash_at(struct rig *r, unsigned int event, struct rng *rng,
		     char *image, bool closely)
{
	make_image(image, event, rng);
	write_image(r, image);
	owner_open(r, &theirs);
	judge(r, event);
	if (closely) {
		struct rng own;

		judge_data(r);
		rng_seed(&own, event);
		live_on(r, image, &own);
	}
	rig_close(r);
}

/* Was there anything wrong after a crash at @event, with losses? */
static bool crash_hurts(struct rig *r, unsigned int event, struct rng *rng,
			char *image)
{
	bool good;

	make_image(image, event, rng);
	write_image(r, image);
	owner_init(&theirs);
	rig_make(r);
	node_set_owner(r->n, &theirs.ops);
	rig_until(r, r->n->state != NODE_STARTING);
	good = r->n->state == NODE_ONLINE && found_true(r, event, false);
	rig_close(r);
	return !good;
}

static void crash_rig(struct rig *r)
{
	rig_init_memory(r);
	r->o.bytes = CRASH_BYTES;
	r->o.records = CRASH_RECORDS;
	r->o.zero_bytes_s = UINT64_C(1) << 40;
	r->o.probe_ns = MSEC;
	/* what is half made may be taken for damaged, and is made anew */
	r->o.rebuild = true;
	assert_int_equal(ftruncate(r->memfd, (off_t)r->o.bytes), 0);
}

/* These are few, and all of them are tried. */
static bool while_opening(unsigned int event)
{
	return event <= h.opened + 2 ||
	       (event >= h.again[0] && event <= h.again[1] + 2);
}

/* @share: so many crash points, of all; 0: all of them. */
static void crash_run(unsigned int steps, unsigned int share, bool other,
		      const char *faults, uint64_t seed)
{
	struct rng rng;
	struct rig r;
	char *image;

	crash_rig(&r);
	if (other)
		fill_other(&r);
	record_run(&r, steps, faults, seed);
	rng_seed(&rng, seed + 1);
	image = malloc(h.bytes);
	assert_non_null(image);
	for (unsigned int e = 1; e <= h.event; e++) {
		if (share && !while_opening(e) &&
		    rng_below(&rng, h.event) >= share)
			continue;
		crash_at(&r, e, NULL, image, false);
		for (unsigned int i = 0; i < (test_long() ? 2u : 1u); i++)
			crash_at(&r, e, &rng, image, !rng_below(&rng, 3));
	}
	free(image);
	history_free();
	rig_fini(&r);
}

static void every_crash_leaves_what_was_said(void **state)
{
	print_message("# seed %llu\n", (unsigned long long)test_seed());
	crash_run(test_long() ? 8000 : 4000, test_long() ? 0 : 60, false, NULL,
		  test_seed());
}

static void crashes_while_another_store_is_rebuilt(void **state)
{
	print_message("# seed %llu\n", (unsigned long long)test_seed());
	crash_run(200, test_long() ? 0 : 10, true, NULL, test_seed() + 30);
}

static void crashes_where_entries_had_no_memory(void **state)
{
	print_message("# seed %llu\n", (unsigned long long)test_seed());
	crash_run(test_long() ? 6000 : 3000, test_long() ? 0 : 40, false,
		  "nvme:get:enomem:p=700:seed=3", test_seed() + 10);
}

static void crashes_where_the_journal_was_refused(void **state)
{
	print_message("# seed %llu\n", (unsigned long long)test_seed());
	crash_run(test_long() ? 6000 : 3000, test_long() ? 0 : 40, false,
		  "nvme:journal:eio:n=2;nvme:journal:short:skip=9:n=1",
		  test_seed() + 20);
}

/* Is it the last block of a checkpoint? */
static bool completes(const struct nvme_super *sb, const struct wr *w)
{
	return w->ended != UINT32_MAX &&
	       (w->off == sb->ckpt_off || w->off == sb->ckpt_off +
						    sb->ckpt_bytes);
}

/*
 * Some crash must hurt a store without the protection @what: one just after a
 * checkpoint was complete, or any.
 */
static void unprotected(const char *what)
{
	const struct nvme_super *sb;
	unsigned int hurt = 0, crashes = 0;
	struct rng rng;
	struct rig r;
	char *image;

	setenv("KVMM_BREAK", what, 1);
	crash_rig(&r);
	record_run(&r, 4000, NULL, test_seed() + 30);
	sb = (const void *)h.base;
	rng_seed(&rng, test_seed() + 31);
	image = malloc(h.bytes);
	assert_non_null(image);
	for (unsigned int i = 0; i < h.nr_wr && !hurt; i++) {
		if (!completes(sb, &h.wr[i]))
			continue;
		hurt += crash_hurts(&r, h.wr[i].ended + 1, &rng, image);
		crashes++;
	}
	while (!hurt && crashes < 100) {
		hurt += crash_hurts(&r, 1 + (unsigned int)
				    rng_below(&rng, h.event), &rng, image);
		crashes++;
	}
	print_message("# without %s: %u of %u crashes hurt\n", what, hurt,
		      crashes);
	unsetenv("KVMM_BREAK");
	free(image);
	history_free();
	rig_fini(&r);
	assert_true(hurt);
}

static void without_dsync_a_crash_hurts(void **state)
{
	print_message("# seed %llu\n", (unsigned long long)test_seed());
	unprotected("dsync");
}

/* In flight together, and done in any order; some are refused, by chance. */
static void crashes_where_writes_overtake_each_other(void **state)
{
	char rules[200];

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	snprintf(rules, sizeof(rules),
		 "nvme:journal:eio:p=30:seed=%u;nvme:journal:short:p=20:seed=%u;nvme:journal:reorder:ms=2:seed=%u;nvme:write:reorder:ms=4:seed=%u",
		 (unsigned int)test_seed(), (unsigned int)test_seed() + 1,
		 (unsigned int)test_seed() + 2, (unsigned int)test_seed() + 3);
	crash_run(test_long() ? 6000 : 3000, test_long() ? 0 : 40, false, rules,
		  test_seed() + 40);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_crash_leaves_what_was_said),
		cmocka_unit_test(crashes_while_another_store_is_rebuilt),
		cmocka_unit_test(crashes_where_entries_had_no_memory),
		cmocka_unit_test(crashes_where_the_journal_was_refused),
		cmocka_unit_test(crashes_where_writes_overtake_each_other),
		cmocka_unit_test(without_dsync_a_crash_hurts),
	};

	return run_on_both_engines(tests);
}
