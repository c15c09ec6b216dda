// What the scenarios of the two gathers share: the buffers that callers read, one for all ranks or one for
// each.
#pragma once

#include "world.h"

namespace scenario {

class Gathers : public World {
 public:
  Gathers(const explorer::Arguments& given, int num_streams)
      : World(given, num_streams), is_shared_(given.get("shared", 1) != 0) {
    const int64_t script = given.get("script", 12);
    for (int i = 0; i < num_digits(script); ++i) script_.push_back(digit(script, num_digits(script), i));
    expected_ = FaultKind(given.get("expect", 0));
  }

 protected:
  void make_buffers(size_t num_bytes, const explorer::Namer& name) {
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      if (rank > 0 && is_shared_) {
        buffers_.push_back(buffers_[0]);
        continue;
      }
      const std::string whose = is_shared_ ? "shared " : "rank " + std::to_string(rank) + " ";
      buffers_.push_back(reinterpret_cast<uint64_t>(
          explorer::allocate(num_bytes, [whose, name](size_t at) { return whose + name(at); })));
    }
  }
  SymmView buffers(int rank) const {
    return {buffers_.data(), rank, shape_.num_ranks, is_shared_ ? buffers_[0] : 0};
  }
  const uint32_t* words_at(int rank, uint64_t offset) const {
    return reinterpret_cast<const uint32_t*>(buffers_[size_t(rank)] + offset);
  }
  // At the end of a script. Where a fault is expected, this cannot be.
  void check_ended_well(int rank, int channel) const {
    if (channel == 0 && expected_ != FaultKind::kNone) {
      explorer::fail("fault", "rank %d: calls that must not follow each other ended well", rank);
    }
  }

  const bool is_shared_;
  // Of every rank, a digit for a step of its caller.
  std::vector<int> script_;

 private:
  std::vector<uint64_t> buffers_;
};

}  // namespace scenario
