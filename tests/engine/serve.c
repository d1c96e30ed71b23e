/* SPDX-License-Identifier: Apache-2.0 */
/* Requests and answers; see serve.h. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/engine/request.h"
#include "tests/engine/serve.h"

#define MAX_LINE	(1u << 20)
#define WAIT_MS		2

static void say(json_t *o)
{
	char *s = json_dumps(o, JSON_COMPACT);

	if (s)
		puts(s);
	fflush(stdout);
	free(s);
	json_decref(o);
}

void serve_ready(void)
{
	say(json_pack("{s:s}", "event", "ready"));
}

/* Of the request @o, if it is about one and that says which it is. */
static void say_error(const char *why, const json_t *o)
{
	const json_t *id = json_object_get(o, "id");
	char words[256];
	json_t *e;
	size_t i;

	/* some of them are a stranger's, and cut off: perhaps not UTF-8 any more */
	snprintf(words, sizeof(words), "%s", why);
	for (i = 0; words[i]; i++)
		if (words[i] < ' ' || words[i] > '~')
			words[i] = '?';
	e = json_pack("{s:s, s:s}", "event", "error", "why", words);
	if (json_is_integer(id))
		json_object_set_new(e, "id",
				    json_integer(json_integer_value(id)));
	say(e);
}

/* ---- answers ------------------------------------------------------------------ */

static json_t *tokens_out(const struct sched_done *d)
{
	json_t *a = json_array();
	uint32_t i;

	for (i = 0; i < d->ntok; i++)
		json_array_append_new(a, json_integer(d->tok[i]));
	return a;
}

static void add_text(json_t *o, const struct sched_done *d)
{
	char buf[4096];
	uint32_t i, n = 0;

	for (i = 0; i < d->ntok && n < sizeof(buf) - 1; i++)
		buf[n++] = d->tok[i] >= 32 && d->tok[i] < 127 ?
			   (char)d->tok[i] : '.';
	buf[n] = '\0';
	json_object_set_new(o, "text", json_string(buf));
}

static const char *why_of(int err)
{
	switch (err) {
	case -ENOSPC:
		return "the node has no room for it";
	case -EMSGSIZE:
		return "its block tables are larger than a step's plan";
	default:
		return strerror(-err);
	}
}

void serve_done(const struct sched_done *d, bool text)
{
	char digest[20];
	json_t *o;

	snprintf(digest, sizeof(digest), "%016" PRIx64, d->digest);
	o = json_pack("{s:s, s:I, s:i, s:i, s:s, s:o, s:i, s:i, s:i, s:i, s:i, s:f, s:f}",
		      "event", "done", "id", (json_int_t)d->id,
		      "sample", (int)d->sample, "err", d->err,
		      "digest", digest, "tokens", tokens_out(d),
		      "prompt", (int)d->prompt, "hit", (int)d->hit,
		      "fetched", (int)d->fetched, "computed", (int)d->computed,
		      "preempted", (int)d->preempted,
		      "ttft_ms", (double)d->ttft_ns / NSEC_PER_MSEC,
		      "total_ms", (double)d->total_ns / NSEC_PER_MSEC);
	if (d->err && o)
		json_object_set_new(o, "why", json_string(why_of(d->err)));
	if (text && o)
		add_text(o, d);
	say(o);
}

static void add(json_t *o, const char *name, uint64_t v)
{
	json_object_set_new(o, name, json_integer((json_int_t)v));
}

