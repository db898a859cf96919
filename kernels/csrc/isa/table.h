// The table of one instruction set: included once by each of the files beside it, which are
// compiled with that instruction set's flags.
#include "attention/attention.h"
#include "decoder/rows.h"
#include "kernels.h"
#include "linear/linear.h"
#include "sampling/philox.h"
#include "sampling/softmax.h"

#define QUIRE_PASTE(a, b) a##b
#define QUIRE_TABLE(isa) QUIRE_PASTE(isa, _kernels)
#define QUIRE_STRING(a) #a
#define QUIRE_NAME(isa) QUIRE_STRING(isa)

namespace quire {

const Kernels* QUIRE_TABLE(QUIRE_ISA)() {
  static constexpr Kernels table = {
      QUIRE_NAME(QUIRE_ISA),
      QUIRE_ISA::linear,
      QUIRE_ISA::shrink,
      QUIRE_ISA::most_panel_rows,
      QUIRE_ISA::input_kind,
      QUIRE_ISA::attention,
      QUIRE_ISA::attention_scratch,
      QUIRE_ISA::kTile,
      QUIRE_ISA::kAttentionRows,
      QUIRE_ISA::rms_norm,
      QUIRE_ISA::add_normed,
      QUIRE_ISA::quantize,
      QUIRE_ISA::qkv,
      QUIRE_ISA::largest,
      QUIRE_ISA::exponentials,
      QUIRE_ISA::weigh,
      QUIRE_ISA::masses,
      QUIRE_ISA::keep,
      QUIRE_ISA::uniforms,
  };
  return &table;
}

}  // namespace quire
