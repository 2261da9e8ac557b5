/* A decoder of Llama's kind (infer/engine/native.py) with weights in int8, or with BFLOAT16 in bfloat16, on x86 CPUs
   with AVX2.

   A row's result depends on the row and on the keys and values that it attends to, in the
   order of their columns. It does not depend on the columns themselves or on other rows. So
   rows of drafts are those of plain decoding, bit for bit. Every sum has one order, with parts that
   fit into vector registers.

   Rows are contiguous. The input x of a product is rounded. In int8 each row has a scale: unsigned
   8 bits, 128 added; `largest` (n) has the rows' largest absolute values. The product y is divided
   by them, and the function that reads y multiplies by them. In bfloat16 they are 1. */

#include <stdint.h>
#include <stdlib.h>

#include "threads.h"
#include "pairs.h"
#ifdef BFLOAT16
#include "bfloat16.h"
#else
#include "int8.h"
#endif
#include "products.h"
#include "rows.h"
#ifndef BFLOAT16
#include "levels.h"
#endif
#include "attention.h"
#include "attention_tiles.h"
#include "choice.h"

/* ---- The decoder: the structures of infer/engine/native.py ---- */

#define PARTS 3 /* the largest number of layers in a product */

/* Layers that read the same input, and their adapters: y = [W1 x | W2 x | .. | A1 x | A2 x | ..]. */
typedef struct {
    matrix w, base; /* base: the first rows of w, for forwards without probes */
    long parts;
    const float *bias; /* zeros without a bias */
    const float *shrink; /* multiplies the inputs before they are rounded; the norms' weights include it */
    long sizes[PARTS], ranks[PARTS];
    matrix b[PARTS]; /* the adapters' B */
} product;

enum { QKV, O, GATE_UP, DOWN, PRODUCTS };

typedef struct {
    product of[PRODUCTS];
    const float *attention_norm, *mlp_norm;
    float scaling;
} layer;

typedef struct {
    long layers, d, heads, key_heads, width;
    const layer *layer;
    const float *norm;
    float epsilon;
} decoder;

/* The keys and values of a layer, in bfloat16. Columns are `width` numbers apart. A row attends to the columns of its
   row of `mask` (n, end); without a mask to the columns up to its own. */
typedef struct {
    uint16_t *keys, *values;
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
    input *x;
    long divided; /* threads share forwards of more multiplications, on average of their products */
    int threads;
} forward;

/* Add a thread's share of B times the product with A to the probes' outputs of a layer. */
static void adapt(const forward *f, const product *p, long part, float *y, const float *inner, worker *w)
{
    const matrix *b = p->b + part;
    long probes = f->rows - f->first, stride = p->w.outputs, rank = p->ranks[part];
    const matrix *none = NULL;
    worker again = {.number = w->number, .count = w->count, .upcoming = &none};
    input *x = calloc(probes * b->d, sizeof(input));
    float *largest = malloc(probes * sizeof(float));
    for (long r = f->first; r < f->n; r += f->rows) { /* the first probe of each sequence */
        for (long i = 0; i < probes; i++)
            round_row(inner + (r + i) * stride, 0, rank, x + i * b->d, largest + i);
        /* Only the first sequence reads B from memory, and fetches other weights meanwhile. */
        multiply_share(b, &(operands){probes, x, largest, y + r * stride, stride, 1}, r == f->first ? w : &again);
    }
    free(x);
    free(largest);
    if (p->sizes[part] % 16) /* the last block of outputs adds zeros to the next layer's */
        wait_for_others(w);
}

/* Return the weight that a forward multiplies by: without the adapters' A if it has no probes. */
static const matrix *weight_of(const forward *f, const product *p)
{
    return f->first < f->rows ? &p->w : &p->base;
}

