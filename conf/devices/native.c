/* Products in int8, and a decoder of Llama's kind in int8 (infer/engine/native.py), on x86 CPUs with AVX2.

   A row's result depends on the row and on the keys and values that it attends to, in the
   order of their columns. It does not depend on the columns themselves or on other rows. So
   rows of drafts are those of plain decoding, bit for bit. Every sum has one order, with parts that
   fit into vector registers.

   Rows are contiguous. The input x of a product is rounded with a scale for each row: unsigned
   8 bits, 128 added; `largest` (n) has the rows' largest absolute values. The product y is divided
   by them, and the function that reads y multiplies by them. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST 127.0f
#define INLINED static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(32), aligned(4)));

/* Eight numbers in a register: without this, compilers read them again for each use. */
INLINED vector load(const float *x)
{
    vector v = *(const vector *)x;
    __asm__("" : "+x"(v));
    return v;
}

/* ---- Products ---- */

/* `TILE` rows of a product at once: their sums fill the registers. */
#if defined(__AVX512VNNI__)
#define TILE 6
typedef __m512i integers;
#define broadcast _mm512_set1_epi32
#define add_products _mm512_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define TILE 6
typedef __m256i integers;
#define broadcast _mm256_set1_epi32
#define add_products _mm256_dpbusd_avx_epi32
#else
#define TILE 5
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

/* Add to each sum eight products, of four columns and of the next four. */
INLINED integers add_eight(integers sums, const integers x[2], integers w, integers next)
{
#ifdef SIXTEEN_BITS
    return add_pairs(sums, _mm256_add_epi16(multiply_pairs(x[0], w), multiply_pairs(x[1], next)));
#else
    return add_products(add_products(sums, x[0], w), x[1], next);
#endif
}

/* Add the products of four columns, or of eight (`fours` 2), of `count` rows of x and of 16 rows of a weight. */
INLINED void multiply_columns(const int fours, const int count, integers sums[TILE][VECTORS], long d, const uint8_t *x,
                              const int8_t *weight)
{
    const unaligned_integers *w = (const unaligned_integers *)weight;
    for (int r = 0; r < count; r++) {
        integers four[2];
        for (int f = 0; f < fours; f++)
            four[f] = broadcast(*(const int32_t *)(x + r * d + 4 * f));
        for (int j = 0; j < VECTORS; j++)
            sums[r][j] = fours == 2 ? add_eight(sums[r][j], four, w[j], w[VECTORS + j])
                                    : add_four(sums[r][j], four[0], w[j]);
    }
}

/* `count` rows of a product by 16 rows of a weight (see `multiply`). Every eight columns it fetches `step` bytes
   at `next`. */
INLINED void multiply_block(const int count, long d, const uint8_t *x, const int8_t *weight, const int8_t *next,
                            long step, const float *scale, const int32_t *offsets, float *y, long stride)
{
    integers sums[TILE][VECTORS] = {0};
    long i = 0;
    for (; i + 8 <= d; i += 8, weight += 128, next += step) {
        __builtin_prefetch(next);
        if (step > 64)
            __builtin_prefetch(next + 64);
        multiply_columns(2, count, sums, d, x + i, weight);
    }
    if (i < d)
        multiply_columns(1, count, sums, d, x + i, weight);
    for (int r = 0; r < count; r++, y += stride)
        for (int j = 0; j < VECTORS; j++) {
            sum_vector total = (sum_vector)sums[r][j] - ((const sum_vector *)offsets)[j];
            scale_vector scales = ((const scale_vector *)scale)[j];
            ((scale_vector *)y)[j] = __builtin_convertvector(total, scale_vector) * scales;
        }
}

/* y (n, outputs) = scale * (weight x - offsets), for x (n, d) in unsigned and the weight in signed 8 bits.
   d is a multiple of 4, `outputs` of 16. The weight is in blocks of 16 rows; a block has 4 columns of each
   row, then the next 4. */
