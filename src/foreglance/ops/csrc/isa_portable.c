/* Kernels for any processor: plain C and vector types of 16 bytes; on ARM the compiler makes NEON of them. */
#define ISA isa_portable
#define ISA_NAME "portable"
#define W 4
#include "kernels.h"
