/* One pass of a Llama over a ragged batch with a paged cache: bfloat16 weights and cache, float32
   sums and residual, for CPUs with AVX512_BF16.

   A row's arithmetic never depends on the other rows: its sums run in one fixed order, whatever the
   batch. So what a token gets is the same, bit for bit, alone, in a batch, or among drafts, be they
   a chain or a tree.

   Speed: decoding a few rows is bound by reading the weights once. Weights lie in panels of 32
   columns in the order in which they are read, and each pass over a panel fetches what comes next,
   so that memory and arithmetic overlap. */

#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef uint16_t bf16;

enum { PANEL = 32, LANES = 16, TILE = 8, AHEAD_BYTES = 4096, LINE_BYTES = 64 };
enum { MOST_SHARE = 4, MOST_DIM = 128, GROUP = 4 };

/* A loop of a constant count whose variables stay in registers. */
#define ALL(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

typedef struct {
    const bf16 *input_norm, *qkv, *out, *ffn_norm, *gate_up, *down; /* matrices packed */
    bf16 *keys, *values; /* see append */
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, ffn, layers, context;
    float norm_eps;
    const Layer *layer;
    const bf16 *norm;
    const float *cos, *sin; /* [context, head_dim / 2] */
} Model;

typedef struct {
    int64_t rows, taps;
    const int32_t *base;         /* [rows], a row sees every place of the cache before it, */
    const uint64_t *mask;        /* [rows], and place base + j where bit j is set; 0: no trees */
    const int32_t *const *table; /* [rows], blocks of 16 positions */
    const int64_t *tap;          /* [taps], layers after which states are kept, ascending */
    float *x;                    /* [rows, hidden]: in, embeddings; lost */
    bf16 *normed;                /* [rows, hidden]: out, the states that the head reads */
    bf16 *tapped;                /* [rows, taps, hidden]: out, normed without weight */
    void *scratch;               /* scratch_bytes() of it */
} Pass;

static inline __m512 load16(const bf16 *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

static inline void store16(bf16 *p, __m512 v) {
    _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(v));
}

/* e^x by 2^n e^r with |r| <= ln 2 / 2 and a polynomial of degree 6; error below 1e-6. */
static inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    const float terms[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 6; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(p, n);
}

/* w [n, k] row by row -> panels [n / 32][k / 2][32 columns][2]; columns beyond n are zero. */
void parlay_pack(const bf16 *w, bf16 *packed, int64_t n, int64_t k) {
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t c = j; c < j + PANEL; c++) {
                *packed++ = c < n ? w[c * k + i] : 0;
                *packed++ = c < n ? w[c * k + i + 1] : 0;
            }
}

typedef struct { bf16 *bf16; float *add; int64_t width; } Output; /* one of both is set */

