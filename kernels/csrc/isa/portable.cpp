#define QUIRE_ISA portable
#include "isa/table.h"
