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
#include "search/quantize.h"

namespace nb = nanobind;

namespace fewbits {
namespace quantize {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using List = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesInto = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The grid of a few rows: as it is packed, and as floats for rounding weights.
struct Rows {
  std::vector<float> scale, offset;
  std::vector<uint16_t> d, minimum;
  std::vector<uint8_t> sub, sub_min;
  bool offsets = false, exponents = false;

  const void* field(const std::string& name) const {
    if (name == "scales" && exponents) return sub.data();
    if (name == "d" || name == "scales") return d.data();
    if (name == "m" || name == "dmin") return minimum.data();
    if (name == "sub") return sub.data();
    if (name == "sub_min") return sub_min.data();
    throw std::invalid_argument("no search finds a `" + name + "`");
  }
};

float half_value(uint16_t bits) {
  uint8_t bytes[2];
  std::memcpy(bytes, &bits, 2);
  return float16_at(bytes);
}

// The ways of fitting rows: each writes the grid of `groups` groups of its source.
struct Fit {
  const Searches& searches;
  const Codes& codes;

  bool operator()(const ExponentSearch& search, std::nullptr_t, const Source& source, size_t groups, Rows& rows) const {
    if (!searches.exponents(source, search, codes, 0, groups, rows.sub.data())) return false;
    for (size_t i = 0; i < groups; ++i)
      rows.scale[i] = rows.sub[i] ? std::bit_cast<float>(static_cast<uint32_t>(rows.sub[i]) << 23) : 0x1p-127f;
    return true;
  }

  bool operator()(const ScaleSearch& search, std::nullptr_t, const Source& source, size_t groups, Rows& rows) const {
    if (!searches.scales(source, search, 0, groups, rows.scale.data())) return false;
    std::transform(rows.scale.begin(), rows.scale.begin() + groups, rows.d.begin(), float16_bits);
    return true;
  }

  bool operator()(const LineSearch& search, std::nullptr_t, const Source& source, size_t groups, Rows& rows) const {
    if (!searches.lines(source, search, 0, groups, rows.scale.data(), rows.offset.data())) return false;
    for (size_t i = 0; i < groups; ++i) {
      rows.d[i] = float16_bits(rows.scale[i]);
      rows.offset[i] = -rows.offset[i];
      rows.minimum[i] = float16_bits(rows.offset[i]);
    }
    return true;
  }

  bool operator()(const ScaleSearch& search, const ScaleUnits& units, const Source& source, size_t groups, Rows& rows) const {
    int8_t* const subs = reinterpret_cast<int8_t*>(rows.sub.data());
    if (!searches.sub_scales(source, search, units, nullptr, 0, groups / units.per_super, subs, rows.d.data())) return false;
    for (size_t i = 0; i < groups; ++i) rows.scale[i] = half_value(rows.d[i / units.per_super]) * static_cast<float>(subs[i]);
    return true;
  }

  bool operator()(const LineSearch& search, const LineUnits& units, const Source& source, size_t groups, Rows& rows) const {
    if (!searches.sub_lines(source, search, units, nullptr, nullptr, 0, groups / units.per_super, rows.sub.data(),
                            rows.sub_min.data(), rows.d.data(), rows.minimum.data()))
      return false;
    for (size_t i = 0; i < groups; ++i) {
      rows.scale[i] = half_value(rows.d[i / units.per_super]) * static_cast<float>(rows.sub[i]);
      rows.offset[i] = -(half_value(rows.minimum[i / units.per_super]) * static_cast<float>(rows.sub_min[i]));
    }
    return true;
  }
};

size_t per_super_of(std::nullptr_t) { return 1; }
size_t per_super_of(const ScaleUnits& units) { return units.per_super; }
size_t per_super_of(const LineUnits& units) { return units.per_super; }

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
    Rows grid;
    grid.offsets = std::is_same_v<Search, LineSearch>;
    grid.exponents = std::is_same_v<Search, ExponentSearch>;
    const size_t most = together * groups;
    grid.scale.resize(most);
    grid.d.resize(most);
    if (grid.offsets) {
      grid.offset.resize(most);
      grid.minimum.resize(most);
    }
    if (per_super > 1 || grid.exponents) {
      grid.sub.resize(most);
      grid.sub_min.resize(most);
    }
    std::vector<uint8_t> codes(together * cols);
    for (size_t chunk = chunks * share / shares; chunk < chunks * (share + 1) / shares && numbers; ++chunk) {
      const size_t first = chunk * together, count = std::min(together, rows - first);
      const Source source{w.data() + first * cols, run, weights, groups};
      if (!Fit{searches, given}(search, units, source, count * groups, grid)) {
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
