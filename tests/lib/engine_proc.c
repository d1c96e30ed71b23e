/* SPDX-License-Identifier: Apache-2.0 */
/* The small inference engine as a child process; see engine_proc.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/engine/alone.h"
#include "tests/engine/request.h"
#include "tests/engine/serve.h"
#include "tests/lib/engine_proc.h"
#include "tests/lib/proc.h"

#define MAX_ARGS	40
#define END_MS		20000

/* ---- start and end ------------------------------------------------------------ */

static const char *engine_path(void)
{
	static char path[512];
	const char *build = getenv("KVMM_BUILD");

	snprintf(path, sizeof(path), "%s/test/engine", build ? build : "build");
	return path;
}

static void child(const struct ep *e, int in, int out, char **argv)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	dup2(in, STDIN_FILENO);
	dup2(out, STDOUT_FILENO);
	dup2(e->err, STDERR_FILENO);
	closefrom(3);
	execv(argv[0], argv);
	_exit(127);
}

static void spawn(struct ep *e, const char *socket, va_list ap)
{
	char *argv[MAX_ARGS] = { (char *)engine_path(), (char *)"--pids" };
	int n = 2, in[2], out[2];

	if (socket) {
		argv[n++] = (char *)"--socket";
		argv[n++] = (char *)socket;
	}
	while (n < MAX_ARGS - 1 && (argv[n] = va_arg(ap, char *)))
		n++;
	memset(e, 0, sizeof(*e));
	e->err = memfd_create("engine-stderr", MFD_CLOEXEC);
	T_CHECK(e->err >= 0);
	T_OK(pipe2(in, O_CLOEXEC));
	T_OK(pipe2(out, O_CLOEXEC));
	e->pid = fork();
	T_CHECK(e->pid >= 0);
	if (!e->pid)
		child(e, in[0], out[1], argv);
	close(in[0]);
	close(out[1]);
	e->in = in[1];
	e->out = out[0];
	signal(SIGPIPE, SIG_IGN);
}

/* What it has written to stderr; ranks' process ids are among it. */
static void last_words(struct ep *e, char *buf, size_t len)
{
	ssize_t n = pread(e->err, buf, len - 1, 0);

	buf[n > 0 ? n : 0] = '\0';
}

static void find_ranks(struct ep *e)
{
	char buf[4096], *at = buf;
	unsigned int r;
	int pid;

	last_words(e, buf, sizeof(buf));
	while ((at = strstr(at, "rank "))) {
		if (sscanf(at, "rank %u: process %d", &r, &pid) == 2 &&
		    r < EP_MAX_RANKS) {
			e->rank[r] = pid;
			if (r >= e->nranks)
				e->nranks = r + 1;
		}
		at++;
	}
}

static bool try_reap(struct ep *e, int flags)
{
	if (e->pid <= 0)
		return true;
	if (waitpid(e->pid, &e->status, flags) != e->pid)
		return false;
	e->pid = 0;
	return true;
}

static void close_all(struct ep *e)
{
	if (e->buf || e->cap || e->err) {
		if (e->in >= 0)
			close(e->in);
		close(e->out);
		close(e->err);
	}
	free(e->buf);
	e->buf = NULL;
	e->cap = e->len = 0;
	e->err = 0;
}

int ep_end(struct ep *e, unsigned int ms)
{
	struct t_wait w = t_wait_begin(ms);

	while (!try_reap(e, WNOHANG))
		if (!t_wait_more(&w))
			t_fail(__FILE__, __LINE__,
			       "the engine has not ended within %u ms", ms);
	close_all(e);
	return WIFSIGNALED(e->status) ? 128 + WTERMSIG(e->status) :
					WEXITSTATUS(e->status);
}

void ep_kill(struct ep *e)
{
	if (e->pid > 0) {
		kill(e->pid, SIGKILL);
		try_reap(e, 0);
	}
	close_all(e);
}

void ep_quit(struct ep *e)
{
	char words[2048];
	int rc;

	ep_cmd(e, "quit", NULL);
	T_WAIT(END_MS, try_reap(e, WNOHANG));
	last_words(e, words, sizeof(words));
	close_all(e);
	rc = WIFSIGNALED(e->status) ? 128 + WTERMSIG(e->status) :
				      WEXITSTATUS(e->status);
	if (rc)
		t_fail(__FILE__, __LINE__, "the engine ended with %d: %s", rc,
		       words);
}

