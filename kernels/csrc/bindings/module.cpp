// kvops._native: what Python sees. Arguments are checked here, the GIL is free while it computes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "cpu/instruction_sets.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
void bind_ops(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_head(nb::module_& m);

namespace {

std::vector<std::string> names_of(const std::vector<const Kernels*>& tables) {
  std::vector<std::string> names;
  for (const Kernels* kernels : tables) names.emplace_back(kernels->name);
  return names;
}

std::vector<LaneSpec> lanes_of(const std::vector<int>& cpus,
                               const std::vector<std::vector<int>>& owners,
                               const std::optional<Array>& board) {
  require(cpus.size() == owners.size(), "cpus and owners are not of the same length");
  const size_t size = board ? board->size() : 0;
  int32_t* words = board ? data<int32_t>(*board, "board") : nullptr;
  std::vector<LaneSpec> lanes;
  for (size_t i = 0; i < cpus.size(); ++i) {
    LaneSpec lane{cpus[i], {}};
    for (int owner : owners[i]) {
      require(owner >= 0 && static_cast<size_t>(owner) < size, "an owner that is not on the board");
      lane.owners.emplace_back(words + owner);
    }
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

}  // namespace
}  // namespace quire

NB_MODULE(_native, m) {
  using namespace quire;

  // Objects that a program has frozen (gc.freeze) live to its end: no leak.
  nb::set_leak_warnings(false);

  m.def(
      "usable_kernels", [] { return names_of(usable_kernels()); },
      "Instruction sets that this CPU can run, best first.");
  m.def(
      "emulated_kernels", [] { return names_of(emulated_kernels()); },
      "Instruction sets that tests can run on this CPU although it may lack them.");

  m.def(
      "wake",
      [](const Array& board, int owner) {
        require(owner >= 0 && static_cast<size_t>(owner) < board.size(),
                "an owner that is not on the board");
        Backlog(data<int32_t>(board, "board") + owner).wake();
      },
      "board"_a, "owner"_a, "Tell lanes of all processes that wait for a word of the board.");

  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that compute steps; the caller is the first.")
      .def(nb::init<int>(), "num_threads"_a)
      .def(
          "assign",
          [](ThreadPool& pool, const std::vector<int>& cpus,
             const std::vector<std::vector<int>>& owners,
             std::optional<Array> board) { pool.assign(lanes_of(cpus, owners, board)); },
          "cpus"_a, "owners"_a, "board"_a.none(), nb::keep_alive<1, 4>(),
          "One lane per CPU (-1: anywhere), from the next step on; `owners[i]` are the words of "
          "`board` that are not 0 while lane i must not work. Called where steps are.")
      .def_prop_ro("num_lanes", &ThreadPool::num_lanes)
      .def_prop_ro("num_loops", &ThreadPool::num_loops,
                   "The barriers so far, at the end of each loop and each step; wraps at 2^32.");

  bind_ops(m);
  bind_decoder(m);
  bind_head(m);
}
