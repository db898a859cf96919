#include "cpu.h"

#include <stdexcept>

namespace quire {

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
  // __builtin_cpu_supports also checks (XGETBV) that the operating system saves the registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    usable.push_back(avx512_bf16_kernels());
  if (avx512) usable.push_back(avx512_kernels());
  if (avx2) usable.push_back(avx2_kernels());
#endif
  usable.push_back(portable_kernels());
  return usable;
}

const Kernels& kernels_called(const std::string& name) {
  std::string names;
  for (const Kernels* kernels : usable_kernels()) {
    if (name == kernels->name) return *kernels;
    names += names.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  throw std::invalid_argument("no kernels '" + name + "' on this CPU; there are " + names);
}

}  // namespace quire