/* Write the product of x to y. */
static void project(const forward *f, const product *p, worker *w)
{
    multiply_share(weight_of(f, p), &(operands){f->n, f->x, NULL, f->y, p->w.outputs, 0}, w);
    wait_for_others(w);
    if (f->first >= f->rows)
        return;
    float *y = f->y;
    const float *inner = y;
    for (long i = 0; i < p->parts; i++)
        inner += p->sizes[i];
    for (long i = 0; i < p->parts; y += p->sizes[i], inner += p->ranks[i], i++)
        if (p->ranks[i])
            adapt(f, p, i, y, inner, w);
    wait_for_others(w);
}

/* Return the number of bytes of a number of a product's input. */
int input_size(void)
{
    return sizeof(input);
}

/* Rotate the queries (times `factor`) and keys of y = [q | k | v | ...] of row r; write keys and values to the
   cache. */
static void store(const decoder *m, const forward *f, const product *p, const cached *cache, float factor, long r)
{
    long width = m->width;
    const float *x = f->y + r * p->w.outputs, *b = p->bias;
    const float *cosine = f->cosine + r * width, *sine = f->sine + r * width;
    float t = f->largest[r], row[width];
    for (long h = 0; h < m->heads; h++, x += width, b += width)
        rotate(f->queries + (r * m->heads + h) * width, x, b, t, width, cosine, sine, factor);
    long place = (r / f->rows) * cache->sequence_step + f->columns[r] * width;
    for (long h = 0; h < m->key_heads; h++, x += width, b += width) {
        rotate(row, x, b, t, width, cosine, sine, 1);
        to_bfloat16(row, width, cache->keys + place + h * cache->head_step);
    }
    for (long h = 0; h < m->key_heads; h++, x += width, b += width) {
        for (long i = 0; i < width; i++)
            row[i] = x[i] * t + b[i];
        to_bfloat16(row, width, cache->values + place + h * cache->head_step);
    }
}

static void multiply_row(long n, float *restrict row, const float *restrict factors)
{
    for (long i = 0; i < n; i++)
        row[i] *= factors[i];
}

/* Find the columns that row r attends to. */
static void find_attended(const forward *f, const cached *cache, long r, attended *row)
{
    const uint64_t all = 0x0101010101010101;
    const uint8_t *mask = cache->mask ? cache->mask + r * f->end : NULL;
    row->first = row->count = 0;
    if (!mask) {
        row->end = f->columns[r] + 1;
        return;
    }
    long c = 0;
    while (c < f->end && !mask[c])
        c++;
    row->first = c;
    while (c + 8 <= f->end && *(const uint64_t *)(mask + c) == all)
        c += 8;
    while (c < f->end && mask[c])
        c++;
    row->end = c;
    for (; c < f->end; c++) {
        row->columns[row->count] = c;
        row->count += mask[c];
    }
}

/* Copy the queries of a key head of `rows` rows, or copy them back. */
static void copy_queries(long rows, long size, long d, float *queries, float *packed, int back)
{
    for (long r = 0; r < rows; r++)
        if (back)
            memcpy(queries + r * d, packed + r * size, size * sizeof(float));
        else
            memcpy(packed + r * size, queries + r * d, size * sizeof(float));
}

/* Replace the queries of a key head of a sequence's rows by their attention. `row` and `packed` are space for rows and
   their queries. */
static void attend_head(const decoder *m, const forward *f, const cached *cache, long sequence, long head, range rows,
                        attended *row, float *packed, const scratch *space, worker *w)
{
    long count = rows.end - rows.first, width = m->width, d = m->heads * width, groups = m->heads / m->key_heads;
    float *queries = f->queries + (sequence * f->rows + rows.first) * d + head * groups * width;
    long base = sequence * cache->sequence_step + head * cache->head_step;
    const uint16_t *keys = cache->keys + base, *values = cache->values + base;
    for (long r = 0; r < count; r++)
        find_attended(f, cache, sequence * f->rows + rows.first + r, row + r);
    copy_queries(count, groups * width, d, queries, packed, 0);
    if (ATTENDS_BY_TILES(groups, width))
        attend_by_tiles(count, groups, packed, keys, values, row, width, space, w);
    else
        attend_by_vectors(count, groups, packed, keys, values, row, width, space, w);
    copy_queries(count, groups * width, d, queries, packed, 1);
}

