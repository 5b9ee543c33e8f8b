/* Weights that are asked for before they are needed. */
#ifndef DPI_AHEAD_H
#define DPI_AHEAD_H
#include "dpi.h"

/* Memory is asked for the next group of panels while this one is multiplied. Where one block of rows passes by, that is what
 * takes the time: the panels of the group are then asked for side by side, as they will be needed (a third faster than one
 * after the other). Where several pass by, each asks for a part of the group. */
typedef struct {
    const char *at;
    i64 apart;         /* bytes from panel to panel */
    int panels, lines; /* cache lines of each panel, in each step */
} ahead;

/* Panels of `bytes` bytes from `panel` on, none from `end` on. A step of the group before takes `lines` lines of each of np
 * panels. */
INLINE ahead next_panels(const void *w, i64 bytes, i64 panel, i64 end, i64 blocks, int np, int lines) {
    ahead next = {(const char *)w + panel * bytes, bytes, 0, 0};
    if (panel >= end) return next;
    if (blocks == 1) next.panels = np, next.lines = lines;
    else next.panels = 1, next.lines = (int)((lines * np + blocks - 1) / blocks);
    return next;
}

INLINE void ask_ahead(ahead *next) {
    for (int j = 0; j < next->panels; ++j)
        for (int l = 0; l < next->lines; ++l) __builtin_prefetch(next->at + j * next->apart + 64 * l, 0, 2);
    next->at += 64 * next->lines;
}
#endif
