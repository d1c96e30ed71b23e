/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration: what is read, what is refused, and how it is said. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "daemon/log.h"
#include "daemon/node/node.h"
#include "daemon/server/config.h"
#include "ipc/base/clock.h"
#include "tests/lib/unit.h"

#define MIB	(UINT64_C(1) << 20)
#define GIB	(UINT64_C(1) << 30)

static int parse(const char *text, struct config *c, struct errmsg *e)
{
	errmsg_clear(e);
	return config_parse("/etc/kvmm/kvmmd.json", text, strlen(text), c, e);
}

/* @text is refused, and the sentence begins with @where and contains @what. */
static void refused(const char *text, const char *where, const char *what)
{
	static struct config c;
	struct errmsg e;
	char begin[128];

	assert_int_equal(parse(text, &c, &e), -EINVAL);
	snprintf(begin, sizeof(begin), "kvmmd.json:%s", where);
	if (strncmp(e.text, begin, strlen(begin)) || !strstr(e.text, what))
		fail_msg("\"%s\" does not say \"%s\" ... \"%s\"", e.text,
			 begin, what);
}

static void config_reads_the_shape_of_the_tests(void **state)
{
	static struct config c;
	struct errmsg e;

	assert_int_equal(parse(
		"{\"state_dir\": \"/var/lib/x\",\n"
		" \"admin\": {\"socket\": \"/run/x/admin.sock\"},\n"
		" \"sockets\": [{\"path\": \"/run/x/demo.sock\",\n"
		"   \"tenant\": \"demo\", \"rights\": \"rw\", \"mode\": \"on\"}],\n"
		" \"nodes\": [{\"name\": \"dram0\", \"kind\": \"host\",\n"
		"   \"size\": \"256MiB\", \"below\": \"nvme0\"},\n"
		"  {\"name\": \"nvme0\", \"kind\": \"nvme\",\n"
		"   \"path\": \"/var/lib/x/nvme0\", \"size\": \"2GiB\"}],\n"
		" \"policy\": \"lru\"}", &c, &e), 0);
	assert_string_equal(c.state_dir, "/var/lib/x");
	assert_string_equal(c.admin_socket, "/run/x/admin.sock");
	assert_int_equal(c.nr_sockets, 1);
	assert_string_equal(c.socket[0].name, "demo");
	assert_string_equal(c.socket[0].tenant, "demo");
	assert_int_equal(c.socket[0].rights, KVMM_RW);
	assert_int_equal(c.socket[0].mode, KVMM_MODE_ON);
	assert_int_equal(c.nr_nodes, 2);
	assert_int_equal(c.node[0].size, 256 * MIB);
	assert_int_equal(c.node[0].below_ix, 1);
	assert_int_equal(c.node[1].kind, KVMM_NODE_NVME);
	assert_int_equal(c.node[1].size, 2 * GIB);
	assert_int_equal(c.node[1].below_ix, KVMM_NODE_NONE);
}

