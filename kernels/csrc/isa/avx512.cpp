#define QUIRE_ISA avx512
#include "isa/table.h"
