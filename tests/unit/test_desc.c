/* SPDX-License-Identifier: Apache-2.0 */
#include <openssl/evp.h>
#include <string.h>

#include <kvmm/kvmm.h>

#include "ipc/base/rand.h"
#include "ipc/desc.h"
#include "tests/lib/unit.h"

/* A descriptor that tests can break in one place. */
struct one {
	struct kvmm_seg		seg[2][2];
	struct kvmm_class	cls[2];
	struct kvmm_group	group[3];
	struct kvmm_desc	d;
};

static void fill(struct one *o)
{
	*o = (struct one){
		.seg = {
			{ { 1024, 64, 0, KVMM_SEG_K, KVMM_STRIPE },
			  { 1024, 64, 0, KVMM_SEG_V, KVMM_STRIPE } },
			{ { 4096, 4096, 1, KVMM_SEG_STATE, KVMM_MIRROR },
			  { 64, 64, 1, KVMM_SEG_SCALE, KVMM_MIRROR } },
		},
		.cls = {
			{ "kv", 2048, 2, o->seg[0] },
			{ "state", 4160, 2, o->seg[1] },
		},
		.group = {
			{ 0, KVMM_FULL, 0, 16, 0 },
			{ 0, KVMM_WINDOW, 0, 32, 4 },
			{ 1, KVMM_LAST, 0, 48, 0 },
		},
	};
	o->d = (struct kvmm_desc){
		.size = sizeof(o->d), .model = "m", .revision = "r",
		.kv_dtype = "bf16", .scale_format = NULL, .layout = "nhd",
		.abi_tag = "a", .salt = "s", .world = 4, .nclasses = 2,
		.ngroups = 3, .classes = o->cls, .groups = o->group,
	};
}

static uint8_t buf[DESC_MAX_BYTES];

static void what_is_encoded_is_decoded(void **state)
{
	struct errmsg e;
	struct desc d;
	struct one o;
	int n;

	fill(&o);
	n = desc_encode(&o.d, buf, &e);
	assert_true(n > 0);
	assert_int_equal(desc_decode(buf, n, &d, &e), 0);
	assert_string_equal(d.model, "m");
	assert_string_equal(d.scale_format, "");
	assert_string_equal(d.salt, "s");
	assert_int_equal(d.world, 4);
	assert_int_equal(d.nclasses, 2);
	assert_string_equal(d.cls[1].name, "state");
	assert_int_equal(d.cls[1].segs[1].bytes, 64);
	assert_int_equal(d.cls[0].segs[1].what, KVMM_SEG_V);
	assert_int_equal(d.group[1].window_pages, 4);
	assert_int_equal(d.group[2].block_tokens, 48);
	desc_fini(&d);
}

/* The canonical form is an ABI: it is what two kvmmd must agree on. */
static void the_first_bytes_are_what_the_header_says(void **state)
{
	static const uint8_t want[] = {
		1, 0, 0, 0, 'm', 1, 0, 0, 0, 'r', 4, 0, 0, 0, 'b', 'f', '1',
		'6', 0, 0, 0, 0, 3, 0, 0, 0, 'n', 'h', 'd', 1, 0, 0, 0, 'a',
		1, 0, 0, 0, 's', 4, 0, 2, 0, 0, 0, 2, 0, 0, 0, 'k', 'v',
		0, 8, 0, 0, 2, 0, 0, 0, 0, 4, 0, 0, 64, 0, 0, 0, 0, 0,
		KVMM_SEG_K, KVMM_STRIPE,
	};
	struct errmsg e;
	struct one o;

	fill(&o);
	assert_true(desc_encode(&o.d, buf, &e) > (int)sizeof(want));
	assert_memory_equal(buf, want, sizeof(want));
}

#define REFUSED(what, err, word) do {					\
	struct errmsg e = { "" };					\
	struct one o;							\
									\
	fill(&o);							\
	what;								\
	assert_int_equal(desc_encode(&o.d, buf, &e), err);		\
	if (!strstr(e.text, word))					\
		fail_msg("%s: \"%s\" does not name %s", #what, e.text,	\
			 word);						\
} while (0)

