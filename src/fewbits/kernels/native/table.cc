// The table of kernels: a linked list of the static Kernel objects.
#include "kernels.h"

namespace fewbits {

static constinit const Kernel* first =
    nullptr;  // constinit: set before any constructor runs, whatever the order in which files are initialised

Kernel::Kernel(const Layout& layout, const char* isa, bool (*runs_here)(), const Functions& functions)
    : layout(layout), isa(isa), runs_here(runs_here), of(functions), next(first) {
  first = this;
}

const Kernel* first_kernel() { return first; }

const Kernel* find_kernel(const char* format, const char* isa) {
  for (const Kernel* k = first; k; k = k->next)
    if (!std::strcmp(k->layout.format, format) && !std::strcmp(k->isa, isa)) return k;
  return nullptr;
}

const Kernel* find_packer(const char* format) {
  for (const Kernel* k = first; k; k = k->next)
    if (!std::strcmp(k->layout.format, format) && k->of.pack_row && k->runs_here()) return k;
  return nullptr;
}

}  // namespace fewbits
