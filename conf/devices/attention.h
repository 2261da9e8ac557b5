/* Attention of rows to cached keys and values. */

#include <string.h>

#define PADDED 32   /* what the number of a query's weights is padded to a multiple of */
#define TOGETHER 24 /* queries of a key head that attend to the same columns */

/* The sums of SCORED queries, and of VALUES vectors for each of WEIGHED queries, stay in registers. */
#define SCORED 12
#define VALUES 4
#ifdef __AVX512F__
#define WEIGHED 6
typedef __m512 lanes;
#define UNPACK(half, bits) _mm512_unpack##half##_p##bits
#define AS_PAIRS _mm512_castps_pd
#define AS_NUMBERS _mm512_castpd_ps
#else
#define WEIGHED 3
typedef __m256 lanes;
#define UNPACK(half, bits) _mm256_unpack##half##_p##bits
#define AS_PAIRS _mm256_castps_pd
#define AS_NUMBERS _mm256_castpd_ps
#endif

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

/* Four pairs of each of the keys k, k + 4, k + 8, .. */
INLINED lanes load_fours(const float *const *key, long i)
{
#ifdef __AVX512F__
    __m512 fours = _mm512_castps128_ps512(_mm_loadu_ps(key[0] + i));
    fours = _mm512_insertf32x4(fours, _mm_loadu_ps(key[4] + i), 1);
    fours = _mm512_insertf32x4(fours, _mm_loadu_ps(key[8] + i), 2);
    return _mm512_insertf32x4(fours, _mm_loadu_ps(key[12] + i), 3);
#else
    __m256 fours = _mm256_castps128_ps256(_mm_loadu_ps(key[0] + i));
    return _mm256_insertf128_ps(fours, _mm_loadu_ps(key[4] + i), 1);
#endif
}

/* Write m keys, at most NUMBERS, to `transposed` (width / 2, NUMBERS) pairs, and the last of them again in the lanes
   that are left. The width is a multiple of 8. */
static void transpose(const uint16_t *keys, long m, long width, float *transposed)
{
    const float *key[NUMBERS]; /* a pair of bfloat16 has the size of a float */
    for (long j = 0; j < NUMBERS; j++)
        key[j] = (const float *)(keys + (j < m ? j : m - 1) * width);
    for (long i = 0; i < width / 2; i += 4, transposed += 4 * NUMBERS) {
        lanes k[4];
        for (int j = 0; j < 4; j++)
            k[j] = load_fours(key + j, i);
        for (int high = 0; high < 2; high++) {
            lanes a = high ? UNPACK(hi, s)(k[0], k[1]) : UNPACK(lo, s)(k[0], k[1]);
            lanes b = high ? UNPACK(hi, s)(k[2], k[3]) : UNPACK(lo, s)(k[2], k[3]);
            numbers *out = (numbers *)(transposed + 2 * high * NUMBERS);
            out[0] = (numbers)AS_NUMBERS(UNPACK(lo, d)(AS_PAIRS(a), AS_PAIRS(b)));
            out[1] = (numbers)AS_NUMBERS(UNPACK(hi, d)(AS_PAIRS(a), AS_PAIRS(b)));
        }
    }
}

/* The scores of `count` queries with NUMBERS keys. */
INLINED void score_keys(const int count, float *scores, long step, const factor *queries, const float *transposed,
                        long width)
{
    numbers sums[SCORED] = {0};
    for (long i = 0; i < width; i += 2, transposed += NUMBERS)
        for (int g = 0; g < count; g++)
            sums[g] = add_pair(sums[g], queries + g * width + i, *(const pairs *)transposed);
    for (int g = 0; g < count; g++)
        *(numbers *)(scores + g * step) = sums[g];
}

/* The scores of n queries with m keys, and numbers that are not used up to a multiple of NUMBERS. `transposed` has
   space for NUMBERS keys. */
