/* Kernels for AVX2, FMA and F16C. */
#include "fg.h"
#ifdef FG_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#define ISA isa_avx2
#define ISA_NAME "avx2"
#define W 8
#define HAVE_AVX2 1
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
