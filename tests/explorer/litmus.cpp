#include "explorer.h"
#include <cstdint>
using namespace explorer;
namespace {
struct Memory {
  uint64_t x, pad[7], y, pad2[7];
  uint64_t r[4];
};
class Mp : public Program {
 public:
  Mp(int64_t rel, int64_t acq) : rel_(rel), acq_(acq) {}
  Options options() const override { return {.threads = {{0, 0}, {1, 0}}}; }
  void set_up() override { m_ = allocate_array<Memory>(1, "m"); }
  void run(int t) const override {
    if (t == 0) {
      __atomic_store_n(&m_->x, 1, __ATOMIC_RELAXED);
      if (rel_)
        __atomic_store_n(&m_->y, 1, __ATOMIC_RELEASE);
      else
        __atomic_store_n(&m_->y, 1, __ATOMIC_RELAXED);
    } else {
      m_->r[0] = acq_ ? __atomic_load_n(&m_->y, __ATOMIC_ACQUIRE) : __atomic_load_n(&m_->y, __ATOMIC_RELAXED);
      m_->r[1] = __atomic_load_n(&m_->x, __ATOMIC_RELAXED);
    }
  }
  std::string outcome() const override { return std::to_string(m_->r[0]) + std::to_string(m_->r[1]); }
  int64_t rel_, acq_;
  Memory* m_;
};
}  // namespace
int main(int argc, char** argv) {
  return run_main(argc, argv, {{"mp", [](const Arguments& a) -> std::unique_ptr<Program> {
                                  return std::make_unique<Mp>(a.get("rel", 1), a.get("acq", 1));
                                }}});
}
