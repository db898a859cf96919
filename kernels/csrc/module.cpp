// kvops._native: what Python sees. Arguments are checked here, the GIL is free while it computes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
void bind_ops(nb::module_& m);
void bind_decoder(nb::module_& m);
}  // namespace quire

NB_MODULE(_native, m) {
  using namespace quire;

  m.def("usable_kernels", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
    return names;
  }, "Instruction sets that this CPU can run, best first.");

  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that compute steps; the caller is the first.")
      .def(nb::init<int, const std::vector<int>&>(), "num_threads"_a,
           "cpus"_a = std::vector<int>())
      .def("assign", &ThreadPool::assign, "num_threads"_a, "cpus"_a = std::vector<int>(),
           "From the next step on: one pinned thread a CPU, or `num_threads` unpinned ones.")
      .def_prop_ro("num_threads", &ThreadPool::num_threads);

  bind_ops(m);
  bind_decoder(m);
}