/* ---- lines ---------------------------------------------------------------------- */

/* The next line, within @ms; NULL: none. The caller frees it. */
static char *line(struct ep *e, unsigned int ms)
{
	uint64_t until = now_ns() + ms * NSEC_PER_MSEC;
	struct pollfd p = { .fd = e->out, .events = POLLIN };
	char *nl, *s;
	int64_t left;
	ssize_t n;

	for (;;) {
		nl = e->len ? memchr(e->buf, '\n', e->len) : NULL;
		if (nl) {
			*nl = '\0';
			s = strdup(e->buf);
			e->len -= (size_t)(nl + 1 - e->buf);
			memmove(e->buf, nl + 1, e->len);
			return s;
		}
		if (e->len == e->cap) {
			e->cap = e->cap ? 2 * e->cap : 65536;
			e->buf = realloc(e->buf, e->cap);
			T_CHECK(e->buf);
		}
		left = (int64_t)(until - now_ns()) / (int64_t)NSEC_PER_MSEC;
		if (left < 0 || poll(&p, 1, (int)left + 1) <= 0)
			return NULL;
		n = read(e->out, e->buf + e->len, e->cap - e->len);
		if (n <= 0)
			return NULL;
		e->len += (size_t)n;
	}
}

/* The next event of this name; others are passed over. NULL: none in time. */
static json_t *event(struct ep *e, const char *name, unsigned int ms)
{
	uint64_t until = now_ns() + ms * NSEC_PER_MSEC, now;
	const char *got;
	json_t *o;
	char *s;

	for (;;) {
		now = now_ns();
		s = line(e, now < until ? (until - now) / NSEC_PER_MSEC : 0);
		if (!s)
			return NULL;
		o = json_loads(s, 0, NULL);
		free(s);
		got = json_string_value(json_object_get(o, "event"));
		if (got && !strcmp(got, name))
			return o;
		if (got && !strcmp(got, "error"))
			t_fail(__FILE__, __LINE__, "the engine says: %s",
			       json_string_value(json_object_get(o, "why")));
		json_decref(o);
	}
}

static bool is_ready(struct ep *e)
{
	json_t *o = event(e, "ready", EP_WAIT_MS);

	json_decref(o);
	find_ranks(e);
	return o;
}

void ep_start(struct ep *e, const char *socket, ...)
{
	char words[2048];
	va_list ap;

	va_start(ap, socket);
	spawn(e, socket, ap);
	va_end(ap);
	if (is_ready(e))
		return;
	last_words(e, words, sizeof(words));
	t_fail(__FILE__, __LINE__, "the engine did not start: %s", words);
}

bool ep_try_start(struct ep *e, char *why, size_t len, const char *socket, ...)
{
	va_list ap;

	va_start(ap, socket);
	spawn(e, socket, ap);
	va_end(ap);
	if (is_ready(e))
		return true;
	T_WAIT(END_MS, try_reap(e, WNOHANG));
	last_words(e, why, len);
	close_all(e);
	return false;
}

void ep_print(char *out, size_t len, const char *socket, ...)
{
	struct ep e;
	va_list ap;
	size_t n = 0;
	char *s;

	va_start(ap, socket);
	spawn(&e, socket, ap);
	va_end(ap);
	out[0] = '\0';
	for (; n < len && (s = line(&e, EP_WAIT_MS)); free(s))
		n += (size_t)snprintf(out + n, len - n, "%s\n", s);
	T_EQ(ep_end(&e, END_MS), 0);
}

static void send_bytes(struct ep *e, const char *s, size_t n)
{
	size_t at = 0;
	ssize_t did;

	while (at < n) {
		did = write(e->in, s + at, n - at);
		if (did <= 0)
			break;		/* it is gone: answers will not come */
		at += (size_t)did;
	}
}

void ep_say(struct ep *e, const char *bytes)
{
	send_bytes(e, bytes, strlen(bytes));
}

void ep_hang_up(struct ep *e)
{
	close(e->in);
	e->in = -1;
}

