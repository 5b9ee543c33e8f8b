/* A recorded forward pass: the calls that one made of the functions of this library, made again in one call. */
#include "kernels.h"

#define MOST_ARGUMENTS 20

/* The functions a program can hold. `ops/cpu_program.py` counts them in this order. */
enum { EMBED, RMS_NORM, LINEAR, LINEAR_DOT, LINEAR_INT8, SILU_MUL, ROPE_WRITE, ATTENTION, ROUTE, EXPERTS };

/* Arguments are pointers and integers in the order of the function, without its float. */
typedef struct {
    i64 function;
    i64 a[MOST_ARGUMENTS];
    double f;
} command;

typedef struct {
    const command *commands;
    i64 count, status;
} program;

#define P(i) ((void *)c->a[i])
#define L(i) (c->a[i])
#define I(i) ((int)c->a[i])

static int call(const command *c) {
    const float f = (float)c->f;
    switch (c->function) {
    case EMBED: return dpi_embed(P(0), P(1), P(2), L(3), L(4), L(5), I(6), I(7), I(8));
    case RMS_NORM: dpi_rms_norm(P(0), P(1), P(2), P(3), L(4), L(5), f, I(6), I(7), I(8)); return OK;
    case LINEAR: dpi_linear(P(0), P(1), P(2), P(3), L(4), L(5), L(6), I(7)); return OK;
    case LINEAR_DOT: return dpi_linear_dot(P(0), P(1), P(2), P(3), L(4), L(5), L(6), I(7), I(8));
    case LINEAR_INT8:
        return dpi_linear_int8(P(0), P(1), P(2), P(3), P(4), P(5), L(6), L(7), L(8), I(9), I(10));
    case SILU_MUL: dpi_silu_mul(P(0), P(1), L(2), L(3), I(4), I(5)); return OK;
    case ROPE_WRITE:
        return dpi_rope_write(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), L(10), L(11), L(12), I(13),
                              I(14), I(15), f, I(16), I(17), I(18));
    case ATTENTION:
        return dpi_attention(P(0), P(1), P(2), P(3), P(4), P(5), P(6), L(7), L(8), L(9), I(10), I(11), I(12), I(13),
                             I(14), f, I(15), I(16), I(17));
    case ROUTE:
        return dpi_route(P(0), P(1), P(2), P(3), P(4), P(5), L(6), L(7), L(8), I(9), I(10), I(11), I(12), I(13), I(14), f,
                         I(15), I(16));
    case EXPERTS:
        return dpi_experts(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), L(8), L(9), L(10), L(11), I(12), I(13), I(14),
                           I(15));
    }
    return NO_FUNCTION;
}

static void commands_in_order(void *ctx, int first) {
    program *p = ctx;
    for (i64 i = 0; i < p->count; ++i) {
        const int status = call(p->commands + i); /* the same on every thread, so that all stop here */
        if (!status) continue;
        if (first) p->status = i << 8 | status;
        return;
    }
}

/* The status of the first call that failed, above its lowest byte the number of that call; those after it are not made. */
EXPORT i64 dpi_run(const command *commands, i64 count, int threads) {
    program p = {commands, count, OK};
    run_program(commands_in_order, &p, threads);
    return p.status;
}
