// Error feedback, a column at a time (search/error_feedback.cc) and block after block (search/feedback_rows.cc): for levels that
// are found in each of the three ways.
#include <algorithm>
#include <cmath>

#include "search/feedback.h"
#include "searching.h"

namespace fewbits::checks {
namespace {

constexpr size_t kRows = 83, kColumns = 64, kSize = kRows * kColumns;  // a strip of rows and a part of one

struct Ladder {
  std::vector<float> values, boundaries, by_code;
  std::vector<uint8_t> codes;
  bool consecutive;

  Ladder(const std::vector<float>& levels, bool consecutive)
      : values(levels), by_code(256), codes(levels.size()), consecutive(consecutive) {
    for (size_t i = 0; i < levels.size(); ++i) {
      codes[i] = static_cast<uint8_t>(i);
      by_code[i] = levels[i];
      if (i) boundaries.push_back((levels[i - 1] + levels[i]) / 2);
    }
  }

  // Those that are not consecutive have a code of -0 too.
  FeedbackLevels levels() const {
    const int minus_zero = consecutive ? -1 : 255;
    return {values.size(), consecutive, values.data(), boundaries.data(), codes.data(), by_code.data(), minus_zero};
  }
};

std::vector<float> numbers(float first, size_t count, float bend) {  // `bend`: steps grow with the distance from 0
  std::vector<float> made;
  for (size_t i = 0; i < count; ++i) {
    const float at = first + static_cast<float>(i);
    made.push_back(at + bend * at * std::abs(at));
  }
  return made;
}

Guarded<float> drawn(float middle, float around, size_t count, Random& random) {
  Guarded<float> made(count);
  for (size_t i = 0; i < count; ++i) made[i] = middle + around * random.symmetric();
  return made;
}

Results visit_twice(const std::string& isa, const Ladder& ladder, bool offsets) {
  Random random(ladder.values.size());
  const FeedbackVisit visit = find_feedback(isa.c_str());
  const Guarded<float> weights = drawn(0, 10, kSize, random), coupling = drawn(0, 0.1f, kColumns * kColumns, random),
                       offset = drawn(0, 3, kSize, random);
  Guarded<float> targets = drawn(0, 10, kSize, random), scale = drawn(1, 0.75f, kSize, random), errors(kSize);
  Guarded<uint8_t> codes(kSize);
  for (size_t i = 0; i < kSize; i += 97) scale[i] = 0;
  FeedbackTile tile{kColumns,        kRows,        targets.data(), weights.data(),
                    errors.data(),   codes.data(), scale.data(),   offsets ? offset.data() : nullptr,
                    coupling.data(), kColumns,     false};
  Results results;
  for (const bool keeps : {false, true}) {
    tile.keep = keeps;
    for (size_t strip = 0; strip < feedback_strips(kRows); ++strip) visit_feedback_strip(visit, tile, ladder.levels(), strip);
    keep(results, keeps ? "codes of another visit" : "codes of a visit", codes);
    keep(results, keeps ? "errors of another visit" : "errors of a visit", errors);
    for (size_t i = 0; i < kSize; ++i) targets[i] += random.symmetric();
  }
  return results;
}

// All steps of the loop over two blocks of columns, with scales that are given.
Results feed_back_twice(const std::string& isa, const Ladder& ladder, bool offsets) {
  constexpr size_t kBlock = kColumns / 2;
  Random random(ladder.values.size() + 1);
  const Guarded<float> w = drawn(0, 10, kSize, random), scale = drawn(1, 0.75f, kSize, random),
                       offset = drawn(0, 3, kSize, random), weight = drawn(1, 0.5f, kColumns, random);
  const auto coupling = [&](size_t rows, size_t columns) { return drawn(0, 0.1f, rows * columns, random); };
  const Guarded<float> ahead = coupling(kColumns, kColumns), forward = coupling(kColumns, kColumns),
                       every = coupling(kColumns, kColumns), others = coupling(kBlock, kColumns),
                       inside = coupling(kBlock, kBlock), hessian = drawn(1, 0.5f, kBlock * kBlock, random);
  Guarded<int64_t> natural(kColumns);
  for (size_t i = 0; i < kColumns; ++i) natural[i] = static_cast<int64_t>(kColumns - 1 - i);
  Guarded<uint8_t> codes(kSize);
  const FeedbackPart part{others.data(), inside.data(), hessian.data(), nullptr};
  const FeedbackOrder order{kColumns,     natural.data(), {0, kBlock, kColumns}, weight.data(),
                            ahead.data(), forward.data(), every.data(),          nullptr,
                            nullptr,      {part, part}};
  const FeedbackRows rows{w.data(), kRows, 2, 1, scale.data(), offsets ? offset.data() : nullptr, codes.data(), {}};
  Results results;
  if (!feed_back(order, rows, nullptr, isa, ladder.levels(), 0, kRows)) fail("error feedback refuses numbers");
  keep(results, "codes of the loop over blocks", codes);
  return results;
}

}  // namespace

void check_feedback(Digest& digest) {
  const Ladder ladders[] = {Ladder(numbers(-8, 16, 0), true), Ladder(numbers(-7, 15, 0.1f), false),
                            Ladder(numbers(-60, 121, 0.01f), false)};
  for (const Ladder& ladder : ladders)
    for (const bool offsets : {false, true}) {
      check_same(digest, "error feedback", [&](const std::string& isa) { return visit_twice(isa, ladder, offsets); });
      check_same(digest, "error feedback", [&](const std::string& isa) { return feed_back_twice(isa, ladder, offsets); });
    }
}

}  // namespace fewbits::checks
