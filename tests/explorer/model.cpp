#include "model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace explorer {

Model model;

namespace {

// While the shape is being learnt, its final size is not known.
constexpr size_t kMostSlots = 4096, kMostGranules = 60000, kMostStores = 16384;

void load_bytes(const char* at, int num_bytes, uint64_t& value) {
  value = 0;
  std::memcpy(&value, at, size_t(num_bytes));
}

}  // namespace

void Model::make(int num_threads, bool all_are_shared, bool may_grow) {
  num_threads_ = num_threads;
  slot_of_.assign(shape.words.size(), kNone);
  slots_.clear();
  for (size_t word = 0; word < shape.words.size(); ++word) {
    if (!all_are_shared && !shape.is_shared(uint16_t(word))) continue;
    slot_of_[word] = uint16_t(slots_.size());
    slots_.push_back({0, 1, 0, uint16_t(word)});
  }
  num_slots_ = uint16_t(slots_.size());
  num_slots_max_ = may_grow ? kMostSlots : slots_.size();
  num_granules_max_ = may_grow ? kMostGranules : shape.granules.size();
  num_words_max_ = may_grow ? kMostSlots : shape.words.size();
  row_ = (size_t(num_threads) + num_slots_max_ + 15) / 16 * 16;
  slots_.resize(num_slots_max_);
  stores_.resize(kMostStores);
  knowledge_.resize(row_ * size_t(num_threads));
  watch_.resize(num_slots_max_ * size_t(num_threads));
  rows_.clear();
  granules_.resize(num_granules_max_ * size_t(2 + num_threads));
  atomics_.resize(num_words_max_ * 2 * size_t(num_threads));
  moments_.resize(atomics_.size());
}

void Model::reset() {
  num_stores_ = 0;
  num_rows_ = num_free_ = 0;
  for (uint16_t i = 0; i < num_slots_; ++i) {
    const Shape::Word& word = shape.words[slots_[i].word];
    uint64_t value;
    load_bytes(shape.arena() + word.offset, word.num_bytes, value);
    slots_[i] = {num_stores_, 1, 0, slots_[i].word};
    stores_[num_stores_++] = {value, 0, kNone, 0xff, 1};
  }
  std::fill(knowledge_.begin(), knowledge_.end(), 0);
  for (int t = 0; t < num_threads_; ++t) knowledge_of(t)[t] = 1;
  std::fill(watch_.begin(), watch_.end(), 0);
  std::fill_n(num_reads_, kMaxThreads, 0);
  doubts = {doubts.are_kept, 0, {}};
  std::fill(granules_.begin(), granules_.end(), 0);
  std::fill(atomics_.begin(), atomics_.end(), 0);
  std::fill(moments_.begin(), moments_.end(), 0);
}

void Model::add_word(uint16_t word) {
  if (num_slots_ == num_slots_max_) {
    std::fprintf(stderr, "explorer: a program may have %zu atomic words\n", num_slots_max_);
    std::abort();
  }
  slot_of_.resize(size_t(word) + 1, kNone);
  slot_of_[word] = num_slots_;
  uint64_t value;
  load_bytes(shape.arena() + shape.words[word].offset, shape.words[word].num_bytes, value);
  slots_[num_slots_++] = {num_stores_, 1, 0, word};
  stores_[num_stores_++] = {value, 0, kNone, 0xff, 1};
}

void Model::take_plain_store(uint16_t word) {
  const Slot& slot = slots_[slot_of_[word]];
  const Shape::Word& w = shape.words[word];
  load_bytes(shape.arena() + w.offset, w.num_bytes, stores_[slot.first + slot.num - 1].value);
}

int Model::num_readable(int thread, uint16_t word, bool is_sc) const {
  const uint16_t slot_idx = slot_of_[word];
  const Slot& slot = slots_[slot_idx];
  uint16_t floor = knowledge_of(thread)[num_threads_ + slot_idx];
  if (is_sc) floor = std::max(floor, slot.last_sc);
  int num = 0;
  while (num < slot.num && stores_[slot.first + slot.num - 1 - num].index >= floor) ++num;
  return num;
}

const Store& Model::readable(uint16_t word, int option) const {
  const Slot& slot = slots_[slot_of_[word]];
  return stores_[slot.first + slot.num - 1 - option];
}

