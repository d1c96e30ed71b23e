/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server: sockets, sessions, rings, administration, and the loop that runs
 * them. It decodes what clients send, copies it out of shared memory, judges
 * it, and calls the memory manager with plain structs.
 *
 * One thread. Everything here runs on it; nodes and the worker pool call back
 * on it.
 *
 *   server	the whole
 *   listener	a client socket: tenant, rights, mode
 *   session	one client process: from accept until its pidfd says that it has
 *		exited; its socket may close long before	(session.c)
 *   ring	a session's submission and completion rings	(ring*.c)
 *   admin	the administration socket			(admin.c)
 *
 * What a client may do to others is bounded everywhere: entries a round, bytes
 * and descriptors that wait for it, completions that it does not take, time
 * until it says hello. What breaks a rule is cut off with a counted reason.
 */
#ifndef KVMM_SERVER_SERVER_H
#define KVMM_SERVER_SERVER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "daemon/log.h"
#include "daemon/mm/mm.h"
#include "daemon/node/node.h"
#include "daemon/server/config.h"
#include "daemon/server/ladder.h"
#include "daemon/server/park.h"
#include "ipc/base/clock.h"
#include "ipc/base/list.h"
#include "ipc/shm.h"
#include "ipc/sock.h"

#define SESSION_MAX_WINS	256	/* windows of one client */
#define SESSION_MAX_SPACES	8	/* spaces of one client */
#define SESSION_MAX_OLD		8	/* closed sessions of one live process */
#define LISTENER_MAX_GREETING	32	/* connections that have not said hello */
#define LISTENER_SHARE		8	/* clients that each socket may have at least */

struct server;
struct session;
struct admin;

/* -- reasons ------------------------------------------------------------------- */

/* Why a client was refused or cut off. Each has a counter; see reject_name(). */
enum reject {
	REJECT_NONE,
	REJECT_HELLO_LATE,	/* said nothing for 2 s */
	REJECT_IDENTITY,	/* no pidfd that can be believed */
	REJECT_ABI,		/* no common ABI */
	REJECT_FULL,		/* too many clients, or sessions of one process */
	REJECT_MSG_BAD,		/* not a message: magic, length, descriptors */
	REJECT_MSG_TYPE,	/* unknown, or not now */
	REJECT_MSG_SHORT,	/* not as long as its type */
	REJECT_SLOW,		/* does not read its socket */
	REJECT_SQ_TAIL,		/* submission tail beyond the ring */
	REJECT_CQ_HEAD,		/* completion head beyond the tail, or back */
	REJECT_SQE_OP,		/* no such operation */
	REJECT_SQE_ARRAY,	/* count or arena out of bounds */
	REJECT_SQE_FRAME,	/* freed what it does not own */
	REJECT_SQE_KEY,		/* asked in a group that is not there */
	REJECT_NOTIFY,		/* made its wake-up block */
	REJECT_LIMIT,		/* over one of mm's limits */
	REJECT_NOMEM,		/* the daemon ran out of memory or descriptors */
	NR_REJECTS
};

/** reject_name() - as in status: "hello_late" ... */
const char *reject_name(enum reject why);
/** reject_text() - a sentence for people */
const char *reject_text(enum reject why);

/* -- the loop's sources ---------------------------------------------------------- */

/**
 * struct source - something that epoll watches
 * @fd:		-1: none; not owned
 * @ready:	called with EPOLL* bits; may close its own object, which stays
 *		in memory until the round is over
 */
struct source {
	int	fd;
	void	(*ready)(struct source *src, uint32_t events);
};

#define SOURCE_INIT { .fd = -1 }

int loop_add(struct server *s, struct source *src, int fd, uint32_t events);
void loop_mod(struct server *s, struct source *src, uint32_t events);
void loop_del(struct server *s, struct source *src);

/** loop_once() - one round: rings, due work, sleep until @until_ns at most */
void loop_once(struct server *s, uint64_t until_ns);

/* -- waking clients: guard.c --------------------------------------------------------- */

