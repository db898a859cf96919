// What this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace quire {

// The tables that this build has and this CPU can run, best first; the portable one is always last.
std::vector<const Kernels*> usable_kernels();

// The one called `name`. std::invalid_argument: no such one, or this CPU cannot run it.
const Kernels& kernels_called(const std::string& name);

}  // namespace quire
