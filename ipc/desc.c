/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encoding writes what it is given and then lets desc_decode() judge the bytes,
 * so that there is one set of rules, on both sides of the socket.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <kvmm/kvmm.h>

#include "ipc/base/sha256.h"
#include "ipc/desc.h"

#define DESC_MAX_PAGE	(1u << 30)	/* bytes of a page */
#define DESC_MAX_ALIGN	4096u		/* what a host frame's start grants */
#define DESC_MAX_UNIT	(1u << 24)	/* tokens, lcm of the groups' blocks */

/* -- encoding -------------------------------------------------------------- */

struct writer {
	uint8_t	*buf;
	size_t	len;
	bool	full;
};

static void put(struct writer *w, const void *p, size_t n)
{
	if (w->full || n > DESC_MAX_BYTES - w->len) {
		w->full = true;
		return;
	}
	memcpy(w->buf + w->len, p, n);
	w->len += n;
}

static void put_int(struct writer *w, uint32_t v, unsigned int bytes)
{
	uint8_t b[4] = { v, v >> 8, v >> 16, v >> 24 };

	put(w, b, bytes);
}

static void put_str(struct writer *w, const char *s)
{
	size_t n = s ? strnlen(s, DESC_MAX_BYTES) : 0;

	put_int(w, n, 4);
	put(w, s ? s : "", n);
}

static void put_class(struct writer *w, const struct kvmm_class *c)
{
	uint32_t i;

	put_str(w, c->name);
	put_int(w, c->page_bytes, 4);
	put_int(w, c->nsegs, 4);
	for (i = 0; i < c->nsegs && !w->full; i++) {
		put_int(w, c->segs[i].bytes, 4);
		put_int(w, c->segs[i].align, 4);
		put_int(w, c->segs[i].layer, 2);
		put_int(w, c->segs[i].what, 1);
		put_int(w, c->segs[i].shard, 1);
	}
}

static void put_group(struct writer *w, const struct kvmm_group *g)
{
	put_int(w, g->class_ix, 2);
	put_int(w, g->rule, 1);
	put_int(w, g->block_tokens, 4);
	put_int(w, g->window_pages, 4);
}

/* What a pointer could make us do before there are bytes to judge. */
static int check_pointers(const struct kvmm_desc *d, struct errmsg *e)
{
	unsigned int i;

	if (d->nclasses && !d->classes)
		return errmsg_set(e, -EINVAL, "classes: NULL with nclasses %u",
				  d->nclasses);
	if (d->ngroups && !d->groups)
		return errmsg_set(e, -EINVAL, "groups: NULL with ngroups %u",
				  d->ngroups);
	if (d->nclasses > KVMM_MAX_CLASSES)
		return errmsg_set(e, -EINVAL, "nclasses: %u, at most %u",
				  d->nclasses, KVMM_MAX_CLASSES);
	if (d->ngroups > KVMM_MAX_GROUPS)
		return errmsg_set(e, -EINVAL, "ngroups: %u, at most %u",
				  d->ngroups, KVMM_MAX_GROUPS);
	for (i = 0; i < d->nclasses; i++) {
		const struct kvmm_class *c = &d->classes[i];

		if (c->nsegs > KVMM_MAX_SEGS || (c->nsegs && !c->segs))
			return errmsg_set(e, -EINVAL,
				"classes[%u].nsegs: %u%s, allowed are 1 to %u",
				i, c->nsegs, c->segs ? "" : " without segs",
				KVMM_MAX_SEGS);
	}
	return 0;
}