struct guard {
	timer_t	timer;
	bool	on;
};

/** guard_init() - for the calling thread, before it makes others */
int guard_init(struct guard *g);
void guard_fini(struct guard *g);
/** guard_wake() - write to a client's eventfd; -EINTR: it made that block */
int guard_wake(int eventfd);

/* -- listeners ------------------------------------------------------------------- */

/**
 * struct listener - a client socket
 * @ix:		number of the socket, as mm knows it
 * @cfg:	the server's configuration
 * @inherited:	systemd's: its path is not ours to remove
 * @paused_ns:	accepts nothing until then: descriptors ran out; 0: accepts
 * @sessions:	connected through it, @greeting of them without a hello
 * @requests:	operations in flight of all of them
 */
struct listener {
	struct source	src;
	struct server	*server;
	uint32_t	ix;
	const struct config_socket *cfg;
	bool		inherited;
	uint64_t	paused_ns;
	uint32_t	sessions;
	uint32_t	greeting;
	uint32_t	requests;
	uint64_t	accepted;
};

/* -- rings ----------------------------------------------------------------------- */

/**
 * struct ring - the daemon's side of a session's rings
 *
 * Cursors here are the truth; those in the ledger are what the client is told.
 *
 * @sq, @cq, @arena: into the ledger, from the daemon's own arithmetic
 * @cq_seen:	completion head as last looked at for room; @cq_head is the one
 *		up to which references have ended
 * @held:	completions in the ring whose frames still carry a hand-over
 *		reference, oldest first
 * @backlog:	completions that did not fit
 * @backlog_slots: slots that they need
 * @ops, @pages: submitted to mm and not complete
 * @marked:	a request waits until all entries before @mark are taken
 * @poll_due, @poll_gap: when to look at the completion head next, and how long
 *		to wait after that if it does not move
 */
struct ring {
	struct ledger	*ledger;
	struct ring_sqe	*sq;
	struct ring_cqe	*cq;
	const uint8_t	*arena;
	uint32_t	sq_head, cq_tail, cq_head, cq_seen;
	uint64_t	arena_head;
	struct list	held, backlog;
	uint32_t	backlog_slots;
	uint32_t	ops, pages;
	uint32_t	mark;
	bool		marked;
	uint64_t	poll_due, poll_gap;
	uint64_t	submissions, completions, wakes;
};

/**
 * struct watch - what the loop spins on, one a connected session
 * @tail:	of the submission ring
 * @head:	the daemon's cursor: nothing to do while *@tail == @head
 */
struct watch {
	_Atomic uint32_t *tail;
	uint32_t	head;
	struct session	*ss;
};

int ring_init(struct session *ss);
/** ring_adopt() - go on in a ledger of the last daemon's, which is mapped */
void ring_adopt(struct session *ss);
/** ring_bytes() - of a ledger */
uint64_t ring_bytes(void);
/**
 * ring_resume() - done with what was posted to the last daemon
 *
 * Frames that were given back are, in the windows that the session knows; the
 * rest nobody waits for. Nothing is posted meanwhile: the client waits for its
 * welcome.
 * Return: 0, or -EPROTO: its cursors make no sense, or it gives back what others
 * have.
 */
int ring_resume(struct session *ss);
/** ring_fini() - drop what it holds: before mm_client_disconnect() */
void ring_fini(struct session *ss);
/** ring_poll() - take up to a round's entries; returns how many */
unsigned int ring_poll(struct session *ss);
/**
 * ring_mark() - remember what is posted now
 *
 * Return: true when there is something: ring_poll() calls session_late() once
 * it has taken all of it. false when there is nothing, or the session is doomed.
 */
bool ring_mark(struct session *ss);
/** ring_reap() - look at the completion head: hand-overs, backlog */
void ring_reap(struct session *ss, uint64_t now_ns);
/** ring_complete() - answer; queues what does not fit */
void ring_complete(struct session *ss, struct mm_win *win,
		   const struct ring_cqe *cqe, const struct ring_result *res);