void multiply(long n, long d, long outputs, const uint8_t *x, const int8_t *weight, const float *scale,
              const int32_t *offsets, float *y, int threads)
{
    long tiles = (n + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long b = 0; b < outputs; b += 16)
        for (long t = 0; t < tiles; t++) {
            long r = n * t / tiles, count = n * (t + 1) / tiles - r;
            const uint8_t *rows = x + r * d;
            const int8_t *block = weight + b * d;
            /* Each tile fetches a part of the next block, so that memory is read all the time. */
            const int8_t *next = block + 16 * d + 16 * d * t / tiles;
            long step = 128 / tiles;
            float *out = y + r * outputs + b;
            switch (count) { /* a known number of rows stays in registers */
            case 1: multiply_block(1, d, rows, block, next, step, scale + b, offsets + b, out, outputs); break;
            case 2: multiply_block(2, d, rows, block, next, step, scale + b, offsets + b, out, outputs); break;
            case 3: multiply_block(3, d, rows, block, next, step, scale + b, offsets + b, out, outputs); break;
            case 4: multiply_block(4, d, rows, block, next, step, scale + b, offsets + b, out, outputs); break;
#if TILE > 5
            case 5: multiply_block(5, d, rows, block, next, step, scale + b, offsets + b, out, outputs); break;
#endif
            default: multiply_block(TILE, d, rows, block, next, step, scale + b, offsets + b, out, outputs);
            }
        }
}

/* ---- Rows between two products ---- */

INLINED __m128 halves(vector v)
{
    return _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
}

/* The scalar product of two rows whose length is a multiple of eight. */
INLINED float dot(const float *a, const float *b, long n)
{
    vector products = {0};
    for (long i = 0; i < n; i += 8)
        products += *(const vector *)(a + i) * *(const vector *)(b + i);
    __m128 sums = halves(products);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* e^x to the last bit or two: 2^whole times a polynomial (Cephes' expf). */
INLINED float exponential(float x)
{
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float whole = rintf(x * 1.44269504f);
    float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = ((int32_t)whole + 127) << 23;
    return p * *(float *)&power;
}

/* Return the largest absolute value of d numbers: not a finite number if one of them is not. */
static float largest_of(const float *row, long d)
{
    /* Absolute values are ordered as the integers of the same bits, infinity and NaN last. */
    int32_t most = 0;
    for (long i = 0; i < d; i++) {
        int32_t size = ((const int32_t *)row)[i] & INT32_MAX;
        most = size > most ? size : most;
    }
    return *(float *)&most;
}

/* Write d numbers as row r of a product's input, and their largest absolute value. */
static void round_row(const float *restrict row, long r, long d, uint8_t *restrict x, float *largest)
{
    float top = largest_of(row, d);
    float factor = top > 0 && top < INFINITY ? MOST / top : 0;
    largest[r] = top;
    for (long i = 0; i < d; i++)
        x[r * d + i] = (uint8_t)(int32_t)(row[i] * factor + (MOST + 1.5f));
}

/* h += y, unless y is null; then norm(h) = weight * h / sqrt(|h|^2 + epsilon). The norm is written
   to `normed`, or if that is null as a product's input. */
void add_norm(long n, long d, float *h, const float *y, long stride, const float *restrict bias, const float *weight,
              float epsilon, float *normed, uint8_t *x, float *largest)
{
    float *restrict row = malloc(d * sizeof(float));
    for (long r = 0; r < n; r++, h += d) {
        if (y)
            for (long i = 0; i < d; i++)
                h[i] += y[r * stride + i] * largest[r] + bias[i];
        float factor = 1 / sqrtf(dot(h, h, d) + epsilon);
        float *out = normed ? normed + r * d : row;
        for (long i = 0; i < d; i++)
            out[i] = h[i] * factor * weight[i];
        if (!normed)
            round_row(row, r, d, x, largest);
    }
    free(row);
}

/* silu(g) * u of y = [g | u | ...], two times d numbers, as a product's input. */
void activate(long n, long d, const float *y, long stride, const float *restrict bias, uint8_t *x, float *largest)
{
    float *restrict row = malloc(d * sizeof(float));
    for (long r = 0; r < n; r++) {
        const float *restrict g = y + r * stride, *restrict u = g + d;
        float t = largest[r];
        for (long i = 0; i < d; i++) {
            float gate = g[i] * t + bias[i];
            float up = u[i] * t + bias[d + i];
            row[i] = gate / (1 + exponential(-gate)) * up;
        }
        round_row(row, r, d, x, largest);
    }
    free(row);
}

/* ---- Attention ---- */

#define QUERIES 3 /* of a key head, at once */
#define KEYS 4    /* at once */

static void rotate(float *restrict out, const float *restrict x, const float *restrict bias, float t, long width,
                   const float *restrict cosine, const float *restrict sine, float factor)
{
    long half = width / 2;
    for (long i = 0; i < half; i++) {
        float first = x[i] * t + bias[i], second = x[i + half] * t + bias[i + half];
        out[i] = (first * cosine[i] - second * sine[i]) * factor;
        out[i + half] = (second * cosine[i + half] + first * sine[i + half]) * factor;
    }
}

/* The sums of four vectors, in the order of `dot`. */
INLINED __m128 sums_of(const vector *v)
{
    __m128 a = halves(v[0]), b = halves(v[1]), c = halves(v[2]), d = halves(v[3]);
    __m128 first = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    __m128 second = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_add_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first));
}

