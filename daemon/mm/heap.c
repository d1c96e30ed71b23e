/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/mm/heap.h"

static bool before(const struct heap_node *a, const struct heap_node *b)
{
	return a->key != b->key ? a->key < b->key : a->seq < b->seq;
}

/* Two tops, either of which may be NULL: one of them goes below the other. */
static struct heap_node *merge(struct heap_node *a, struct heap_node *b)
{
	struct heap_node *low;

	if (!a || !b)
		return a ? a : b;
	low = before(a, b) ? b : a;
	a = low == b ? a : b;
	low->prev = a;
	low->next = a->child;
	if (low->next)
		low->next->prev = low;
	a->child = low;
	a->prev = a->next = NULL;
	return a;
}

/* Siblings become one: in pairs from the front, then from the back into one. */
static struct heap_node *merge_all(struct heap_node *n)
{
	struct heap_node *pairs = NULL, *top = NULL;

	while (n) {
		struct heap_node *a = n, *b = n->next;

		n = b ? b->next : NULL;
		a = merge(a, b);
		a->next = pairs;
		pairs = a;
	}
	while (pairs) {
		struct heap_node *a = pairs;

		pairs = a->next;
		top = merge(a, top);
	}
	if (top)
		top->prev = top->next = NULL;
	return top;
}

void heap_add(struct heap *h, struct heap_node *n, uint64_t key)
{
	*n = (struct heap_node){ .key = key, .seq = h->seq++ };
	h->top = merge(h->top, n);
}

void heap_del(struct heap *h, struct heap_node *n)
{
	struct heap_node *below;

	if (!heap_queued(n))
		return;
	below = merge_all(n->child);
	if (n == h->top) {
		h->top = below;
	} else {
		if (n->prev->child == n)
			n->prev->child = n->next;
		else
			n->prev->next = n->next;
		if (n->next)
			n->next->prev = n->prev;
		h->top = merge(h->top, below);
	}
	heap_node_init(n);
}