static void score(long n, float *scores, long step, const factor *queries, const uint16_t *keys, long m, long width,
                  float *transposed, worker *w)
{
    for (long c = 0; c < m; c += NUMBERS) {
        transpose(keys + c * width, m - c < NUMBERS ? m - c : NUMBERS, width, transposed);
        for (long q = 0; q < n; q += SCORED) {
            long count = n - q < SCORED ? n - q : SCORED;
#define CASE(count)                                                                                                   \
    case count: score_keys(count, scores + q * step + c, step, queries + q * width, transposed, width); break;
            switch (count) { /* a known number */
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
            }
#undef CASE
            fetch(w, 2 * count);
        }
    }
}

/* Replace m scores by e^(score - largest score), with zeros up to a multiple of PADDED; return their sum. */
static float exponentials(float *restrict scores, long m)
{
    long end = (m + PADDED - 1) / PADDED * PADDED;
    float tops[PADDED], sums[PADDED] = {0};
    for (long c = m; c < end; c++)
        scores[c] = -INFINITY;
    for (int j = 0; j < PADDED; j++)
        tops[j] = scores[j];
    for (long c = PADDED; c < end; c += PADDED)
        for (int j = 0; j < PADDED; j++)
            tops[j] = scores[c + j] > tops[j] ? scores[c + j] : tops[j];
    for (int half = PADDED / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            tops[j] = tops[j + half] > tops[j] ? tops[j + half] : tops[j];
    for (long c = 0; c < end; c += PADDED)
        for (int j = 0; j < PADDED; j++) {
            scores[c + j] = exponential(scores[c + j] - tops[0]);
            sums[j] += scores[c + j];
        }
    for (long c = m; c < end; c++)
        scores[c] = 0;
    for (int half = PADDED / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            sums[j] += sums[j + half];
    return sums[0];
}

/* The columns that a row attends to: all from `first` to `end`, then `count` more. */
typedef struct {
    long first, end, count, *columns;
} attended;

/* Return a row's column number c. */
INLINED long column_of(const attended *row, long c)
{
    long in_line = row->end - row->first;
    return c < in_line ? row->first + c : row->columns[c - in_line];
}

/* Add `vectors` vectors of the values of a row's columns, from its column number `begin` to number end - 1, by the
   weights of `count` queries. `begin` is even, and a weight after an odd number of columns is 0. */
INLINED void weigh_vectors(const int count, const int vectors, float *out, const factor *weights, long step,
                           const uint16_t *values, const attended *row, long begin, long end, long width, worker *w)
{
    numbers sums[WEIGHED][VALUES];
    for (int g = 0; g < count; g++)
        for (int j = 0; j < vectors; j++)
            sums[g][j] = ((const numbers *)(out + g * width))[j];
    for (long c = begin; c < end; c += 2) {
        const shorts *value = (const shorts *)(values + column_of(row, c) * width);
        const shorts *next = c + 1 < end ? (const shorts *)(values + column_of(row, c + 1) * width) : value;
        for (int j = 0; j < vectors; j++) {
            pairs both = paired(value[j], next[j]);
            for (int g = 0; g < count; g++)
                sums[g][j] = add_pair(sums[g][j], weights + g * step + c, both);
        }
        if (c % 8 == 0)
            fetch(w, count);
    }
    for (int g = 0; g < count; g++)
        for (int j = 0; j < vectors; j++)
            ((numbers *)(out + g * width))[j] = sums[g][j];
}

/* `weigh_vectors` of whole values and n queries. */
static void weigh(long n, float *out, const factor *weights, long step, const uint16_t *values, const attended *row,
                  long begin, long end, long width, worker *w)
{
    for (long i = 0; i + NUMBERS <= width;) {
        const int vectors = i + VALUES * NUMBERS <= width ? VALUES : 1;
        for (long q = 0; q < n; q += WEIGHED)
#define CASE(count)                                                                                                   \
    case count:                                                                                                       \
        if (vectors == VALUES)                                                                                        \
            weigh_vectors(count, VALUES, out + q * width + i, weights + q * step, step, values + i, row, begin, end,  \
                          width, w);                                                                                  \
        else                                                                                                          \
            weigh_vectors(count, 1, out + q * width + i, weights + q * step, step, values + i, row, begin, end,       \
                          width, w);                                                                                  \
        break;
            switch (n - q < WEIGHED ? n - q : WEIGHED) { /* a known number */
                CASE(1) CASE(2) CASE(3)
#if WEIGHED > 3
                CASE(4) CASE(5) CASE(6)
#endif
            }
#undef CASE
        i += vectors * NUMBERS;
    }
    for (long i = width / NUMBERS * NUMBERS; i < width; i++) /* the last 8 of a width between multiples of 16 */
        for (long q = 0; q < n; q++)
            for (long c = begin; c < end; c++)
                out[q * width + i] += value_of_factor(weights[q * step + c]) *
                                      number_of(values[column_of(row, c) * width + i]);
}

/* The columns of several rows: all are between `first` and `last`; all rows attend to those from `first` to
   `shared`. */
typedef struct {
    long first, shared, last;
} columns_of_all;

static columns_of_all columns_of(long rows, const attended *row)
{
    columns_of_all all = {row[0].first, row[0].end, 0};
    for (long r = 0; r < rows; r++) {
        const attended *a = row + r;
        long end = a->count ? a->columns[a->count - 1] + 1 : a->end;
        all.last = end > all.last ? end : all.last;
        all.shared = a->first != row[0].first ? 0 : a->end < all.shared ? a->end : all.shared;
        all.first = a->first < all.first ? a->first : all.first;
    }
    all.shared = all.shared > all.first ? all.shared : all.first;
    return all;
}

/* Replace a query's scores with the keys from column `first` on by e^(score - largest score), for the columns that its
   row attends to, side by side. Return the sum. */
static float weights_of(const attended *a, float *scores, long first)
{
    const float *own = scores + a->first - first;
    long m = a->end - a->first;
    if (own != scores)
        memmove(scores, own, m * sizeof(float));
    for (long c = 0; c < a->count; c++)
        scores[m + c] = scores[a->columns[c] - first];
    return exponentials(scores, m + a->count);
}

static void divide(long n, float *row, float divisor)
{
    for (long i = 0; i < n; i++)
        row[i] /= divisor;
}

/* Space for `step` numbers for each query; and for the queries and NUMBERS keys or, by tiles, BLOCKS of values. */
typedef struct {
    float *weights;
    long step;
    float *rest;
} scratch;

/* Replace the queries of `rows` rows, `groups` of each row, by their attention. */
static void attend_by_vectors(long rows, long groups, float *queries, const uint16_t *keys, const uint16_t *values,
                              const attended *row, long width, const scratch *space, worker *w)
{
    long n = rows * groups, step = space->step;
    float *weights = space->weights, *transposed = space->rest;
    factor *of_queries = (factor *)(transposed + NUMBERS * width / 2);
    columns_of_all all = columns_of(rows, row);
    to_factors(queries, n * width, of_queries);
    score(n, weights, step, of_queries, keys + all.first * width, all.last - all.first, width, transposed, w);
    float totals[n];
    for (long q = 0; q < n; q++) {
        const attended *a = row + q / groups;
        float *own = weights + q * step;
        long count = a->end - a->first + a->count;
        totals[q] = weights_of(a, own, all.first);
        to_factors(own, (count + 1) / 2 * 2, (factor *)own);
        fetch(w, count / 16);
    }
    memset(queries, 0, n * width * sizeof(float));
    long shared = (all.shared - all.first) / 2 * 2; /* whole pairs of columns */
    const factor *factors = (const factor *)weights;
    step *= sizeof(float) / sizeof(factor);
    weigh(n, queries, factors, step, values, row, 0, shared, width, w);
    for (long r = 0; r < rows; r++) {
        long first = r * groups, count = row[r].end - row[r].first + row[r].count;
        weigh(groups, queries + first * width, factors + first * step, step, values, row + r, shared, count, width, w);
    }
    for (long q = 0; q < n; q++)
        divide(width, queries + q * width, totals[q]);
}