/* The scores of `count` queries with the keys at m places, and at the next places up to a multiple of KEYS. */
INLINED void score(const int count, float *scores, long step, const float *queries, const float *keys,
                   const long *places, long m, long width)
{
    for (long c = 0; c < m; c += KEYS) {
        vector sums[QUERIES][KEYS] = {0};
        for (long i = 0; i < width; i += 8) {
            vector q[QUERIES];
            for (int g = 0; g < count; g++)
                q[g] = load(queries + g * width + i);
            for (int k = 0; k < KEYS; k++) {
                vector key = load(keys + places[c + k] + i);
                for (int g = 0; g < count; g++)
                    sums[g][k] += q[g] * key;
            }
        }
        for (int g = 0; g < count; g++)
            _mm_storeu_ps(scores + g * step + c, sums_of(sums[g]));
    }
}

/* Replace m scores by e^(score - largest score), with zeros up to a multiple of eight; return their sum. */
static float exponentials(float *restrict scores, long m)
{
    long end = (m + 7) / 8 * 8;
    float tops[8];
    for (long c = m; c < end; c++)
        scores[c] = -INFINITY;
    for (int j = 0; j < 8; j++)
        tops[j] = scores[j];
    for (long c = 8; c < end; c += 8)
        for (int j = 0; j < 8; j++)
            tops[j] = scores[c + j] > tops[j] ? scores[c + j] : tops[j];
    float top = tops[0];
    for (int j = 1; j < 8; j++)
        top = tops[j] > top ? tops[j] : top;
    for (long c = 0; c < end; c++)
        scores[c] = exponential(scores[c] - top);
    for (long c = m; c < end; c++)
        scores[c] = 0;
    vector parts = {0};
    for (long c = 0; c < end; c += 8)
        parts += *(vector *)(scores + c);
    __m128 sums = halves(parts);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* The sums of the values at m places by the weights of `count` queries, eight numbers in each of `vectors`. */
INLINED void weigh(const int count, const int vectors, float *out, long width, const float *weights, long step,
                   const float *values, const long *places, long m)
{
    vector sums[QUERIES][8] = {0};
    for (long c = 0; c < m; c++)
        for (int j = 0; j < vectors; j++) {
            vector value = load(values + places[c] + 8 * j);
            for (int g = 0; g < count; g++)
                sums[g][j] += weights[g * step + c] * value;
        }
    for (int g = 0; g < count; g++)
        for (int j = 0; j < vectors; j++)
            *(vector *)(out + g * width + 8 * j) = sums[g][j];
}

/* Replace `count` queries by their attention to the keys and values at m places. `weights` has space for
   `step` numbers for each query. */
INLINED void attend_queries(const int count, float *queries, const float *keys, const float *values,
                            const long *places, long m, long width, float *weights, long step)
{
    float totals[QUERIES];
    score(count, weights, step, queries, keys, places, m, width);
    for (int g = 0; g < count; g++)
        totals[g] = exponentials(weights + g * step, m);
    const int vectors = count == 1 ? 8 : count == 2 ? 4 : 2; /* their sums stay in registers */
    long i = 0;
    for (; i + 8 * vectors <= width; i += 8 * vectors)
        weigh(count, vectors, queries + i, width, weights, step, values + i, places, m);
    for (; i < width; i += 8)
        weigh(count, 1, queries + i, width, weights, step, values + i, places, m);
    for (int g = 0; g < count; g++)
        for (i = 0; i < width; i++)
            queries[g * width + i] /= totals[g];
}

/* `attend_queries` for all queries of a key head. */
INLINED void attend_head(long groups, float *queries, const float *keys, const float *values, const long *places,
                         long m, long width, float *weights, long step)
{
    for (; groups > 0; groups -= QUERIES, queries += QUERIES * width)
        switch (groups) {
        case 1: attend_queries(1, queries, keys, values, places, m, width, weights, step); break;
        case 2: attend_queries(2, queries, keys, values, places, m, width, weights, step); break;
        default: attend_queries(QUERIES, queries, keys, values, places, m, width, weights, step);
        }
}

/* ---- The decoder: the structures of infer/engine/native.py ---- */

#define PARTS 3    /* the largest number of layers in a product */
#define OUTPUTS 32 /* of a block of B */
#define PROBES 3   /* rows that are adapted at once: their sums stay in registers */

/* Layers that read the same input, and their adapters: y = [W1 x | W2 x | .. | A1 x | A2 x | ..]. */
typedef struct {
    long d, outputs, parts; /* d and `outputs` as `multiply` needs them */
    const int8_t *weight;
    const float *scale;
    const int32_t *offsets;
    const float *bias; /* zeros without a bias */
    long sizes[PARTS], ranks[PARTS];
    const int8_t *b[PARTS]; /* blocks of OUTPUTS rows of B, each transposed; the last one may have fewer rows */
    const float *b_scale[PARTS]; /* of each row of B */
} product;

typedef struct {
    product qkv, o, gate_up, down;
    const float *attention_norm, *mlp_norm;
    float scaling;
} layer;

typedef struct {
    long layers, d, heads, key_heads, width;
    const layer *layer;
    const float *norm;
    float epsilon;
} decoder;

/* The keys and values of a layer. Columns are `width` numbers apart. A row attends to the columns
   of its row of `mask` (n, end); without a mask to the columns up to its own. */
typedef struct {
    float *keys, *values;
    long sequence_step, head_step;
    const uint8_t *mask;
} cached;

/* n = batch * rows rows: `columns` (n) of the cache, cosines and sines (n, width) of their positions, and
   space for intermediate results. The rows from `first` on of each sequence are probes. */
typedef struct {
    long n, rows, first, end;
    const int64_t *columns;
    const float *cosine, *sine;
    float *h, *y, *queries, *largest;
    uint8_t *x;
    long divided; /* threads share operations of more multiplications */
    int threads;
} forward;

static int threads_for(const forward *f, long multiplications)
{
    return multiplications < f->divided ? 1 : f->threads;
}

/* y += scale * (B inner) for 8 * `vectors` outputs of `count` rows. A column of B has `width` outputs. */
INLINED void adapt_rows(const int count, const int vectors, float *const *y, const int8_t *b, const float *scale,
                        const float *const *inner, long width, long rank)
{
    vector sums[PROBES][OUTPUTS / 8] = {0};
    for (long i = 0; i < rank; i++)
        for (int j = 0; j < vectors; j++) {
            __m128i column = _mm_loadl_epi64((const __m128i *)(b + i * width + 8 * j));
            vector numbers = (vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(column));
            for (int r = 0; r < count; r++)
                sums[r][j] += inner[r][i] * numbers;
        }
    for (int r = 0; r < count; r++)
        for (int j = 0; j < vectors; j++)
            *(vector *)(y[r] + 8 * j) += sums[r][j] * *(const vector *)(scale + 8 * j);
}

/* `adapt_rows` for a block of B with `width` outputs. */
INLINED void adapt_block(const int count, float *const *y, const int8_t *b, const float *scale,
                         const float *const *inner, long width, long rank)
{
    if (width == OUTPUTS) {
        adapt_rows(count, OUTPUTS / 8, y, b, scale, inner, OUTPUTS, rank);
        return;
    }
    float *rest[PROBES];
    for (long j = 0; j < width; j += 8) {
        for (int r = 0; r < count; r++)
            rest[r] = y[r] + j;
        adapt_rows(count, 1, rest, b + j, scale + j, inner, width, rank);
    }
}

/* Add B times the product with A to the probes' outputs of one layer. */
static void adapt(const forward *f, const int8_t *b, const float *scale, long size, long rank, float *y,
                  const float *inner, long stride)
{
    long of_sequence = f->rows - f->first, probes = f->n / f->rows * of_sequence;
    int threads = threads_for(f, probes * size * rank);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long o = 0; o < size; o += OUTPUTS)
        for (long p = 0; p < probes; p += PROBES) {
            long count = probes - p < PROBES ? probes - p : PROBES;
            long width = size - o < OUTPUTS ? size - o : OUTPUTS;
            float *out[PROBES];
            const float *in[PROBES];
            for (long i = 0; i < count; i++) {
                long r = (p + i) / of_sequence * f->rows + f->first + (p + i) % of_sequence;
                out[i] = y + r * stride + o;
                in[i] = inner + r * stride;
            }
            switch (count) {
            case 1: adapt_block(1, out, b + o * rank, scale + o, in, width, rank); break;
            case 2: adapt_block(2, out, b + o * rank, scale + o, in, width, rank); break;
            default: adapt_block(PROBES, out, b + o * rank, scale + o, in, width, rank);
            }
        }
}