int desc_encode(const struct kvmm_desc *d, uint8_t *buf, struct errmsg *e)
{
	struct writer w = { .buf = buf };
	struct desc judged;
	unsigned int i;
	int err;

	err = check_pointers(d, e);
	if (err)
		return err;

	put_str(&w, d->model);
	put_str(&w, d->revision);
	put_str(&w, d->kv_dtype);
	put_str(&w, d->scale_format);
	put_str(&w, d->layout);
	put_str(&w, d->abi_tag);
	put_str(&w, d->salt);
	put_int(&w, d->world, 2);
	put_int(&w, d->nclasses, 4);
	for (i = 0; i < d->nclasses; i++)
		put_class(&w, &d->classes[i]);
	put_int(&w, d->ngroups, 4);
	for (i = 0; i < d->ngroups; i++)
		put_group(&w, &d->groups[i]);
	if (w.full)
		return errmsg_set(e, -E2BIG,
			"the descriptor does not fit %u bytes (strings, segments)",
			DESC_MAX_BYTES);

	err = desc_decode(buf, w.len, &judged, e);
	if (err)
		return err;
	desc_fini(&judged);
	return w.len;
}

/* -- decoding -------------------------------------------------------------- */

/* Reads past the end give zeros and are remembered. */
struct reader {
	const uint8_t	*p;
	size_t		left;
	bool		short_;
};

static const uint8_t *get(struct reader *r, size_t n)
{
	const uint8_t *p = r->p;

	if (n > r->left) {
		r->short_ = true;
		r->left = 0;
		return NULL;
	}
	r->p += n;
	r->left -= n;
	return p;
}

static uint32_t get_int(struct reader *r, unsigned int bytes)
{
	const uint8_t *p = get(r, bytes);
	uint32_t v = 0;

	while (p && bytes--)
		v = v << 8 | p[bytes];
	return v;
}

/*
 * Bytes of the UTF-8 character at @p, of @n at most; 0: there is none, or a
 * longer form than it needs, or half of a pair, or beyond the last one.
 */
static uint32_t char_bytes(const uint8_t *p, uint32_t n)
{
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
	uint32_t bytes = p[0] < 0x80 ? 1 : p[0] < 0xc0 ? 0 : p[0] < 0xe0 ? 2 :
			 p[0] < 0xf0 ? 3 : p[0] < 0xf8 ? 4 : 0;
	uint32_t c, i;

	if (bytes < 2 || bytes > n)
		return bytes == 1;
	c = p[0] & (0x7f >> bytes);
	for (i = 1; i < bytes; i++) {
		if ((p[i] & 0xc0) != 0x80)
			return 0;
		c = c << 6 | (p[i] & 0x3f);
	}
	return c < least[bytes] || c > 0x10ffff ||
	       (c >= 0xd800 && c < 0xe000) ? 0 : bytes;
}

static bool is_control(const uint8_t *p)
{
	return p[0] < 0x20 || p[0] == 0x7f || (p[0] == 0xc2 && p[1] < 0xa0);
}

/*
 * A name: short, printable UTF-8, so that it can stand in a log, in JSON and on
 * a terminal.
 */
static int get_str(struct reader *r, char out[KVMM_MAX_STR], const char *field,
		   struct errmsg *e)
{
	uint32_t i, k, n = get_int(r, 4);
	const uint8_t *p;

	if (n >= KVMM_MAX_STR)
		return errmsg_set(e, -EINVAL, "%s: %u bytes, at most %u", field,
				  n, KVMM_MAX_STR - 1);
	p = get(r, n);
	if (!p)
		n = 0;
	for (i = 0; i < n; i += k) {
		k = char_bytes(p + i, n - i);
		if (!k)
			return errmsg_set(e, -EINVAL,
				"%s: byte %u, 0x%02x, is not UTF-8", field, i,
				p[i]);
		if (is_control(p + i))
			return errmsg_set(e, -EINVAL,
				"%s: control character 0x%02x at byte %u",
				field, p[i + k - 1], i);
		memcpy(out + i, p + i, k);
	}
	memset(out + n, 0, KVMM_MAX_STR - n);
	return 0;
}