void Model::join(int thread, const uint16_t* knowledge) {
  uint16_t* mine = knowledge_of(thread);
  for (size_t i = 0; i < row_; ++i) mine[i] = std::max(mine[i], knowledge[i]);
}

uint64_t Model::load(int thread, uint16_t word, int option, bool acquires) {
  const uint16_t slot_idx = slot_of_[word];
  const Store& store = readable(word, option);
  uint16_t& floor = knowledge_of(thread)[num_threads_ + slot_idx];
  floor = std::max(floor, store.index);
  note_read(thread, {slot_idx, store.index});
  reads_[thread][num_reads_[thread]++ % kKeptReads] = {slot_idx, store.index};
  if (acquires && store.knowledge != kNone) join(thread, &rows_[store.knowledge * row_]);
  return store.value;
}

uint16_t Model::new_row() {
  if (num_free_ > 0) return free_[--num_free_];
  const size_t needed = (size_t(num_rows_) + 1) * row_;
  if (rows_.size() < needed) rows_.resize(std::max(needed, rows_.size() * 2));
  return num_rows_++;
}

void Model::drop_rows_of(const Store& store) {
  if (store.knowledge == kNone) return;
  if (free_.size() <= num_free_) free_.resize(size_t(num_free_) * 2 + 64);
  free_[num_free_++] = store.knowledge;
}

bool Model::is_ordered(int thread, uint16_t word, uint64_t value, bool releases) const {
  const Store& newest = readable(word, 0);
  if (knowledge_of(thread)[num_threads_ + slot_of_[word]] == newest.index) return true;
  return !releases && newest.is_relaxed != 0 && newest.value == value;
}

void Model::store(int thread, uint16_t word, uint64_t value, bool releases, bool is_sc, bool is_rmw) {
  const uint16_t slot_idx = slot_of_[word];
  if (num_stores_ == kMostStores) {
    std::fprintf(stderr, "explorer: more than %zu stores that some thread may still read\n", kMostStores);
    std::abort();
  }
  uint16_t* mine = knowledge_of(thread);
  Store& newest = stores_[slots_[slot_idx].first + slots_[slot_idx].num - 1];
  const uint16_t index = uint16_t(newest.index + 1), carried = is_rmw ? newest.knowledge : kNone;
  mine[num_threads_ + slot_idx] = index;
  uint16_t row = kNone;
  if (releases || carried != kNone) {
    row = new_row();
    uint16_t* to = &rows_[row * row_];
    if (!releases) {
      std::memcpy(to, &rows_[carried * row_], row_ * sizeof(uint16_t));
    } else {
      std::memcpy(to, mine, row_ * sizeof(uint16_t));
      if (carried != kNone) {
        const uint16_t* also = &rows_[carried * row_];
        for (size_t i = 0; i < row_; ++i) to[i] = std::max(to[i], also[i]);
      }
    }
  }
  const Store added = {value, index, row, uint8_t(thread), uint8_t(!releases)};
  const uint16_t at = uint16_t(slots_[slot_idx].first + slots_[slot_idx].num);
  std::memmove(&stores_[at + 1], &stores_[at], size_t(num_stores_ - at) * sizeof(Store));
  stores_[at] = added;
  ++num_stores_;
  ++slots_[slot_idx].num;
  for (uint16_t i = uint16_t(slot_idx + 1); i < num_slots_; ++i) ++slots_[i].first;
  if (is_sc) slots_[slot_idx].last_sc = index;
  if (releases) release(thread);
  const Shape::Word& w = shape.words[word];
  std::memcpy(shape.arena() + w.offset, &value, w.num_bytes);
}

bool Model::has_news(int thread) const {
  const uint16_t* read = watch(thread);
  for (uint16_t i = 0; i < num_slots_; ++i) {
    if (read[i] != 0 && stores_[slots_[i].first + slots_[i].num - 1].index >= read[i]) return true;
  }
  return false;
}

void Model::forget_reads(int thread) { std::fill_n(watch(thread), num_slots_, 0); }

void Model::note_read(int thread, Read read) {
  uint16_t& oldest = watch(thread)[read.slot];
  if (oldest == 0 || read.index < oldest) oldest = uint16_t(read.index + 1);
}

