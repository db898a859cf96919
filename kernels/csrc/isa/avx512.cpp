#define QUIRE_ISA avx512
#include "table.h"
