// Whether this process may use AMX.
#pragma once

#include <string>

namespace quire {

// Why tiles of bf16 and int8 cannot be used here; empty: they can. The first call asks the kernel
// for permission, which holds for all threads of the process.
const std::string& why_no_amx();

}  // namespace quire
