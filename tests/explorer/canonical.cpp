#include "canonical.h"

#include <algorithm>

namespace explorer {
namespace {

// Of recorded accesses, as bits.
constexpr uint8_t kPlain = 0, kOfLoads = 1, kAtomic = 2;

template <class F>
void each(uint32_t threads, const F& f) {
  for (; threads != 0; threads &= threads - 1) f(__builtin_ctz(threads));
}

}  // namespace

void Line::number() {
  uint16_t views = 0;
  bool tells_apart = false;
  for (Tick& tick : ticks_) {
    tells_apart |= tick.has_access;
    tick.access = uint16_t(views + 1);
    if (tick.has_view && tells_apart) {
      ++views;
      tells_apart = false;
    }
    tick.view = views;
  }
}

void Canonical::make(const Model& model, bool allows_unordered_stores) {
  model_ = &model;
  allows_unordered_ = allows_unordered_stores;
  const size_t num_words = shape.words.size(), num_granules = shape.granules.size();
  std::vector<uint16_t> users(num_words, 0);
  loaders_ = acquirers_ = setters_ = word_rivals_[0] = word_rivals_[1] = users;
  for (auto& rivals : granule_rivals_) rivals.assign(num_granules, 0);
  for (size_t w = 0; w < num_words; ++w) {
    for (int t = 0; t < model.num_threads_; ++t) {
      const uint8_t access = shape.words[w].access[t];
      const auto add_if = [&](int bits, std::vector<uint16_t>& to) {
        if ((access & bits) != 0) to[w] |= uint16_t(1u << t);
      };
      add_if(0xff, users);
      add_if(kReads, loaders_);
      add_if(kReads | kAdds, acquirers_);
      add_if(kSets, setters_);
      add_if(kWrites | kNudges | kReadsSc, word_rivals_[0]);
      add_if(kWrites | kNudges, word_rivals_[kOfLoads]);
    }
  }
  for (size_t g = 0; g < num_granules; ++g) {
    const Shape::Granule& granule = shape.granules[g];
    const uint16_t w = shape.word_at(granule.offset), any = granule.readers | granule.writers;
    granule_rivals_[0][g] = any;
    granule_rivals_[kOfLoads][g] = granule.writers;
    if (w == kNone) continue;
    granule_rivals_[0][g] |= users[w];
    granule_rivals_[kOfLoads][g] |= word_rivals_[kOfLoads][w];
    word_rivals_[0][w] |= any;
    word_rivals_[kOfLoads][w] |= granule.writers;
  }
}

// ---- what is not forgotten

void Canonical::find_oldest() {
  oldest_.clear();
  floor_.clear();
  for (int i = 0; i < model_->num_slots_; ++i) {
    const Model::Slot& slot = model_->slots_[i];
    const uint16_t newest = model_->stores_[slot.first + slot.num - 1].index;
    const auto least_known = [&](uint32_t threads) {
      uint16_t least = newest;
      each(threads, [&](int t) {
        least = std::min(least, model_->knowledge_of(t)[model_->num_threads_ + i]);
      });
      return least;
    };
    const uint16_t oldest = least_known(loaders_[slot.word] & living_);
    oldest_.push_back(oldest);
    // Of who only stores there, one thing is asked: whether he knows the newest.
    const bool is_asked = !allows_unordered_ && least_known(setters_[slot.word] & living_) < newest;
    floor_.push_back(is_asked && oldest == newest ? uint16_t(newest - 1) : oldest);
  }
}

void Canonical::record(uint16_t place, uint8_t kind, int thread, uint16_t clock, uint16_t moment,
                       uint32_t rivals) {
  if (clock <= all_know_[thread]) return;
  bool is_known = true;
  each(rivals & living_ & ~(1u << thread), [&](int t) {
    is_known &= model_->knowledge_of(t)[thread] >= clock;
  });
  if (is_known) return;
  recorded_.push_back({place, clock, moment, kind, uint8_t(thread)});
  lines_[thread].add_access(clock);
}

void Canonical::find_recorded() {
  const int num_threads = model_->num_threads_;
  recorded_.clear();
  for (int t = 0; t < num_threads; ++t) {
    all_know_[t] = kNone;
    each(living_ & ~(1u << t), [&](int u) {
      all_know_[t] = std::min(all_know_[t], model_->knowledge_of(u)[t]);
    });
  }
  for (size_t g = 0; g < granule_rivals_[0].size(); ++g) {
    const uint16_t* granule = &model_->granules_[g * size_t(2 + num_threads)];
    const uint16_t place = uint16_t(g);
    if (granule[0] != 0) record(place, kPlain, granule[0] - 1, granule[1], 0, granule_rivals_[0][g]);
    for (int t = 0; t < num_threads; ++t) {
      if (granule[2 + t] == 0) continue;
      record(place, kPlain | kOfLoads, t, granule[2 + t], 0, granule_rivals_[kOfLoads][g]);
    }
  }
  size_t at = 0;
  for (size_t w = 0; w < loaders_.size(); ++w) {
    for (const uint8_t of_loads : {0, 1}) {
      for (int t = 0; t < num_threads; ++t, ++at) {
        const uint16_t clock = model_->atomics_[at];
        if (clock == 0) continue;
        record(uint16_t(w), kAtomic | of_loads, t, clock, model_->moments_[at], word_rivals_[of_loads][w]);
      }
    }
  }
}

// What each of `threads` knows, whatever it is of. Of its own clock, a thread need not be told.
const uint16_t* Canonical::known_to_all(uint32_t threads) {
  for (const Common& common : commons_) {
    if (common.threads == threads) return common.known.data();
  }
  std::vector<uint16_t> known(num_views_, kNone);
  each(threads, [&](int t) {
    const uint16_t* view = model_->knowledge_of(t);
    for (size_t i = 0; i < num_views_; ++i) {
      if (i != size_t(t)) known[i] = std::min(known[i], view[i]);
    }
  });
  commons_.push_back({threads, std::move(known)});
  return commons_.back().known.data();
}

// What of `view` is more than `known`, and told apart.
void Canonical::add_view(const uint16_t* view, const uint16_t* known) {
  const size_t num_threads = size_t(model_->num_threads_);
  for (size_t i = 0; view != nullptr && i < num_views_; ++i) {
    if (view[i] <= known[i]) continue;
    if (i < num_threads) {
      lines_[i].add_view(view[i]);
    } else if (view[i] <= floor_[i - num_threads]) {
      continue;
    }
    views_.push_back({uint16_t(i), view[i]});
  }
  views_.push_back({kNone, 0});
}

void Canonical::find_views(const uint16_t* clocks_at_join) {
  views_.clear();
  commons_.clear();
  std::vector<uint16_t> own(num_views_, 0);
  each(living_, [&](int t) {
    own[size_t(t)] = kNone;
    add_view(model_->knowledge_of(t), own.data());
    own[size_t(t)] = 0;
  });
  for (int i = 0; i < model_->num_slots_; ++i) {
    const Model::Slot& slot = model_->slots_[i];
    const uint32_t readers = acquirers_[slot.word] & living_;
    for (int k = slot.first; k < slot.first + slot.num; ++k) {
      const Store& store = model_->stores_[k];
      if (store.index < oldest_[size_t(i)]) continue;
      const bool tells = store.knowledge != kNone && readers != 0;
      add_view(tells ? &model_->rows_[store.knowledge * model_->row_] : nullptr, known_to_all(readers));
    }
  }
  if (!model_->doubts.are_kept) return;
  for (int t = 0; t < model_->num_threads_; ++t) {
    lines_[t].add_view(model_->doubts.accepted[t]);
    lines_[t].add_view(clocks_at_join[t]);
  }
}

// ---- in numbers

// The next one of views_.
const Canonical::Known* Canonical::write_view(const Known* known, std::vector<uint16_t>& to) const {
  const uint16_t num_threads = uint16_t(model_->num_threads_);
  for (; known->of != kNone; ++known) {
    const bool of_clock = known->of < num_threads;
    const uint16_t number = of_clock ? lines_[known->of].of_view(known->value)
                                     : uint16_t(known->value - floor_[known->of - num_threads]);
    if (number == 0) continue;
    to.push_back(known->of);
    to.push_back(number);
  }
  to.push_back(kNone);
  return known + 1;
}

void Canonical::write(uint32_t living, const uint16_t* clocks_at_join, std::vector<uint16_t>& to) {
  living_ = living;
  num_views_ = size_t(model_->num_threads_) + model_->num_slots_;
  for (int t = 0; t < model_->num_threads_; ++t) {
    lines_[t].clear(size_t(model_->knowledge_of(t)[t]) + 1);
  }
  find_oldest();
  find_recorded();
  find_views(clocks_at_join);
  for (int t = 0; t < model_->num_threads_; ++t) lines_[t].number();

  to.clear();
  const Known* view = views_.data();
  each(living, [&](int) { view = write_view(view, to); });
  for (int i = 0; i < model_->num_slots_; ++i) {
    const Model::Slot& slot = model_->slots_[i];
    const Store& newest = model_->stores_[slot.first + slot.num - 1];
    const uint16_t oldest = oldest_[size_t(i)];
    to.push_back(newest.index);
    to.push_back(uint16_t(newest.index - oldest));
    to.push_back(uint16_t(std::max(slot.last_sc, oldest) - oldest));
    to.push_back(!allows_unordered_ && newest.is_relaxed != 0);
    for (int k = slot.first; k < slot.first + slot.num; ++k) {
      const Store& store = model_->stores_[k];
      if (store.index < oldest) continue;
      for (int shift = 0; shift < 64; shift += 16) to.push_back(uint16_t(store.value >> shift));
      view = write_view(view, to);
    }
  }
  for (const Recorded& one : recorded_) {
    to.push_back(one.place);
    to.push_back(uint16_t(one.kind << 8 | one.thread));
    to.push_back(lines_[one.thread].of_access(one.clock));
    to.push_back(one.moment);
  }
  if (!model_->doubts.are_kept) return;
  to.push_back(uint16_t(model_->doubts.threads));
  for (int t = 0; t < model_->num_threads_; ++t) {
    to.push_back(lines_[t].of_view(model_->doubts.accepted[t]));
    to.push_back(lines_[t].of_view(clocks_at_join[t]));
  }
}

}  // namespace explorer