static char long_name[KVMM_MAX_STR + 1];

static void each_wrong_field_is_named(void **state)
{
	memset(long_name, 'x', KVMM_MAX_STR);
	REFUSED(o.d.model = "", -EINVAL, "model");
	REFUSED(o.d.model = NULL, -EINVAL, "model");
	REFUSED(o.d.revision = long_name, -EINVAL, "revision");
	REFUSED(o.d.abi_tag = "a\nb", -EINVAL, "abi_tag");
	REFUSED(o.d.layout = "a\x7f", -EINVAL, "layout");
	REFUSED(o.d.model = "caf\xe9", -EINVAL, "UTF-8");
	REFUSED(o.d.model = "cut \xe2\x82", -EINVAL, "UTF-8");
	REFUSED(o.d.model = "long \xc0\xaf", -EINVAL, "UTF-8");
	REFUSED(o.d.model = "half \xed\xa0\x80", -EINVAL, "UTF-8");
	REFUSED(o.d.model = "far \xf4\x90\x80\x80", -EINVAL, "UTF-8");
	REFUSED(o.d.model = "c1 \xc2\x9b", -EINVAL, "control");
	REFUSED(o.d.world = 0, -EINVAL, "world");
	REFUSED(o.d.world = KVMM_MAX_WORLD + 1, -EINVAL, "world");
	REFUSED(o.d.nclasses = 0, -EINVAL, "nclasses");
	REFUSED(o.d.nclasses = KVMM_MAX_CLASSES + 1, -EINVAL, "nclasses");
	REFUSED(o.d.classes = NULL, -EINVAL, "classes");
	REFUSED(o.d.ngroups = 0, -EINVAL, "ngroups");
	REFUSED(o.d.ngroups = KVMM_MAX_GROUPS + 1, -EINVAL, "ngroups");
	REFUSED(o.d.groups = NULL, -EINVAL, "groups");
	REFUSED(o.cls[1].name = "kv", -EINVAL, "kv");
	REFUSED(o.cls[0].name = "", -EINVAL, "name");
	REFUSED(o.cls[0].page_bytes = 2047, -EINVAL, "sum to 2048");
	REFUSED(o.cls[0].page_bytes = 0, -EINVAL, "page_bytes");
	REFUSED(o.cls[0].nsegs = 0, -EINVAL, "nsegs");
	REFUSED(o.cls[0].nsegs = KVMM_MAX_SEGS + 1, -EINVAL, "nsegs");
	REFUSED(o.cls[0].segs = NULL, -EINVAL, "nsegs");
	REFUSED(o.seg[0][0].bytes = 0, -EINVAL, "bytes");
	REFUSED(o.seg[0][0].align = 48, -EINVAL, "align");
	REFUSED(o.seg[0][0].align = 8192, -EINVAL, "align");
	REFUSED(o.seg[0][1].align = 2048, -EINVAL, "align");
	REFUSED(o.seg[0][0].what = 0, -EINVAL, "what");
	REFUSED(o.seg[0][0].what = KVMM_SEG_INDEX + 1, -EINVAL, "what");
	REFUSED(o.seg[0][0].shard = 3, -EINVAL, "shard");
	REFUSED(o.seg[0][0].bytes = 1023, -EINVAL, "world");
	REFUSED(o.group[0].class_ix = 2, -EINVAL, "class_ix");
	REFUSED(o.group[0].rule = 0, -EINVAL, "rule");
	REFUSED(o.group[0].rule = KVMM_BLOB + 1, -EINVAL, "rule");
	REFUSED(o.group[0].block_tokens = 0, -EINVAL, "block_tokens");
	REFUSED(o.group[0].window_pages = 1, -EINVAL, "window_pages");
	REFUSED(o.group[1].window_pages = 0, -EINVAL, "window_pages");
	REFUSED((o.group[0].block_tokens = (1 << 24) - 1,
		 o.group[1].block_tokens = (1 << 24) - 3), -EINVAL,
		"common multiple");
}

