/* The tokens of the largest logits, and of the largest sums of logit and noise (infer/engine/native_choice.py). */

/* Logits of rows (n, V), `stride` numbers apart. The `again` largest of a row are computed again from its hidden state
   (n, d) and the output head's weight (V, d) and bias (V) or null. */
typedef struct {
    long V, stride;
    float *logits;
    long again, d;
    const float *hidden;
    const exact *weight;
    const float *bias;
} output;

INLINED output row_of(const output *o, long r)
{
    output row = *o;
    row.logits += r * o->stride;
    row.hidden += r * o->d;
    return row;
}

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

/* Insert a value and its id, number i, into the m largest values before it. */
INLINED void insert_into(float *values, long *ids, long m, long i, float value, long id)
{
    if (i >= m && !(value > values[m - 1]))
        return;
    long last = i < m ? i : m - 1;
    values[last] = value;
    ids[last] = id;
    insert(values, ids, last + 1);
}

/* The scalar product of rows of d numbers in float64. */
static double wide_dot(const float *a, const exact *b, long d)
{
    double sums[8] = {0};
    for (long i = 0; i < d; i += 8)
        for (int j = 0; j < 8; j++)
            sums[j] += (double)a[i + j] * value_of(b[i + j]);
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* Write the m largest logits of a row in decreasing order, the largest of them computed again, and their ids. */
static void top_of_row(const output *o, long m, float *values, long *ids)
{
    const float *logits = o->logits;
    for (long v = 0; v < o->V; v += 64) {
        long end = v + 64 < o->V ? v + 64 : o->V;
        if (v >= m) { /* most blocks have no number that is large enough */
            int larger = 0;
            for (long i = v; i < end; i++)
                larger |= logits[i] > values[m - 1];
            if (!larger)
                continue;
        }
        for (long i = v; i < end; i++)
            insert_into(values, ids, m, i, logits[i], i);
    }
    if (!o->again)
        return;
    for (long i = 0; i < o->again && i < m; i++)
        values[i] = wide_dot(o->hidden, o->weight + ids[i] * o->d, o->d) + (o->bias ? o->bias[ids[i]] : 0);
    for (long i = 1; i < m; i++)
        insert(values, ids, i + 1);
}

/* Write the m largest logits of each of n rows, and their ids, to (n, m). */
void top(const output *o, long n, long m, float *values, long *ids, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 1)
    for (long r = 0; r < n; r++) {
        output row = row_of(o, r);
        top_of_row(&row, m, values + r * m, ids + r * m);
    }
}

/* ---- Noise: infer/engine/noise.py ---- */

#define BITS 52         /* of a uniform number */
#define ROUNDING 1e-5f  /* more than the relative error of a score */

