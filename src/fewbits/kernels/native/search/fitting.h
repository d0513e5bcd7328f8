// From some rows of a weight to their grid, whatever the search: for quantizing whole weights (quantize_rows.cc) and for error
// feedback, which fits a block of columns at a time (feedback_rows.cc).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "search/quantize.h"
#include "search/vectors.h"

namespace fewbits {
namespace quantize {

// The grid of some groups: as it is stored, and as floats for rounding weights.
struct GroupGrid {
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

inline float half_value(uint16_t bits) {
  uint8_t bytes[2];
  std::memcpy(bytes, &bits, 2);
  return float16_at(bytes);
}

// The ways of fitting rows: each writes the grid of `groups` groups of its source.
struct FitGroups {
  const Searches& searches;
  const Codes& codes;

  bool operator()(const ExponentSearch& search, std::nullptr_t, const Source& source, size_t groups, GroupGrid& rows) const {
    if (!searches.exponents(source, search, codes, 0, groups, rows.sub.data())) return false;
    for (size_t i = 0; i < groups; ++i)
      rows.scale[i] = rows.sub[i] ? std::bit_cast<float>(static_cast<uint32_t>(rows.sub[i]) << 23) : 0x1p-127f;
    return true;
  }

  bool operator()(const ScaleSearch& search, std::nullptr_t, const Source& source, size_t groups, GroupGrid& rows) const {
    if (!searches.scales(source, search, 0, groups, rows.scale.data())) return false;
    std::transform(rows.scale.begin(), rows.scale.begin() + groups, rows.d.begin(), float16_bits);
    return true;
  }

  bool operator()(const LineSearch& search, std::nullptr_t, const Source& source, size_t groups, GroupGrid& rows) const {
    if (!searches.lines(source, search, 0, groups, rows.scale.data(), rows.offset.data())) return false;
    for (size_t i = 0; i < groups; ++i) {
      rows.d[i] = float16_bits(rows.scale[i]);
      rows.offset[i] = -rows.offset[i];
      rows.minimum[i] = float16_bits(rows.offset[i]);
    }
    return true;
  }

  bool operator()(const ScaleSearch& search, const ScaleUnits& units, const Source& source, size_t groups,
                  GroupGrid& rows) const {
    int8_t* const subs = reinterpret_cast<int8_t*>(rows.sub.data());
    if (!searches.sub_scales(source, search, units, nullptr, 0, groups / units.per_super, subs, rows.d.data())) return false;
    for (size_t i = 0; i < groups; ++i) rows.scale[i] = half_value(rows.d[i / units.per_super]) * static_cast<float>(subs[i]);
    return true;
  }

  bool operator()(const LineSearch& search, const LineUnits& units, const Source& source, size_t groups, GroupGrid& rows) const {
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

inline size_t per_super_of(std::nullptr_t) { return 1; }
inline size_t per_super_of(const ScaleUnits& units) { return units.per_super; }
inline size_t per_super_of(const LineUnits& units) { return units.per_super; }

template <typename Search>
GroupGrid grid_for(size_t groups, size_t per_super) {
  GroupGrid grid;
  grid.offsets = std::is_same_v<Search, LineSearch>;
  grid.exponents = std::is_same_v<Search, ExponentSearch>;
  grid.scale.resize(groups);
  grid.d.resize(groups);
  if (grid.offsets) {
    grid.offset.resize(groups);
    grid.minimum.resize(groups);
  }
  if (per_super > 1 || grid.exponents) {
    grid.sub.resize(groups);
    grid.sub_min.resize(groups);
  }
  return grid;
}

}  // namespace quantize

// Finds the scales of a block of columns in a few rows.
class Fitter {
 public:
  struct Field {  // of the grid, as it is stored
    std::string name;
    size_t bytes;  // of a row
  };

  // Where scales and offsets of (rows, groups) are written, and each field.
  struct Into {
    float *scale, *offset;
    std::vector<uint8_t*> fields;
  };

  const size_t columns, group;  // of the block, and under one scale
  const bool offsets;
  const std::vector<Field> fields;

  virtual ~Fitter() = default;
  // x (rows, columns), weight (columns,). False if a weight is not a number that the search can take.
  virtual bool fit(const std::string& isa, const float* x, size_t rows, const float* weight, const Into& into) const = 0;

 protected:
  Fitter(size_t columns, size_t group, bool offsets, std::vector<Field> fields)
      : columns(columns), group(group), offsets(offsets), fields(std::move(fields)) {}
};

template <typename Search, typename Units>
class GroupFitter final : public Fitter {
 public:
  GroupFitter(size_t columns, size_t group, const Search& search, const Units& units, const quantize::Codes& codes,
              std::vector<Field> fields)
      : Fitter(columns, group, std::is_same_v<Search, quantize::LineSearch>, std::move(fields)),
        search_(search),
        units_(units),
        codes_(codes) {}

  bool fit(const std::string& isa, const float* x, size_t rows, const float* weight, const Into& into) const override {
    const size_t groups = columns / group;
    quantize::GroupGrid grid = quantize::grid_for<Search>(rows * groups, quantize::per_super_of(units_));
    const quantize::Source source{x, group, weight, groups};
    if (!quantize::FitGroups{quantize::find_searches(isa), codes_}(search_, units_, source, rows * groups, grid)) return false;
    std::copy(grid.scale.begin(), grid.scale.end(), into.scale);
    if (offsets) std::copy(grid.offset.begin(), grid.offset.end(), into.offset);
    for (size_t i = 0; i < fields.size(); ++i) std::memcpy(into.fields[i], grid.field(fields[i].name), rows * fields[i].bytes);
    return true;
  }

 private:
  Search search_;
  Units units_;
  quantize::Codes codes_;
};

// Of codes that stand for vectors, whose fields are `sub`, `d` and perhaps `shift`. The book must outlive it.
class VectorFitter final : public Fitter {
 public:
  VectorFitter(const vectors::Book& book, const vectors::Fit& given, std::vector<Field> fields)
      : Fitter(vectors::kBlock, given.group, given.group_shift != 0, std::move(fields)), book_(book), given_(given) {}

  bool fit(const std::string& isa, const float* x, size_t rows, const float* weight, const Into& into) const override {
    if (!std::all_of(x, x + rows * columns, [](float each) { return std::isfinite(each); })) return false;
    const size_t groups = columns / group;
    std::vector<int8_t> sub(rows * groups), shift(offsets ? rows * groups : 0);
    std::vector<uint16_t> d(rows);
    vectors::find_searches(isa).fit(book_, given_, {x, weight, columns, sub.data(), offsets ? shift.data() : nullptr, d.data()},
                                    0, rows);
    for (size_t i = 0; i < rows * groups; ++i) {
      into.scale[i] = float_of(d[i / groups]) * static_cast<float>(sub[i]);
      if (offsets) into.offset[i] = into.scale[i] * static_cast<float>(shift[i]) * given_.group_shift;
    }
    for (size_t i = 0; i < fields.size(); ++i) {
      const std::string& name = fields[i].name;
      const void* const found = name == "sub" ? static_cast<const void*>(sub.data())
                                : name == "d" ? static_cast<const void*>(d.data())
                                              : static_cast<const void*>(shift.data());
      std::memcpy(into.fields[i], found, rows * fields[i].bytes);
    }
    return true;
  }

 private:
  const vectors::Book& book_;
  vectors::Fit given_;
};

}  // namespace fewbits