void serve_stats(const struct sched_stats *st, const struct kv *kv)
{
	struct kvmm_stats ks = { .size = sizeof(ks) };
	json_t *o = json_pack("{s:s}", "event", "stats");

	add(o, "steps", st->steps);
	add(o, "tokens", st->tokens);
	add(o, "step_ns", st->step_ns);
	add(o, "requests", st->requests);
	add(o, "hit_pages", st->hit_pages);
	add(o, "fetched_pages", st->fetched_pages);
	add(o, "published", st->published);
	add(o, "publishing", st->publishing);
	add(o, "exists", st->exists);
	add(o, "refused", st->refused);
	add(o, "preempted", st->preempted);
	add(o, "gave_way", st->gave_way);
	add(o, "not_fetched", st->not_fetched);
	add(o, "unsaved", st->unsaved);
	add(o, "nonsense", st->nonsense);
	add(o, "forks", st->forks);
	add(o, "epochs", st->epochs);
	add(o, "guarded", st->guarded);
	add(o, "unguarded", st->unguarded);
	add(o, "audited", st->frames_audited);
	add(o, "differ", st->frames_differ);
	if (kv && !kvmm_stats(kv->k, &ks)) {
		add(o, "pages_asked", ks.pages_asked);
		add(o, "pages_hit", ks.pages_hit);
		add(o, "pages_pending", ks.pages_pending);
		add(o, "pages_lower", ks.pages_lower);
		add(o, "pages_missed", ks.pages_missed);
		add(o, "doorbells", ks.doorbells);
		add(o, "reconnects", ks.reconnects);
		add(o, "connected", ks.connected);
	}
	say(o);
}

/* ---- requests ------------------------------------------------------------------- */

static void take_request(const struct serve_ops *ops, void *arg,
			 const json_t *o, uint32_t vocab)
{
	struct sched_req r;
	char why[128];
	uint32_t *tok;
	int err = request_read(o, vocab, &r, &tok, why, sizeof(why));

	if (err) {
		say_error(why, o);
		return;
	}
	err = ops->submit(arg, &r);
	if (err)
		say_error(strerror(-err), o);
	free(tok);
}

/* Return: false: it is over. */
static bool take_line(const struct serve_ops *ops, void *arg, const char *line,
		      size_t len, uint32_t vocab)
{
	json_error_t e;
	json_t *o = json_loadb(line, len, 0, &e);
	const char *cmd, *how;
	bool go_on = true;

	if (!json_is_object(o)) {
		say_error(o ? "not an object" : e.text, NULL);
		json_decref(o);
		return true;
	}
	cmd = json_string_value(json_object_get(o, "cmd"));
	how = json_string_value(json_object_get(o, "how"));
	if (!cmd)
		take_request(ops, arg, o, vocab);
	else if (!strcmp(cmd, "quit"))
		go_on = false;
	else if (ops->cmd(arg, cmd, how))
		say_error("no such command", o);
	json_decref(o);
	return go_on;
}

/**
 * struct input - lines on their way in
 * @open:	more may come
 */
struct input {
	char	*buf;
	size_t	len;
	bool	open;
};

static bool take_input(const struct serve_ops *ops, void *arg, int in,
		       struct input *i, uint32_t vocab)
{
	ssize_t n = read(in, i->buf + i->len, MAX_LINE - i->len);
	bool go_on = true;
	char *nl;

	if (n <= 0) {
		i->open = n < 0 && (errno == EAGAIN || errno == EINTR);
		/* the last line may lack its end */
		return i->open || !i->len ||
		       take_line(ops, arg, i->buf, i->len, vocab);
	}
	i->len += (size_t)n;
	while (go_on && (nl = memchr(i->buf, '\n', i->len))) {
		go_on = take_line(ops, arg, i->buf, (size_t)(nl - i->buf),
				  vocab);
		i->len -= (size_t)(nl + 1 - i->buf);
		memmove(i->buf, nl + 1, i->len);
	}
	if (i->len == MAX_LINE) {
		say_error("line too long", NULL);
		i->len = 0;
	}
	return go_on;
}

int serve(const struct serve_ops *ops, void *arg, int in, uint32_t vocab)
{
	struct input i = { .buf = malloc(MAX_LINE), .open = true };
	bool go_on = true;
	int did = 0;

	if (!i.buf)
		return -ENOMEM;
	serve_ready();
	while (did >= 0 && ((go_on && i.open) || !ops->idle(arg))) {
		struct pollfd p[2] = {
			{ .fd = go_on && i.open ? in : -1, .events = POLLIN },
			{ .fd = ops->fd(arg), .events = POLLIN },
		};
		int ms = did ? 0 : ops->idle(arg) ? 100 : WAIT_MS;

		poll(p, 2, ms);
		if (p[0].revents)
			go_on = take_input(ops, arg, in, &i, vocab);
		did = ops->run(arg);
	}
	free(i.buf);
	return did < 0 ? did : 0;
}