static int check_seg(const struct desc *d, const struct desc_class *c,
		     uint32_t i, uint64_t offset, struct errmsg *e)
{
	const struct desc_seg *s = &c->segs[i];

	if (!s->bytes)
		return errmsg_set(e, -EINVAL, "class %s segment %u: bytes is 0",
				  c->name, i);
	if (!is_pow2(s->align) || s->align > DESC_MAX_ALIGN)
		return errmsg_set(e, -EINVAL,
			"class %s segment %u: align %u is no power of two up to %u",
			c->name, i, s->align, DESC_MAX_ALIGN);
	if (offset % s->align)
		return errmsg_set(e, -EINVAL,
			"class %s segment %u: begins at byte %llu of the page, no multiple of its align %u",
			c->name, i, (unsigned long long)offset, s->align);
	if (s->what < KVMM_SEG_K || s->what > KVMM_SEG_INDEX)
		return errmsg_set(e, -EINVAL, "class %s segment %u: what %u",
				  c->name, i, s->what);
	if (s->shard != KVMM_MIRROR && s->shard != KVMM_STRIPE)
		return errmsg_set(e, -EINVAL, "class %s segment %u: shard %u",
				  c->name, i, s->shard);
	if (s->shard == KVMM_STRIPE && s->bytes % d->world)
		return errmsg_set(e, -EINVAL,
			"class %s segment %u: %u bytes do not divide by world %u",
			c->name, i, s->bytes, d->world);
	return 0;
}

static int get_class(struct reader *r, struct desc *d, uint32_t ix,
		     struct errmsg *e)
{
	struct desc_class *c = &d->cls[ix];
	uint64_t sum = 0;
	uint32_t i;
	int err;

	err = get_str(r, c->name, "class name", e);
	if (err)
		return err;
	if (!c->name[0])
		return errmsg_set(e, -EINVAL, "class %u has no name", ix);
	for (i = 0; i < ix; i++)
		if (!strcmp(c->name, d->cls[i].name))
			return errmsg_set(e, -EINVAL,
				"classes %u and %u are both called %s", i, ix,
				c->name);
	c->page_bytes = get_int(r, 4);
	c->nsegs = get_int(r, 4);
	if (!c->page_bytes || c->page_bytes > DESC_MAX_PAGE)
		return errmsg_set(e, -EINVAL,
			"class %s: page_bytes %u, allowed are 1 to %u",
			c->name, c->page_bytes, DESC_MAX_PAGE);
	if (!c->nsegs || c->nsegs > KVMM_MAX_SEGS)
		return errmsg_set(e, -EINVAL,
			"class %s: nsegs %u, allowed are 1 to %u", c->name,
			c->nsegs, KVMM_MAX_SEGS);

	c->segs = calloc(c->nsegs, sizeof(*c->segs));
	if (!c->segs)
		return errmsg_set(e, -ENOMEM, "out of memory");
	for (i = 0; i < c->nsegs; i++) {
		struct desc_seg *s = &c->segs[i];

		s->bytes = get_int(r, 4);
		s->align = get_int(r, 4);
		s->layer = get_int(r, 2);
		s->what = get_int(r, 1);
		s->shard = get_int(r, 1);
		if (r->short_)
			return 0;	/* the caller says so */
		err = check_seg(d, c, i, sum, e);
		if (err)
			return err;
		sum += s->bytes;
	}
	if (sum != c->page_bytes)
		return errmsg_set(e, -EINVAL,
			"class %s: its segments sum to %llu bytes, page_bytes is %u",
			c->name, (unsigned long long)sum, c->page_bytes);
	return 0;
}

