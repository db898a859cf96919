#include "cpu/amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#endif

namespace quire {
namespace {

#if defined(__x86_64__)

constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // of leaf 7, EDX
constexpr unsigned kOsXsave = 1u << 27;                                   // of leaf 1, ECX
constexpr unsigned kTileState = 3u << 17;                                 // of XCR0
constexpr long kRequestPermission = 0x1023;                               // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;                                            // its XSAVE component

unsigned xcr0() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

std::string find_reason() {
  unsigned a, b, c, d;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll)
    return "this CPU lacks AMX-TILE, AMX-BF16 or AMX-INT8";
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave) || (xcr0() & kTileState) != kTileState)
    return "the operating system does not save the registers of AMX (XCR0)";
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
    return "the kernel refuses AMX: arch_prctl(ARCH_REQ_XCOMP_PERM): " +
           std::generic_category().message(errno);
  return "";
}

#else

std::string find_reason() { return "AMX is an extension of x86-64"; }

#endif

}  // namespace

const std::string& why_no_amx() {
  static const std::string reason = find_reason();
  return reason;
}

}  // namespace quire
