#define QUIRE_ISA amx
#include "table.h"