static void config_reads_every_key(void **state)
{
	static struct config c;
	struct errmsg e;

	assert_int_equal(parse(
		"{\"sockets\": [{\"path\": \"/a.sock\", \"name\": \"n\","
		"  \"rights\": \"ro\", \"mode\": \"readonly\","
		"  \"file_mode\": \"0600\"}],"
		" \"nodes\": [{\"name\": \"d\", \"kind\": \"host\","
		"  \"size\": \"25%\", \"size_max\": \"4GiB\","
		"  \"extent\": \"1MiB\", \"numa\": 1, \"hugepages\": true,"
		"  \"gang\": 4},"
		" {\"name\": \"n\", \"kind\": \"nvme\", \"path\": \"/dev/x\","
		"  \"size\": 1073741824, \"engine\": \"threads\","
		"  \"depth\": 32, \"io_timeout\": \"250ms\","
		"  \"free_floor_pct\": 5, \"admission\": \"all\","
		"  \"writes_per_day\": 0.3, \"discard\": \"segments\","
		"  \"scrub\": \"1MiB\", \"sqpoll\": true,"
		"  \"rebuild\": \"damaged\"}],"
		" \"limits\": {\"max_clients\": 7, \"max_spaces\": 8,"
		"  \"max_requests\": 9, \"pin_limit_pct\": 10,"
		"  \"host_floor_pct\": 20},"
		" \"timeouts\": {\"fetch\": \"1s\", \"direct_reclaim\": \"1ms\","
		"  \"shrink_ack\": \"2s\"},"
		" \"spin_us\": 0, \"log_level\": \"debug\"}", &c, &e), 0);
	assert_int_equal(c.socket[0].rights, KVMM_RO);
	assert_int_equal(c.socket[0].mode, KVMM_MODE_READONLY);
	assert_int_equal(c.socket[0].file_mode, 0600);
	assert_int_equal(c.node[0].size_kind, CONFIG_PERCENT);
	assert_int_equal(c.node[0].size, 25);
	assert_int_equal(c.node[0].size_max, 4 * GIB);
	assert_int_equal(c.node[0].extent_bytes, MIB);
	assert_int_equal(c.node[0].numa, 1);
	assert_int_equal(c.node[0].gang, 4);
	assert_true(c.node[0].hugepages);
	assert_int_equal(c.node[1].size, GIB);
	assert_int_equal(c.node[1].engine, NVME_ENGINE_THREADS);
	assert_int_equal(c.node[1].depth, 32);
	assert_int_equal(c.node[1].io_timeout_ns, 250 * NSEC_PER_MSEC);
	assert_int_equal(c.node[1].free_floor_pct, 5);
	assert_int_equal(c.node[1].second_touch, 0);
	assert_int_equal(c.node[1].day_permille, 300);
	assert_int_equal(c.node[1].scrub_bytes_s, 1 << 20);
	assert_int_equal(c.node[1].discard, 1);
	assert_true(c.node[1].sqpoll);
	assert_int_equal(c.node[1].rebuild, 1);
	assert_int_equal(c.max_clients, 7);
	assert_int_equal(c.max_spaces, 8);
	assert_int_equal(c.max_requests, 9);
	assert_int_equal(c.pin_limit_pct, 10);
	assert_int_equal(c.host_floor_pct, 20);
	assert_int_equal(c.fetch_ns, NSEC_PER_SEC);
	assert_int_equal(c.direct_reclaim_ns, NSEC_PER_MSEC);
	assert_int_equal(c.shrink_ack_ns, 2 * NSEC_PER_SEC);
	assert_int_equal(c.spin_us, 0);
	assert_int_equal(c.log_level, LOG_LVL_DEBUG);
}

static void config_refuses_syntax_with_its_line(void **state)
{
	refused("{\n\n\"policy\" \"lru\"}", "3: ", "':' expected");
	refused("", "1: ", "");
	refused("[]", "1: ", "an object is expected");
	refused("{\"spin_us\": 1,\n\"spin_us\": 2}", "2: ", "duplicate");
}

static void config_refuses_unknown_keys_and_names_the_known(void **state)
{
	refused("{\n \"sockts\": []}", "2: sockts: ", "state_dir, admin, sockets");
	refused("{\"limits\": {\n\"max\": 1}}", "2: limits.max: ",
		"max_clients, max_spaces");
	refused("{\"nodes\": [\n{\"name\": \"a\",\n\"sice\": 1}]}",
		"3: nodes[0].sice: ", "allowed: name, kind, size");
	refused("{\"sockets\": [{\"path\": \"/a\"}, \n{\"pat\": \"/b\"}]}",
		"2: sockets[1].pat: ", "allowed: path, name, tenant");
	refused("{\"admin\": {\"path\": \"/x\"}}", "1: admin.path: ", "socket");
	refused("{\"timeouts\": {\"fetsch\": \"1s\"}}", "1: timeouts.fetsch: ",
		"fetch, direct_reclaim, shrink_ack, crash_window");
}

#define NODE(rest)	"{\"nodes\": [{\"name\": \"a\", \"kind\": \"host\",\n" rest "}]}"
#define NVME(rest)	"{\"nodes\": [{\"name\": \"a\", \"kind\": \"host\", " \
			"\"size\": \"1GiB\"}, {\"name\": \"b\", "	    \
			"\"kind\": \"nvme\", \n" rest "}]}"