/* `rows` rows of x [rows, k] times one panel, fetching `step` bytes of what comes next each turn. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const bf16 *x, int64_t k, const bf16 *panel, const char *next, int64_t step,
    Output y, int64_t column) {
    __m512 sum[TILE][2];
    for (int m = 0; m < rows; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < k / 2; i++) {
        _mm_prefetch(next, _MM_HINT_T0);
        if (step > LINE_BYTES) _mm_prefetch(next + LINE_BYTES, _MM_HINT_T0);
        next += step;
        const __m512bh low = (__m512bh)_mm512_load_si512(panel + i * 2 * PANEL);
        const __m512bh high = (__m512bh)_mm512_load_si512(panel + i * 2 * PANEL + PANEL);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            int32_t pair;
            memcpy(&pair, x + m * k + 2 * i, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[m][0] = _mm512_dpbf16_ps(sum[m][0], low, both);
            sum[m][1] = _mm512_dpbf16_ps(sum[m][1], high, both);
        }
    }
    for (int m = 0; m < rows; m++)
        for (int half = 0; half < 2; half++) {
            const int64_t c = column + half * LANES, at = m * y.width + c;
            if (y.add) {
                _mm512_storeu_ps(y.add + at, _mm512_add_ps(_mm512_loadu_ps(y.add + at), sum[m][half]));
            } else if (c + LANES <= y.width) {
                store16(y.bf16 + at, sum[m][half]);
            } else if (c < y.width) {
                const __mmask16 in = (__mmask16)((1u << (y.width - c)) - 1);
                _mm256_mask_storeu_epi16(y.bf16 + at, in, (__m256i)_mm512_cvtneps_pbh(sum[m][half]));
            }
        }
}

static void linear(const bf16 *x, const bf16 *packed, int64_t rows, int64_t k, Output y) {
    const int64_t tiles = (rows + TILE - 1) / TILE, panel_bytes = k * PANEL * sizeof(bf16);
    for (int64_t column = 0; column < y.width; column += PANEL, packed += k * PANEL) {
        const char *here = (const char *)packed;
        for (int64_t t = 0, row = 0; t < tiles; t++) {
            /* A single tile fetches a little ahead of itself; several share the next panel. */
            const int64_t step = 2 * LINE_BYTES / tiles;
            const char *next = here + (tiles == 1 ? AHEAD_BYTES : panel_bytes * (tiles + t) / tiles);
            const int64_t count = (rows - row + tiles - t - 1) / (tiles - t);
            const bf16 *in = x + row * k;
            Output to = y;
            if (to.add) to.add += row * y.width; else to.bf16 += row * y.width;
            switch (count) {
                case 1: tile(1, in, k, packed, next, step, to, column); break;
                case 2: tile(2, in, k, packed, next, step, to, column); break;
                case 3: tile(3, in, k, packed, next, step, to, column); break;
                case 4: tile(4, in, k, packed, next, step, to, column); break;
                case 5: tile(5, in, k, packed, next, step, to, column); break;
                case 6: tile(6, in, k, packed, next, step, to, column); break;
                case 7: tile(7, in, k, packed, next, step, to, column); break;
                default: tile(8, in, k, packed, next, step, to, column);
            }
            row += count;
        }
    }
}

/* x [rows, k] times packed [n, k] -> y [rows, n]. */
void parlay_linear(const bf16 *x, const bf16 *packed, bf16 *y, int64_t rows, int64_t n, int64_t k) {
    linear(x, packed, rows, k, (Output){y, 0, n});
}

/* x / rms(x) * weight; weight may be missing. Writes y[row * stride ...]. */
static void rms_norm(const float *x, const bf16 *weight, bf16 *y, int64_t rows, int64_t width,
                     int64_t stride, float eps) {
    for (int64_t r = 0; r < rows; r++, x += width, y += stride) {
        __m512 square = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += LANES) {
            const __m512 v = _mm512_loadu_ps(x + i);
            square = _mm512_fmadd_ps(v, v, square);
        }
        const float mean = _mm512_reduce_add_ps(square) / (float)width;
        const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
        for (int64_t i = 0; i < width; i += LANES) {
            const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + i), scale);
            store16(y + i, weight ? _mm512_mul_ps(v, load16(weight + i)) : v);
        }
    }
}