static void send_json(struct ep *e, json_t *o)
{
	char *s = json_dumps(o, JSON_COMPACT);
	size_t n;

	json_decref(o);
	T_CHECK(s);
	n = strlen(s);
	s[n++] = '\n';			/* in place of its end */
	send_bytes(e, s, n);
	free(s);
}

void ep_ask(struct ep *e, const struct ep_req *r)
{
	send_json(e, json_pack("{s:I, s:s, s:i, s:i, s:f, s:I, s:s}",
			       "id", (json_int_t)r->id, "text", r->text,
			       "max_tokens", (int)r->max_tokens,
			       "n", (int)(r->n ? r->n : 1),
			       "temperature", r->temperature,
			       "seed", (json_int_t)r->seed, "how", "continues"));
}

void ep_cmd(struct ep *e, const char *cmd, const char *how)
{
	json_t *o = json_pack("{s:s}", "cmd", cmd);

	if (how)
		json_object_set_new(o, "how", json_string(how));
	send_json(e, o);
}

/* ---- answers --------------------------------------------------------------------- */

static uint32_t num(const json_t *o, const char *name)
{
	return (uint32_t)json_integer_value(json_object_get(o, name));
}

static void parse(json_t *o, struct ep_answer *a)
{
	const json_t *tok = json_object_get(o, "tokens");
	const char *digest = json_string_value(json_object_get(o, "digest"));
	const char *why = json_string_value(json_object_get(o, "why"));
	uint32_t i;

	memset(a, 0, sizeof(*a));
	a->id = num(o, "id");
	a->sample = num(o, "sample");
	a->err = (int)json_integer_value(json_object_get(o, "err"));
	snprintf(a->why, sizeof(a->why), "%s", why ? why : "");
	a->ntok = (uint32_t)json_array_size(tok);
	T_CHECK(a->ntok <= EP_MAX_TOKENS);
	for (i = 0; i < a->ntok; i++)
		a->tok[i] = (uint32_t)json_integer_value(
					json_array_get(tok, i));
	snprintf(a->digest, sizeof(a->digest), "%s", digest ? digest : "");
	a->prompt = num(o, "prompt");
	a->hit = num(o, "hit");
	a->fetched = num(o, "fetched");
	a->computed = num(o, "computed");
	a->preempted = num(o, "preempted");
	a->ttft_ms = json_number_value(json_object_get(o, "ttft_ms"));
	a->total_ms = json_number_value(json_object_get(o, "total_ms"));
	json_decref(o);
}

bool ep_try_answer(struct ep *e, struct ep_answer *a, unsigned int ms)
{
	json_t *o = event(e, "done", ms);

	if (!o)
		return false;
	parse(o, a);
	return true;
}

void ep_answers(struct ep *e, struct ep_answer *a, unsigned int n)
{
	char words[2048];
	unsigned int i;

	for (i = 0; i < n; i++) {
		if (ep_try_answer(e, &a[i], EP_WAIT_MS))
			continue;
		last_words(e, words, sizeof(words));
		t_fail(__FILE__, __LINE__, "answer %u of %u did not come: %s",
		       i + 1, n, words);
	}
}

int64_t ep_complaint(struct ep *e, char *why, size_t len)
{
	json_t *o = event(e, "error", EP_WAIT_MS);
	const json_t *id = json_object_get(o, "id");
	int64_t nr = json_is_integer(id) ? json_integer_value(id) : -1;
	const char *words = json_string_value(json_object_get(o, "why"));

	T_CHECK(words, "it does not complain");
	snprintf(why, len, "%s", words);
	json_decref(o);
	return nr;
}

uint64_t ep_stat(struct ep *e, const char *name)
{
	uint64_t v;
	json_t *o;

	ep_cmd(e, "stats", NULL);
	o = event(e, "stats", EP_WAIT_MS);
	T_CHECK(o && json_object_get(o, name));
	v = (uint64_t)json_integer_value(json_object_get(o, name));
	json_decref(o);
	return v;
}

/* ---- what they must be ------------------------------------------------------------- */

