#define QUIRE_ISA portable
#include "table.h"
