/* The kernels, compiled once per instruction set: a file defines ISA, ISA_NAME and W (floats in a vector) and includes
   this one.

   Every output is computed in an order that depends on its own row alone, by the same instructions however many rows
   there are, so a row's bits do not depend on its batch nor on the number of threads. Vectors run over outputs or over
   the columns of one row, never over rows. `n` is a number of rows, `ld...` a distance between rows in floats. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fg.h"
#ifdef FG_X86
#include <immintrin.h>
#endif
#ifdef FG_ARM
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define P (16 / W) /* vectors in a block of 16 outputs */

typedef float vf __attribute__((vector_size(W * 4)));
typedef uint64_t vu __attribute__((vector_size(W * 4)));
typedef int64_t vs __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

#define H (W == 16 ? 8 : W) /* lanes of a vector that is soon folded: narrow ones cost less there */
typedef float vh __attribute__((vector_size(H * 4)));
typedef int32_t vhi __attribute__((vector_size(H * 4)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf some(const float *p, int64_t lanes) {
    if (lanes == W) return load(p);
    float t[W] = {0};
    memcpy(t, p, lanes * 4);
    return load(t);
}

INLINE void store_some(float *p, vf v, int64_t lanes) {
    if (lanes == W) {
        store(p, v);
        return;
    }
    float t[W];
    store(t, v);
    memcpy(p, t, lanes * 4);
}

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vi load_ints(const void *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE float fold(vf v) {
#if W == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float t[W];
    store(t, v);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) t[i] += t[i + step];
    return t[0];
#endif
}

INLINE vf larger(vf x, vf y) { /* y if one is no number */
#if defined(HAVE_AVX512)
    return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(HAVE_AVX2)
    return (vf)_mm256_max_ps((__m256)x, (__m256)y);
#else
    vi more = x > y;
    return (vf)(((vi)x & more) | ((vi)y & ~more));
#endif
}

#if W == 16
#define NARROW(v, i) ((vh)_mm512_extractf32x8_ps((__m512)(v), i))
#else
#define NARROW(v, i) (v)
#endif
#ifdef HAVE_AVX2
#define HALVES(v, i) _mm256_extractf128_ps((__m256)(v), i)
#else
#define HALVES(v, i) (v)
#endif
#ifdef __clang__
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, (v4i){__VA_ARGS__})
#endif

/* Lane i: v [4] number i folded by `both`, halves onto each other as `fold` does it. */
#define FOLD_FOUR(name, of, four, both)                                                                                \
    INLINE four name(const of *v) {                                                                                    \
        four t[4];                                                                                                     \
        UNROLL for (int i = 0; i < 4; i++) t[i] =                                                                      \
            H == 4 ? (four)HALVES(v[i], 0) : both((four)HALVES(v[i], 0), (four)HALVES(v[i], 1));                       \
        four x = both(LANES_OF(t[0], t[1], 0, 1, 4, 5), LANES_OF(t[0], t[1], 2, 3, 6, 7));                             \
        four y = both(LANES_OF(t[2], t[3], 0, 1, 4, 5), LANES_OF(t[2], t[3], 2, 3, 6, 7));                             \
        return both(LANES_OF(x, y, 0, 2, 4, 6), LANES_OF(x, y, 1, 3, 5, 7));                                           \
    }
#define SUM(x, y) ((x) + (y))
#ifdef FG_X86
#define LARGER(x, y) ((v4)_mm_max_ps((__m128)(x), (__m128)(y)))
#else
#define LARGER(x, y) ((v4)(((v4i)(x) & ((x) > (y))) | ((v4i)(y) & ~((x) > (y)))))
#endif
INLINE vh larger_narrow(vh x, vh y) { /* y if one is no number */
#ifdef HAVE_AVX2
    return (vh)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return LARGER(x, y);
#endif
}

FOLD_FOUR(sums_of_ints, vhi, v4i, SUM)
FOLD_FOUR(sums_of_narrow, vh, v4, SUM)
FOLD_FOUR(largest_of_narrow, vh, v4, LARGER)

/* Lane i: v [4] number i, folded. */
INLINE v4 sums_of(const vf *v) {
    vh t[4];
    UNROLL for (int i = 0; i < 4; i++) t[i] = W == 16 ? NARROW(v[i], 0) + NARROW(v[i], 1) : NARROW(v[i], 0);
    return sums_of_narrow(t);
}

INLINE v4 largest_of(const vf *v) {
    vh t[4];
    UNROLL for (int i = 0; i < 4; i++) t[i] = larger_narrow(NARROW(v[i], 0), NARROW(v[i], 1));
    return largest_of_narrow(t);
}

/* Share `part` of `total` units. */
INLINE void share(int64_t total, int part, int parts, int64_t *from, int64_t *to) {
    *from = total * part / parts;
    *to = total * (part + 1) / parts;
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = h & 0x7fff;
    union {
        uint32_t u;
        float f;
    } v;
    if (body >= 0x7c00) {
        v.u = sign | 0x7f800000u | (body & 0x3ff) << 13;
        return v.f;
    }
    v.u = body << 13;
    v.f *= 0x1p112f; /* exponent 15 to 127; subnormal halves come out right */
    v.u |= sign;
    return v.f;
}

INLINE vf load_half(const uint16_t *p) {
#if defined(HAVE_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(HAVE_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(FG_ARM)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

/* exp by x = n ln 2 + r and a polynomial in r (coefficients of Cephes' expf), within 2 ulp: y = exp(r). */
#define EXP_PARTS(type, x)                                                                                             \
    type n = ((x) * 1.44269504f + 12582912.0f) - 12582912.0f;                                                          \
    type r = (x) - n * 0.693359375f;                                                                                   \
    r = r - n * -2.12194440e-4f;                                                                                       \
    type y = r * 1.9875691500e-4f + 1.3981999507e-3f;                                                                  \
    y = y * r + 8.3334519073e-3f;                                                                                      \
    y = y * r + 4.1665795894e-2f;                                                                                      \
    y = y * r + 1.6666665459e-1f;                                                                                      \
    y = y * r + 5.0000001201e-1f;                                                                                      \
    y = y * r * r + r + 1.0f;

INLINE float exp_(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    EXP_PARTS(float, x)
    union {
        int32_t i;
        float f;
    } power;
    power.i = ((int32_t)n + 127) << 23;
    return y * power.f;
}

/* The same of vectors, for x up to 0. */
INLINE vf exps(vf x) {
    x = larger(x, splat(-87.0f));
    EXP_PARTS(vf, x)
    return y * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

INLINE float silu(float x) { return x / (1.0f + exp_(-x)); }

INLINE float gelu(float x) { /* tanh form: x sigmoid(2 u) */
    return x / (1.0f + exp_(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

/* tanh: a polynomial near 0 (coefficients of Cephes' tanhf), else from exp. */
INLINE float tanh_(float x) {
    float z = x * x;
    float near = -5.70498872745e-3f;
    near = near * z + 2.06390887954e-2f;
    near = near * z - 5.37397155531e-2f;
    near = near * z + 1.33314422036e-1f;
    near = near * z - 3.33332819422e-1f;
    near = near * z * x + x;
    float far = 1.0f - 2.0f / (exp_(2.0f * x) + 1.0f);
    return z < 0.390625f ? near : far;
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vf total = {0};
    int64_t i = 0;
    for (; i + W <= n; i += W) total += load(a + i) * load(b + i);
    float sum = fold(total);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* ---- linear: weights [out, in] as blocks of 16 outputs, [out / 16][in][16]; sums run over `in` in order, a fresh sum
   for every K_BLOCK of it ---- */

#define K_BLOCK 256

INLINE void put(float *out, const vf *sum, int64_t lanes, int first) {
    if (lanes >= 16) {
        UNROLL for (int p = 0; p < P; p++) store(out + p * W, first ? sum[p] : load(out + p * W) + sum[p]);
        return;
    }
    float t[16];
    UNROLL for (int p = 0; p < P; p++) store(t + p * W, sum[p]);
    for (int64_t i = 0; i < lanes; i++) out[i] = first ? t[i] : out[i] + t[i];
}

/* MT rows times NB blocks of outputs over kn inputs. */
#define FLOAT_TILE(name, type, read)                                                                                   \
    INLINE void name(const type *w, int64_t ldw, const float *x, int64_t ldx, float *out, int64_t ldo, int64_t lanes,  \
                     int64_t kn, int first, const int MT, const int NB) {                                              \
        vf sum[8][8][P];                                                                                               \
        UNROLL for (int m = 0; m < MT; m++) UNROLL for (int b = 0; b < NB; b++) UNROLL for (int p = 0; p < P; p++)     \
            sum[m][b][p] = (vf){0};                                                                                    \
        for (int64_t k = 0; k < kn; k++) {                                                                             \
            vf wide[8][P];                                                                                             \
            UNROLL for (int b = 0; b < NB; b++) UNROLL for (int p = 0; p < P; p++) wide[b][p] =                        \
                read(w + b * ldw + k * 16 + p * W);                                                                    \
            UNROLL for (int m = 0; m < MT; m++) {                                                                      \
                vf value = splat(x[m * ldx + k]);                                                                      \
                UNROLL for (int b = 0; b < NB; b++) UNROLL for (int p = 0; p < P; p++) sum[m][b][p] +=                 \
                    wide[b][p] * value;                                                                                \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int m = 0; m < MT; m++) UNROLL for (int b = 0; b < NB; b++)                                        \
            put(out + m * ldo + b * 16, sum[m][b], b == NB - 1 ? lanes - 16 * b : 16, first);                          \
    }

FLOAT_TILE(tile_fp32, float, load)
FLOAT_TILE(tile_fp16, uint16_t, load_half)

/* Rows and blocks that keep the sums in registers and enough of them in flight. */
#if W == 16
#define MOST_ROWS 8
#define BLOCKS_OF(rows) ((rows) == 1 ? 8 : (rows) <= 4 ? 4 : 2)
#elif W == 8
#define MOST_ROWS 6
#define BLOCKS_OF(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#elif defined(FG_ARM) /* 32 registers */
#define MOST_ROWS 6
#define BLOCKS_OF(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)
#else
#define MOST_ROWS 3
#define BLOCKS_OF(rows) ((rows) == 1 ? 2 : 1)
#endif

#define FLOAT_CASE(tile, rows, blocks)                                                                                 \
    case rows:                                                                                                         \
        tile(w, ldw, x, ldx, out, ldo, lanes, kn, first, rows, blocks);                                                \
        break;

#if MOST_ROWS == 8
#define FLOAT_CASES(tile, B)                                                                                           \
    FLOAT_CASE(tile, 1, B(1)) FLOAT_CASE(tile, 2, B(2)) FLOAT_CASE(tile, 3, B(3)) FLOAT_CASE(tile, 4, B(4))            \
    FLOAT_CASE(tile, 5, B(5)) FLOAT_CASE(tile, 6, B(6)) FLOAT_CASE(tile, 7, B(7)) FLOAT_CASE(tile, 8, B(8))
#elif MOST_ROWS == 6
#define FLOAT_CASES(tile, B)                                                                                           \
    FLOAT_CASE(tile, 1, B(1)) FLOAT_CASE(tile, 2, B(2)) FLOAT_CASE(tile, 3, B(3)) FLOAT_CASE(tile, 4, B(4))            \
    FLOAT_CASE(tile, 5, B(5)) FLOAT_CASE(tile, 6, B(6))
#else
#define FLOAT_CASES(tile, B) FLOAT_CASE(tile, 1, B(1)) FLOAT_CASE(tile, 2, B(2)) FLOAT_CASE(tile, 3, B(3))
#endif
#define ONE_BLOCK(rows) 1
#define LEAST_BLOCKS(rows) BLOCKS_OF(MOST_ROWS)

/* Several blocks of few rows; several blocks of a tile of many rows; the blocks that are left, one by one. */
#define FLOAT_LINEAR(name, type, tile)                                                                                 \
    static __attribute__((noinline)) void name##_few(const type *w, int64_t ldw, const float *x, int64_t ldx,          \
                                                     float *out, int64_t ldo, int64_t lanes, int64_t kn, int first,    \
                                                     int rows) {                                                       \
        switch (rows) { FLOAT_CASES(tile, BLOCKS_OF) }                                                                 \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_tile(const type *w, int64_t ldw, const float *x, int64_t ldx,         \
                                                      float *out, int64_t ldo, int64_t lanes, int64_t kn, int first,   \
                                                      int rows) {                                                      \
        switch (rows) { FLOAT_CASES(tile, LEAST_BLOCKS) }                                                              \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_one(const type *w, int64_t ldw, const float *x, int64_t ldx,          \
                                                     float *out, int64_t ldo, int64_t lanes, int64_t kn, int first,    \
                                                     int rows) {                                                       \
        switch (rows) { FLOAT_CASES(tile, ONE_BLOCK) }                                                                 \
    }                                                                                                                  \
    /* w, x [M, K], out [M, N], M, N, K, ldx, ldo */                                                                   \
    static void name(const Arg *a, int part, int parts) {                                                              \
        const type *weight = a[0].p;                                                                                   \
        const float *x = a[1].p;                                                                                       \
        float *out = a[2].p;                                                                                           \
        int64_t M = a[3].i, N = a[4].i, K = a[5].i, ldx = a[6].i, ldo = a[7].i, from, to;                              \
        share((N + 15) / 16, part, parts, &from, &to);                                                                 \
        int64_t tiles = (M + MOST_ROWS - 1) / MOST_ROWS;                                                               \
        int64_t group = M <= MOST_ROWS ? BLOCKS_OF(M) : LEAST_BLOCKS(0);                                               \
        for (int64_t b = from; b < to;) {                                                                              \
            int64_t blocks = b + group <= to ? group : 1, lanes = N - b * 16;                                          \
            for (int64_t k = 0; k < K; k += K_BLOCK) {                                                                 \
                int64_t kn = K - k < K_BLOCK ? K - k : K_BLOCK;                                                        \
                for (int64_t t = 0; t < tiles; t++) {                                                                  \
                    int64_t m = M * t / tiles, rows = M * (t + 1) / tiles - m;                                         \
                    const type *w = weight + (b * K + k) * 16;                                                         \
                    (blocks == 1 ? name##_one : tiles == 1 ? name##_few : name##_tile)(                                \
                        w, K * 16, x + m * ldx + k, ldx, out + m * ldo + b * 16, ldo, lanes, kn, k == 0, (int)rows);   \
                }                                                                                                      \
            }                                                                                                          \
            b += blocks;                                                                                               \
        }                                                                                                              \
    }

FLOAT_LINEAR(linear_fp32, float, tile_fp32)
FLOAT_LINEAR(linear_fp16, uint16_t, tile_fp16)

/* ---- quantised linear: groups of 32 inputs share a scale; activations are quantised per row and group to 8 bits, so
   products and their sums within a group are exact integers on every processor ---- */

/* Lane l: sum + w[4 l .. 4 l + 3] . a[0 .. 3] with w unsigned below 16 (nibbles) or any byte. Whether bytes are taken as
   they are, or less 128, is what BYTE_OFFSET says. */
#if defined(HAVE_AVX512)
#define BYTE_OFFSET 128
INLINE vi dot_bytes(vi sum, vi w, vi a) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)a); }
INLINE vi dot_nibbles(vi sum, vi w, vi a) { return dot_bytes(sum, w, a); }
#elif defined(HAVE_AVXVNNI)
#define BYTE_OFFSET 128
INLINE vi dot_bytes(vi sum, vi w, vi a) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)a); }
INLINE vi dot_nibbles(vi sum, vi w, vi a) { return dot_bytes(sum, w, a); }
#elif defined(HAVE_AVX2)
#define BYTE_OFFSET 0 /* pairs of unsigned times signed bytes overflow 16 bits, so the sign moves to the activations */
INLINE vi dot_nibbles(vi sum, vi w, vi a) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)a);
    return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE vi dot_bytes(vi sum, vi w, vi a) {
    __m256i s = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8((char)0x80));
    return dot_nibbles(sum, (vi)_mm256_abs_epi8(s), (vi)_mm256_sign_epi8((__m256i)a, s));
}
#elif defined(HAVE_DOTPROD)
#define BYTE_OFFSET 0
/* With four bytes of `q` from 4 j on: by lane, so that a row's 32 bytes take two registers and not eight. */
INLINE vi dot_nibbles_at(vi sum, vi w, const int8_t *q, int j) {
    int8x16_t a = vld1q_s8(q + j / 4 * 16);
    switch (j % 4) {
        case 0: return (vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, a, 0);
        case 1: return (vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, a, 1);
        case 2: return (vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, a, 2);
        default: return (vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, a, 3);
    }
}
INLINE vi dot_bytes_at(vi sum, vi w, const int8_t *q, int j) {
    return dot_nibbles_at(sum, (vi)veorq_s8((int8x16_t)w, vdupq_n_s8((int8_t)0x80)), q, j);
}
#elif defined(FG_ARM)
#define BYTE_OFFSET 0
INLINE vi dot_nibbles(vi sum, vi w, vi a) {
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)w), vget_low_s8((int8x16_t)a));
    int16x8_t high = vmull_high_s8((int8x16_t)w, (int8x16_t)a); /* two products fit into 16 bits */
    return (vi)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
}
INLINE vi dot_bytes(vi sum, vi w, vi a) {
    return dot_nibbles(sum, (vi)veorq_s8((int8x16_t)w, vdupq_n_s8((int8_t)0x80)), a);
}
#else
#define BYTE_OFFSET 128
INLINE vi dot_bytes(vi sum, vi w, vi a) {
    uint8_t bytes[4 * W];
    int8_t by[4];
    memcpy(bytes, &w, sizeof bytes);
    memcpy(by, &a, sizeof by);
    int32_t out[W];
    memcpy(out, &sum, sizeof out);
    for (int lane = 0; lane < W; lane++)
        out[lane] += bytes[4 * lane] * by[0] + bytes[4 * lane + 1] * by[1] + bytes[4 * lane + 2] * by[2] +
                     bytes[4 * lane + 3] * by[3];
    memcpy(&sum, out, sizeof out);
    return sum;
}
INLINE vi dot_nibbles(vi sum, vi w, vi a) { return dot_bytes(sum, w, a); }
#endif

