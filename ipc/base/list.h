/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Intrusive, circular, doubly linked list. A struct list is both the head and
 * the member; an unlinked member points at itself, so list_del() may be called
 * twice and list_empty(&m) asks whether m is on some list.
 */
#ifndef KVMM_BASE_LIST_H
#define KVMM_BASE_LIST_H

#include <stdbool.h>

#include "ipc/base/bits.h"

struct list {
	struct list	*next;
	struct list	*prev;
};

#define LIST_INIT(name)	{ &(name), &(name) }

static inline void list_init(struct list *l)
{
	l->next = l;
	l->prev = l;
}

static inline bool list_empty(const struct list *head)
{
	return head->next == head;
}

static inline void __list_insert(struct list *n, struct list *prev,
				 struct list *next)
{
	n->prev = prev;
	n->next = next;
	prev->next = n;
	next->prev = n;
}

/* At the front; @n must not be on a list. */
static inline void list_add(struct list *head, struct list *n)
{
	__list_insert(n, head, head->next);
}

/* At the back; @n must not be on a list. */
static inline void list_add_tail(struct list *head, struct list *n)
{
	__list_insert(n, head->prev, head);
}

static inline void list_del(struct list *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

static inline void list_move(struct list *head, struct list *n)
{
	list_del(n);
	list_add(head, n);
}

static inline void list_move_tail(struct list *head, struct list *n)
{
	list_del(n);
	list_add_tail(head, n);
}

/* All of @from goes to the back of @head; @from is empty afterwards. */
static inline void list_splice_tail(struct list *head, struct list *from)
{
	if (list_empty(from))
		return;
	from->next->prev = head->prev;
	head->prev->next = from->next;
	from->prev->next = head;
	head->prev = from->prev;
	list_init(from);
}

#define list_entry(ptr, type, member)	container_of(ptr, type, member)

/* NULL when the list is empty. */
#define list_first(head, type, member)					\
	(list_empty(head) ? NULL : list_entry((head)->next, type, member))
#define list_last(head, type, member)					\
	(list_empty(head) ? NULL : list_entry((head)->prev, type, member))

#define list_for_each(pos, head)					\
	for ((pos) = (head)->next; (pos) != (head); (pos) = (pos)->next)

/**
 * list_for_each_entry() - visit each member
 * @pos:	a `type *` cursor; meaningless after the loop has run out
 * @head:	the list
 * @member:	name of the struct list in *@pos
 */
#define list_for_each_entry(pos, head, member)				\
	for ((pos) = list_entry((head)->next, __typeof__(*(pos)), member); \
	     &(pos)->member != (head);					\
	     (pos) = list_entry((pos)->member.next, __typeof__(*(pos)), member))

#define list_for_each_entry_reverse(pos, head, member)			\
	for ((pos) = list_entry((head)->prev, __typeof__(*(pos)), member); \
	     &(pos)->member != (head);					\
	     (pos) = list_entry((pos)->member.prev, __typeof__(*(pos)), member))

/* The same, and @pos may be deleted or freed in the loop; @tmp is a cursor. */
#define list_for_each_entry_safe(pos, tmp, head, member)		\
	for ((pos) = list_entry((head)->next, __typeof__(*(pos)), member), \
	     (tmp) = list_entry((pos)->member.next, __typeof__(*(pos)), member); \
	     &(pos)->member != (head);					\
	     (pos) = (tmp),						\
	     (tmp) = list_entry((tmp)->member.next, __typeof__(*(tmp)), member))

static inline unsigned long list_count(const struct list *head)
{
	const struct list *l;
	unsigned long n = 0;

	list_for_each(l, head)
		n++;
	return n;
}

/* True when every link agrees with its neighbours, at most @max members on. */
static inline bool list_check(const struct list *head, unsigned long max)
{
	const struct list *l;

	for (l = head; l->next != head; l = l->next)
		if (!max-- || l->next->prev != l)
			return false;
	return head->prev == l;
}

#endif
