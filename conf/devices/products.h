/* Products of rows and a weight, in the arithmetic of int8.h or bfloat16.h. A row's result does not depend on other
   rows. */

/* n rows x of d numbers; the numbers that multiply the rows of their product, or null for 1; and rows y, `stride`
   numbers apart, that the product replaces or is added to. */
typedef struct {
    long n;
    const input *x;
    const float *factors;
    float *y;
    long stride;
    int added;
} operands;

/* Write vector j of output block `block` of row r. */
INLINED void write_sums(sum_vector sums, const matrix *m, const operands *of, long r, long block, int j)
{
    long o = 16 * block;
    result_vector result = results_of(sums, m, o, j, of->factors ? of->factors[r] : 1);
    result_vector *y = (result_vector *)(of->y + r * of->stride + o) + j;
    *y = of->added ? *y + result : result;
}

/* ---- Products by vectors ---- */

/* AMD's CPUs multiply this many rows faster if their next weights are only in the second-level cache, from where a CPU
   reads them while it multiplies. Other CPUs may ignore hints for that level. */
#ifdef __CLZERO__ /* AMD */
#define FETCHES_LATE(n) ((n) > 2 && (n) <= TILE + TILE / 3)
#else
#define FETCHES_LATE(n) 0
#endif

/* A block of `count` rows of a product, from row r on. For every 64 bytes of a weight's row it fetches `lines`. */
INLINED void multiply_rows(const int count, const matrix *m, const operands *of, long r, long block, worker *w,
                           long lines)
{
    registers sums[TILE][VECTORS] = {0};
    long d = m->d, i = 0, step = 2 * COLUMNS;
    const input *x = of->x + r * d;
    const char *weight = m->weight + m->bytes * block;
    while (i + step <= d) {
        run next = take_for_product(w, lines);
        for (long end = i + 8 * step < d - step + 1 ? i + 8 * step : d - step + 1; i < end; i += step, weight += 128) {
            fetch_part(&next, 2, !FETCHES_LATE(of->n));
            multiply_columns(2, count, sums, d, x + i, weight);
        }
    }
    if (i < d)
        multiply_columns(1, count, sums, d, x + i, weight);
    for (int c = 0; c < count; c++)
        for (int j = 0; j < VECTORS; j++)
            write_sums((sum_vector)sums[c][j], m, of, r + c, block, j);
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

#ifdef TILES
#include <sys/syscall.h>

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

/* The sums of up to 16 rows, with `more` up to 32, and two blocks of a weight. The rows have `size` bytes. For every 64
   of them it fetches `lines`. With `many` rows the operands are in the second-level cache, since other rows were read in between: it fetches the
   next columns, and the lines of y that the sums will be written to. */
INLINED void add_tiles(const int more, const int many, long size, const char *x, const char *weight,
                       const char *other, sum *sums, worker *w, long lines, const float *y, long stride)
{
    long results = (64 * 64 + size - 1) / size; /* to fetch for every 64 bytes */
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long i = 0; i < size; i += 64) {
        run next = take_for_product(w, lines);
        _tile_loadd(4, x + i, size);
        _tile_loadd(6, weight + 16 * i, 64);
        fetch_part(&next, 16, 1);
        if (many)
            fetch_lines(x + i + 64, size, 16);
        add_tile(0, 4, 6);
        _tile_loadd(7, other + 16 * i, 64);
        fetch_part(&next, 16, 1);
        if (many)
            fetch_lines(x + 16 * size + i + 64, size, 16);
        add_tile(1, 4, 7);
        if (more) {
            _tile_loadd(5, x + 16 * size + i, size);
            if (many)
                fetch_lines(weight + 16 * (i + 64), 64, 16);
            add_tile(2, 5, 6);
            if (many)
                fetch_lines(other + 16 * (i + 64), 64, 16);
            add_tile(3, 5, 7);
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
    sum sums[2][32][16] __attribute__((aligned(64)));
    long size = m->bytes / 16, groups = (of->n + 31) / 32;
    const char *weight = m->weight + m->bytes * block, *other = weight + m->bytes * (blocks - 1);
    for (long g = 0; g < groups; g++) {
        long r = of->n * g / groups, count = of->n * (g + 1) / groups - r;
        const char *x = (const char *)(of->x + r * m->d);
        if (count != *shaped)
            shape_tiles(*shaped = count);
        float *y = of->y + r * of->stride + 16 * block;
        if (count <= 16)
            add_tiles(0, 0, size, x, weight, other, sums[0][0], w, 32 / groups, y, of->stride);
        else if (groups == 1)
            add_tiles(1, 0, size, x, weight, other, sums[0][0], w, 32, y, of->stride);
        else
            add_tiles(1, 1, size, x, weight, other, sums[0][0], w, 32 / groups, y, of->stride);
        for (long i = 0; i < count; i++)
            for (long b = 0; b < blocks; b++)
                for (int j = 0; j < VECTORS; j++)
                    write_sums(((sum_vector *)sums[b][i])[j], m, of, r + i, block + b, j);
    }
}

/* A thread's share of a product by tiles. */
static void multiply_share_by_tiles(const matrix *m, const operands *of, range share, worker *w)
{
    long shaped = 0;
    for (long b = share.first; b < share.end; b += 2) {
        long blocks = share.end - b > 1 ? 2 : 1;
        multiply_by_tiles(m, of, b, blocks, &shaped, w);
        w->ahead -= m->bytes * blocks;
    }
    _tile_release();
}

#define BY_TILES(n, m) (tiles_allowed && (n) >= FEWEST_TILED && (m)->bytes % 1024 == 0)
#else
#define BY_TILES(n, m) 0
#define multiply_share_by_tiles(...)
#endif

/* Write a thread's share of the product of rows and a weight. */
static void multiply_share(const matrix *m, const operands *of, worker *w)
{
    range share = share_of(m->outputs / 16, w);
    fetch(w, (FEWEST_AHEAD - w->ahead) / 64);
    if (BY_TILES(of->n, m)) {
        multiply_share_by_tiles(m, of, share, w);
        return;
    }
    for (long b = share.first; b < share.end; b++) {
        multiply_block(m, of, b, w);
        w->ahead -= m->bytes;
    }
}

/* Write y (n, outputs), the product of n rows x (n, d) and a weight, multiplied by `factors` (n). */
static void multiply(const matrix *m, long n, const input *x, const float *factors, float *y, int threads)
{
    const matrix *const upcoming[] = {m, NULL};
    const operands of = {n, x, factors, y, m->outputs, 0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        worker w = worker_of(upcoming);
        multiply_share(m, &of, &w);
    }
}