static int get_group(struct reader *r, struct desc *d, uint32_t ix,
		     uint64_t *unit, struct errmsg *e)
{
	struct desc_group *g = &d->group[ix];

	g->class_ix = get_int(r, 2);
	g->rule = get_int(r, 1);
	g->block_tokens = get_int(r, 4);
	g->window_pages = get_int(r, 4);
	if (r->short_)
		return 0;
	if (g->class_ix >= d->nclasses)
		return errmsg_set(e, -EINVAL,
			"group %u: class_ix %u, there are %u classes", ix,
			g->class_ix, d->nclasses);
	if (g->rule < KVMM_FULL || g->rule > KVMM_BLOB)
		return errmsg_set(e, -EINVAL, "group %u: rule %u", ix, g->rule);
	if ((g->rule == KVMM_WINDOW) != (g->window_pages > 0))
		return errmsg_set(e, -EINVAL,
			"group %u: window_pages %u, but rule %u (only a WINDOW has one)",
			ix, g->window_pages, g->rule);
	if (g->rule == KVMM_BLOB)
		return 0;	/* no place in a sequence, so no unit either */
	if (!g->block_tokens || g->block_tokens > DESC_MAX_UNIT)
		return errmsg_set(e, -EINVAL,
			"group %u: block_tokens %u, allowed are 1 to %u", ix,
			g->block_tokens, DESC_MAX_UNIT);
	*unit = *unit / gcd64(*unit, g->block_tokens) * g->block_tokens;
	if (*unit > DESC_MAX_UNIT)
		return errmsg_set(e, -EINVAL,
			"group %u: block_tokens have a common multiple above %u",
			ix, DESC_MAX_UNIT);
	return 0;
}

static int get_strings(struct reader *r, struct desc *d, struct errmsg *e)
{
	const struct {
		char		*out;
		const char	*field;
	} s[] = {
		{ d->model, "model" },
		{ d->revision, "revision" },
		{ d->kv_dtype, "kv_dtype" },
		{ d->scale_format, "scale_format" },
		{ d->layout, "layout" },
		{ d->abi_tag, "abi_tag" },
		{ d->salt, "salt" },
	};
	unsigned int i;
	int err;

	for (i = 0; i < ARRAY_SIZE(s); i++) {
		err = get_str(r, s[i].out, s[i].field, e);
		if (err)
			return err;
	}
	if (!d->model[0] && !r->short_)
		return errmsg_set(e, -EINVAL, "model: empty");
	return 0;
}

static int decode(struct reader *r, struct desc *d, struct errmsg *e)
{
	uint64_t unit = 1;
	uint32_t i;
	int err;

	err = get_strings(r, d, e);
	if (err)
		return err;
	d->world = get_int(r, 2);
	if (!r->short_ && (!d->world || d->world > KVMM_MAX_WORLD))
		return errmsg_set(e, -EINVAL, "world: %u, allowed are 1 to %u",
				  d->world, KVMM_MAX_WORLD);
	d->nclasses = get_int(r, 4);
	if (!r->short_ && (!d->nclasses || d->nclasses > KVMM_MAX_CLASSES))
		return errmsg_set(e, -EINVAL,
			"nclasses: %u, allowed are 1 to %u", d->nclasses,
			KVMM_MAX_CLASSES);
	for (i = 0; i < d->nclasses && !r->short_; i++) {
		err = get_class(r, d, i, e);
		if (err && !r->short_)
			return err;
	}
	d->ngroups = get_int(r, 4);
	if (!r->short_ && (!d->ngroups || d->ngroups > KVMM_MAX_GROUPS))
		return errmsg_set(e, -EINVAL, "ngroups: %u, allowed are 1 to %u",
				  d->ngroups, KVMM_MAX_GROUPS);
	for (i = 0; i < d->ngroups && !r->short_; i++) {
		err = get_group(r, d, i, &unit, e);
		if (err)
			return err;
	}
	if (r->short_)
		return errmsg_set(e, -EINVAL, "the descriptor ends too early");
	if (r->left)
		return errmsg_set(e, -EINVAL,
			"%zu bytes follow the descriptor's end", r->left);
	return 0;
}

int desc_decode(const uint8_t *buf, size_t len, struct desc *d,
		struct errmsg *e)
{
	struct reader r = { .p = buf, .left = len };
	int err;

	memset(d, 0, sizeof(*d));
	if (len > DESC_MAX_BYTES)
		return errmsg_set(e, -EINVAL,
			"the descriptor has %zu bytes, at most %u", len,
			DESC_MAX_BYTES);
	err = decode(&r, d, e);
	if (err)
		desc_fini(d);
	return err;
}