/** ring_completed() - mm has answered an operation: it is no longer in flight */
void ring_completed(struct session *ss, const struct ring_cqe *cqe);
/** ring_win_closed() - drop the hand-over references of a window */
void ring_win_closed(struct session *ss, struct mm_win *win);
/** ring_requests() - the LEDGER_REQ_SLOTS request slots, as the client left them */
const struct ledger_req *ring_requests(const struct session *ss);
/** ring_kick() - wake the client if it sleeps */
void ring_kick(struct session *ss);
/** ring_blocked() - no entry is taken now: too much is unanswered */
bool ring_blocked(const struct session *ss);

/* -- sessions -------------------------------------------------------------------- */

enum session_state {
	SESSION_GREETING,	/* accepted, no hello yet */
	SESSION_LIVE,
	SESSION_CLOSED,		/* its socket is closed, its process lives */
	SESSION_EXITING,	/* its process has exited, mm still has it */
	SESSION_GONE,		/* freed at the end of the round */
};

/**
 * struct session - one client process
 * @sock, @pid, @bell: its socket, pidfd, doorbell
 * @out:	messages that the socket did not take, struct out_msg
 * @late:	the request that waits while ring.marked; no further one is read
 * @told:	client numbers of the members that it has been told of
 * @doom:	to be cut off at the end of the round, and why
 * @resumable:	CLOSED: its process may come again and go on: it was not cut off,
 *		or it is the last daemon's, adopted with all that it had
 * @secret:	of its ledger, as it was written there
 * @foreign:	in another PID namespace: @cred_pid is 0, its own word is shown
 */
struct session {
	struct server	*server;
	struct listener	*via;
	struct list	link;
	enum session_state state;
	uint32_t	no;
	struct source	sock, pid, bell;
	int		notify_fd;
	int		pidfd;		/* EXITING: of what @pid was */
	struct mm_client *mc;
	struct shm	ledger_shm;
	struct ring	ring;
	int		watch_ix;	/* in server.watch; -1 */
	struct mm_win	*win[SESSION_MAX_WINS];
	struct mm_space	*space[SESSION_MAX_SPACES];
	uint32_t	space_epoch[SESSION_MAX_SPACES];
	uint32_t	nr_wins, nr_spaces;
	bool		foreign;
	pid_t		cred_pid, hello_pid;
	uid_t		cred_uid;
	char		name[17];
	uint32_t	abi;
	uint64_t	since_ns;
	uint64_t	deadline_ns;	/* hello, or reading what waits */
	uint64_t	retry_ns;	/* next try to send what waits */
	uint64_t	warned_req;	/* begin of the request that was warned of */
	struct list	out;
	uint32_t	nr_out, out_fds;
	struct wire_win	late;
	bool		resumable;
	bool		adopted;	/* and has posted nothing to us yet */
	uint64_t	epoch;		/* that it was welcomed in */
	uint64_t	secret[2];
	bool		told_off;	/* its last message was an error */
	bool		over;		/* hung up: close it, nobody is to blame */
	enum reject	doom;
	char		doom_text[WIRE_SENTENCE_BYTES];
	uint32_t	told[KVMM_MAX_WORLD + 1];
	uint32_t	nr_told;
};

/** listener_add() - the manager's, the last daemon's, or a new one */
int listener_add(struct server *s, const struct config_socket *cfg,
		 struct errmsg *e);
void listeners_close(struct server *s);
/** listeners_run() - accept again after a pause; returns when to come again */
uint64_t listeners_run(struct server *s, uint64_t now_ns);

/* -- the host's memory: hostmem.c ------------------------------------------------------ */

/**
 * struct hostmem - what the host has left
 * @floor:	bytes that are to be available; 0: nobody cares
 * @due_ns:	when it is looked at again
 * @lack:	bytes that it lacks now
 * @shortages:	how often it began to
 * @stalled:	tasks stall for memory (PSI), though some is available
 */