INLINE vh load_narrow(const float *p) {
    vh v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* 32 numbers that fit into bytes. */
INLINE void store_bytes(int8_t *q, const vhi *v) {
#ifdef HAVE_AVX2
    __m256i left = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
    __m256i right = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]), all = _mm256_packs_epi16(left, right);
    _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    int32_t t[32];
    memcpy(t, v, sizeof t);
    for (int i = 0; i < 32; i++) q[i] = (int8_t)t[i];
#endif
}

/* Scales and starts of four groups, numbers and bytes of `count` of them. */
INLINE void quantize_four(const float *const *x, int8_t *q, float *scale, int32_t *start, int32_t offset,
                          int64_t count) {
    vh size[4];
    UNROLL for (int i = 0; i < 4; i++) {
        size[i] = (vh){0};
        UNROLL for (int j = 0; j < 32 / H; j++) size[i] = larger_narrow((vh)((vhi)load_narrow(x[i] + j * H) & 0x7fffffff), size[i]);
    }
    v4 most = largest_of_narrow(size), of = most / 127.0f, by = (v4)((v4i)(127.0f / most) & (most > 0.0f));
    vhi sum[4];
    UNROLL for (int i = 0; i < 4; i++) {
        vhi value[32 / H];
        sum[i] = (vhi){0};
        UNROLL for (int j = 0; j < 32 / H; j++) {
            vh whole = (load_narrow(x[i] + j * H) * by[i] + 12582912.0f) - 12582912.0f;
            value[j] = __builtin_convertvector(whole, vhi);
            sum[i] += value[j];
        }
        if (i < count) store_bytes(q + i * 32, value);
    }
    v4i first = sums_of_ints(sum) * -offset;
    memcpy(scale, &of, sizeof of);
    memcpy(start, &first, sizeof first);
}