/* Write the product of x to y. */
static void project(const forward *f, const product *p)
{
    int threads = threads_for(f, f->n * p->d * p->outputs);
    multiply(f->n, p->d, p->outputs, f->x, p->weight, p->scale, p->offsets, f->y, threads);
    if (f->first >= f->rows)
        return;
    float *y = f->y;
    const float *inner = y;
    for (long i = 0; i < p->parts; i++)
        inner += p->sizes[i];
    for (long i = 0; i < p->parts; y += p->sizes[i], inner += p->ranks[i], i++)
        if (p->ranks[i])
            adapt(f, p->b[i], p->b_scale[i], p->sizes[i], p->ranks[i], y, inner, p->outputs);
}

/* Rotate the queries (times `factor`) and keys of y = [q | k | v | ...]; write keys and values to the cache. */
static void store(const decoder *m, const forward *f, const product *p, const cached *cache, float factor)
{
    long width = m->width;
    for (long r = 0; r < f->n; r++) {
        const float *x = f->y + r * p->outputs, *b = p->bias;
        const float *cosine = f->cosine + r * width, *sine = f->sine + r * width;
        float t = f->largest[r];
        for (long h = 0; h < m->heads; h++, x += width, b += width)
            rotate(f->queries + (r * m->heads + h) * width, x, b, t, width, cosine, sine, factor);
        long place = (r / f->rows) * cache->sequence_step + f->columns[r] * width;
        for (long h = 0; h < m->key_heads; h++, x += width, b += width)
            rotate(cache->keys + place + h * cache->head_step, x, b, t, width, cosine, sine, 1);
        for (long h = 0; h < m->key_heads; h++, x += width, b += width)
            for (long i = 0; i < width; i++)
                cache->values[place + h * cache->head_step + i] = x[i] * t + b[i];
    }
}

