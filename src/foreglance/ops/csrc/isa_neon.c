/* Kernels for 64-bit ARM with dot products of bytes. */
#include "fg.h"
#ifdef FG_DOTPROD
#include <arm_neon.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define ISA isa_neon
#define ISA_NAME "neon"
#define W 4
#define HAVE_DOTPROD 1
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
