/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The packaged service with a client, pages and an NVMe device, under a real
 * systemd: what was in DRAM is there after kill -9, because systemd kept it, and
 * what had gone down is there even after a stop. All of it inside the sandbox of
 * the unit, with the drop-in that kvmmd.service names for a block device.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define CHAIN		8		/* pages */
#define CHAINS		60		/* 30 MiB */
#define DRAM		"16777216"
#define LONG_WAIT	60000
#define GROUP_US	500000		/* a record is on the medium by then */

static const char config[] =
	"{\"state_dir\": \"/var/lib/kvmm\","
	" \"admin\": {\"socket\": \"/run/kvmm/admin.sock\"},"
	" \"timeouts\": {\"direct_reclaim\": \"1s\"},"
	" \"sockets\": [{\"name\": \"default\","
	"   \"path\": \"/run/kvmm/default.sock\", \"tenant\": \"default\","
	"   \"rights\": \"rw\", \"mode\": \"on\"}],"
	" \"nodes\": ["
	"  {\"name\": \"dram0\", \"kind\": \"host\", \"size\": \"" DRAM "\","
	"   \"size_max\": \"" DRAM "\", \"below\": \"nvme0\"},"
	"  {\"name\": \"nvme0\", \"kind\": \"nvme\", \"path\": \"%s\","
	"   \"size\": \"209715200\", \"admission\": \"all\","
	"   \"writes_per_day\": 0, \"io_timeout\": \"20s\"}]}\n";

/* Who is asked; the process is systemd's. */
static struct test_daemon d = {
	.admin = "/run/kvmm/admin.sock",
	.socket = "/run/kvmm/default.sock",
};
static struct tc c;

/* Pages that those have lost that ended, by their own account. */
static unsigned int nr_lost;

static void sh(const char *cmd)
{
	T_CHECK(!system(cmd), "%s", cmd);
}

/* @dropin: lines for its [Service] */
static void service(const char *path, const char *dropin)
{
	FILE *f;

	sh("systemctl stop kvmmd.service kvmmd.socket");
	f = fopen("/etc/kvmm/kvmmd.json", "we");
	T_CHECK(f != NULL);
	fprintf(f, config, path);
	T_EQ(fclose(f), 0);
	sh("mkdir -p /etc/systemd/system/kvmmd.service.d");
	f = fopen("/etc/systemd/system/kvmmd.service.d/nvme.conf", "we");
	T_CHECK(f != NULL);
	fprintf(f, "[Service]\n%s", dropin);
	T_EQ(fclose(f), 0);
	sh("systemctl daemon-reload");
	sh("systemctl start kvmmd.socket kvmmd.service");
}

static long status(const char *group, const char *name)
{
	json_t *r = ta_request(&d, "{\"cmd\": \"status\"}");
	json_t *o = json_object_get(r, group);
	long v = (long)json_integer_value(json_object_get(o, name));

	json_decref(r);
	return v;
}

static bool serves(void)
{
	return !td_admin(&d, "ping", NULL);
}

static pid_t service_pid(void)
{
	json_t *r = ta_request(&d, "{\"cmd\": \"status\"}");
	pid_t pid = (pid_t)json_integer_value(json_object_get(r, "pid"));

	json_decref(r);
	T_CHECK(pid > 1);
	return pid;
}

static bool online(void)
{
	return !strcmp(ta_node_state(&d, "nvme0"), "online");
}

static bool writes_rest(void)
{
	return !ta_node(&d, "nvme0", "write.inflight") &&
	       !ta_node(&d, "nvme0", "write.queued");
}

static uint64_t reconnects(void)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	T_OK(kvmm_stats(c.k, &st));
	return st.reconnects;
}

/* It has seen another kvmmd, and has what it had. */
static bool back(uint64_t before)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_done done;

	kvmm_poll(c.k, &done, 1);
	T_OK(kvmm_stats(c.k, &st));
	return st.connected && st.reconnects > before;
}

