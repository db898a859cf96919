#define QUIRE_ISA avx2
#include "isa/table.h"