#define SOCKET(rest)	"{\"sockets\": [{\"path\": \"/a.sock\",\n" rest "}]}"

static void config_refuses_values_and_says_the_range(void **state)
{
	refused("{\"state_dir\": \"here\"}", "1: state_dir: ", "absolute");
	refused("{\"state_dir\": \"/a\\u0000b\"}", "1: ", "");
	refused("{\"admin\": 1}", "1: admin: ", "1 is not allowed; an object");
	refused("{\"admin\": {\"socket\": \"\"}}", "1: admin.socket: ",
		"107 bytes");
	refused("{\"policy\": \"fifo\"}", "1: policy: ", "\"lru\"");
	refused("{\"policy\": \"a/b\"}", "1: policy: ", "\"lru\"");
	refused("{\"spin_us\": 1001}", "1: spin_us: ", "0 to 1000");
	refused("{\"spin_us\": -1}", "1: spin_us: ", "0 to 1000");
	refused("{\"spin_us\": \"50us\"}", "1: spin_us: ", "0 to 1000");
	refused("{\"log_level\": \"loud\"}", "1: log_level: ", "\"notice\"");
	refused("{\"limits\": {\"max_clients\": 257}}", "1: limits.max_clients",
		"257 is not allowed; 1 to 256");
	refused("{\"limits\": {\"max_clients\": 0}}", "1: ", "1 to 256");
	refused("{\"limits\": {\"max_spaces\": 1.5}}", "1: ", "1 to 256");
	refused("{\"limits\": {\"max_requests\": 2000000}}", "1: ", "1048576");
	refused("{\"limits\": {\"pin_limit_pct\": 101}}", "1: ", "1 to 100");
	refused("{\"timeouts\": {\"fetch\": 2}}", "1: timeouts.fetch: ",
		"1ms to 1h");
	refused("{\"timeouts\": {\"fetch\": \"2\"}}", "1: ", "1ms to 1h");
	refused("{\"timeouts\": {\"direct_reclaim\": \"2s\"}}", "1: ",
		"0ms to 1s");
	refused("{\"timeouts\": {\"shrink_ack\": \"0ms\"}}", "1: ", "1ms to 1h");
}

static void config_refuses_bad_sockets(void **state)
{
	refused("{\"sockets\": []}", "1: sockets: ", "1 to 64");
	refused("{\"sockets\": [1]}", "1: sockets[0]: ", "1 is not allowed");
	refused("{\"sockets\": [{}]}", "1: sockets[0]: ", "\"path\" is missing");
	refused(SOCKET("\"rights\": \"rwx\""), "2: sockets[0].rights: ",
		"\"rw\" or \"ro\"");
	refused(SOCKET("\"mode\": \"off\""), "2: sockets[0].mode: ",
		"\"observe\"");
	refused(SOCKET("\"tenant\": \"a b\""), "2: sockets[0].tenant: ",
		"letters");
	refused(SOCKET("\"file_mode\": 660"), "2: sockets[0].file_mode: ",
		"octal");
	refused(SOCKET("\"file_mode\": \"1777\""), "2: ", "octal");
	refused("{\"sockets\": [{\"path\": \"/a.sock\"},\n{\"path\": \"/a.sock\"}]}",
		"2: sockets[1]: ", "same path");
	refused("{\"sockets\": [{\"path\": \"/a.sock\"},\n{\"path\": \"/b/a.sock\"}]}",
		"2: sockets[1]: ", "give one another \"name\"");
	refused("{\"admin\": {\"socket\": \"/a\"}, \"sockets\": [{\"path\": \"/a\"}]}",
		"1: ", "admin socket");
}

