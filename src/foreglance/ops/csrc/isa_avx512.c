/* Kernels for AVX-512 with VNNI. */
#include "fg.h"
#ifdef FG_X86
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi,bmi2,prefer-vector-width=512")
#endif
#define ISA isa_avx512
#define ISA_NAME "avx512"
#define W 16
#define HAVE_AVX512 1
#define HAVE_AVX2 1
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