void desc_fini(struct desc *d)
{
	unsigned int i;

	for (i = 0; i < KVMM_MAX_CLASSES; i++)
		free(d->cls[i].segs);
	memset(d, 0, sizeof(*d));
}

/* -- comparing and naming -------------------------------------------------- */

static const char *diff_class(const struct desc_class *a,
			      const struct desc_class *b)
{
	uint32_t i;

	if (strcmp(a->name, b->name))
		return "classes.name";
	if (a->page_bytes != b->page_bytes)
		return "classes.page_bytes";
	if (a->nsegs != b->nsegs)
		return "classes.nsegs";
	for (i = 0; i < a->nsegs; i++) {
		const struct desc_seg *s = &a->segs[i], *t = &b->segs[i];

		if (s->bytes != t->bytes)
			return "classes.segs.bytes";
		if (s->align != t->align)
			return "classes.segs.align";
		if (s->layer != t->layer)
			return "classes.segs.layer";
		if (s->what != t->what)
			return "classes.segs.what";
		if (s->shard != t->shard)
			return "classes.segs.shard";
	}
	return NULL;
}

static const char *diff_group(const struct desc_group *a,
			      const struct desc_group *b)
{
	if (a->class_ix != b->class_ix)
		return "groups.class_ix";
	if (a->rule != b->rule)
		return "groups.rule";
	if (a->block_tokens != b->block_tokens)
		return "groups.block_tokens";
	if (a->window_pages != b->window_pages)
		return "groups.window_pages";
	return NULL;
}

const char *desc_diff(const struct desc *a, const struct desc *b)
{
	const char *field = NULL;
	uint32_t i;

	if (strcmp(a->model, b->model))
		return "model";
	if (strcmp(a->revision, b->revision))
		return "revision";
	if (strcmp(a->kv_dtype, b->kv_dtype))
		return "kv_dtype";
	if (strcmp(a->scale_format, b->scale_format))
		return "scale_format";
	if (strcmp(a->layout, b->layout))
		return "layout";
	if (strcmp(a->abi_tag, b->abi_tag))
		return "abi_tag";
	if (strcmp(a->salt, b->salt))
		return "salt";
	if (a->world != b->world)
		return "world";
	if (a->nclasses != b->nclasses)
		return "nclasses";
	for (i = 0; i < a->nclasses && !field; i++)
		field = diff_class(&a->cls[i], &b->cls[i]);
	if (field)
		return field;
	if (a->ngroups != b->ngroups)
		return "ngroups";
	for (i = 0; i < a->ngroups && !field; i++)
		field = diff_group(&a->group[i], &b->group[i]);
	return field;
}

uint32_t desc_part_bytes(const struct desc_seg *s, uint32_t world)
{
	return s->shard == KVMM_STRIPE ? s->bytes / world : s->bytes;
}

static_assert(DESC_MAX_PAGE + (uint64_t)KVMM_MAX_SEGS * DESC_MAX_ALIGN <=
	      UINT32_MAX, "a part's length fits");

uint32_t desc_part(const struct desc_class *c, uint32_t world, uint32_t *off)
{
	uint32_t at = 0, i;

	for (i = 0; i < c->nsegs; i++) {
		const struct desc_seg *s = &c->segs[i];

		at = round_up(at, s->align);
		if (off)
			off[i] = at;
		at += desc_part_bytes(s, world);
	}
	return at;
}

void desc_space_id(const uint8_t *buf, size_t len, const char *tenant,
		   uint8_t id[32])
{
	static const char domain[] = "kvmm-space-1";
	struct sha256 s;

	sha256_init(&s);
	sha256_update(&s, domain, sizeof(domain) - 1);
	sha256_update(&s, buf, len);
	sha256_update_str(&s, tenant);
	sha256_final(&s, id);
}