/* Half-split rotary: (a, b) -> (a cos - b sin, b cos + a sin). */
static inline void turn(bf16 *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const __m512 a = load16(head + i), b = load16(head + half + i);
        const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        store16(head + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store16(head + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

static inline uint64_t mask_of(const Pass *pass, int64_t row) {
    return pass->mask ? pass->mask[row] : 0;
}

/* Where a row's keys and values go: behind all that it sees, or the last of what its mask names. */
static inline int64_t place_of(const Pass *pass, int64_t row) {
    const uint64_t mask = mask_of(pass, row);
    return pass->base[row] + (mask ? 63 - __builtin_clzll(mask) : -1);
}

/* A row's position in its text: how many places it sees besides its own. */
static inline int64_t position_of(const Pass *pass, int64_t row) {
    return pass->base[row] + __builtin_popcountll(mask_of(pass, row)) - 1;
}

/* Which of the 16 places of a block are seen. */
static inline __mmask16 seen_in(int64_t block, int64_t base, uint64_t mask) {
    const int64_t left = base - block * LANES;
    if (left >= LANES) return 0xffff;
    if (left > 0) return (__mmask16)(((1u << left) - 1) | mask << left);
    return (__mmask16)(left > -64 ? mask >> -left : 0);
}

/* A block of keys is [head_dim / 2][16 positions][2], so that 16 scores come of one lane each; a
   block of values is [16 positions][head_dim]. Blocks of a KV head lie behind each other. */
static void append(const Model *m, const Layer *layer, const Pass *pass, bf16 *qkv) {
    const int64_t dim = m->head_dim, half = dim / 2, block = LANES * dim;
    const int64_t width = (m->heads + 2 * m->kv_heads) * dim;
    for (int64_t r = 0; r < pass->rows; r++, qkv += width) {
        const int64_t p = place_of(pass, r), turns = position_of(pass, r) * half;
        const float *cos = m->cos + turns, *sin = m->sin + turns;
        for (int64_t h = 0; h < m->heads + m->kv_heads; h++) turn(qkv + h * dim, cos, sin, half);
        const int64_t at = (int64_t)pass->table[r][p / LANES] * m->kv_heads, lane = p % LANES;
        for (int64_t h = 0; h < m->kv_heads; h++) {
            const bf16 *k = qkv + (m->heads + h) * dim, *v = k + m->kv_heads * dim;
            bf16 *keys = layer->keys + (at + h) * block + 2 * lane;
            for (int64_t i = 0; i < half; i++) memcpy(keys + i * PANEL, k + 2 * i, 2 * sizeof(bf16));
            memcpy(layer->values + (at + h) * block + lane * dim, v, dim * sizeof(bf16));
        }
    }
}

/* What one row attends with: its queries and scores lie head by head, its blocks anywhere. */
typedef struct {
    const bf16 *q;        /* [heads, dim] */
    const int32_t *table; /* [blocks] */
    int64_t base, blocks, span; /* span: its positions, rounded up to 16 */
    uint64_t mask;
    float *scores; /* [heads, span]; by position, so that a node of a tree sums as its path would */
    float *mix;    /* [heads, dim] */
} Query;

/* Blocks lie anywhere, so the processor does not guess the next ones: whoever reads block b fetches
   what is read so many blocks later, keys first, then values, then the next row's keys. */
typedef struct {
    const bf16 *keys, *values;
    const int32_t *table, *next_table;
    int64_t stride, blocks, next_blocks;
} Stream;

static inline const bf16 *ahead(const Stream *s, int64_t chunk) {
    if (chunk < s->blocks) return s->keys + s->table[chunk] * s->stride;
    if ((chunk -= s->blocks) < s->blocks) return s->values + s->table[chunk] * s->stride;
    chunk -= s->blocks;
    return s->keys + s->next_table[chunk < s->next_blocks ? chunk : 0] * s->stride;
}

/* Scores of `share` heads, from h on, with the keys of one KV head in blocks b and b + 1; returns
   nothing of a block that is not there. at: how many positions come before block b. */
static inline __attribute__((always_inline)) void score(
    const int share, const int dim, const Query *row, const Stream *s, int64_t offset, int64_t h,
    int64_t b, int64_t at) {
    const int pair_of = b + 1 < row->blocks;
    const bf16 *key[2] = {s->keys + row->table[b] * s->stride + offset,
                          s->keys + row->table[b + pair_of] * s->stride + offset};
    const bf16 *soon[2] = {ahead(s, b + GROUP) + offset, ahead(s, b + GROUP + 1) + offset};
    const bf16 *q = row->q + h * dim;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)dim)), none = _mm512_set1_ps(-INFINITY);
    __m512 dot[2][MOST_SHARE];
    ALL(g, share) dot[0][g] = dot[1][g] = _mm512_setzero_ps();
    for (int i = 0; i < dim / 2; i++) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(key[0] + i * PANEL);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(key[1] + i * PANEL);
        _mm_prefetch((const char *)(soon[0] + i * PANEL), _MM_HINT_T0);
        _mm_prefetch((const char *)(soon[1] + i * PANEL), _MM_HINT_T0);
        ALL(g, share) {
            int32_t pair;
            memcpy(&pair, q + g * dim + 2 * i, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            dot[0][g] = _mm512_dpbf16_ps(dot[0][g], first, both);
            dot[1][g] = _mm512_dpbf16_ps(dot[1][g], second, both);
        }
    }
    ALL(n, 2) {
        if (n > pair_of) break;
        const __mmask16 in = seen_in(b + n, row->base, row->mask);
        const int64_t room = row->span - at;
        const __mmask16 fits = room >= LANES ? 0xffff : (__mmask16)((1u << room) - 1);
        ALL(g, share) {
            dot[n][g] = _mm512_mask_compress_ps(none, in, _mm512_mul_ps(dot[n][g], scale));
            _mm512_mask_storeu_ps(row->scores + (h + g) * row->span + at, fits, dot[n][g]);
        }
        at += __builtin_popcount(in);
    }
}

