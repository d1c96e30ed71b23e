/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvmm's objects, and which lifetime each of them has.
 *
 *   kvmm		a connection, for as long as the user has the handle
 *   era		one daemon behind it: header, ledger, rings. A new daemon is
 *			a new era; the old one stays while something uses it
 *   att		a space in one era: its index and its views
 *   view		a window's shared memory in one era: frame table, pins,
 *			magazine. Lives as long as its window is open or a
 *			request that used it is there, at most as long as its att
 *   space, win		the user's handles; they outlive eras
 *   req		bound to one att; its pins and frames lie in its views
 *   op			a publish or fetch in flight; keeps its request alive
 *   blob		what a request writes or reads in several pages; goes with
 *			its request, or before
 *
 * Who may free what another thread may be looking at: every hot call runs
 * between kvmm_enter() and kvmm_exit(), which count readers. An object that was
 * unlinked is freed when the count was seen at zero afterwards: whoever enters
 * later cannot find it any more. (The unlinking store and the load of the count
 * are seq_cst, and so are the increment and the load of the link: the same
 * Dekker pair as pins and reclaim.)
 *
 * Locks, outermost first (ranks in ipc/base/lock.h): kvmm.lock (completions,
 * connection), req.lock (a request against kvmm_poll() in another thread),
 * view.mag_lock, kvmm.ops_lock, era.sq_lock. Set-up calls own the socket
 * through kvmm.calling, not through a lock, so that nobody is kept waiting
 * beyond its deadline, and callbacks run under no lock.
 */
#ifndef KVMM_LIBKVMM_LIB_H
#define KVMM_LIBKVMM_LIB_H

#include "libkvmm/base.h"
#include "libkvmm/blob.h"
#include "libkvmm/conn.h"
#include "libkvmm/era.h"
#include "libkvmm/op.h"
#include "libkvmm/req.h"
#include "libkvmm/space.h"

#endif
