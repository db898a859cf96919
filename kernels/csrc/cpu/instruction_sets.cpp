#include "cpu/instruction_sets.h"

#include <stdexcept>

#include "cpu/amx.h"

namespace quire {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports also checks (XGETBV) that the operating system saves the registers.
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
  const bool avx2 = has_avx2();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") &&
                           __builtin_cpu_supports("avx512vnni") &&
                           __builtin_cpu_supports("avx512vbmi");
  if (avx512_bf16 && why_no_amx().empty()) usable.push_back(amx_kernels());
  // AMD multiplies bf16 numbers at twice the rate of fp32. Intel's cores, but for their AMX, do it
  // at half of it: there it is faster to widen them first.
  const bool widens = __builtin_cpu_is("intel");
  if (avx512 && widens) usable.push_back(avx512_kernels());
  if (avx512_bf16) usable.push_back(avx512_bf16_kernels());
  if (avx512 && !widens) usable.push_back(avx512_kernels());
  if (avx2) usable.push_back(avx2_kernels());
#endif
  usable.push_back(portable_kernels());
  return usable;
}

std::vector<const Kernels*> emulated_kernels() {
#if defined(QUIRE_EMULATED_AMX)
  if (has_avx2()) return {amx_emulated_kernels()};
#endif
  return {};
}

const Kernels& kernels_called(const std::string& name) {
  for (const Kernels* kernels : emulated_kernels())
    if (name == kernels->name) return *kernels;
  std::string names;
  for (const Kernels* kernels : usable_kernels()) {
    if (name == kernels->name) return *kernels;
    names += names.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  const std::string reason = name == "amx" ? why_no_amx() : "";
  throw std::invalid_argument("no kernels '" + name + "' on this CPU; there are " + names +
                              (reason.empty() ? "" : ": " + reason));
}

}  // namespace quire