/* Replace the queries by their attention. */
static void attend(const decoder *m, const forward *f, const cached *cache, worker *w)
{
    long width = m->width, groups = m->heads / m->key_heads, step = f->end + PADDED;
    int by_tiles = ATTENDS_BY_TILES(groups, width);
    long together = by_tiles ? TILED_QUERIES : TOGETHER > groups ? TOGETHER : groups;
    long most = together / groups, parts = (f->rows + most - 1) / most;
    long rest = by_tiles ? (TILED_QUERIES + BLOCKS * TILED) / 2 : NUMBERS / 2 + together;
    float *packed = malloc((together * (width + step) + rest * width) * sizeof(float));
    scratch space = {packed + together * width, step, packed + together * (width + step)};
    attended row[most];
    long *columns = malloc(most * f->end * sizeof(long));
    for (long r = 0; r < most; r++)
        row[r].columns = columns + r * f->end;
    if (by_tiles)
        shape_attention_tiles(groups);
    /* Each thread has as many tasks as the others; tasks that are left are divided among the threads. */
    long tasks = f->n / f->rows * m->key_heads * parts, left = tasks % w->count, whole = tasks - left;
#pragma omp for schedule(dynamic)
    for (long i = 0; i < whole + left * w->count; i++) {
        long task = i < whole ? i : whole + (i - whole) / w->count;
        range rows = part_of((range){0, f->rows}, task % parts, parts);
        if (i >= whole)
            rows = part_of(rows, (i - whole) % w->count, w->count);
        if (rows.first < rows.end)
            attend_head(m, f, cache, task / parts / m->key_heads, task / parts % m->key_heads, rows, row, packed,
                        &space, w);
    }
    if (by_tiles)
        release_tiles();
    free(columns);
    free(packed);
}

/* Add a product, unless it is null, to a thread's rows of h. Write their norms to `result`, or as a product's input if
   that is null. */
static void add_and_norm(const decoder *m, const forward *f, const product *p, const float *weight, float *result,
                         worker *w)
{
    range rows = share_of(f->n, w);
    long d = m->d;
    for (long r = rows.first; r < rows.end; r++) {
        add_norm(1, d, f->h + r * d, p ? f->y + r * p->w.outputs : NULL, 0, p ? p->bias : NULL, weight, m->epsilon,
                 result ? result + r * d : NULL, f->x + r * d, f->largest + r);
        fetch(w, d / 16);
    }
    wait_for_others(w);
}

/* A thread's part of `decode`. */
static void decode_part(const decoder *m, const forward *f, const cached *cache, float *result, worker *w)
{
    range rows = share_of(f->n, w);
    const product *before = NULL; /* whose output is added to h */
    for (long i = 0; i < m->layers; i++) {
        const layer *l = m->layer + i;
        const product *p = l->of;
        add_and_norm(m, f, before, l->attention_norm, NULL, w);
        project(f, p + QKV, w);
        for (long r = rows.first; r < rows.end; r++)
            store(m, f, p + QKV, cache + i, l->scaling, r);
        wait_for_others(w);
        attend(m, f, cache + i, w);
        long d = m->heads * m->width;
        for (long r = rows.first; r < rows.end; r++) {
            multiply_row(d, f->queries + r * d, p[O].shrink);
            round_row(f->queries + r * d, r, d, f->x, f->largest);
        }
        wait_for_others(w);
        project(f, p + O, w);
        add_and_norm(m, f, p + O, l->mlp_norm, NULL, w);
        project(f, p + GATE_UP, w);
        d = p[DOWN].w.d;
        for (long r = rows.first; r < rows.end; r++) {
            activate(1, d, f->y + r * p[GATE_UP].w.outputs, 0, p[GATE_UP].bias, p[DOWN].shrink, f->x + r * d,
                     f->largest + r);
            fetch(w, d / 16);
        }
        wait_for_others(w);
        project(f, p + DOWN, w);
        before = p + DOWN;
    }
    add_and_norm(m, f, before, m->norm, result, w);
}

