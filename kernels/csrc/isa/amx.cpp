#define QUIRE_ISA amx
#include "isa/table.h"