/* Models and answers of this process, so that each is computed once. */
struct known {
	struct known	*next;
	char		shape[32];
	char		*text;
	struct ep_req	r;
	uint32_t	sample;
	uint32_t	tok[EP_MAX_TOKENS];
	uint64_t	digest;
};

struct shape {
	struct shape	*next;
	char		name[32];
	struct model	*m;
};

static struct known *answers;
static struct shape *shapes;

static const struct model *model_of(const char *name)
{
	struct model_config c;
	struct shape *s;

	for (s = shapes; s; s = s->next)
		if (!strcmp(s->name, name))
			return s->m;
	s = calloc(1, sizeof(*s));
	T_CHECK(s);
	snprintf(s->name, sizeof(s->name), "%s", name);
	T_OK(model_config_named(&c, name));
	T_OK(model_create(&c, 1, &s->m));
	s->next = shapes;
	shapes = s;
	return s->m;
}

static const struct known *known_answer(const char *shape,
					const struct ep_req *r, uint32_t sample)
{
	const struct model *m = model_of(shape);
	struct sched_req q = {
		.max_tokens = r->max_tokens, .nsamples = 1,
		.temperature = (float)r->temperature, .seed = r->seed,
	};
	struct known *k;
	uint32_t *tok;
	int n;

	for (k = answers; k; k = k->next)
		if (!strcmp(k->shape, shape) && !strcmp(k->text, r->text) &&
		    k->r.max_tokens == r->max_tokens && k->r.seed == r->seed &&
		    k->r.temperature == r->temperature && k->sample == sample)
			return k;
	k = calloc(1, sizeof(*k));
	T_CHECK(k && r->max_tokens <= EP_MAX_TOKENS);
	snprintf(k->shape, sizeof(k->shape), "%s", shape);
	k->text = strdup(r->text);
	k->r = *r;
	k->sample = sample;
	n = text_tokens(r->text, model_config_of(m)->vocab, &tok);
	T_CHECK(n > 0);
	q.tok = tok;
	q.ntok = (uint32_t)n;
	T_OK(alone_answer(m, &q, sample, k->tok, &k->digest));
	free(tok);
	k->next = answers;
	answers = k;
	return k;
}

void ep_forget(void)
{
	while (answers) {
		struct known *k = answers;

		answers = k->next;
		free(k->text);
		free(k);
	}
	while (shapes) {
		struct shape *s = shapes;

		shapes = s->next;
		model_destroy(s->m);
		free(s);
	}
}

void ep_expect(const struct ep_answer *a, const char *shape,
	       const struct ep_req *r)
{
	const struct known *k = known_answer(shape, r, a->sample);
	char digest[20];
	uint32_t i;

	if (a->err)
		t_fail(__FILE__, __LINE__, "%s, request %" PRIu64 ": %s", shape,
		       a->id, strerror(-a->err));
	T_EQ(a->id, r->id);
	T_EQ(a->ntok, r->max_tokens);
	for (i = 0; i < a->ntok; i++)
		if (a->tok[i] != k->tok[i])
			t_fail(__FILE__, __LINE__,
			       "%s, request %" PRIu64 ", sample %u: token %u is %u, not %u",
			       shape, a->id, a->sample, i, a->tok[i], k->tok[i]);
	snprintf(digest, sizeof(digest), "%016" PRIx64, k->digest);
	if (strcmp(digest, a->digest))
		t_fail(__FILE__, __LINE__,
		       "%s, request %" PRIu64 ", sample %u: the same tokens of other logits",
		       shape, a->id, a->sample);
}

bool ep_is(const struct ep_answer *a, const char *shape,
	   const struct ep_req *r)
{
	const struct known *k = known_answer(shape, r, a->sample);
	char digest[20];

	snprintf(digest, sizeof(digest), "%016" PRIx64, k->digest);
	return !a->err && a->ntok == r->max_tokens &&
	       !memcmp(a->tok, k->tok, a->ntok * sizeof(*a->tok)) &&
	       !strcmp(digest, a->digest);
}

struct ep_answer ep_one(struct ep *e, const char *shape,
			const struct ep_req *r)
{
	struct ep_answer a;

	ep_ask(e, r);
	ep_answers(e, &a, 1);
	ep_expect(&a, shape, r);
	return a;
}