/* Scores of one head -> weights, not yet normed; returns their sum. */
static float weigh(float *scores, int64_t span) {
    __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t j = 0; j < span; j += LANES) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + j));
    const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t j = 0; j < span; j += LANES) {
        const __m512 s = _mm512_loadu_ps(scores + j);
        const __mmask16 in = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        const __m512 e = _mm512_maskz_mov_ps(in, exp16(_mm512_sub_ps(s, peak)));
        total = _mm512_add_ps(total, e);
        _mm512_storeu_ps(scores + j, e);
    }
    return _mm512_reduce_add_ps(total);
}

/* Add to the mixes of `share` heads, from h on, the weighted values of blocks b to before `end`. */
static inline __attribute__((always_inline)) void mix(
    const int share, const int dim, const Query *row, const Stream *s, int64_t offset, int64_t h,
    int64_t b, int64_t end, int64_t at) {
    __m512 sum[MOST_SHARE][MOST_DIM / LANES];
    ALL(g, share) ALL(d, dim / LANES) sum[g][d] = _mm512_loadu_ps(row->mix + (h + g) * dim + d * LANES);
    const float *weights = row->scores + h * row->span;
    for (; b < end; b++) {
        const bf16 *value = s->values + row->table[b] * s->stride + offset;
        const bf16 *soon = ahead(s, row->blocks + b + GROUP) + offset;
        for (uint32_t left = seen_in(b, row->base, row->mask); left; left &= left - 1, at++) {
            const int j = __builtin_ctz(left);
            for (int d = 0; d < dim; d += PANEL)
                _mm_prefetch((const char *)(soon + j * dim + d), _MM_HINT_T0);
            ALL(d, dim / LANES) {
                const __m512 v = load16(value + j * dim + d * LANES);
                ALL(g, share) {
                    const __m512 weight = _mm512_set1_ps(weights[g * row->span + at]);
                    sum[g][d] = _mm512_fmadd_ps(weight, v, sum[g][d]);
                }
            }
        }
    }
    ALL(g, share) ALL(d, dim / LANES) _mm512_storeu_ps(row->mix + (h + g) * dim + d * LANES, sum[g][d]);
}

/* Run one of both for every head: as many at once as registers hold. */
#define EACH_HEAD(WHAT, ...)                                                            \
    for (int64_t h = 0; h < m->heads;) {                                                \
        const int64_t offset = h / share * block, left = share - h % share;             \
        if (dim == 64 && left >= 4) WHAT(4, 64, &row, &s, offset, h, __VA_ARGS__), h += 4; \
        else if (dim == 64 && left == 3) WHAT(3, 64, &row, &s, offset, h, __VA_ARGS__), h += 3; \
        else if (dim == 64 && left == 2) WHAT(2, 64, &row, &s, offset, h, __VA_ARGS__), h += 2; \
        else if (dim == 64) WHAT(1, 64, &row, &s, offset, h, __VA_ARGS__), h += 1;       \
        else if (dim == 128 && left >= 2) WHAT(2, 128, &row, &s, offset, h, __VA_ARGS__), h += 2; \
        else if (dim == 128) WHAT(1, 128, &row, &s, offset, h, __VA_ARGS__), h += 1;     \
        else WHAT(1, 32, &row, &s, offset, h, __VA_ARGS__), h += 1;                      \
    }

/* Every row attends to the places that it sees. All heads of a block are done before the next block:
   they lie side by side, and memory is read in long runs. */
