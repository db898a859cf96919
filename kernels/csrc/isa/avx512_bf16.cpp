#define QUIRE_ISA avx512_bf16
#include "isa/table.h"