struct hostmem {
	uint64_t	floor;
	uint64_t	due_ns;
	uint64_t	lack;
	uint64_t	shortages;
	bool		stalled;
};

void hostmem_init(struct server *s);
/** hostmem_run() - look, and have mm give back; returns when to come again */
uint64_t hostmem_run(struct server *s, uint64_t now_ns);

/* -- clients of the last daemon's: resume.c ------------------------------------------ */

/** adopt_header() - go on with the last daemon's; -ENOENT: there is none */
int adopt_header(struct server *s);
/** adopt_clients() - all that mm finds; after the sockets */
int adopt_clients(struct server *s, struct errmsg *e);
/** server_keep_ops() - for mm: who keeps what */
const struct mm_keep_ops *server_keep_ops(const struct server *s);
/** session_keep() - park what a next daemon needs, and say what it is: @kept */
void session_keep(struct session *ss, int pidfd, uint8_t kept[MM_KEPT_BYTES]);
void session_unkeep(struct session *ss);
/**
 * session_resume() - @ss said a hello that names a client of the last daemon's
 *
 * True: that one has the connection now, and @ss is gone. False: a client like
 * any other.
 */
bool session_resume(struct session *ss, const struct wire_hello *h, int pidfd);
/** send_welcome() - hello.c */
int send_welcome(struct session *ss, uint32_t seq, int doorbell,
		 uint32_t flags);

/** session_new() - all but its socket; on the server's list */
struct session *session_new(struct server *s, struct listener *via,
			    uint32_t no);

/** session_create() - @fd is taken over, on error, too */
int session_create(struct server *s, struct listener *via, int fd,
		   struct session **ret);

/** session_doom() - cut it off at the end of the round; the first reason stays */
void session_doom(struct session *ss, enum reject why, const char *fmt, ...)
	__printf(3, 4);

/**
 * session_send() - send, or queue what the socket does not take
 * @fds:	stay the caller's
 * Return: 0, or -errno and the session is doomed.
 */
int session_send(struct session *ss, struct wire_hdr *h, const int *fds,
		 unsigned int nr_fds);
/** session_mail() - say in its ledger that there is something on the socket */
void session_mail(struct session *ss);
/** session_flush() - send what waits, as far as the socket takes it */
void session_flush(struct session *ss);
void session_out_drop(struct session *ss);
void session_over(struct session *ss);
#define SESSION_RETRY_NS	(20 * NSEC_PER_MSEC)
void wire_error_fill(struct wire_error *m, uint32_t seq, int err,
		     const char *sentence);
void session_send_error(struct session *ss, uint32_t seq, int err,
			const char *sentence);

/** session_hello() - its first message, judged and answered: hello.c */
void session_hello(struct session *ss, struct sock_msg *m);
/** session_request() - one message, judged and answered: request.c */
void session_request(struct session *ss, struct sock_msg *m);
/** session_late() - do what has waited for the ring */
void session_late(struct session *ss);
/** session_watch_sock() - what epoll is to say of its socket, as it is now */
void session_watch_sock(struct session *ss);
/** session_welcomed() - hello was good: it is live now */
void session_welcomed(struct session *ss);
void session_tell_members(struct session *ss);
void session_tell_member(struct session *ss, struct session *peer, bool gone);
void session_tell_index(struct session *ss, struct mm_space *sp);

/** peers_opened() - @w of @ss is open: tell the members that have it, and it */
void peers_opened(struct session *ss, struct mm_win *w);
/** peers_closed() - @w of @ss is about to be closed */
void peers_closed(struct session *ss, struct mm_win *w);

/** sessions_close() - the daemon ends: close all sockets, keep the sessions */
void sessions_close(struct server *s);
/** sessions_free() - after mm_destroy(): nobody refers to them any more */
void sessions_free(struct server *s);

#define PIN_OLD_NS	(600 * NSEC_PER_SEC)	/* warned of */
#define PIN_ANY_SPACE	UINT32_MAX