static void attend(const Model *m, const Layer *layer, const Pass *pass, const bf16 *qkv, bf16 *y,
                   float *scratch) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads, block = LANES * dim;
    const int64_t width = (m->heads + 2 * m->kv_heads) * dim;
    for (int64_t r = 0; r < pass->rows; r++, qkv += width, y += m->heads * dim) {
        const int64_t next = r + 1 < pass->rows ? r + 1 : r;
        const Query row = {
            .q = qkv, .table = pass->table[r], .base = pass->base[r], .mask = mask_of(pass, r),
            .blocks = place_of(pass, r) / LANES + 1,
            .span = (position_of(pass, r) / LANES + 1) * LANES,
            .mix = scratch, .scores = scratch + m->heads * dim,
        };
        const Stream s = {
            .keys = layer->keys, .values = layer->values, .stride = m->kv_heads * block,
            .table = row.table, .blocks = row.blocks,
            .next_table = pass->table[next], .next_blocks = place_of(pass, next) / LANES + 1,
        };
        for (int64_t h = 0; h < m->heads; h++) /* what no block reaches */
            _mm512_storeu_ps(row.scores + (h + 1) * row.span - LANES, _mm512_set1_ps(-INFINITY));
        for (int64_t b = 0, at = 0; b < row.blocks; b += 2) {
            EACH_HEAD(score, b, at)
            at += __builtin_popcount(seen_in(b, row.base, row.mask));
            if (b + 1 < row.blocks) at += __builtin_popcount(seen_in(b + 1, row.base, row.mask));
        }
        memset(row.mix, 0, m->heads * dim * sizeof(float));
        float total[m->heads];
        for (int64_t h = 0; h < m->heads; h++) total[h] = weigh(row.scores + h * row.span, row.span);
        for (int64_t b = 0, at = 0; b < row.blocks;) {
            const int64_t end = b + GROUP < row.blocks ? b + GROUP : row.blocks;
            EACH_HEAD(mix, b, end, at)
            for (; b < end; b++) at += __builtin_popcount(seen_in(b, row.base, row.mask));
        }
        for (int64_t h = 0; h < m->heads; h++)
            for (int64_t d = 0; d < dim; d += LANES)
                store16(y + h * dim + d, _mm512_mul_ps(_mm512_loadu_ps(row.mix + h * dim + d),
                                                       _mm512_set1_ps(1.0f / total[h])));
    }
}

/* silu(gate) * up: y [rows, 2 * ffn] -> [rows, ffn], in place at the front. */
static void silu_times_up(bf16 *y, int64_t rows, int64_t ffn) {
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < ffn; i += LANES) {
            const __m512 gate = load16(y + 2 * r * ffn + i), up = load16(y + 2 * r * ffn + ffn + i);
            const __m512 below = _mm512_add_ps(one, exp16(_mm512_sub_ps(zero, gate)));
            store16(y + r * ffn + i, _mm512_mul_ps(_mm512_div_ps(gate, below), up));
        }
}

static int64_t widest(const Model *m) {
    const int64_t qkv = (m->heads + 2 * m->kv_heads) * m->head_dim;
    return qkv > 2 * m->ffn ? qkv : 2 * m->ffn;
}

/* What a pass over `rows` rows and up to `positions` positions needs of scratch. */
int64_t parlay_scratch_bytes(const Model *m, int64_t rows, int64_t positions) {
    const int64_t narrow = m->hidden > m->heads * m->head_dim ? m->hidden : m->heads * m->head_dim;
    return rows * (widest(m) + narrow) * (int64_t)sizeof(bf16) +
           m->heads * (m->head_dim + positions + LANES) * (int64_t)sizeof(float) + LINE_BYTES;
}

