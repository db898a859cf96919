// The instruction sets that this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace quire {

// The tables that are in this build and that this CPU can run, best first; the last one is always
// the portable one.
std::vector<const Kernels*> usable_kernels();

// The tables that compute on this CPU what another CPU's instructions would, slowly: for tests, and
// never chosen unless they are named.
std::vector<const Kernels*> emulated_kernels();

// The table called `name`, usable or emulated. std::invalid_argument: there is none, or this CPU
// cannot run it.
const Kernels& kernels_called(const std::string& name);

}  // namespace quire