static void config_refuses_bad_nodes(void **state)
{
	refused("{\"nodes\": []}", "1: nodes: ", "1 to 16");
	refused("{\"nodes\": [{}]}", "1: nodes[0]: ", "\"name\" is missing");
	refused("{\"nodes\": [{\"name\": \"a\"}]}", "1: nodes[0]: ",
		"\"kind\" is missing");
	refused("{\"nodes\": [{\"name\": \"a\", \"kind\": \"host\"}]}",
		"1: nodes[0]: ", "\"size\" is missing");
	refused(NODE("\"size\": \"12Qi\""), "2: nodes[0].size: ",
		"\"12Qi\" is not allowed; 1MiB to 256TiB");
	refused(NODE("\"size\": 100"), "2: nodes[0].size: ", "1MiB");
	refused(NODE("\"size\": \"91%\""), "2: nodes[0].size: ", "90%");
	refused(NODE("\"size\": \"0%\""), "2: nodes[0].size: ", "90%");
	refused(NODE("\"size\": \"1GiB\", \"size_max\": \"1MiB\""),
		"1: nodes[0]: ", "less than \"size\"");
	refused(NODE("\"size\": \"1GiB\", \"path\": \"/x\""), "1: nodes[0]: ",
		"\"nvme\"");
	refused(NODE("\"size\": \"1GiB\", \"extent\": \"1KiB\""),
		"2: nodes[0].extent: ", "64KiB to 1GiB");
	refused(NODE("\"size\": \"1GiB\", \"hugepages\": 1"),
		"2: nodes[0].hugepages: ", "true or false");
	refused(NODE("\"size\": \"1GiB\", \"numa\": -1"), "2: nodes[0].numa: ",
		"0 to 1023");
	refused(NODE("\"size\": \"1GiB\", \"gang\": 1"), "2: nodes[0].gang: ",
		"2 to 8");
	refused(NODE("\"size\": \"1GiB\", \"gang\": 9"), "2: nodes[0].gang: ",
		"2 to 8");
	refused(NVME("\"size\": \"1GiB\", \"gang\": 2"), "1: nodes[1]: ",
		"\"host\"");
	refused(NODE("\"size\": \"1GiB\", \"below\": \"b\""),
		"2: nodes[0].below: ", "no nvme node \"b\"");
	refused(NODE("\"size\": \"1GiB\", \"below\": \"a\""),
		"2: nodes[0].below: ", "no nvme node \"a\"");
	refused(NODE("\"size\": \"1GiB\", \"name2\": 1"), "2: nodes[0].name2",
		"unknown key");
	refused("{\"nodes\": [{\"name\": \"a\", \"kind\": \"gpu\"}]}",
		"1: nodes[0].kind: ", "\"host\" or \"nvme\"");
	refused("{\"nodes\": [{\"name\": \"sixteen-letters!\"}]}",
		"1: nodes[0].name: ", "15 bytes");
	refused(NVME("\"size\": \"1GiB\""), "1: nodes[1]: ",
		"\"path\" is missing");
	refused(NVME("\"size\": \"auto\", \"path\": \"/x\""), "1: nodes[1]: ",
		"bytes");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"x\""),
		"2: nodes[1].path: ", "absolute");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"engine\": \"aio\""),
		"2: nodes[1].engine: ", "io_uring");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"depth\": 0"),
		"2: nodes[1].depth: ", "1 to 1024");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"io_timeout\": \"0ms\""),
		"2: nodes[1].io_timeout: ", "1ms to 60s");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"free_floor_pct\": 91"),
		"2: nodes[1].free_floor_pct: ", "0 to 90, per cent");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"free_floor_pct\": -1"),
		"2: nodes[1].free_floor_pct: ", "0 to 90, per cent");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"admission\": \"some\""),
		"2: nodes[1].admission: ", "\"second-touch\" or \"all\"");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"writes_per_day\": -1"),
		"2: nodes[1].writes_per_day: ", "0 to 1000 times");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"writes_per_day\": 0.0005"),
		"2: nodes[1].writes_per_day: ", "in thousandths");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"writes_per_day\": \"1\""),
		"2: nodes[1].writes_per_day: ", "in thousandths");
	refused(NODE("\"size\": \"1GiB\", \"writes_per_day\": 1"),
		"1: nodes[0]: ", "\"nvme\"");
	refused(NODE("\"size\": \"1GiB\", \"scrub\": 1"),
		"1: nodes[0]: ", "\"nvme\"");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"scrub\": \"1TiB\""),
		"2: nodes[1].scrub: ", "16GiB a second");
	refused(NODE("\"size\": \"1GiB\", \"admission\": \"all\""),
		"1: nodes[0]: ", "\"nvme\"");
	refused(NODE("\"size\": \"1GiB\", \"free_floor_pct\": 0"),
		"1: nodes[0]: ", "\"nvme\"");
	refused(NVME("\"size\": \"1GiB\", \"path\": \"/x\", \"below\": \"a\""),
		"1: nodes[1]: ", "\"host\"");
	refused("{\"nodes\": [{\"name\": \"b\", \"kind\": \"nvme\","
		"\"path\": \"/x\", \"size\": \"1GiB\"}]}", "1: nodes: ",
		"at least one node of kind \"host\"");
	refused("{\"nodes\": [{\"name\": \"a\", \"kind\": \"host\", \"size\": \"1GiB\"},"
		"{\"name\": \"a\", \"kind\": \"host\", \"size\": \"1GiB\"}]}",
		"1: nodes[1]: ", "nodes[0] is called \"a\", too");
}