/* Write where the attended columns of row r are in a head, and KEYS more places that are scored but not
   used. Return the number of attended columns. */
static long places_of(const forward *f, const cached *cache, long r, long width, long *places)
{
    const uint64_t all = 0x0101010101010101;
    const uint8_t *mask = cache->mask ? cache->mask + r * f->end : NULL;
    long count = 0, columns = mask ? f->end : f->columns[r] + 1;
    if (mask)
        while (count + 8 <= columns && *(const uint64_t *)(mask + count) == all)
            count += 8;
    else
        count = columns;
    for (long c = 0; c < count; c++)
        places[c] = c * width;
    for (long c = count; c < columns; c++) {
        places[count] = c * width;
        count += mask[c];
    }
    for (int k = 0; k < KEYS; k++)
        places[count + k] = 0;
    return count;
}

/* Write the attention of the queries as a product's input. */
static void attend(const decoder *m, const forward *f, const cached *cache)
{
    long n = f->n, end = f->end, width = m->width, d = m->heads * width;
    long groups = m->heads / m->key_heads, step = (end + 7) / 8 * 8;
    int threads = threads_for(f, 2 * n * d * end);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long *places = malloc((end + KEYS) * sizeof(long));
        float *weights = malloc(QUERIES * step * sizeof(float));
#pragma omp for schedule(dynamic)
        for (long part = 0; part < n * m->key_heads; part++) {
            /* All rows of a head, then the next head: its keys and values stay in the CPU's cache. */
            long r = part % n, h = part / n;
            long count = places_of(f, cache, r, width, places);
            long base = (r / f->rows) * cache->sequence_step + h * cache->head_step;
            float *queries = f->queries + r * d + h * groups * width;
            const float *keys = cache->keys + base, *values = cache->values + base;
            if (width == 64) /* compilers make faster code for a known width */
                attend_head(groups, queries, keys, values, places, count, 64, weights, step);
            else if (width == 128)
                attend_head(groups, queries, keys, values, places, count, 128, weights, step);
            else
                attend_head(groups, queries, keys, values, places, count, width, weights, step);
        }
        free(places);
        free(weights);
    }
    for (long r = 0; r < n; r++)
        round_row(f->queries + r * d, r, d, f->x, f->largest);
}

