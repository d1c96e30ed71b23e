/* SPDX-License-Identifier: Apache-2.0 */
/*
 * heap.h - a queue by key, of things that wait
 *
 * An intrusive pairing heap: whoever is added needs no memory, and clients that
 * choose keys cannot choose an order that costs more than a logarithm, over all
 * calls. Equal keys come out in the order in which they went in.
 */
#ifndef KVMM_DAEMON_MM_HEAP_H
#define KVMM_DAEMON_MM_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * struct heap_node - a member
 * @key:	as given to heap_add()
 * @seq:	of equal keys the lower one is first
 * @child:	first of those behind it
 * @next:	its next sibling
 * @prev:	its previous sibling, or its parent; NULL at the top, itself
 *		when it is in no heap
 */
struct heap_node {
	uint64_t	key;
	uint64_t	seq;
	struct heap_node *child, *next, *prev;
};

/** struct heap - zeroed is empty */
struct heap {
	struct heap_node *top;
	uint64_t	seq;
};

static inline void heap_node_init(struct heap_node *n)
{
	*n = (struct heap_node){ .prev = n };
}

static inline bool heap_queued(const struct heap_node *n)
{
	return n->prev != n;
}

static inline bool heap_empty(const struct heap *h)
{
	return !h->top;
}

/** heap_first() - who has the least key; NULL: nobody is there */
static inline struct heap_node *heap_first(const struct heap *h)
{
	return h->top;
}

/** heap_add() - @n is in no heap */
void heap_add(struct heap *h, struct heap_node *n, uint64_t key);

/** heap_del() - fine on who is in no heap */
void heap_del(struct heap *h, struct heap_node *n);

#endif