bool Model::forget_reads_before(int thread, uint32_t num_reads) {
  if (num_reads_[thread] - num_reads > kKeptReads) return false;
  forget_reads(thread);
  for (uint32_t i = num_reads; i < num_reads_[thread]; ++i) note_read(thread, reads_[thread][i % kKeptReads]);
  return true;
}

void Model::see_newest(int thread) {
  for (uint16_t i = 0; i < num_slots_; ++i) {
    const uint16_t newest = stores_[slots_[i].first + slots_[i].num - 1].index;
    uint16_t& floor = knowledge_of(thread)[num_threads_ + i];
    floor = std::max(floor, newest);
  }
}

void Model::forget_old(uint32_t living) {
  uint16_t kept = 0;
  for (uint16_t i = 0; i < num_slots_; ++i) {
    Slot& slot = slots_[i];
    uint16_t floor = stores_[slot.first + slot.num - 1].index;
    for (int t = 0; t < num_threads_; ++t) {
      const bool asks = (shape.words[slot.word].access[t] & (kReads | kSets)) != 0;
      if (asks && (living >> t & 1) != 0) floor = std::min(floor, knowledge_of(t)[num_threads_ + i]);
    }
    // Below that, nothing is there any more: to know less than it is to know it.
    for (int t = 0; t < num_threads_; ++t) {
      uint16_t& mine = knowledge_of(t)[num_threads_ + i];
      mine = std::max(mine, floor);
    }
    const uint16_t first = kept;
    for (int k = slot.first; k < slot.first + slot.num; ++k) {
      if (stores_[k].index >= floor) {
        stores_[kept++] = stores_[k];
      } else {
        drop_rows_of(stores_[k]);
      }
    }
    slot.first = first;
    slot.num = uint16_t(kept - first);
  }
  num_stores_ = kept;
}

void Model::save(std::vector<char>& to) const {
  const auto add = [&to](const void* from, size_t num_bytes) {
    const char* bytes = static_cast<const char*>(from);
    to.insert(to.end(), bytes, bytes + num_bytes);
  };
  const uint16_t numbers[4] = {num_slots_, num_stores_, num_rows_, num_free_};
  add(numbers, sizeof(numbers));
  add(slots_.data(), num_slots_ * sizeof(Slot));
  add(stores_.data(), num_stores_ * sizeof(Store));
  add(knowledge_.data(), knowledge_.size() * sizeof(uint16_t));
  add(watch_.data(), watch_.size() * sizeof(uint16_t));
  add(reads_, sizeof(reads_[0]) * size_t(num_threads_));
  add(num_reads_, sizeof(num_reads_));
  add(&doubts, sizeof(doubts));
  add(rows_.data(), num_rows_ * row_ * sizeof(uint16_t));
  add(free_.data(), num_free_ * sizeof(uint16_t));
  add(granules_.data(), granules_.size() * sizeof(uint16_t));
  add(atomics_.data(), atomics_.size() * sizeof(uint16_t));
  add(moments_.data(), moments_.size() * sizeof(uint16_t));
}

const char* Model::restore(const char* from) {
  const auto take = [&from](void* to, size_t num_bytes) {
    std::memcpy(to, from, num_bytes);
    from += num_bytes;
  };
  uint16_t numbers[4];
  take(numbers, sizeof(numbers));
  num_slots_ = numbers[0];
  num_stores_ = numbers[1];
  num_rows_ = numbers[2];
  num_free_ = numbers[3];
  take(slots_.data(), num_slots_ * sizeof(Slot));
  take(stores_.data(), num_stores_ * sizeof(Store));
  take(knowledge_.data(), knowledge_.size() * sizeof(uint16_t));
  take(watch_.data(), watch_.size() * sizeof(uint16_t));
  take(reads_, sizeof(reads_[0]) * size_t(num_threads_));
  take(num_reads_, sizeof(num_reads_));
  take(&doubts, sizeof(doubts));
  take(rows_.data(), num_rows_ * row_ * sizeof(uint16_t));
  take(free_.data(), num_free_ * sizeof(uint16_t));
  take(granules_.data(), granules_.size() * sizeof(uint16_t));
  take(atomics_.data(), atomics_.size() * sizeof(uint16_t));
  take(moments_.data(), moments_.size() * sizeof(uint16_t));
  return from;
}

}  // namespace explorer
