/* What the files of the extension share: how a kernel is called, and the list of kernels.

   A kernel gets its arguments as an array of 64-bit cells (integer, double or address) and does its `part` of `parts`
   equal shares, so that threads can run one kernel together. Shares are cut between outputs: every output is computed
   by one thread, in an order that depends on its own row alone. A step is a list of such calls. */
#ifndef FG_H
#define FG_H

#include <stdint.h>

typedef union {
    int64_t i;
    double f;
    void *p;
} Arg;

#define MAX_ARGS 24

typedef void (*Kernel)(const Arg *a, int part, int parts);

/* One line per kernel: number and name. The arguments are described where the kernel is defined (kernels.h). */
#define KERNELS(X) \
    X(0, embed) X(1, linear_fp32) X(2, linear_fp16) X(3, quantize) X(4, linear_q8) X(5, linear_q4) X(6, rms_norm)      \
    X(7, gate_mul) X(8, sigmoid_mul) X(9, rotary) X(10, angles) X(11, write_rows) X(12, attend_rows) X(13, conv_rows)  \
    X(14, delta_gates) X(15, delta_rows) X(16, add) X(17, scale) X(18, copy) X(19, softcap) X(20, route)               \
    X(21, experts) X(22, combine) X(23, l2_norm) X(24, pick_rows) X(25, advance) X(26, read_bytes) X(27, delta_commit)  \
    X(28, linear_own) X(29, pick_own)

enum {
#define X(number, name) K_##name = number,
    KERNELS(X)
#undef X
    NUM_KERNELS
};

typedef struct {
    const char *name;
    Kernel kernels[NUM_KERNELS];
} Isa;

extern const Isa isa_portable;
#if defined(__x86_64__) || defined(_M_X64)
#define FG_X86 1
extern const Isa isa_avx2, isa_avxvnni, isa_avx512;
#elif defined(__aarch64__)
#define FG_ARM 1
#if !defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD)
#define FG_DOTPROD 1 /* the compiler can be told of dot products, or was */
extern const Isa isa_neon;
#endif
#endif

/* The parts of a step: cells [count, then per part (first row, rows, rows that its caches held before, address of the
   array of its layers' address blocks)]. */
#define PART_CELLS 4

#endif
