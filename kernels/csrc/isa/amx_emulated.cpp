#define QUIRE_ISA amx_emulated
#define QUIRE_EMULATES_AMX
#include "isa/table.h"