/* Write the normed hidden states of embedded rows h to `result` (n, d), their keys and values to the cache. */
void decode(const decoder *m, const forward *f, const cached *cache, float *result)
{
    const product *before = NULL; /* whose output is added to h */
    for (long i = 0; i <= m->layers; i++) {
        const layer *l = m->layer + i;
        int last = i == m->layers;
        add_norm(f->n, m->d, f->h, before ? f->y : NULL, before ? before->outputs : 0, before ? before->bias : NULL,
                 last ? m->norm : l->attention_norm, m->epsilon, last ? result : NULL, f->x, f->largest);
        if (last)
            break;
        project(f, &l->qkv);
        store(m, f, &l->qkv, cache + i, l->scaling);
        attend(m, f, cache + i);
        project(f, &l->o);
        add_norm(f->n, m->d, f->h, f->y, l->o.outputs, l->o.bias, l->mlp_norm, m->epsilon, NULL, f->x, f->largest);
        project(f, &l->gate_up);
        activate(f->n, l->down.d, f->y, l->gate_up.outputs, l->gate_up.bias, f->x, f->largest);
        project(f, &l->down);
        before = &l->down;
    }
}

/* ---- The likeliest tokens: infer/engine/int8.py ---- */

/* Move the last of `count` values to its place in decreasing order, after equal values; and its id. */
static void insert(float *values, long *ids, long count)
{
    long i = count - 1, id = ids[i];
    float value = values[i];
    for (; i > 0 && value > values[i - 1]; i--) {
        values[i] = values[i - 1];
        ids[i] = ids[i - 1];
    }
    values[i] = value;
    ids[i] = id;
}