static void a_descriptor_that_does_not_fit_is_refused(void **state)
{
	static struct kvmm_seg segs[KVMM_MAX_SEGS];
	struct kvmm_class cls[KVMM_MAX_CLASSES];
	static const char *const name[] = {
		"a", "b", "c", "d", "e", "f", "g", "h",
	};
	struct errmsg e;
	struct one o;
	int i;

	for (i = 0; i < KVMM_MAX_SEGS; i++)
		segs[i] = (struct kvmm_seg){ 64, 64, 0, KVMM_SEG_K,
					     KVMM_MIRROR };
	for (i = 0; i < KVMM_MAX_CLASSES; i++)
		cls[i] = (struct kvmm_class){ name[i], 64 * KVMM_MAX_SEGS,
					      KVMM_MAX_SEGS, segs };
	fill(&o);
	o.d.classes = cls;
	o.d.nclasses = KVMM_MAX_CLASSES;
	assert_int_equal(desc_encode(&o.d, buf, &e), -E2BIG);
}

static void shorter_and_longer_bytes_are_refused(void **state)
{
	struct errmsg e;
	struct desc d;
	struct one o;
	int n, i;

	fill(&o);
	n = desc_encode(&o.d, buf, &e);
	for (i = 0; i < n; i++)
		assert_int_equal(desc_decode(buf, i, &d, &e), -EINVAL);
	assert_int_equal(desc_decode(buf, n + 1, &d, &e), -EINVAL);
	assert_int_equal(desc_decode(buf, n, &d, &e), 0);
	desc_fini(&d);
}

/* Whatever comes, there is an answer, and what is accepted is what it says. */
static void changed_bytes_are_refused_or_mean_something_else(void **state)
{
	static uint8_t other[DESC_MAX_BYTES];
	struct errmsg e;
	struct desc a, b;
	struct rng r;
	struct one o;
	int n, i;

	fill(&o);
	n = desc_encode(&o.d, buf, &e);
	assert_int_equal(desc_decode(buf, n, &a, &e), 0);
	rng_seed(&r, test_seed());
	for (i = 0; i < 20000; i++) {
		uint32_t at = rng_below(&r, n);

		memcpy(other, buf, n);
		other[at] ^= 1 + rng_below(&r, 255);
		if (desc_decode(other, n, &b, &e))
			continue;
		assert_non_null(desc_diff(&a, &b));
		desc_fini(&b);
	}
	desc_fini(&a);
}

#define DIFFERS(what, field) do {					\
	struct errmsg e = { "" };					\
	struct desc a, b;						\
	struct one o;							\
	int n;								\
									\
	fill(&o);							\
	n = desc_encode(&o.d, buf, &e);					\
	assert_int_equal(desc_decode(buf, n, &a, &e), 0);		\
	what;								\
	n = desc_encode(&o.d, buf, &e);					\
	assert_int_equal(desc_decode(buf, n, &b, &e), 0);		\
	assert_string_equal(desc_diff(&a, &b), field);			\
	assert_null(desc_diff(&a, &a));					\
	desc_fini(&a);							\
	desc_fini(&b);							\
} while (0)

static void names_may_be_in_any_script(void **state)
{
	struct errmsg e = { "" };
	struct one o;

	fill(&o);
	o.d.model = "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xf4\x8f\xbf\xbd";
	if (desc_encode(&o.d, buf, &e) < 0)
		fail_msg("%s", e.text);
}