/* Run every layer over the pass; appends its keys and values to the cache. */
void parlay_forward(const Model *m, const Pass *pass) {
    const int64_t rows = pass->rows, hidden = m->hidden, mixed = m->heads * m->head_dim;
    bf16 *wide = pass->scratch, *narrow = wide + rows * widest(m);
    float *scores = (float *)(narrow + rows * (hidden > mixed ? hidden : mixed));
    for (int64_t l = 0, t = 0; l < m->layers; l++) {
        const Layer *layer = m->layer + l;
        rms_norm(pass->x, layer->input_norm, narrow, rows, hidden, hidden, m->norm_eps);
        linear(narrow, layer->qkv, rows, hidden, (Output){wide, 0, mixed + 2 * m->kv_heads * m->head_dim});
        append(m, layer, pass, wide);
        attend(m, layer, pass, wide, narrow, scores);
        linear(narrow, layer->out, rows, mixed, (Output){0, pass->x, hidden});
        rms_norm(pass->x, layer->ffn_norm, narrow, rows, hidden, hidden, m->norm_eps);
        linear(narrow, layer->gate_up, rows, hidden, (Output){wide, 0, 2 * m->ffn});
        silu_times_up(wide, rows, m->ffn);
        linear(wide, layer->down, rows, m->ffn, (Output){0, pass->x, hidden});
        if (t < pass->taps && pass->tap[t] == l + 1) {
            bf16 *to = pass->tapped + t++ * hidden;
            rms_norm(pass->x, 0, to, rows, hidden, pass->taps * hidden, 1e-6f);
        }
    }
    rms_norm(pass->x, m->norm, pass->normed, rows, hidden, hidden, m->norm_eps);
}

typedef struct {
    const Model *model;
    const Pass *pass;
    int64_t places, head_rows;
    const int64_t *place; /* [places], rows of the pass that the head reads, ascending */
    const bf16 *head;     /* packed [head_rows, hidden] */
    bf16 *logits;         /* [places, head_rows]: out */
    double ms;            /* out: what it took */
    pthread_t thread;
} Flight;

static void *fly(void *of) {
    Flight *f = of;
    const int64_t hidden = f->model->hidden;
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    parlay_forward(f->model, f->pass);
    bf16 *states = f->pass->normed;
    if (f->places < f->pass->rows) {
        states = f->pass->scratch; /* which the pass no longer needs */
        for (int64_t i = 0; i < f->places; i++)
            memcpy(states + i * hidden, f->pass->normed + f->place[i] * hidden, hidden * sizeof(bf16));
    }
    if (f->places) parlay_linear(states, f->head, f->logits, f->places, f->head_rows, hidden);
    clock_gettime(CLOCK_MONOTONIC, &end);
    f->ms = 1e3 * (double)(end.tv_sec - start.tv_sec) + 1e-6 * (double)(end.tv_nsec - start.tv_nsec);
    return 0;
}

/* Begin a pass and its logits in a thread of its own; land must follow, in any thread. Nothing that
   `f` points to may move until then. 0, or what pthread_create says. */
int parlay_launch(Flight *f) { return pthread_create(&f->thread, 0, fly, f); }

/* Wait for a pass that was launched. */
int parlay_land(Flight *f) { return pthread_join(f->thread, 0); }

/* Copy slots (16 * block + offset) `from` to `to`, [count] both, in every layer; all are read before
   any is written. scratch: bf16 [count, 2 * kv_heads * head_dim]. */
void parlay_move(const Model *m, const int64_t *from, const int64_t *to, int64_t count,
                 bf16 *scratch) {
    const int64_t dim = m->head_dim, half = dim / 2, block = LANES * dim;
    for (int64_t l = 0; l < m->layers; l++)
        for (int write = 0; write < 2; write++) {
            bf16 *held = scratch;
            for (int64_t i = 0; i < count; i++) {
                const int64_t slot = write ? to[i] : from[i], lane = slot % LANES;
                for (int64_t h = 0; h < m->kv_heads; h++, held += 2 * dim) {
                    const int64_t at = (slot / LANES * m->kv_heads + h) * block;
                    bf16 *k = m->layer[l].keys + at + 2 * lane, *v = m->layer[l].values + at + lane * dim;
                    for (int64_t d = 0; d < half; d++) {
                        if (write) memcpy(k + d * PANEL, held + 2 * d, 2 * sizeof(bf16));
                        else memcpy(held + 2 * d, k + d * PANEL, 2 * sizeof(bf16));
                    }
                    if (write) memcpy(v, held + dim, dim * sizeof(bf16));
                    else memcpy(held + dim, v, dim * sizeof(bf16));
                }
            }
        }
}