static void fill(void)
{
	unsigned int i;

	T_WAIT(LONG_WAIT, serves());
	T_WAIT(LONG_WAIT, online());
	tc_open(&c, d.socket, NULL);
	for (i = 0; i < CHAINS; i++) {
		T_EQ(tc_put(&c, 1 + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest());
	}
	usleep(GROUP_US);
	T_CHECK(ta_node(&d, "nvme0", "used") > 0);
}

/* Resident pages, every byte checked. */
static unsigned int resident(void)
{
	unsigned int i, n = 0;

	for (i = 0; i < CHAINS; i++)
		n += tc_hits(&c, 1 + i, CHAIN);
	return n;
}

/* Since kvmmd started. */
static unsigned int reclaimed(void)
{
	return (unsigned int)(ta_counter(&d, "dram0", "pgsteal_kreclaimd") +
			      ta_counter(&d, "dram0", "pgsteal_direct"));
}

/* The same, when reclaim has done what it had to do: for three seconds nothing. */
static unsigned int resident_at_rest(void)
{
	uint64_t end = deadline_in(60 * NSEC_PER_SEC);
	unsigned int quiet = 0, was, is = resident();

	while (quiet < 10) {
		T_CHECK(!deadline_past(end), "reclaim finds no rest");
		usleep(300000);
		was = is;
		is = resident();
		quiet = is == was && writes_rest() ? quiet + 1 : 0;
	}
	return is;
}

/* Pages that can be had, wherever they are. */
static unsigned int had(unsigned int *fetched)
{
	unsigned int i, n = 0;

	*fetched = 0;
	for (i = 0; i < CHAINS; i++) {
		struct tc_got got = tc_get(&c, 1 + i, CHAIN, 20000);

		n += got.resident + got.fetched;
		*fetched += got.fetched;
	}
	return n;
}

/* What @how does to the service costs nothing but a moment. */
static void survives(const char *what, void (*how)(void), bool crash)
{
	unsigned int was = resident_at_rest(), is, all, fetched, stolen;
	unsigned int lost;
	uint64_t before = reconnects();
	pid_t pid = service_pid();

	T_CHECK(was >= 200, "%u pages are resident", was);
	nr_lost += (unsigned int)ta_lost(&d);
	how();
	T_WAIT(LONG_WAIT, back(before));
	T_CHECK(service_pid() != pid);
	T_CHECK(status("park", "inherited") >= 1);
	T_EQ(status("adopted", "clients"), 1);
	T_EQ(status("adopted", "gave_up"), 0);
	if (crash)
		T_EQ(status("start", "unclean"), 1);
	is = resident();
	stolen = reclaimed();
	T_WAIT(LONG_WAIT, online());
	all = had(&fetched);
	lost = nr_lost + (unsigned int)ta_lost(&d);
	printf("# %s: %u of %u resident pages, %u reclaimed, %u of %u in all, %u fetched, %u lost\n",
	       what, is, was, stolen, all, CHAINS * CHAIN, fetched, lost);
	/* memory is full: what the new one has reclaimed it had found */
	T_CHECK(is + stolen >= was, "%u and %u of %u", is, stolen, was);
	T_CHECK(all + lost >= CHAINS * CHAIN, "%u and %u lost", all, lost);
	T_EQ(lost, 0);
	T_CHECK(fetched > 0);
	T_EQ(ta_counter(&d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&d);
}

static void killed(void)
{
	sh("systemctl kill -s KILL kvmmd.service");
}

static void restarted(void)
{
	sh("systemctl restart kvmmd.service");
}

/* The store alone is left: systemd closes what it kept. */
static void survives_a_stop(void)
{
	unsigned int below = (unsigned int)(ta_node(&d, "nvme0", "bytes_pages") /
					    TC_PAGE_BYTES);
	unsigned int all, fetched;

	tc_close(&c);
	sh("systemctl stop kvmmd.service");
	sh("systemctl start kvmmd.service");
	T_WAIT(LONG_WAIT, serves());
	T_WAIT(LONG_WAIT, online());
	T_EQ(status("adopted", "pages"), 0);
	tc_open(&c, d.socket, NULL);
	all = had(&fetched);
	printf("# stopped: %u fetched, %u were below\n", fetched, below);
	T_CHECK(all >= below);
	ta_check(&d);
}

static void pages_survive(const char *path, const char *dropin)
{
	service(path, dropin);
	fill();
	survives("killed", killed, true);
	survives("restarted", restarted, false);
	survives_a_stop();
}

static void pages_survive_over_a_block_device(void **state)
{
	pages_survive("/dev/nvme0n1", "DeviceAllow=/dev/nvme0n1 rw\n"
				      "SupplementaryGroups=disk\n");
}

static void pages_survive_over_a_file_of_its_own(void **state)
{
	pages_survive("/var/lib/kvmm/nvme0.kv", "");
}

static int setup(void **state)
{
	t_failed = false;
	nr_lost = 0;
	return 0;
}

static int teardown(void **state)
{
	tc_close(&c);
	if (t_failed)
		(void)!system("kvmmctl status; "
			      "journalctl -u kvmmd -n 40 --no-pager");
	return system("systemctl stop kvmmd.service kvmmd.socket") ? -1 : 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			pages_survive_over_a_block_device, setup, teardown),
		cmocka_unit_test_setup_teardown(
			pages_survive_over_a_file_of_its_own, setup, teardown),
	};

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (system("cp -a root/. / && ldconfig && systemd-sysusers && "
		   "systemd-tmpfiles --create && systemctl daemon-reload"))
		return 1;
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
