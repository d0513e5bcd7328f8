// Quantizes whole weights: searches scales, rounds weights and packs codes, a few rows at a time. The format's kernel packs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <type_traits>

#include "kernels.h"
#include "platform/threads.h"
#include "search/fitting.h"
#include "search/quantize.h"

namespace nb = nanobind;

namespace fewbits {
namespace quantize {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using List = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesInto = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Fits, encodes and packs w (rows, cols), whose groups have `run` columns. False if a weight is NaN.
template <typename Search, typename Units>
bool quantize_rows(const std::string& isa, const std::string& format, const Matrix& w, const std::optional<List>& importance,
                   size_t run, const Search& search, const Units& units, const Codes& given, const std::vector<BytesInto>& parts,
                   int threads) {
  const Searches& searches = find_searches(isa);
  const Kernel* const packer = find_packer(format.c_str());
  needs(packer, "no kernel packs this format");
  const size_t rows = w.shape(0), cols = w.shape(1), per_super = per_super_of(units), block = run * per_super;
  needs(run >= 2 && run <= kMost && run % 2 == 0 && block <= kMost && cols % block == 0 && cols % packer->layout.block == 0 &&
            cols > 0,
        "columns are whole blocks");
  needs(!importance || importance->shape(0) == cols, "there is one importance for each column");
  const size_t groups = cols / run, blocks = cols / packer->layout.block;
  std::vector<std::pair<uint8_t*, size_t>> stored;  // each part, and its bytes in a row
  for (size_t i = 0; i < kMaxFields && packer->layout.parts[i].name; ++i) {
    needs(i < parts.size() && parts[i].shape(0) == rows && parts[i].shape(1) == packer->layout.parts[i].row_bytes(blocks),
          "parts have the format's sizes");
    stored.emplace_back(parts[i].data(), parts[i].shape(1));
  }
  needs(stored.size() == parts.size(), "parts have the format's sizes");
  const size_t supers = groups / per_super,
               together = 16 / std::gcd<size_t>(16, supers);  // rows that fill all lanes of a register
  const float* const weights = importance ? importance->data() : nullptr;
  std::atomic<bool> numbers = true;
  nb::gil_scoped_release released;
  const size_t chunks = (rows + together - 1) / together;
  const size_t shares = shares_of(threads, std::min(chunks, rows * cols / (1 << 13)));
  run_shares(shares, [&](size_t share) {
    GroupGrid grid = grid_for<Search>(together * groups, per_super);
    std::vector<uint8_t> codes(together * cols);
    for (size_t chunk = chunks * share / shares; chunk < chunks * (share + 1) / shares && numbers; ++chunk) {
      const size_t first = chunk * together, count = std::min(together, rows - first);
      const Source source{w.data() + first * cols, run, weights, groups};
      if (!FitGroups{searches, given}(search, units, source, count * groups, grid)) {
        numbers = false;
        return;
      }
      searches.encode(source.x, count * groups, run, grid.scale.data(), grid.offsets ? grid.offset.data() : nullptr, given,
                      codes.data());
      for (size_t row = 0; row < count; ++row) {
        const uint8_t* fields[kMaxFields] = {};
        uint8_t* into[kMaxFields] = {};
        for (size_t i = 0; i < kMaxFields && packer->layout.grid[i].name; ++i)
          fields[i] = static_cast<const uint8_t*>(grid.field(packer->layout.grid[i].name)) +
                      row * packer->layout.grid[i].row_bytes(blocks);
        for (size_t i = 0; i < stored.size(); ++i) into[i] = stored[i].first + (first + row) * stored[i].second;
        packer->of.pack_row(packer->layout, codes.data() + row * cols, fields, cols, into);
      }
    }
  });
  return numbers;
}

template <typename Search>
bool quantize_plain(const std::string& isa, const std::string& format, const Matrix& w, const std::optional<List>& importance,
                    size_t run, const Search& search, const Codes& given, const std::vector<BytesInto>& parts, int threads) {
  if constexpr (std::is_same_v<Search, ExponentSearch>)
    needs(given.boundaries.count > 0, "exponents are for levels of their own");
  else
    needs(search.float16, "scales are stored as float16");
  return quantize_rows(isa, format, w, importance, run, search, nullptr, given, parts, threads);
}

}  // namespace
}  // namespace quantize

void register_quantize_rows(nb::module_& m) {
  using namespace quantize;
  m.def("packs", [](const std::string& format) { return find_packer(format.c_str()) != nullptr; });
  // noconvert: a mismatched array must be refused, because a silent copy would be written instead of the caller's memory.
  const auto quantize = [&](auto function) {
    m.def("quantize", function, nb::arg("isa"), nb::arg("format"), nb::arg("w").noconvert(),
          nb::arg("importance").noconvert().none(), nb::arg("run"), nb::arg("search"), nb::arg("units"), nb::arg("codes"),
          nb::arg("parts").noconvert(), nb::arg("threads"));
  };
  quantize(&quantize_rows<ScaleSearch, ScaleUnits>);
  quantize(&quantize_rows<LineSearch, LineUnits>);
  const auto plain = [&](auto function) {
    m.def("quantize", function, nb::arg("isa"), nb::arg("format"), nb::arg("w").noconvert(),
          nb::arg("importance").noconvert().none(), nb::arg("run"), nb::arg("search"), nb::arg("codes"),
          nb::arg("parts").noconvert(), nb::arg("threads"));
  };
  plain(&quantize_plain<ScaleSearch>);
  plain(&quantize_plain<LineSearch>);
  plain(&quantize_plain<ExponentSearch>);
}

}  // namespace fewbits