/* SplitMix64's step and finalizer. */
INLINED uint64_t mixed(uint64_t x)
{
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

INLINED uint64_t bits_of(uint64_t key, long id)
{
    return mixed(key ^ mixed(id)) >> (64 - BITS);
}

/* The Gumbel noise of a token. `key` is the hash of seed and position. */
static double noise_of(uint64_t key, long id)
{
    double uniform = bits_of(key, id) * 0x1p-52 + 0x1p-53;
    return -log(-log(uniform));
}

/* Write to `ids` the tokens that may exceed `score` by logit / temperature and noise, and return their number. A token
   of value x cannot exceed it unless 1 - u < e^(x - score), for its uniform number u. */
static long contenders(const output *o, float temperature, float score, uint64_t key, long *ids)
{
    const long size = 512;
    /* The logarithm of the number of uniform numbers, and a margin for rounding. */
    float scale = 0.693147182f * BITS + ROUNDING * fmaxf(1, fabsf(score));
    float over[size]; /* at most 0 if a token may exceed the score */
    long count = 0;
    for (long first = 0; first < o->V; first += size) {
        long n = o->V - first < size ? o->V - first : size;
        int any = 0;
        for (long i = 0; i < n; i++) {
            float above = (float)(int64_t)((1LL << BITS) - bits_of(key, first + i)); /* (1 - u) 2^BITS + 1/2 */
            over[i] = above - (1 + exponential(o->logits[first + i] / temperature - score + scale));
        }
        for (long i = 0; i < n; i++)
            any |= over[i] <= 0;
        for (long i = 0; any && i < n; i++)
            if (over[i] <= 0)
                ids[count++] = first + i;
    }
    return count;
}

/* The sum of e^(logit / temperature - largest) over the logits of a row. */
static double mass_of(const output *o, float temperature, float largest)
{
    double mass = 0;
    for (long first = 0; first < o->V; first += 64) {
        float block[64] = {0};
        long n = o->V - first < 64 ? o->V - first : 64;
        for (long i = 0; i < n; i++)
            block[i] = exponential(o->logits[first + i] / temperature - largest);
        for (int step = 32; step; step /= 2)
            for (int i = 0; i < step; i++)
                block[i] += block[i + step];
        mass += block[0];
    }
    return mass;
}

/* Whether a token is before another in the order of a nucleus: by logits, then by ids. */
INLINED int is_before(const output *o, long id, long other)
{
    return o->logits[id] > o->logits[other] || (o->logits[id] == o->logits[other] && id < other);
}

/* Whether the tokens before one have less than `most` of the sum that mass_of returns. */
static int is_in_nucleus(const output *o, float temperature, float largest, double most, long id)
{
    float logit = o->logits[id];
    double before = 0;
    for (long first = 0; first < o->V; first += 64) {
        long end = first + 64 < o->V ? first + 64 : o->V;
        int larger = 0;
        for (long i = first; i < end; i++)
            larger |= o->logits[i] >= logit;
        for (long i = first; larger && i < end; i++)
            if (is_before(o, i, id))
                before += exponential(o->logits[i] / temperature - largest);
    }
    return before < most;
}

/* Return the token with the largest sum of logit / temperature and noise among `count` tokens, or with `most` among
   those for which is_in_nucleus is true; `otherwise` if there is none. `ids` are changed. */
static long best_of(const output *o, float temperature, float largest, double most, uint64_t key, long *ids,
                    long count, long otherwise)
{
    double *sums = malloc(count * sizeof(double));
    for (long i = 0; i < count; i++)
        sums[i] = o->logits[ids[i]] / temperature + noise_of(key, ids[i]);
    long result = otherwise;
    while (count) {
        long best = 0, kept = 0;
        for (long i = 1; i < count; i++)
            best = sums[i] > sums[best] ? i : best;
        long id = ids[best];
        if (most == INFINITY || is_in_nucleus(o, temperature, largest, most, id)) {
            result = id;
            break;
        }
        for (long i = 0; i < count; i++) /* tokens after this one are outside too */
            if (is_before(o, ids[i], id)) {
                ids[kept] = ids[i];
                sums[kept++] = sums[i];
            }
        count = kept;
    }
    free(sums);
    return result;
}

/* Return the token with the largest sum of logit / temperature and noise: of all tokens of a row, or of its nucleus if
   `top_p` is below 1. `ids` is space for V tokens. The row is as before at the end. */
static long noisiest(const output *o, float temperature, float top_p, uint64_t key, long *ids)
{
    long m = o->again ? o->again : 1, leading[m];
    float values[m], saved[m];
    top_of_row(o, m, values, leading);
    for (long i = 0; i < m; i++) { /* logits that were computed again take the place of the row's */
        saved[i] = o->logits[leading[i]];
        o->logits[leading[i]] = values[i];
    }
    float largest = values[0] / temperature;
    long count = contenders(o, temperature, largest + noise_of(key, leading[0]), key, ids);
    double most = top_p < 1 ? top_p * mass_of(o, temperature, largest) : INFINITY;
    long result = best_of(o, temperature, largest, most, key, ids, count, leading[0]);
    for (long i = 0; i < m; i++)
        o->logits[leading[i]] = saved[i];
    return result;
}

/* Write the noisiest tokens of n rows with these keys. */
void pick_noisiest(const output *o, long n, float temperature, float top_p, const uint64_t *keys, long *picks)
{
    long *ids = malloc(o->V * sizeof(long));
    for (long r = 0; r < n; r++) {
        output row = row_of(o, r);
        picks[r] = noisiest(&row, temperature, top_p, keys[r], ids);
    }
    free(ids);
}

/* Of the m largest logits of a row, write the `count` largest sums of logit / temperature and noise, and their ids. The
   sum is -inf outside of the nucleus, of the probability of all tokens or only of these m. */
static void noisy_top_of_row(const output *o, long m, long count, float temperature, float top_p, int of_all,
                             uint64_t key, float *sums, long *ids)
{
    long listed = m > o->again ? m : o->again;
    float *values = malloc(listed * sizeof(float));
    long *leading = malloc(listed * sizeof(long));
    top_of_row(o, listed, values, leading);
    float largest = values[0] / temperature;
    double mass = top_p < 1 && of_all ? mass_of(o, temperature, largest) : 0, before = 0;
    for (long i = 0; top_p < 1 && i < (of_all ? listed : m); i++) {
        mass += exponential(values[i] / temperature - largest);
        if (of_all) /* some were computed again */
            mass -= exponential(o->logits[leading[i]] / temperature - largest);
    }
    for (long i = 0; i < m; i++) {
        int excluded = top_p < 1 && i && !(before < top_p * mass);
        float sum = excluded ? -INFINITY : values[i] / temperature + noise_of(key, leading[i]);
        insert_into(sums, ids, count, i, sum, leading[i]);
        before += top_p < 1 ? exponential(values[i] / temperature - largest) : 0;
    }
    free(values);
    free(leading);
}

/* `noisy_top_of_row` of n rows with these keys, to (n, count). */
void noisy_top(const output *o, long n, long m, long count, float temperature, float top_p, int of_all,
               const uint64_t *keys, float *sums, long *ids, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 1)
    for (long r = 0; r < n; r++) {
        output row = row_of(o, r);
        noisy_top_of_row(&row, m, count, temperature, top_p, of_all, keys[r], sums + r * count, ids + r * count);
    }
}
