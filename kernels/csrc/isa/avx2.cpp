#define QUIRE_ISA avx2
#include "table.h"
