/* Kernels for AVX2 with the 8-bit dot products of AVX-VNNI. */
#include "fg.h"
#ifdef FG_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,avxvnni")
#endif
#define ISA isa_avxvnni
#define ISA_NAME "avx2+vnni"
#define W 8
#define HAVE_AVX2 1
#define HAVE_AVXVNNI 1
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