static void config_is_unchanged_when_refused(void **state)
{
	static struct config c, before;
	struct errmsg e;

	config_defaults(&c);
	before = c;
	assert_int_equal(parse("{\"spin_us\": 1, \"x\": 1}", &c, &e), -EINVAL);
	assert_memory_equal(&c, &before, sizeof(c));
}

static char *printed(const struct config *c)
{
	char *text = NULL;
	size_t len = 0;
	FILE *f = open_memstream(&text, &len);

	assert_int_equal(config_print(c, f), 0);
	fclose(f);
	return text;
}

/* What @c prints is read back as the same. */
static void round_trip(const struct config *c)
{
	static struct config back;
	struct errmsg e = { "" };
	char *text = printed(c), *again;

	if (parse(text, &back, &e))
		fail_msg("%s", e.text);
	again = printed(&back);
	assert_string_equal(text, again);
	free(text);
	free(again);
}

static void config_prints_what_it_reads(void **state)
{
	static struct config c;
	struct errmsg e = { "" };

	assert_int_equal(parse(NVME("\"size\": \"3000000\", \"path\": \"/x\","
				    "\"io_timeout\": \"1500us\", \"depth\": 3"),
			       &c, &e), 0);
	/* a tenth of the file system stays free unless it says otherwise */
	assert_int_equal(c.node[1].free_floor_pct, 10);
	assert_int_equal(c.node[1].second_touch, 1);
	assert_int_equal(c.node[1].day_permille, 1000);
	assert_int_equal(c.node[0].second_touch, 0);
	assert_int_equal(c.node[0].day_permille, 0);
	assert_int_equal(c.node[1].scrub_bytes_s, 16 << 20);
	assert_int_equal(c.node[0].scrub_bytes_s, 0);
	round_trip(&c);
	assert_int_equal(parse(NVME("\"size\": \"1GiB\", \"path\": \"/x\","
				    "\"free_floor_pct\": 0"), &c, &e), 0);
	assert_int_equal(c.node[1].free_floor_pct, 0);
	round_trip(&c);
	assert_int_equal(parse(NODE("\"size\": \"1GiB\", \"gang\": 8"), &c, &e),
			 0);
	assert_int_equal(c.node[0].gang, 8);
	round_trip(&c);
}

static void config_defaults_are_a_configuration(void **state)
{
	static struct config c, empty;
	char *a, *b;
	struct errmsg e;

	config_defaults(&c);
	round_trip(&c);
	assert_int_equal(parse("{}", &empty, &e), 0);
	a = printed(&c);
	b = printed(&empty);
	assert_string_equal(a, b);
	free(a);
	free(b);
	assert_int_equal(c.socket[0].mode, KVMM_MODE_OBSERVE);
	assert_int_equal(c.fetch_ns, 2 * NSEC_PER_SEC);
}

static void resolve_leaves_room_for_the_engines(void **state)
{
	static struct config c;
	struct errmsg e;

	/* a quarter, when that leaves 16 GiB and a tenth */
	config_defaults(&c);
	assert_int_equal(config_resolve(&c, 512 * GIB, 500 * GIB, &e), 0);
	assert_int_equal(c.node[0].bytes, 128 * GIB);
	assert_int_equal(c.node[0].size_max, 512 * GIB);
	/* what is available less the headroom */
	config_defaults(&c);
	assert_int_equal(config_resolve(&c, 64 * GIB, 20 * GIB, &e), 0);
	assert_int_equal(c.node[0].bytes, 4 * GIB);
	/* a machine smaller than the headroom */
	config_defaults(&c);
	assert_int_equal(config_resolve(&c, 8 * GIB, 6 * GIB, &e), 0);
	assert_int_equal(c.node[0].bytes, GIB / 2);
}