/* x [M, K], q int8 [M, Kp], scale [M, Kp / 32], start int32 [M, Kp / 32], M, K, Kp, ldx, bits of the weights: `start`
   takes the offset of the weights' bytes out of a group's sum of products */
static void quantize(const Arg *a, int part, int parts) {
    int64_t M = a[4].i, K = a[5].i, Kp = a[6].i, ldx = a[7].i, groups = Kp / 32, from, to;
    int32_t offset = a[8].i == 8 ? BYTE_OFFSET : 8;
    share(M * groups, part, parts, &from, &to);
    int64_t m = from / groups, have = K - from % groups * 32; /* inputs of the row that are left, padding not counted */
    const float *next = (const float *)a[0].p + m * ldx + from % groups * 32;
    for (int64_t at = from; at < to; at += 4) {
        int64_t count = to - at < 4 ? to - at : 4;
        int8_t *q = (int8_t *)a[1].p + at * 32;
        float *scale = (float *)a[2].p + at, padded[4][32], scales[4];
        int32_t *start = (int32_t *)a[3].p + at, starts[4];
        const float *x[4] = {next};
        UNROLL for (int i = 0; i < 4; i++) {
            x[i] = i < count ? next : x[0];
            if (i >= count) continue;
            if (have < 32) {
                memset(padded[i], 0, sizeof padded[i]);
                memcpy(padded[i], next, have * 4);
                x[i] = padded[i];
            }
            next += 32;
            have -= 32;
            if (have > 0) continue;
            next = (const float *)a[0].p + ++m * ldx;
            have = K;
        }
        if (count == 4) {
            quantize_four(x, q, scale, start, offset, 4);
        } else {
            quantize_four(x, q, scales, starts, offset, count);
            memcpy(scale, scales, count * 4);
            memcpy(start, starts, count * 4);
        }
    }
}

INLINE vi splat_ints(int32_t x) { return x - (vi){0}; }

#ifndef HAVE_DOTPROD
INLINE vi four_bytes(const int8_t *q) {
    int32_t x;
    memcpy(&x, q, 4);
    return splat_ints(x);
}
INLINE vi dot_bytes_at(vi sum, vi w, const int8_t *q, int j) { return dot_bytes(sum, w, four_bytes(q + 4 * j)); }
INLINE vi dot_nibbles_at(vi sum, vi w, const int8_t *q, int j) { return dot_nibbles(sum, w, four_bytes(q + 4 * j)); }
#endif

typedef struct {
    const uint8_t *w;      /* q8: [group][8][16][4] bytes, value + 128; q4: [group][4][16][4], two nibbles, value + 8 */
    const uint16_t *scale; /* [group][16] halves */
    const int8_t *q;
    const float *row_scale;
    const int32_t *start;
    int64_t groups;
} Quantised;

/* Bytes of weights that are asked for ahead: several rows leave the processor little room to look ahead by itself. */
#define AHEAD(rows) ((rows) < 5 ? 4096 : 8192)

