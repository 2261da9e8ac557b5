/* Products in int8, and the operations between them in a decoder: norms, rotation, attention, activation.

   A row's result depends on the row and on the keys and values that it attends to, in the
   order of their columns. It does not depend on the columns themselves or on other rows. So
   rows of drafts are those of plain decoding, bit for bit. Every sum has one order, with parts that
   fit into vector registers.

   Rows are contiguous. A product y (n, stride) is divided by `largest` (n), as the kernels of
   conf/devices/int8.py return it; its first numbers are the outputs, then A matrices' products.
   The next product's input is written as the kernel takes it: numbers from -127 to 127 in
   float32, or rounded, with 128 added, in unsigned 8 bits (`rounded`).
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST 127.0f
#define BLOCK 64 /* keys of a block */
#define INLINED static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(32), aligned(4)));
typedef float half_vector __attribute__((vector_size(16), aligned(4)));

INLINED float sum(vector v)
{
    half_vector halves = *(half_vector *)&v + *((half_vector *)&v + 1);
    return (halves[0] + halves[2]) + (halves[1] + halves[3]);
}

/* The scalar product of two rows whose length is a multiple of eight. */
INLINED float dot(const float *a, const float *b, long n)
{
    vector products = {0};
    for (long i = 0; i < n; i += 8)
        products += *(const vector *)(a + i) * *(const vector *)(b + i);
    return sum(products);
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

/* Write d numbers as row r of a product's input, and their largest absolute value: not a finite number
   if one of them is not. */
static void scale_row(const float *restrict row, long r, long d, void *restrict scaled, float *largest, int rounded)
{
    /* Absolute values are ordered as the integers of the same bits, infinity and NaN last. */
    int32_t most = 0;
    for (long i = 0; i < d; i++) {
        int32_t size = ((const int32_t *)row)[i] & INT32_MAX;
        most = size > most ? size : most;
    }
    float top = *(float *)&most;
    float factor = top > 0 && top < INFINITY ? MOST / top : 0;
    largest[r] = top;
    if (rounded)
        for (long i = 0; i < d; i++)
            ((uint8_t *)scaled)[r * d + i] = (uint8_t)(int32_t)(row[i] * factor + (MOST + 1.5f));
    else
        for (long i = 0; i < d; i++)
            ((float *)scaled)[r * d + i] = row[i] * factor;
}

#ifdef __AVX2__
#include <immintrin.h>

#define TILE 5 /* rows of a product at once: their sums fill the registers */

/* `count` rows of a product by 16 rows of a weight (see `multiply`). */
INLINED void multiply_block(const int count, long d, const uint8_t *x, const int8_t *weight, const float *scale,
                            const int32_t *offsets, float *y, long stride)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[TILE][2];
    for (int r = 0; r < count; r++)
        sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    for (long i = 0; i < d; i += 4, weight += 64) {
        __m256i w[2] = {_mm256_loadu_si256((const __m256i *)weight), _mm256_loadu_si256((const __m256i *)weight + 1)};
        for (int r = 0; r < count; r++) {
            __m256i four = _mm256_set1_epi32(*(const int32_t *)(x + r * d + i));
            for (int j = 0; j < 2; j++) {
                __m256i pairs = _mm256_maddubs_epi16(four, w[j]); /* products of two columns in 16 bits */
                sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    for (int r = 0; r < count; r++)
        for (int j = 0; j < 2; j++) {
            __m256i total = _mm256_sub_epi32(sums[r][j], _mm256_loadu_si256((const __m256i *)offsets + j));
            __m256 result = _mm256_mul_ps(_mm256_cvtepi32_ps(total), _mm256_loadu_ps(scale + 8 * j));
            _mm256_storeu_ps(y + r * stride + 8 * j, result);
        }
}

/* y (n, outputs) = scale * (weight x - offsets), for x (n, d) in unsigned and the weight in signed 8 bits.
   d is a multiple of 4, `outputs` of 16. The weight is in blocks of 16 rows; a block has 4 columns of each
   row, then the next 4. Two neighbours' products must fit into 16 bits (int8.py). */
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
            float *out = y + r * outputs + b;
            switch (count) { /* a known number of rows stays in registers */
            case 1: multiply_block(1, d, rows, block, scale + b, offsets + b, out, outputs); break;
            case 2: multiply_block(2, d, rows, block, scale + b, offsets + b, out, outputs); break;
            case 3: multiply_block(3, d, rows, block, scale + b, offsets + b, out, outputs); break;
            case 4: multiply_block(4, d, rows, block, scale + b, offsets + b, out, outputs); break;
            default: multiply_block(TILE, d, rows, block, scale + b, offsets + b, out, outputs);
            }
        }
}
#endif

/* h += y, unless y is null; then norm(h) = weight * h / sqrt(|h|^2 + epsilon). The norm is written
   to `normed`, unless that is null, and as the input of a product, unless `scaled` is null. */
void add_norm(long n, long d, float *h, const float *y, long stride, const float *y_largest, const float *restrict bias,
              const float *weight, float epsilon, float *normed, void *scaled, float *largest, int rounded)
{
    float *restrict row = malloc(d * sizeof(float));
    for (long r = 0; r < n; r++) {
        float *x = h + r * d;
        if (y)
            for (long i = 0; i < d; i++)
                x[i] += y[r * stride + i] * y_largest[r] + bias[i];
        float factor = 1 / sqrtf(dot(x, x, d) + epsilon);
        float *out = normed ? normed + r * d : row;
        for (long i = 0; i < d; i++)
            out[i] = x[i] * factor * weight[i];
        if (scaled)
            scale_row(out, r, d, scaled, largest, rounded);
    }
    free(row);
}

/* silu(g) * u for y = [g | u | ...], two times d numbers, as the input of a product. */
void gate(long n, long d, const float *y, long stride, const float *y_largest, const float *restrict bias,
          void *scaled, float *largest, int rounded)
{
    float *restrict row = malloc(d * sizeof(float));
    for (long r = 0; r < n; r++) {
        const float *restrict g = y + r * stride, *restrict u = g + d;
        float t = y_largest[r];
        for (long i = 0; i < d; i++) {
            float gate = g[i] * t + bias[i];
            float up = u[i] * t + bias[d + i];
            row[i] = gate / (1 + exponential(-gate)) * up;
        }
        scale_row(row, r, d, scaled, largest, rounded);
    }
    free(row);
}

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

/* Rotate the rows' queries (times `factor`) and keys; write keys and values to the cache.
   y is [q | k | v | ...]; a row's column of the cache is columns[r]. Key heads are `head_step`
   numbers apart in the cache, sequences `sequence_step`, columns `width`. */
void store(long n, long rows, long heads, long key_heads, long width, const float *y, long stride,
           const float *y_largest, const float *restrict bias, const float *cosine, const float *sine, float factor,
           float *queries, float *keys, float *values, long sequence_step, long head_step, const int64_t *columns)
{
    for (long r = 0; r < n; r++) {
        const float *x = y + r * stride, *b = bias, *cos = cosine + r * width, *sin = sine + r * width;
        float t = y_largest[r];
        for (long h = 0; h < heads; h++, x += width, b += width)
            rotate(queries + (r * heads + h) * width, x, b, t, width, cos, sin, factor);
        long place = (r / rows) * sequence_step + columns[r] * width;
        for (long h = 0; h < key_heads; h++, x += width, b += width)
            rotate(keys + place + h * head_step, x, b, t, width, cos, sin, 1);
        for (long h = 0; h < key_heads; h++, x += width, b += width)
            for (long i = 0; i < width; i++)
                values[place + h * head_step + i] = x[i] * t + b[i];
    }
}

/* Add the weighted values at `places` to `out`, eight numbers in each of `count` vectors. */
INLINED void weigh(const int count, float *out, const float *weights, const float *values, const long *places, long m)
{
    vector sums[8];
    for (int j = 0; j < count; j++)
        sums[j] = *(vector *)(out + 8 * j);
    for (long c = 0; c < m; c++)
        for (int j = 0; j < count; j++)
            sums[j] += weights[c] * *(const vector *)(values + places[c] + 8 * j);
    for (int j = 0; j < count; j++)
        *(vector *)(out + 8 * j) = sums[j];
}

/* The attention of the `groups` queries of a key head to its keys and values at m `places`. Each block
   of keys and values is read once into the fastest cache for all queries. `weights` has space for
   `step` numbers, a multiple of eight and at least m, for each query. */
INLINED void attend_head(long groups, float *out, const float *queries, const float *keys, const float *values,
                         const long *places, long m, long width, float *weights, long step)
{
    for (long first = 0; first < m; first += BLOCK)
        for (long g = 0; g < groups; g++)
            for (long c = first; c < m && c < first + BLOCK; c++)
                weights[g * step + c] = dot(queries + g * width, keys + places[c], width);
    float totals[groups];
    for (long g = 0; g < groups; g++, weights += step) {
        float top = -INFINITY;
        for (long c = 0; c < m; c++)
            top = weights[c] > top ? weights[c] : top;
        for (long c = 0; c < m; c++)
            weights[c] = exponential(weights[c] - top);
        for (long c = m; c % 8; c++)
            weights[c] = 0;
        vector parts = {0};
        for (long c = 0; c < m; c += 8)
            parts += *(vector *)(weights + c);
        totals[g] = sum(parts);
    }
    weights -= groups * step;
    for (long i = 0; i < groups * width; i++)
        out[i] = 0;
    for (long first = 0; first < m; first += BLOCK) {
        long count = m - first < BLOCK ? m - first : BLOCK;
        for (long g = 0; g < groups; g++) {
            const float *shares = weights + g * step + first;
            long i = 0;
            for (; i + 64 <= width; i += 64)
                weigh(8, out + g * width + i, shares, values + i, places + first, count);
            for (; i < width; i += 8)
                weigh(1, out + g * width + i, shares, values + i, places + first, count);
        }
    }
    for (long i = 0; i < groups * width; i++)
        out[i] /= totals[i / width];
}

/* The attention of n rows, as the input of a product. Row r attends to the columns c with mask[r][c] of
   `end` columns; without a mask to the columns up to its own. */
void attend(long n, long rows, long heads, long key_heads, long width, const float *queries, const float *keys,
            const float *values, long sequence_step, long head_step, const uint8_t *mask, const int64_t *columns,
            long end, void *scaled, float *largest, int rounded, int threads)
{
    long groups = heads / key_heads, step = (end + 7) / 8 * 8, d = heads * width;
    float *out = malloc(n * d * sizeof(float));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long *places = malloc(end * sizeof(long));
        float *weights = malloc(groups * step * sizeof(float));
#pragma omp for schedule(dynamic)
        for (long part = 0; part < n * key_heads; part++) {
            /* All rows of a head, then the next head: its keys and values stay in the cache. */
            long r = part % n, h = part / n, m = 0;
            for (long c = 0; c < end; c++) {
                places[m] = c * width;
                m += mask ? mask[r * end + c] : c <= columns[r];
            }
            long base = (r / rows) * sequence_step + h * head_step, query = r * d + h * groups * width;
            const float *q = queries + query, *k = keys + base, *v = values + base;
            if (width == 64) /* compilers make faster code for a known width */
                attend_head(groups, out + query, q, k, v, places, m, 64, weights, step);
            else if (width == 128)
                attend_head(groups, out + query, q, k, v, places, m, 128, weights, step);
            else
                attend_head(groups, out + query, q, k, v, places, m, width, weights, step);
        }
        free(places);
        free(weights);
    }
    for (long r = 0; r < n; r++)
        scale_row(out + r * d, r, d, scaled, largest, rounded);
    free(out);
}