static void resolve_takes_per_cent_of_memory(void **state)
{
	static struct config c;
	struct errmsg e;

	assert_int_equal(parse(NODE("\"size\": \"25%\""), &c, &e), 0);
	assert_int_equal(config_resolve(&c, 100 * GIB, GIB, &e), 0);
	assert_int_equal(c.node[0].bytes, 25 * GIB);
	assert_int_equal(parse(NODE("\"size\": \"25%\", \"size_max\": \"1GiB\""),
			       &c, &e), 0);
	assert_int_equal(config_resolve(&c, 100 * GIB, GIB, &e), -EINVAL);
	assert_non_null(strstr(e.text, "node a: size_max"));
}

static void text_reads_sizes_and_durations(void **state)
{
	uint64_t v;
	char buf[32];

	assert_int_equal(text_bytes("4096", &v), 0);
	assert_int_equal(v, 4096);
	assert_int_equal(text_bytes("1.5GiB", &v), 0);
	assert_int_equal(v, 3 * GIB / 2);
	assert_int_equal(text_bytes("2 GB", &v), 0);
	assert_int_equal(v, 2000000000);
	assert_int_equal(text_bytes("1.5B", &v), -EINVAL);
	assert_int_equal(text_bytes("", &v), -EINVAL);
	assert_int_equal(text_bytes("-1", &v), -EINVAL);
	assert_int_equal(text_bytes("1.GiB", &v), -EINVAL);
	assert_int_equal(text_bytes("99999999999TiB", &v), -ERANGE);
	assert_int_equal(text_bytes("99999999999999999999", &v), -ERANGE);
	assert_int_equal(text_ns("500ms", &v), 0);
	assert_int_equal(v, 500 * NSEC_PER_MSEC);
	assert_int_equal(text_ns("10min", &v), 0);
	assert_int_equal(v, 600 * NSEC_PER_SEC);
	assert_int_equal(text_ns("5", &v), -EINVAL);
	assert_int_equal(text_ns("5m", &v), -EINVAL);
	assert_string_equal(text_of_bytes(3 * GIB / 2, buf, sizeof(buf)),
			    "1536MiB");
	assert_string_equal(text_of_bytes(1000, buf, sizeof(buf)), "1000B");
	assert_string_equal(text_of_ns(90 * NSEC_PER_SEC, buf, sizeof(buf)),
			    "90s");
	assert_string_equal(text_of_ns(0, buf, sizeof(buf)), "0ns");
}

static void load_says_what_open_says(void **state)
{
	static struct config c;
	struct errmsg e;

	assert_int_equal(config_load("/nonexistent/kvmmd.json", &c, &e),
			 -ENOENT);
	assert_non_null(strstr(e.text, "/nonexistent/kvmmd.json: No such"));
	assert_int_equal(config_load("/", &c, &e), -EISDIR);
	assert_int_equal(config_load("/dev/zero", &c, &e), -E2BIG);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(config_reads_the_shape_of_the_tests),
		cmocka_unit_test(config_reads_every_key),
		cmocka_unit_test(config_refuses_syntax_with_its_line),
		cmocka_unit_test(config_refuses_unknown_keys_and_names_the_known),
		cmocka_unit_test(config_refuses_values_and_says_the_range),
		cmocka_unit_test(config_refuses_bad_sockets),
		cmocka_unit_test(config_refuses_bad_nodes),
		cmocka_unit_test(config_is_unchanged_when_refused),
		cmocka_unit_test(config_prints_what_it_reads),
		cmocka_unit_test(config_defaults_are_a_configuration),
		cmocka_unit_test(resolve_leaves_room_for_the_engines),
		cmocka_unit_test(resolve_takes_per_cent_of_memory),
		cmocka_unit_test(text_reads_sizes_and_durations),
		cmocka_unit_test(load_says_what_open_says),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