/**
 * struct pin_age - what a client's request slots say: pinwatch.c
 * @requests:	that hold pins
 * @oldest_ns:	when the oldest of them began; UINT64_MAX: there is none
 */
struct pin_age {
	unsigned int	requests;
	uint32_t	space;
	uint64_t	oldest_ns;
	uint64_t	id, session;
};

void session_pin_age(const struct session *ss, uint32_t space,
		     struct pin_age *age);
/** pins_watch() - warn of old pins once a minute; returns when to come again */
uint64_t pins_watch(struct server *s, uint64_t now_ns);

/** session_exited() - its process is gone; what the pidfd's event calls */
void session_exited(struct session *ss);

/** sessions_run() - deadlines and retries; returns when to come again */
uint64_t sessions_run(struct server *s, uint64_t now_ns);
/** sessions_reap() - cut off what is doomed, free what is gone */
void sessions_reap(struct server *s);
/** sessions_arm() - sessions_run() must be called by then */
void sessions_arm(struct server *s, uint64_t deadline_ns);

/**
 * session_identify() - who is at the other end: identity.c
 * @pidfd:	what came with hello, or -1; the caller's
 * Return: a pidfd of the peer, the caller's; or -errno with the sentence.
 */
int session_identify(struct session *ss, int sock, int pidfd,
		     struct errmsg *e);

bool fd_is_pidfd(int fd);

/* -- closing what clients sent: foreign.c -------------------------------------------- */

#define FOREIGN_CLOSERS	4	/* descriptors of one socket that are being closed */

/** foreign_room() - may a descriptor be received from this socket's clients? */
bool foreign_room(unsigned int socket);
/** foreign_close() - close one; never blocks. foreign_room() was true before */
void foreign_close(int fd, unsigned int socket);

/* -- the server ------------------------------------------------------------------- */

/**
 * struct state - the state folder of a daemon: state.c
 * @dirfd:	the folder
 * @lock_fd:	its lock: one daemon a folder
 * @epoch:	that no daemon before had
 */
struct state {
	int		dirfd, lock_fd;
	uint64_t	epoch;
};

#define STATE_INIT { .dirfd = -1, .lock_fd = -1 }

/**
 * state_open() - lock the state folder, take the next epoch
 * @st:		the caller's: state_close(); -1s on error
 */
int state_open(const char *dir, struct state *st, struct errmsg *e);
/** state_close() - give the folder up; fine twice and on %STATE_INIT */
void state_close(struct state *st);

/**
 * struct server_opts - how to make one
 * @cfg:	resolved; copied
 * @config_path: where it was read, for status; "" for the defaults
 * @park:	what was inherited, and where descriptors are parked; it outlives
 *		the server. NULL: nothing, nowhere
 * @state:	the open state folder, which stays the caller's; NULL: the
 *		server opens it
 * @ladder:	how far to trust what was inherited; NULL: all the way
 */
struct server_opts {
	const struct config	*cfg;
	const char		*config_path;
	struct park		*park;
	const struct state	*state;
	const struct ladder	*ladder;
};

struct server_counters {
	uint64_t	rounds, sleeps, doorbells;
	uint64_t	accepted, exited;
	uint64_t	submissions, completions, wakes; /* of ended sessions */
	uint64_t	reject[NR_REJECTS];
};

/**
 * struct server - the whole
 * @own_state:	the state folder, where it is the server's
 * @flushing:	nodes that have not said yet that their records are written
 * @reexec_ns:	an administrator wants it re-executed then; 0: nobody does
 * @reexec_why:	why the last wish was not granted
 * @watch:	dense; what the loop spins on
 * @hot_ns:	spin until then; 0: not hot
 * @scratch:	a copy of the array being judged
 * @work_src, @node_src: wake the loop for workers and nodes
 */
