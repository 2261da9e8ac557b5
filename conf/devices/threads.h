/* Threads that share a product, and fetch the weights that they read next.

   A product's outputs are divided among threads. Each thread fetches weights into its second-level cache before it
   reads them. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#define INLINED static inline __attribute__((always_inline))

/* A weight (outputs, d), rounded: `outputs` is a multiple of 16. It is in blocks of 16 rows, of `bytes` bytes. Four bytes
   of a row have COLUMNS columns (int8.h, bfloat16.h), and d is a multiple of it. A block has the first four bytes of
   each row, then the next four. In int8 `offsets` are subtracted from the products, which `scale` then multiplies. */
typedef struct {
    long d, outputs, bytes;
    const char *weight;
    const float *scale;
    const int32_t *offsets;
} matrix;

/* A thread, and the weights that it reads next: from `at` to `end`, then its shares of the `upcoming` matrices, with a
   null after the last. It has fetched `ahead` bytes that it has not read. */
typedef struct {
    int number, count; /* of this thread, of all threads */
    const matrix *const *upcoming;
    const char *at, *end;
    long ahead;
} worker;

typedef struct {
    long first, end;
} range;

/* Part i of `count` equal parts. */
INLINED range part_of(range all, long i, long count)
{
    long n = all.end - all.first;
    return (range){all.first + n * i / count, all.first + n * (i + 1) / count};
}

/* A thread's share of n things. */
INLINED range share_of(long n, const worker *w)
{
    return part_of((range){0, n}, w->number, w->count);
}

INLINED worker worker_of(const matrix *const *upcoming)
{
    worker w = {.count = 1, .upcoming = upcoming};
#ifdef _OPENMP
    w.number = omp_get_thread_num();
    w.count = omp_get_num_threads();
#endif
    return w;
}

/* Wait for the other threads of a parallel region. */
INLINED void wait_for_others(const worker *w)
{
    if (w->count > 1) {
#pragma omp barrier
    }
}

/* Bytes that are fetched before a product reads them. Between products more are fetched: a quarter of the second-level
   cache may have weights that are not read yet. */
#define FEWEST_AHEAD 32768
static long most_ahead = 1 << 17;

__attribute__((constructor)) static void read_cache_size(void)
{
#ifdef _SC_LEVEL2_CACHE_SIZE
    long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (size > 0)
        most_ahead = size / 256 * 64;
#endif
}

/* Go on to the next matrix; return 0 after the last one. */
static int open_next(worker *w)
{
    const matrix *m = *w->upcoming;
    if (!m)
        return 0;
    range blocks = share_of(m->outputs / 16, w);
    w->at = m->weight + m->bytes * blocks.first;
    w->end = m->weight + m->bytes * blocks.end;
    w->upcoming++;
    return 1;
}

/* Weights to fetch, in lines of 64 bytes. */
typedef struct {
    const char *at;
    long lines;
} run;

/* Take the next weights to fetch, up to `lines` and to the end of a matrix. */
INLINED run take(worker *w, long lines)
{
    long allowed = (most_ahead - w->ahead) / 64, left;
    if (w->at == w->end && !open_next(w))
        return (run){NULL, 0};
    left = (w->end - w->at) / 64;
    lines = lines < allowed ? lines : allowed;
    lines = lines < left ? lines : left;
    lines = lines > 0 ? lines : 0;
    run next = {w->at, lines};
    w->at += 64 * lines;
    w->ahead += 64 * lines;
    return next;
}

/* Take weights for a product that reads `lines`: fewer if more than FEWEST_AHEAD are there, because a product reads
   them three times as fast as memory does. */
INLINED run take_for_product(worker *w, long lines)
{
    return take(w, w->ahead > FEWEST_AHEAD ? lines / 3 : lines);
}

/* Fetch up to `lines` of a run, into the first-level cache or only into the second. More at once would delay other
   reads. */
INLINED void fetch_part(run *next, long lines, const int first_level)
{
    for (; lines > 0 && next->lines > 0; lines--, next->lines--, next->at += 64)
        if (first_level)
            _mm_prefetch(next->at, _MM_HINT_T0);
        else
            _mm_prefetch(next->at, _MM_HINT_T1);
}

/* Fetch the next weights, up to `lines`. */
INLINED void fetch(worker *w, long lines)
{
    while (lines > 0) {
        run next = take(w, lines);
        if (!next.lines)
            return;
        lines -= next.lines;
        fetch_part(&next, next.lines, 1);
    }
}
