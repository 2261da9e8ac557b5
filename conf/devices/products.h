/* Products of rows in unsigned and weights in signed 8 bits. Every sum is exact.

   A row's result does not depend on other rows. A product's outputs are divided among threads; each
   thread fetches the weights that it reads next into its second-level cache. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#endif

#define INLINED static inline __attribute__((always_inline))

/* A weight (outputs, d), rounded: d is a multiple of 4, `outputs` of 16. It is in blocks of 16 rows; a block has 4
   columns of each row, then the next 4. `offsets` are subtracted from the products, which `scale` then multiplies. */
typedef struct {
    long d, outputs;
    const int8_t *weight;
    const float *scale;
    const int32_t *offsets;
} matrix;

/* ---- Threads ---- */

/* A thread, and the weights that it reads next: from `at` to `end`, then its shares of the `upcoming` matrices, with a
   null after the last. It has fetched `ahead` bytes that it has not read. */
typedef struct {
    int number, count; /* of this thread, of all threads */
    const matrix *const *upcoming;
    const int8_t *at, *end;
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
    w->at = m->weight + 16 * m->d * blocks.first;
    w->end = m->weight + 16 * m->d * blocks.end;
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
    run next = {(const char *)w->at, lines};
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

/* Fetch up to `lines` of a run. More at once would delay other reads. */
INLINED void fetch_part(run *next, long lines)
{
    for (; lines > 0 && next->lines > 0; lines--, next->lines--, next->at += 64)
        _mm_prefetch(next->at, _MM_HINT_T0); /* CPUs may ignore hints for other levels */
}

/* Fetch the next weights, up to `lines`. */
INLINED void fetch(worker *w, long lines)
{
    while (lines > 0) {
        run next = take(w, lines);
        if (!next.lines)
            return;
        lines -= next.lines;
        fetch_part(&next, next.lines);
    }
}

/* ---- Products by vectors ---- */

/* `TILE` rows of a product at once: their sums fill the registers. */
#if defined(__AVX512VNNI__)
#define TILE 12
#define CHAINS 2 /* of additions, which have a latency */
typedef __m512i integers;
#define broadcast _mm512_set1_epi32
#define add_products _mm512_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define TILE 6
#define CHAINS 1
typedef __m256i integers;
#define broadcast _mm256_set1_epi32
#define add_products _mm256_dpbusd_avx_epi32
#else
#define TILE 5
#define CHAINS 1
typedef __m256i integers;
#define broadcast _mm256_set1_epi32
#define multiply_pairs _mm256_maddubs_epi16
#define SIXTEEN_BITS

/* Add neighbouring numbers of 16 bits to sums in 32 bits. */
INLINED integers add_pairs(integers sums, integers pairs)
{
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#define VECTORS (64 / sizeof(integers)) /* four columns of 16 rows of a weight */
typedef integers unaligned_integers __attribute__((aligned(1)));
typedef int32_t sum_vector __attribute__((vector_size(sizeof(integers)), aligned(4)));
typedef float scale_vector __attribute__((vector_size(sizeof(integers)), aligned(4)));

/* Return 1 if the products of four columns, 0, 1, 4 and 5 or 2, 3, 6 and 7 of eight, must fit into 16 bits. */
int adds_in_sixteen_bits(void)
{
#ifdef SIXTEEN_BITS
    return 1;
#else
    return 0;
#endif
}

/* Add to each sum four products, of four columns. */
INLINED integers add_four(integers sums, integers x, integers w)
{
#ifdef SIXTEEN_BITS
    return add_pairs(sums, multiply_pairs(x, w));
#else
    return add_products(sums, x, w);
#endif
}

/* Add to sums eight products, of four columns and of the next four: to the same sums, or to two that are added
   later. */
INLINED void add_eight(integers sums[CHAINS], const integers x[2], integers w, integers next)
{
#ifdef SIXTEEN_BITS
    sums[0] = add_pairs(sums[0], _mm256_add_epi16(multiply_pairs(x[0], w), multiply_pairs(x[1], next)));
#else
    sums[0] = add_products(sums[0], x[0], w);
    sums[CHAINS - 1] = add_products(sums[CHAINS - 1], x[1], next);
#endif
}

/* Add the products of four columns, or of eight (`fours` 2), of `count` rows of x and of 16 rows of a weight. */
INLINED void multiply_columns(const int fours, const int count, integers sums[TILE][VECTORS][CHAINS], long d,
                              const uint8_t *x, const int8_t *weight)
{
    const unaligned_integers *w = (const unaligned_integers *)weight;
    for (int r = 0; r < count; r++) {
        integers four[2];
        for (int f = 0; f < fours; f++)
            four[f] = broadcast(*(const int32_t *)(x + r * d + 4 * f));
        for (int j = 0; j < VECTORS; j++)
            if (fours == 2)
                add_eight(sums[r][j], four, w[j], w[VECTORS + j]);
            else
                sums[r][j][0] = add_four(sums[r][j][0], four[0], w[j]);
    }
}

/* n rows in unsigned 8 bits, 128 added; the numbers that multiply the rows of their product, or null for 1; and rows y,
   `stride` numbers apart, that the product replaces or is added to. */
typedef struct {
    long n;
    const uint8_t *x;
    const float *factors;
    float *y;
    long stride;
    int added;
} operands;

/* Write vector j of output block `block` of row r. */
INLINED void scale_sums(sum_vector sums, const matrix *m, const operands *of, long r, long block, int j)
{
    long o = 16 * block;
    sum_vector total = sums - ((const sum_vector *)(m->offsets + o))[j];
    scale_vector scaled = __builtin_convertvector(total, scale_vector) * ((const scale_vector *)(m->scale + o))[j];
    scale_vector *y = (scale_vector *)(of->y + r * of->stride + o) + j;
    scaled = of->factors ? scaled * of->factors[r] : scaled;
    *y = of->added ? *y + scaled : scaled;
}

/* A block of `count` rows of a product, from row r on. Every 64 columns it fetches `lines`. */
INLINED void multiply_rows(const int count, const matrix *m, const operands *of, long r, long block, worker *w,
                           long lines)
{
    integers sums[TILE][VECTORS][CHAINS] = {0};
    long d = m->d, i = 0;
    const uint8_t *x = of->x + r * d;
    const int8_t *weight = m->weight + 16 * block * d;
    while (i + 8 <= d) {
        run next = take_for_product(w, lines);
        for (long end = i + 64 < d - 7 ? i + 64 : d - 7; i < end; i += 8, weight += 128) {
            fetch_part(&next, 2);
            multiply_columns(2, count, sums, d, x + i, weight);
        }
    }
    if (i < d)
        multiply_columns(1, count, sums, d, x + i, weight);
    for (int c = 0; c < count; c++)
        for (int j = 0; j < VECTORS; j++) {
            sum_vector total = (sum_vector)sums[c][j][0];
            for (int k = 1; k < CHAINS; k++)
                total += (sum_vector)sums[c][j][k];
            scale_sums(total, m, of, r + c, block, j);
        }
}

/* A block of a product by vectors. */
static void multiply_block(const matrix *m, const operands *of, long block, worker *w)
{
    long tiles = (of->n + TILE - 1) / TILE;
    for (long t = 0; t < tiles; t++) {
        long r = of->n * t / tiles;
#define CASE(count)                                                                                                   \
    case count: multiply_rows(count, m, of, r, block, w, (16 + tiles - 1) / tiles); break;
        switch (of->n * (t + 1) / tiles - r) { /* a known number of rows stays in registers */
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if TILE > 5
            CASE(6)
#endif
#if TILE > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
#undef CASE
    }
}

/* ---- Products by tiles: 16 rows of 64 bytes ---- */

#ifdef __AMX_INT8__

static int tiles_allowed;

/* Ask Linux for the use of tiles. */
__attribute__((constructor)) static void allow_tiles(void)
{
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    tiles_allowed = syscall(SYS_arch_prctl, request, tile_data) == 0;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t width[16];
    uint8_t rows[16];
} tile_shapes;

/* Use tiles 0 to 3 for the sums of two times 16 rows and two blocks of a weight, 4 and 5 for the rows, 6 and 7 for
   the blocks. `count` of the rows are used. */
static void shape_tiles(long count)
{
    uint8_t first = count < 16 ? count : 16, rest = count - first;
    tile_shapes shapes = {.palette = 1, .rows = {first, first, rest, rest, first, rest, 16, 16}};
    for (int t = 0; t < 8; t++)
        shapes.width[t] = shapes.rows[t] ? 64 : 0;
    _tile_loadconfig(&shapes);
}

/* Fetch `count` lines of 64 bytes, `step` bytes apart. */
INLINED void fetch_lines(const void *at, long step, int count)
{
    for (int i = 0; i < count; i++)
        _mm_prefetch((const char *)at + i * step, _MM_HINT_T0);
}

/* Fetch lines first to end - 1 of two blocks of 32 rows y for writing. */
INLINED void fetch_results(const float *y, long stride, long first, long end)
{
    for (long i = first; i < end && i < 64; i++)
        __builtin_prefetch(y + i / 2 * stride + i % 2 * 16, 1);
}

/* The sums of up to 16 rows, with `more` up to 32, and two blocks of a weight. Every 64 columns it fetches `lines`.
   With `many` rows the operands are in the second-level cache, since other rows were read in between: it fetches the
   next columns, and the lines of y that the sums will be written to. */
INLINED void add_tiles(const int more, const int many, long d, const uint8_t *x, const int8_t *weight,
                       const int8_t *other, int32_t *sums, worker *w, long lines, const float *y, long stride)
{
    long results = (64 * 64 + d - 1) / d; /* to fetch every 64 columns */
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long i = 0; i < d; i += 64) {
        run next = take_for_product(w, lines);
        _tile_loadd(4, x + i, d);
        _tile_loadd(6, weight + 16 * i, 64);
        fetch_part(&next, 16);
        if (many)
            fetch_lines(x + i + 64, d, 16);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, other + 16 * i, 64);
        fetch_part(&next, 16);
        if (many)
            fetch_lines(x + 16 * d + i + 64, d, 16);
        _tile_dpbusd(1, 4, 7);
        if (more) {
            _tile_loadd(5, x + 16 * d + i, d);
            if (many)
                fetch_lines(weight + 16 * (i + 64), 64, 16);
            _tile_dpbusd(2, 5, 6);
            if (many)
                fetch_lines(other + 16 * (i + 64), 64, 16);
            _tile_dpbusd(3, 5, 7);
        }
        if (many)
            fetch_results(y, stride, i / 64 * results, (i / 64 + 1) * results);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 512, 64);
    if (more) {
        _tile_stored(2, sums + 256, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

/* Two blocks of a product, or one, by tiles that have the shapes for `shaped` rows. */
static void multiply_by_tiles(const matrix *m, const operands *of, long block, long blocks, long *shaped, worker *w)
{
    int32_t sums[2][32][16] __attribute__((aligned(64)));
    long d = m->d, groups = (of->n + 31) / 32;
    const int8_t *weight = m->weight + 16 * d * block, *other = weight + 16 * d * (blocks - 1);
    for (long g = 0; g < groups; g++) {
        long r = of->n * g / groups, count = of->n * (g + 1) / groups - r;
        const uint8_t *x = of->x + r * d;
        if (count != *shaped)
            shape_tiles(*shaped = count);
        float *y = of->y + r * of->stride + 16 * block;
        if (count <= 16)
            add_tiles(0, 0, d, x, weight, other, sums[0][0], w, 32 / groups, y, of->stride);
        else if (groups == 1)
            add_tiles(1, 0, d, x, weight, other, sums[0][0], w, 32, y, of->stride);
        else
            add_tiles(1, 1, d, x, weight, other, sums[0][0], w, 32 / groups, y, of->stride);
        for (long i = 0; i < count; i++)
            for (long b = 0; b < blocks; b++)
                for (int j = 0; j < VECTORS; j++)
                    scale_sums(((sum_vector *)sums[b][i])[j], m, of, r + i, block + b, j);
    }
}

/* A thread's share of a product by tiles; d is a multiple of 64. */
static void multiply_share_by_tiles(const matrix *m, const operands *of, range share, worker *w)
{
    long shaped = 0;
    for (long b = share.first; b < share.end; b += 2) {
        long blocks = share.end - b > 1 ? 2 : 1;
        multiply_by_tiles(m, of, b, blocks, &shaped, w);
        w->ahead -= 16 * m->d * blocks;
    }
    _tile_release();
}

#define BY_TILES(n, d) (tiles_allowed && (n) >= 2 && (d) % 64 == 0)
#else
#define BY_TILES(n, d) 0
#define multiply_share_by_tiles(...)
#endif

/* Write a thread's share of the product of rows and a weight. */
static void multiply_share(const matrix *m, const operands *of, worker *w)
{
    range share = share_of(m->outputs / 16, w);
    fetch(w, (FEWEST_AHEAD - w->ahead) / 64);
    if (BY_TILES(of->n, m->d)) {
        multiply_share_by_tiles(m, of, share, w);
        return;
    }
    for (long b = share.first; b < share.end; b++) {
        multiply_block(m, of, b, w);
        w->ahead -= 16 * m->d;
    }
}

/* Write y (n, outputs), the product of n rows x (n, d) and a weight, multiplied by `factors` (n). */
static void multiply(const matrix *m, long n, const uint8_t *x, const float *factors, float *y, int threads)
{
    const matrix *const upcoming[] = {m, NULL};
    const operands of = {n, x, factors, y, m->outputs, 0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        worker w = worker_of(upcoming);
        multiply_share(m, &of, &w);
    }
}