struct server {
	struct config	cfg;
	char		config_path[CONFIG_FILE_PATH];
	int		epfd;
	struct state	own_state;
	struct park	*park;
	const struct ladder *ladder;
	bool		adopting;	/* the header is the last daemon's */
	struct mm_adopted adopted;
	uint64_t	adopt_ns;	/* it took */
	uint64_t	resumed;	/* clients that came again */
	struct hostmem	hostmem;
	unsigned int	flushing;
	uint64_t	reexec_ns;
	char		reexec_why[160];
	uint64_t	epoch;		/* of clients that come now */
	uint64_t	own_epoch;	/* adopting: that no daemon before had */
	uint64_t	started_ns;
	uint32_t	session_seq;
	struct shm	hdr_shm;
	struct kvmm_hdr	*hdr;
	struct work_pool *pool;
	unsigned int	nr_nodes;
	struct node	*node[KVMM_MAX_NODES];
	struct mm	*mm;
	struct guard	guard;
	struct source	work_src, node_src[KVMM_MAX_NODES];
	unsigned int	nr_listeners;
	struct listener	listener[CONFIG_MAX_SOCKETS];
	struct admin	*admin;
	struct list	sessions;
	unsigned int	nr_sessions, nr_greeting;
	uint64_t	sessions_due, pins_due;
	bool		sessions_doomed;
	unsigned int	nr_watch, watch_next;
	struct watch	watch[KVMM_MAX_CLIENTS];
	bool		hot, dirty;
	uint64_t	hot_ns, mm_due, events_ns;
	unsigned int	nr_held;	/* sessions with hand-overs or backlog */
	struct server_counters c;
	struct log_rate	reject_rate[NR_REJECTS], accept_rate;
	struct sock_msg	msg;
	_Alignas(64) uint8_t scratch[KVMM_MAX_BATCH * sizeof(struct ring_pub)];
};

/**
 * server_create() - nodes, mm, sockets; serves when loop_once() is called
 * Return: 0, or -errno with a sentence, and nothing is left behind; but where
 * something was inherited and is kept all is left as it is, since a later start
 * may go better: then exit without touching more.
 */
int server_create(const struct server_opts *o, struct server **ret,
		  struct errmsg *e);

/**
 * server_live() - let clients see without a system call that this process lives
 *
 * From now on until server_leave(), or until the calling thread is gone, whatever
 * ends it: the kernel says so in the header. It must be the main thread, which
 * ends when the process does.
 * Return: 0 or -errno: then clients ask their sockets.
 */
int server_live(struct server *s);
/** server_leave() - the orderly end of that; the same thread */
void server_leave(struct server *s);

/**
 * server_destroy() - stop serving, end I/O, free everything
 * Return: 0; -ETIMEDOUT: I/O is stuck; -EBUSY: nothing is, but there is much
 * memory to give back, which the kernel does as well. After either, exit without
 * touching more.
 */
int server_destroy(struct server *s, uint64_t deadline_ns);

/**
 * server_drain() - take nothing new and wait until no I/O is under way: drain.c
 *
 * What was said about slots is on the medium then. For a re-exec; loop_once() is
 * the way back.
 * Return: 0; -ETIMEDOUT and the sentence.
 */
int server_drain(struct server *s, uint64_t deadline_ns, struct errmsg *e);

/**
 * server_flush() - have all stores write down what they know: the end of a drain
 * Return: 0; -ETIMEDOUT and the sentence.
 */
int server_flush(struct server *s, uint64_t deadline_ns, struct errmsg *e);

/** server_reject() - count a reason */
void server_reject(struct server *s, enum reject why);

/** server_state() - "serving", or "degraded" when a node is not what it should be */
const char *server_state(const struct server *s);

/** server_status() - one line: the state of the whole, as in STATUS= */
void server_status(struct server *s, char *buf, size_t len);

/* -- administration: admin.c, admin_status.c ---------------------------------------- */

int admin_create(struct server *s, const char *path, struct admin **ret,
		 struct errmsg *e);
void admin_destroy(struct admin *a);
uint64_t admin_run(struct admin *a, uint64_t now_ns);

struct json_t;
/** admin_execute() - one request; always an object, a new reference */
struct json_t *admin_execute(struct server *s, const struct json_t *request);

#endif