/* MT rows times one block of 16 outputs. */
#define QUANTISED_TILE(name, BITS)                                                                                     \
    INLINE void name(const Quantised *t, float *out, int64_t ldo, int64_t lanes, const int MT) {                       \
        int64_t groups = t->groups;                                                                                    \
        vf total[8][P];                                                                                                \
        UNROLL for (int m = 0; m < MT; m++) UNROLL for (int p = 0; p < P; p++) total[m][p] = (vf){0};                  \
        for (int64_t g = 0; g < groups; g++) {                                                                         \
            const uint8_t *w = t->w + g * BITS * 64;                                                                   \
            const int8_t *q = t->q + g * 32;                                                                           \
            UNROLL for (int line = 0; line < BITS; line++) __builtin_prefetch(w + AHEAD(MT) + 64 * line);                 \
            UNROLL for (int p = 0; p < P; p++) {                                                                       \
                vi sum[8];                                                                                             \
                UNROLL for (int m = 0; m < MT; m++) sum[m] = splat_ints(t->start[m * groups + g]);                     \
                if (BITS == 8) {                                                                                       \
                    UNROLL for (int j = 0; j < 8; j++) {                                                               \
                        vi wide = load_ints(w + j * 64 + p * 4 * W);                                                   \
                        UNROLL for (int m = 0; m < MT; m++) sum[m] =                                                   \
                            dot_bytes_at(sum[m], wide, q + m * groups * 32, j);                                        \
                    }                                                                                                  \
                } else {                                                                                               \
                    UNROLL for (int j = 0; j < 4; j++) {                                                               \
                        vi both = load_ints(w + j * 64 + p * 4 * W), low = both & 0x0f0f0f0f,                          \
                           high = (both >> 4) & 0x0f0f0f0f;                                                            \
                        UNROLL for (int m = 0; m < MT; m++) {                                                          \
                            sum[m] = dot_nibbles_at(sum[m], low, q + m * groups * 32, j);                              \
                            sum[m] = dot_nibbles_at(sum[m], high, q + m * groups * 32, j + 4);                         \
                        }                                                                                              \
                    }                                                                                                  \
                }                                                                                                      \
                vf scale = load_half(t->scale + g * 16 + p * W);                                                       \
                UNROLL for (int m = 0; m < MT; m++) total[m][p] +=                                                     \
                    __builtin_convertvector(sum[m], vf) * (scale * t->row_scale[m * groups + g]);                      \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int m = 0; m < MT; m++) put(out + m * ldo, total[m], lanes, 1);                                    \
    }

QUANTISED_TILE(tile_q8, 8)
QUANTISED_TILE(tile_q4, 4)

#if W == 16
#define MOST_QUANTISED 8
#define MORE_QUANTISED(tile)                                                                                           \
    QUANTISED_CASE(tile, 3) QUANTISED_CASE(tile, 4) QUANTISED_CASE(tile, 5) QUANTISED_CASE(tile, 6)                    \
    QUANTISED_CASE(tile, 7) QUANTISED_CASE(tile, 8)
#elif W == 8 || defined(HAVE_DOTPROD)
#define MOST_QUANTISED 4
#define MORE_QUANTISED(tile) QUANTISED_CASE(tile, 3) QUANTISED_CASE(tile, 4)
#else
#define MOST_QUANTISED 2
#define MORE_QUANTISED(tile)
#endif

#define QUANTISED_CASE(tile, rows)                                                                                     \
    case rows:                                                                                                         \
        tile(t, out, ldo, lanes, rows);                                                                                \
        break;

#define QUANTISED_LINEAR(name, tile, BITS)                                                                             \
    static __attribute__((noinline)) void name##_tile(const Quantised *t, float *out, int64_t ldo, int64_t lanes,      \
                                                      int rows) {                                                      \
        switch (rows) {                                                                                                \
            QUANTISED_CASE(tile, 1) QUANTISED_CASE(tile, 2)                                                            \
            MORE_QUANTISED(tile)                                                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    /* w, scales, q, row scale, start, out [M, N], M, N, K (a multiple of 32), ldo */                                \
    static void name(const Arg *a, int part, int parts) {                                                              \
        int64_t M = a[6].i, N = a[7].i, K = a[8].i, ldo = a[9].i, groups = K / 32, from, to;                           \
        int64_t tiles = (M + MOST_QUANTISED - 1) / MOST_QUANTISED;                                                     \
        share((N + 15) / 16, part, parts, &from, &to);                                                                 \
        for (int64_t b = from; b < to; b++)                                                                            \
            for (int64_t i = 0; i < tiles; i++) {                                                                      \
                int64_t m = M * i / tiles, rows = M * (i + 1) / tiles - m;                                             \
                Quantised t = {(const uint8_t *)a[0].p + b * groups * BITS * 64,                                       \
                               (const uint16_t *)a[1].p + b * groups * 16,                                             \
                               (const int8_t *)a[2].p + m * K,                                                         \
                               (const float *)a[3].p + m * groups,                                                     \
                               (const int32_t *)a[4].p + m * groups,                                                   \
                               groups};                                                                                \
                name##_tile(&t, (float *)a[5].p + m * ldo + b * 16, ldo, N - b * 16, (int)rows);                       \
            }                                                                                                          \
    }

QUANTISED_LINEAR(linear_q8, tile_q8, 8)
QUANTISED_LINEAR(linear_q4, tile_q4, 4)

/* A row's own outputs: weights and scales of one format, the number that each stands for, how many. */
typedef struct {
    void *weight, *scales;
    const int64_t *numbers;
    int64_t count;
} Own;

/* own outputs of n rows, x [n, K] (quantised: q [n, K], row scale, start), out [n, most], n, K, ldx, ldo, format (0 fp32,
   1 fp16, 2 q8, 3 q4) */
static void linear_own(const Arg *a, int part, int parts) {
    const Own *own = a[0].p;
    int64_t K = a[6].i, groups = K / 32, ldo = a[8].i, format = a[9].i;
    for (int64_t i = 0; i < a[5].i; i++) {
        float *out = (float *)a[4].p + i * ldo;
        if (format <= 1) {
            Arg c[8] = {{.p = own[i].weight}, {.p = (float *)a[1].p + i * a[7].i}, {.p = out}, {.i = 1},
                        {.i = own[i].count},  {.i = K},                            {.i = K},   {.i = ldo}};
            (format ? linear_fp16 : linear_fp32)(c, part, parts);
        } else {
            Arg c[10] = {{.p = own[i].weight},
                         {.p = own[i].scales},
                         {.p = (int8_t *)a[1].p + i * K},
                         {.p = (float *)a[2].p + i * groups},
                         {.p = (int32_t *)a[3].p + i * groups},
                         {.p = out},
                         {.i = 1},
                         {.i = own[i].count},
                         {.i = K},
                         {.i = ldo}};
            (format == 2 ? linear_q8 : linear_q4)(c, part, parts);
        }
    }
}

/* ---- rows ---- */

/* table [vocab, h], type (0 fp32, 1 fp16, 2 bf16), ids int64 [n], out [n, h], n, h */
static void embed(const Arg *a, int part, int parts) {
    int64_t h = a[5].i, from, to;
    share(a[4].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        int64_t at = ((const int64_t *)a[2].p)[i] * h;
        float *out = (float *)a[3].p + i * h;
        if (a[1].i == 0) {
            memcpy(out, (const float *)a[0].p + at, h * 4);
        } else if (a[1].i == 1) {
            const uint16_t *row = (const uint16_t *)a[0].p + at;
            for (int64_t j = 0; j < h; j++) out[j] = half_to_float(row[j]);
        } else {
            const uint16_t *row = (const uint16_t *)a[0].p + at;
            for (int64_t j = 0; j < h; j++) {
                uint32_t bits = (uint32_t)row[j] << 16;
                memcpy(out + j, &bits, 4);
            }
        }
    }
}

/* x [n, heads, h], weight [h] or [heads, h], out, n, heads, h, ldx, distance of heads in x, in weight, eps,
   gate [n, heads, h] or null, its two distances: rms_norm(x) * weight (* silu(gate)) */
static void rms_norm(const Arg *a, int part, int parts) {
    int64_t heads = a[4].i, h = a[5].i, from, to;
    share(a[3].i * heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        int64_t row = at / heads, head = at % heads;
        const float *x = (const float *)a[0].p + row * a[6].i + head * a[7].i;
        const float *w = (const float *)a[1].p + head * a[8].i;
        float *out = (float *)a[2].p + at * h;
        float factor = 1.0f / sqrtf(dot(x, x, h) / (float)h + (float)a[9].f);
        if (!a[10].p) {
            for (int64_t j = 0; j < h; j++) out[j] = x[j] * factor * w[j];
        } else {
            const float *gate = (const float *)a[10].p + row * a[11].i + head * a[12].i;
            for (int64_t j = 0; j < h; j++) out[j] = x[j] * factor * w[j] * silu(gate[j]);
        }
    }
}

/* x [n, d], out, n, d, ldx, eps */
static void l2_norm(const Arg *a, int part, int parts) {
    int64_t d = a[3].i, from, to;
    share(a[2].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const float *x = (const float *)a[0].p + i * a[4].i;
        float *out = (float *)a[1].p + i * d, factor = 1.0f / sqrtf(dot(x, x, d) + (float)a[5].f);
        for (int64_t j = 0; j < d; j++) out[j] = x[j] * factor;
    }
}

INLINE void gate_row(const float *x, float *out, int64_t inner, int64_t from, int64_t to, int64_t kind, float limit) {
    const float *up = x + inner;
    if (kind == 1) {
        for (int64_t j = from; j < to; j++) out[j] = gelu(x[j]) * up[j];
    } else if (limit == INFINITY) {
        for (int64_t j = from; j < to; j++) out[j] = silu(x[j]) * up[j];
    } else {
        for (int64_t j = from; j < to; j++) {
            float gate = silu(x[j]), value = up[j];
            gate = gate > limit ? limit : gate;
            value = value > limit ? limit : value;
            value = value < -limit ? -limit : value;
            out[j] = gate * value;
        }
    }
}

/* x [n, 2 i], gate before up, out [n, i], n, i, ldx, kind (0 silu, 1 gelu), limit of silu (infinity: none) */
static void gate_mul(const Arg *a, int part, int parts) {
    int64_t inner = a[3].i, from, to;
    share((inner + 15) / 16, part, parts, &from, &to);
    from *= 16;
    to = to * 16 < inner ? to * 16 : inner;
    for (int64_t i = 0; i < a[2].i; i++)
        gate_row((const float *)a[0].p + i * a[4].i, (float *)a[1].p + i * inner, inner, from, to, a[5].i,
                 (float)a[6].f);
}

/* x [n, heads, d], gate, out, n, heads, d, ldx, heads of x, ldgate, heads of gate, columns of gate (0: one a head) */
static void sigmoid_mul(const Arg *a, int part, int parts) {
    int64_t heads = a[4].i, d = a[5].i, from, to;
    share(a[3].i * heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        int64_t row = at / heads, head = at % heads;
        const float *x = (const float *)a[0].p + row * a[6].i + head * a[7].i;
        const float *gate = (const float *)a[1].p + row * a[8].i + head * a[9].i;
        float *out = (float *)a[2].p + at * d;
        if (a[10].i) {
            for (int64_t j = 0; j < d; j++) out[j] = x[j] / (1.0f + exp_(-gate[j]));
        } else {
            float below = 1.0f + exp_(-gate[0]);
            for (int64_t j = 0; j < d; j++) out[j] = x[j] / below;
        }
    }
}

/* x [n, heads, d], cos, sin [n, r], out, n, heads, d, r, ldx, heads of x: the first 2 r of each head, in halves */
static void rotary(const Arg *a, int part, int parts) {
    int64_t heads = a[5].i, d = a[6].i, r = a[7].i, from, to;
    share(a[4].i * heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        int64_t row = at / heads, head = at % heads;
        const float *x = (const float *)a[0].p + row * a[8].i + head * a[9].i;
        const float *cos = (const float *)a[1].p + row * r, *sin = (const float *)a[2].p + row * r;
        float *out = (float *)a[3].p + at * d;
        for (int64_t j = 0; j < r; j++) {
            out[j] = x[j] * cos[j] - x[j + r] * sin[j];
            out[j + r] = x[j + r] * cos[j] + x[j] * sin[j];
        }
        memcpy(out + 2 * r, x + 2 * r, (d - 2 * r) * 4);
    }
}

/* tables of cos, sin [positions, r], axis of each frequency int64 [r], positions int64 [axes, n], out cos, sin [n, r],
   n, r, positions in the table: one beyond it reads the last (only a guess can be there, at the end of a context) */
static void angles(const Arg *a, int part, int parts) {
    int64_t n = a[6].i, r = a[7].i, from, to;
    const int64_t *axis = a[2].p, *positions = a[3].p, last = a[8].i - 1;
    share(n, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++)
        for (int64_t j = 0; j < r; j++) {
            int64_t position = positions[axis[j] * n + i], at = (position < last ? position : last) * r + j;
            ((float *)a[4].p)[i * r + j] = ((const float *)a[0].p)[at];
            ((float *)a[5].p)[i * r + j] = ((const float *)a[1].p)[at];
        }
}

/* x [n, h], y [n, h], out, n, h, ldx, ldy */
static void add(const Arg *a, int part, int parts) {
    int64_t h = a[4].i, from, to;
    share(a[3].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const float *x = (const float *)a[0].p + i * a[5].i, *y = (const float *)a[1].p + i * a[6].i;
        float *out = (float *)a[2].p + i * h;
        for (int64_t j = 0; j < h; j++) out[j] = x[j] + y[j];
    }
}

/* x [n, h], out, n, h, ldx, factor */
static void scale(const Arg *a, int part, int parts) {
    int64_t h = a[3].i, from, to;
    float factor = (float)a[5].f;
    share(a[2].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const float *x = (const float *)a[0].p + i * a[4].i;
        float *out = (float *)a[1].p + i * h;
        for (int64_t j = 0; j < h; j++) out[j] = x[j] * factor;
    }
}

/* x [n, h], out, n, h, ldx, ldo */
static void copy(const Arg *a, int part, int parts) {
    int64_t from, to;
    share(a[2].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++)
        memcpy((float *)a[1].p + i * a[5].i, (const float *)a[0].p + i * a[4].i, a[3].i * 4);
}

/* x [n, h], out, n, h, ldx, cap: cap tanh(x / cap) */
static void softcap(const Arg *a, int part, int parts) {
    int64_t h = a[3].i, from, to;
    float cap = (float)a[5].f, inverse = 1.0f / cap;
    share((h + 15) / 16, part, parts, &from, &to);
    from *= 16;
    to = to * 16 < h ? to * 16 : h;
    for (int64_t i = 0; i < a[2].i; i++) {
        const float *x = (const float *)a[0].p + i * a[4].i;
        float *out = (float *)a[1].p + i * h;
        for (int64_t j = from; j < to; j++) out[j] = cap * tanh_(x[j] * inverse);
    }
}

/* Where the largest of x [v] is: the block that holds it first, then its place in there. */
INLINE int64_t first_of_most(const float *x, int64_t v) {
    float most = -INFINITY;
    int64_t at = 0;
    for (int64_t from = 0; from < v; from += 32 * W) {
        int64_t to = v - from < 32 * W ? v : from + 32 * W, j = from;
        vf best[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
        for (; j + 4 * W <= to; j += 4 * W)
            for (int i = 0; i < 4; i++) best[i] = larger(load(x + j + i * W), best[i]);
        vf two = larger(larger(best[0], best[1]), larger(best[2], best[3]));
        float own = two[0];
        for (int l = 1; l < W; l++) own = two[l] > own ? two[l] : own;
        for (; j < to; j++) own = x[j] > own ? x[j] : own;
        if (own > most) {
            most = own;
            at = from;
        }
    }
    while (at < v - 1 && x[at] != most) at++;
    return at;
}

#define GOLDEN 0x9E3779B97F4A7C15u

INLINE uint64_t mix(uint64_t x) { /* the finaliser of splitmix64 (Steele, Lea and Flood, 2014) */
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The noise of foreglance.sampling.gumbel_noise, from its uniform number. */
INLINE double gumbel(double uniform) { return -log(-log(uniform)); }

INLINE double uniform_of(uint64_t key, int64_t token) {
    return ((double)(mix(key + GOLDEN * ((uint64_t)token + 1)) >> 11) + 0.5) * 0x1p-53;
}

/* How likely noise is, at most, that lifts a logit to the best score. */
INLINE float chance_of(float x, double best, double inverse) {
    return exp_((float)(((double)x - best) * inverse)) * 1.001f;
}

/* Whether one of x [v], which stand for the tokens `ids` or `first` and so on, may come out best: whether the largest
   uniform number among theirs would do for the largest logit. */
INLINE int hopeful(const float *x, int64_t v, uint64_t key, int64_t first, const int64_t *ids, double best,
                   double inverse) {
    vu most = {0}, token, step = most + W / 2 * GOLDEN;
    vf top = splat(-INFINITY);
    int64_t j = 0;
    for (int l = 0; l < W / 2; l++) token[l] = key + GOLDEN * ((uint64_t)first + l + 1);
    for (; j + W <= v; j += W) {
        top = larger(load(x + j), top);
        for (int half = 0; half < 2; half++, token += step) {
            vu of = token;
            if (ids) {
                memcpy(&of, ids + j + half * W / 2, sizeof of);
                of = key + GOLDEN * (of + 1);
            }
            of = (of ^ (of >> 30)) * 0xBF58476D1CE4E5B9u;
            of = (of ^ (of >> 27)) * 0x94D049BB133111EBu;
            of = (of ^ (of >> 31)) >> 11;
            vu more = (vu)((vs)of > (vs)most);
            most = (of & more) | (most & ~more);
        }
    }
    float highest = top[0];
    uint64_t drawn = most[0];
    for (int l = 1; l < W; l++) highest = top[l] > highest ? top[l] : highest;
    for (int l = 1; l < W / 2; l++) drawn = most[l] > drawn ? most[l] : drawn;
    double uniform = ((double)drawn + 0.5) * 0x1p-53;
    for (; j < v; j++) {
        double own = uniform_of(key, ids ? ids[j] : first + j);
        uniform = own > uniform ? own : uniform;
        highest = x[j] > highest ? x[j] : highest;
    }
    return !(1.0 - uniform > chance_of(highest, best, inverse));
}

/* The first of the largest logit + temperature * noise. Noise beyond g has a chance below exp(-g), so only tokens whose
   uniform number leaves them a chance against the best so far have theirs computed. */
INLINE int64_t sampled(const float *x, int64_t v, double temperature, uint64_t seed, int64_t index,
                       const int64_t *ids) {
    uint64_t key = mix(seed + GOLDEN * ((uint64_t)index + 1));
    int64_t at = first_of_most(x, v);
    double best = x[at] + temperature * gumbel(uniform_of(key, ids ? ids[at] : at)), inverse = 1.0 / temperature;
    for (int64_t block = 0; block < v; block += 256) {
        int64_t end = v - block < 256 ? v : block + 256;
        if (!hopeful(x + block, end - block, key, block, ids ? ids + block : 0, best, inverse)) continue;
        for (int64_t from = block; from < end; from += 32) {
            int64_t to = end - from < 32 ? end : from + 32;
            if (!hopeful(x + from, to - from, key, from, ids ? ids + from : 0, best, inverse)) continue;
            for (int64_t j = from; j < to; j++) {
                double uniform = uniform_of(key, ids ? ids[j] : j);
                if (1.0 - uniform > chance_of(x[j], best, inverse)) continue;
                double score = x[j] + temperature * gumbel(uniform);
                if (score > best || (score == best && j < at)) {
                    best = score;
                    at = j;
                }
            }
        }
    }
    return at;
}

/* logits [n, v], token ids int64 [n], picks int64 [depth, n], cells (how many picks before, then for each row its
   temperature, seed and the number of its token), n, v, ld, token id of each column, ascending, or null if they are the
   columns' own numbers: as foreglance.sampling.pick without filters */
static void pick_rows(const Arg *a, int part, int parts) {
    int64_t n = a[4].i, from, to;
    const Arg *cells = a[3].p;
    const int64_t *ids = a[7].p;
    share(n, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const float *x = (const float *)a[0].p + i * a[6].i;
        const Arg *own = cells + 1 + 3 * i;
        int64_t before = cells[0].i, token;
        token = own[0].f == 0 ? first_of_most(x, a[5].i)
                              : sampled(x, a[5].i, own[0].f, (uint64_t)own[1].i, own[2].i + before, ids);
        token = ids ? ids[token] : token;
        ((int64_t *)a[1].p)[i] = token;
        ((int64_t *)a[2].p)[before * n + i] = token;
    }
}

INLINE int64_t column_of(const int64_t *ids, int64_t v, int64_t token) {
    int64_t low = 0, high = v - 1;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ids[middle] < token) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* As `pick_rows`, and behind it: own outputs of n rows, their logits [n, most], ldo: each row's pick is that of all of its
   logits. The token id of each column must be given. */
static void pick_own(const Arg *a, int part, int parts) {
    int64_t n = a[4].i, from, to;
    const Arg *cells = a[3].p;
    const int64_t *ids = a[7].p;
    share(n, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const Own *own = (const Own *)a[8].p + i;
        const float *x = (const float *)a[9].p + i * a[10].i;
        int64_t before = cells[0].i, *pick = (int64_t *)a[2].p + before * n + i, token = *pick;
        double temperature = cells[1 + 3 * i].f, inverse = 1.0 / temperature;
        uint64_t key = mix((uint64_t)cells[2 + 3 * i].i + GOLDEN * ((uint64_t)(cells[3 + 3 * i].i + before) + 1));
        double best = ((const float *)a[0].p)[i * a[6].i + column_of(ids, a[5].i, token)];
        if (temperature != 0) best += temperature * gumbel(uniform_of(key, token));
        for (int64_t j = 0; j < own->count; j++) {
            double score = x[j];
            if (temperature != 0) {
                double uniform = uniform_of(key, own->numbers[j]);
                if (1.0 - uniform > chance_of(x[j], best, inverse)) continue;
                score += temperature * gumbel(uniform);
            }
            if (score > best || (score == best && own->numbers[j] < token)) {
                best = score;
                token = own->numbers[j];
            }
        }
        ((int64_t *)a[1].p)[i] = *pick = token;
    }
}

/* cells, parts, positions int64 [axes, n], n, axes: one pick and one row further */
static void advance(const Arg *a, int part, int parts) {
    int64_t *table = a[1].p, *positions = a[2].p;
    (void)parts;
    if (part) return;
    ((int64_t *)a[0].p)[0]++;
    for (int64_t p = 0; p < table[0]; p++) table[1 + p * PART_CELLS + 2]++;
    for (int64_t i = 0; i < a[3].i * a[4].i; i++) positions[i]++;
}

/* ---- rows over what their sequence holds; the cells of `parts` and of address blocks are described in native.py ---- */

#define KEYS 0
#define VALUES 1
#define HEAD_STEP 2
#define FIRST_ROW 3

INLINE const int64_t *block_of(const int64_t *part, int64_t layer) {
    return (const int64_t *)(intptr_t)((const int64_t *)(intptr_t)part[3])[layer];
}

/* parts, layer, keys, values [n, kv heads, d], kv heads, d, ld keys, heads of keys, ld values, heads of values */
static void write_rows(const Arg *a, int part, int parts) {
    const int64_t *table = a[0].p;
    int64_t heads = a[4].i, d = a[5].i, from, to;
    share(table[0] * heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        const int64_t *own = table + 1 + at / heads * PART_CELLS, *block = block_of(own, a[1].i);
        int64_t head = at % heads, row = own[2] - block[FIRST_ROW];
        float *keys = (float *)(intptr_t)block[KEYS] + head * block[HEAD_STEP] + row * d;
        float *values = (float *)(intptr_t)block[VALUES] + head * block[HEAD_STEP] + row * d;
        for (int64_t i = 0; i < own[1]; i++) {
            memcpy(keys + i * d, (const float *)a[2].p + (own[0] + i) * a[6].i + head * a[7].i, d * 4);
            memcpy(values + i * d, (const float *)a[3].p + (own[0] + i) * a[8].i + head * a[9].i, d * 4);
        }
    }
}

#define KEY_BLOCK 32 /* keys whose weights are taken together; blocks lie on absolute rows */
#define QUERIES 16   /* queries that pass over the keys together */
#define MAX_HEAD 512

typedef struct {
    const float *query;
    float *out, *seen; /* what it gets, and that before it is divided by `weight` */
    int64_t from, to;  /* rows that it sees */
    float most, weight;
} Query;

/* Weights of the keys [from, to) of a block, added up in `seen`, which fades before. M queries, all of which see them. */
INLINE void see(float *const *seen, const float *fade, const float (*weight)[KEY_BLOCK], const float *values,
                int64_t from, int64_t to, int64_t d, const int M) {
    int64_t c = 0;
    for (; c + 4 * W <= d; c += 4 * W) {
        vf t[4][4];
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int p = 0; p < 4; p++) t[m][p] =
            load(seen[m] + c + p * W) * fade[m];
        for (int64_t j = from; j < to; j++) {
            vf v[4];
            UNROLL for (int p = 0; p < 4; p++) v[p] = load(values + j * d + c + p * W);
            UNROLL for (int m = 0; m < M; m++) {
                vf by = splat(weight[m][j]);
                UNROLL for (int p = 0; p < 4; p++) t[m][p] += v[p] * by;
            }
        }
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int p = 0; p < 4; p++) store(seen[m] + c + p * W, t[m][p]);
    }
    for (; c < d; c += W) { /* in vectors to the end: a sum of scalars may be contracted in one way or another */
        int64_t lanes = d - c < W ? d - c : W;
        UNROLL for (int m = 0; m < M; m++) {
            vf t = some(seen[m] + c, lanes) * fade[m];
            for (int64_t j = from; j < to; j++) t += some(values + j * d + c, lanes) * weight[m][j];
            store_some(seen[m] + c, t, lanes);
        }
    }
}

/* Products of M queries with four keys, in the order of `dot`. */
INLINE void four_products(const Query *q, const float *const *key, float (*score)[KEY_BLOCK], int64_t j, int64_t d,
                          float scale, const int M) {
    vf sum[4][4];
    int64_t c = 0;
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int i = 0; i < 4; i++) sum[m][i] = (vf){0};
    for (; c + W <= d; c += W) {
        vf k[4];
        UNROLL for (int i = 0; i < 4; i++) k[i] = load(key[i] + c);
        UNROLL for (int m = 0; m < M; m++) {
            vf own = load(q[m].query + c);
            UNROLL for (int i = 0; i < 4; i++) sum[m][i] += own * k[i];
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        v4 all = sums_of(sum[m]);
        for (int64_t at = c; at < d; at++)
            all += (v4){key[0][at], key[1][at], key[2][at], key[3][at]} * q[m].query[at];
        all *= scale;
        memcpy(score[m] + j, &all, sizeof all);
    }
}

/* One block of keys for M queries: softmax as it goes (Milakov and Gimelshein, 2018). Keys and values are those of row
   `at` on. Nothing is read beyond the rows that one of the queries sees, and none counts that a query does not see. */
INLINE void attend_block(Query *q, const float *keys, const float *values, int64_t at, int64_t d, float scale,
                         const int M) {
    static const int32_t number[KEY_BLOCK] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                              16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    float weight[4][KEY_BLOCK], fade[4], *seen[4];
    int64_t from[4], to[4], lowest = KEY_BLOCK, highest = 0, first = 0, last = KEY_BLOCK;
    for (int m = 0; m < M; m++) {
        from[m] = q[m].from > at ? q[m].from - at : 0;
        to[m] = q[m].to < at + KEY_BLOCK ? q[m].to - at : KEY_BLOCK;
        seen[m] = q[m].seen;
        fade[m] = 1;
        if (from[m] >= to[m]) from[m] = to[m] = 0;
        else {
            lowest = from[m] < lowest ? from[m] : lowest;
            highest = to[m] > highest ? to[m] : highest;
        }
        first = from[m] > first ? from[m] : first; /* of what all of them see */
        last = to[m] < last ? to[m] : last;
    }
    if (lowest >= highest) return;
    for (int64_t j = lowest / 4 * 4; j < highest; j += 4) {
        const float *key[4];
        UNROLL for (int i = 0; i < 4; i++) {
            int64_t row = j + i < lowest ? lowest : j + i < highest ? j + i : highest - 1;
            key[i] = keys + row * d;
        }
        four_products(q, key, weight, j, d, scale, M);
    }
    vf top[4], sum[4];
    float old[W], faded[W];
    UNROLL for (int m = 0; m < 4; m++) {
        top[m] = splat(-INFINITY);
        sum[m] = (vf){0};
        old[m] = m < M ? q[m].most : 0;
        if (m < M)
            UNROLL for (int p = 0; p < KEY_BLOCK; p += W) {
                vi own = load_ints(number + p), sees = (own >= (int32_t)from[m]) & (own < (int32_t)to[m]);
                vf score = (vf)(((vi)load(weight[m] + p) & sees) | ((vi)splat(-INFINITY) & ~sees));
                store(weight[m] + p, score);
                top[m] = larger(score, top[m]);
            }
    }
    v4 best = largest_of(top);
    UNROLL for (int m = 0; m < M; m++) best[m] = best[m] > old[m] ? best[m] : old[m];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int p = 0; p < KEY_BLOCK; p += W) {
            vi own = load_ints(number + p), sees = (own >= (int32_t)from[m]) & (own < (int32_t)to[m]);
            vf now = (vf)((vi)exps(load(weight[m] + p) - splat(best[m])) & sees);
            store(weight[m] + p, now);
            sum[m] += now;
        }
    for (int m = 0; m < W; m++) faded[m] = m < M ? old[m] - best[m] : 0;
    store(faded, exps(load(faded)));
    v4 added = sums_of(sum);
    for (int m = 0; m < M; m++) {
        if (from[m] >= to[m]) continue;
        fade[m] = faded[m];
        q[m].weight = q[m].weight * fade[m] + added[m];
        q[m].most = best[m];
    }
    last = last < first ? first : last;
    for (int m = 0; m < M; m++) {
        int64_t stop = to[m] < first ? to[m] : first;
        if (from[m] >= stop) continue;
        see(seen + m, fade + m, weight + m, values, from[m], stop, d, 1);
        fade[m] = 1;
    }
    if (first < last) see(seen, fade, weight, values, first, last, d, M);
    for (int m = 0; m < M; m++) {
        if (first < last) fade[m] = 1;
        if (last < to[m]) see(seen + m, fade + m, weight + m, values, last, to[m], d, 1);
    }
}

#if W == 16
#define QUERIES_AT_ONCE 4
#else
#define QUERIES_AT_ONCE 2
#endif

static __attribute__((noinline)) void attend_blocks(Query *q, int64_t count, const float *keys, const float *values,
                                                    int64_t at, int64_t d, float scale) {
    int64_t i = 0;
#if QUERIES_AT_ONCE == 4
    for (; i + 4 <= count; i += 4) attend_block(q + i, keys, values, at, d, scale, 4);
#endif
    for (; i + 2 <= count; i += 2) attend_block(q + i, keys, values, at, d, scale, 2);
    if (i < count) attend_block(q + i, keys, values, at, d, scale, 1);
}

/* parts, layer, query [n, heads, d], out [n, heads * d], heads, kv heads, d, ld query, heads of query, scale, window
   (0: none): row i of a part sees the rows that its cache held before, the part's rows up to its own, of all these the
   last `window` */
static void attend_rows(const Arg *a, int part, int parts) {
    const int64_t *table = a[0].p;
    int64_t heads = a[4].i, kv_heads = a[5].i, d = a[6].i, window = a[10].i, group = heads / kv_heads, from, to;
    share(table[0] * kv_heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        const int64_t *own = table + 1 + at / kv_heads * PART_CELLS, *block = block_of(own, a[1].i);
        int64_t kv = at % kv_heads, first = block[FIRST_ROW], all = own[1] * group;
        const float *keys = (const float *)(intptr_t)block[KEYS] + kv * block[HEAD_STEP];
        const float *values = (const float *)(intptr_t)block[VALUES] + kv * block[HEAD_STEP];
        for (int64_t start = 0; start < all; start += QUERIES) {
            int64_t count = all - start < QUERIES ? all - start : QUERIES, lowest = INT64_MAX, highest = 0;
            Query q[QUERIES];
            float seen[QUERIES][MAX_HEAD];
            for (int64_t i = 0; i < count; i++) {
                int64_t row = (start + i) / group, head = kv * group + (start + i) % group;
                int64_t to_row = own[2] + row + 1, from_row = window && to_row > window ? to_row - window : 0;
                from_row = from_row < first ? first : from_row;
                q[i] = (Query){(const float *)a[2].p + (own[0] + row) * a[7].i + head * a[8].i,
                               (float *)a[3].p + ((own[0] + row) * heads + head) * d,
                               seen[i], from_row, to_row, -INFINITY, 0};
                lowest = from_row < lowest ? from_row : lowest;
                highest = to_row > highest ? to_row : highest;
                memset(seen[i], 0, d * 4);
            }
            for (int64_t j = lowest / KEY_BLOCK * KEY_BLOCK; j < highest; j += KEY_BLOCK)
                attend_blocks(q, count, keys + (j - first) * d, values + (j - first) * d, j, d, (float)a[9].f);
            for (int64_t i = 0; i < count; i++) {
                float inverse = 1.0f / q[i].weight;
                for (int64_t c = 0; c < d; c++) q[i].out[c] = seen[i][c] * inverse;
            }
        }
    }
}

/* What a recurrent layer keeps of a sequence (cache/recurrent.py): the convolution's inputs, [rows, channels], of which
   those from AT on are in use; two states, of which BASE is the one to begin with; for each row what it did to the
   state, of which PENDING from FIRST on are to be repeated; whether the state behind those is to be written (RENEW), else
   that behind the last running row (EAGER: states are small enough for the caches). */
#define WINDOW 0
#define STATES 1
#define STEPS 2
#define AT 3
#define BASE 4
#define FIRST 5
#define PENDING 6
#define RENEW 7
#define EAGER 8

#define CHANNELS 1024
/* of all rows before the next ones: inputs and weights stay in the cache */

INLINE void conv_columns(const float *in, const float *w, float *out, int64_t c, int64_t width, const int V) {
    vf total[4];
    UNROLL for (int p = 0; p < V; p++) total[p] = load(in + p * W) * load(w + p * W);
    for (int64_t t = 1; t < width; t++)
        UNROLL for (int p = 0; p < V; p++) total[p] += load(in + t * c + p * W) * load(w + t * c + p * W);
    UNROLL for (int p = 0; p < V; p++) store(out + p * W, total[p]);
}

/* parts, layer, x [n, c], weight [width, c], out [n, c], c, width, ldx: causal convolution and silu */
static void conv_rows(const Arg *a, int part, int parts) {
    const int64_t *table = a[0].p;
    int64_t c = a[5].i, width = a[6].i, ldx = a[7].i, from, to;
    share((c + 15) / 16, part, parts, &from, &to);
    from *= 16;
    to = to * 16 < c ? to * 16 : c;
    for (int64_t p = 0; p < table[0]; p++) {
        const int64_t *own = table + 1 + p * PART_CELLS, *block = block_of(own, a[1].i);
        for (int64_t j = from; j < to; j += CHANNELS) {
            int64_t count = to - j < CHANNELS ? to - j : CHANNELS;
            float *window = (float *)(intptr_t)block[WINDOW] + block[AT] * c + j;
            const float *w = (const float *)a[3].p + j;
            for (int64_t i = 0; i < own[1]; i++) {
                const float *in = window + i * c;
                float *out = (float *)a[4].p + (own[0] + i) * c + j;
                int64_t k = 0;
                memcpy(window + (i + width - 1) * c, (const float *)a[2].p + (own[0] + i) * ldx + j, count * 4);
                for (; k + 4 * W <= count; k += 4 * W) conv_columns(in + k, w + k, out + k, c, width, 4);
                for (; k + W <= count; k += W) conv_columns(in + k, w + k, out + k, c, width, 1);
                for (; k < count; k++) {
                    out[k] = in[k] * w[k];
                    for (int64_t t = 1; t < width; t++) out[k] = out[k] + in[t * c + k] * w[t * c + k];
                }
                for (k = 0; k < count; k++) out[k] = silu(out[k]);
            }
        }
    }
}

/* a, b [n, heads], ld a, ld b, negative rate, bias [heads], out log decay, out beta [n, heads], n, heads */
static void delta_gates(const Arg *a, int part, int parts) {
    int64_t heads = a[9].i, from, to;
    share(a[8].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++)
        for (int64_t j = 0; j < heads; j++) {
            float step = ((const float *)a[0].p)[i * a[2].i + j] + ((const float *)a[5].p)[j];
            float plus = step > 20.0f ? step : log1pf(expf(step));
            ((float *)a[6].p)[i * heads + j] = plus * ((const float *)a[4].p)[j];
            ((float *)a[7].p)[i * heads + j] = 1.0f / (1.0f + expf(-((const float *)a[1].p)[i * a[3].i + j]));
        }
}

/* What a row did to a head's state: cells [q dk, k dk, held dv, decay, ...]; `held` is beta (v - decay state k). */
#define STEP_CELLS(dk, dv) (2 * (dk) + (dv) + 16)

/* One head of one sequence. */
typedef struct {
    const float *base;  /* [dk, dv] */
    float *renewed;     /* where the state behind the kept rows goes, or null */
    const float *kept;  /* steps of the kept rows */
    float *steps;       /* those of the running ones */
    int64_t stride;     /* from one row's step to the next one's */
    int64_t pending, rows, dk, dv;
    float *last; /* where the state behind the last running row goes, or null */
    int64_t past; /* whether states are written past the caches */
} Head;

INLINE Head head_of(const int64_t *block, int64_t head, int64_t heads, int64_t rows, int64_t dk, int64_t dv) {
    int64_t cells = STEP_CELLS(dk, dv), size = heads * dk * dv;
    float *states = (float *)(intptr_t)block[STATES] + head * dk * dv;
    float *kept = (float *)(intptr_t)block[STEPS] + (block[FIRST] * heads + head) * cells;
    float *other = states + (1 - block[BASE]) * size;
    return (Head){states + block[BASE] * size, block[RENEW] ? other : 0, kept, kept + block[PENDING] * heads * cells,
                  heads * cells, block[PENDING], rows, dk, dv, block[EAGER] && !block[RENEW] ? other : 0, !block[EAGER]};
}

/* A state behind a row; the one place where it is computed, so that a repeated row gives the same bits. */
INLINE vf moved(vf state, vf held, float decay, float k) { return state * decay + held * k; }

/* Past the caches: what is not read soon need not displace anything, nor be fetched before it is written. */
INLINE void store_past(float *p, vf v) {
#if defined(HAVE_AVX512)
    if ((uintptr_t)p % 64 == 0) {
        _mm512_stream_ps(p, (__m512)v);
        return;
    }
#elif defined(HAVE_AVX2)
    if ((uintptr_t)p % 32 == 0) {
        _mm256_stream_ps(p, (__m256)v);
        return;
    }
#endif
    store(p, v);
}

INLINE void after_stores(void) { /* that went past the caches: others see them from here on */
#ifdef FG_X86
    _mm_sfence();
#endif
}

/* Kept rows once more over columns [c, c + V vectors) of a head, into `room` and where the head wants it, and
   state k of the first running row on the way. */
INLINE void delta_again(const Head *h, float *room, vf *found, int64_t c, int64_t lanes, const int V, const int AGAIN) {
    int64_t dk = h->dk, dv = h->dv;
    const float *k = h->rows ? h->steps + dk : 0;
    vf sum[8];
    UNROLL for (int p = 0; p < V; p++) sum[p] = (vf){0};
    for (int64_t i = 0; i < dk; i++) {
        vf state[8];
        UNROLL for (int p = 0; p < V; p++) state[p] = some(h->base + i * dv + c + p * W, lanes);
        if (AGAIN) {
            for (int64_t r = 0; r < h->pending; r++) {
                const float *step = h->kept + r * h->stride;
                UNROLL for (int p = 0; p < V; p++) state[p] =
                    moved(state[p], some(step + 2 * dk + c + p * W, lanes), step[2 * dk + dv], step[dk + i]);
            }
            UNROLL for (int p = 0; p < V; p++) store(room + (i * V + p) * W, state[p]);
            if (h->renewed && lanes == W && h->past)
                UNROLL for (int p = 0; p < V; p++) store_past(h->renewed + i * dv + c + p * W, state[p]);
            else if (h->renewed && lanes == W)
                UNROLL for (int p = 0; p < V; p++) store(h->renewed + i * dv + c + p * W, state[p]);
            else if (h->renewed)
                store_some(h->renewed + i * dv + c, state[0], lanes);
        }
        if (k)
            UNROLL for (int p = 0; p < V; p++) sum[p] += state[p] * k[i];
    }
    UNROLL for (int p = 0; p < V; p++) found[p] = sum[p];
}

/* One running row: state after = decay state + k held, out = state after q; `next` k of the row behind it, for which
   the state is left in `room`; without one it goes to `last`, if that is wanted. `found` is state k of this row, then of
   the next. */
INLINE void delta_row(const float *state, int64_t ld, float *room, float *step, const float *next, const float *v,
                      float *out, float beta, vf *found, int64_t dk, int64_t dv, int64_t c, int64_t lanes, const int V,
                      const int LAST, float *last) {
    const float *q = step, *k = step + dk;
    float decay = step[2 * dk + dv];
    vf held[8], read[8], ahead[8];
    UNROLL for (int p = 0; p < V; p++) {
        held[p] = (some(v + c + p * W, lanes) - found[p] * decay) * beta;
        store_some(step + 2 * dk + c + p * W, held[p], lanes);
        read[p] = ahead[p] = (vf){0};
    }
    for (int64_t i = 0; i < dk; i++)
        UNROLL for (int p = 0; p < V; p++) {
            vf after = moved(some(state + i * ld + p * W, lanes), held[p], decay, k[i]);
            read[p] += after * q[i];
            if (LAST) {
                if (last) store_some(last + i * dv + c + p * W, after, lanes);
                continue;
            }
            store(room + (i * V + p) * W, after);
            ahead[p] += after * next[i];
        }
    UNROLL for (int p = 0; p < V; p++) {
        store_some(out + c + p * W, read[p], lanes);
        found[p] = ahead[p];
    }
}

/* Columns [c, c + V vectors) of a head: kept rows once more, then the running ones, whose values and outputs lie `ldv`
   and `ldo` apart and betas `ldb`. */
INLINE void delta_columns(const Head *h, float *room, const float *v, int64_t ldv, const float *beta, int64_t ldb,
                          float *out, int64_t ldo, int64_t c, int64_t lanes, const int V) {
    vf found[8];
    const float *state = h->pending ? room : h->base + c;
    int64_t ld = h->pending ? V * W : h->dv;
    if (h->pending)
        delta_again(h, room, found, c, lanes, V, 1);
    else
        delta_again(h, room, found, c, lanes, V, 0);
    for (int64_t r = 0; r < h->rows; r++) {
        float *step = h->steps + r * h->stride;
        const float *next = step + h->stride + h->dk;
        if (r + 1 < h->rows)
            delta_row(state, ld, room, step, next, v + r * ldv, out + r * ldo, beta[r * ldb], found, h->dk, h->dv, c,
                      lanes, V, 0, 0);
        else
            delta_row(state, ld, room, step, next, v + r * ldv, out + r * ldo, beta[r * ldb], found, h->dk, h->dv, c,
                      lanes, V, 1, h->last);
        state = room;
        ld = V * W;
    }
}

#define DELTA_VECTORS (W == 16 ? 8 : 4) /* whole rows of a state of 128 columns, if the sums are kept in registers */

static __attribute__((noinline)) void delta_head(const Head *h, const float *v, int64_t ldv, const float *beta,
                                                 int64_t ldb, float *out, int64_t ldo) {
    float space[h->dk * DELTA_VECTORS * W + 16];
    float *room = (float *)(((uintptr_t)space + 63) & ~(uintptr_t)63);
    int64_t c = 0;
    for (; c + DELTA_VECTORS * W <= h->dv; c += DELTA_VECTORS * W)
        delta_columns(h, room, v, ldv, beta, ldb, out, ldo, c, W, DELTA_VECTORS);
    for (; c + 4 * W <= h->dv; c += 4 * W) delta_columns(h, room, v, ldv, beta, ldb, out, ldo, c, W, 4);
    for (; c + W <= h->dv; c += W) delta_columns(h, room, v, ldv, beta, ldb, out, ldo, c, W, 1);
    if (c < h->dv) delta_columns(h, room, v, ldv, beta, ldb, out, ldo, c, h->dv - c, 1);
    if (h->renewed && h->past) after_stores();
}

/* address block, heads, dk, dv: the state behind the kept rows of one sequence into its place */
static void delta_commit(const Arg *a, int part, int parts) {
    int64_t heads = a[1].i, from, to;
    share(heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        Head head = head_of(a[0].p, at, heads, 0, a[2].i, a[3].i);
        delta_head(&head, 0, 0, 0, 0, 0, 0);
    }
}

/* parts, layer, mixed [n, 2 key heads dk + value heads dv], log decay, beta [n, value heads], out [n, value heads, dv],
   key heads, value heads, dk, dv, eps, scale of q, ld mixed: gated delta rule row by row. Leaves what each row did, and
   the state behind the kept rows if it is to be renewed */
static void delta_rows(const Arg *a, int part, int parts) {
    const int64_t *table = a[0].p;
    int64_t k_heads = a[6].i, v_heads = a[7].i, dk = a[8].i, dv = a[9].i, ldx = a[12].i, from, to;
    share(table[0] * v_heads, part, parts, &from, &to);
    for (int64_t at = from; at < to; at++) {
        const int64_t *own = table + 1 + at / v_heads * PART_CELLS, *block = block_of(own, a[1].i);
        int64_t at_head = at % v_heads, key_head = at_head / (v_heads / k_heads), row = own[0];
        Head head = head_of(block, at_head, v_heads, own[1], dk, dv);
        const float *mixed = (const float *)a[2].p + row * ldx;
        for (int64_t i = 0; i < own[1]; i++) {
            const float *raw_q = mixed + i * ldx + key_head * dk, *raw_k = raw_q + k_heads * dk;
            float of_q = 1.0f / sqrtf(dot(raw_q, raw_q, dk) + (float)a[10].f) * (float)a[11].f;
            float of_k = 1.0f / sqrtf(dot(raw_k, raw_k, dk) + (float)a[10].f);
            float *step = head.steps + i * head.stride;
            step[2 * dk + dv] = exp_(((const float *)a[3].p)[(row + i) * v_heads + at_head]);
            for (int64_t j = 0; j < dk; j++) {
                step[j] = raw_q[j] * of_q;
                step[dk + j] = raw_k[j] * of_k;
            }
        }
        delta_head(&head, mixed + 2 * k_heads * dk + at_head * dv, ldx, (const float *)a[4].p + row * v_heads + at_head,
                   v_heads, (float *)a[5].p + (row * v_heads + at_head) * dv, v_heads * dv);
    }
}

/* ---- mixture of experts ---- */

/* logits [n, experts], bias [experts] or null, chosen int64 [n, k], weights [n, k], n, experts, k, scoring (0 sigmoid,
   1 softmax), scratch [n, 2 experts] */
static void route(const Arg *a, int part, int parts) {
    int64_t experts = a[5].i, count = a[6].i, from, to;
    const float *bias = a[1].p;
    share(a[4].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const float *x = (const float *)a[0].p + i * experts;
        float *score = (float *)a[8].p + i * 2 * experts, *ranked = score + experts, sum = 0;
        if (a[7].i == 0) {
            for (int64_t j = 0; j < experts; j++) score[j] = 1.0f / (1.0f + exp_(-x[j]));
        } else {
            float most = x[0];
            for (int64_t j = 1; j < experts; j++) most = x[j] > most ? x[j] : most;
            for (int64_t j = 0; j < experts; j++) score[j] = exp_(x[j] - most);
            for (int64_t j = 0; j < experts; j++) sum += score[j];
            for (int64_t j = 0; j < experts; j++) score[j] /= sum;
        }
        for (int64_t j = 0; j < experts; j++) ranked[j] = bias ? score[j] + bias[j] : score[j];
        int64_t *chosen = (int64_t *)a[2].p + i * count;
        float *weights = (float *)a[3].p + i * count, total = 0;
        for (int64_t r = 0; r < count; r++) {
            int64_t best = 0;
            for (int64_t j = 1; j < experts; j++)
                if (ranked[j] > ranked[best]) best = j;
            chosen[r] = best;
            weights[r] = score[best];
            total += score[best];
            ranked[best] = -INFINITY;
        }
        for (int64_t r = 0; r < count; r++) weights[r] /= total;
    }
}

/* One product of the given format (0 fp32, 1 fp16, 2 q8, 3 q4) by one thread; `room` holds a quantised x. */
INLINE void product(int64_t format, const void *w, const void *scales, const float *x, float *out, int64_t M, int64_t N,
                    int64_t K, char *room) {
    if (format <= 1) {
        Arg c[8] = {{.p = (void *)w}, {.p = (void *)x}, {.p = out}, {.i = M}, {.i = N}, {.i = K}, {.i = K}, {.i = N}};
        (format ? linear_fp16 : linear_fp32)(c, 0, 1);
        return;
    }
    int64_t Kp = (K + 31) / 32 * 32, groups = Kp / 32;
    char *q = room, *row_scale = q + M * Kp, *start = row_scale + M * groups * 4;
    Arg b[9] = {{.p = (void *)x}, {.p = q},  {.p = row_scale}, {.p = start},              {.i = M},
                {.i = K},         {.i = Kp}, {.i = K},         {.i = format == 2 ? 8 : 4}};
    quantize(b, 0, 1);
    Arg c[10] = {{.p = (void *)w}, {.p = (void *)scales}, {.p = q}, {.p = row_scale}, {.p = start},
                 {.p = out},       {.i = M},              {.i = N}, {.i = Kp},        {.i = N}};
    (format == 2 ? linear_q8 : linear_q4)(c, 0, 1);
}

/* x [n, h], chosen int64 [n, k], addresses of gate_up [experts][2] and of down [experts][2] (weights, scales), out
   [n, k, h], n, k, experts, h, inner, limit, kind of gate, format, ldx, scratch, bytes of it for each thread: each row
   through its own experts; an expert takes all its rows in one product */
static void experts(const Arg *a, int part, int parts) {
    int64_t n = a[5].i, k = a[6].i, h = a[8].i, inner = a[9].i;
    const int64_t *chosen = a[1].p;
    char *scratch = (char *)a[14].p + part * a[15].i;
    for (int64_t e = part; e < a[7].i; e += parts) {
        int64_t *place = (int64_t *)scratch, count = 0;
        for (int64_t i = 0; i < n * k; i++)
            if (chosen[i] == e) place[count++] = i;
        if (!count) continue;
        float *x = (float *)(place + n), *mixed = x + n * h, *gated = mixed + n * 2 * inner, *y = gated + n * inner;
        char *room = (char *)(y + n * h);
        void *const *gate_up = (void *const *)a[2].p + 2 * e, *const *down = (void *const *)a[3].p + 2 * e;
        for (int64_t i = 0; i < count; i++) memcpy(x + i * h, (float *)a[0].p + place[i] / k * a[13].i, h * 4);
        product(a[12].i, gate_up[0], gate_up[1], x, mixed, count, 2 * inner, h, room);
        for (int64_t i = 0; i < count; i++)
            gate_row(mixed + i * 2 * inner, gated + i * inner, inner, 0, inner, a[11].i, (float)a[10].f);
        product(a[12].i, down[0], down[1], gated, y, count, h, inner, room);
        for (int64_t i = 0; i < count; i++) memcpy((float *)a[4].p + place[i] * h, y + i * h, h * 4);
    }
}

/* x [n, k, h], weights [n, k], out [n, h], n, k, h: the sum over k in order */
static void combine(const Arg *a, int part, int parts) {
    int64_t k = a[4].i, h = a[5].i, from, to;
    share(a[3].i, part, parts, &from, &to);
    for (int64_t i = from; i < to; i++) {
        const float *x = (const float *)a[0].p + i * k * h, *w = (const float *)a[1].p + i * k;
        float *out = (float *)a[2].p + i * h;
        for (int64_t j = 0; j < h; j++) out[j] = x[j] * w[0];
        for (int64_t r = 1; r < k; r++)
            for (int64_t j = 0; j < h; j++) out[j] = out[j] + x[r * h + j] * w[r];
    }
}

/* memory, bytes, out int64 [threads, 8]: reads all of it, to measure how fast that goes */
static void read_bytes(const Arg *a, int part, int parts) {
    int64_t from, to;
    share(a[1].i / 64, part, parts, &from, &to);
    const int32_t *at = a[0].p;
    vi sum[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = from; i + 4 * W / 16 <= to; i += W / 4)
        UNROLL for (int p = 0; p < 4; p++) sum[p] += load_ints(at + i * 16 + p * W);
    vi all = sum[0] + sum[1] + sum[2] + sum[3];
    int64_t total = 0;
    for (int l = 0; l < W; l++) total += all[l];
    ((int64_t *)a[2].p)[part * 8] = total;
}

const Isa ISA = {ISA_NAME, {
#define X(number, name) [number] = name,
                               KERNELS(X)
#undef X
                           }};