/* Write the normed hidden states of embedded rows h to `result` (n, d), their keys and values to the cache. */
void decode(const decoder *m, const forward *f, const cached *cache, float *result)
{
    long products = m->layers * PRODUCTS, multiplications = 0, count = 0;
    const matrix *upcoming[products * (1 + PARTS) + 1];
    for (long i = 0; i < products; i++) {
        const product *p = m->layer[i / PRODUCTS].of + i % PRODUCTS;
        multiplications += f->n * p->w.d * p->w.outputs;
        upcoming[count++] = weight_of(f, p);
        for (long j = 0; f->first < f->rows && j < p->parts; j++)
            if (p->ranks[j])
                upcoming[count++] = p->b + j;
    }
    upcoming[count] = NULL;
    int threads = multiplications < f->divided * products ? 1 : f->threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        worker w = worker_of(upcoming);
        decode_part(m, f, cache, result, &w);
    }
}

/* ---- A layer: Native of conf/devices/int8.py ---- */

/* Write y (n, outputs), the product of n rows x (n, width) in float32 and a weight with columns of zeros after
   `width`. */
void apply(const matrix *m, long n, long width, const float *x, float *y, int threads)
{
    long d = m->d;
    input *rounded = malloc(n * d * sizeof(input));
    float *largest = malloc(n * sizeof(float));
    for (long r = 0; r < n; r++) {
        round_row(x + r * width, 0, width, rounded + r * d, largest + r);
        memset(rounded + r * d + width, 0, (d - width) * sizeof(input));
    }
    multiply(m, n, rounded, largest, y, threads);
    free(rounded);
    free(largest);
}

/* ---- The previous-token head: infer/engine/native_head.py ---- */

typedef struct {
    long d;
    matrix of_hidden, of_token, w2; /* W1 = [of_hidden | of_token]; the first d outputs of each are used */
    const float *norm;
    float epsilon;
    const exact *output; /* the model's output head (V, d), and its bias (V) or null */
    const float *bias;
} head;

/* Write a part of W1's product with the norm of n rows to `inner` (n, outputs of the part). */
static void apply_to_norm(const head *m, const matrix *w, long n, const float *rows, float *inner)
{
    input *x = malloc(n * m->d * sizeof(input));
    float *largest = malloc(n * sizeof(float));
    add_norm(n, m->d, (float *)rows, NULL, 0, NULL, m->norm, m->epsilon, NULL, x, largest);
    multiply(w, n, x, largest, inner, 1);
    free(x);
    free(largest);
}

/* Write the part of W1's product that depends on k hidden states to `inner` (k, its outputs). */
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
    float *y = malloc(m->of_token.outputs * sizeof(float)), *row = malloc(d * sizeof(float)), largest;
    input *x = malloc(d * sizeof(input));
    apply_to_norm(m, &m->of_token, 1, token, y);
    for (long i = 0; i < d; i++) {
        float sum = inner[i] + y[i];
        row[i] = sum / (1 + exponential(-sum));
    }
    round_row(row, 0, d, x, &largest);
    multiply(&m->w2, 1, x, &largest, y, 1);
    for (long i = 0; i < d; i++)
        row[i] = hidden[i] + y[i];
    for (long j = 0; j < count; j++)
        logits[j] = dot_exact(row, m->output + ids[j] * d, d) + (m->bias ? m->bias[ids[j]] : 0);
    free(y);
    free(row);
    free(x);
}
