#include "shape.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace explorer {

Shape shape;

void Shape::clear() {
  if (arena_ == nullptr) {
    void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      std::perror("explorer: mmap of the arena");
      std::abort();
    }
    arena_ = static_cast<char*>(memory);
  }
  words.clear();
  blocks_.clear();
  num_bytes_ = 0;
  granules.clear();
  word_of_cell_.assign(kArenaBytes / 4, kNone);
  granule_of_.assign(kArenaBytes, kNone);
}

void Shape::set_granule(int num_bytes) {
  for (granule_shift_ = 0; 1 << granule_shift_ < num_bytes;) ++granule_shift_;
}

void* Shape::allocate(size_t num_bytes, Namer name) {
  const size_t begin = num_bytes_, end = (begin + num_bytes + 63) / 64 * 64;
  if (end > kArenaBytes) {
    std::fprintf(stderr, "explorer: a program may have %zu bytes of memory\n", kArenaBytes);
    std::abort();
  }
  num_bytes_ = end;
  blocks_.push_back({begin, end, std::move(name)});
  return arena_ + begin;
}

std::string Shape::name_of(uint32_t offset) const {
  for (const Block& block : blocks_) {
    if (offset >= block.begin && offset < block.end) return block.name(offset - block.begin);
  }
  return "memory+" + std::to_string(offset);
}

uint16_t Shape::add_word(uint32_t offset, int num_bytes, bool& overlaps) {
  overlaps = offset % uint32_t(num_bytes) != 0;
  for (uint32_t at = offset; at < offset + uint32_t(num_bytes); at += 4) {
    if (word_of_cell_[at / 4] != kNone) overlaps = true;
  }
  if (overlaps) return kNone;
  const uint16_t word = uint16_t(words.size());
  words.push_back({offset, uint8_t(num_bytes), {}, {}, {}});
  for (uint32_t at = offset; at < offset + uint32_t(num_bytes); at += 4) word_of_cell_[at / 4] = word;
  return word;
}

uint16_t Shape::add_granule(uint32_t offset) {
  granules.push_back({offset, 0, 0});
  return granule_of_[offset >> granule_shift_] = uint16_t(granules.size() - 1);
}

bool Shape::is_counter(uint16_t word) const {
  int all = 0;
  for (int t = 0; t < num_threads; ++t) all |= words[word].access[t];
  return all == (kAdds | kWrites);
}

bool Shape::is_shared(uint16_t word) const {
  const Word& w = words[word];
  for (int t = 0; t < num_threads; ++t) {
    if ((w.access[t] & (kReads | kAdds | kFutexWaits | kFutexWakes)) == 0) continue;
    for (int u = 0; u < num_threads; ++u) {
      if (u != t && (w.access[u] & (kWrites | kFutexWaits | kFutexWakes)) != 0) return true;
    }
  }
  return false;
}

}  // namespace explorer

void* explorer::allocate(size_t num_bytes, Namer name) { return shape.allocate(num_bytes, std::move(name)); }
void* explorer::allocate(size_t num_bytes, const std::string& name) {
  return shape.allocate(
      num_bytes, [name](size_t offset) { return offset == 0 ? name : name + "+" + std::to_string(offset); });
}