static void the_first_difference_is_named(void **state)
{
	DIFFERS(o.d.model = "n", "model");
	DIFFERS(o.d.revision = "n", "revision");
	DIFFERS(o.d.kv_dtype = "n", "kv_dtype");
	DIFFERS(o.d.scale_format = "n", "scale_format");
	DIFFERS(o.d.layout = "n", "layout");
	DIFFERS(o.d.abi_tag = "n", "abi_tag");
	DIFFERS(o.d.salt = "n", "salt");
	DIFFERS(o.d.world = 2, "world");
	DIFFERS(o.cls[0].name = "n", "classes.name");
	DIFFERS(o.seg[0][1].layer = 9, "classes.segs.layer");
	DIFFERS(o.seg[1][1].what = KVMM_SEG_INDEX, "classes.segs.what");
	DIFFERS(o.seg[0][1].align = 32, "classes.segs.align");
	DIFFERS(o.d.ngroups = 2, "ngroups");
	DIFFERS(o.group[1].window_pages = 5, "groups.window_pages");
	DIFFERS(o.group[0].block_tokens = 8, "groups.block_tokens");
}

static void a_space_is_its_descriptor_and_its_tenant(void **state)
{
	static const uint8_t tenant[] = { 5, 0, 0, 0, 't', 'e', 'a', 'm', 'a' };
	uint8_t id[32], other[32], want[32];
	EVP_MD_CTX *ctx = EVP_MD_CTX_new();
	struct errmsg e;
	struct one o;
	int n;

	fill(&o);
	n = desc_encode(&o.d, buf, &e);
	desc_space_id(buf, n, "teama", id);
	EVP_DigestInit_ex(ctx, EVP_sha256(), NULL);
	EVP_DigestUpdate(ctx, "kvmm-space-1", 12);
	EVP_DigestUpdate(ctx, buf, n);
	EVP_DigestUpdate(ctx, tenant, sizeof(tenant));
	EVP_DigestFinal_ex(ctx, want, NULL);
	EVP_MD_CTX_free(ctx);
	assert_memory_equal(id, want, 32);
	desc_space_id(buf, n, "teamb", other);
	assert_memory_not_equal(id, other, 32);
}

static void a_part_is_the_page_where_the_world_is_one(void **state)
{
	struct errmsg e;
	struct desc d;
	uint32_t off[2];
	struct one o;

	fill(&o);
	o.d.world = 1;
	assert_int_equal(desc_decode(buf, desc_encode(&o.d, buf, &e), &d, &e),
			 0);
	assert_int_equal(desc_part(&d.cls[0], 1, off), 2048);
	assert_int_equal(off[0], 0);
	assert_int_equal(off[1], 1024);
	assert_int_equal(desc_part(&d.cls[1], 1, NULL), 4160);
	desc_fini(&d);
}

static void a_part_has_a_share_of_stripes_and_all_of_mirrors(void **state)
{
	struct errmsg e;
	struct desc d;
	uint32_t off[2];
	struct one o;

	fill(&o);
	o.seg[1][0].shard = KVMM_STRIPE;
	o.seg[1][1].align = 512;
	assert_int_equal(desc_decode(buf, desc_encode(&o.d, buf, &e), &d, &e),
			 0);
	assert_int_equal(desc_part(&d.cls[0], 4, off), 512);
	assert_int_equal(off[1], 256);
	/* 4096 / 4, then at the next multiple of 512, all 64 */
	assert_int_equal(desc_part(&d.cls[1], 4, off), 1024 + 64);
	assert_int_equal(off[1], 1024);
	d.cls[1].segs[0].bytes = 4 * 1000;
	assert_int_equal(desc_part(&d.cls[1], 4, off), 1024 + 64);
	assert_int_equal(off[1], 1024);
	desc_fini(&d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_encoded_is_decoded),
		cmocka_unit_test(the_first_bytes_are_what_the_header_says),
		cmocka_unit_test(each_wrong_field_is_named),
		cmocka_unit_test(a_descriptor_that_does_not_fit_is_refused),
		cmocka_unit_test(shorter_and_longer_bytes_are_refused),
		cmocka_unit_test(changed_bytes_are_refused_or_mean_something_else),
		cmocka_unit_test(names_may_be_in_any_script),
		cmocka_unit_test(the_first_difference_is_named),
		cmocka_unit_test(a_space_is_its_descriptor_and_its_tenant),
		cmocka_unit_test(a_part_is_the_page_where_the_world_is_one),
		cmocka_unit_test(a_part_has_a_share_of_stripes_and_all_of_mirrors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
