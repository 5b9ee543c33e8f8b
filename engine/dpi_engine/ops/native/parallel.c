/* Loops over the threads of the OpenMP runtime that torch has loaded.
 *
 * Its entry points are called by name, so any C compiler will do, and nothing links a second runtime with threads of its
 * own: two teams that spin on the same cores halve each other's speed.
 */
#include "dpi.h"
#include <sched.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Ask the kernel for what this instruction set needs; 0 when it is granted. To be called before anything else. */
EXPORT int dpi_prepare(void) {
#ifdef __AMX_BF16__
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) != 0;
#else
    return 0;
#endif
}

extern void GOMP_parallel(void (*fn)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

typedef struct {
    i64 n, next;
    body_fn body;
    void *ctx;
} loop;

static void run_chunk(void *data) {
    loop *l = data;
    /* The runtime may grant fewer threads than asked for. */
    i64 me = omp_get_thread_num(), all = omp_get_num_threads();
    i64 begin = l->n * me / all, end = l->n * (me + 1) / all;
    if (begin < end) l->body(l->ctx, begin, end);
}

static void run_items(void *data) {
    loop *l = data;
    for (;;) {
        i64 i = __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED);
        if (i >= l->n) return;
        l->body(l->ctx, i, i + 1);
    }
}

/* A team runs a whole program: every member calls the same functions with the same arguments, and each loop in them is
 * shared out and followed by a barrier. `me` is NULL outside of a team. */
typedef struct {
    i64 arrived __attribute__((aligned(64)));
    i64 next[2] __attribute__((aligned(64))); /* items given out by this loop, and by the one before */
    i64 members;
    program_fn program;
    void *ctx;
} team;

typedef struct {
    team *team;
    i64 index, loops;
} member;

static __thread member *me;

#define SPINS 4096 /* then others may need the core that is waited for */

static void meet(member *m) {
    team *t = m->team;
    const i64 all = ++m->loops * t->members;
    __atomic_add_fetch(&t->arrived, 1, __ATOMIC_ACQ_REL);
    for (i64 spins = 0; __atomic_load_n(&t->arrived, __ATOMIC_ACQUIRE) < all; ++spins)
        if (spins < SPINS) __builtin_ia32_pause();
        else sched_yield();
}

static void share(member *m, i64 n, int threads, body_fn body, void *ctx, int items) {
    team *t = m->team;
    i64 *next = &t->next[m->loops % 2];
    if (threads <= 1 || n <= 1) {
        if (m->index == 0 && n > 0) body(ctx, 0, n);
    } else if (items) {
        for (i64 i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < n;) body(ctx, i, i + 1);
    } else {
        const i64 begin = n * m->index / t->members, end = n * (m->index + 1) / t->members;
        if (begin < end) body(ctx, begin, end);
    }
    meet(m);
    /* Nobody gives out of this counter again before all have met once more. */
    if (m->index == 0) __atomic_store_n(next, 0, __ATOMIC_RELAXED);
}

static void join_team(void *data) {
    team *t = data;
    /* The runtime may grant fewer threads than asked for; all see the same number. */
    __atomic_store_n(&t->members, omp_get_num_threads(), __ATOMIC_RELAXED);
    member m = {t, omp_get_thread_num(), 0};
    me = &m;
    t->program(t->ctx, m.index == 0);
    me = NULL;
}

void run_program(program_fn program, void *ctx, int threads) {
    if (threads <= 1) {
        program(ctx, 1);
        return;
    }
    team t = {.arrived = 0, .next = {0, 0}, .members = threads, .program = program, .ctx = ctx};
    GOMP_parallel(join_team, &t, (unsigned)threads, 0);
}

static void run(i64 n, int threads, body_fn body, void *ctx, int items) {
    if (me) {
        share(me, n, threads, body, ctx, items);
        return;
    }
    if (n <= 0) return;
    if (threads > n) threads = (int)n;
    if (threads <= 1) {
        body(ctx, 0, n);
        return;
    }
    loop l = {n, 0, body, ctx};
    GOMP_parallel(items ? run_items : run_chunk, &l, (unsigned)threads, 0);
}

void for_each_chunk(i64 n, int threads, body_fn body, void *ctx) { run(n, threads, body, ctx, 0); }
void for_each_item(i64 n, int threads, body_fn body, void *ctx) { run(n, threads, body, ctx, 1); }