/* The scalar product of rows of d numbers in float64. */
static double wide_dot(const float *a, const float *b, long d)
{
    double sums[8] = {0};
    for (long i = 0; i < d; i += 8)
        for (int j = 0; j < 8; j++)
            sums[j] += (double)a[i + j] * b[i + j];
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* Write the m largest logits of each of n rows (n, V) in decreasing order, and their ids, to (n, m). The logits
   of the first `exact` ones are then computed again from the hidden states (n, d) and the output head's
   weight (V, d) and bias (V) or null. */
void top(long n, long V, const float *logits, long m, long exact, long d, const float *hidden, const float *weight,
         const float *bias, float *values, long *ids)
{
    for (long r = 0; r < n; r++, logits += V, hidden += d, values += m, ids += m) {
        for (long v = 0; v < V; v += 64) {
            long end = v + 64 < V ? v + 64 : V;
            if (v >= m) { /* most blocks have no number that is large enough */
                int larger = 0;
                for (long i = v; i < end; i++)
                    larger |= logits[i] > values[m - 1];
                if (!larger)
                    continue;
            }
            for (long i = v; i < end; i++) {
                if (i >= m && !(logits[i] > values[m - 1]))
                    continue;
                long last = i < m ? i : m - 1;
                values[last] = logits[i];
                ids[last] = i;
                insert(values, ids, last + 1);
            }
        }
        for (long i = 0; i < exact; i++)
            values[i] = wide_dot(hidden, weight + ids[i] * d, d) + (bias ? bias[ids[i]] : 0);
        for (long i = 1; i < m; i++)
            insert(values, ids, i + 1);
    }
}

/* ---- Rounding of weights: Groups of conf/devices/int8.py ---- */

/* The columns of the two groups of eight columns. Products of the weights of a group are added in 16 bits. */
static const int GROUPS[2][4] = {{0, 1, 4, 5}, {2, 3, 6, 7}};

/* Copy up to eight of a row's `left` numbers, divided by `step`, and zeros after them. */
INLINED void load_eight(const float *row, long left, float step, float *x)
{
    for (int i = 0; i < 8; i++)
        x[i] = i < left ? row[i] / step : 0;
}

/* Return which of the `count` numbers of levels `tried`, in ascending order, gives a row the smallest squared error. */
static long best_levels(long d, const float *row, float largest, long limit, long count, const long *tried)
{
    float errors[count];
    for (long t = 0; t < count; t++)
        errors[t] = d / 12.0f / (tried[t] * tried[t]);
    for (long i = 0; i < d; i += 8) {
        float x[8];
        load_eight(row + i, d - i, largest, x);
        for (int g = 0; g < 4; g++) {
            float sum = 0, squares = 0;
            for (int j = 0; j < 4; j++) {
                float part = g % 2 ? -x[GROUPS[g / 2][j]] : x[GROUPS[g / 2][j]];
                part = part > 0 ? part : 0;
                sum += part;
                squares += part * part;
            }
            /* Most groups are never changed, not even with the most levels. */
            for (long t = count - 1; t >= 0 && sum * tried[t] > limit; t--) {
                float lost = 1 - limit / (sum * tried[t]); /* of each weight */
                errors[t] += lost * lost * squares;
            }
        }
    }
    long best = 0;
    for (long t = 1; t < count; t++)
        best = errors[t] < errors[best] ? t : best;
    return tried[best];
}

/* Reduce the numbers of a group that have the same sign by one factor if their sum is above `limit`. */
INLINED void limit_groups(int *x, int limit)
{
    for (int g = 0; g < 4; g++) {
        const int *group = GROUPS[g / 2];
        int sign = g % 2 ? -1 : 1, sum = 0;
        for (int j = 0; j < 4; j++)
            sum += sign * x[group[j]] > 0 ? sign * x[group[j]] : 0;
        for (int j = 0; sum > limit && j < 4; j++)
            if (sign * x[group[j]] > 0)
                x[group[j]] = x[group[j]] * limit / sum;
    }
}

/* Round the rows of a weight (n, d), each to its best number of levels, and limit the groups. `scale` (n) is the value
   of a level. */
void round_groups(long n, long d, const float *weight, float tiny, long limit, long count, const long *tried,
                  int8_t *rounded, float *scale, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < n; r++) {
        const float *row = weight + r * d;
        float largest = largest_of(row, d);
        largest = largest < tiny ? tiny : largest; /* stays NaN or infinity, and so does the scale */
        float step = scale[r] = largest / best_levels(d, row, largest, limit, count, tried);
        for (long i = 0; i < d; i += 8) {
            float x[8];
            int y[8];
            load_eight(row + i, d - i, step, x);
            for (int j = 0; j < 8; j++)
                y[j] = isnan(x[j]) ? 0 : (int)rintf(x[j]);
            limit_groups(y, (int)limit);
            for (int j = 0; j < 8 && i + j < d; j++)
                rounded[r * d + i + j] = (int8_t)y[j];
        }
    }
}

