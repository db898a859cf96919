#define QUIRE_ISA amx_emulated
#define QUIRE_EMULATES_AMX
#include "amx_model.h"
#include "isa/table.h"