/* ---- The previous-token head: infer/engine/native_head.py ---- */

/* A matrix (d, d) with rows after it, so that it has `outputs` rows. */
typedef struct {
    const int8_t *weight;
    const float *scale;
    const int32_t *offsets;
} matrix;

typedef struct {
    long d, outputs;
    matrix of_hidden, of_token, w2; /* W1 = [of_hidden | of_token] */
    const float *norm;
    float epsilon;
    const float *output, *bias; /* the model's output head (V, d) and (V) or null */
} head;

/* Write the product of n rows x and a matrix to y (n, outputs). */
static void apply(const head *m, const matrix *w, long n, const uint8_t *x, const float *largest, float *y)
{
    multiply(n, m->d, m->outputs, x, w->weight, w->scale, w->offsets, y, 1);
    for (long r = 0; r < n; r++)
        for (long i = 0; i < m->outputs; i++)
            y[r * m->outputs + i] *= largest[r];
}

/* Write a part of W1's product with the norm of n rows to `inner` (n, outputs). */
static void apply_to_norm(const head *m, const matrix *w, long n, const float *rows, float *inner)
{
    uint8_t *x = malloc(n * m->d);
    float *largest = malloc(n * sizeof(float));
    add_norm(n, m->d, (float *)rows, NULL, 0, NULL, m->norm, m->epsilon, NULL, x, largest);
    apply(m, w, n, x, largest, inner);
    free(x);
    free(largest);
}

/* Write the part of W1's product that depends on k hidden states to `inner` (k, outputs). */
void read_hidden(const head *m, long k, const float *hidden, float *inner)
{
    apply_to_norm(m, &m->of_hidden, k, hidden, inner);
}

/* Write the corrected logits of `count` ids at a place with this hidden state and its `inner`, after a token
   with this embedding. */
void correct(const head *m, const float *hidden, const float *inner, const float *token, long count, const long *ids,
             float *logits)
{
    long d = m->d;
    float *y = malloc(m->outputs * sizeof(float)), *row = malloc(d * sizeof(float)), largest;
    uint8_t *x = malloc(d);
    apply_to_norm(m, &m->of_token, 1, token, y);
    for (long i = 0; i < d; i++) {
        float sum = inner[i] + y[i];
        row[i] = sum / (1 + exponential(-sum));
    }
    round_row(row, 0, d, x, &largest);
    apply(m, &m->w2, 1, x, &largest, y);
    for (long i = 0; i < d; i++)
        row[i] = hidden[i] + y[i];
    for (long j = 0; j < count; j++)
        logits[j] = dot(row, m->output + ids[j] * d, d) + (m->bias ? m->bias[ids[j]] : 0);
    free(y);
    free(row);
    free(x);
}
